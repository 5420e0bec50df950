"""Which batch is next, who is asked for another, and what is too old? The policy of groups with ``sync=False``.

Pure bookkeeping: it talks to nobody, waits for nobody and knows no tensors. A slot of a worker goes round

    FREE --requests()--> ASKED --arrived()--> READY --hand_over(), or next() finds it too old--> FREE
                                                  +--hand_over(lent=True)--> LENT --give_back()--> FREE

Without a bound every free slot is asked for at once: two slots let a worker fill one while the batch in the other one
waits. With ``max_staleness=k`` nothing older than ``k`` versions is handed over, and two things keep the number of
batches that are collected in vain small:

* **The window.** Each batch that is handed over before another one makes that one older, because the trainer pushes in
  between. How many versions one costs is measured (over the last 16 hand-overs). A batch is asked for only if, with
  all that go before it, it would still be fresh enough if it began with the newest weights; and it is asked to begin
  with weights that are new enough for that.
* **Holding back.** A worker that is too slow for the bound (while it makes one batch, the trainer learns from more than
  ``k`` of the others') is left alone for 1, 2, 4, ... 32 hand-overs after each batch that came too late, and tried
  again after that. As long as the others keep the trainer busy, nobody waits for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

MEASURED = 16
"""Hand-overs over which the number of versions per hand-over is measured."""

LONGEST_PAUSE = 32
"""Hand-overs for which a worker is held back at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """Ask this worker to fill this slot, with weights of at least this version, if they come soon."""

    worker: int
    slot: int
    version: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that waits for the trainer: whose, where, its oldest sample's version, and how many came before it."""

    worker: int
    slot: int
    oldest: int
    number: int


@dataclass
class _Worker:
    free: list[int]
    asked: dict[int, int] = field(default_factory=dict)  # slot -> newest version when it was asked for
    ready: int = 0
    last_asked: int = -1
    pause: int = 0
    paused_until: int = 0


