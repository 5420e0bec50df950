"""What does a sender own? Its links, the rendezvous, run and version, and the order of pushes.

A scheme on its own makes a hub; a collector group lends its own to all its schemes, so that several models travel as
one version over one link per worker. How errands run side by side is in ``dispatcher``, and what a push is to a worker
in ``pushing``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_weightsync.errors import (
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
)
from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.board import make_board
from lightning_weightsync.transports.control import ChannelClosed, Message
from lightning_weightsync.transports.dispatcher import Dispatcher
from lightning_weightsync.transports.errand import Errand
from lightning_weightsync.transports.link import LinkState, WorkerLink, silent_for
from lightning_weightsync.transports.meeting import Addresses, from_text, to_text
from lightning_weightsync.transports.pushing import (
    Announcement,
    Delivery,
    Payload,
    PushHandle,
    raise_failures,
)
from lightning_weightsync.transports.rendezvous import Rendezvous, StoreInfo


class Watcher(Protocol):
    """Somebody who knows more about the workers than their channels tell: a group that started their processes."""

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """Why this worker's process has ended, or ``None`` while it runs (looked at for up to ``wait`` seconds)."""
        ...


class Replaced(ConnectionError):
    """A link is given up because another process has taken the worker's place."""


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
        watcher: May be set until workers connect.
        run: Grows with every start of a sender.
        version: Of the newest push.
        values: Schedule values that came into force with it; every push carries all of them. Replaced, never changed.
        next_values: Those that come into force with the next one.
        bytes_pushed: Bytes of weights that were handed to transports so far, over all workers.
        bytes_saved: Bytes that were neither copied nor sent because they had not changed (``only_changed``).
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
        self.values: Mapping[str, Any] = {}
        self.next_values: Mapping[str, Any] = {}
        self.bytes_pushed = 0
        self.bytes_saved = 0
        self.pushing = threading.RLock()
        self.dispatcher = Dispatcher(heartbeat_timeout, self.lose)
        self.watcher = watcher
        self._rendezvous = Rendezvous(host, local=local)
        self._generations: dict[int, int] = {}
        self._joining: dict[int, WorkerLink] = {}
        self._connecting = threading.Lock()
        self._closed = threading.Event()

    @property
    def info(self) -> StoreInfo:
        """Host, port and key that a worker needs to join."""
        return self._rendezvous.info

    def check_ids(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The targeted indices; see the function of this name."""
        return check_ids(worker_ids, self.num_workers)

    def check_open(self) -> None:
        """See whether this end is still there.

        Raises:
            WeightSyncError: It was shut down.
        """
        if self._closed.is_set():
            raise WeightSyncError("the sender was shut down: call init_on_sender() again, and connect()")

    def find_down(self) -> list[int]:
        """Workers that nobody serves: they never connected, or their link is lost, noticed or not."""
        for link in list(self.links.values()):
            if link.state is LinkState.OPEN:
                try:
                    link.channel.check_open()
                except ChannelClosed as error:  # while nobody waited for an answer
                    self.dispatcher.give_up(link, error)
        return [index for index in range(self.num_workers) if not self._serves(index)]

    def give_up_silent(self, worker_ids: Iterable[int]) -> None:
        """End the links of those of these workers that have been silent for ``heartbeat_timeout``.

        For workers that somebody waits for in another way than by an errand. Listens first, which takes a moment.
        """
        self.dispatcher.listen()
        for index in worker_ids:
            link = self.links.get(index)
            quiet = time.monotonic() - link.channel.last_heard if link is not None else 0.0
            if link is not None and link.state is LinkState.OPEN and quiet > self.heartbeat_timeout:
                self.dispatcher.give_up(link, silent_for(quiet))

    @contextlib.contextmanager
    def connecting(self, deadline: float) -> Iterator[None]:
        """Workers connect inside; one thread at a time: two would take each other's workers.

        Raises:
            WeightSyncTimeout: Another thread was still connecting others at the deadline (monotonic clock, seconds).
        """
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise WeightSyncTimeout("another thread is connecting workers (phase: rendezvous)")
        try:
            yield
        finally:
            self._connecting.release()

    @contextlib.contextmanager
    def in_order(self, deadline: float) -> Iterator[None]:
        """Holds ``pushing`` inside: no version is taken or put into a queue by another thread meanwhile.

        Raises:
            WeightSyncTimeout: Another thread's push was still waiting for a slot at the deadline.
        """
        if not self.pushing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise WeightSyncTimeout("a push by another thread has waited for a slot all the time (phase: connect)")
        try:
            self.check_open()
            yield
        finally:
            self.pushing.release()

    def accept(self, worker_ids: Collection[int], deadline: float) -> dict[int, WorkerLink]:
        """Rendezvous: wait for these workers, and make their links, which no push uses before ``admit``.

        Blocks on all of them. A worker that had a link before is fenced off by its replacement from here on.

        Raises:
            WeightSyncTimeout: Some did not come by the deadline (monotonic clock, seconds); ``.failed`` names them, and
                those that came were sent away.
            WorkerDied: A missing worker's process has ended.
        """
        self.check_open()
        joined = self._rendezvous.accept(worker_ids, deadline, self._watch_missing)
        for index, member in sorted(joined.items()):
            old = self.links.get(index)
            if old is not None and old.state is LinkState.OPEN:
                self.dispatcher.give_up(old, Replaced(f"another process (pid {member.pid}) has taken its place"))
            generation = self._generations.get(index, -1) + 1
            self._generations[index] = generation
            link = WorkerLink(index, member.pid, member.channel, generation, member.local)
            self._joining[index] = link
            self.dispatcher.watch(link)
            try:
                link.channel.send("welcome", generation=generation, heartbeat_timeout=float(self.heartbeat_timeout))
                _share_board(link)
            except ChannelClosed as error:  # whoever asks it next is told
                self.dispatcher.give_up(link, error)
        if self._closed.is_set():  # meanwhile: these links were not there yet
            self._end_links()
            self.check_open()
        return {index: self._joining[index] for index in joined}

    def admit(self, links: Mapping[int, WorkerLink]) -> None:
        """From now on pushes go to these workers; the caller holds ``pushing``, and has seen to their versions."""
        self.links |= links
        for index in links:
            self._joining.pop(index, None)

    def turn_away(self, links: Mapping[int, WorkerLink], error: BaseException) -> None:
        """Workers that could not be connected, for this reason, are told so and sent away."""
        for index, link in links.items():
            if link.state is LinkState.OPEN:
                self.dispatcher.give_up(link, ConnectionError(f"not connected: {error}"))
            self._joining.pop(index, None)

    def push(
        self,
        payloads: Mapping[int, Sequence[Payload]],
        version: int,
        *,
        timeout: float,
        initial: bool = False,
        replaceable: bool = False,
        links: Mapping[int, WorkerLink] | None = None,
        switched: Collection[int] = (),
    ) -> PushHandle:
        """Put one version on its way to workers; does not block.

        Args:
            payloads: The models of this version, for each targeted worker. Their slots are held until it is settled.
            version: Taken by the caller, under ``pushing``.
            timeout: Bounds the push as a whole, in seconds from now.
            initial: The version that a new worker starts from; a worker then need not find it newer.
            replaceable: Whether a newer push of the same models may take its place in a queue.
            links: Of workers that are connecting; ``None`` for those that have been admitted.
            switched: Workers that have it already (``at_rest``): nothing is sent to them.

        Returns:
            The handle; whoever waits for it drives the exchange (or ``dispatcher.run_in_background``).
        """
        names = sorted({payload.model_id for several in payloads.values() for payload in several})
        phase = f"push of version {version} of {', '.join(map(repr, names))}"
        handle = PushHandle(self.run, version, self.dispatcher, phase, self.values)
        deadline = time.monotonic() + timeout
        announcement = Announcement(self.run, version, self.values, initial, deadline, timeout)
        for index, several in payloads.items():
            if index in switched:
                self._count_bytes(sum(payload.pool.nbytes for payload in several), 0)
                handle.at_rest.append(index)
                continue
            link = (self.links if links is None else links).get(index)
            if link is None or link.state is not LinkState.OPEN:
                handle.failed[index] = _down(index, link, phase)
                continue
            delivery = Delivery(self._count_bytes, handle, list(several), announcement, replaceable)
            for payload in several:
                payload.pool.hold(payload.slot, delivery)
            handle.errands.append(delivery.errand(link, phase, deadline))
        self.dispatcher.submit(handle.errands)
        return handle

    def ask(
        self,
        links: Iterable[WorkerLink],
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
        for link in list(links):  # of a hub: another thread may admit a worker, or have one leave
            if link.state is not LinkState.OPEN:
                answers.failed[link.worker_idx] = _down(link.worker_idx, link, phase)
            else:
                errands.append(Errand(link, request, expected, phase=phase, deadline=deadline))
        self.dispatcher.submit(errands)
        self.dispatcher.wait(errands)
        for errand in errands:
            if errand.reply is not None:
                answers.replies[errand.link.worker_idx] = errand.reply
            else:
                answers.failed[errand.link.worker_idx] = errand.error or ChannelClosed("the sender was shut down")
        return answers

    def swap(self, link: WorkerLink, model_id: str, ours: Addresses, deadline: float) -> Addresses:
        """Tell a worker our addresses for a meeting in a pair group, and return its own; blocks on it.

        Raises:
            TransferFailed: It did not tell; its link is lost then.
        """

        def request(link: WorkerLink) -> None:
            link.channel.send("meet", model_id=model_id, addresses=to_text(ours))

        phase = f"meeting for {model_id!r}"
        answers = self.ask([link], request, {"meet"}, phase=phase, deadline=deadline)
        if answers.failed:
            raise TransferFailed("the worker did not come to the pair group") from answers.failed[link.worker_idx]
        return from_text(answers.replies[link.worker_idx]["addresses"])

    def close(self) -> None:
        """End every link in good order, stop listening, and unblock whoever waits. Idempotent.

        Blocks on no worker; whoever drives leaves within a twentieth of a second.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self.dispatcher.close()
        self._end_links()
        self._rendezvous.close()

    def _end_links(self) -> None:
        for link in (*self.links.values(), *self._joining.values()):
            if link.state is LinkState.OPEN:
                with contextlib.suppress(ChannelClosed):
                    link.channel.try_send("close")
            link.end()

    def _serves(self, worker_idx: int) -> bool:
        link = self.links.get(worker_idx)
        return link is not None and link.state is LinkState.OPEN

    def _count_bytes(self, nbytes: int, saved: int) -> None:
        self.bytes_pushed += nbytes
        self.bytes_saved += saved

    def _watch_missing(self, missing: set[int]) -> None:
        if self._closed.is_set():
            raise WeightSyncError("the sender was shut down while it waited for its workers")
        if self.watcher is None:
            return
        dead = {i: c for i in sorted(missing) if (c := self.watcher.cause_of_death(i, 0.0)) is not None}
        raise_failures(dead, "waiting for workers to connect")

    def lose(self, link: WorkerLink, phase: str, seconds: float, error: Exception) -> Exception:
        """End a link that cannot be used any more; returns the cause that the user is shown."""
        if link.state is not LinkState.OPEN:  # somebody else has ended it meanwhile
            return link.cause or WeightSyncError(f"{link.name}: the link was closed (phase: {phase})")
        holds = f"it holds version {link.version}" if link.version >= 0 else "it holds no version yet"
        where = f"{error}; {holds} (phase: {phase}, after {seconds:.1f} s)"
        if self._closed.is_set():  # nothing is wrong with the worker
            link.end()
            return WeightSyncError(f"{link.name}: {where}")
        death = self.watcher.cause_of_death(link.worker_idx, 0.5) if self.watcher and _is_end(error) else None
        cause = death or _cause(link, error, where)
        with contextlib.suppress(ChannelClosed):  # a worker that was stopped, or replaced, reads it when it goes on
            link.channel.try_send("refused", reason=str(error))
        link.end(cause)
        return cause


def _cause(link: WorkerLink, error: Exception, where: str) -> Exception:
    if isinstance(error, TimeoutError):
        return WeightSyncTimeout(f"{link.name}: {where}")
    if isinstance(error, OSError):
        return WorkerDied(f"{link.name} is gone: {where}")
    return WeightSyncError(f"{link.name} was given up: {where}")  # for an error of the sender's own


def check_ids(worker_ids: int | Sequence[int] | None, num_workers: int) -> list[int]:
    """The targeted indices, each once; ``None`` means all.

    Raises:
        ValueError: An index is not in ``0 .. num_workers - 1``.
    """
    if worker_ids is None:
        return list(range(num_workers))
    ids = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_workers:
            raise ValueError(f"worker_ids holds {index!r}; workers are numbered 0 .. {num_workers - 1}")
    return list(dict.fromkeys(ids))


def _share_board(link: WorkerLink) -> None:
    board = make_board(link.channel.peer_pid) if link.local else None
    if board is not None:
        link.board = board
        link.channel.send("board", descriptor=board.descriptor)


def _is_end(error: Exception) -> bool:
    return isinstance(error, ChannelClosed | TransferFailed)


def _down(index: int, link: WorkerLink | None, phase: str) -> Exception:
    if link is None:
        return WorkerDied(f"worker {index} has not connected (phase: {phase})")
    return WorkerDied(f"{link.name} is {link.state.value} (phase: {phase}): {link.cause or 'closed'}")
