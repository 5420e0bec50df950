"""How does the trainer get weights into its worker processes, and batches out of them?

Policy (when to push, when to iterate, what to log) is the group's business; which processes there are is the fleet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_weightsync.collectors.fleet import Fleet
from lightning_weightsync.collectors.member import BatchRequest, Member, Rollout, WorkerState
from lightning_weightsync.schemes.push import PerWorker, push_models
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.pushing import PushHandle, raise_failures

_GONE = (WorkerState.FAILED, WorkerState.STOPPED)


class WorkerPool(Fleet):
    """A fleet that can be pushed to, and asked for batches."""

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

    def beyond_repair(self, failed: Mapping[int, Exception]) -> dict[int, Exception]:
        """Those of these failures of workers that no replacement makes good.

        A replacement starts from what was pushed last, so a push that a lost worker missed is not missing.
        """
        left = {}
        for index, cause in failed.items():
            self._look(index)
            with self._mutex:
                if self._member(index) is None:
                    continue  # it has left
                if index in self.supervisor.ended:
                    left[index] = self.supervisor.ended[index]
                elif not self.supervisor.repairs(index, cause):
                    left[index] = cause
        return left

    def collect(self, look_around: Callable[[], None]) -> list[Rollout]:
        """One batch from every worker, in worker order; valid until the next call, or lent. Blocks on the slowest.

        What a lost worker has not finished is collected by its replacement, for which this waits.

        Args:
            look_around: Called about ten times a second while waiting; may raise to give up.

        Raises:
            WorkerError: A worker's code raised; carries its traceback.
            WorkerDied: A worker was lost, and is not replaced (any more).
        """
        # If the last call was interrupted (Ctrl-C in a notebook), batches of old weights are still to come.
        collecting = [(i, worker) for i, worker in enumerate(self._workers) if worker.state is WorkerState.COLLECTING]
        self._gather([BatchRequest(index, asked=worker) for index, worker in collecting], look_around)
        requests = [BatchRequest(index) for index in range(self.num_workers)]
        rollouts = self._gather(requests, look_around)
        if len(rollouts) == 1:  # several are put together by a copy
            rollouts[0].lend_from(requests[0])
        return rollouts

    def _gather(self, requests: Sequence[BatchRequest], look_around: Callable[[], None]) -> list[Rollout]:
        """The batches of these requests, in their order."""
        rollouts: dict[BatchRequest, Rollout] = {}
        while True:
            for request in requests:
                if request not in rollouts and (rollout := self._advance(request)) is not None:
                    rollouts[request] = rollout
            if len(rollouts) == len(requests):
                return [rollouts[request] for request in requests]
            self._check_running([])
            with self._mutex:
                raise_failures(self.supervisor.ended, "waiting for 'batch'")
            look_around()
            self._wait_for_mail(r.asked for r in requests if r not in rollouts and r.asked is not None)

    def _advance(self, request: BatchRequest) -> Rollout | None:
        """The batch of a request if it is there; else sees to it that somebody has been asked. Blocks on nobody."""
        index, asked = request.worker_idx, request.asked
        if asked is not None:
            self._look(index, asked)
            with self._mutex:
                message = asked.take("batch")
                if message is not None:
                    if asked.state is WorkerState.COLLECTING:
                        asked.state = WorkerState.CONNECTED
                    return self._received(index, asked, message)
        with self._mutex:
            worker = self._workers[index]
            if worker is asked or worker.state is not WorkerState.CONNECTED:
                return None
            worker.state = WorkerState.COLLECTING
            request.asked, request.slot = worker, worker.reader.free_slot()
        self._send(index, worker, "collect", slot=request.slot, version=0)
        return None

    def _received(self, index: int, worker: Member, message: Message) -> Rollout:
        """The batch that a worker has told of; to be called with the mutex held."""
        self._frames[index] = self._frames.get(index, 0) + message["frames"]
        self.supervisor.made_batch(index)
        episodes = [(float(value), int(length)) for value, length in message["episodes"]]
        return Rollout(worker.reader.read(message["slot"]), message["frames"], episodes, [message["sums"]])

    def digest(self, model_id: str) -> dict[int, str]:
        """SHA-256 over each worker's live leaves, in layout order; of workers that are up, or raises."""
        phase = f"digest of {model_id!r}"
        answers = self.hub.ask(
            self.hub.links.values(),
            lambda link: link.channel.send("digest", model_id=model_id),
            {"digested"},
            phase=phase,
            deadline=time.monotonic() + self.schemes[model_id].timeout,
        )
        raise_failures(self.beyond_repair(answers.failed), phase)
        return {index: str(reply["digest"]) for index, reply in sorted(answers.replies.items())}

    def stats(self) -> dict[int, dict[str, Any]]:
        """What is known of each worker."""
        stats = {}
        for index, worker in enumerate(self._workers):
            if worker.state not in _GONE:
                self._look(index)
            with self._mutex:
                link = self.hub.links.get(index)
                if link is not None and link.pid != worker.process.pid:
                    link = None  # of the worker before
                cause = worker.cause or self.supervisor.last_death(index)
                stats[index] = {
                    "pid": worker.process.pid,
                    "state": worker.state.value,
                    "cause": str(cause) if cause is not None else None,
                    "run": link.run if link is not None else -1,
                    "version": link.version if link is not None else -1,
                    "generation": link.generation if link is not None else -1,
                    "restarts": self.supervisor.restarts(index),
                    "frames": self._frames.get(index, 0),
                    "dropped": 0,
                }
        return stats