class Feed:
    """The slots of all workers, and the order in which the trainer gets what is in them.

    Args:
        workers: Their indices.
        slots: How many of each may be asked for or ready.
        max_staleness: How many versions a batch's oldest sample may be behind when it is handed over; ``None``: any
            number.
        spare: How many further ones each has, for batches that are lent.
    """

    def __init__(self, workers: Iterable[int], slots: int, max_staleness: int | None = None, *, spare: int = 0) -> None:
        self.max_staleness = max_staleness
        self._slots = slots
        self._spare = spare
        self._workers: dict[int, _Worker] = {}
        self._dropped: Counter[int] = Counter()
        self._newly_dropped: list[Ready] = []
        self._ready: list[Ready] = []
        self._versions: deque[int] = deque(maxlen=MEASURED + 1)  # the newest one at each hand-over
        self._handed_over = 0
        self._asked = 0
        self._arrived = 0
        for index in workers:
            self.add(index)

    @property
    def dropped(self) -> dict[int, int]:
        """How many batches of each worker were too old to be handed over."""
        return dict(self._dropped)

    def take_dropped(self) -> list[Ready]:
        """The batches that were dropped since the last call."""
        taken, self._newly_dropped = self._newly_dropped, []
        return taken

    def add(self, worker: int) -> None:
        """There is a new worker; all of its slots are free. A replacement of a lost one has another index."""
        self._workers[worker] = _Worker(list(range(self._slots + self._spare)))

    def lose(self, worker: int) -> None:
        """This worker is gone: what was asked of it does not come. Its batches that are ready stay."""
        del self._workers[worker]

    def forget(self, worker: int) -> None:
        """Nobody wants the batches of a worker that is gone any more."""
        self._ready = [batch for batch in self._ready if batch.worker != worker]

    def knows(self, worker: int) -> bool:
        """Whether this worker was added, and not lost since."""
        return worker in self._workers

    def holds(self, worker: int) -> bool:
        """Whether a batch of this worker is ready."""
        return any(batch.worker == worker for batch in self._ready)

    def requests(self, version: int, *, waiting: bool) -> list[Request]:
        """Whom to ask for another batch now; those slots count as asked for from here on.

        Args:
            version: The newest.
            waiting: Whether the trainer waits for a batch; else it is about to learn from one that it was handed.
        """
        found = []
        while (index := self._whom(version)) is not None:
            passed = self._versions_until(self._ahead(version), version, waiting)
            if self.max_staleness is not None and passed > self.max_staleness:
                break
            found.append(self._ask(index, version, passed))
        if waiting and not self._ready and not self._ahead(version, since=version):
            # What is under way has been for a while: with a slow worker, of which the trainer would have to wait for
            # the end. Or there is nothing.
            index = self._whom(version, paused=True)
            if index is not None:
                found.append(self._ask(index, version, 0))
        return found

    def arrived(self, worker: int, slot: int, oldest: int) -> None:
        """A worker has filled a slot that it was asked for.

        Args:
            worker: Its index.
            slot: The slot.
            oldest: Version of the batch's oldest sample.
        """
        known = self._workers[worker]
        del known.asked[slot]
        known.ready += 1
        self._ready.append(Ready(worker, slot, oldest, self._arrived))
        self._arrived += 1

    def next(self, version: int) -> Ready | None:
        """The batch that is next, if one is there; it stays where it is until ``hand_over``.

        Those that have become too old are dropped, and counted. Batches go in the order in which they came, so nobody's
        are passed over; with a bound the one that would be too old soonest goes first.

        Args:
            version: The newest.
        """
        if self.max_staleness is not None:
            for batch in [b for b in self._ready if version - b.oldest > self.max_staleness]:
                self._drop(batch)
        if not self._ready:
            return None
        if self.max_staleness is None:
            return self._ready[0]
        return min(self._ready, key=lambda batch: (batch.oldest, batch.number))

    def hand_over(self, batch: Ready, version: int, *, lent: bool = False) -> None:
        """The trainer has this batch.

        Args:
            batch: What ``next`` has returned.
            version: The newest.
            lent: Whether it still looks into the slot, until ``give_back``. Else that is free.
        """
        worker = self._take_out(batch)
        if worker is not None:
            worker.pause //= 2
            if not lent:
                worker.free.append(batch.slot)
        self._versions.append(version)
        self._handed_over += 1

    def give_back(self, worker: int, slot: int) -> None:
        """Nobody looks into a slot any more that was lent."""
        if worker in self._workers:
            self._workers[worker].free.append(slot)

    def collecting(self, worker: int) -> bool:
        """Whether this worker has been asked for a batch that has not come yet."""
        return bool(self._workers[worker].asked)

    def _drop(self, batch: Ready) -> None:
        self._dropped[batch.worker] += 1
        self._newly_dropped.append(batch)
        worker = self._take_out(batch)
        if worker is not None:
            worker.free.append(batch.slot)
            worker.pause = min(LONGEST_PAUSE, max(1, 2 * worker.pause))
            worker.paused_until = self._handed_over + worker.pause

    def _take_out(self, batch: Ready) -> _Worker | None:
        """It is not ready any more; returns whose it is, if that worker is still there."""
        self._ready.remove(batch)
        worker = self._workers.get(batch.worker)
        if worker is not None:
            worker.ready -= 1
        return worker

    def _ask(self, index: int, version: int, passed: int) -> Request:
        worker = self._workers[index]
        slot = min(worker.free)  # rather one that was used before than new memory
        worker.free.remove(slot)
        worker.asked[slot] = version
        worker.last_asked = self._asked
        self._asked += 1
        return Request(index, slot, 0 if self.max_staleness is None else max(0, version + passed - self.max_staleness))

    def _whom(self, version: int, *, paused: bool = False) -> int | None:
        """Of the workers that may be asked, the one of which least is under way; it was asked longest ago, if several.

        Args:
            version: The newest.
            paused: Whether those that are held back will do; then the one whose pause is shortest.
        """
        able = {
            index: worker
            for index, worker in self._workers.items()
            if len(worker.asked) + worker.ready < self._slots
            and (paused or worker.paused_until <= self._handed_over)
            # What comes after a batch that is too late already is later still.
            and all(map(partial(self._alive, version), worker.asked.values()))
        }

        def rank(index: int) -> tuple[int, int, int]:
            worker = able[index]
            return worker.pause if paused else 0, len(worker.asked) + worker.ready, worker.last_asked

        return min(able, key=rank, default=None)

    def _ahead(self, version: int, since: int = 0) -> int:
        """How many batches, asked for at this version or later, are ready or under way and can still be handed over."""
        under_way = [asked for worker in self._workers.values() for asked in worker.asked.values() if asked >= since]
        return len(self._ready) + sum(self._alive(version, asked) for asked in under_way)

    def _alive(self, version: int, asked: int) -> bool:
        """Whether a batch that was asked for when ``asked`` was the newest version can still be handed over."""
        return self.max_staleness is None or version - asked <= self.max_staleness

    def _versions_until(self, hand_overs: int, version: int, waiting: bool) -> int:
        """How many versions will be pushed while so many more batches are handed over.

        A push every fourth batch is a quarter of a version per hand-over, and comes after the fourth, not before.
        """
        since_push = sum(1 for _ in takewhile(version.__eq__, reversed(self._versions)))
        rate = self._versions_per_hand_over()
        if not waiting:  # the last one that was handed over has not been learned from yet
            since_push, hand_overs = since_push - 1, hand_overs + 1
        return math.floor(min(since_push * rate, 0.999) + hand_overs * rate + 1e-9)

    def _versions_per_hand_over(self) -> float:
        if not self._versions:
            return 1.0
        passed, hand_overs = self._versions[-1] - self._versions[0], len(self._versions) - 1
        if hand_overs == MEASURED:
            return passed / hand_overs
        # While little is known: a push may be due that has not been seen yet.
        return max(passed / max(1, hand_overs), (passed + 1) / (hand_overs + 1))
