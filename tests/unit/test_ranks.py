"""What is refused because a rank has not got whole parameters, and when a rank is told that it is alone."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from lightning_weightsync import ranks
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.ranks import RankWatch, sharded_parameter, sharding_strategy


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


def test_one_rank_is_not_watched_and_a_watch_can_be_pickled():
    before = threading.active_count()
    watch = RankWatch.start(local_rank=0, world_size=1)
    assert threading.active_count() == before
    watch.look()
    assert isinstance(pickle.loads(pickle.dumps(watch)), RankWatch)


def test_a_rank_whose_parent_is_gone_is_told_so():
    watch = RankWatch()
    watch._parent = os.getppid()
    watch.look()
    watch._parent = 2**22 + 1  # no such process
    with pytest.raises(WeightSyncError, match="the process that started this rank .* has ended"):
        watch.look()


def test_a_rank_that_is_stuck_in_lightnings_handler_of_sigterm_is_ended(monkeypatch, caplog):
    codes = []
    monkeypatch.setattr(ranks, "GRACE", 0.1)
    monkeypatch.setattr(ranks, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", codes.append)
    watch = RankWatch.start(local_rank=0, world_size=2)
    time.sleep(0.3)
    assert codes == []
    try:
        _sigterm_notifier_fn(lambda: codes)
    finally:
        watch.stop()
    assert codes[0] == 143
    assert "SIGTERM came in the middle of a collective operation" in caplog.text


def _sigterm_notifier_fn(condition):
    """As Lightning's handler is called."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_lightnings_handler_is_called_what_is_looked_for():
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    assert _SignalConnector._sigterm_notifier_fn.__code__.co_name == "_sigterm_notifier_fn"


@pytest.mark.slow
def test_only_a_parent_that_runs_the_same_script_is_watched(tmp_path):
    script, launcher = tmp_path / "train.py", tmp_path / "launch.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from lightning_weightsync.ranks import _parent_runs_this_script\n"
        "print(_parent_runs_this_script(), flush=True)\n"
        "if 'first' in sys.argv: subprocess.run([sys.executable, os.path.abspath(sys.argv[0])])\n"
    )
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(script)!r}, 'first'])\n")
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, launcher], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr
