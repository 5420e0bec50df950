import hashlib

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes.matching import copy_may_fail
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.window import Window
from tests.helpers.leaves import assert_same_bits, bits, randomise, values
from tests.helpers.models import Mixed, Tied
from tests.helpers.staging import Destination

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # said when torch.compile is first used
BY_LEAF, BY_STATE = WeightStrategy("tensordict"), WeightStrategy("state_dict")
SWITCHED = WeightStrategy("tensordict")  # as BY_LEAF, and leaves may be switched


@pytest.fixture(params=[BY_LEAF, BY_STATE, SWITCHED], ids=["tensordict", "state_dict", "switched"])
def strategy(request):
    return request.param


def layout_of(source, strategy=BY_LEAF):
    return WeightLayout.of(strategy.leaves(source))


def bound(target, source, strategy=BY_LEAF, *, strict=True, asked=None):
    return Destination(target, source, strategy, strict=strict, asked=asked, may_switch=strategy is SWITCHED)


def pushed(staged, source, *, keep_backup=False):
    staged.push(source, keep_backup=keep_backup)


def refused(target, source, *, strict=True, asked=None):
    """The error with which a target refuses a sender's layout, having been left as it was."""
    staged = StagedModel("policy", target, BY_LEAF, strict=strict)
    with pytest.raises(LayoutMismatchError) as caught:
        staged.bind(layout_of(source), strict=asked)
    assert staged.layout.leaves == ()
    assert "'policy' differs between sender and receiver" in str(caught.value)
    return caught.value


# --- what is carried, and what is left alone ------------------------------------------------------------------------


@pytest.mark.parametrize("keep_backup", [True, False])
def test_every_leaf_arrives_bit_for_bit_and_nothing_else_changes(strategy, keep_backup):
    torch.manual_seed(0)
    target, source = Mixed(), randomise(Mixed(), 4)
    source_before, cache = values(source), target.cache.clone()
    identities = {name: id(tensor) for name, tensor in target.state_dict(keep_vars=True).items()}
    grads = {name: parameter.requires_grad for name, parameter in target.named_parameters()}
    staged = bound(target, source, strategy)
    pushed(staged, source, keep_backup=keep_backup)
    assert_same_bits(dict(target.state_dict()), dict(source.state_dict()))
    assert {name: id(tensor) for name, tensor in target.state_dict(keep_vars=True).items()} == identities
    assert {name: parameter.requires_grad for name, parameter in target.named_parameters()} == grads
    assert bits(target.cache) == bits(cache)
    assert_same_bits(values(source), source_before)


def test_special_values_arrive_bit_for_bit(strategy):
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    raw = torch.tensor([0x7FC00001, -0x400000, -0x80000000, 1, 0x7F800000, 0x7F7FFFFF], dtype=torch.int32)
    with torch.no_grad():
        source.weight.copy_(raw.view(torch.float32).view(2, 3))  # NaNs with payloads, -0, a subnormal, inf, the largest
    pushed(bound(target, source, strategy), source)
    assert bits(target.weight) == bits(source.weight)
    assert target.weight.isnan().sum() == 2


def test_batchnorm_statistics_travel_and_the_outputs_are_equal(strategy):
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    staged = bound(target, source, strategy)
    for _ in range(20):
        source(torch.randn(8, 3) + 5)
    pushed(staged, source)
    assert (target.num_batches_tracked.dtype, target.num_batches_tracked.shape) == (torch.int64, ())
    assert target.num_batches_tracked.item() == 20
    assert torch.equal(target.running_mean, source.running_mean)
    assert target.running_mean.mean() > 3
    inputs = torch.randn(8, 3) + 5
    assert torch.equal(target(inputs), source.eval()(inputs))


def test_weights_arrive_through_every_wrapper(strategy):
    source, inner = randomise(nn.Linear(2, 2), 1), nn.Linear(2, 2)
    staged = bound(nn.DataParallel(torch.compile(inner)), torch.compile(nn.DataParallel(source)), strategy)
    pushed(staged, source)
    assert_same_bits(values(inner), values(source))


