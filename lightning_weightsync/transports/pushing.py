"""What becomes of one push? Its payloads, its announcement to each worker, and the handle that tells.

A push to one worker is an errand (see ``errand``); this module says what its request is and what its answer means.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from lightning_weightsync.errors import (
    StaleVersionError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.transports.base import SenderTransport, TransferFailed
from lightning_weightsync.transports.control import MAX_BLOB, ChannelClosed, Message
from lightning_weightsync.transports.dispatcher import Dispatcher
from lightning_weightsync.transports.errand import Errand, ErrandState
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.slots import Slot, SlotPool

_BESIDE = 128 << 10
"""Bytes of room for what is in an announcement beside a model's extra state: its weights, if they are small."""

_NO_VALUES: Mapping[str, Any] = MappingProxyType({})
_ACKNOWLEDGEMENTS = frozenset({"applied", "failed"})


@dataclass(slots=True)
class Payload:
    """One model of a push, for one worker."""

    model_id: str
    pool: SlotPool
    slot: Slot
    transport: SenderTransport
    extra: bytes = b""


def check_size(payloads: Mapping[int, Sequence[Payload]]) -> None:
    """See whether the extra states of all models of a push fit into one announcement.

    Raises:
        TypeError: They are too large for a worker, together.
    """
    for several in payloads.values():
        size = sum(len(payload.extra) for payload in several)
        if size > MAX_BLOB - len(several) * _BESIDE:
            names = ", ".join(repr(payload.model_id) for payload in several)
            raise TypeError(f"the extra states of {names} take {size} bytes together; at most {MAX_BLOB} are carried")


class PushState(Enum):
    """What has become of a push: all targeted workers applied it, a newer one took its place, or some failed."""

    PENDING = "pending"
    DONE = "done"
    SUPERSEDED = "superseded"
    FAILED = "failed"


