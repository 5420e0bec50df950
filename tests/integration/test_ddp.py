"""Two ranks on one host: one module, and workers, links, seeds and a pace of each rank's own."""

import json
import os
import subprocess
import sys

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.processes import marked, wait_until

LOOPBACK = ["127.0.0.1"]


def train(folder, **options):
    """Run the script; what each rank saw."""
    with marked() as processes:
        command = [sys.executable, "-m", "tests.helpers.ddp_script", os.fspath(folder), json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        assert wait_until(lambda: not processes(), 5), processes()
    assert done.returncode == 0, done.stderr
    assert not any(sign in done.stderr for sign in ("Traceback", "[W", "[E")), done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def check(ranks, pushes, num_workers=1):
    first, second = ranks
    assert first["parameters"] == second["parameters"], "pushes have made the ranks differ"
    for rank in ranks:
        assert rank["workers"] == [rank["trainer"]] * num_workers, "buffers too, and names without 'module.'"
        assert rank["num_pushes"] == len(rank["push_seconds"]) == pushes
        assert (rank["mean"], rank["sum"]) == (1.5, 3.0), "a metric, and an all-reduce, over both ranks"
        assert rank["groups_before"] == rank["groups_after"] == ["0"], "the default process group is not alone"
        assert (rank["world_size"], rank["backend"]) == (2, "gloo")
        assert not rank["distributed_variables"], "a worker takes itself for a rank"
        assert len(set(rank["pids"])) == num_workers
    assert second["ports"] == LOOPBACK  # rank 0 has Lightning's store, which listens everywhere
    assert not set(first["pids"]) & set(second["pids"])
    assert not set(first["seeds"]) & set(second["seeds"])
    assert not set(first["marks"]) & set(second["marks"]), "two ranks have collected the same episodes"


def test_each_rank_pushes_to_its_own_workers_in_the_middle_of_batches_and_waits_for_nobody_elses(tmp_path):
    """40 steps, a push after every third; one worker of rank 1 takes three seconds to apply its third version."""
    ranks = train(tmp_path, slow_rank=1)
    check(ranks, pushes=14)  # 13, and the last one
    expected = [[4 * batch // 3] for batch in range(10)]
    assert [rank["versions"] for rank in ranks] == [expected, expected]
    assert max(ranks[1]["push_seconds"]) >= 3.0
    assert max(ranks[0]["push_seconds"]) < 2.0, "rank 0 has waited for rank 1's worker"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp_spawn"},
        {"strategy": "ddp_fork"},  # what ddp_notebook is
        {"interval": 1, "steps": 1, "num_workers": 2, "slow_rank": 0},
        {"interval": 1, "unit": "batches", "steps": 1},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_other_ways_to_start_ranks_and_to_push(options, tmp_path):
    options = {"length": 10, "steps": 4, "interval": 3, **options}
    pushes = -(-options["steps"] * options["length"] // options["interval"])
    check(train(tmp_path, **options), pushes, options.get("num_workers", 1))


def test_what_is_not_whole_in_each_rank_is_refused_before_any_worker_starts():
    sharded = Learner()
    sharded.actor.head.weight.ds_id = 1  # as ZeRO-3 marks what it has emptied
    strategy = type("FSDPStrategy", (SingleDeviceStrategy,), {})("cpu")
    for module, options, text in (
        (sharded, {}, "'head.weight' of what goes to 'policy' is kept by DeepSpeed's ZeRO-3"),
        (Learner(), {"strategy": strategy}, "FSDPStrategy spreads parameters over its ranks"),
    ):
        group = make_group(1)
        with marked() as processes, pytest.raises(MisconfigurationException, match=text):
            fit(module, group, make_callback(group), **options)
        assert not processes() and not group.running


@pytest.mark.slow
def test_a_group_that_runs_before_its_process_is_forked_is_refused(tmp_path):
    command = [sys.executable, "-m", "tests.helpers.ddp_script", os.fspath(tmp_path)]
    options = json.dumps({"strategy": "ddp_fork", "running": True})
    with marked() as processes:
        done = subprocess.run([*command, options], capture_output=True, text=True, timeout=60)
        assert wait_until(lambda: not processes(), 5), processes()
    assert done.returncode == 1
    assert "Do not start the group before fit: UpdateWeights starts it in each rank" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"devices": 2, "strategy": "ddp"}], ids=["alone", "ddp"])
def test_variables_that_make_a_process_a_rank_do_not_reach_workers(options):
    """Set by hand, or by Lightning: a Trainer(devices=1) of the environment's own, in the worker, trains to its end."""
    stray = {} if options else {"RANK": "3", "NODE_RANK": "2", "GROUP_RANK": "1", "WORLD_SIZE": "5"}
    options = json.dumps({"env": "TrainerEnv", "length": 2, **options})
    with marked() as processes:
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.fit_script", options],
            env=os.environ | stray,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert wait_until(lambda: not processes(), 5), processes()
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [rank["num_pushes"] for rank in seen] == [2] * len(seen) and seen


FITS = """
from lightning_weightsync import DistributedWeightSyncScheme, start_workers_early
start_workers_early(2)  # twice as fast: the next fit's workers import meanwhile
from tests.helpers.fit import Learner, fit, make_callback, make_group

def main(fits):
    for k in range(fits):
        start_workers_early(int(k < fits - 2))
        scheme = DistributedWeightSyncScheme(same_host="network" if k % 2 else "shared_memory")
        group = make_group(1, weight_sync_schemes={"policy": scheme}, length=2)
        fit(Learner(), group, make_callback(group))

if __name__ == "__main__":
    main(FITS)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_short_fits_end_without_a_word_from_torch(tmp_path):
    script = tmp_path / "fits.py"
    script.write_text(FITS.replace("FITS", "50"))
    with marked() as processes:
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
        assert wait_until(lambda: not processes(), 5), processes()
    assert done.returncode == 0, done.stderr
    assert not any(sign in done.stderr for sign in ("Traceback", "[W", "[E", "c10d", "Broken pipe")), done.stderr
