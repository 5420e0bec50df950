"""What does the trainer know of its worker processes, and how does it get batches out of them?

The pool starts them, tells them what to build, connects their schemes, asks for batches, notices their ends, and
stops them. Policy (when to push, when to iterate, what to log) is the group's business.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import cloudpickle
from tensordict import TensorDict

from lightning_weightsync.collectors.base import CollectorFactory
from lightning_weightsync.collectors.process import WorkerProcess
from lightning_weightsync.collectors.rollouts import BatchReader
from lightning_weightsync.errors import WeightSyncTimeout, WorkerDied, WorkerError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.joining import connect_workers
from lightning_weightsync.schemes.push import PerWorker, push_models
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.control import ChannelClosed, Message
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.pushing import PushHandle, raise_failures
from lightning_weightsync.transports.rendezvous import StoreInfo

_LOOK_AROUND_MS = 100


class WorkerState(Enum):
    """``STARTING -> CONNECTED -> COLLECTING -> STOPPED | FAILED``."""

    STARTING = "starting"
    CONNECTED = "connected"
    COLLECTING = "collecting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class Rollout:
    """One batch of one worker: views into its slot, and the episodes that ended in it."""

    batch: TensorDict
    frames: int
    episodes: list[tuple[float, int]]


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess
    reader: BatchReader
    state: WorkerState = WorkerState.STARTING
    cause: Exception | None = None
    frames: int = 0
    inbox: list[Message] = field(default_factory=list)


class WorkerPool:
    """N worker processes and the hub of links to them.

    Args:
        num_workers: How many.
        schemes: By destination; initialised here as senders.
        threads_per_worker: Cap on each worker's compute threads.
    """

    def __init__(self, num_workers: int, schemes: Mapping[str, WeightSyncScheme], threads_per_worker: int) -> None:
        self.num_workers = num_workers
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
        self._workers: list[_Worker] = []
        self._reading = threading.RLock()
        self._told_to_build = False
        try:
            for model_id, scheme in schemes.items():
                scheme.init_on_sender(model_id, context=self)
            for index in range(num_workers):
                process = WorkerProcess(index, threads_per_worker)
                self._workers.append(_Worker(process, BatchReader(process.memory)))
        except BaseException:
            self.shutdown(0.0)
            raise

    def connect(
        self,
        factory: CollectorFactory,
        seeds: Sequence[int],
        weights: Mapping[str, Weights | PerWorker],
        look_around: Callable[[], None],
    ) -> None:
        """Have every worker build its collector, and deliver the current version. Blocks until all have applied it.

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
        started = time.monotonic()
        deadline = started + self.hub.connect_timeout
        info = self.hub.info if self.schemes else None
        blob = _pickled(factory, self.schemes, info)
        self._told_to_build = True
        for index, worker in enumerate(self._workers):
            self._send(
                index,
                worker,
                "build",
                blob,
                worker_idx=index,
                seed=seeds[index],
                connect_timeout=float(self.hub.connect_timeout),
            )
        self._await("built", deadline, look_around)
        if self.schemes:
            given = {scheme: weights[model_id] for model_id, scheme in self.schemes.items()}
            connect_workers(self.hub, given, range(self.num_workers), deadline)
        self._await("connected", deadline, look_around)

    def check_ids(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The targeted indices; raises ``ValueError`` for one that does not exist."""
        return self.hub.check_ids(worker_ids)

    def push(
        self,
        weights: Mapping[str, Weights | PerWorker],
        worker_ids: Sequence[int],
        *,
        timeout: float,
        replaceable: bool = False,
    ) -> PushHandle:
        """Put one version of these destinations on its way to these workers; see ``push_models``."""
        given = {self.schemes[model_id]: value for model_id, value in weights.items()}
        return push_models(self.hub, given, worker_ids, timeout=timeout, replaceable=replaceable)

    def collect(self, look_around: Callable[[], None]) -> list[Rollout]:
        """One batch from every worker, in worker order; valid until the next call. Blocks on the slowest.

        Args:
            look_around: Called about ten times a second while waiting; may raise to give up.

        Raises:
            WorkerError: A worker's code raised; carries its traceback.
            WorkerDied: A worker's process ended.
        """
        # If the last call was interrupted (Ctrl-C in a notebook), batches of old weights are still to come.
        self._await("batch", None, look_around, [w for w in self._workers if w.state is WorkerState.COLLECTING])
        for index, worker in enumerate(self._workers):
            worker.state = WorkerState.COLLECTING
            self._send(index, worker, "collect", slot=0)
        rollouts = []
        for worker, message in zip(self._workers, self._await("batch", None, look_around), strict=True):
            worker.frames += message["frames"]
            episodes = [(float(value), int(length)) for value, length in message["episodes"]]
            rollouts.append(Rollout(worker.reader.read(message["slot"]), message["frames"], episodes))
        return rollouts

    def digest(self, model_id: str) -> dict[int, str]:
        """SHA-256 over each worker's live leaves, in layout order."""
        phase = f"digest of {model_id!r}"
        answers = self.hub.ask(
            self.hub.links.values(),
            lambda link: link.channel.send("digest", model_id=model_id),
            {"digested"},
            phase=phase,
            deadline=time.monotonic() + self.schemes[model_id].timeout,
        )
        raise_failures(answers.failed, phase)
        return {index: str(reply["digest"]) for index, reply in sorted(answers.replies.items())}

    def stats(self) -> dict[int, dict[str, Any]]:
        """What is known of each worker."""
        stats = {}
        for index, worker in enumerate(self._workers):
            if worker.state not in (WorkerState.STOPPED, WorkerState.FAILED):
                self.cause_of_death(index, 0.0)
            link = self.hub.links.get(index)
            stats[index] = {
                "pid": worker.process.pid,
                "state": worker.state.value,
                "cause": str(worker.cause) if worker.cause is not None else None,
                "run": link.run if link is not None else -1,
                "version": link.version if link is not None else -1,
                "generation": link.generation if link is not None else -1,
                "restarts": 0,
                "frames": worker.frames,
            }
        return stats

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        """See ``transports.hub.Watcher``: an error that the worker told of, or the end of its process."""
        worker = self._workers[worker_idx]
        if worker.cause is None:
            ended = worker.process.ended(wait)
            self._read(worker_idx, worker)
            if worker.cause is None and ended is not None:
                self._fail(worker, WorkerDied(f"worker {worker_idx} (pid {worker.process.pid}) ended: {ended}"))
        return worker.cause

    def shutdown(self, timeout: float) -> None:
        """Stop every worker within ``timeout`` seconds overall: ask all, then kill those that are left. Idempotent."""
        # An interpreter that still imports hears nothing yet, and has nothing to close.
        deadline = time.monotonic() + (timeout if self._told_to_build else 0.0)
        for worker in self._workers:
            worker.process.ask_to_stop()
        # Before they are waited for: a worker that is connecting waits for the sender, not for its parent.
        for scheme in self.schemes.values():
            scheme.shutdown()
        self.hub.close()
        for worker in self._workers:
            worker.process.reap(max(0.0, deadline - time.monotonic()))
            if worker.state is not WorkerState.FAILED:
                worker.state = WorkerState.STOPPED

    def _await(
        self,
        kind: str,
        deadline: float | None,
        look_around: Callable[[], None],
        workers: Sequence[_Worker] | None = None,
    ) -> list[Message]:
        """One message of this kind from each of these workers; from every worker if none are named."""
        started = time.monotonic()
        awaited = {i: w for i, w in enumerate(self._workers) if workers is None or w in workers}
        poller = select.poll()
        for worker in awaited.values():
            poller.register(worker.process.jobs.fileno(), select.POLLIN)
        got: dict[int, Message] = {}
        while True:
            for index, worker in awaited.items():
                if index not in got:
                    self._read(index, worker)
                    wanted = next((m for m in worker.inbox if m.kind == kind), None)
                    if wanted is not None:
                        worker.inbox.clear()
                        if kind != "built":
                            worker.state = WorkerState.CONNECTED
                        got[index] = wanted
                        poller.unregister(worker.process.jobs.fileno())
                    elif self.cause_of_death(index, 0.0) is not None:
                        self._raise_deaths(f"waiting for {kind!r}")
            if len(got) == len(awaited):
                return [got[index] for index in awaited]
            if deadline is not None and time.monotonic() > deadline:
                seconds = f"after {time.monotonic() - started:.1f} s"
                late = {
                    i: WeightSyncTimeout(f"worker {i} (pid {w.process.pid}) was still {w.state.value} {seconds}")
                    for i, w in awaited.items()
                    if i not in got
                }
                raise_failures(late, f"waiting for {kind!r}")
            look_around()
            poller.poll(_LOOK_AROUND_MS)

    def _read(self, index: int, worker: _Worker) -> None:
        """Take in what the worker has sent; an error it tells of, or the end of its channel, is its end."""
        with self._reading:  # the thread that delivers pushes asks for causes of death too
            self._take_in(index, worker)

    def _take_in(self, index: int, worker: _Worker) -> None:
        try:
            while (message := worker.process.jobs.poll()) is not None:
                if message.kind == "error":
                    self._fail(worker, _told(index, worker.process.pid, message))
                elif message.kind != "booted":
                    worker.inbox.append(message)
                if message.kind == "batch" and message["schema"]:
                    worker.reader.open(message["schema"])
        except ChannelClosed as error:
            if worker.cause is None and worker.state is not WorkerState.STOPPED:
                ended = worker.process.ended(0.5) or f"its job channel broke: {error}"
                self._fail(worker, WorkerDied(f"worker {index} (pid {worker.process.pid}) ended: {ended}"))

    def _send(self, index: int, worker: _Worker, kind: str, blob: bytes = b"", **fields: Any) -> None:
        try:
            worker.process.jobs.send(kind, blob, deadline=time.monotonic() + self.hub.connect_timeout, **fields)
        except ChannelClosed:
            self.cause_of_death(index, 0.5)
            self._raise_deaths(f"sending {kind!r}")

    def _raise_deaths(self, phase: str) -> None:
        dead = {i: w.cause for i, w in enumerate(self._workers) if w.cause is not None}
        raise_failures(dead, phase)

    @staticmethod
    def _fail(worker: _Worker, cause: Exception) -> None:
        worker.state = WorkerState.FAILED
        worker.cause = cause


def _told(index: int, pid: int, message: Message) -> WorkerError:
    text = f"worker {index} (pid {pid}) raised in phase {message['phase']!r}: {message['message']}"
    return WorkerError(f"{text}\n{message['traceback']}".rstrip(), remote_traceback=message["traceback"])


def _pickled(factory: CollectorFactory, schemes: Mapping[str, WeightSyncScheme], info: StoreInfo | None) -> bytes:
    try:
        data: bytes = cloudpickle.dumps((factory, dict(schemes), info))
    except Exception as error:
        raise TypeError(
            f"the collector factory {factory!r} cannot be pickled, and a worker is another process: {error}. "
            "Make what does not pickle inside the factory."
        ) from error
    return data
