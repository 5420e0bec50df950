"""How do bytes get to a worker on another host? A ``torch.distributed`` process group of two, one per worker.

The group is built directly, beside whatever default group the trainer has; that one is never created, joined or used.
Two ranks per group means that one worker's fault is one worker's fault: gloo closes a pair for good after a failed or
timed-out wait. gloo checks neither dtype nor size, so both ends must agree on the slot's size beforehand.

Where the two listen is told over their authenticated control channel (``meeting``): there is no store that anybody
could reach. gloo itself asks nobody who he is, so the two prove to each other that they hold the run's key once they
are connected, and from then on let nobody else connect (``strangers``).
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_weightsync.transports.base import Ticket, TransferFailed
from lightning_weightsync.transports.meeting import Exchange, Meeting
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.pair_groups import PairGroups
from lightning_weightsync.transports.rendezvous import Proofs
from lightning_weightsync.transports.slots import Ranges, Slot, SlotPool

SENDER_RANK, RECEIVER_RANK = 0, 1
PIECE = 4 << 20
"""Bytes of a transfer. A slot travels in pieces, so that the first ones can leave while the last ones are written."""
INLINE = 64 << 10
"""Bytes up to which a slot travels in the announcement itself: two threads less wake up at each end."""
_PROOF_SECONDS = 10.0
_LEAST_PIECE = 64 << 10


class _Pair:
    """A process group of two.

    Args:
        groups: Of the backend.
        rank: ``SENDER_RANK`` or ``RECEIVER_RANK``.
        exchange: Gives the other end what it needs to find this one, and the other way round.
        proofs: What each end shows the other over the group.
        host: Address of the interface that this end listens on (each gloo pair opens a port of its own).
    """

    def __init__(self, groups: PairGroups, rank: int, exchange: Exchange, proofs: Proofs, host: str) -> None:
        self._groups = groups
        self._rank = rank
        self._exchange = exchange
        self._proofs = proofs
        self._host = host
        self._group: Any = None
        self._meeting: Meeting | None = None  # the group refers to it, but does not keep it
        self._closed = False

    def connect(self, deadline: float) -> None:
        """Meet the other end; see ``TransportBackend``."""
        try:
            self._group, meeting = self._groups.form(self._exchange, self._rank, self._host, deadline)
        except RuntimeError as error:
            raise TransferFailed(f"the pair group was not formed: {_first_line(error)}") from error
        self._meeting = meeting
        try:
            self._groups.formed(meeting)
            self._prove(min(deadline, time.monotonic() + _PROOF_SECONDS))
        except OSError as error:
            self.close()
            raise TransferFailed(f"the other end of the pair group did not prove who it is: {error}") from error
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

    def check_open(self) -> None:
        """Raise ``TransferFailed`` if this end was closed."""
        if self._closed:
            raise TransferFailed("the pair group is closed")

    def start(self, operation: str, memory: Tensor) -> Any:
        """Start ``"send"`` or ``"recv"`` with the other rank."""
        group = self._group
        if group is None:
            raise TransferFailed("the pair group is closed")
        try:
            return getattr(group, operation)([memory], 1 - self._rank, 0)
        except RuntimeError as error:
            raise TransferFailed(_first_line(error)) from error

    def wait(self, work: Any, deadline: float) -> None:
        """Wait for what was started."""
        try:
            self._groups.wait(work, deadline)
        except RuntimeError as error:
            raise TransferFailed(_first_line(error)) from error

    def _prove(self, deadline: float) -> None:
        ours, expected = self._proofs[self._rank], self._proofs[1 - self._rank]
        sent = self._groups.placed(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
        shown = self._groups.placed(torch.zeros(len(expected), dtype=torch.uint8))
        sending, receiving = self.start("send", sent), self.start("recv", shown)
        self.wait(receiving, deadline)
        self.wait(sending, deadline)
        if not hmac.compare_digest(shown.cpu().numpy().tobytes(), expected):
            raise TransferFailed("it does not hold this run's key")


class ProcessGroupSender(_Pair):
    """The sender's end of a pair; see ``SenderTransport``.

    Args:
        *args: Of the pair.
        pool: Keep the slot that the worker has applied last, and send only where the next one differs; ``None`` sends
            everything.
    """

    follows = True

    def __init__(self, *args: Any, pool: SlotPool | None = None) -> None:
        super().__init__(*args)
        self._pool = pool
        self._applied: Slot | None = None
        self._due: deque[tuple[int, int]] = deque()
        self._sending: list[Any] = []
        self._slot: Slot | None = None

    def send(self, worker_idx: int, slot: Slot) -> Ticket:
        """Start sending; see ``SenderTransport``."""
        nbytes = slot.memory.numel()
        if 0 < nbytes <= INLINE and slot.memory.is_cpu and self._pool is None:
            self.check_open()
            return {"inline": True}
        ticket: Ticket
        if self._pool is not None and self._applied is not None:
            ranges = self._pool.changes(slot, since=self._applied)
            ticket = {"changed": ranges, "nbytes": sum(end - start for start, end in ranges)}
        else:
            ranges = _pieces(nbytes, PIECE)
            ticket = {"piece": PIECE}
        self._due = deque(ranges)
        # The work object does not keep the tensor alive in every release: hold the slot here until it has left.
        self._slot = slot
        self._sending = []
        filling = slot.filling
        if filling is None:
            self._send_until(slot, nbytes)
        else:
            filling.follow(lambda there: self._send_until(slot, there))
        return ticket

    def _send_until(self, slot: Slot, there: int) -> None:
        """Start to send what is due, as far as the slot is written."""
        try:
            while self._due and self._due[0][1] <= there:
                start, end = self._due.popleft()
                self._sending.append(self.start("send", slot.memory[start:end]))
        except TransferFailed:
            self.close()  # or the other end would wait for the rest
            raise

    def settled(self, worker_idx: int, slot: Slot, *, applied: bool) -> None:
        """The worker has received everything; see ``SenderTransport``."""
        deadline = time.monotonic() + 1.0
        while self._sending:
            self.wait(self._sending.pop(), deadline)
        self._slot = None
        if applied and self._pool is not None:
            self._pool.hold_only(slot, self)
            self._applied = slot
            if self._closed:  # by another thread, meanwhile
                self._release()

    def close(self) -> None:
        """Give the group up, and the slot that was kept; see ``TransportBackend``."""
        super().close()
        self._sending.clear()  # they keep the connection open, and the other end waiting for the rest
        self._slot = None
        self._release()

    def _release(self) -> None:
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
        inline, changed = ticket.get("inline"), None
        if inline is not None:
            due: Ranges = []
        elif "changed" in ticket:
            due = changed = _checked(ticket["changed"], nbytes)
        else:
            due = _pieces(nbytes, ticket.get("piece"))
        staged = self._staged
        if staged is None:
            staged = self._staged = self._new_slot(nbytes)
            self._behind = None
        if changed is not None:
            if self._current is None:
                raise TransferFailed("changes were sent, and there is nothing here that they could be changes of")
            for start, end in everything if self._behind is None else self._behind:
                staged.memory[start:end].copy_(self._current.memory[start:end])
        self._behind = changed
        for work in [self.start("recv", staged.memory[start:end]) for start, end in due]:
            self.wait(work, deadline)
        if inline is not None:
            if len(inline) != nbytes or not staged.memory.is_cpu:
                raise TransferFailed(f"the announcement brought {len(inline)} bytes where {nbytes} were due")
            ctypes.memmove(staged.memory.data_ptr(), inline, nbytes)
        return staged

    def entered(self, slot: SlotMemory, *, held: bool) -> None:
        """What was filled is in force: the other slot is filled next. See ``ReceiverTransport``."""
        if slot is self._staged and (held or self._only_changed):
            self._current, self._staged = self._staged, self._current

    def _new_slot(self, nbytes: int) -> SlotMemory:
        try:
            return self._groups.new_slot(nbytes)
        except (OSError, RuntimeError) as error:
            raise TransferFailed(f"there is no memory for a slot of {nbytes} bytes: {error}") from error

    def close(self) -> None:
        """Give the group and the slots up; a window that shows one keeps its memory."""
        super().close()
        self._current = self._staged = None


def _pieces(nbytes: int, piece: Any) -> Ranges:
    if type(piece) is not int or piece < _LEAST_PIECE:
        raise TransferFailed(f"{piece!r:.200} is no size of pieces to send a slot in")
    return [(start, min(start + piece, nbytes)) for start in range(0, nbytes, piece)]


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


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n", 1)[0][:300]
