"""What does a sender own? Its links, the rendezvous, run and version, and the order of pushes.

A scheme on its own makes a hub; a collector group lends its own to all its schemes, so that several models travel as
one version over one link per worker. How errands run side by side is in ``delivery``; what a push is to a worker is
here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from lightning_weightsync.errors import (
    StaleVersionError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.transports.base import SenderTransport, TransferFailed
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, Message
from lightning_weightsync.transports.delivery import Dispatcher, Errand, ErrandState
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.rendezvous import Rendezvous, StoreInfo
from lightning_weightsync.transports.slots import Slot, SlotPool

_ACKNOWLEDGEMENTS = frozenset({"applied", "failed"})


class Watcher(Protocol):
    """Somebody who knows more about the workers than their channels tell: a group that started their processes."""

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """Why this worker's process has ended, or ``None`` while it runs (looked at for up to ``wait`` seconds)."""
        ...


@dataclass(frozen=True)
class Payload:
    """One model of a push, for one worker."""

    model_id: str
    pool: SlotPool
    slot: Slot
    transport: SenderTransport
    extra: bytes = b""


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
        failed: Each worker that has not applied it, and the cause; complete when the push is settled.
    """

    def __init__(self, run: int, version: int, dispatcher: Dispatcher, phase: str) -> None:
        self.run = run
        self.version = version
        self.failed: dict[int, Exception] = {}
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
            WeightSyncError: Some worker failed; ``.failed`` names each.
            WeightSyncTimeout: It is not settled after ``timeout`` seconds; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._dispatcher.wait(self.errands, deadline):
            late = sorted(e.link.worker_idx for e in self.errands if not e.final)
            raise WeightSyncTimeout(f"{self.phase} is not settled after {timeout:.1f} s: waiting for workers {late}")
        if self.failed:
            raise failure(self.failed, self.phase)
        return self.state

    def __repr__(self) -> str:
        return f"{type(self).__name__}(version={self.version}, {self.state.value})"


@dataclass
class Answers:
    """What came back from the workers that were asked: an answer or a failure for each."""

    replies: dict[int, Message] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)


class LinkHub:
    """The sender's end.

    Args:
        num_workers: Workers are numbered ``0 .. num_workers - 1``.
        host: Address to listen on.
        local: Whether workers of this host may be handed descriptors, over a Unix socket.
        connect_timeout: Seconds for a rendezvous as a whole; ``None`` means 60 and 2 per worker.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        watcher: Told of by ``cause_of_death``; ``None`` where workers are nobody's children here.

    Attributes:
        run: Grows with every start of a sender.
        version: Of the newest push.
        bytes_pushed: Bytes of weights that were handed to transports so far, over all workers.
        pushing: Held while a version is taken, snapshot and put into the queues: pushes have one order.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        host: str = "127.0.0.1",
        local: bool = False,
        connect_timeout: float | None = None,
        heartbeat_timeout: float = 30.0,
        watcher: Watcher | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.host = host
        self.connect_timeout = 60.0 + 2.0 * num_workers if connect_timeout is None else connect_timeout
        self.heartbeat_timeout = heartbeat_timeout
        self.links: dict[int, WorkerLink] = {}
        self.run = 1
        self.version = 0
        self.bytes_pushed = 0
        self.pushing = threading.RLock()
        self.dispatcher = Dispatcher(heartbeat_timeout, self.lose)
        self._watcher = watcher
        self._rendezvous = Rendezvous(host, local=local)
        self._generations: dict[int, int] = {}
        self._closed = threading.Event()

    @property
    def info(self) -> StoreInfo:
        """Host, port and key that a worker needs to join."""
        return self._rendezvous.info

    def check_ids(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The targeted indices.

        Raises:
            ValueError: An index is not in ``0 .. num_workers - 1``.
        """
        if worker_ids is None:
            return list(range(self.num_workers))
        ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        for index in ids:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < self.num_workers:
                raise ValueError(f"worker_ids holds {index!r}; workers are numbered 0 .. {self.num_workers - 1}")
        return list(dict.fromkeys(ids))

    def check_open(self) -> None:
        """See whether this end is still there.

        Raises:
            WeightSyncError: It was shut down.
        """
        if self._closed.is_set():
            raise WeightSyncError("the sender was shut down: call init_on_sender() again, and connect()")

    def accept(self, worker_ids: Collection[int], deadline: float) -> None:
        """Rendezvous: wait for these workers, and make (or replace) their links. Blocks on all of them.

        Raises:
            WeightSyncTimeout: Some did not come by the deadline (monotonic clock, seconds); ``.failed`` names them.
            WorkerDied: A missing worker's process has ended.
        """
        self.check_open()
        joined = self._rendezvous.accept(worker_ids, deadline, self._watch_missing)
        for index, member in sorted(joined.items()):
            old = self.links.get(index)
            if old is not None:
                old.end(WorkerDied(f"worker {index} was replaced by another process (pid {member.pid})"))
            generation = self._generations.get(index, -1) + 1
            self._generations[index] = generation
            link = WorkerLink(index, member.pid, member.channel, generation, member.local)
            self.links[index] = link
            self.dispatcher.watch(link)
            try:
                link.channel.send(
                    "welcome",
                    run=self.run,
                    version=self.version,
                    generation=generation,
                    heartbeat_timeout=float(self.heartbeat_timeout),
                    deadline=deadline,
                )
            except (ChannelClosed, ChannelTimeout) as error:  # whoever asks it next is told
                self.lose(link, "rendezvous", 0.0, error)

    def push(
        self,
        payloads: Mapping[int, Sequence[Payload]],
        version: int,
        *,
        timeout: float,
        initial: bool = False,
        replaceable: bool = False,
    ) -> PushHandle:
        """Put one version on its way to workers; does not block.

        Args:
            payloads: The models of this version, for each targeted worker. Their slots are held until it is settled.
            version: Taken by the caller, under ``pushing``.
            timeout: Bounds the push as a whole, in seconds from now.
            initial: The version that a new worker starts from; a worker then need not find it newer.
            replaceable: Whether a newer push of the same models may take its place in a queue.

        Returns:
            The handle; whoever waits for it drives the exchange (or ``dispatcher.run_in_background``).
        """
        names = sorted({payload.model_id for several in payloads.values() for payload in several})
        phase = f"push of version {version} of {', '.join(map(repr, names))}"
        handle = PushHandle(self.run, version, self.dispatcher, phase)
        deadline = time.monotonic() + timeout
        announcement = _Announcement(self.run, version, initial, deadline, timeout)
        for index, several in payloads.items():
            link = self.links.get(index)
            if link is None or link.state is not LinkState.OPEN:
                handle.failed[index] = _down(index, link, phase)
                continue
            delivery = _Delivery(self, handle, list(several), announcement, replaceable)
            for payload in several:
                payload.pool.hold(payload.slot, delivery)
            handle.errands.append(delivery.errand(link, phase, deadline))
        self.dispatcher.submit(handle.errands)
        return handle

    def ask(
        self,
        worker_ids: Collection[int],
        request: Callable[[WorkerLink], None],
        expected: Collection[str],
        *,
        phase: str,
        deadline: float,
    ) -> Answers:
        """Send a request to each worker, then wait for one answer from each; nobody waits for anybody else.

        A worker whose channel ends, who stays silent for ``heartbeat_timeout``, or who has not answered at the deadline
        loses its link and is named in ``failed``.
        """
        self.check_open()
        answers = Answers()
        errands = []
        for index in worker_ids:
            link = self.links.get(index)
            if link is None or link.state is not LinkState.OPEN:
                answers.failed[index] = _down(index, link, phase)
            else:
                errands.append(Errand(link, request, expected, phase=phase, deadline=deadline))
        self.dispatcher.submit(errands)
        self.dispatcher.wait(errands)
        for errand in errands:
            if errand.reply is not None:
                answers.replies[errand.link.worker_idx] = errand.reply
            else:
                answers.failed[errand.link.worker_idx] = errand.error or ChannelClosed("not asked")
        return answers

    def close(self) -> None:
        """End every link in good order, stop listening, and unblock whoever waits. Idempotent, never blocks."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.dispatcher.close()
        for link in self.links.values():
            if link.state is LinkState.OPEN:
                with contextlib.suppress(ChannelClosed, ChannelTimeout):
                    link.channel.try_send("close")
            link.end()
        self._rendezvous.close()

    def _watch_missing(self, missing: set[int]) -> None:
        if self._closed.is_set():
            raise WeightSyncError("the sender was shut down while it waited for its workers")
        if self._watcher is None:
            return
        dead = {i: c for i in sorted(missing) if (c := self._watcher.cause_of_death(i, 0.0)) is not None}
        raise_failures(dead, "waiting for workers to connect")

    def lose(self, link: WorkerLink, phase: str, seconds: float, error: Exception) -> Exception:
        """End a link that cannot be used any more; returns the cause that the user is shown."""
        who = f"worker {link.worker_idx} (pid {link.pid})"
        last = f"it holds version {link.version}" if link.version >= 0 else "it holds no version yet"
        cause: Exception
        death = self._watcher.cause_of_death(link.worker_idx, 0.5) if self._watcher and _is_end(error) else None
        if death is not None:
            cause = death
        elif isinstance(error, TimeoutError):
            cause = WeightSyncTimeout(f"{who}: {error}; {last} (phase: {phase}, after {seconds:.1f} s)")
        else:
            cause = WorkerDied(f"{who} is gone: {error}; {last} (phase: {phase}, after {seconds:.1f} s)")
        link.end(cause)
        return cause


class _Announcement:
    """The ``push`` message, encoded once for all workers that get the same tickets at about the same time."""

    def __init__(self, run: int, version: int, initial: bool, deadline: float, timeout: float) -> None:
        self._fields: dict[str, Any] = {"run": run, "version": version, "initial": initial}
        self._deadline = deadline
        # The worker gives up a little sooner than we do, so that it is the one who tells why.
        self._margin = min(0.5, 0.1 * timeout)
        self._cached: tuple[float, list[dict[str, Any]], bytes] | None = None

    def send(self, link: WorkerLink, models: list[dict[str, Any]], blob: bytes) -> None:
        now = time.monotonic()
        if self._cached is None or self._cached[1] != models or now - self._cached[0] > 0.01:
            budget = float(max(0.0, self._deadline - self._margin - now))
            frame = link.channel.encode("push", blob, models=models, budget=budget, **self._fields)
            self._cached = (now, models, frame)
        link.channel.send_frame(self._cached[2], deadline=self._deadline)


class _Delivery:
    """A push, to one worker."""

    def __init__(
        self, hub: LinkHub, handle: PushHandle, payloads: list[Payload], announcement: _Announcement, replaceable: bool
    ) -> None:
        self._hub = hub
        self._handle = handle
        self._payloads = payloads
        self._announcement = announcement
        self._replaceable = replaceable
        self._sent = False

    def errand(self, link: WorkerLink, phase: str, deadline: float) -> Errand:
        return Errand(
            link,
            self._send,
            _ACKNOWLEDGEMENTS,
            phase=phase,
            deadline=deadline,
            settled=self._settled,
            takes_place_of=self._takes_place_of,
        )

    def _takes_place_of(self, older: Errand) -> bool:
        """A newer push of all that the older one carries makes it needless, if that was allowed to be replaced."""
        other = getattr(older.request, "__self__", None)
        if not isinstance(other, _Delivery) or not other._replaceable:
            return False
        return {p.model_id for p in other._payloads} <= {p.model_id for p in self._payloads}

    def _send(self, link: WorkerLink) -> None:
        self._sent = True
        models = []
        for payload in self._payloads:
            ticket = payload.transport.send(link.worker_idx, payload.slot)
            models.append({"model_id": payload.model_id, "ticket": dict(ticket), "extra": len(payload.extra)})
            self._hub.bytes_pushed += payload.slot.memory.numel()
        self._announcement.send(link, models, b"".join(payload.extra for payload in self._payloads))

    def _settled(self, errand: Errand) -> None:
        link, handle, reply = errand.link, self._handle, errand.reply
        if reply is not None:
            applied = reply.kind == "applied"
            if not applied:
                handle.failed[link.worker_idx] = _reported(link, handle.phase, reply)
            elif (reply["run"], reply["version"]) != (handle.run, handle.version):
                applied = False
                handle.failed[link.worker_idx] = WeightSyncError(f"worker {link.worker_idx} acknowledged another push")
            else:
                link.run, link.version = handle.run, handle.version
            for payload in self._payloads:
                with contextlib.suppress(TransferFailed):  # then the next transfer fails, with a deadline
                    payload.transport.settled(link.worker_idx, payload.slot, applied=applied)
        elif errand.error is not None:
            handle.failed[link.worker_idx] = errand.error
        for payload in self._payloads:
            if reply is None and self._sent:  # the worker may have it mapped, or a transfer may still be reading it
                payload.pool.retire_all(self)
            else:
                payload.pool.release(payload.slot, self)

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


def _is_end(error: Exception) -> bool:
    return isinstance(error, ChannelClosed | TransferFailed)


def _down(index: int, link: WorkerLink | None, phase: str) -> Exception:
    if link is None:
        return WorkerDied(f"worker {index} has not connected (phase: {phase})")
    return WorkerDied(
        f"worker {index} (pid {link.pid}) is {link.state.value} (phase: {phase}): {link.cause or 'closed'}"
    )


def _reported(link: WorkerLink, phase: str, reply: Message) -> Exception:
    """The exception that a worker told of; its link stays up and it keeps the version that it had."""
    text = f"worker {link.worker_idx} (pid {link.pid}) kept version {link.version}: {reply['message']} (phase: {phase})"
    if reply["reason"] == "deadline":
        return WeightSyncTimeout(text)
    if reply["reason"] == "stale":
        return StaleVersionError(text)
    return WorkerError(f"{text}\n{reply['traceback']}".rstrip(), remote_traceback=reply["traceback"])
