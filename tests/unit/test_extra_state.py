"""Extra state travels as bytes that the weights-only loader reads, or not at all."""

import io

import pytest
import torch
from torch import nn

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes import extra_state
from lightning_weightsync.schemes.extra_state import pack, stateful_parts, unpack
from tests.helpers.staging import Destination


class Stateful(nn.Module):
    def __init__(self, state=None, *, fail=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = state
        self.fail = fail

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state
        if self.fail:
            raise ZeroDivisionError("cannot take it")


class Arbitrary:
    pass


def carried(state):
    return unpack(pack({"_extra_state": Stateful(state)}))["_extra_state"]


# --- on the way -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        None, 3, 2.5, "text", True, b"bytes", [1, [2]], (1, 2), {"n": 3, "deep": {"a": [1]}}, {1: 2}, set(),
        torch.Size([2, 3]), torch.float16,
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_arrive_as_they_were(state):
    arrived = carried(state)
    assert arrived == state and type(arrived) is type(state)


def test_tensors_in_it_arrive_bit_for_bit_and_do_not_follow_the_source():
    mean = torch.tensor([float("nan"), -0.0, 1e-42])
    arrived = carried({"n": 3, "mean": mean})
    before = mean.view(torch.int32).tolist()
    mean.zero_()
    assert arrived["n"] == 3
    assert arrived["mean"].view(torch.int32).tolist() == before


def test_without_any_there_are_no_bytes():
    assert (pack({}), unpack(b"")) == (b"", {})


def test_parts_are_found_at_any_depth_under_their_state_dict_keys_and_through_wrappers():
    module = nn.ModuleDict({"a": Stateful(), "b": nn.Sequential(nn.Linear(1, 1), Stateful())})
    keys = [key for key in module.state_dict() if key.endswith("_extra_state")]
    assert list(stateful_parts(module)) == keys == ["a._extra_state", "b.1._extra_state"]
    assert list(stateful_parts(torch.compile(nn.DataParallel(module)))) == keys
    module["a"] = torch.compile(module["a"])
    assert list(stateful_parts(module)) == keys
    assert list(stateful_parts(Stateful())) == ["_extra_state"]
    assert stateful_parts(nn.Linear(1, 1)) == stateful_parts({"_extra_state": torch.zeros(1)}) == {}


@pytest.mark.parametrize("state", [Arbitrary(), {"deep": [Arbitrary()]}, lambda: 0], ids=["object", "nested", "lambda"])
def test_what_the_weights_only_loader_refuses_is_refused_by_the_sender_and_names_the_module(state):
    parts = stateful_parts(nn.ModuleDict({"fine": Stateful(1), "odd": Stateful(state)}))
    with pytest.raises(TypeError, match=r"the extra state of 'odd' \(Stateful\) cannot be carried: torch\.load"):
        pack(parts)


def test_bytes_that_would_run_code_are_not_loaded():
    class Trap:
        def __reduce__(self):
            return print, ("trapped",)

    data = io.BytesIO()
    torch.save({"_extra_state": Trap()}, data)
    with pytest.raises(Exception, match=r"[Ww]eights.only|Unsupported"):
        unpack(data.getvalue())


def test_a_state_above_the_cap_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(extra_state, "MAX_BLOB", 4000)
    with pytest.raises(TypeError, match=r"takes \d+ bytes; at most 4000"):
        pack(stateful_parts(nn.ModuleDict({"big": Stateful(torch.zeros(2000))})))


# --- into a model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may_switch", [False, True])
def test_each_push_brings_the_state_of_its_time_and_the_source_keeps_its_own(may_switch):
    source, target = Stateful({"n": 0}), Stateful()
    staged = Destination(target, source, may_switch=may_switch)
    for n in (1, 2, 3):
        source.state = {"n": n, "mean": torch.full((2,), float(n))}
        staged.push()
        assert target.state["n"] == n and target.state["mean"].tolist() == [n, n]
        assert "_extra_state" in source.state_dict() and source.state["n"] == n
        assert target.state is not source.state


def test_rolling_back_restores_the_state_too():
    source, target = nn.ModuleList([Stateful([1]), Stateful([2])]), nn.ModuleList([Stateful([3]), Stateful([4])])
    staged = Destination(target, source)
    source[0].weight.data.fill_(1)
    staged.fill()
    staged.apply_filled(keep_backup=True)
    assert [part.state for part in target] == [[1], [2]]
    staged.roll_back()
    assert [part.state for part in target] == [[3], [4]]
    assert target[0].weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("may_switch", [False, True])
def test_a_state_that_the_model_does_not_take_rolls_back_the_states_and_the_weights_before_it(may_switch):
    source = nn.ModuleList([Stateful([1]), Stateful([2])])
    target = nn.ModuleList([Stateful([3]), Stateful([4], fail=True)])
    staged = Destination(target, source, may_switch=may_switch)
    source[0].weight.data.fill_(1)
    staged.fill()
    with pytest.raises(ZeroDivisionError):
        staged.apply_filled(keep_backup=False)
    target[1].fail = False
    staged.roll_back()
    assert [part.state for part in target] == [[3], [4]]
    assert target[0].weight.tolist() == [0.0, 0.0]


def test_a_state_that_only_one_side_has_is_a_mismatch_and_names_it():
    def both(first, second):
        return nn.ModuleDict({"body": first, "head": second})

    plain = nn.Module()
    plain.weight = nn.Parameter(torch.zeros(2))
    for target, source, kind in (
        (both(Stateful(), Stateful()), both(Stateful(), plain), "missing"),
        (both(Stateful(), plain), both(Stateful(), Stateful()), "unexpected"),
    ):
        with pytest.raises(LayoutMismatchError, match=r"head\._extra_state") as caught:
            Destination(target, source)
        assert getattr(caught.value, kind) == ["head._extra_state"]


def test_weights_from_a_dict_leave_the_state_alone():
    target = Stateful([7])
    staged = Destination(target, Stateful([8]))
    staged.push({"weight": torch.ones(2)})
    assert (target.state, target.weight.tolist()) == ([7], [1.0, 1.0])


def test_only_whole_parts_of_a_name_are_taken_for_those_of_a_compiled_module():
    module = nn.ModuleDict({"my_orig_mod": Stateful(), "plain": torch.compile(Stateful())})
    assert list(stateful_parts(module)) == ["my_orig_mod._extra_state", "plain._extra_state"]