def test_a_buffer_that_is_not_persistent_on_one_side_only_is_told_or_ignored():
    class Net(nn.Module):
        def __init__(self, persistent):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.register_buffer("scale", torch.ones(1), persistent=persistent)

    target = Net(False)
    target.scale.fill_(7)
    pushed(bound(target, source := Net(True)), source)  # the receiver keeps its own on purpose
    assert target.scale.tolist() == [7.0]
    assert refused(Net(True), Net(False)).missing == ["scale"]


def test_non_contiguous_leaves_on_either_side_keep_their_strides(strategy):
    def net(transposed):
        module = nn.Linear(3, 2, bias=False)
        if transposed:
            module.weight = nn.Parameter(torch.randn(3, 2).t())
        return module

    for source, target in ((net(True), net(False)), (net(False), net(True)), (net(True), net(True))):
        strides = target.weight.stride()
        pushed(bound(target, source, strategy), source)
        assert torch.equal(target.weight, source.weight)
        assert target.weight.stride() == strides


def test_a_tensordict_or_a_dict_of_live_tensors_can_be_the_target(strategy):
    source = randomise(nn.Linear(2, 2), 3)
    flat = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    for target in (flat, TensorDict(flat)):
        flat["weight"].zero_()
        pushed(bound(target, source, strategy), source)
        assert torch.equal(flat["weight"], source.weight)
    staged = bound({"net": {"weight": flat["weight"]}}, {"net.weight": source.weight}, strategy)
    pushed(staged, {"net": {"weight": torch.full((2, 2), 5.0)}})
    assert flat["weight"].unique().tolist() == [5.0]


def test_a_model_that_was_built_in_inference_mode_takes_weights():
    with torch.inference_mode():
        target = nn.Linear(2, 2)
    source = randomise(nn.Linear(2, 2), 1)
    pushed(bound(target, source), source)
    assert_same_bits(values(target), values(source))


# --- agreeing on a layout -------------------------------------------------------------------------------------------


def test_missing_unexpected_and_mismatched_leaves_are_all_named_at_once():
    def net(**extra):
        return nn.ModuleDict({"body": nn.Linear(2, 2), **extra})

    target = net(wide=nn.Linear(2, 3), mine=nn.Linear(1, 1), narrow=nn.Linear(1, 1).bfloat16())
    before = values(target)
    error = refused(target, net(wide=nn.Linear(2, 4), theirs=nn.Linear(1, 1), narrow=nn.Linear(1, 1)))
    assert error.missing == ["mine.weight", "mine.bias"]
    assert error.unexpected == ["theirs.weight", "theirs.bias"]
    assert error.mismatched == {
        "wide.weight": "sender float32[4, 2], receiver float32[3, 2]",
        "wide.bias": "sender float32[4], receiver float32[3]",
        "narrow.weight": "sender float32[1, 1], receiver bfloat16[1, 1]",
        "narrow.bias": "sender float32[1], receiver bfloat16[1]",
    }
    assert all(name in str(error) for name in (*error.missing, *error.unexpected, *error.mismatched))
    assert "body.weight" not in str(error)
    assert_same_bits(values(target), before)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(6), torch.zeros(2, 3)),
        (torch.zeros(1), torch.zeros(())),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(2, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.uint8)),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float64)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_leaf_is_never_read_in_another_shape_or_dtype_even_of_equal_size(sender, receiver, strict):
    error = refused({"same": torch.zeros(1), "w": receiver}, {"same": torch.zeros(1), "w": sender}, strict=strict)
    assert list(error.mismatched) == ["w"]


@pytest.mark.parametrize(("own", "asked"), [(False, None), (False, True), (True, False)])
def test_without_strictness_a_subset_changes_and_the_rest_stays_bit_for_bit(strategy, own, asked):
    target = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.BatchNorm1d(2)})
    before = values(target)
    source = randomise(nn.ModuleDict({"actor": nn.Linear(2, 2)}), 2)
    pushed(bound(target, source, strategy, strict=own, asked=asked), source)
    assert_same_bits(values(target), before | values(source))


@pytest.mark.parametrize(("own", "asked"), [(True, None), (True, True)])
def test_where_both_sides_are_strict_a_subset_is_refused(own, asked):
    target = nn.ModuleDict({"actor": nn.Linear(2, 2), "critic": nn.Linear(1, 1)})
    error = refused(target, nn.ModuleDict({"actor": nn.Linear(2, 2)}), strict=own, asked=asked)
    assert error.missing == ["critic.weight", "critic.bias"]


