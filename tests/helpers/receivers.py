"""Real processes that take the receiver's part in a test, reused from test to test.

An interpreter that imports torch costs seconds, so a few are started once per session, and run what is sent to them:

    future = process.begin(function, 1, 2)    # runs function(box, 1, 2) over there, in a thread of its own
    process.call(function, 1, 2)              # ... and waits for what it returns or raises

``box`` is a namespace that lives in the process until the test ends. A process that a test has killed, or that does not
come clean at the end of one, is replaced. None outlives the session, however it ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import cloudpickle

from benchmarks.parent import end_with_parent

START_SECONDS = 60.0
CALL_SECONDS = 20.0


class ProcessEnded(Exception):
    """The process ended before it had answered."""


class RemoteTraceback(Exception):
    """The traceback of what a function raised over there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ReceiverProcess:
    """A fresh interpreter with torch and this package loaded, which runs the functions that it is sent."""

    def __init__(self, name: str) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.receivers", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=os.getcwd(),
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future] = {0: Future()}
        self._ready = self._pending[0]
        self.used = False
        self._reader = threading.Thread(target=self._read, name="reader of a receiver process", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it has imported everything."""
        self._ready.result(START_SECONDS)

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        """Start ``function(box, *args, **kwargs)`` over there; does not wait for it."""
        self.used = True
        self.wait_ready()
        with _test_modules_by_value():
            blob = cloudpickle.dumps((function, args, kwargs))
        with self._sending:
            number = next(self._numbers)
            future = self._pending[number] = Future()
            try:
                self._connection.send_bytes(number.to_bytes(8, "big") + blob)
            except OSError:
                self._fail(number, "before it could be asked")
        return future

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = CALL_SECONDS, **kwargs: Any) -> Any:
        """Run ``function(box, *args, **kwargs)`` over there; what it returns, or raises."""
        return self.result_of(self.begin(function, *args, **kwargs), timeout)

    def result_of(self, future: Future, timeout: float = CALL_SECONDS) -> Any:
        """What a function that was begun here returns, or raises; after ``timeout`` seconds its stacks are printed."""
        try:
            return future.result(timeout)
        except FutureTimeout:
            if not future.done() and self.alive:
                self._process.send_signal(signal.SIGUSR1)
            raise

    def kill(self) -> None:
        """SIGKILL; its end has been seen when this returns."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout: float = CALL_SECONDS) -> int:
        """Its exit code, once it has ended by itself: what it was connected to may see its end a moment earlier."""
        return self._process.wait(timeout)

    def stop(self) -> None:
        """SIGSTOP; no thread of it runs any more when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        if self.alive:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever it does."""
        self.kill()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                data = self._connection.recv_bytes()
                number = int.from_bytes(data[:8], "big")
                try:
                    value, error, text = cloudpickle.loads(data[8:])
                except Exception as unreadable:
                    value, error, text = None, unreadable, ""
                future = self._pending.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    error.__cause__ = RemoteTraceback(text)
                    future.set_exception(error)
        for number in list(self._pending):
            self._fail(number, "before it had answered")

    def _fail(self, number: int, when: str) -> None:
        future = self._pending.pop(number, None)
        if future is not None:
            future.set_exception(ProcessEnded(f"{self.name} (pid {self.pid}) ended {when}"))


class ReceiverPool:
    """A few receiver processes for the whole session; ``len`` of them are ready for each test."""

    def __init__(self, size: int) -> None:
        self._names = (f"receiver process {number}" for number in itertools.count())
        self._processes = [ReceiverProcess(next(self._names)) for _ in range(size)]

    def __getitem__(self, index: int) -> ReceiverProcess:
        return self._processes[index]

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[ReceiverProcess]:
        return iter(self._processes)

    def grow(self, size: int) -> None:
        """Have at least so many processes, for the rest of the session; does not wait for new ones."""
        while len(self._processes) < size:
            self._processes.append(ReceiverProcess(next(self._names)))

    def clean(self, timeout: float = CALL_SECONDS) -> list[str]:
        """End the test: empty every box; returns what was left where."""
        complaints = []
        cleaning: list[tuple[ReceiverProcess, Future]] = []
        for process in self._processes:
            process.go_on()
            if process.alive and process.used:
                cleaning.append((process, process.begin(_clean_up)))
                process.used = False
        for process, future in cleaning:
            try:
                left = future.result(timeout)
            except Exception as error:
                left = f"{type(error).__name__}: {error}"
            if left:
                complaints.append(f"{process.name}: {left}")
                process.kill()
        return complaints

    def renew(self) -> None:
        """Start processes for those that have ended; does not wait for them, and puts them last: few tests need all."""
        ended = [process for process in self._processes if not process.alive]
        for process in ended:
            process.close()
            self._processes.remove(process)
            self._processes.append(ReceiverProcess(next(self._names)))

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.close()


@contextlib.contextmanager
def _test_modules_by_value() -> Iterator[None]:
    """Send what test modules define by value: their imports (pytest) have no business over there."""
    modules = [m for name, m in sys.modules.items() if name.startswith("tests.") and ".test_" in name]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _clean_up(box: SimpleNamespace) -> str:
    """Shut down what the test has left open; what is held beyond that, as text."""
    from tests.helpers.holdings import leftovers

    baseline = box._baseline
    for value in list(vars(box).values()):
        if hasattr(value, "shutdown"):
            value.shutdown()
    vars(box).clear()
    box._baseline = baseline
    return leftovers(baseline)


def _main(descriptor: int) -> None:
    end_with_parent()  # a stopped process does not notice the end of its connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(descriptor)
    sending = threading.Lock()

    import torch

    import lightning_weightsync.schemes.distributed  # noqa: F401 - every test needs it
    from tests.helpers.holdings import holdings

    torch.set_num_threads(1)
    box = SimpleNamespace()

    def answer(number: bytes, value: Any, error: BaseException | None) -> None:
        text = "".join(traceback.format_exception(error)) if error is not None else ""
        try:
            blob = cloudpickle.dumps((value, error, text))
            cloudpickle.loads(blob)
        except Exception as unpicklable:
            blob = cloudpickle.dumps((None, RuntimeError(f"{unpicklable}: {value!r}, {error!r}"), text))
        with sending:
            connection.send_bytes(number + blob)

    def run(number: bytes, blob: bytes) -> None:
        try:
            function, args, kwargs = cloudpickle.loads(blob)
            value = function(box, *args, **kwargs)
        except BaseException as error:
            answer(number, None, error)
        else:
            answer(number, value, None)

    def run_in_thread(data: bytes) -> None:
        threading.Thread(target=run, args=(data[:8], data[8:]), name="call", daemon=True).start()

    first_look = threading.Thread(target=lambda: setattr(box, "_baseline", holdings()), name="call")
    first_look.start()  # in a thread, as every look at what is held will be
    first_look.join()
    answer(bytes(8), None, None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            run_in_thread(connection.recv_bytes())
    os._exit(0)


if __name__ == "__main__":
    # The parent's functions name this module by its real name; what runs as __main__ would be a second copy of it.
    from tests.helpers import receivers

    receivers._main(int(sys.argv[1]))
