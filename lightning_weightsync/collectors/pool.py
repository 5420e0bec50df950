"""How does the trainer get weights into its worker processes, and batches out of them?

Policy (when to push, when to iterate, what to log) is the group's business; which processes there are is the fleet's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict

from lightning_weightsync.collectors.fleet import Fleet, FleetOptions
from lightning_weightsync.collectors.joint import JointSlots, is_joint, look_alike
from lightning_weightsync.collectors.member import BatchRequest, Rollout, WorkerState
from lightning_weightsync.collectors.recycling import BatchMemory
from lightning_weightsync.collectors.rollouts import OWN_SLOTS, BatchReader
from lightning_weightsync.schemes.push import PerWorker, push_models
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.pushing import PushHandle, raise_failures


class WorkerPool(Fleet):
    """A fleet that can be pushed to, and asked for batches.

    Args:
        options: See ``Fleet``.
    """

    def __init__(self, options: FleetOptions) -> None:
        self._memory = BatchMemory()
        self._joint: JointSlots | None = None
        self._slot = -1  # the joint one of the batch that is being collected, as requests name it
        super().__init__(options)

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
        self._part_with_lost(worker_ids)
        return push_models(self.hub, given, worker_ids, timeout=timeout, replaceable=replaceable)

    def _part_with_lost(self, worker_ids: Sequence[int]) -> None:
        """Nothing is pushed to a worker that has told of an error, though its link is up until its process has ended.

        It would still apply the push, and whether the caller hears of the loss would be a matter of milliseconds.
        """
        for index in worker_ids:
            worker = self._member(index)
            if worker is not None and worker.cause is not None:
                self._give_up_link(index, worker, "it is lost")

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

    def collect(self, look_around: Callable[[], None]) -> Rollout:
        """One batch of all workers, their parts in worker order along dimension 0. Blocks on the slowest.

        What a lost worker has not finished is collected by its replacement, for which this waits.

        Args:
            look_around: Called about ten times a second while waiting; may raise to give up.

        Raises:
            WorkerError: A worker's code raised; carries its traceback.
            WorkerDied: A worker was lost, and is not replaced (any more).
        """
        # If the last call was interrupted (Ctrl-C in a notebook), batches of old weights are still to come.
        collecting = [(i, worker) for i, worker in enumerate(self._workers) if worker.state is WorkerState.COLLECTING]
        self._gather([BatchRequest(index, worker) for index, worker in collecting], look_around)
        joint = self._joint_slots()
        self._slot = OWN_SLOTS + joint.reader.free_slot() if joint is not None else -1
        requests = [BatchRequest(index) for index in range(self.num_workers)]
        answers = self._gather(requests, look_around)
        return Rollout.of(self._put_together(requests, answers), answers)

    def shutdown(self, timeout: float) -> None:
        """See ``Fleet``."""
        super().shutdown(timeout)
        self._memory.clear()
        if self._joint is not None:
            self._joint.reader.close()

    def _joint_slots(self) -> JointSlots | None:
        """Those of the workers that are there now, if there are any; made when all of them can have them."""
        members = tuple(self._workers)
        if self._joint is None or self._joint.members != members:
            alike = len(members) > 1 and look_alike(members)
            self._joint = JointSlots(members, self._send) if alike else None
        return self._joint

    def _put_together(self, requests: Sequence[BatchRequest], answers: Sequence[Message]) -> TensorDict:
        """The parts as one batch that stays as it is: lent where they lie in one piece, else a copy."""
        places = [(request.reader, answer["slot"]) for request, answer in zip(requests, answers, strict=True)]
        if self._joint is not None and all(is_joint(slot) for _, slot in places):
            return self._kept(self._joint.reader, self._slot - OWN_SLOTS)
        if len(places) == 1:
            return self._kept(*places[0])
        parts = []
        for request, (reader, slot) in zip(requests, places, strict=True):
            if is_joint(slot):  # another one was lost, and its replacement has put its part elsewhere
                assert self._joint is not None and request.asked is not None
                parts.append(self._joint.part(slot - OWN_SLOTS, request.asked))
            else:
                parts.append(reader.read(slot))
        return self._memory.concatenated(parts)

    def _kept(self, reader: BatchReader, slot: int) -> TensorDict:
        reader.take_back()
        lent = reader.lend(slot)
        return lent if lent is not None else self._memory.concatenated([reader.read(slot)])

    def _gather(self, requests: Sequence[BatchRequest], look_around: Callable[[], None]) -> list[Message]:
        """What the workers tell with the batches of these requests, in their order."""
        while True:
            missing = [request for request in requests if not self._advance(request)]
            if not missing:
                return [request.answer for request in requests if request.answer is not None]
            self._raise_if_over("waiting for 'batch'")
            look_around()
            self._wait_for_mail(request.asked for request in missing if request.asked is not None)

    def _advance(self, request: BatchRequest) -> bool:
        """Whether the batch of a request is there; else sees to it that somebody has been asked. Blocks on nobody."""
        if request.answer is not None:
            return True
        index, asked = request.worker_idx, request.asked
        if asked is not None:
            self._look(index, asked)
            with self._mutex:
                request.answer = asked.take("batch")
                if request.answer is not None:
                    asked.move(WorkerState.CONNECTED)
                    self._count_batch(index, request.answer)
                    return True
        with self._mutex:
            worker = self._workers[index]
            if worker is asked or worker.state is not WorkerState.CONNECTED:
                return False
            worker.move(WorkerState.COLLECTING)
            request.asked = worker
        # One that was asked in the place of another is not among those that the joint slots are for.
        joint = self._joint is not None and worker in self._joint.members
        self._send(index, worker, "collect", slot=self._slot if joint else worker.reader.free_slot(), version=0)
        return False

    def _count_batch(self, index: int, message: Message) -> None:
        """A worker has told of a batch; to be called with the mutex held."""
        self._frames[index] = self._frames.get(index, 0) + message["frames"]
        self.supervisor.made_batch(index)

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
            if not worker.state.is_over:
                self._look(index, worker)
            with self._mutex:
                link = self._link_of(index, worker)
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
