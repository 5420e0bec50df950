"""How do bytes get to workers of this host? They do not move: sender and workers map the same slot.

The sender writes a version once, whatever the number of workers; a worker that is told "slot 3" finds the bytes
there. Slots are anonymous memory files. Their descriptors travel over the control channel, a Unix socket
(``SCM_RIGHTS``), and "same host" *means* that this worked. Workers map them privately (copy on write): one that
writes its own weights changes nobody else's.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch

from lightning_weightsync.transports.base import Ticket, TransferFailed
from lightning_weightsync.transports.control import ChannelClosed
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.slots import Slot, SlotPool


class SharedMemoryTransport:
    """The sender's end, for all workers of this host together.

    Args:
        model_id: The destination, as the messages about slots name it.
        pool: The model's slots; made of memory files.
    """

    follows = False

    def __init__(self, model_id: str, pool: SlotPool) -> None:
        self.model_id = model_id
        self._pool = pool
        self._links: dict[int, WorkerLink] = {}
        self._known: dict[int, set[int]] = {}
        self._holding: dict[int, bool] = {}
        pool.when_retired.append(self._tell_retired)

    def add(self, link: WorkerLink, *, holds: bool) -> None:
        """Serve one more worker.

        Args:
            link: To a worker of this host.
            holds: Whether it keeps a slot as its current weights after it has applied it, or copies and is done.
        """
        self._links[link.worker_idx] = link
        self._known[link.worker_idx] = set()
        self._holding[link.worker_idx] = holds
        link.when_ended(lambda: self._lost(link))

    def connect(self, deadline: float) -> None:
        """There is nobody to meet."""

    def send(self, worker_idx: int, slot: Slot) -> Ticket:
        """Name the slot; its descriptor goes ahead the first time a worker hears of it."""
        link, known = self._links[worker_idx], self._known[worker_idx]
        if slot.index not in known:
            known.add(slot.index)
            link.channel.send(
                "slot",
                model_id=self.model_id,
                index=slot.index,
                nbytes=self._pool.nbytes,
                descriptor=slot.descriptor,
            )
        return {"slot": slot.index}

    def settled(self, worker_idx: int, slot: Slot, *, applied: bool) -> None:
        """A worker has answered: if it has applied the slot, it holds this one and no other."""
        if applied and self._holding.get(worker_idx) and self._links[worker_idx].state is LinkState.OPEN:
            holder = ("worker", worker_idx, self._links[worker_idx].generation)
            self._pool.hold_only(slot, holder)

    def close(self) -> None:
        """Nothing of its own: the pool is its owner's."""

    def _lost(self, link: WorkerLink) -> None:
        if self._links.get(link.worker_idx) is link:
            del self._links[link.worker_idx]
            self._known.pop(link.worker_idx, None)
        # The process may be stopped rather than dead, and read on: what it has mapped is never written again.
        self._pool.retire_all(("worker", link.worker_idx, link.generation))

    def _tell_retired(self, index: int) -> None:
        for worker_idx, known in list(self._known.items()):
            if index in known:
                known.discard(index)
                with contextlib.suppress(ChannelClosed):  # then it is about to be lost itself
                    self._links[worker_idx].channel.try_send("retire", model_id=self.model_id, index=index)


class SharedMemoryReceiver:
    """The worker's end: the descriptor and a private mapping of each slot that it was told of."""

    def __init__(self) -> None:
        self._slots: dict[int, SlotMemory] = {}

    def connect(self, deadline: float) -> None:
        """There is nobody to meet."""

    def learn(self, index: int, nbytes: int, descriptor: int) -> None:
        """Take in a new slot, and its descriptor.

        Raises:
            TransferFailed: It is no file of that size.
        """
        try:
            if os.fstat(descriptor).st_size < nbytes:
                raise TransferFailed(f"slot {index} is smaller than the {nbytes} bytes that were announced")
            memory = torch.empty(0, dtype=torch.uint8)
            if nbytes:
                memory = torch.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        except (OSError, TransferFailed) as error:
            os.close(descriptor)
            raise TransferFailed(f"slot {index} cannot be mapped: {error}") from error
        self._slots[index] = SlotMemory(memory, descriptor)

    def forget(self, index: int) -> SlotMemory | None:
        """The sender will not use this slot again; its memory goes when no window shows it and no tensor views it."""
        return self._slots.pop(index, None)

    def stage(self, ticket: Ticket, nbytes: int, deadline: float) -> SlotMemory:
        """The slot that the ticket names; nothing is copied. See ``ReceiverTransport``."""
        index = ticket.get("slot", -1)
        slot = self._slots.get(index)
        if slot is None or slot.memory.numel() != nbytes:
            raise TransferFailed(f"slot {index} is not known here; known are {sorted(self._slots)}")
        return slot

    def entered(self, slot: SlotMemory, *, held: bool) -> None:
        """Nothing has to be done: the sender knows which slot is in force, and does not write it."""

    def close(self) -> None:
        """Forget every slot; see ``forget``."""
        self._slots.clear()
