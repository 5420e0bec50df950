"""However a run ends, its trainer ends soon, and nothing of it is left: no worker, and no process of an environment."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from tests.helpers import collectors
from tests.helpers.collectors import misbehaving_factory
from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.processes import MARKER, hear_ctrl_c, marked, processes_with, wait_until

TRAINER_SECONDS, WORKER_SECONDS = 10, 5


class Run:
    """A training script in a process group of its own; its workers start processes, too."""

    def __init__(self, **options):
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fit_script", json.dumps(options)],
            env={**os.environ, MARKER: self.marker},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_ctrl_c,
            start_new_session=True,
        )

    def processes(self):
        return processes_with(self.marker)

    def wait_for(self, line, count=1):
        seen = []
        while seen.count(f"{line}\n") < count:
            seen.append(self.process.stdout.readline())
            assert seen[-1], (seen, self.process.communicate())

    def other_rank(self):
        """The process of rank 1."""
        for pid in self.processes():
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if pid != self.process.pid and "fit_script" in command:
                return pid
        raise AssertionError("there is no other rank")

    def result(self, seconds):
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def close(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@dataclass(frozen=True)
class Ending:
    """How a run ends.

    Attributes:
        options: Of the script.
        code: The trainer's exit code, or several that may be.
        number: The signal that ends it; else it ends by itself.
        to: Who gets the signal: "trainer" (rank 0), "group" (all ranks, as a cluster sends it), or "rank 1".
        at: What the script has said, on all ranks, before the signal is sent.
        shows: The first error that is shown.
    """

    options: dict
    code: int | tuple[int, ...] = 1
    number: int | None = None
    to: str = "trainer"
    at: str = "training"
    shows: str | None = None


def raises(where, rank=0, **options):
    """In the user's own code."""
    shows = f"ArithmeticError: the {where.replace('_', ' ')} of rank {rank}"
    return Ending({"ending": where, "rank": rank, "length": 10**6, **options}, shows=shows)


TRAINS = {"length": 10**6, "env": "ParentEnv", "pause": 0.2}
"""Ended by a signal while it trains."""
WAITS = {"length": 10**6, "env": "ParentEnv", "doze_at": 4}
"""Ended by a signal while it waits for a second batch that never comes."""
DDP = {"devices": 2, "strategy": "ddp"}
SPAWN = {"devices": 2, "strategy": "ddp_spawn"}
OWN_SETUP = Ending({"ending": "own setup"}, shows="PathError: path 'aktor' fails")
SIGTERM, SIGINT, SIGKILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

ENDINGS = {
    "normal": Ending({"env": "ParentEnv"}, 0),
    "SIGINT while waiting": Ending(WAITS, 1, SIGINT),
    "SIGKILL": Ending(WAITS, -9, SIGKILL),
    "DDP: exception on rank 1": raises("callback", 1, **DDP),
}
MORE_ENDINGS = {
    "own setup": OWN_SETUP,
    "setup of another callback": raises("setup"),
    "configure_optimizers": raises("configure_optimizers"),
    "training_step": raises("training_step", env="ParentEnv"),
    "loader": raises("loader"),
    "another callback": raises("callback", env="ParentEnv"),
    "os._exit": Ending({"env": "ParentEnv", "ending": "_exit"}, 7),
    "SIGTERM while waiting": Ending(WAITS, 0, SIGTERM),  # Lightning's choice
    "SIGINT": Ending(TRAINS, 1, SIGINT),
    "SIGTERM": Ending(TRAINS, 0, SIGTERM),
    "SIGTERM to the group": Ending(TRAINS, 0, SIGTERM, "group"),
    "SIGINT to the group": Ending(TRAINS, 1, SIGINT, "group"),
    "SIGTERM in setup": Ending({**TRAINS, "ending": "early SIGTERM"}, -15),
    "SIGTERM soon after": Ending(TRAINS, (-15, 0), SIGTERM, at="launched"),  # before Lightning's handler, or after
    "SIGINT soon after": Ending(TRAINS, 1, SIGINT, at="launched"),
}
# Lightning kills rank 0 when it sees, each five seconds, that another rank has failed.
BY_LIGHTNING = (1, -9)
DDP_ENDINGS = {
    "normal": Ending({"env": "ParentEnv", **DDP}, 0),
    "own setup": Ending({"ending": "own setup", **DDP}, shows=OWN_SETUP.shows),
    "setup on rank 0": raises("setup", 0, **DDP),
    "setup on rank 1": raises("setup", 1, **DDP),
    "configure_optimizers on rank 1": raises("configure_optimizers", 1, **DDP),
    "training_step on rank 0": raises("training_step", 0, **DDP),
    "training_step on rank 1": raises("training_step", 1, **DDP),
    "loader on rank 0": raises("loader", 0, **DDP),
    "loader on rank 1": raises("loader", 1, **DDP),
    "rank 0 fails, rank 1 waits for its worker": raises("callback", 0, **WAITS, **DDP, doze_on=1),
    "rank 1 fails, rank 0 waits for its worker": replace(
        raises("callback", 1, **WAITS, **DDP, doze_on=0), code=BY_LIGHTNING
    ),
    "os._exit on rank 0": Ending({**TRAINS, **DDP, "ending": "_exit"}, 7),
    "os._exit on rank 1": Ending({**TRAINS, **DDP, "ending": "_exit", "rank": 1}, BY_LIGHTNING),
}
DDP_SIGNALS = {
    "SIGKILL": Ending({**WAITS, **DDP}, -9, SIGKILL),
    "SIGKILL of rank 1": Ending({**WAITS, **DDP}, BY_LIGHTNING, SIGKILL, "rank 1"),
    "SIGINT": Ending({**WAITS, **DDP}, 1, SIGINT),
    "SIGINT to the group": Ending({**TRAINS, **DDP}, 1, SIGINT, "group"),
    "SIGTERM": Ending({**TRAINS, **DDP}, (0, 1), SIGTERM),
    "SIGTERM while waiting": Ending({**WAITS, **DDP}, 0, SIGTERM),
    # Lightning's handlers of the two ranks deadlock if one of them is in a collective operation: ended by RankWatch.
    "SIGTERM to the group": Ending({**TRAINS, **DDP}, (0, 1, 143), SIGTERM, "group"),
    "SIGTERM to the group while waiting": Ending({**WAITS, **DDP}, (0, 1), SIGTERM, "group"),
    "SIGTERM in setup": Ending({**TRAINS, **DDP, "ending": "early SIGTERM"}, -15),
    "SIGTERM in setup, to the group": Ending({**TRAINS, **DDP, "ending": "early SIGTERM to the group"}, -15),
    "SIGTERM soon after, to the group": Ending({**TRAINS, **DDP}, (-15, 0, 1, 143), SIGTERM, "group", "launched"),
    "spawn: exception on rank 1": raises("callback", 1, **SPAWN),
    "spawn: SIGTERM to the group": Ending({**WAITS, **SPAWN}, (-15, 1), SIGTERM, "group"),
    "spawn: SIGKILL": Ending({**WAITS, **SPAWN}, -9, SIGKILL),
}


