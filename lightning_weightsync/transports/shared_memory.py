"""How do bytes get to workers of this host? They do not move: sender and workers map the same slot.

The sender writes a version once, whatever the number of workers; a worker that is told "slot 3" finds the bytes
there. Slots are anonymous memory files. Their descriptors travel over the control channel, a Unix socket
(``SCM_RIGHTS``), and "same host" *means* that this worked. Workers map them privately (copy on write): one that
writes its own weights changes nobody else's.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from lightning_weightsync.transports.base import Ticket, TransferFailed
from lightning_weightsync.transports.control import ChannelClosed
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.memory import SlotMemory, map_memory
from lightning_weightsync.transports.slots import Slot, SlotPool


@dataclass(eq=False)
class _Worker:
    """What the sender knows of one worker.

    Attributes:
        link: To it.
        holds: Whether it keeps a slot as its current weights after it has applied it.
        known: The slots that it has been told of.
    """

    link: WorkerLink
    holds: bool
    known: set[int] = field(default_factory=set)


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
        self._workers: dict[int, _Worker] = {}
        pool.when_retired.append(self._tell_retired)

    def add(self, link: WorkerLink, *, holds: bool) -> None:
        """Serve one more worker.

        Args:
            link: To a worker of this host.
            holds: Whether it keeps a slot as its current weights after it has applied it, or copies and is done.
        """
        self._workers[link.worker_idx] = _Worker(link, holds)
        link.when_ended(lambda: self._lost(link))

    def connect(self, deadline: float) -> None:
        """There is nobody to meet."""

    def send(self, worker_idx: int, slot: Slot) -> Ticket:
        """Name the slot; its descriptor goes ahead the first time a worker hears of it."""
        worker = self._workers.get(worker_idx)
        if worker is None:
            raise TransferFailed(f"worker {worker_idx} is lost")
        if slot.index not in worker.known:
            worker.known.add(slot.index)
            worker.link.channel.send(
                "slot",
                model_id=self.model_id,
                index=slot.index,
                nbytes=self._pool.nbytes,
                descriptor=slot.descriptor,
            )
        return {"slot": slot.index}

    def settled(self, worker_idx: int, slot: Slot, *, applied: bool) -> None:
        """A worker has answered: if it has applied the slot, it holds this one and no other."""
        worker = self._workers.get(worker_idx)
        if applied and worker is not None and worker.holds and worker.link.state is LinkState.OPEN:
            self._pool.hold_only(slot, holder_of(worker.link))

    def close(self) -> None:
        """Nothing of its own: the pool is its owner's."""

    def _lost(self, link: WorkerLink) -> None:
        worker = self._workers.get(link.worker_idx)
        if worker is not None and worker.link is link:
            del self._workers[link.worker_idx]
        # The process may be stopped rather than dead, and read on: what it has mapped is never written again.
        self._pool.retire_all(holder_of(link))

    def _tell_retired(self, index: int) -> None:
        """Called by whoever lets go of a slot last, while another thread may lose a worker, or send to it."""
        for worker in list(self._workers.values()):
            if index in worker.known:
                worker.known.discard(index)
                # Not try_send: what there is no room for now leaves before the next ticket does.
                with contextlib.suppress(ChannelClosed):  # it is lost, or about to be
                    worker.link.channel.send("retire", model_id=self.model_id, index=index)


def holder_of(link: WorkerLink) -> tuple[str, int, int]:
    """As what a worker holds the slot that it has mapped."""
    return ("worker", link.worker_idx, link.generation)


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
            memory = map_memory(descriptor, nbytes, private=True)
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
