"""Which processes are a group's workers, from their start to their end?

A fleet starts them, tells them what to build, connects their schemes, replaces those that were lost, and stops them.
What they say, and which of them are lost, is in the ``roster``; when a lost one is replaced is ``supervisor``'s
decision.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_weightsync.collectors.base import CollectorFactory
from lightning_weightsync.collectors.caretaker import Caretaker
from lightning_weightsync.collectors.member import Member, WorkerState
from lightning_weightsync.collectors.pickling import dumps
from lightning_weightsync.collectors.roster import LOOK_AROUND, Roster, causes
from lightning_weightsync.collectors.supervisor import Condition
from lightning_weightsync.errors import WeightSyncError, WorkerDied
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.joining import connect_workers, reconnect_workers
from lightning_weightsync.schemes.push import PerWorker
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.control import ChannelClosed
from lightning_weightsync.transports.pushing import raise_failures
from lightning_weightsync.transports.rendezvous import StoreInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetOptions:
    """What a fleet is to be.

    Attributes:
        num_workers: How many workers it begins with.
        schemes: By destination; the fleet initialises them as senders.
        threads_per_worker: Cap on each worker's compute threads.
        max_restarts: Of each worker, within any ten minutes.
        new_seed: Called with a worker's index for the seed of its replacement; never the same one twice.
        env_timeout: Seconds after which a worker whose collector does not get on is lost; ``None``: never.
    """

    num_workers: int
    schemes: Mapping[str, WeightSyncScheme]
    threads_per_worker: int
    max_restarts: int
    new_seed: Callable[[int], int]
    env_timeout: float | None = None


class Fleet(Roster):
    """N worker processes and the hub of links to them.

    Once connected, a worker that is lost (its process ended, or its link was given up) is replaced in the background,
    as often as ``max_restarts`` allows; only then, or when the user's own code raised, do calls raise its loss.

    Args:
        options: What it is to be.
    """

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options.num_workers, options.schemes, options.max_restarts)
        self._options = options
        self._frames: dict[int, int] = {}
        # One replacement dials at a time: the rendezvous refuses a worker that it does not expect.
        self._joining = threading.Lock()
        self._caretaker = Caretaker(self)
        self._order = b""
        try:
            for model_id, scheme in self.schemes.items():
                scheme.init_on_sender(model_id, context=self)
            for _ in range(options.num_workers):
                self._workers.append(Member.start(options.threads_per_worker))
        except BaseException:
            self.shutdown(0.0)
            raise

    @property
    def num_workers(self) -> int:
        """How many workers there are, replacements that are starting included."""
        return self.hub.num_workers

    @property
    def restarts(self) -> int:
        """Replacements of lost workers so far."""
        with self._mutex:
            return self.supervisor.total_restarts

    def connect(
        self,
        factory: CollectorFactory,
        seeds: Sequence[int],
        weights: Mapping[str, Weights | PerWorker],
        look_around: Callable[[], None],
    ) -> None:
        """Have every worker build its collector, and deliver the current version. Blocks until all have applied it.

        All are connected, or none: a worker that dies here is not replaced.

        Args:
            factory: See ``CollectorFactory``.
            seeds: One per worker.
            weights: By destination.
            look_around: Called about ten times a second while collectors are being built; may raise to give up.

        Raises:
            WorkerError: A factory raised; carries the worker's traceback.
            WorkerDied: A worker's process ended.
            LayoutMismatchError: The models of trainer and workers differ.
            WeightSyncTimeout: Not everybody was ready within ``connect_timeout``.
        """
        deadline = time.monotonic() + self.hub.connect_timeout
        self._order = _pickled(factory, self.schemes, self.hub.info if self.schemes else None)
        workers = dict(enumerate(self._workers))
        for index, worker in workers.items():
            self._tell_to_build(index, worker, seeds[index], deadline)
        self._await("built", workers, deadline, look_around)
        for index, worker in workers.items():
            self._send(index, worker, "connect", deadline=deadline)
        if self.schemes:
            given = {scheme: weights[model_id] for model_id, scheme in self.schemes.items()}
            connect_workers(self.hub, given, range(self.num_workers), deadline)
        self._await("connected", workers, deadline, look_around)
        with self._mutex:
            raise_failures(causes(workers), "connecting")
            self.supervisor.watch(workers)  # from here on a loss is made good
            for worker in workers.values():
                worker.move(WorkerState.CONNECTED)
        self._caretaker.start()

    def shutdown(self, timeout: float) -> None:
        """Stop every worker within ``timeout`` seconds overall: ask all, then kill those that are left. Idempotent."""
        with self._mutex:  # no process is started from here on
            self.supervisor.stop()
        self._caretaker.stop()
        # An interpreter that still imports hears nothing yet, and has nothing to close.
        deadline = time.monotonic() + (timeout if self._order else 0.0)
        try:
            for worker in self._workers:
                worker.process.ask_to_stop()
            # Before they are waited for: a worker that is connecting waits for the sender, not for its parent.
            self.hub.close()  # first: what waits in a channel may be a slot of a scheme's
            for scheme in self.schemes.values():
                scheme.shutdown()
            self._caretaker.join(max(0.5, deadline - time.monotonic()))
            for index, worker in enumerate(self._workers):
                is_replacement = worker.state is WorkerState.STARTING and self.supervisor.condition(index) is not None
                worker.process.ended(0.0 if is_replacement else max(0.0, deadline - time.monotonic()))
        finally:  # if it was interrupted, too
            for index, worker in enumerate(self._workers):
                self._read(index, worker)  # its last log records
                worker.process.reap(0.0)
                worker.reader.close()
                if worker.state is not WorkerState.FAILED:
                    worker.move(WorkerState.STOPPED)

    def resize(self, num_workers: int, timeout: float, look_around: Callable[[], None]) -> None:
        """Have this many workers. Blocks until new ones have joined, or until those that are too many have ended.

        Args:
            num_workers: At least 1.
            timeout: Seconds that workers get to end by themselves.
            look_around: Called about ten times a second while new workers start; may raise to give up.

        Raises:
            WeightSyncError: A new worker could not be connected; there are as many workers as before then.
        """
        before = self.num_workers
        if num_workers < before:
            self._shrink(num_workers, timeout)
            return
        try:
            self._grow(num_workers, look_around)
        except BaseException:
            self._shrink(before, 0.0)
            raise

    def _grow(self, num_workers: int, look_around: Callable[[], None]) -> None:
        """New workers come as replacements do: pushes take them for lost until they have joined."""
        new = range(self.num_workers, num_workers)
        with self.hub.pushing:
            for scheme in self.schemes.values():
                scheme.add_workers(new)
            self.hub.num_workers = num_workers
        with self._mutex:
            for _ in new:
                self._workers.append(Member.start(self._options.threads_per_worker))
            self.supervisor.add(new)
        self._caretaker.call()
        while not all(self.supervisor.condition(index) is Condition.UP for index in new):
            self._raise_if_over("waiting for new workers")
            look_around()
            time.sleep(LOOK_AROUND)

    def _shrink(self, num_workers: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self.hub.pushing:
            gone = range(num_workers, self.num_workers)
            self.hub.num_workers = num_workers
            links = [link for index in gone if (link := self.hub.links.pop(index, None)) is not None]
            for scheme in self.schemes.values():
                scheme.drop_workers(gone)
        with self._mutex:
            leaving = self._workers[num_workers:]
            del self._workers[num_workers:]
            self.supervisor.remove(gone)
            for worker in leaving:
                worker.move(WorkerState.STOPPED)
        try:
            for worker in leaving:
                worker.process.ask_to_stop()
            for worker in leaving:
                worker.process.ended(max(0.0, deadline - time.monotonic()))
        finally:  # Ctrl-C in a notebook, say: nobody else knows them any more
            for worker in leaving:
                worker.process.reap(0.0)
            for link in links:
                self.hub.dispatcher.give_up(link, ChannelClosed("the group has become smaller"))

    # --- losses and replacements ---------------------------------------------------------------------------------

    def due(self) -> list[int]:
        """See ``caretaker.Ward``."""
        with self._mutex:
            due = self.supervisor.due()
            for index in due:
                self.supervisor.starting(index)
            return due

    def replace(self, worker_idx: int) -> None:
        """Start a replacement of a worker, and connect it. See ``caretaker.Ward``.

        It starts from what was pushed last. Pushes to the other workers go on meanwhile.
        """
        started = time.monotonic()
        try:
            worker = self._successor(worker_idx)
        except Exception as error:  # no memory, or no process id, is left
            self.could_not_replace(worker_idx, error)
            return
        if worker is None:
            return
        deadline = started + self.hub.connect_timeout
        try:
            with self._mutex:
                seed = self._options.new_seed(worker_idx)
            self._tell_to_build(worker_idx, worker, seed, deadline)
            self._await("built", {worker_idx: worker}, deadline)
            with self._joining:
                self._join(worker_idx, worker, deadline)
        except Exception as error:
            failed = error.failed if isinstance(error, WeightSyncError) else {}
            self._lose(worker_idx, worker, failed.get(worker_idx, error))
            return
        with self._mutex:
            if not worker.move(WorkerState.CONNECTED):
                return
            self.supervisor.joined(worker_idx)
        seconds = time.monotonic() - started
        log.info(f"worker {worker_idx} (pid {worker.process.pid}) has joined, after {seconds:.1f} s")

    def could_not_replace(self, worker_idx: int, error: Exception) -> None:
        """See ``caretaker.Ward``: it counts as a replacement that was lost, and is tried again as such."""
        self._count(worker_idx, WorkerDied(f"no replacement of worker {worker_idx} could be started: {error}"))

    def _join(self, worker_idx: int, worker: Member, deadline: float) -> None:
        """Connect a replacement that has built its collector; the caller holds ``_joining``."""
        with self._mutex:
            if worker.cause is not None or worker.state is WorkerState.STOPPED:
                return  # while it waited for another one to join: there is nobody to wait for
            self._dialling = {worker_idx: worker}
        try:
            self._send(worker_idx, worker, "connect", deadline=deadline)
            if self.schemes:
                reconnect_workers(self.hub, list(self.schemes.values()), [worker_idx], deadline)
            self._await("connected", {worker_idx: worker}, deadline)
        finally:
            self._dialling = {}

    def _successor(self, worker_idx: int) -> Member | None:
        """A new process in the place of a lost worker, of which nothing is left then; ``None`` if nobody wants it."""
        current = self._member(worker_idx)
        if current is None or current.cause is None:
            return current  # the first of its index: it has just been started
        self._end_what_is_left(worker_idx, current)
        with self._mutex:
            if self.supervisor.stopped or current not in self._workers:
                return None
            self._workers[worker_idx] = Member.start(self._options.threads_per_worker)
            return self._workers[worker_idx]

    def _end_what_is_left(self, worker_idx: int, worker: Member) -> None:
        """End what is left of a lost worker: its link, its process (it may be stopped), its children."""
        self._give_up_link(worker_idx, worker, "its process has ended")
        worker.process.kill()
        self._read(worker_idx, worker)  # it may have finished a batch
        worker.process.reap(0.0)

    def _call_caretaker(self) -> None:
        self._caretaker.call()

    def _tell_to_build(self, index: int, worker: Member, seed: int, deadline: float) -> None:
        timeouts = {
            "connect_timeout": float(self.hub.connect_timeout),
            "env_timeout": float(self._options.env_timeout or 0.0),
        }
        values = dict(self.hub.values)
        level = logging.getLogger().getEffectiveLevel()
        fields = {"worker_idx": index, "seed": seed, "values": values, "log_level": level, **timeouts}
        self._send(index, worker, "build", self._order, deadline=deadline, **fields)


def _pickled(factory: CollectorFactory, schemes: Mapping[str, WeightSyncScheme], info: StoreInfo | None) -> bytes:
    try:
        return dumps((factory, dict(schemes), info))
    except Exception as error:
        raise TypeError(
            f"the collector factory {factory!r} cannot be pickled, and a worker is another process: {error}. "
            "Make what does not pickle inside the factory."
        ) from error
