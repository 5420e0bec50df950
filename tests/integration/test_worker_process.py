"""How a worker process leaves, seen by a parent that does nothing about it."""

from functools import partial

import cloudpickle
import pytest

from lightning_weightsync.collectors.process import WorkerProcess
from tests.helpers.collectors import ParentEnv, gym_collector
from tests.helpers.processes import nothing_left, wait_until


@pytest.fixture
def no_leftovers(capfd):
    with nothing_left(capfd) as processes:
        yield processes


def leave(*, worker_idx, seed):
    gym_collector(worker_idx=worker_idx, seed=seed, env=ParentEnv)
    raise SystemExit(3)


def stumble(*, worker_idx, seed):
    gym_collector(worker_idx=worker_idx, seed=seed, env=ParentEnv)
    raise ValueError("a factory that fails late")  # told to the parent, not printed


@pytest.mark.parametrize(
    ("factory", "end"),
    [(partial(gym_collector, env=ParentEnv), "exit code 0"), (leave, "exit code 1"), (stumble, "exit code 1")],
    ids=["asked to stop", "SystemExit", "exception"],
)
def test_a_worker_that_leaves_takes_its_environments_processes_along(no_leftovers, factory, end):
    """The parent would kill them too, but it may itself be killed between the worker's end and that."""
    worker = WorkerProcess(0, threads=1)
    try:
        worker.jobs.send(
            "build",
            cloudpickle.dumps((factory, {}, {})),
            worker_idx=0, seed=1, values={}, connect_timeout=10.0, env_timeout=0.0, log_level=30,
        )  # fmt: skip
        if factory not in (leave, stumble):
            assert worker.jobs.receive().kind == "booted"
            assert worker.jobs.receive().kind == "built"
            assert len(no_leftovers()) > 1, "the environments' processes"
        worker.ask_to_stop()
        assert worker.ended(20.0) == end
        assert wait_until(lambda: no_leftovers() == [], 2.0), no_leftovers()
    finally:
        worker.reap(0.0)
