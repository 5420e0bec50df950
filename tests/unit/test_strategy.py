import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.utils import parametrizations

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes.strategy import (
    WeightStrategy,
    clean_name,
    load_state,
    nested,
    non_persistent,
    same_values,
    unwrap,
)
from lightning_weightsync.schemes.writing import write
from tests.helpers.leaves import assert_same_bits, bits, randomise, values
from tests.helpers.models import Mixed, Tied, WithExtraState

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # said when torch.compile is first used


@pytest.fixture(params=["tensordict", "state_dict"])
def strategy(request):
    return WeightStrategy(request.param)


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


NET = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


class CompiledInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(net())
        self.head = nn.Linear(1, 1)


def test_an_unknown_strategy_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'tensor_dict'.*'tensordict'.*'state_dict'"):
        WeightStrategy("tensor_dict")


def test_the_leaves_of_a_module_are_those_of_its_state_dict_by_name_order_and_identity(strategy):
    module = Mixed()
    state = module.state_dict(keep_vars=True)
    leaves = strategy.leaves(module)
    assert list(leaves) == list(state)
    assert all(leaves[name] is state[name] for name in state)
    assert "cache" not in leaves and "nothing" not in leaves


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        torch.compile,
        nn.DataParallel,
        lambda m: nn.DataParallel(torch.compile(m)),
        lambda m: torch.compile(nn.DataParallel(m)),
        lambda m: nn.DataParallel(nn.DataParallel(m)),
    ],
    ids=["bare", "compiled", "parallel", "parallel compiled", "compiled parallel", "parallel twice"],
)
def test_no_wrapper_leaves_a_prefix(strategy, wrap):
    module = net()
    wrapped = wrap(module)
    leaves = strategy.leaves(wrapped)
    assert list(leaves) == NET
    assert all(leaf is module.state_dict(keep_vars=True)[name] for name, leaf in leaves.items())
    assert unwrap(wrapped) is module
    strategy.apply_weights(wrapped, {name: torch.ones_like(leaf) for name, leaf in leaves.items()})
    assert module[0].bias.tolist() == [1.0, 1.0, 1.0]


def test_a_compiled_submodule_leaves_no_prefix_and_takes_weights(strategy):
    module = CompiledInside()
    leaves = strategy.leaves(module)
    assert list(leaves) == [f"inner.{name}" for name in NET] + ["head.weight", "head.bias"]
    strategy.apply_weights(module, {name: torch.full_like(leaf, 2) for name, leaf in leaves.items()})
    assert unwrap(module.inner)[0].weight.unique().tolist() == [2.0]


def test_a_name_that_only_looks_like_a_compiled_one_is_kept(strategy):
    module = nn.ModuleDict({"my_orig_mod": nn.Linear(1, 1), "_orig_mode": nn.Linear(1, 1), "my": nn.Linear(1, 1)})
    assert list(strategy.leaves(module)) == list(module.state_dict())
    assert clean_name("a._orig_mod.b._orig_mod.c") == "a.b.c"
    assert clean_name("a_orig_mod.b") == "a_orig_mod.b"


def test_an_attribute_that_is_called_module_is_no_wrapper(strategy):
    wrapped = TensorDictModule(net(), in_keys=["a"], out_keys=["b"])
    assert list(strategy.leaves(wrapped)) == [f"module.{name}" for name in NET]


def test_shared_modules_are_listed_under_each_of_their_names(strategy):
    shared = nn.Linear(1, 1)
    module = nn.ModuleDict({"a": shared, "b": shared})
    leaves = strategy.leaves(module)
    assert list(leaves) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert leaves["a.weight"] is leaves["b.weight"]


def test_a_tensordict_a_nested_and_a_flat_dict_have_the_names_of_the_module(strategy):
    module = net()
    expected = dict(module.state_dict(keep_vars=True))
    flat = dict(expected)
    deep = {"0": {"weight": flat["0.weight"], "bias": flat["0.bias"]}, "1": TensorDict.from_module(module)["1"]}
    for source in (TensorDict.from_module(module), flat, deep, {"0": deep["0"], **flat_of_one(flat)}):
        leaves = strategy.leaves(source)
        assert sorted(leaves) == sorted(NET)
        assert all(leaves[name] is expected[name] for name in NET)


