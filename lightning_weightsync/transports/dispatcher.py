"""How does a sender talk to many workers at once? One errand at a time per worker, all workers side by side.

Each link has a queue; its first errand is sent as soon as the one before has settled. Nobody waits for anybody else's
worker: a slow one only lengthens its own queue, in which a newer push takes the place of an older one that has not been
sent.

Whoever waits for errands drives the exchange for everybody; while nobody waits and pushes are under way, a background
thread does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports.control import ChannelClosed
from lightning_weightsync.transports.errand import Errand, ErrandState
from lightning_weightsync.transports.link import LinkState, WorkerLink, silent_for

_LOOK_AROUND = 0.05
_BETWEEN = "between pushes"
_BEATS_AT_ONCE = 16


class Dispatcher:
    """Runs the errands of one hub.

    Args:
        heartbeat_timeout: Seconds of silence after which a worker that owes an answer is lost.
        lose: Ends a link: ``lose(link, phase, seconds, error)`` returns the cause that the user is shown.
    """

    def __init__(
        self, heartbeat_timeout: float, lose: Callable[[WorkerLink, str, float, Exception], Exception]
    ) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._lose = lose
        self._queues: dict[int, deque[Errand]] = {}
        self._ready: deque[Errand] = deque()  # first in their queues, and not sent yet
        self._given_up: deque[tuple[WorkerLink, Exception, str, float | None]] = deque()
        self._looked_around = 0.0
        self._links: dict[int, WorkerLink] = {}
        self._mutex = threading.RLock()
        self._driving = threading.Lock()
        self._progress = threading.Condition()
        self._waiters = 0
        self._work = threading.Event()
        self._background: threading.Thread | None = None
        self._closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._wake_reader, select.POLLIN)

    def watch(self, link: WorkerLink) -> None:
        """Take a new link in; to be called before its first errand."""
        with self._mutex:
            descriptor = link.channel.fileno()
            self._links[descriptor] = link
            self._queues[id(link)] = deque()
            self._poller.register(descriptor, select.POLLIN)
            link.when_ended(lambda: self._forget(descriptor, link))
        self._wake()  # whoever drives listens to it from now on

    def give_up(self, link: WorkerLink, error: Exception, *, phase: str = _BETWEEN, since: float | None = None) -> None:
        """End a link, and fail what is queued for it; returns when that is done, by whoever drives.

        Nobody but the driver ends a link while the exchange goes on: it may be sending on it, or reading its answer.

        Args:
            link: That cannot be used any more.
            error: Why.
            phase: What it was about, for errors, if nothing is queued.
            since: When that began, on the monotonic clock, in seconds.
        """
        if link.state is not LinkState.OPEN:
            return
        self._given_up.append((link, error, phase, since))
        self.wait_until(lambda: link.state is not LinkState.OPEN)
        link.end(error)  # if the exchange is over, and nobody drives any more

    def give_up_later(self, link: WorkerLink, error: Exception) -> None:
        """The same, by whoever drives next; for what is called while somebody does."""
        self._given_up.append((link, error, _BETWEEN, None))

    def call_off(self, errands: Iterable[Errand], error: WeightSyncError) -> None:
        """What these errands carry cannot be completed: fail them. Who has been sent a part loses its link."""
        for errand in errands:
            reason = WeightSyncError(f"{errand.link.name}: {error} (phase: {errand.phase})")
            if not self._withdraw(errand, reason) and not errand.final:
                self.give_up(errand.link, error)

    def submit(self, errands: Iterable[Errand]) -> None:
        """Put errands into their links' queues; does not block. Whoever drives sends them."""
        with self._mutex:
            for errand in errands:
                queue = self._queues.get(id(errand.link))
                if queue is None or errand.link.state is not LinkState.OPEN:
                    errand.move(ErrandState.FAILED, error=errand.link.cause or ChannelClosed("the link is closed"))
                    continue
                first = queue[0] if queue else None
                if errand.takes_place_of is not None:
                    for old in [e for e in queue if e.state is ErrandState.QUEUED and errand.takes_place_of(e)]:
                        queue.remove(old)
                        old.move(ErrandState.SUPERSEDED)
                queue.append(errand)
                if queue[0] is not first:
                    self._line_up(queue)

    def wait(self, errands: Sequence[Errand], deadline: float | None = None) -> bool:
        """Block until all of these have settled; drives the exchange if nobody else does.

        Args:
            errands: Submitted before.
            deadline: Give up waiting then (monotonic clock, seconds); the errands go on.

        Returns:
            Whether all have settled.
        """
        settled = 0

        def over() -> bool:
            nonlocal settled
            while settled < len(errands) and errands[settled].final:
                settled += 1
            return settled == len(errands)

        self.wait_until(over, deadline)
        return over()

    def wait_until(self, over: Callable[[], bool], deadline: float | None = None) -> None:
        """Block until ``over()`` or the deadline; drives the exchange if nobody else does."""

        def enough() -> bool:
            return over() or (deadline is not None and time.monotonic() >= deadline)

        while not enough():
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(enough)
                finally:
                    self._driving.release()
                    self._tell_progress()
            else:
                self._wake()  # the driver may be asleep, and has our errands to send
                with self._progress:
                    self._waiters += 1
                    if not over():
                        self._progress.wait(_LOOK_AROUND)
                    self._waiters -= 1
            if self._closed and not over():  # by a thread that has yet to fail what is under way
                with self._driving:
                    self._fail_all()
                return

    def send_off(self) -> None:
        """Send what is first in its queue now; does not block. Whoever drives already does it instead."""
        if self._driving.acquire(blocking=False):
            try:
                self._send_next()
            finally:
                self._driving.release()
                self._tell_progress()
        else:
            self._wake()

    def listen(self) -> None:
        """Take in what has arrived on all links, heartbeats above all; blocks for a twentieth of a second at most."""
        self.wait_until(lambda: False, time.monotonic() + _LOOK_AROUND)

    @contextlib.contextmanager
    def at_rest(self, links: Collection[WorkerLink]) -> Iterator[bool]:
        """Tells whether all of these workers are there, and owe no answer. Nothing is sent and no link ended inside.

        Takes in what has arrived; does not block.
        """
        if not self._driving.acquire(blocking=False):
            yield False  # something is under way
            return
        try:
            self._exchange(0.0)
            yield self._owe_nothing(links)
        finally:
            self._driving.release()
            self._tell_progress()

    def _owe_nothing(self, links: Iterable[WorkerLink]) -> bool:
        now = time.monotonic()
        with self._mutex:
            return not self._closed and all(
                link.state is LinkState.OPEN
                and self._queues.get(id(link)) == deque()
                and now - link.channel.last_heard <= self._heartbeat_timeout
                for link in links
            )

    def run_in_background(self) -> None:
        """See to it that submitted errands are run though nobody waits for them."""
        if self._background is None:
            self._background = threading.Thread(target=self._run, name="weight-sync-sender", daemon=True)
            self._background.start()
        self._work.set()
        self._wake()

    def close(self) -> None:
        """Fail everything that has not settled, and wake whoever waits. Does not block on any worker."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self._work.set()
        self._wake()
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join(0.9)
        with self._driving:
            self._fail_all()
            self._wake_writer.close()
            self._wake_reader.close()
        self._tell_progress()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            if self._closed:
                return
            with self._driving:
                self._drive(lambda: self._closed or not self._busy())
            with self._mutex:
                if not self._busy():
                    self._work.clear()
            self._tell_progress()

    def _busy(self) -> bool:
        with self._mutex:
            return any(self._queues.values())

    def _drive(self, over: Callable[[], bool]) -> None:
        """Send, read and expire until ``over``; the caller has ``_driving``."""
        self._send_next()
        while not over():
            if self._closed:
                self._fail_all()
                return
            self._exchange(_LOOK_AROUND)
            self._expire()
            self._send_next()
            if self._waiters:
                self._tell_progress()

    def _exchange(self, seconds: float) -> None:
        """Read and post what can be read and posted, once something can be or the seconds have passed."""
        for descriptor, events in self._poller.poll(seconds * 1000):
            if descriptor == self._wake_reader.fileno():
                with contextlib.suppress(OSError):
                    self._wake_reader.recv(4096)
            elif (link := self._links.get(descriptor)) is not None:
                if events & select.POLLOUT:
                    self._send_rest(link)
                self._read(link)

    def _send_next(self) -> None:
        while self._given_up:
            self._lost(*self._given_up.popleft())
        while self._ready:
            with self._mutex:
                errand = self._ready.popleft()
                if errand.state is not ErrandState.QUEUED:
                    continue
                errand.move(ErrandState.SENT)
            try:
                errand.request(errand.link)
                if errand.link.channel.has_mail:
                    self._poller.modify(errand.link.channel.fileno(), select.POLLIN | select.POLLOUT)
            except OSError as error:
                self._lost(errand.link, error)
            except Exception as error:  # our own: a part may have left, and the worker would take what follows for it
                self._lost(errand.link, WeightSyncError(f"it could not be sent this: {type(error).__name__}: {error}"))

    def _send_rest(self, link: WorkerLink) -> None:
        """There is room for more of what was too much for the socket."""
        try:
            link.channel.post()
            if not link.channel.has_mail:
                self._poller.modify(link.channel.fileno(), select.POLLIN)
        except (ChannelClosed, OSError, ValueError) as error:
            self._lost(link, error)

    def _read(self, link: WorkerLink) -> None:
        beats = 0
        try:
            # One who never stops sending must not keep the driver from all others: the next poll tells of the rest.
            while (message := link.channel.poll(read=beats < _BEATS_AT_ONCE)) is not None:
                if message.kind == "beat":
                    beats += 1
                    continue
                with self._mutex:
                    queue = self._queues.get(id(link))
                    head = queue[0] if queue else None
                    if queue is None or head is None or head.state is not ErrandState.SENT:
                        raise ChannelClosed(f"it sent {message.kind!r} unasked")
                    if message.kind not in head.expected:
                        raise ChannelClosed(f"it answered {message.kind!r} where {sorted(head.expected)} was due")
                    if head.check is not None:
                        head.check(message)
                    queue.popleft()
                    self._line_up(queue)
                head.move(ErrandState.ANSWERED, reply=message)
                if not link.channel.has_more:  # if there is more in the socket, the next poll tells
                    return
        except ChannelClosed as error:
            self._lost(link, error)

    def _line_up(self, queue: deque[Errand]) -> None:
        """The first errand of a queue has settled: the next one may be sent. The caller has ``_mutex``."""
        if queue:
            self._ready.append(queue[0])

    def _expire(self) -> None:
        now = time.monotonic()
        if now - self._looked_around < _LOOK_AROUND / 2:
            return
        self._looked_around = now
        with self._mutex:
            entries = [list(queue) for queue in self._queues.values() if queue]
        for errands in entries:
            head = errands[0]
            quiet = now - max(head.link.channel.last_heard, head.created)
            if head.state is ErrandState.SENT and quiet > self._heartbeat_timeout:
                self._lost(head.link, silent_for(quiet))
            elif head.state is ErrandState.SENT and now >= head.deadline:
                self._lost(head.link, TimeoutError(f"no answer before the deadline; last heard {quiet:.1f} s ago"))
            else:
                for errand in errands:
                    if now >= errand.deadline:
                        self._give_up_queued(errand)

    def _give_up_queued(self, errand: Errand) -> None:
        seconds = time.monotonic() - errand.created
        late = f"{errand.link.name} is busy: {errand.phase} was not sent within {seconds:.1f} s"
        self._withdraw(errand, WeightSyncTimeout(late))

    def _withdraw(self, errand: Errand, error: Exception) -> bool:
        """Fail an errand that has not been sent; whether it had not."""
        with self._mutex:  # or another thread sends or supersedes it at this moment
            queue = self._queues.get(id(errand.link))
            if queue is None or errand not in queue or errand.state is not ErrandState.QUEUED:  # or its link is lost
                return False
            was_first = queue[0] is errand
            queue.remove(errand)
            if was_first:
                self._line_up(queue)
            errand.move(ErrandState.FAILED, error=error)
            return True

    def _lost(self, link: WorkerLink, error: Exception, phase: str = _BETWEEN, since: float | None = None) -> None:
        """Give a link up, and with it everything that was meant for it."""
        with self._mutex:
            queue = self._queues.get(id(link))
            errands = list(queue) if queue else []
            if queue:
                queue.clear()
        if errands:
            phase, since = errands[0].phase, errands[0].created
        seconds = 0.0 if since is None else time.monotonic() - since
        cause = self._lose(link, phase, seconds, error)
        for errand in errands:
            errand.move(ErrandState.FAILED, error=cause)

    def _fail_all(self) -> None:
        with self._mutex:
            links = [link for link in self._links.values() if self._queues.get(id(link))]
        for link in links:
            self._lost(link, ChannelClosed("the sender was shut down"))

    def _forget(self, descriptor: int, link: WorkerLink) -> None:
        with self._mutex:
            if self._links.get(descriptor) is link:
                del self._links[descriptor]
                with contextlib.suppress(KeyError, ValueError):
                    self._poller.unregister(descriptor)
            left = self._queues.pop(id(link), None) or ()
        for errand in left:  # the link was ended by somebody else, for example because the worker was replaced
            errand.move(ErrandState.FAILED, error=link.cause or ChannelClosed("the link was closed"))
        if left:
            self._tell_progress()

    def _tell_progress(self) -> None:
        with self._progress:
            self._progress.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
