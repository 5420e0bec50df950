import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_weightsync.schemes.leaves import Leaves
from lightning_weightsync.schemes.strategy import WeightStrategy

BY_LEAF, BY_STATE = WeightStrategy("tensordict"), WeightStrategy("state_dict")


def net():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_parameter("nothing", None)
    return module


@pytest.fixture(params=[BY_LEAF, BY_STATE], ids=["tensordict", "state_dict"])
def strategy(request):
    return request.param


def test_leaves_are_the_live_tensors_under_their_state_dict_names(strategy):
    module = net()
    leaves = Leaves(module, strategy)
    assert list(leaves.tensors) == list(module.state_dict())
    assert leaves.tensors["0.weight"] is module[0].weight
    assert leaves.tensors["1.num_batches_tracked"] is module[1].num_batches_tracked


@pytest.mark.parametrize(
    "use",
    [
        lambda m: None,
        lambda m: m.train(),
        lambda m: m(torch.randn(4, 2)).sum().backward(),
        lambda m: torch.optim.SGD(m.parameters(), 0.1).step(),
        lambda m: m.load_state_dict(net().state_dict()),
        lambda m: m.requires_grad_(False),
        lambda m: m.register_forward_hook(lambda *args: None),
    ],
    ids=["nothing", "train", "backward", "step", "load", "freeze", "hook"],
)
def test_new_values_in_the_same_tensors_leave_them_as_they_were_found(strategy, use):
    module = net()
    leaves = Leaves(module, strategy)
    use(module)
    assert not leaves.stale()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 2))),
        lambda m: setattr(m[0].weight, "data", torch.zeros(3, 2)),
        lambda m: setattr(m[1], "running_mean", torch.zeros(3)),
        lambda m: m.load_state_dict(net().state_dict(), assign=True),
        lambda m: m.append(nn.Linear(3, 3)),
        lambda m: m[0].register_buffer("more", torch.zeros(1)),
        lambda m: m[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda m: m.__delitem__(1),
        lambda m: setattr(m[0], "bias", None),
        lambda m: m.__setitem__(0, nn.Linear(2, 3)),
        lambda m: m.double(),
        lambda m: setattr(m[0].weight, "data", torch.zeros(2, 2)),
        lambda m: setattr(m[0].weight, "data", torch.zeros(1).expand(3, 2)),
    ],
    ids=[
        "parameter", "data", "buffer", "assign", "module", "more buffers", "more parameters", "fewer modules", "None",
        "another module", "dtype", "shape", "strides",
    ],
)  # fmt: skip
def test_other_tensors_are_noticed(strategy, change):
    module = net()
    leaves = Leaves(module, strategy)
    change(module)
    assert leaves.stale()
    assert not Leaves(module, strategy).stale()


def test_a_module_that_is_wrapped_is_watched_inside():
    module = net()
    leaves = Leaves(torch.compile(nn.DataParallel(module)), BY_LEAF)
    assert not leaves.stale()
    module[0].weight = nn.Parameter(torch.zeros(3, 2))
    assert leaves.stale()


def test_a_submodule_that_is_swapped_for_one_of_the_same_names_is_noticed():
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    leaves = Leaves(module, BY_LEAF)
    module[0][0] = nn.Linear(1, 1)
    assert leaves.stale()


@pytest.mark.parametrize("form", [dict, TensorDict])
def test_a_dict_is_watched_too(form):
    source = form({"net": form({"a": torch.zeros(2)}), "b": torch.zeros(1)})
    leaves = Leaves(source, BY_LEAF)
    source["net"]["a"].fill_(3)
    assert not leaves.stale()
    source["net"]["a"] = torch.ones(2)
    assert leaves.stale()


def test_a_replaced_submodule_is_noticed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    leaves = Leaves(model, WeightStrategy())
    assert not leaves.stale()
    model[1] = nn.Linear(2, 2)
    assert leaves.stale()