def test_without_strictness_a_leaf_that_only_the_sender_has_is_still_refused():
    source = nn.ModuleDict({"actor": nn.Linear(2, 2), "extra": nn.Linear(1, 1)})
    error = refused(nn.ModuleDict({"actor": nn.Linear(2, 2)}), source, strict=False)
    assert error.unexpected == ["extra.weight", "extra.bias"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("target", [nn.Linear(1, 1), nn.ReLU()], ids=["with leaves", "without"])
def test_a_sender_that_has_nothing_for_the_target_is_refused(target, strict):
    assert "no leaf in common" in str(refused(target, {}, strict=strict))


def test_other_names_for_the_same_leaves_match_nothing_and_are_all_told():
    error = refused(nn.Linear(1, 1), {"base_layer.weight": torch.zeros(1, 1), "base_layer.bias": torch.zeros(1)})
    assert error.missing == ["weight", "bias"]
    assert error.unexpected == ["base_layer.weight", "base_layer.bias"]


def test_the_order_of_leaves_is_the_senders_and_does_not_matter():
    source = {"b": torch.tensor([2.0]), "a": torch.tensor([1.0, 1.0])}
    target = {"a": torch.zeros(2), "b": torch.zeros(1)}
    pushed(bound(target, source), source)
    assert {name: tensor.tolist() for name, tensor in target.items()} == {"a": [1.0, 1.0], "b": [2.0]}


def test_a_leaf_that_cannot_be_written_in_place_is_refused_before_anything_is():
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(1).expand(4))
    source = nn.Linear(2, 2)
    source.register_buffer("scale", torch.zeros(4))
    error = refused(module, source)
    assert error.mismatched == {"scale": "cannot be written in place: its elements share memory"}
    pushed(bound(source, module), module)  # to read it is fine
    assert source.scale.tolist() == [1.0] * 4


def test_binding_again_takes_the_new_layout(strategy):
    target = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    staged = bound(target, target, strategy)
    pushed(staged, target)
    again = bound(target, {"a": torch.zeros(2)}, strategy, strict=False)
    assert (staged.layout.nbytes, again.layout.nbytes) == (128, 64)
    staged.strict = False
    staged.bind(again.layout)
    filled = again.fill({"a": torch.ones(2)})
    staged.apply(filled.slot, filled.extra, keep_backup=False)
    assert (target["a"].tolist(), target["b"].tolist()) == ([1.0, 1.0], [0.0, 0.0])


# --- tied weights ---------------------------------------------------------------------------------------------------


def test_tied_on_both_sides_they_travel_once_and_stay_tied(strategy):
    source, target = randomise(Tied(), 1), Tied()
    staged = bound(target, source, strategy)
    assert [leaf.name for leaf in staged.layout.leaves] == ["encoder.weight", "encoder.bias"]
    pushed(staged, source)
    assert target.decoder.weight is target.encoder.weight
    assert_same_bits(values(target), values(source))
    source.encoder.weight.data.fill_(3)
    pushed(staged, source)
    assert target.decoder.weight.unique().tolist() == [3.0]


def test_tied_in_the_sender_only_both_of_the_receivers_leaves_get_the_value(strategy):
    source, target = randomise(Tied(), 1), Tied(tied=False)
    pushed(bound(target, source, strategy), source)
    assert_same_bits(values(target), values(source))
    assert target.decoder.weight is not target.encoder.weight


@pytest.mark.parametrize("strict", [True, False])
def test_tied_in_the_receiver_only_is_refused_since_one_tensor_cannot_hold_two_values(strict):
    error = refused(Tied(), Tied(tied=False), strict=strict)
    assert error.mismatched == {
        "decoder.weight": "tied to encoder.weight in the receiver, separate in the sender",
    }


# --- applying and rolling back --------------------------------------------------------------------------------------


def test_staging_touches_no_live_tensor(strategy):
    target, source = Mixed(), randomise(Mixed(), 2)
    staged = bound(target, source, strategy)
    before = values(target)
    staged.fill(source)
    assert_same_bits(values(target), before)


