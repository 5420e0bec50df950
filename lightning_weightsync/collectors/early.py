"""Can workers start before there is a group? Interpreters that import while the script still imports Lightning.

Half of a short run is imports, of the script and then of its workers, and a script that begins with
``start_workers_early(2)`` has both done at the same time. This module imports no torch, or there would be nothing left
to overlap with.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from lightning_weightsync.collectors.process import WorkerProcess

_waiting: list[tuple[Any, WorkerProcess]] = []
_lock = threading.Lock()


def start_workers_early(num_workers: int, threads_per_worker: int = 1) -> None:
    """Start interpreters for the next groups of this process; does not block.

    To be called before torch and Lightning are imported. They have the environment variables that this process has now:
    set yours before. A group takes those that are else what it would start itself, of its ``threads_per_worker``, and
    this process's ``sys.path`` and working directory. Others are ended then; those that no group asks for, with this
    process, however it ends.

    Args:
        num_workers: How many.
        threads_per_worker: Cap on each one's compute threads.

    Raises:
        OSError: One could not be started; those before it wait for a group.
    """
    for _ in range(num_workers):
        process = WorkerProcess(threads_per_worker)
        with _lock:
            _waiting.append((_conditions(threads_per_worker), process))


def start_worker(threads: int) -> WorkerProcess:
    """One that was started early, or a new one.

    Args:
        threads: Cap on its compute threads.

    Raises:
        OSError: A new one could not be started.
    """
    wanted = _conditions(threads)
    with _lock:  # replacements of lost workers are started by other threads
        while _waiting:
            conditions, process = _waiting.pop(0)
            if conditions == wanted and process.ended() is None:
                return process
            if conditions[0] == os.getpid():  # a forked child ends nothing of its parent's
                process.reap(0.0)
    return WorkerProcess(threads)


def _conditions(threads: int) -> Any:
    """What a worker takes over from the process that starts it.

    All but environment variables: torch and others set some when they are imported.
    """
    return os.getpid(), threads, list(sys.path), os.getcwd()
