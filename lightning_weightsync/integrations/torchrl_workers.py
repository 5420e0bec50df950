"""Which worker is which, and does it still run?

A multi-process collector of TorchRL tells a scheme neither that a worker has failed nor that it ends itself. So its
processes are watched, and what a worker that failed has left in its pipe is read.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from lightning_weightsync.errors import WorkerDied, WorkerError


def first_index(collector: Any) -> int:
    """Where a collector begins to count when it tells a worker its index.

    Multi-process collectors count from 0. ``DistributedCollector`` numbers the sender's side from 0, and tells a worker
    its rank, which counts from 1, under the same name. (It is told without importing what it needs.)
    """
    modules = {base.__module__ for base in type(collector).__mro__}
    return 1 if "torchrl.collectors.distributed.generic" in modules else 0


class Processes:
    """Tells a hub what has become of a collector's workers; see ``transports.hub.Watcher``.

    Args:
        collector: Has their processes and pipes; held weakly.

    Attributes:
        connecting: Whether workers are still connecting. Pipes are read only then: later they are the collector's.
    """

    def __init__(self, collector: Any) -> None:
        self.connecting = True
        self._collector = weakref.ref(collector)

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """Why a worker's process has ended, or ``None`` while it runs (looked at for up to ``wait`` seconds)."""
        collector = self._collector()
        processes = getattr(collector, "procs", ())
        if collector is None or worker_idx >= len(processes):
            return None
        report = self._report(collector, worker_idx)
        if report is not None:
            return report
        process = processes[worker_idx]
        with contextlib.suppress(ValueError):  # it was closed
            process.join(wait)
            if process.is_alive():
                return None
            # It may have told why and ended since the last look.
            return self._report(collector, worker_idx) or WorkerDied(
                f"worker {worker_idx} (pid {process.pid}) ended with exit code {process.exitcode}"
            )
        return WorkerDied(f"worker {worker_idx} was closed by its collector")

    def _report(self, collector: Any, worker_idx: int) -> WorkerError | None:
        """What a worker says that failed before it had a collector. At that time its pipe brings nothing else."""
        if not self.connecting:
            return None
        try:
            pipe = collector.pipes[worker_idx]
            message = pipe.recv() if pipe.poll() else None
        except (EOFError, OSError):
            return None
        if not isinstance(message, dict) or "traceback" not in message:
            return None
        text = str(message["traceback"]).rstrip()
        return WorkerError(
            f"worker {worker_idx} raised {message.get('exception_type')}: {message.get('exception_msg')}\n{text}",
            remote_traceback=text,
        )


class EndWatch:
    """Calls a function once a collector has been shut down: the collector itself does not tell its schemes.

    Args:
        collector: Has its workers' processes; held weakly.
        shutdown: Called in a thread of this object; may call ``stop``.
    """

    def __init__(self, collector: Any, shutdown: Callable[[], None]) -> None:
        self._collector = weakref.ref(collector)
        self._sentinels = [process.sentinel for process in collector.procs]
        self._shutdown = shutdown
        self._stopped = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="weight-sync-end-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join(0.9)

    def _run(self) -> None:
        try:
            waiting: set[Any] = {*self._sentinels, self._wake_reader}
            while len(waiting) > 1 and not self._stopped.is_set():
                waiting -= set(connection.wait(waiting))
            # Workers that crashed are no end: pushes have to go on telling so.
            while not self._stopped.is_set() and not getattr(self._collector(), "closed", True):
                self._stopped.wait(0.2)
            if not self._stopped.is_set():
                self._shutdown()
        finally:
            self._wake_reader.close()
            self._wake_writer.close()