@contextmanager
def started(endings):
    """All of them at once: most of the time each waits, for imports or for its end."""
    runs = {name: Run(**ending.options) for name, ending in endings.items()}
    try:
        yield runs
    finally:
        for run in runs.values():
            run.close()


@pytest.fixture(scope="module")
def runs():
    with started(ENDINGS) as runs:
        yield runs


@pytest.fixture(scope="module")
def more_runs():
    with started(MORE_ENDINGS) as runs:
        yield runs


def check(run, ending):
    ranks = ending.options.get("devices", 1)
    if ending.number is not None:
        run.wait_for(ending.at, ranks)
        if ending.at == "training":
            assert len(run.processes()) >= 3 * ranks, "each rank, its worker, and the environment's process"
            time.sleep(0.2)  # until it waits for the next batch
        if ending.to == "group":
            os.killpg(run.process.pid, ending.number)
        else:
            os.kill(run.other_rank() if ending.to == "rank 1" else run.process.pid, ending.number)
    elif "ending" not in ending.options:
        run.wait_for("training", ranks)
    elif ending.options["ending"] != "own setup":
        run.wait_for("happening")
    at = time.monotonic()
    returncode, out, err = run.result(60)
    # Before it is told to end, a run imports for as long as the machine pleases.
    assert ending.options.get("ending") == "own setup" or time.monotonic() - at < TRAINER_SECONDS
    assert wait_until(lambda: not run.processes(), WORKER_SECONDS), run.processes()
    assert returncode in (ending.code if isinstance(ending.code, tuple) else (ending.code,)), (returncode, out, err)
    if ending.shows is not None:
        first = re.search(r"^(?:\[rank\d\]: )?(?:\w+\.)*(\w+Error: .*)", err, re.MULTILINE)
        assert first is not None and first[1].startswith(ending.shows), err
    return out, err


@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left_of_a_run(name, runs):
    out, err = check(runs[name], ENDINGS[name])
    if name == "normal":
        assert "Traceback" not in err, err
        assert json.loads(out.splitlines()[-1])["num_pushes"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ENDINGS)
def test_nothing_is_left_of_a_run_that_ends_otherwise(name, more_runs):
    check(more_runs[name], MORE_ENDINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param(e, id=name) for name, e in (DDP_ENDINGS | DDP_SIGNALS).items()])
def test_nothing_is_left_of_two_ranks(ending):
    run = Run(**ending.options)
    try:
        check(run, ending)
    finally:
        run.close()


@pytest.mark.slow
def test_a_run_can_start_again_at_once():
    """No port, no file, no shared memory is in its way."""
    before = set(os.listdir("/dev/shm"))
    for name in ("SIGKILL", "normal"):
        run = Run(**ENDINGS[name].options)
        try:
            check(run, ENDINGS[name])
        finally:
            run.close()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_while_the_workers_build_their_collectors(number):
    class Signals(Callback):
        def on_train_start(self, trainer, pl_module):  # Lightning has its handlers in place by now
            threading.Timer(0.5, os.kill, args=(os.getpid(), number)).start()
            self.at = time.monotonic() + 0.5

    group, signals = make_group(1, partial(misbehaving_factory, fault=collectors.doze, only=0)), Signals()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with marked() as processes:
            with pytest.raises(SystemExit):
                fit(Learner(), group, signals, make_callback(group))
            assert time.monotonic() - signals.at < 5
            assert not processes() and not group.running
    finally:
        signal.signal(signal.SIGINT, handlers[0])
        signal.signal(signal.SIGTERM, handlers[1])
