"""What the sender reads: the right leaves, their bytes, and nothing is changed."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.transports.slots import SlotPool
from tests.helpers.leaves import bits, randomise, values
from tests.helpers.models import Mixed, Tied, WithExtraState

BY_LEAF, BY_STATE = WeightStrategy("tensordict"), WeightStrategy("state_dict")
both_strategies = pytest.mark.parametrize("strategy", [BY_LEAF, BY_STATE], ids=["tensordict", "state_dict"])


def source_of(weights, strategy=BY_LEAF, wire_dtype=None, model_id="policy"):
    return Source(model_id, weights, strategy, wire_dtype)


def read(source, weights=None, fill=0):
    """The slot after one snapshot; each leaf of it by its name."""
    slot = SlotPool(source.layout, 1, shared=False).try_acquire("test")
    slot.memory.fill_(fill)
    source.read(slot, weights)
    return slot.memory, source.layout.views(slot.memory)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_the_slot_holds_the_leaves_bytes_and_does_not_follow_the_source():
    weights = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.int16)}
    memory, views = read(source_of(weights))
    weights["a"].fill_(9)
    assert (views["a"].tolist(), views["b"].item()) == ([1.0, 2.0], 3)
    assert memory[64:66].tolist() == [3, 0]


@both_strategies
def test_a_module_that_is_being_trained_is_left_without_a_trace(strategy):
    module = nn.Linear(2, 2)
    loss = module(torch.ones(1, 2)).sum()
    versions = [parameter._version for parameter in module.parameters()]
    before = values(module)
    read(source_of(module, strategy))
    loss.backward()
    assert [parameter._version for parameter in module.parameters()] == versions
    assert module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert {name: bits(tensor) for name, tensor in values(module).items()} == {
        name: bits(tensor) for name, tensor in before.items()
    }


def test_a_module_may_be_given_for_a_dict_and_a_dict_for_a_module():
    module = randomise(Mixed(), 2)
    source = source_of(module)
    slots = [
        read(source)[0],
        read(source, module)[0],
        read(source, dict(module.state_dict()))[0],
        read(source, BY_LEAF.extract_weights(module))[0],
        read(source_of(module, BY_STATE))[0],
        read(source_of(dict(module.state_dict())), module)[0],
    ]
    assert all(torch.equal(slots[0], slot) for slot in slots[1:])


@both_strategies
def test_another_model_of_the_same_layout_may_be_given_each_time(strategy):
    source = source_of(randomise(Mixed(), 1), strategy)
    for seed in (2, 3):
        other = randomise(Mixed(), seed)
        _, views = read(source, other)
        assert {n: bits(v) for n, v in views.items()} == {n: bits(v) for n, v in other.state_dict().items()}


@both_strategies
def test_bound_weights_are_read_anew_each_time(strategy):
    module = nn.Linear(2, 2)
    source = source_of(module, strategy)
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.weight.fill_(value)
        assert read(source)[1]["weight"].unique().tolist() == [value]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).t(),
        lambda: torch.arange(12.0).view(3, 4)[:, ::2],
        lambda: torch.tensor([[5.0], [6.0], [7.0]]).expand(3, 2),
        lambda: torch.arange(7.0)[1:].view(3, 2),
        lambda: torch.conj(torch.tensor([[1 + 2j], [3 - 4j]])),
        lambda: torch.tensor(5, dtype=torch.int64),
        lambda: torch.empty(0, 3),
    ],
    ids=["transposed", "strided", "expanded", "offset", "conjugated", "0-dim", "empty"],
)
def test_a_leaf_of_any_strides_arrives_by_value(make):
    tensor = make()
    _, views = read(source_of({"a": tensor, "b": torch.ones(1)}))
    assert views["a"].tolist() == tensor.tolist()
    assert views["b"].tolist() == [1.0]


def test_weights_built_in_inference_mode_are_read():
    with torch.inference_mode():
        module = nn.Linear(2, 2)
    assert bits(read(source_of(module))[1]["weight"]) == bits(module.weight)


# --- wire_dtype -----------------------------------------------------------------------------------------------------


def test_floating_leaves_travel_in_the_wire_dtype_and_all_others_as_they_are():
    weights = {
        "single": torch.tensor([1.0, 3.14159, 1e38]),
        "double": torch.tensor([2.71828], dtype=torch.float64),
        "count": torch.tensor([2**40 + 1]),
        "mask": torch.tensor([True, False]),
        "wave": torch.tensor([1 + 2j]),
    }
    source = source_of(weights, wire_dtype=torch.bfloat16)
    assert {leaf.name: leaf.dtype for leaf in source.layout.leaves} == {
        "single": "bfloat16", "double": "bfloat16", "count": "int64", "mask": "bool", "wave": "complex64",
    }  # fmt: skip
    _, views = read(source)
    assert bits(views["single"]) == bits(weights["single"].bfloat16())
    assert bits(views["double"]) == bits(weights["double"].bfloat16())
    for name in ("count", "mask", "wave"):
        assert bits(views[name]) == bits(weights[name])


def test_with_a_wire_dtype_weights_still_have_to_be_of_the_dtype_that_was_agreed_on():
    source = source_of({"a": torch.zeros(2)}, wire_dtype=torch.bfloat16)
    with pytest.raises(LayoutMismatchError) as caught:
        read(source, {"a": torch.zeros(2, dtype=torch.float64)})
    assert caught.value.mismatched == {"a": "given float64[2], agreed float32[2]"}


# --- weights that are not those of connect --------------------------------------------------------------------------


def test_weights_that_changed_since_connect_are_refused_leaf_by_leaf_and_the_slot_is_left_alone():
    agreed = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1), "d": torch.tensor(0)}
    source = source_of(agreed, model_id="critic")
    slot = SlotPool(source.layout, 1, shared=False).try_acquire("test")
    slot.memory.fill_(7)
    changed = {
        "a": torch.zeros(3),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "d": torch.tensor([0]),
        "e": torch.zeros(1),
    }
    with pytest.raises(LayoutMismatchError, match="'critic' are not those of connect") as caught:
        source.read(slot, changed)
    error = caught.value
    assert (error.missing, error.unexpected) == (["c"], ["e"])
    assert error.mismatched == {
        "a": "given float32[3], agreed float32[2]",
        "b": "given bfloat16[3], agreed float32[3]",
        "d": "given int64[1], agreed int64[]",
    }
    assert all(f"{name}" in str(error) for name in "abcde")
    assert slot.memory.unique().tolist() == [7]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3, 2))), ([], [], ["weight"])),
        (lambda m: setattr(m.weight, "data", torch.zeros(3, 2)), ([], [], ["weight"])),
        (lambda m: m.double(), ([], [], ["weight", "bias"])),
        (lambda m: m.__delattr__("bias"), (["bias"], [], [])),
        (lambda m: setattr(m, "more", nn.Linear(1, 1)), ([], ["more.weight", "more.bias"], [])),
        (lambda m: m.register_buffer("mean", torch.zeros(1)), ([], ["mean"], [])),
    ],
    ids=["another parameter", "other data", "dtype", "a leaf fewer", "a submodule more", "a buffer more"],
)
@both_strategies
def test_a_bound_module_that_has_changed_is_refused_by_name(strategy, change, error):
    module = nn.Linear(2, 2)
    source = source_of(module, strategy)
    read(source)
    change(module)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(LayoutMismatchError) as caught:
            read(source)
        found = caught.value
        assert (found.missing, found.unexpected, list(found.mismatched)) == error


@both_strategies
def test_a_parameter_that_was_put_in_the_place_of_another_is_read(strategy):
    module = nn.Linear(2, 2)
    source = source_of(module, strategy)
    module.weight = nn.Parameter(torch.full((2, 2), 5.0))
    assert read(source)[1]["weight"].unique().tolist() == [5.0]
    module.load_state_dict({"weight": torch.full((2, 2), 6.0), "bias": torch.full((2,), 7.0)}, assign=True)
    _, views = read(source)
    assert (views["weight"].unique().tolist(), views["bias"].unique().tolist()) == ([6.0], [7.0])


def test_a_buffer_that_the_module_replaces_at_each_step_is_read():
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(2))
    source = source_of(module)
    for value in (1.0, 2.0):
        module.mean = torch.full((2,), value)
        assert read(source)[1]["mean"].tolist() == [value] * 2


@pytest.mark.parametrize("form", [dict, TensorDict])
def test_a_tensor_that_was_put_in_the_place_of_another_in_a_bound_dict_is_read(form):
    weights = form({"net": form({"a": torch.zeros(2)})})
    source = source_of(weights)
    weights["net"]["a"] = torch.ones(2)
    assert read(source)[1]["net.a"].tolist() == [1.0, 1.0]
    weights["net"]["b"] = torch.ones(2)
    with pytest.raises(LayoutMismatchError) as caught:
        read(source)
    assert caught.value.unexpected == ["net.b"]


def test_a_state_that_is_computed_each_time_is_read_each_time():
    class Doubled(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_state_dict_post_hook(Doubled._double)

        @staticmethod
        def _double(module, state, prefix, metadata):
            state[prefix + "weight"] = state[prefix + "weight"] * 2

    module = Doubled()
    source = source_of(module, BY_STATE)
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.weight.fill_(value)
        assert read(source)[1]["weight"].unique().tolist() == [2 * value]


# --- tied weights ---------------------------------------------------------------------------------------------------


@both_strategies
def test_weights_that_were_tied_at_connect_and_are_not_any_more_are_refused(strategy):
    module = randomise(Tied(), 1)
    source = source_of(module, strategy)
    module.decoder.weight = nn.Parameter(module.encoder.weight.detach().clone())
    read(source)  # equal values: nothing is lost yet
    with torch.no_grad():
        module.decoder.weight[0, 0] += 1
    with pytest.raises(LayoutMismatchError, match=r"decoder\.weight: was tied to encoder\.weight"):
        read(source)


def test_copies_of_tied_weights_that_hold_nan_are_still_equal():
    module = Tied()
    with torch.no_grad():
        module.encoder.weight[0, 0] = float("nan")
    _, views = read(source_of(module), {name: tensor.clone() for name, tensor in module.state_dict().items()})
    assert bits(views["encoder.weight"]) == bits(module.encoder.weight)


def test_copies_of_tied_weights_of_another_dtype_are_refused_by_name():
    module = Tied()
    given = dict(module.state_dict()) | {"decoder.weight": module.encoder.weight.detach().double()}
    with pytest.raises(LayoutMismatchError) as caught:
        read(source_of(module), given)
    assert list(caught.value.mismatched) == ["decoder.weight"]


# --- extra state ----------------------------------------------------------------------------------------------------


def test_a_module_with_other_extra_states_than_at_connect_is_refused_and_a_dict_carries_none():
    module = nn.ModuleDict({"a": WithExtraState(), "b": nn.Linear(1, 1)})
    source = source_of(module)
    assert source.extra_keys == ["a._extra_state"]
    slot = SlotPool(source.layout, 1, shared=False).try_acquire("test")
    assert source.read(slot) != b""
    assert source.read(slot, {"b": dict(module["b"].state_dict())}) == b""
    other = nn.ModuleDict({"a": nn.Identity(), "b": nn.Linear(1, 1)})
    with pytest.raises(LayoutMismatchError) as caught:
        source.read(slot, other)
    assert caught.value.missing == ["a._extra_state"]
    other["c"] = WithExtraState()
    with pytest.raises(LayoutMismatchError) as caught:
        source.read(slot, other)
    assert (caught.value.missing, caught.value.unexpected) == (["a._extra_state"], ["c._extra_state"])
