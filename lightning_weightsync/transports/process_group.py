"""How do bytes get to a worker on another host? A ``torch.distributed`` process group of two, one per worker.

The group is built directly on a prefixed store, beside whatever default group the trainer has; that one is never
created, joined or used. Two ranks per group means that one worker's fault is one worker's fault: gloo closes a pair
for good after a failed or timed-out wait. gloo checks neither dtype nor size, so both ends must agree on the slot's
size beforehand.

The store is needed only while the two meet, but gloo's groups hold on to it: it listens until the last of them is
closed, on the given address (a ``TCPStore`` left to itself listens on all).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lightning_weightsync.transports.base import Ticket, TransferFailed
from lightning_weightsync.transports.memory import SlotMemory, create_memory_file, map_memory
from lightning_weightsync.transports.rendezvous import bind_listener
from lightning_weightsync.transports.slots import Ranges, Slot, SlotPool

SENDER_RANK, RECEIVER_RANK = 0, 1


class RendezvousStore:
    """The sender's ``TCPStore``, listening on ``host`` only, by which pair groups are formed.

    Args:
        host: Address to listen on.
        timeout: How long a pair may take to meet, in seconds.
    """

    def __init__(self, host: str, timeout: float) -> None:
        listener = bind_listener(host)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(0.1, timeout)),
            master_listen_fd=listener.detach(),
        )

    def prefixed(self, prefix: str) -> PrefixStore:
        """A view of the store that one pair has to itself."""
        if self._store is None:
            raise RuntimeError("the store is closed")
        return PrefixStore(prefix, self._store)

    def close(self) -> None:
        """Let go of the store; it stops listening when the last pair that was formed by it is closed."""
        self._store = None


def remote_store(host: str, port: int, prefix: str, timeout: float) -> PrefixStore:
    """The receiver's view of a sender's store."""
    wait = timedelta(seconds=max(0.1, timeout))
    return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False))


def backend_available(backend: str) -> bool:
    """Whether this process can build pair groups over ``backend``."""
    return bool(
        dist.is_available()
        and ((backend == "gloo" and dist.is_gloo_available()) or (backend == "nccl" and dist.is_nccl_available()))
    )


class _Pair:
    """A process group of two.

    Args:
        backend: ``"gloo"``.
        rank: ``SENDER_RANK`` or ``RECEIVER_RANK``.
        make_store: Gives the pair's prefixed store, with the seconds that are left; called by ``connect``.
        host: Address of the interface that this end listens on (each gloo pair opens a port of its own).
    """

    def __init__(self, backend: str, rank: int, make_store: Callable[[float], PrefixStore], host: str) -> None:
        if backend != "gloo":
            raise NotImplementedError(f"backend={backend!r}: only 'gloo' is there yet")
        self._rank = rank
        self._make_store = make_store
        self._host = host
        self._group: Any = None
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Meet the other end; see ``TransportBackend``."""
        seconds = max(0.1, deadline - time.monotonic())
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=seconds)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            self._group = dist.ProcessGroupGloo(self._make_store(seconds), self._rank, 2, options)
        except RuntimeError as error:
            raise TransferFailed(f"the pair group was not formed: {_first_line(error)}") from error
        if self._closed:  # by another thread, meanwhile
            self.close()
            raise TransferFailed("the pair group was closed while it was being formed")

    def close(self) -> None:
        """Give the group up; see ``TransportBackend``."""
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def start(self, operation: str, memory: Tensor) -> Any:
        """Start ``"send"`` or ``"recv"`` with the other rank."""
        if self._group is None:
            raise TransferFailed("the pair group is closed")
        try:
            return getattr(self._group, operation)([memory], 1 - self._rank, 0)
        except RuntimeError as error:
            raise TransferFailed(_first_line(error)) from error

    @staticmethod
    def wait(work: Any, deadline: float) -> None:
        """Wait for what was started."""
        # A wait of zero means "no timeout" to gloo.
        seconds = max(0.001, deadline - time.monotonic())
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise TransferFailed(_first_line(error)) from error


