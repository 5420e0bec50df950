"""Does a collector get on? A thread beside it that looks now and then, and tells when it has not for too long.

Slow is not stuck: what counts is progress (``Collector.progress``), for ``GymCollector`` the steps of its environments;
of a collector that tells of none, its batches.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

_LOOKS = 10
"""How often it is looked within ``timeout``."""


class Watch:
    """Watches over the making of batches: used as a context around each.

    Args:
        collector: Asked for its ``progress()``, if it has that.
        timeout: Seconds without progress, in the making of a batch, after which it is stuck (``env_timeout``).
        stuck: Called then, once, in the watching thread: with the seconds, what the collector is at, and the stack of
            the thread that makes the batches.
        failed: Called in its place, once, with what ``progress()`` has raised: nobody could tell any more.
    """

    def __init__(
        self,
        collector: Any,
        timeout: float,
        stuck: Callable[[float, object, str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._progress: Callable[[], tuple[int, object]] = getattr(collector, "progress", None) or _unknown
        self._timeout = timeout
        self._interval = min(1.0, timeout / _LOOKS)
        self._stuck, self._failed = stuck, failed
        self._maker = threading.get_ident()
        self._batches = 0
        self._making = False
        self._seen: tuple[int, int] | None = None
        self._looked = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """Begin to look; batches are made by the thread that has made this object."""
        threading.Thread(target=self._run, name="weight-sync-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._batches += 1
        self._making = True

    def __exit__(self, *exc: object) -> None:
        self._making = False

    def look(self, now: float) -> float:
        """Seconds without progress so far.

        Time in which nobody could look, because the process was stopped or starved, does not count: it was no
        environment's fault.
        """
        seen = (self._batches, self._progress()[0]) if self._making else None
        if seen is None or seen != self._seen:
            self._seconds = 0.0
        else:
            self._seconds += min(now - self._looked, 2 * self._interval)
        self._seen, self._looked = seen, now
        return self._seconds

    def _run(self) -> None:
        try:
            while self.look(time.monotonic()) < self._timeout:
                time.sleep(self._interval)
            at = self._progress()[1]
        except Exception as error:
            self._failed(error)
            return
        frame = sys._current_frames().get(self._maker)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._stuck(self._seconds, at, stack)


def _unknown() -> tuple[int, str]:
    return 0, "the collector, which has no progress() to tell more,"
