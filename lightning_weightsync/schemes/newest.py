"""What does a worker that joins later start from? The newest snapshot that was pushed, kept while there is room for it.

All workers that are up hold these very bytes or are about to, which another reading of the source would not give: it
may have changed since, or pushes may have been given weights of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_weightsync.transports.slots import Slot, SlotPool


class NewestWeights:
    """Holds, for each worker, the newest snapshot that was meant for it; one that was meant for all is held once.

    Not safe for several threads: whoever calls it holds the hub's ``pushing``.

    Args:
        pool: Of the slots.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._kept: dict[int, tuple[Slot, bytes]] = {}

    def keep(self, worker_ids: Iterable[int], slot: Slot, extra: bytes) -> None:
        """This is the newest snapshot for these workers."""
        before = {kept.index: kept for kept, _ in self._kept.values()}
        self._pool.hold(slot, self)
        self._kept.update(dict.fromkeys(worker_ids, (slot, extra)))
        in_use = {kept.index for kept, _ in self._kept.values()}
        for index, kept in before.items():
            if index not in in_use:
                self._pool.release(kept, self)

    def drop(self, worker_ids: Iterable[int]) -> None:
        """Nobody will join as one of these workers."""
        before = {kept.index: kept for kept, _ in self._kept.values()}
        for index in worker_ids:
            self._kept.pop(index, None)
        in_use = {kept.index for kept, _ in self._kept.values()}
        for index, kept in before.items():
            if index not in in_use:
                self._pool.release(kept, self)

    def of(self, worker_idx: int) -> tuple[Slot, bytes] | None:
        """Slot and extra state of the newest snapshot for a worker; ``None`` if its slot was needed for another."""
        return self._kept.get(worker_idx)

    def give_way(self) -> bool:
        """Let a slot go that nobody else holds, for a newer version to be written there; whether there was one.

        With ``max_slots=1`` each push needs it. Until the next snapshot is complete there is no newest one then.
        """
        for slot, _ in self._kept.values():
            if not slot.retired and slot.holders == {self}:
                self._kept = {index: kept for index, kept in self._kept.items() if kept[0] is not slot}
                self._pool.release(slot, self)
                return True
        return False

    def __repr__(self) -> str:
        return "what a replacement starts from"