class ProcessGroupSender(_Pair):
    """The sender's end of a pair; see ``SenderTransport``.

    Args:
        *args: Of the pair.
        pool: Keep the slot that the worker has applied last, and send only where the next one differs; ``None`` sends
            everything.
    """

    def __init__(self, *args: Any, pool: SlotPool | None = None) -> None:
        super().__init__(*args)
        self._pool = pool
        self._applied: Slot | None = None
        self._sending: list[Any] = []
        self._slot: Slot | None = None

    def send(self, worker_idx: int, slot: Slot) -> Ticket:
        """Start sending; see ``SenderTransport``."""
        nbytes = slot.memory.numel()
        ticket: Ticket = {}
        ranges = [(0, nbytes)] if nbytes else []
        if self._pool is not None and self._applied is not None:
            ranges = self._pool.changes(slot, since=self._applied)
            ticket = {"changed": ranges, "nbytes": sum(end - start for start, end in ranges)}
        # The work object does not keep the tensor alive in every release: hold the slot here until it has left.
        self._slot = slot
        self._sending = [self.start("send", slot.memory[start:end]) for start, end in ranges]
        return ticket

    def settled(self, worker_idx: int, slot: Slot, *, applied: bool) -> None:
        """The worker has received everything; see ``SenderTransport``."""
        deadline = time.monotonic() + 1.0
        while self._sending:
            self.wait(self._sending.pop(), deadline)
        self._slot = None
        if applied and self._pool is not None and not self._closed:
            self._pool.hold_only(slot, self)
            self._applied = slot

    def close(self) -> None:
        """Give the group up, and the slot that was kept; see ``TransportBackend``."""
        super().close()
        applied, self._applied = self._applied, None
        if self._pool is not None and applied is not None:
            self._pool.release(applied, self)

    def __repr__(self) -> str:
        return "what a worker has, for the changes since"


class ProcessGroupReceiver(_Pair):
    """The worker's end of a pair (a ``ReceiverTransport``), with two slots: one in force, one being filled.

    Args:
        *args: Of the pair.
        only_changed: Whether the sender may send changes only.
    """

    def __init__(self, *args: Any, only_changed: bool = False) -> None:
        super().__init__(*args)
        self._only_changed = only_changed
        self._current: SlotMemory | None = None
        self._staged: SlotMemory | None = None
        self._behind: Ranges | None = None  # where the staged slot differs from the current one; None: anywhere

    def stage(self, ticket: Ticket, nbytes: int, deadline: float) -> SlotMemory:
        """Receive into the slot that is not in force; see ``ReceiverTransport``."""
        everything = [(0, nbytes)] if nbytes else []
        staged = self._staged
        if staged is None:
            staged = self._staged = _new_slot(nbytes)
            self._behind = None
        changed = None
        if "changed" in ticket:
            if self._current is None:
                raise TransferFailed("changes were sent, and there is nothing here that they could be changes of")
            changed = _checked(ticket["changed"], nbytes)
            for start, end in everything if self._behind is None else self._behind:
                staged.memory[start:end].copy_(self._current.memory[start:end])
        self._behind = changed
        works = [self.start("recv", staged.memory[s:e]) for s, e in (everything if changed is None else changed)]
        for work in works:
            self.wait(work, deadline)
        return staged

    def entered(self, slot: SlotMemory, *, held: bool) -> None:
        """What was filled is in force: the other slot is filled next. See ``ReceiverTransport``."""
        if slot is self._staged and (held or self._only_changed):
            self._current, self._staged = self._staged, self._current

    def close(self) -> None:
        """Give the group and the slots up; a window that shows one keeps its memory."""
        super().close()
        self._current = self._staged = None


def _checked(ranges: Any, nbytes: int) -> Ranges:
    checked: Ranges = []
    last = 0
    try:
        for start, end in ranges:
            if type(start) is not int or type(end) is not int or not last <= start < end <= nbytes:
                raise ValueError
            checked.append((start, end))
            last = end
    except (TypeError, ValueError):
        raise TransferFailed(f"{ranges!r:.200} are no ranges of {nbytes} bytes") from None
    return checked


def _new_slot(nbytes: int) -> SlotMemory:
    try:
        slot = SlotMemory(torch.empty(0, dtype=torch.uint8), create_memory_file("lightning_weightsync-received"))
        slot.memory = map_memory(slot.descriptor, nbytes)
        return slot
    except OSError as error:
        raise TransferFailed(f"there is no memory for a slot of {nbytes} bytes: {error}") from error


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", 1)[0][:300]
