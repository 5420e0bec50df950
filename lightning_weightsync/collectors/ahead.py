"""How does the trainer get batches that its workers collect ahead? One at a time, as they are ready (``sync=False``).

``Feed`` decides which and whom; this asks, listens and lends. Nothing of it runs while the trainer learns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from lightning_weightsync.collectors.feed import Feed
from lightning_weightsync.collectors.fleet import FleetOptions
from lightning_weightsync.collectors.late import LateLog
from lightning_weightsync.collectors.member import Member, Rollout, WorkerState
from lightning_weightsync.collectors.pool import WorkerPool
from lightning_weightsync.collectors.rollouts import LENT_SLOTS, NUM_SLOTS
from lightning_weightsync.transports.control import Message


class AheadPool(WorkerPool):
    """A pool whose workers collect ahead.

    The feed knows each process under a number of its own: the batches that a lost worker has finished are handed over
    all the same, and are not taken for those of its replacement. What it had not finished is not missed: its
    replacement collects other batches.

    Args:
        options: See ``Fleet``.
        max_staleness: See ``Feed``.
    """

    def __init__(self, options: FleetOptions, max_staleness: int | None) -> None:
        self._feed = Feed([], NUM_SLOTS, max_staleness, spare=LENT_SLOTS)
        self._numbers = count()
        self._known: dict[int, tuple[int, Member]] = {}  # number -> index and process, as long as it has batches
        self._indices: dict[int, int] = {}  # number -> index
        self._answers: list[Message] = []  # what came with batches since the last one that was handed over
        self._late = LateLog(max_staleness)
        super().__init__(options)

    def collect(self, look_around: Callable[[], None]) -> Rollout:
        """One batch of one worker, in its slot, which is lent, or copied. Blocks until one is ready.

        Workers are asked for their next batches here, before the wait and after it, so that they collect while the
        trainer learns. One without a free slot waits for the trainer; its thread that applies pushes does not. If the
        wait is interrupted, nothing is lost: the next call goes on where it was.

        Args:
            look_around: Called about ten times a second while waiting; may raise to give up.

        Returns:
            The batch; its ``episodes`` and ``sums`` are those of batches that were too old, too.

        Raises:
            WorkerError: A worker's code raised; carries its traceback.
            WorkerDied: A worker was lost, and is not replaced (any more).
        """
        while True:
            self._take_batches()
            version = self.hub.version
            ready = self._feed.next(version)
            for late in self._feed.take_dropped():
                self._late.dropped(self._indices[late.worker], version - late.oldest)
            self._ask(version, waiting=True)
            if ready is not None:
                break
            look_around()
            self._wait_for_mail(member for _, member in self._known.values())
        self._feed.hand_over(ready, version, lent=True)
        reader = self._known[ready.worker][1].reader
        batch = reader.lend(ready.slot)
        if batch is None:
            batch = self._memory.concatenated([reader.read(ready.slot)])
            self._feed.give_back(ready.worker, ready.slot)
        self._ask(version, waiting=False)
        answers, self._answers = self._answers, []
        return Rollout.of(batch, answers)

    def stats(self) -> dict[int, dict[str, Any]]:
        """What is known of each worker."""
        stats, dropped = super().stats(), Counter[int]()
        for number, batches in self._feed.dropped.items():
            dropped[self._indices[number]] += batches
        for index, stat in stats.items():
            stat["dropped"] = dropped[index]
        return stats

    def _take_batches(self) -> None:
        """Take in what has come, see who is there and who is lost; raises if one is lost for good."""
        workers = dict(enumerate(self._workers))
        for index, member in workers.items():
            self._look(index, member)
        self._raise_if_over("waiting for 'batch'")
        with self._mutex:
            listed = {id(member) for _, member in self._known.values()}
            for index, member in workers.items():
                if member.state.is_up and id(member) not in listed:
                    number = next(self._numbers)
                    self._known[number], self._indices[number] = (index, member), index
                    self._feed.add(number)
            for number, (index, member) in list(self._known.items()):
                for slot in member.reader.take_back():
                    self._feed.give_back(number, slot)
                self._hear(number, index, member)

    def _hear(self, number: int, index: int, member: Member) -> None:
        """Take in the batches of one process, and its end."""
        while self._feed.knows(number) and (message := member.take("batch")) is not None:
            self._count_batch(index, message)
            self._answers.append(message)
            oldest = int(member.reader.read(message["slot"])["policy_version"].min())
            self._feed.arrived(number, message["slot"], oldest)
        if not member.state.is_up and self._feed.knows(number):
            self._feed.lose(number)
        if not self._feed.knows(number) and (member.state is WorkerState.STOPPED or not self._feed.holds(number)):
            self._feed.forget(number)  # if the group was made smaller, what it had not handed over is lost
            del self._known[number]
        elif member.state is WorkerState.COLLECTING and not self._feed.collecting(number):
            member.move(WorkerState.CONNECTED)

    def _ask(self, version: int, *, waiting: bool) -> None:
        for request in self._feed.requests(version, waiting=waiting):
            index, member = self._known[request.worker]
            with self._mutex:
                member.move(WorkerState.COLLECTING)
            self._send(index, member, "collect", slot=request.slot, version=request.version)