class PushHandle:
    """One push on its way.

    Attributes:
        run: Of the sender.
        version: Of the push.
        values: The schedule values that come with it.
        failed: Each worker that has not applied it, and the cause; complete when the push is settled.
        at_rest: The workers that were switched in their sleep (``transports.at_rest``); nothing was sent to them.
    """

    def __init__(
        self, run: int, version: int, dispatcher: Dispatcher, phase: str, values: Mapping[str, Any] = _NO_VALUES
    ) -> None:
        self.run = run
        self.version = version
        self.values = values
        self.failed: dict[int, Exception] = {}
        self.at_rest: list[int] = []
        self.phase = phase
        self.errands: list[Errand] = []
        self._dispatcher = dispatcher

    @property
    def state(self) -> PushState:
        """Superseded as soon as one worker was not sent this version because a newer one was ready for it."""
        if not all(errand.final for errand in self.errands):
            return PushState.PENDING
        if self.failed:
            return PushState.FAILED
        skipped = any(errand.state is ErrandState.SUPERSEDED for errand in self.errands)
        return PushState.SUPERSEDED if skipped else PushState.DONE

    @property
    def done(self) -> bool:
        """Whether every targeted worker has applied this very version."""
        return self.state is PushState.DONE

    @property
    def superseded(self) -> bool:
        """Whether it is settled, nobody failed, and some worker got a newer version in its place."""
        return self.state is PushState.SUPERSEDED

    @property
    def error(self) -> WeightSyncError | None:
        """What ``wait`` would raise, or ``None``."""
        return failure(self.failed, self.phase) if self.state is PushState.FAILED else None

    def wait(self, timeout: float | None = None) -> PushState:
        """Block until it is settled.

        Args:
            timeout: Seconds; ``None`` relies on the push's own deadline.

        Returns:
            ``DONE`` or ``SUPERSEDED``.

        Raises:
            WeightSyncError: Some worker failed; ``.failed`` names each. Or the sender was shut down.
            WeightSyncTimeout: It is not settled after ``timeout`` seconds; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._dispatcher.wait(self.errands, deadline):
            late = sorted(e.link.worker_idx for e in self.errands if not e.final)
            if timeout is None:
                raise WeightSyncError(f"{self.phase}: the sender was shut down while it waited for workers {late}")
            raise WeightSyncTimeout(f"{self.phase} is not settled after {timeout:.1f} s: waiting for workers {late}")
        if self.failed:
            raise failure(self.failed, self.phase)
        return self.state

    def give_up_later(self, link: WorkerLink, error: Exception) -> None:
        """A worker that cannot go on without this push has not got it: its link ends."""
        self._dispatcher.give_up_later(link, error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(version={self.version}, {self.state.value})"


class Announcement:
    """The ``push`` message, encoded once for all workers that get the same at about the same time."""

    def __init__(
        self, run: int, version: int, values: Mapping[str, Any], initial: bool, deadline: float, timeout: float
    ) -> None:
        self._fields: dict[str, Any] = {"run": run, "version": version, "values": dict(values), "initial": initial}
        self._deadline = deadline
        # The worker gives up a little sooner than we do, so that it is the one who tells why.
        self._margin = min(0.5, 0.1 * timeout)
        self._grain = min(0.01, 0.01 * timeout)  # so that the same message is written as the last time
        self._cached: tuple[float, tuple[list[dict[str, Any]], bytes], bytes] | None = None

    def send(self, link: WorkerLink, models: list[dict[str, Any]], blob: bytes) -> None:
        """Announce the push to one worker."""
        now = time.monotonic()
        if self._cached is None or self._cached[1] != (models, blob) or now - self._cached[0] > 0.01:
            budget = max(0.0, self._deadline - self._margin - now) // self._grain * self._grain
            frame = link.channel.encode("push", blob, models=models, budget=budget, **self._fields)
            self._cached = (now, (models, blob), frame)
        link.channel.send_frame(self._cached[2])


class Delivery:
    """A push, to one worker."""

    def __init__(
        self,
        count_bytes: Callable[[int, int], None],
        handle: PushHandle,
        payloads: list[Payload],
        announcement: Announcement,
        replaceable: bool,
    ) -> None:
        self._count_bytes = count_bytes
        self._handle = handle
        self._payloads = payloads
        self._announcement = announcement
        self._replaceable = replaceable
        self._sent = False

    def errand(self, link: WorkerLink, phase: str, deadline: float) -> Errand:
        """The errand that carries it out."""
        return Errand(
            link,
            self._send,
            _ACKNOWLEDGEMENTS,
            phase=phase,
            deadline=deadline,
            check=self._check,
            settled=self._settled,
            takes_place_of=self._takes_place_of,
        )

    def _takes_place_of(self, older: Errand) -> bool:
        """A newer push of all that the older one carries makes it needless, if that was allowed to be replaced."""
        other = getattr(older.request, "__self__", None)
        if not isinstance(other, Delivery) or not other._replaceable:
            return False
        return {p.model_id for p in other._payloads} <= {p.model_id for p in self._payloads}

    def _send(self, link: WorkerLink) -> None:
        self._sent = True
        models, parts = [], []
        for payload in self._payloads:
            ticket = payload.transport.send(link.worker_idx, payload.slot)
            entry = {"model_id": payload.model_id, "ticket": dict(ticket), "extra": len(payload.extra)}
            if payload.slot.digest is not None:
                entry["verify"] = True
            models.append(entry)
            parts.append(payload.extra)
            if "inline" in ticket:
                parts.append(_bytes_of(payload.slot))
            moved = ticket.get("nbytes", payload.pool.nbytes)
            self._count_bytes(moved, payload.pool.nbytes - moved)
        self._announcement.send(link, models, b"".join(parts))

    def _check(self, reply: Message) -> None:
        """Answers come in the order of the requests: one that is late, or early, would be taken for all that follow."""
        answered, due = (reply["run"], reply["version"]), (self._handle.run, self._handle.version)
        if answered != due:
            raise ChannelClosed(f"it acknowledged (run, version) = {answered} where {due} was due")

    def _settled(self, errand: Errand) -> None:
        link, handle, reply = errand.link, self._handle, errand.reply
        if reply is not None:
            applied = reply.kind == "applied"
            if applied:
                link.run, link.version = handle.run, handle.version
                link.values = handle.values
                self._verify(link, reply)
            else:
                handle.failed[link.worker_idx] = _reported(link, handle.phase, reply)
            for payload in self._payloads:
                with contextlib.suppress(TransferFailed):  # then the next transfer fails, with a deadline
                    payload.transport.settled(link.worker_idx, payload.slot, applied=applied)
        elif errand.error is not None:
            handle.failed[link.worker_idx] = errand.error
            if (board := link.board) is not None and board.is_mixed:  # it was to be made whole, and lets nobody in
                handle.give_up_later(link, errand.error)
        for payload in self._payloads:
            if reply is None and self._sent:  # the worker may have it mapped, or a transfer may still be reading it
                payload.pool.retire_all(self)
            else:
                payload.pool.release(payload.slot, self)
        self._payloads = []  # whoever keeps the handle keeps no slot

    def _verify(self, link: WorkerLink, reply: Message) -> None:
        others = [
            repr(payload.model_id)
            for payload in self._payloads
            if payload.slot.digest not in (None, reply["digests"].get(payload.model_id))
        ]
        if others:
            self._handle.failed[link.worker_idx] = WeightSyncError(
                f"{link.name} has applied other bytes of {', '.join(others)} than were "
                f"sent as version {self._handle.version} (verify=True)"
            )

    def __repr__(self) -> str:
        return f"version {self._handle.version} on its way"


def failure(failed: Mapping[int, Exception], phase: str) -> WeightSyncError:
    """One error for the failures of several workers: of their kind, if they have one in common."""
    kinds = {type(cause) for cause in failed.values()}
    kind = kinds.pop() if len(kinds) == 1 else WeightSyncError
    if kind not in (WeightSyncTimeout, WorkerDied, StaleVersionError, WorkerError):
        kind = WeightSyncError
    lines = "; ".join(str(cause) for _, cause in sorted(failed.items()))
    error = kind(f"{phase} failed for worker(s) {sorted(failed)}: {lines}", failed)
    if isinstance(error, WorkerError):
        error.remote_traceback = "\n".join(getattr(cause, "remote_traceback", "") for cause in failed.values())
    return error


def raise_failures(failed: Mapping[int, Exception], phase: str) -> None:
    """Raise what the failures of several workers have in common; nothing if there are none."""
    if failed:
        raise failure(failed, phase)


def _bytes_of(slot: Slot) -> bytes:
    return ctypes.string_at(slot.memory.data_ptr(), slot.memory.numel())  # torch's way takes ten times as long


def _reported(link: WorkerLink, phase: str, reply: Message) -> Exception:
    """The exception that a worker told of; its link stays up and it keeps the version that it had."""
    text = f"{link.name} kept version {link.version}: {reply['message']} (phase: {phase})"
    if reply["reason"] == "deadline":
        return WeightSyncTimeout(text)
    if reply["reason"] == "stale":
        return StaleVersionError(text)
    return WorkerError(f"{text}\n{reply['traceback']}".rstrip(), remote_traceback=reply["traceback"])
