"""Who looks after the workers while the trainer learns? A thread that notices losses, and one for each replacement.

Nobody waits for these threads but ``join``: a replacement imports, builds and connects while the others collect.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from lightning_weightsync.collectors.roster import LOOK_AROUND

log = logging.getLogger(__name__)


class Ward(Protocol):
    """What is looked after: a pool."""

    def notice(self) -> None:
        """See which workers are lost; blocks for a twentieth of a second at most."""
        ...

    def due(self) -> Iterable[int]:
        """Workers whose replacement is to be started now; each is named once."""
        ...

    def replace(self, worker_idx: int) -> None:
        """Start a worker's replacement and connect it; blocks until it has joined, or was lost too. Never raises."""
        ...

    def could_not_replace(self, worker_idx: int, error: Exception) -> None:
        """There was no thread left in which to replace a worker that was due."""
        ...


class Caretaker:
    """Looks ten times a second, and at once when it is called.

    Args:
        ward: Looked after from ``start`` to ``stop``.
    """

    def __init__(self, ward: Ward) -> None:
        self._ward = ward
        self._called = threading.Event()
        self._stopping = False
        self._watch: threading.Thread | None = None
        self._replacing: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to look."""
        self._watch = _started("weight-sync-caretaker", self._look)

    def call(self) -> None:
        """There may be something to do; does not block."""
        self._called.set()

    def stop(self) -> None:
        """No thread is started any more; does not wait for those that run."""
        self._stopping = True
        self._called.set()

    def join(self, timeout: float) -> None:
        """Wait until all threads have left, for at most ``timeout`` seconds each."""
        if self._watch is not None:
            self._watch.join(timeout)
        for thread in self._replacing:
            thread.join(timeout)

    def _look(self) -> None:
        while not self._stopping:
            for look in (self._ward.notice, self._replace_those_due):
                try:
                    look()
                except Exception:  # without this thread, nobody would be replaced any more
                    log.exception("looking after the workers failed")
            self._called.wait(LOOK_AROUND)
            self._called.clear()

    def _replace_those_due(self) -> None:
        self._replacing = [thread for thread in self._replacing if thread.is_alive()]
        for worker_idx in self._ward.due():
            name = f"weight-sync-restart-{worker_idx}"
            try:
                self._replacing.append(_started(name, partial(self._ward.replace, worker_idx)))
            except RuntimeError as error:
                self._ward.could_not_replace(worker_idx, error)


def _started(name: str, function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, name=name, daemon=True)
    thread.start()
    return thread
