"""Which flat slot may be written next? A pool in which a slot is rewritten only when nobody holds it.

A slot is held by the writer that fills it, by each delivery of it that has not settled, and by each worker that has
it mapped as its current weights. Two slots suffice while everybody keeps up; each slow worker may hold one more. A
slot of a holder that we have lost is *retired*, and never written again: a worker that we gave up may still be
reading it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.transports.comparing import same_bytes
from lightning_weightsync.transports.filling import Filling
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.memory import create_memory_file, map_memory
from lightning_weightsync.transports.pages import prefault

Ranges = list[tuple[int, int]]
"""Of bytes: each from the first to one past the last, ascending, without overlap."""

_WORTH_A_MESSAGE = 64 << 10


@dataclass(eq=False)
class Slot:
    """One model in one version, as flat bytes.

    Attributes:
        index: Names the slot to workers; never used twice in a pool.
        memory: uint8, 1-dimensional.
        views: Each stored leaf of the layout, in its order, as a view into ``memory``.
        descriptor: Of the memory file behind it, to hand to workers; -1 where it is private.
        digest: SHA-256 of the leaves, where pushes are verified.
        filling: Says how many bytes are there, where the slot leaves while it is written; ``None``: all are.
        saved: How many bytes were not written because they were there already.
        edition: How often it was taken to be written.
        changes: See ``SlotPool.changes``.
        holders: Who needs its bytes to stay as they are.
        retired: Whether it is never to be written again.
    """

    index: int
    memory: Tensor
    views: list[Tensor]
    descriptor: int
    digest: str | None = None
    filling: Filling | None = None
    saved: int = 0
    edition: int = 0
    changes: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    holders: set[Hashable] = field(default_factory=set)
    retired: bool = False


class SlotPool:
    """Slots of equal size, made when they are first needed.

    Args:
        layout: Of the model that a slot holds.
        max_slots: How many may exist at a time.
        shared: Whether slots lie in memory files that workers can map, or in private memory.
        device: Where private memory is.
    """

    def __init__(
        self, layout: WeightLayout, max_slots: int, *, shared: bool, device: torch.device | str = "cpu"
    ) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes
        self.max_slots = max_slots
        self.shared = shared
        self.device = torch.device(device)
        self.when_retired: list[Callable[[int], None]] = []
        self._slots: dict[int, Slot] = {}
        self._made = 0
        self._mutex = threading.RLock()
        self._any_retired = False
        self._closed = False

    def prefault(self, count: int, seconds: float) -> None:
        """Make slots, and have their pages there now: the first touch of a slot costs several times a later write.

        Args:
            count: How many slots there are to be, within ``max_slots``.
            seconds: How long the system is asked for huge pages.
        """
        deadline = time.monotonic() + seconds
        with self._mutex:
            while len(self._slots) < min(count, self.max_slots):
                slot = self._make()
                if slot.descriptor >= 0:
                    prefault(slot.memory, deadline - time.monotonic())
                else:
                    slot.memory.zero_()

    def try_acquire(self, holder: Hashable) -> Slot | None:
        """A slot that nobody holds, now held by ``holder``; ``None`` while every slot is held.

        Raises:
            WeightSyncError: One more could be made, and there is no memory for it; or the pool was closed.
        """
        with self._mutex:
            in_use = [slot for slot in self._slots.values() if not slot.retired]
            free = next((slot for slot in in_use if not slot.holders), None)
            if free is None and len(in_use) < self.max_slots:
                free = self._make()
            if free is not None:
                free.holders.add(holder)
                free.edition += 1
                free.filling = None
                free.changes.clear()
            return free

    def holders(self) -> list[str]:
        """Who holds slots, for messages."""
        with self._mutex:
            return sorted({str(holder) for slot in self._slots.values() for holder in slot.holders})

    def hold(self, slot: Slot, holder: Hashable) -> None:
        """Keep the slot's bytes as they are for ``holder``."""
        with self._mutex:
            slot.holders.add(holder)

    def release(self, slot: Slot, holder: Hashable) -> None:
        """``holder`` does not need it any more."""
        with self._mutex:
            slot.holders.discard(holder)
        self._dispose()

    def release_all(self, holder: Hashable) -> None:
        """``holder`` does not need any slot any more."""
        with self._mutex:
            for slot in self._slots.values():
                slot.holders.discard(holder)
        self._dispose()

    def hold_only(self, slot: Slot, holder: Hashable) -> None:
        """Keep this slot's bytes as they are for ``holder``, which needs none of the others any more."""
        with self._mutex:
            for other in self._slots.values():
                other.holders.discard(holder)
            slot.holders.add(holder)
        self._dispose()

    def held_by(self, holders: Collection[Hashable], keepers: Collection[Hashable], *, also: Hashable) -> Slot | None:
        """The one slot that is held by each of these holders, and now by one more; ``None`` without one.

        It is not retired, and nobody else holds it but keepers.
        """
        with self._mutex:
            found = next((slot for slot in self._slots.values() if slot.holders.issuperset(holders)), None)
            if found is None or found.retired or not found.holders.difference(holders).issubset(keepers):
                return None
            found.holders.add(also)
            return found

    def changes(self, slot: Slot, since: Slot) -> Ranges:
        """Where two slots differ, by whole leaves; both are held by the caller. Found once per pair.

        Leaves that did not change are in it where they lie between changed ones and are not worth a message of their
        own.
        """
        key = (since.index, since.edition)
        found = slot.changes.get(key)
        if found is None:
            found = slot.changes[key] = []
            here, there = slot.memory.data_ptr(), since.memory.data_ptr()
            for leaf in self.layout.leaves:
                start, end = leaf.offset, leaf.offset + leaf.nbytes
                if end > start and not same_bytes(here + start, there + start, leaf.nbytes):
                    if found and start - found[-1][1] < _WORTH_A_MESSAGE:
                        start = found.pop()[0]
                    found.append((start, end))
        return found

    def retire_all(self, holder: Hashable) -> None:
        """``holder`` is lost, and may read its slots for ever: they are never written again.

        Others that hold them go on using them; with the last one they are disposed of.
        """
        with self._mutex:
            for slot in self._slots.values():
                if holder in slot.holders:
                    slot.holders.discard(holder)
                    slot.retired = True
                    self._any_retired = True
        self._dispose()

    def close(self) -> None:
        """Give every slot up; no more are made. The memory goes when its last user has unmapped it."""
        with self._mutex:
            self._closed = True
            for slot in self._slots.values():
                _close(slot)
                slot.holders.clear()  # one that knows the slots that it holds would keep them, and they it
            self._slots.clear()

    def __len__(self) -> int:
        return len(self._slots)

    def _dispose(self) -> None:
        """Drop retired slots that nobody holds any more."""
        if not self._any_retired:
            return
        with self._mutex:
            gone = [slot for slot in self._slots.values() if slot.retired and not slot.holders]
            for slot in gone:
                del self._slots[slot.index]
                _close(slot)
            self._any_retired = any(slot.retired for slot in self._slots.values())
        for slot in gone:
            for tell in self.when_retired:
                tell(slot.index)

    def _make(self) -> Slot:
        if self._closed:  # by another thread, meanwhile
            raise WeightSyncError("the slots were given up: this end was shut down")
        descriptor = -1
        try:
            if self.shared:
                descriptor = create_memory_file("lightning_weightsync-weights")
                memory = map_memory(descriptor, self.nbytes)
            else:
                memory = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)  # padding is sent too
        except (OSError, RuntimeError) as error:  # torch's allocator raises the latter
            if descriptor >= 0:
                os.close(descriptor)
            raise WeightSyncError(
                f"there is no memory for one more slot of {self.nbytes} bytes, beside {len(self._slots)} (of at most "
                f"{self.max_slots}) that there are: {error}"
            ) from error
        slot = Slot(self._made, memory, list(self.layout.views(memory).values()), descriptor)
        self._made += 1
        self._slots[slot.index] = slot
        return slot


def _close(slot: Slot) -> None:
    if slot.descriptor >= 0:
        os.close(slot.descriptor)
        slot.descriptor = -1
    slot.filling = None  # one that has failed knows the slot, and weights that were given
