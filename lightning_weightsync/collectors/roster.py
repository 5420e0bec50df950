"""What is known of the workers that are there now?

One entry per index: the process that has it, its mail, and whether it is lost. Whoever waits for workers looks here;
what becomes of a lost one is the ``fleet``'s business.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_weightsync.collectors.logs import hand_on
from lightning_weightsync.collectors.member import Member, WorkerState, reported
from lightning_weightsync.collectors.supervisor import Supervisor
from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout, WorkerDied
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.pushing import raise_failures

log = logging.getLogger(__name__)

LOOK_AROUND = 0.1
"""Seconds after which whoever waits for workers looks at what else there is: stop requests, losses."""


class Roster:
    """The workers of a hub, their mail, and their losses.

    Args:
        num_workers: How many there are to be.
        schemes: By destination.
        max_restarts: Of each worker, within any ten minutes.
    """

    def __init__(self, num_workers: int, schemes: Mapping[str, WeightSyncScheme], max_restarts: int) -> None:
        self.schemes = schemes
        first = next(iter(schemes.values()), None)
        timeouts = [s.connect_timeout for s in schemes.values() if s.connect_timeout is not None]
        self.hub = LinkHub(
            num_workers,
            host=first.host if first is not None else "127.0.0.1",
            local=any(scheme.wants_local for scheme in schemes.values()),
            connect_timeout=max(timeouts, default=None),
            heartbeat_timeout=max((s.heartbeat_timeout for s in schemes.values()), default=30.0),
            watcher=self,
        )
        self.supervisor = Supervisor(max_restarts)
        self._workers: list[Member] = []
        self._dialling: dict[int, Member] = {}  # the replacement that joins now, whoever has its index meanwhile
        # Over members, their mail, and the supervisor; nobody waits for a push or a worker while he holds it.
        self._mutex = threading.RLock()
        self._listened = 0.0

    # --- losses --------------------------------------------------------------------------------------------------

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """See ``transports.hub.Watcher``: an error that the worker told of, or the end of its process."""
        with self._mutex:
            worker = self._dialling.get(worker_idx) or self._member(worker_idx)
        if worker is None or worker.state is WorkerState.STOPPED:
            return WorkerDied(f"worker {worker_idx} has left: there are {len(self._workers)}")
        self._look(worker_idx, worker, wait)
        return worker.cause

    def notice(self) -> None:
        """See which workers are lost, of those that nobody waits for too. See ``caretaker.Ward``."""
        now = time.monotonic()
        waited_for = [i for i, worker in enumerate(self._workers) if worker.state is WorkerState.COLLECTING]
        if waited_for and now - self._listened > self.hub.heartbeat_timeout / 8:
            self._listened = now
            self.hub.give_up_silent(waited_for)
        for index, worker in enumerate(self._workers):
            # Mail is left to those who wait for it: they would sleep on.
            if worker.process.ended() is not None or self._broken_link(index, worker) is not None:
                self._look(index, worker)

    def _look(self, index: int, worker: Member | None = None, wait: float = 0.0) -> None:
        """See whether a worker is lost: it told of an error, its process ended, or its link was given up."""
        worker = worker or self._member(index)
        if worker is None or worker.cause is not None or worker.state is WorkerState.STOPPED:
            return
        ended = worker.process.ended(wait)
        self._read(index, worker)
        if ended is not None:
            self._lose(index, worker, WorkerDied(f"worker {index} (pid {worker.process.pid}) ended: {ended}"))
        link = self._broken_link(index, worker)
        if link is not None:
            self._lose(index, worker, link.cause or WorkerDied(f"worker {index}: its link is gone"))

    def _member(self, index: int) -> Member | None:
        """The process that has this index now; ``None`` if the group has become smaller than that."""
        with self._mutex:
            return self._workers[index] if index < len(self._workers) else None

    def _link_of(self, index: int, worker: Member) -> WorkerLink | None:
        """This worker's link, if it has one by now; not that of the worker before."""
        link = self.hub.links.get(index)
        return link if link is not None and link.pid == worker.process.pid else None

    def _broken_link(self, index: int, worker: Member) -> WorkerLink | None:
        """This worker's link if it was given up."""
        link = self._link_of(index, worker)
        return link if link is not None and link.state is LinkState.BROKEN else None

    def _give_up_link(self, index: int, worker: Member, why: str) -> None:
        """Nothing is pushed to this worker any more; not to be called by whoever drives, or holds the mutex."""
        link = self._link_of(index, worker)
        if link is not None:
            self.hub.dispatcher.give_up(link, ChannelClosed(why))

    def _lose(self, index: int, worker: Member, cause: Exception) -> None:
        """A worker is lost for this cause, unless it was lost before."""
        with self._mutex:
            if self.supervisor.stopped or not worker.move(WorkerState.FAILED):
                return
            worker.cause = cause
            if worker in self._workers:
                self._count(index, cause)

    def _count(self, index: int, cause: Exception) -> None:
        """A worker, or its replacement, is lost: see what becomes of it, and say so."""
        with self._mutex:
            wait = self.supervisor.died(index, cause)
            if wait is not None:
                restart = f"restart {self.supervisor.restarts(index) + 1}"
                line, _, stack = str(cause).partition("\n")
                log.warning(f"{line}; its replacement starts {f'in {wait:.1f} s' if wait else 'now'} ({restart})")
                if stack:
                    log.info(stack)
            elif index in self.supervisor.ended and self.supervisor.condition(index) is not None:
                log.error(str(self.supervisor.ended[index]).partition("\n")[0])
        self._call_caretaker()

    def _call_caretaker(self) -> None:
        """There may be something to replace."""
        raise NotImplementedError

    # --- mail ----------------------------------------------------------------------------------------------------

    def _check_running(self, workers: Iterable[Member]) -> None:
        if self.supervisor.stopped or any(worker.state is WorkerState.STOPPED for worker in workers):
            raise WeightSyncError("the workers were stopped while they were waited for")

    def _raise_if_over(self, phase: str) -> None:
        """Raise what ends every wait for a worker: that all were stopped, or that one is lost for good."""
        self._check_running([])
        with self._mutex:
            raise_failures(self.supervisor.ended, phase)

    def _await(
        self,
        kind: str,
        workers: Mapping[int, Member],
        deadline: float,
        look_around: Callable[[], None] = lambda: None,
    ) -> None:
        """One message of this kind from each of these workers, which are starting; a loss of any of them raises."""
        started = time.monotonic()
        missing = dict(workers)
        while True:
            for index, worker in list(missing.items()):
                self._look(index, worker)
                with self._mutex:
                    if worker.take(kind) is not None:
                        del missing[index]
            raise_failures(causes(workers), f"waiting for {kind!r}")
            if not missing:
                return
            if time.monotonic() > deadline:
                seconds = f"after {time.monotonic() - started:.1f} s"
                late = {
                    i: WeightSyncTimeout(f"worker {i} (pid {w.process.pid}) was still {w.state.value} {seconds}")
                    for i, w in missing.items()
                }
                raise_failures(late, f"waiting for {kind!r}")
            self._check_running(missing.values())
            look_around()
            self._wait_for_mail(missing.values())

    @staticmethod
    def _wait_for_mail(workers: Iterable[Member]) -> None:
        """Sleep until one of these has sent something, or for a tenth of a second."""
        poller = select.poll()
        for worker in workers:
            descriptor = worker.process.jobs.fileno()
            if worker.cause is None and descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(LOOK_AROUND * 1000)

    def _read(self, index: int, worker: Member) -> None:
        """Take in what the worker has sent; an error it tells of, or the end of its channel, is its end."""
        with self._mutex:  # the thread that delivers pushes asks for causes of death too
            self._take_in(index, worker)

    def _take_in(self, index: int, worker: Member) -> None:
        try:
            while (message := worker.process.jobs.poll()) is not None:
                if message.kind in ("error", "stuck"):
                    self._lose(index, worker, reported(index, worker.process.pid, message))
                elif message.kind == "log":
                    hand_on(index, message)
                elif message.kind != "booted":
                    worker.inbox.append(message)
                if message.kind == "batch" and message["schema"]:
                    worker.reader.open(message["schema"])
        except ChannelClosed as error:
            if worker.cause is None and worker.state is not WorkerState.STOPPED:
                ended = worker.process.ended(0.5) or f"its job channel broke: {error}"
                self._lose(index, worker, WorkerDied(f"worker {index} (pid {worker.process.pid}) ended: {ended}"))

    def _send(
        self, index: int, worker: Member, kind: str, blob: bytes = b"", *, deadline: float | None = None, **fields: Any
    ) -> None:
        """Send a message; if the worker is gone, that is noticed and nothing is raised.

        Raises:
            WeightSyncTimeout: It does not read, and the deadline (``connect_timeout`` from now, if none is given) has
                passed.
        """
        started = time.monotonic()
        try:
            worker.process.jobs.send(kind, blob, deadline=deadline or started + self.hub.connect_timeout, **fields)
        except ChannelClosed:
            self._look(index, worker, 0.5)
        except ChannelTimeout:
            seconds = time.monotonic() - started
            text = f"worker {index} (pid {worker.process.pid}) has not read {kind!r} after {seconds:.1f} s"
            raise_failures({index: WeightSyncTimeout(text)}, f"sending {kind!r}")


def causes(workers: Mapping[int, Member]) -> dict[int, Exception]:
    """Why each of these that is lost is lost."""
    return {index: worker.cause for index, worker in workers.items() if worker.cause is not None}
