"""What a worker's interpreter does: before it is told what to build, and however its work ends. One process."""

import importlib.util
import os
import queue
import socket
import sys
import time

import pytest

from lightning_weightsync.collectors import logs, values, worker
from lightning_weightsync.collectors.process import JOB_MESSAGES, _environment
from lightning_weightsync.collectors.worker import _settle_what_is_absent
from lightning_weightsync.transports.control import ControlChannel, Message
from lightning_weightsync.transports.memory import create_memory_file
from tests.helpers.collectors import Stream
from tests.helpers.processes import wait_until


def test_a_module_that_is_not_installed_is_settled_to_be_absent(monkeypatch):
    monkeypatch.delitem(sys.modules, "not_installed_anywhere", raising=False)
    _settle_what_is_absent("not_installed_anywhere")
    monkeypatch.setattr(sys, "meta_path", [])  # nobody is asked any more
    assert importlib.util.find_spec("not_installed_anywhere") is None
    with pytest.raises(ModuleNotFoundError):
        import not_installed_anywhere  # noqa: F401
    monkeypatch.delitem(sys.modules, "not_installed_anywhere")


def test_a_module_that_is_installed_can_be_imported_as_before(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    _settle_what_is_absent("wave")
    import wave

    assert wave.__name__ == "wave"


def test_a_worker_does_not_inherit_what_makes_a_process_a_rank(monkeypatch):
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
    launchers = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "PMI_RANK")
    for name in (*ranks, *launchers, "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"):
        monkeypatch.setenv(name, "3")
    kept = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "17", "SIMULATOR_RANK": "a"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    environment = _environment(threads=2)
    assert "3" not in {value for name, value in environment.items() if "RANK" in name or "SLURM" in name}
    assert not set(ranks) & set(environment)
    assert kept.items() <= environment.items()
    assert environment["OMP_NUM_THREADS"] == "2"


# --- how its work ends -----------------------------------------------------------------------------------------------


@pytest.fixture
def jobs():
    """The parent's end of a job channel, and the worker's."""
    ours, theirs = (ControlChannel(end, JOB_MESSAGES) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def received(channel):
    messages = []
    while (message := channel.poll()) is not None:
        messages.append(message)
    return messages


@pytest.fixture
def work(jobs, monkeypatch):
    """Has a worker's main thread build this and hear these messages; its exit code, and what it has told."""
    monkeypatch.setattr(logs, "forward", lambda *_: None)
    monkeypatch.setattr(values, "_of_process", dict)
    memory = create_memory_file("test")

    def run(factory, *kinds):
        ours, theirs = jobs
        monkeypatch.setattr(worker, "_unpack", lambda job: (factory, {}, None))
        inbox = queue.SimpleQueue()
        for kind in kinds:
            inbox.put(Message(kind, {"slot": 0, "version": 0}))
        fields = {"worker_idx": 0, "seed": 1, "values": {}, "connect_timeout": 5.0, "env_timeout": 0.0, "log_level": 30}
        return worker._work(theirs, Message("build", fields), inbox, memory), received(ours)

    yield run
    os.close(memory)


class Careful(Stream):
    """Says when it is closed; may raise in a batch, and when it is closed."""

    def __init__(self, closed, *, in_batch=None, in_close=None, **kwargs):
        super().__init__(**kwargs)
        self.closings, self.in_batch, self.in_close = closed, in_batch, in_close

    def __iter__(self):
        yield from super().__iter__() if self.in_batch is None else self.raise_it()

    def raise_it(self):
        raise self.in_batch
        yield

    def close(self):
        self.closings.append(self)
        if self.in_close is not None:
            raise self.in_close


@pytest.mark.parametrize(
    ("faults", "kinds", "code", "told"),
    [
        ({}, ["connect", "collect", "stop"], 0, []),
        ({}, ["stop"], 0, []),
        ({"in_batch": ValueError("dice")}, ["connect", "collect"], 1, [("collect", "ValueError: dice")]),
        ({"in_batch": SystemExit(3)}, ["connect", "collect"], 1, [("collect", "SystemExit: 3")]),
        ({"in_close": OSError("port")}, ["connect", "stop"], 1, [("close", "OSError: port")]),
        (
            {"in_batch": ValueError("dice"), "in_close": OSError("port")},
            ["connect", "collect"],
            1,
            [("collect", "ValueError: dice")],
        ),
    ],
    ids=["asked to stop", "before it has connected", "error", "SystemExit", "error in close", "error, and in close"],
)
def test_a_collector_is_closed_once_however_its_work_ends(work, faults, kinds, code, told):
    closed = []
    result, messages = work(lambda **given: Careful(closed, **faults, **given), *kinds)
    assert len(closed) == 1
    assert result == code
    errors = [message for message in messages if message.kind == "error"]
    assert [(error["phase"], error["message"]) for error in errors] == told
    assert all(error["user_code"] for error in errors)


def test_a_factory_that_exits_is_an_error_of_the_users_code(work):
    def leave(**_):
        sys.exit("no licence")

    code, (error,) = work(leave)
    assert (code, error["phase"], error["message"]) == (1, "build", "SystemExit: no licence")
    assert error["user_code"] and "in leave" in error["traceback"]


@pytest.mark.parametrize(
    ("at", "kind", "text"), [(None, "stuck", "None"), (KeyError("port"), "error", "KeyError: 'port'")]
)
def test_who_does_not_get_on_ends_its_process_whatever_its_progress_is(jobs, monkeypatch, at, kind, text):
    (ours, theirs), died = jobs, []
    monkeypatch.setattr(worker, "_die_with_children", lambda: died.append(True))

    class Vague(Stream):
        def progress(self):
            if isinstance(at, Exception):
                raise at
            return 0, at

    with worker._watch(theirs, Vague(worker_idx=0, seed=1), env_timeout=0.1):
        message = ours.receive(time.monotonic() + 5)
        assert wait_until(lambda: died, 5)
    assert message.kind == kind and text in (message["at"] if kind == "stuck" else message["message"])
