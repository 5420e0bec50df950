"""Workers that are started before there is a group: taken where they fit, ended where not, never left behind."""

import os
import signal
import subprocess
import sys

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, start_workers_early
from lightning_weightsync.collectors import early
from tests.helpers.collectors import gym_collector
from tests.helpers.policies import Policy, sha256
from tests.helpers.processes import MARKER, nothing_left, processes_with, wait_until

SCRIPT = """
import sys, time
from lightning_weightsync import start_workers_early
start_workers_early(2)
print(sorted({"torch", "numpy", "lightning"} & set(sys.modules)), flush=True)
time.sleep(60)
"""


def test_a_group_takes_them_and_their_order_is_that_of_its_workers(capfd):
    with nothing_left(capfd) as processes:
        start_workers_early(1)
        assert wait_until(lambda: len(processes()) == 1, 5)  # its environment shows only when it has begun
        (first,) = processes()
        with CollectorGroup(gym_collector, 2, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}) as group:
            assert len(processes()) == 2
            policy = Policy()
            group.update_policy_weights_(policy)
            assert next(iter(group))["worker_idx"].unique().tolist() == [0, 1]
            assert group.stats()[0]["pid"] == first
            assert group.digest() == dict.fromkeys((0, 1), sha256(policy))


def test_what_does_not_fit_is_ended(capfd, monkeypatch):
    with nothing_left(capfd) as processes:
        start_workers_early(2)
        assert wait_until(lambda: len(processes()) == 2, 5)
        before = processes()
        monkeypatch.setattr(sys, "path", [*sys.path, "/elsewhere"])
        process = early.start_worker(1)
        assert wait_until(lambda: processes() == [process.pid], 5) and process.pid not in before
        start_workers_early(1, threads_per_worker=2)
        another = early.start_worker(1)
        assert wait_until(lambda: processes() == sorted([process.pid, another.pid]), 5)
        for started in (process, another):
            started.reap(0.0)


def test_they_start_before_torch_is_imported_and_end_with_their_parent():
    marker = f"early-{os.getpid()}"
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env={**os.environ, MARKER: marker}, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout.readline() == b"[]\n"
        assert wait_until(lambda: len(processes_with(marker)) == 3, 5)
        parent.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not processes_with(marker), 5), processes_with(marker)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