def flat_of_one(flat):
    return {name: tensor for name, tensor in flat.items() if name.startswith("1.")}


@pytest.mark.parametrize("as_module", [False, True])
def test_parameters_that_live_in_a_tensordict_are_leaves_too(strategy, as_module):
    params = TensorDict.from_module(net(), as_module=as_module)
    if not as_module:
        params = TensorDictParams(params)
    assert sorted(strategy.leaves(params)) == sorted(NET)
    holder = nn.Module()
    holder.actor_params = params
    assert sorted(strategy.leaves(holder)) == sorted(f"actor_params.{name}" for name in NET)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ([1, 2], "not list"),
        (None, "not NoneType"),
        (torch.zeros(2), "not Tensor"),
        ({"a": {"b": 3}}, r"a\.b is int"),
        ({"a": None}, "a is NoneType"),
        ({"a": [torch.zeros(1)]}, "a is list"),
        (TensorDict({"a": {"b": NonTensorData("text")}}), r"a\.b is \w+, not a tensor"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_is_no_tensor_is_named(strategy, source, told):
    with pytest.raises(TypeError, match=told):
        strategy.leaves(source)


def test_two_leaves_of_one_name_are_refused(strategy):
    with pytest.raises(ValueError, match=r"two leaves have the name 'a\.b'"):
        strategy.leaves({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})


def test_a_module_that_was_never_called_is_refused_by_the_name_of_its_leaf(strategy):
    for lazy, leaf in ((nn.LazyLinear(2), "weight"), (nn.LazyBatchNorm1d(), "weight")):
        with pytest.raises(ValueError, match=rf"1\.{leaf} is not initialised yet"):
            strategy.leaves(nn.Sequential(nn.Linear(1, 1), lazy))
    initialised = nn.LazyLinear(2)
    initialised(torch.zeros(1, 3))
    assert list(strategy.leaves(initialised)) == ["weight", "bias"]


def test_extra_state_is_no_leaf(strategy):
    module = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(1, 1), WithExtraState())})
    assert "encoder.1._extra_state" in module.state_dict()
    for source in (module, module.state_dict()):
        assert list(strategy.leaves(source)) == ["encoder.0.weight", "encoder.0.bias"]
    assert strategy.leaves(WithExtraState()) == {}


def test_a_parameter_that_a_sharding_engine_has_emptied_is_refused_and_an_empty_one_is_not(strategy):
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(torch.empty(0))
    assert strategy.leaves(module)["0.weight"].shape == (0,)
    module[0].weight.ds_id = 4
    with pytest.raises(ValueError, match=r"0\.weight belongs to a sharding engine"):
        strategy.leaves(module)


def test_buffers_that_are_not_persistent_are_known_by_name():
    module = nn.Sequential(Mixed(), torch.compile(Mixed()))
    assert non_persistent(module) == {"0.cache", "1.cache"}
    assert non_persistent(torch.compile(Mixed())) == {"cache"}


def test_extracted_weights_are_detached_references():
    module = net()
    flat = WeightStrategy("state_dict").extract_weights(module)
    deep = WeightStrategy("tensordict").extract_weights(module)
    assert list(flat) == NET
    assert isinstance(deep, TensorDict)
    for name in NET:
        leaf = deep[tuple(name.split("."))]
        assert (leaf.requires_grad, flat[name].requires_grad) == (False, False)
        assert leaf.data_ptr() == flat[name].data_ptr() == module.state_dict()[name].data_ptr()


def test_nesting_names_gives_a_tree_of_the_same_tensors():
    tree = nested({"a.b.c": (x := torch.zeros(1)), "a.d": (y := torch.ones(2)), "e": (z := torch.tensor(3))})
    assert tree.batch_size == torch.Size([])
    assert (tree["a", "b", "c"] is x, tree["a", "d"] is y, tree["e"] is z) == (True, True, True)


@pytest.mark.parametrize("inplace", [True, False])
def test_applying_weights_copies_every_leaf_and_keeps_every_identity(strategy, inplace):
    model, source = Mixed(), randomise(Mixed(), 5)
    identities = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    grads = {name: tensor.requires_grad for name, tensor in model.named_parameters()}
    cache = model.cache.clone()
    before = values(source)
    strategy.apply_weights(model, source, inplace=inplace)
    assert_same_bits(dict(model.state_dict()), dict(source.state_dict()))
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == identities
    assert {name: tensor.requires_grad for name, tensor in model.named_parameters()} == grads
    assert bits(model.cache) == bits(cache)
    assert_same_bits(values(source), before)


