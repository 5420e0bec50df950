"""What is refused because a rank has not got whole parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from lightning_weightsync.sharding import sharded_parameter, sharding_strategy


def strategy(name, **attributes):
    """Of a class that derives from one of this name, as users' own strategies do."""
    return type("Own", (type(name, (), attributes),), {})()


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (strategy("FSDPStrategy"), True),
        (strategy("ModelParallelStrategy"), True),
        (strategy("DeepSpeedStrategy", zero_stage_3=True), True),
        (strategy("DeepSpeedStrategy", zero_stage_3=False), False),
        (strategy("DDPStrategy"), False),
        (strategy("SingleDeviceStrategy"), False),
    ],
)
def test_strategies_that_shard_are_refused(made, refused):
    reason = sharding_strategy(made)
    assert (reason is not None) == refused
    if reason is not None:
        assert reason.startswith("Own spreads parameters over its ranks") and "policy_weights_getter" in reason


def test_the_names_of_lightnings_strategies_are_the_ones_that_are_looked_for():
    from lightning.pytorch import strategies

    assert {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"} <= set(dir(strategies))


def test_a_parameter_of_a_sharding_engine_is_refused_and_named():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 0))  # an ordinary parameter of size 0 is none
    assert sharded_parameter({"policy": net, "extra": {"a": torch.zeros(1)}}) is None
    net[0].bias.ds_id = 3
    assert "parameter '0.bias' of what goes to 'policy' is kept by DeepSpeed's ZeRO-3" in sharded_parameter(
        {"policy": net}
    )
    flat = nn.Linear(2, 2)
    flat.weight._is_flat_param = True
    assert "parameter 'weight' of what goes to 'policy' is a flat parameter" in sharded_parameter({"policy": flat})
    wrapped = nn.Sequential(type("FullyShardedDataParallel", (nn.Module,), {})())
    assert "module '0' of what goes to 'policy' is sharded" in sharded_parameter({"policy": wrapped})


def test_a_parameter_that_is_spread_over_ranks_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    reason = sharded_parameter({"policy": net})
    assert reason.startswith("parameter 'weight' of what goes to 'policy' is spread over ranks (DTensor)")
