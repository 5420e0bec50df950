"""Which processes has a run left, and what else? Processes are found by a marker in their environment."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.holdings import tcp_listeners

MARKER = "LIGHTNING_WEIGHTSYNC_TEST_RUN"


@contextmanager
def marked() -> Iterator[Callable[[], list[int]]]:
    """Every process started inside carries a marker; yields what lists the living ones."""
    value, before = uuid.uuid4().hex, os.environ.get(MARKER)
    os.environ[MARKER] = value
    try:
        yield lambda: processes_with(value)
    finally:
        if before is None:
            del os.environ[MARKER]
        else:
            os.environ[MARKER] = before


@contextmanager
def nothing_left(capture: Any) -> Iterator[Callable[[], list[int]]]:
    """Fails if a process, zombie, listening port or thread of ours is left at the end, or somebody complained.

    Args:
        capture: pytest's ``capfd``; workers inherit the descriptor.
    """
    ports, threads = tcp_listeners(os.getpid()), our_threads()
    with marked() as processes:
        yield processes
        assert wait_until(lambda: not processes(), 5), processes()
    assert not zombies()
    assert tcp_listeners(os.getpid()) <= ports
    assert our_threads() == threads
    printed = capture.readouterr().err
    # The latter are warnings and errors of torch's C++ side, of c10d above all.
    assert not any(sign in printed for sign in ("Traceback", "[W", "[E")), printed


def processes_with(value: str) -> list[int]:
    """Ids of all processes that were started with this marker in their environment; zombies have none any more."""
    needle = f"{MARKER}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: what a shell starts in the background ignores SIGINT, and so would everything it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def zombies() -> list[int]:
    """Children of this process that have ended and were not waited for."""
    me, found = str(os.getpid()), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if (state, parent) == ("Z", me):
                found.append(int(entry.name))
    return found


def cpu_seconds(pid: int) -> float:
    """How long a process has been computing."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def our_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if "weight-sync" in t.name)


def wait_until(condition: Callable[[], object], seconds: float, pause: float = 0.05) -> bool:
    """Whether the condition came true in time; it is looked at every ``pause`` seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