def test_weights_that_do_not_fit_are_refused_leaf_by_leaf_and_nothing_is_copied(strategy):
    model = Mixed()
    before = values(model)
    weights = dict(randomise(Mixed(), 3).state_dict())
    del weights["steps"], weights["net.0.bias"]
    weights |= {
        "net.0.weight": torch.zeros(4, 2),
        "narrow": torch.zeros(5),
        "head.weight": torch.zeros(1),
        "mask": torch.zeros(3, dtype=torch.uint8),
    }
    with pytest.raises(LayoutMismatchError) as caught:
        strategy.apply_weights(model, weights)
    error = caught.value
    assert error.missing == ["steps", "net.0.bias"]
    assert error.unexpected == ["head.weight"]
    assert error.mismatched == {
        "narrow": "given float32[5], model bfloat16[5]",
        "mask": "given uint8[3], model bool[3]",
        "net.0.weight": "given float32[4, 2], model float32[4, 3]",
    }
    for name in ("steps", "net.0.bias", "head.weight", "narrow", "mask", "net.0.weight"):
        assert name in str(error)
    assert_same_bits(values(model), before)


def test_tied_weights_are_applied_once_and_two_values_for_one_tensor_are_refused(strategy):
    model = Tied()
    one, other = torch.full((3, 3), 2.0), torch.full((3, 3), 3.0)
    bias = torch.zeros(3)
    strategy.apply_weights(model, {"encoder.weight": one, "encoder.bias": bias, "decoder.weight": one.clone()})
    assert model.decoder.weight is model.encoder.weight
    assert model.encoder.weight.unique().tolist() == [2.0]
    with pytest.raises(LayoutMismatchError, match=r"decoder\.weight: tied to encoder\.weight in the model"):
        strategy.apply_weights(model, {"encoder.weight": one, "encoder.bias": bias, "decoder.weight": other})
    assert model.encoder.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize("legacy", [False, True], ids=["parametrization", "hook"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_applying_the_same_weights_three_times_is_applying_them_once(strategy, legacy):
    def make(seed):
        torch.manual_seed(seed)
        normed = (nn.utils if legacy else parametrizations).weight_norm(nn.Linear(3, 2))
        return nn.Sequential(normed, nn.BatchNorm1d(2)).eval()

    source, model = make(1), make(2)
    inputs = torch.randn(4, 3)
    expected = source(inputs)
    for _ in range(3):
        strategy.apply_weights(model, source)
        assert torch.equal(model(inputs), expected)


def test_a_write_raises_version_counters_so_that_a_backward_pass_through_it_raises():
    parameter = nn.Parameter(torch.ones(2))
    loss = (parameter * parameter).sum()
    write([parameter], [torch.zeros(2)])
    assert parameter.tolist() == [0.0, 0.0]
    assert parameter.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_that_was_built_in_inference_mode_is_written_in_place():
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), frozen)
    source = randomise(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1)
    WeightStrategy().apply_weights(model, source)
    assert_same_bits(dict(model.state_dict()), dict(source.state_dict()))
    model[0](torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_writing_nothing_is_fine():
    write([], [])


def test_same_values_means_the_same_bits():
    nan = torch.tensor([float("nan"), 1.0])
    assert same_values(nan, nan.clone())
    assert not same_values(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_values(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_values(torch.zeros(2), torch.zeros(1, 2))
    assert same_values(torch.zeros(2, 3).t(), torch.zeros(3, 2))


class Versioned(nn.Module):
    """Takes a state without metadata for one of an older format, as torch's own modules do."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.kept = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 3
        self.kept = state_dict.get(prefix + "weight")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_a_module_that_loads_by_itself_is_given_its_own_format_and_copies_that_it_may_keep():
    module = nn.Sequential(Versioned())
    given = torch.tensor([1.0, 2.0])
    load_state(module, {"0.weight": given}, strict=True)
    assert module[0].weight.tolist() == [1.0, 2.0]
    given.fill_(9.0)
    assert module[0].kept.tolist() == [1.0, 2.0]
    load_state(module, {}, strict=False)
    assert module[0].weight.tolist() == [1.0, 2.0]
