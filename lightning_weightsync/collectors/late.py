"""Whose batches come too late for ``max_staleness``, and who is told? The log: a line for each worker, now and then."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds between two lines about one worker; what is dropped in between is in the later one."""


class LateLog:
    """Tells of batches that were dropped.

    Args:
        max_staleness: The bound.
        clock: Seconds that never go back.
    """

    def __init__(self, max_staleness: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound = max_staleness
        self._clock = clock
        self._untold: Counter[int] = Counter()
        self._told_at: dict[int, float] = {}

    def dropped(self, worker_idx: int, age: int) -> None:
        """A batch of this worker was so many versions old when its turn came."""
        self._untold[worker_idx] += 1
        now = self._clock()
        if now - self._told_at.get(worker_idx, -EVERY) >= EVERY:
            self._told_at[worker_idx] = now
            count = self._untold.pop(worker_idx)
            batches = "a batch was" if count == 1 else f"{count} batches were"
            log.info(
                f"worker {worker_idx}: {batches} dropped as too old, the last one {age} versions "
                f"(max_staleness={self._bound})"
            )
