"""When does a worker that died get a replacement? The policy alone: it starts nothing, waits for nothing.

    UP --died--> DOWN --its time has come--> STARTING --joined--> UP
     |            ^ |                          | |
     |            | +---- stopped -------------|-|--> (nothing is restarted any more)
     |            +------ died ----------------+ |
     +-- died too often, or by its own error ----+--> ENDED

A worker is replaced at most ``max_restarts`` times within any ten minutes. The first replacement starts at once; one
that dies before it has made a batch is followed after half a second, then one, two, ... up to thirty. An error in the
user's own code is no death: it would happen again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from lightning_weightsync.errors import LayoutMismatchError, WeightSyncError, WorkerDied, WorkerError

WINDOW = 600.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0


class Condition(Enum):
    """See the module's picture."""

    UP = "up"
    DOWN = "down"
    STARTING = "starting"
    ENDED = "ended"


_MOVES = {
    Condition.UP: {Condition.DOWN, Condition.ENDED},
    Condition.DOWN: {Condition.STARTING},
    Condition.STARTING: {Condition.UP, Condition.DOWN, Condition.ENDED},
    Condition.ENDED: set[Condition](),
}


@dataclass
class _Record:
    """What is known of one index."""

    condition: Condition
    due: float = 0.0
    futile: int = 0  # deaths since the last batch
    restarts: int = 0
    restarted_at: list[float] = field(default_factory=list)  # within the window
    deaths: list[tuple[float, Exception]] = field(default_factory=list)  # within the window


class Supervisor:
    """Decides what becomes of workers that die. Whoever calls it holds one lock around all calls.

    Args:
        max_restarts: For each worker, within any ten minutes.
        clock: Seconds that never go back.

    Attributes:
        ended: Workers that are not replaced, and why: their run is over.
        stopped: Whether nothing is restarted any more.
        total_restarts: How many replacements have been started, of all workers.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self.ended: dict[int, Exception] = {}
        self.stopped = False
        self.total_restarts = 0
        self._clock = clock
        self._records: dict[int, _Record] = {}

    def watch(self, worker_ids: Iterable[int]) -> None:
        """These workers are up; a worker that dies before it is watched is not replaced."""
        self._records |= {index: _Record(Condition.UP) for index in worker_ids}

    def add(self, worker_ids: Iterable[int]) -> None:
        """These workers are new, and due to be started: that is no restart yet."""
        self._records |= {index: _Record(Condition.DOWN, self._clock(), restarts=-1) for index in worker_ids}

    def remove(self, worker_ids: Iterable[int]) -> None:
        """Nobody wants these workers any more."""
        for index in worker_ids:
            self._records.pop(index, None)
            self.ended.pop(index, None)

    def died(self, worker_idx: int, cause: Exception) -> float | None:
        """A worker, or a replacement that was starting, is lost.

        Args:
            worker_idx: Who.
            cause: Why. ``WorkerError`` and ``LayoutMismatchError`` are the user's code, and end the run; so does what
                is no fault of a worker, its link or the system at all.

        Returns:
            Seconds until a replacement is due; ``None`` if there will be none, and ``ended`` says why.
        """
        record = self._records.get(worker_idx)
        if record is not None and record.condition in (Condition.DOWN, Condition.ENDED):
            return None  # of a death that is known already
        if record is None or self.max_restarts == 0 or not _is_loss(cause):
            self._end(worker_idx, record, cause)
            return None
        now = self._clock()
        record.deaths = [(at, why) for at, why in record.deaths if at > now - WINDOW] + [(now, cause)]
        record.restarted_at = [at for at in record.restarted_at if at > now - WINDOW]
        if len(record.restarted_at) >= self.max_restarts:
            self._end(worker_idx, record, self._too_often(worker_idx, record))
            return None
        wait = min(_FIRST_WAIT * 2 ** (record.futile - 1), _LONGEST_WAIT) if record.futile else 0.0
        record.futile += 1
        record.due = now + wait
        _move(record, Condition.DOWN)
        return wait

    def due(self) -> list[int]:
        """Workers whose replacement is to be started now."""
        if self.stopped:
            return []
        now = self._clock()
        return [i for i, record in self._records.items() if record.condition is Condition.DOWN and now >= record.due]

    def starting(self, worker_idx: int) -> None:
        """A replacement of this worker is being started."""
        record = self._records[worker_idx]
        _move(record, Condition.STARTING)
        record.restarts += 1
        if record.restarts:
            self.total_restarts += 1
            record.restarted_at.append(self._clock())

    def joined(self, worker_idx: int) -> None:
        """A replacement is in its place."""
        _move(self._records[worker_idx], Condition.UP)

    def made_batch(self, worker_idx: int) -> None:
        """A worker is of use: its next death is taken for the first one, as far as waiting goes."""
        if worker_idx in self._records:
            self._records[worker_idx].futile = 0

    def stop(self) -> None:
        """Nothing is restarted from here on."""
        self.stopped = True

    def condition(self, worker_idx: int) -> Condition | None:
        """Of one worker; ``None`` before it is watched."""
        record = self._records.get(worker_idx)
        return record.condition if record is not None else None

    def restarts(self, worker_idx: int) -> int:
        """How many replacements of this worker have been started."""
        record = self._records.get(worker_idx)
        return max(0, record.restarts) if record is not None else 0

    def last_death(self, worker_idx: int) -> Exception | None:
        """Why this worker, or the one before it, died; ``None`` if none did within ten minutes."""
        record = self._records.get(worker_idx)
        return record.deaths[-1][1] if record is not None and record.deaths else None

    def repairs(self, worker_idx: int, cause: Exception) -> bool:
        """Whether this failure of a worker is a loss that is, or has been, made good by a replacement."""
        record = self._records.get(worker_idx)
        if self.stopped or record is None or record.condition is Condition.ENDED:
            return False
        if record.condition is not Condition.UP:  # who joins starts from what was pushed last
            return _is_loss(cause)
        return isinstance(cause, WorkerDied) or any(cause is known for _, known in record.deaths)

    def _end(self, worker_idx: int, record: _Record | None, cause: Exception) -> None:
        if record is not None:
            _move(record, Condition.ENDED)
        self.ended.setdefault(worker_idx, cause)

    def _too_often(self, worker_idx: int, record: _Record) -> Exception:
        lines = [str(why).partition("\n") for _, why in record.deaths]
        causes = "; ".join(f"{count}) {line}" for count, (line, _, _) in enumerate(lines, 1))
        last_stack = lines[-1][2]
        return WorkerDied(
            f"worker {worker_idx} was lost {len(record.deaths)} times within {WINDOW / 60:.0f} minutes, and is "
            f"restarted at most {self.max_restarts} times (max_restarts): {causes}\n{last_stack}".rstrip()
        )


def _is_loss(cause: Exception) -> bool:
    return isinstance(cause, WeightSyncError | OSError) and not isinstance(cause, WorkerError | LayoutMismatchError)


def _move(record: _Record, to: Condition) -> None:
    if to not in _MOVES[record.condition]:
        raise RuntimeError(f"a worker that is {record.condition.value} cannot become {to.value}")
    record.condition = to
