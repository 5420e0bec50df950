"""What does a sender own? Its links, the rendezvous, run and version, and the rule that pushes go one at a time.

A scheme on its own makes a hub; a collector group lends its own to all its schemes, so that several models travel as
one version over one link per worker. The hub talks to every targeted worker at once and waits for nobody in
particular: each is served, refused, or given up on its own.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lightning_weightsync.errors import (
    StaleVersionError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.transports.base import Ticket, TransferFailed, TransportBackend
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, Message
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.rendezvous import Rendezvous, StoreInfo

_LOOK_AROUND_MS = 50


class Watcher(Protocol):
    """Somebody who knows more about the workers than their channels tell: a group that started their processes."""

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """Why this worker's process has ended, or ``None`` while it runs (looked at for up to ``wait`` seconds)."""
        ...


@dataclass(frozen=True)
class Payload:
    """One model of a push, for one worker."""

    model_id: str
    slot: Tensor
    transport: TransportBackend


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
        connect_timeout: Seconds for a rendezvous as a whole; ``None`` means 60 and 2 per worker.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        watcher: Told of by ``cause_of_death``; ``None`` where workers are nobody's children here.

    Attributes:
        run: Grows with every start of a sender.
        version: Of the newest push.
        bytes_pushed: Bytes of weights that were handed to transports so far, over all workers.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        host: str = "127.0.0.1",
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
        self._watcher = watcher
        self._rendezvous = Rendezvous(host)
        self._generations: dict[int, int] = {}
        self._closed = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()

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
        with self.pushing:
            self.check_open()
            joined = self._rendezvous.accept(worker_ids, deadline, self._watch_missing)
            for index, member in sorted(joined.items()):
                old = self.links.get(index)
                if old is not None:
                    old.end(WorkerDied(f"worker {index} was replaced by another process (pid {member.pid})"))
                generation = self._generations.get(index, -1) + 1
                self._generations[index] = generation
                link = WorkerLink(index, member.pid, member.channel, generation)
                self.links[index] = link
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
        self, payloads: Mapping[int, Sequence[Payload]], version: int, *, timeout: float, initial: bool = False
    ) -> None:
        """Deliver one version to workers; returns when each of them has applied it.

        Args:
            payloads: The models of this version, for each targeted worker.
            version: Taken by the caller, under ``pushing``.
            timeout: Bounds the whole call, in seconds.
            initial: The version that a new worker starts from; a worker then need not find it newer.

        Raises:
            WeightSyncError: ``.failed`` maps each worker that was not served to its cause; the others were served.
        """
        deadline = time.monotonic() + timeout

        def announce(link: WorkerLink) -> None:
            models = []
            for payload in payloads[link.worker_idx]:
                ticket: Ticket = payload.transport.send(payload.slot)
                self.bytes_pushed += payload.slot.numel()
                models.append({"model_id": payload.model_id, "ticket": dict(ticket)})
            # The worker gives up a little sooner than we do, so that it is the one who tells why.
            budget = deadline - time.monotonic()
            budget -= min(0.5, 0.1 * timeout)
            link.channel.send(
                "push",
                run=self.run,
                version=version,
                models=models,
                budget=float(max(0.0, budget)),
                initial=initial,
                deadline=deadline,
            )

        with self.pushing:
            names = ", ".join(sorted({repr(p.model_id) for ps in payloads.values() for p in ps}))
            phase = f"push of version {version} of {names}"
            answers = self.ask(list(payloads), announce, {"applied", "failed"}, phase=phase, deadline=deadline)
            for index, reply in answers.replies.items():
                link = self.links[index]
                try:
                    for payload in payloads[index]:
                        payload.transport.finish(max(deadline, time.monotonic() + 1.0))
                except TransferFailed as error:
                    answers.failed[index] = self.lose(link, phase, 0.0, error)
                    continue
                if reply.kind == "failed":
                    answers.failed[index] = _reported(link, phase, reply)
                elif (reply["run"], reply["version"]) != (self.run, version):
                    told = ProtocolViolation(f"it acknowledged ({reply['run']}, {reply['version']})")
                    answers.failed[index] = self.lose(link, phase, 0.0, told)
                else:
                    link.run, link.version = self.run, version
            raise_failures(answers.failed, phase)

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
        started = time.monotonic()
        answers = Answers()
        pending: dict[int, WorkerLink] = {}
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        for index in worker_ids:
            link = self.links.get(index)
            if link is None or link.state is not LinkState.OPEN:
                answers.failed[index] = _down(index, link, phase)
                continue
            try:
                request(link)
            except (ChannelClosed, ChannelTimeout, TransferFailed) as error:
                answers.failed[index] = self.lose(link, phase, time.monotonic() - started, error)
                continue
            pending[link.channel.fileno()] = link
            poller.register(link.channel.fileno(), select.POLLIN)

        def settle(descriptor: int, outcome: Message | Exception) -> None:
            link = pending.pop(descriptor)
            poller.unregister(descriptor)
            if isinstance(outcome, Message):
                answers.replies[link.worker_idx] = outcome
            else:
                seconds = time.monotonic() - started
                answers.failed[link.worker_idx] = self.lose(link, phase, seconds, outcome)

        while pending:
            if self._closed.is_set():
                for descriptor in list(pending):
                    settle(descriptor, ChannelClosed("the sender was shut down"))
                break
            remaining_ms = max(0.0, (deadline - time.monotonic()) * 1000)
            for descriptor, _ in poller.poll(min(_LOOK_AROUND_MS, remaining_ms + 1)):
                if descriptor in pending:
                    outcome = _next_answer(pending[descriptor], expected)
                    if outcome is not None:
                        settle(descriptor, outcome)
            now = time.monotonic()
            for descriptor, link in list(pending.items()):
                quiet = now - max(link.channel.last_heard, started)
                if quiet > self.heartbeat_timeout:
                    settle(descriptor, TimeoutError(f"silent for {quiet:.1f} s (heartbeat_timeout)"))
                elif now >= deadline:
                    settle(descriptor, TimeoutError(f"no answer before the deadline; last heard {quiet:.1f} s ago"))
        return answers

    def close(self) -> None:
        """End every link in good order, stop listening, and unblock whoever waits. Idempotent, never blocks."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
        for link in self.links.values():
            if link.state is LinkState.OPEN:
                with contextlib.suppress(ChannelClosed, ChannelTimeout):
                    link.channel.try_send("close")
        # A push that is under way sees the flag, ends its links as broken, and lets go of the lock at once.
        with self.pushing:
            for link in self.links.values():
                link.end()
        self._rendezvous.close()
        self._wake_writer.close()
        self._wake_reader.close()

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


class ProtocolViolation(Exception):
    """A worker answered something that the protocol does not allow."""


def raise_failures(failed: Mapping[int, Exception], phase: str) -> None:
    """Raise what the failures of several workers have in common; nothing if there are none."""
    if not failed:
        return
    kinds = {type(cause) for cause in failed.values()}
    kind = kinds.pop() if len(kinds) == 1 else WeightSyncError
    if kind not in (WeightSyncTimeout, WorkerDied, StaleVersionError, WorkerError):
        kind = WeightSyncError
    lines = "; ".join(str(cause) for _, cause in sorted(failed.items()))
    error = kind(f"{phase} failed for worker(s) {sorted(failed)}: {lines}", failed)
    if isinstance(error, WorkerError):
        error.remote_traceback = "\n".join(getattr(cause, "remote_traceback", "") for cause in failed.values())
    raise error


def _next_answer(link: WorkerLink, expected: Collection[str]) -> Message | Exception | None:
    try:
        while (message := link.channel.poll()) is not None:
            if message.kind in expected:
                return message
            if message.kind != "beat":
                return ProtocolViolation(f"it answered {message.kind!r} where {sorted(expected)} was due")
    except ChannelClosed as error:
        return error
    return None


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