def test_rolling_back_restores_every_bit_and_identity(strategy):
    torch.manual_seed(1)
    target, source = Mixed(), randomise(Mixed(), 2)
    staged = bound(target, source, strategy)
    before = values(target)
    identities = {name: id(tensor) for name, tensor in target.state_dict(keep_vars=True).items()}
    staged.fill(source)
    staged.apply_filled(keep_backup=True)
    assert_same_bits(dict(target.state_dict()), dict(source.state_dict()))
    staged.roll_back()
    assert_same_bits(values(target), before)
    assert {name: id(tensor) for name, tensor in target.state_dict(keep_vars=True).items()} == identities
    target.net[0].weight.data.fill_(4)
    staged.roll_back()  # nothing is left to be undone
    assert target.net[0].weight.unique().tolist() == [4.0]


def test_a_version_that_is_in_force_is_never_rolled_back(strategy):
    target, source = Mixed(), randomise(Mixed(), 2)
    staged = bound(target, source, strategy)
    pushed(staged, source, keep_backup=True)
    staged.roll_back()
    assert_same_bits(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.parametrize("times", [1, 3])
def test_the_same_version_applied_several_times_is_that_version(strategy, times):
    target, source = Mixed(), randomise(Mixed(), 2)
    staged = bound(target, source, strategy)
    for _ in range(times):
        pushed(staged, source)
    assert_same_bits(dict(target.state_dict()), dict(source.state_dict()))


class Normaliser(nn.Module):
    """Puts a new tensor in its buffer's place at each step, as running statistics often do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))

    def step(self):
        self.count = self.count + 1
        self.mean = self.mean + 1.0


def test_buffers_that_the_model_has_replaced_since_connect_are_updated_and_rolled_back(strategy):
    source, target = Normaliser(), Normaliser()
    staged = bound(target, source, strategy)
    for _ in range(3):
        target.step()
    source.mean = torch.tensor([5.0, 6.0])
    staged.fill(source)
    staged.apply_filled(keep_backup=True)
    assert (target.mean.tolist(), target.count.item()) == ([5.0, 6.0], 0)
    staged.roll_back()
    assert (target.mean.tolist(), target.count.item()) == ([3.0, 3.0], 3)
    source.step()
    pushed(staged, source)
    assert (target.mean.tolist(), target.count.item()) == ([6.0, 7.0], 1)
    assert staged.digest() == bound(source, source, strategy).digest()


def test_parameters_that_were_replaced_since_connect_are_updated(strategy):
    source, target = randomise(nn.Linear(2, 2), 1), nn.Linear(2, 2)
    staged = bound(target, source, strategy)
    target.weight = nn.Parameter(torch.zeros(2, 2))
    pushed(staged, source)
    assert_same_bits(values(target), values(source))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(3, 2))),
        lambda m: m.__delattr__("weight"),
        lambda m: setattr(m.weight, "data", torch.zeros(1).expand(2, 2)),
    ],
    ids=["other dtype", "other shape", "gone", "not writable"],
)
def test_a_target_that_no_longer_fits_is_refused_whole(change):
    source, target = randomise(nn.Linear(2, 2), 1), nn.Linear(2, 2)
    staged = bound(target, source)
    staged.fill(source)
    change(target)
    before = values(target)
    with pytest.raises(LayoutMismatchError, match=r"'policy' differs between sender and receiver.*weight"):
        staged.apply_filled(keep_backup=False)
    staged.roll_back()
    assert_same_bits(values(target), before)


def test_a_target_of_another_dtype_is_refused_by_load_state_dict_too():
    source, target = randomise(nn.Linear(2, 2), 1), nn.Linear(2, 2)
    staged = bound(target, source, BY_STATE)
    staged.fill(source)
    target.double()
    with pytest.raises(LayoutMismatchError, match=r"weight: sender float32\[2, 2\], receiver float64\[2, 2\]; bias: "):
        staged.apply_filled(keep_backup=False)


class Derived(nn.Module):
    """Keeps twice its weight in its state, and a number that it derives from what it loads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.total = 2.0
        self.fail = False
        self.register_state_dict_post_hook(Derived._double)
        self.register_load_state_dict_pre_hook(Derived._halve)
        self.register_load_state_dict_post_hook(Derived._derive)

    @staticmethod
    def _double(module, state, prefix, metadata):
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    @staticmethod
    def _halve(module, state, prefix, *args):
        state[prefix + "weight"] = state[prefix + "weight"] / 2

    @staticmethod
    def _derive(module, incompatible):
        module.total = module.weight.sum().item()
        if module.fail:
            raise ZeroDivisionError("cannot derive")


def test_a_state_that_is_no_plain_tensor_of_the_model_goes_through_its_own_hooks():
    source, target = Derived(), Derived()
    with torch.no_grad():
        source.weight.copy_(torch.tensor([3.0, 4.0]))
    staged = bound(target, source, BY_STATE)
    for _ in range(3):
        pushed(staged, source)
        assert (target.weight.tolist(), target.total) == ([3.0, 4.0], 7.0)
    assert staged.digest() == hashlib.sha256(torch.tensor([6.0, 8.0]).numpy().tobytes()).hexdigest()


def test_rolling_back_a_state_restores_what_the_model_holds_now_and_derives_from_it():
    source, target = Derived(), Derived()
    staged = bound(target, source, BY_STATE)
    with torch.no_grad():
        source.weight.fill_(8.0)
        target.weight.copy_(torch.tensor([0.1, 0.7]))
    before = values(target)
    staged.fill(source)
    staged.apply_filled(keep_backup=False)
    assert target.total == 16.0
    staged.roll_back()
    assert_same_bits(values(target), before)
    assert target.total == pytest.approx(0.8)


def test_a_load_that_fails_half_way_is_rolled_back_although_the_hook_goes_on_failing():
    source, target = Derived(), Derived()
    staged = bound(target, source, BY_STATE)
    with torch.no_grad():
        source.weight.fill_(8.0)
    before = values(target)
    staged.fill(source)
    target.fail = True
    with pytest.raises(ZeroDivisionError):
        staged.apply_filled(keep_backup=False)
    assert target.weight.tolist() == [8.0, 8.0]
    staged.roll_back()
    assert_same_bits(values(target), before)


class Hoarder(nn.Module):
    """Keeps the very tensor that it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.mean = state_dict[prefix + "mean"]


def test_a_model_that_keeps_what_it_is_given_does_not_see_the_next_version_before_its_time():
    source, target = Hoarder(), Hoarder()
    source.mean.fill_(1)
    staged = bound(target, source, BY_STATE)
    pushed(staged, source)
    source.mean.fill_(2)
    staged.fill(source)
    assert target.mean.tolist() == [1.0, 1.0]
    staged.apply_filled(keep_backup=True)
    assert target.mean.tolist() == [2.0, 2.0]
    staged.roll_back()
    assert target.mean.tolist() == [1.0, 1.0]


def test_a_compiled_part_of_a_model_is_loaded_under_its_own_names():
    def net():
        return nn.ModuleDict({"inner": torch.compile(nn.Linear(2, 2)), "head": nn.Linear(1, 1)})

    source, target = net(), net()
    pushed(bound(target, source, BY_STATE), source)
    assert_same_bits(values(target), values(source))


# --- looking at it --------------------------------------------------------------------------------------------------


def test_the_digest_is_over_the_live_leaves_in_the_senders_order():
    source = {"b": torch.tensor([2.0]), "a": torch.tensor([1], dtype=torch.uint8)}
    staged = bound({"a": torch.tensor([7], dtype=torch.uint8), "b": torch.tensor([0.0])}, source)
    pushed(staged, source)
    assert staged.digest() == hashlib.sha256(torch.tensor([2.0]).numpy().tobytes() + b"\x01").hexdigest()


def test_the_digest_tells_equal_models_from_models_that_differ_in_one_bit(strategy):
    source, target = randomise(Mixed(), 1), Mixed()
    staged, reference = bound(target, source, strategy), bound(source, source, strategy)
    assert staged.digest() != reference.digest()
    pushed(staged, source)
    assert staged.digest() == reference.digest()
    target.steps += 1
    assert staged.digest() != reference.digest()


def test_the_digest_of_tied_and_of_untied_receivers_of_one_sender_are_equal():
    source = randomise(Tied(), 1)
    digests = set()
    for target in (Tied(), Tied(tied=False)):
        staged = bound(target, source)
        pushed(staged, source)
        digests.add(staged.digest())
    assert len(digests) == 1


def test_a_copy_is_nested_and_detached_and_does_not_follow():
    target = Mixed()
    staged = bound(target, target)
    copy = staged.copy()
    weight = target.net[0].weight.detach().clone()
    target.net[0].weight.data.fill_(9)
    assert isinstance(copy, TensorDict)
    assert torch.equal(copy["net", "0", "weight"], weight)
    assert not copy["net", "0", "weight"].requires_grad
    assert copy["steps"].shape == ()
    assert sorted(".".join(k if isinstance(k, tuple) else (k,)) for k in copy.keys(True, True)) == sorted(
        target.state_dict()
    )


# --- leaves that live in a window ------------------------------------------------------------------------------------


def switched(target, source):
    """A destination whose parameters are switched; the first version is in force."""
    staged = bound(target, source, SWITCHED)
    pushed(staged, source)
    assert staged.holds_slot
    return staged


def test_views_of_a_switched_leaf_follow_it_and_its_address_stays():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    view, address = target.weight.detach().t()[0], target.weight.data_ptr()
    for seed in (2, 3, 4):
        pushed(staged, randomise(source, seed))
        assert torch.equal(view, source.weight.detach().t()[0])
    assert target.weight.data_ptr() == address


def test_a_backward_pass_that_needs_the_weights_of_before_raises_as_after_a_copy():
    for strategy in (BY_LEAF, SWITCHED):
        source, target = (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        )
        staged = bound(target, source, strategy)
        pushed(staged, source)
        loss = target(torch.randn(3, 2)).sum()
        pushed(staged, source)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_target_that_is_trained_takes_weights_all_the_same():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    optimizer = torch.optim.Adam(target.parameters())
    for seed in (2, 3):
        target(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        pushed(staged, randomise(source, seed))
        assert_same_bits(values(target), values(source))
        assert target.weight.grad is not None and staged.holds_slot


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.share_memory(),
        lambda m: setattr(m.weight, "data", torch.zeros(2, 3)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(2, 3))),
        lambda m: m.load_state_dict(nn.Linear(3, 2).state_dict(), assign=True),
        lambda m: setattr(m.bias, "data", m.weight.data[:, 0]),
    ],
    ids=["share_memory", "data", "parameter", "assign", "a view of another leaf"],
)
def test_a_target_that_was_moved_out_of_the_window_takes_weights_all_the_same(change):
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    change(target)
    for seed in (2, 3):
        pushed(staged, randomise(source, seed))
        assert_same_bits(values(target), values(source))


def test_a_target_of_another_shape_in_the_same_memory_is_refused_and_left_alone():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    target.weight.data = target.weight.data[:1]
    before = values(target)
    with pytest.raises(LayoutMismatchError, match=r"weight: sender float32\[2, 3\], receiver float32\[1, 3\]"):
        pushed(staged, randomise(source, 2))
    assert_same_bits(values(target), before)


def test_what_the_target_wrote_into_its_weights_is_rolled_back_to():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    target.weight.data[0, 0] = 7
    before = values(target)
    staged.fill(randomise(source, 2))
    staged.apply_filled(keep_backup=True)
    assert_same_bits(values(target), values(source))
    staged.roll_back()
    assert_same_bits(values(target), before)


def test_the_first_version_can_be_rolled_back_too():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    before = values(target)
    staged = bound(target, source, SWITCHED)
    staged.fill(source)
    staged.apply_filled(keep_backup=True)
    staged.roll_back()
    assert_same_bits(values(target), before)


def test_until_the_first_version_the_target_lives_where_it_did():
    target = nn.Linear(3, 2)
    address = target.weight.data_ptr()
    bound(target, nn.Linear(3, 2), SWITCHED).fill()
    assert target.weight.data_ptr() == address


def test_a_detached_target_keeps_its_weights_and_its_ties():
    source, target = randomise(Tied(), 1), Tied()
    staged = switched(target, source)
    staged.detach()
    assert not staged.holds_slot
    assert target.decoder.weight is target.encoder.weight
    assert_same_bits(values(target), values(source))
    pushed(staged, randomise(source, 2))
    assert_same_bits(values(target), values(source))


def test_another_layout_moves_the_target_into_another_window():
    target = nn.ParameterDict({"a": torch.zeros(20), "b": torch.zeros(20)})
    staged = switched(target, {"a": torch.full((20,), 1.0), "b": torch.full((20,), 2.0)})
    other = bound(target, {"b": torch.full((20,), 4.0), "a": torch.full((20,), 3.0)}, SWITCHED)
    staged.bind(other.layout)
    filled = other.fill()
    staged.apply(filled.slot, filled.extra, keep_backup=False)
    assert (target["a"].unique().tolist(), target["b"].unique().tolist()) == ([3.0], [4.0])


# --- another object in the target's place ----------------------------------------------------------------------------


class Counting(nn.Module):
    """Has extra state."""

    def __init__(self, count=0, seed=0):
        super().__init__()
        self.inner = randomise(nn.Linear(3, 2), seed)
        self.count = count

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def test_another_target_takes_over_what_is_in_force_and_every_later_version(strategy):
    source, before, target = Counting(5, seed=1), Counting(), Counting(seed=7)
    staged = bound(before, source, strategy)
    pushed(staged, source)
    identities = [id(parameter) for parameter in target.parameters()]
    staged.rebind(target)
    assert staged.target is target
    held = values(before.inner)
    assert_same_bits(values(target.inner), held)
    assert (target.count, before.count) == (5, 5)
    source.count = 6
    for seed in (2, 3, 4, 5):  # each slot again
        randomise(source.inner, seed)
        pushed(staged, source)
        assert_same_bits(values(target.inner), values(source.inner))
        assert_same_bits(values(before.inner), held)
    assert (target.count, before.count) == (6, 5)
    assert [id(parameter) for parameter in target.parameters()] == identities
    assert staged.holds_slot == (strategy is SWITCHED)


def test_a_target_that_was_replaced_keeps_its_ties():
    def tied_by_memory():
        model = Tied(tied=False)
        model.decoder.weight.data = model.encoder.weight.data
        return model

    source, before, target = randomise(Tied(), 1), tied_by_memory(), tied_by_memory()
    staged = switched(before, source)
    staged.rebind(target)
    assert before.encoder.weight.data_ptr() == before.decoder.weight.data_ptr()
    pushed(staged, randomise(source, 2))
    assert target.encoder.weight.data_ptr() == target.decoder.weight.data_ptr()
    assert_same_bits(values(target), values(source))


def test_another_target_before_a_layout_is_bound_is_left_as_it_is():
    target = randomise(nn.Linear(3, 2), 2)
    held = values(target)
    staged = StagedModel("policy", nn.Linear(3, 2), SWITCHED, may_switch=True)
    staged.rebind(target)
    assert_same_bits(values(target), held)
    staged.bind(layout_of(target))


@pytest.mark.parametrize(
    "other",
    [nn.ModuleDict({"inner": nn.Linear(2, 2)}), nn.ModuleDict({"inner": nn.Linear(3, 2)})],
    ids=["shape", "extra state"],
)
def test_another_target_that_does_not_fit_is_refused_and_the_first_one_stays(other):
    source, target = Counting(5, seed=1), Counting()
    staged = switched(target, source)
    with pytest.raises(LayoutMismatchError):
        staged.rebind(other)
    assert staged.target is target
    randomise(source.inner, 2)
    pushed(staged, source)
    assert_same_bits(values(target.inner), values(source.inner))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda m: m.share_memory(), lambda m: setattr(m.weight, "data", m.weight.data.clone())),
        (
            lambda m: setattr(m.weight, "data", m.weight.data.t().contiguous().t()),
            lambda m: setattr(m.weight, "data", m.weight.data.contiguous()),
        ),
        (lambda m: m.float(), lambda m: m.bfloat16()),
    ],
    ids=["in shared memory", "not contiguous", "of another dtype"],
)
def test_a_target_that_said_at_first_that_it_holds_no_slot_never_lives_in_one(before, after):
    """The sender writes the slots of such a worker again while the worker's policy runs."""
    source, target = nn.Linear(3, 2, bias=False).bfloat16(), nn.Linear(3, 2, bias=False).bfloat16()
    before(target)
    staged = StagedModel("policy", target, BY_LEAF, may_switch=True)
    staged.bind(layout_of(source), casts=True)
    assert not staged.holds_slot
    after(target)
    assert target.weight.is_contiguous() and not target.weight.is_shared()
    filled = Destination(nn.Linear(3, 2, bias=False).bfloat16(), randomise(source, 1)).fill()
    staged.apply(filled.slot, filled.extra, keep_backup=False)
    assert not staged.holds_slot
    assert_same_bits(values(target), values(source.to(target.weight.dtype)))


# --- failures half-way, with nothing that asked for a backup ---------------------------------------------------------


def test_a_first_version_that_cannot_be_shown_leaves_the_target_as_it_was(monkeypatch):
    source, target = randomise(Mixed(), 1), Mixed()
    before, addresses = values(target), [parameter.data_ptr() for parameter in target.parameters()]
    view = target.net[0].weight.detach().view(-1)
    staged = bound(target, source, SWITCHED)
    staged.fill()

    def cannot(*args, **kwargs):
        raise OSError("too many mappings")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
        patch.setattr(Window, "show", cannot)
        staged.apply_filled(keep_backup=False)
    staged.roll_back()
    assert_same_bits(values(target), before)
    assert [parameter.data_ptr() for parameter in target.parameters()] == addresses
    target.net[0].weight.data.fill_(3)
    assert view.unique().tolist() == [3.0]
    pushed(staged, source)
    assert_same_bits(dict(target.state_dict()), dict(source.state_dict()))


class Fragile(torch.Tensor):
    """Somebody's tensor, to which the next copy fails, when those before it have been made."""

    broken = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if cls.broken and function is torch._foreach_copy_:
            cls.broken = False
            torch._foreach_copy_(args[0][:-1], args[1][:-1])
            raise MemoryError("no room on the device")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_copy_that_fails_after_other_leaves_were_switched_and_copied_is_undone():
    def net(wrap):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        module.register_buffer("far", wrap(torch.ones(2)))
        return module

    source, target = net(torch.Tensor.clone), net(lambda tensor: tensor.as_subclass(Fragile))
    staged = bound(target, source, SWITCHED)
    for seed in (1, 2):
        pushed(staged, randomise(source, seed))
    assert staged.holds_slot
    before = values(target)
    staged.fill(randomise(source, 3))
    Fragile.broken = True
    with pytest.raises(MemoryError):
        staged.apply_filled(keep_backup=False)
    assert bits(target[0].weight) == bits(source[0].weight)
    staged.roll_back()
    assert_same_bits(values(target), before)
    pushed(staged, source)
    assert bits(target[0].weight) == bits(source[0].weight)


@pytest.mark.parametrize(
    ("tensor", "may_fail"),
    [
        (torch.zeros(2, 3), False),
        (torch.zeros(2, 3, dtype=torch.bfloat16), False),
        (torch.zeros(3, 2).t(), False),
        (torch.zeros(2, 3, device="meta"), False),  # stands for a device: to write there is a transfer
        (torch.zeros(2, 3, dtype=torch.bfloat16, device="meta"), True),
        (torch.zeros(3, 2, device="meta").t(), True),
        (torch.zeros(2, 3).as_subclass(Fragile), True),
    ],
)
def test_a_copy_may_fail_where_it_needs_memory_of_a_device_or_somebody_elses_code(tensor, may_fail):
    (leaf,) = WeightLayout.of({"": torch.zeros(2, 3)}).leaves
    assert copy_may_fail(tensor, leaf) is may_fail


def test_a_layout_that_is_refused_changes_nothing_of_what_was_agreed_on():
    source, target = randomise(nn.Linear(3, 2), 1), nn.Linear(3, 2)
    staged = switched(target, source)
    other = layout_of(nn.Linear(4, 2))
    with pytest.raises(LayoutMismatchError):
        staged.bind(other, extra_keys=["x"], casts=True, strict=False, may_hold=False)
    pushed(staged, randomise(source, 2))
    assert_same_bits(values(target), values(source))
    assert staged.holds_slot and staged.strict
    target.double()
    with pytest.raises(LayoutMismatchError):
        pushed(staged, source)
