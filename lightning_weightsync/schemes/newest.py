"""What does a worker that joins later start from? The newest snapshot that was meant for it, kept while there is room.

Under its own version: the worker in whose place it comes holds these very bytes, or was about to. Another reading of
the source would not give them: it may have changed since, or the push may have been given weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightning_weightsync.transports.slots import Slot, SlotPool

NEWCOMERS = -1
"""Stands for workers that there are not yet: what was meant for all is meant for them."""


class Newest(NamedTuple):
    """A snapshot that was pushed.

    Attributes:
        slot: Its bytes.
        extra: Extra state of the modules.
        version: Under which it was pushed.
    """

    slot: Slot
    extra: bytes
    version: int


class NewestWeights:
    """Holds, for each worker, the newest snapshot that was meant for it; one that was meant for several is held once.

    Not safe for several threads: whoever calls it holds the hub's ``pushing``.

    Args:
        pool: Of the slots.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._kept: Mapping[int, Newest] = {}

    def keep(self, worker_ids: Iterable[int], newest: Newest) -> None:
        """This is the newest snapshot for these workers (``NEWCOMERS`` among them, if it is meant for all)."""
        self._pool.hold(newest.slot, self)
        self._change({**self._kept, **dict.fromkeys(worker_ids, newest)})

    def add(self, worker_ids: Iterable[int]) -> None:
        """There are more workers: they start from the newest snapshot that was meant for all."""
        newest = self._kept.get(NEWCOMERS)
        if newest is not None:
            self.keep(worker_ids, newest)

    def drop(self, worker_ids: Iterable[int]) -> None:
        """Nobody will join as one of these workers."""
        gone = set(worker_ids)
        self._change({index: kept for index, kept in self._kept.items() if index not in gone})

    def discard(self, slot: Slot) -> None:
        """Nobody can start from this one."""
        self._change({index: kept for index, kept in self._kept.items() if kept.slot is not slot})

    def of(self, worker_idx: int) -> Newest | None:
        """The newest snapshot for a worker; ``None`` if its slot was needed for another."""
        return self._kept.get(worker_idx)

    def needs(self, slot: Slot, *, but_for: Iterable[int]) -> bool:
        """Whether a slot is the newest snapshot of a worker beside these, which are about to have another one."""
        beside = self._kept.keys() - set(but_for)
        return any(self._kept[index].slot is slot for index in beside)

    def give_way(self) -> bool:
        """Let a slot go that nobody else holds, for a newer version to be written there; whether there was one.

        With ``max_slots=1`` each push needs it. Until the next snapshot is complete there is no newest one then.
        """
        for kept in sorted(self._kept.values(), key=lambda kept: kept.version):
            if not kept.slot.retired and kept.slot.holders == {self}:
                self.discard(kept.slot)
                return True
        return False

    def _change(self, kept: Mapping[int, Newest]) -> None:
        """What is kept from here on; slots that are not among it are released."""
        before, self._kept = self._kept, kept
        for slot in {old.slot for old in before.values()} - {new.slot for new in kept.values()}:
            self._pool.release(slot, self)

    def __repr__(self) -> str:
        return "what a replacement starts from"
