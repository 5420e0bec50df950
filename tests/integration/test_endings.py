"""However a run ends, its trainer ends soon, and nothing of it is left: no worker, and no process of an environment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from functools import partial

import pytest
from lightning.pytorch import Callback

from tests.helpers import collectors
from tests.helpers.collectors import misbehaving_factory
from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.processes import MARKER, hear_ctrl_c, marked, processes_with, wait_until

TRAINER_SECONDS, WORKER_SECONDS = 10, 5


class Run:
    """A training script in a process of its own; its workers start processes, too."""

    def __init__(self, **options):
        self.marker = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fit_script", json.dumps(options)],
            env={**os.environ, MARKER: self.marker},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hear_ctrl_c,
        )

    def processes(self):
        return processes_with(self.marker)

    def wait_for_training(self):
        line = self.process.stdout.readline()
        assert line == "training\n", (line, self.process.communicate())

    def result(self, seconds):
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def close(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


TRAINS = {"length": 10**6, "env": "ParentEnv", "pause": 0.2}
"""Ended by a signal while it trains."""
WAITS = {"length": 10**6, "env": "ParentEnv", "doze_at": 4}
"""Ended by a signal while it waits for a second batch that never comes."""

ENDINGS = {
    # name: (options, signal, exit code of the trainer)
    "normal": ({"env": "ParentEnv"}, None, 0),
    "SIGINT while waiting": (WAITS, signal.SIGINT, 1),
    "SIGKILL": (WAITS, signal.SIGKILL, -9),
}
MORE_ENDINGS = {
    "exception": ({"env": "ParentEnv", "ending": "exception"}, None, 1),
    "SIGTERM while waiting": (WAITS, signal.SIGTERM, 0),  # Lightning's choice
    "SIGINT": (TRAINS, signal.SIGINT, 1),
    "SIGTERM": (TRAINS, signal.SIGTERM, 0),
    "setup of another callback": ({"ending": "setup"}, None, 1),
    "os._exit": ({"env": "ParentEnv", "ending": "_exit"}, None, 7),
}


@contextmanager
def started(endings):
    """All of them at once: most of the time each waits, for imports or for its end."""
    runs = {name: Run(**options) for name, (options, _, _) in endings.items()}
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


def check(run, options, number, code):
    if options.get("ending") != "setup":
        run.wait_for_training()
    if number is not None:
        assert len(run.processes()) == 3, "trainer, worker, and the environment's process"
        time.sleep(0.2)  # until it waits for the next batch
        run.process.send_signal(number)
    at = time.monotonic()
    returncode, out, err = run.result(60)
    # Before it is told to end, a run imports for as long as the machine pleases.
    assert options.get("ending") == "setup" or time.monotonic() - at < TRAINER_SECONDS
    assert wait_until(lambda: not run.processes(), WORKER_SECONDS), run.processes()
    assert returncode == code, (out, err)
    return out, err


@pytest.mark.parametrize("name", ENDINGS)
def test_nothing_is_left_of_a_run(name, runs):
    out, err = check(runs[name], *ENDINGS[name])
    if name == "normal":
        assert "Traceback" not in err, err
        assert json.loads(out.splitlines()[-1])["num_pushes"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ENDINGS)
def test_nothing_is_left_of_a_run_that_ends_otherwise(name, more_runs):
    check(more_runs[name], *MORE_ENDINGS[name])


@pytest.mark.slow
def test_a_run_can_start_again_at_once():
    """No port, no file, no shared memory is in its way."""
    before = set(os.listdir("/dev/shm"))
    for options, number, code in (ENDINGS["SIGKILL"], ENDINGS["normal"]):
        run = Run(**options)
        try:
            check(run, options, number, code)
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
