"""How a worker process leaves, seen by a parent that does nothing about it."""

import os
from functools import partial

import cloudpickle
import pytest

from lightning_weightsync.collectors import process
from lightning_weightsync.collectors.process import WorkerProcess
from lightning_weightsync.transports.control import ChannelClosed
from tests.helpers.collectors import ParentEnv, gym_collector
from tests.helpers.processes import wait_until, zombies


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
    worker = WorkerProcess(threads=1)
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


def refuse(*_, **__):
    raise BlockingIOError("no process id is left")


class Deaf(process.ControlChannel):
    def send(self, *_, **__):
        raise ChannelClosed("it has ended")


@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (process.subprocess, ("Popen", refuse), BlockingIOError),
        (process, ("ControlChannel", Deaf), ChannelClosed),
    ],
    ids=["no process", "it ends at once"],
)
def test_of_a_worker_that_cannot_be_started_nothing_stays(no_leftovers, monkeypatch, where, what, error):
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(where, *what)
    with pytest.raises(error):
        WorkerProcess(threads=1)
    assert os.listdir("/proc/self/fd") == before
    assert not zombies() and not no_leftovers()
