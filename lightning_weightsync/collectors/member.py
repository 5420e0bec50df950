"""What does the trainer know of one worker process? Its state, its mail, its batches, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tensordict import TensorDict

from lightning_weightsync.collectors.early import start_worker
from lightning_weightsync.collectors.process import WorkerProcess
from lightning_weightsync.collectors.rollouts import BatchReader
from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout, WorkerError
from lightning_weightsync.transports.control import Message


class WorkerState(Enum):
    """``STARTING -> CONNECTED <-> COLLECTING``: a batch at a time. From each of them, ``-> STOPPED | FAILED``.

    A lost one that is not wanted any more is ``STOPPED`` too.
    """

    STARTING = "starting"
    CONNECTED = "connected"
    COLLECTING = "collecting"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_up(self) -> bool:
        """Whether it has joined, and can be asked for batches."""
        return self in _UP

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes of it."""
        return self in _ENDS


_UP = {WorkerState.CONNECTED, WorkerState.COLLECTING}
_ENDS = {WorkerState.STOPPED, WorkerState.FAILED}
_MOVES = {
    WorkerState.STARTING: {WorkerState.CONNECTED, *_ENDS},
    WorkerState.CONNECTED: {WorkerState.COLLECTING, *_ENDS},
    WorkerState.COLLECTING: {WorkerState.CONNECTED, *_ENDS},
    WorkerState.FAILED: {WorkerState.STOPPED},
    WorkerState.STOPPED: set[WorkerState](),
}


@dataclass
class Rollout:
    """A batch that stays as it is, and what workers told with it.

    Attributes:
        batch: The batch: it looks into memory that is lent, or is a copy.
        episodes: (return, length) of those that ended in it.
        sums: What was gathered while it was made, by name, in nested lists of numbers; several where batches went by.
    """

    batch: TensorDict
    episodes: list[tuple[float, int]]
    sums: list[dict[str, Any]]

    @classmethod
    def of(cls, batch: TensorDict, answers: Iterable[Message]) -> Rollout:
        """A batch, and what workers have told in these ``batch`` messages."""
        episodes: list[tuple[float, int]] = []
        sums = []
        for answer in answers:
            episodes += ((float(value), int(length)) for value, length in answer["episodes"])
            sums.append(answer["sums"])
        return cls(batch, episodes, sums)


@dataclass(eq=False)
class Member:
    """One process under one index; its replacement is another member."""

    process: WorkerProcess
    reader: BatchReader
    state: WorkerState = WorkerState.STARTING
    cause: Exception | None = None
    inbox: list[Message] = field(default_factory=list)

    @classmethod
    def start(cls, threads: int) -> Member:
        """Start an interpreter; it imports while the caller goes on."""
        process = start_worker(threads)
        return cls(process, BatchReader(process.memory))

    def move(self, to: WorkerState) -> bool:
        """Change the state, if that is a move of the picture; whether it was. To be called with the roster's mutex."""
        if to not in _MOVES[self.state]:
            return False
        self.state = to
        return True

    def take(self, kind: str) -> Message | None:
        """The first message of this kind that has been read, if there is one; it is gone from here then."""
        for position, message in enumerate(self.inbox):
            if message.kind == kind:
                return self.inbox.pop(position)
        return None


@dataclass(eq=False)
class BatchRequest:
    """One worker's batch: asked of the worker, and of its replacement if it ends before the batch is there.

    Attributes:
        worker_idx: Whose.
        asked: Who was asked last; ``None`` before anybody was.
        answer: What was told when the batch was there; ``None`` until then.
    """

    worker_idx: int
    asked: Member | None = None
    answer: Message | None = None

    @property
    def reader(self) -> BatchReader:
        """The parent's end of the memory of whoever was asked."""
        assert self.asked is not None
        return self.asked.reader


def reported(worker_idx: int, pid: int, message: Message) -> WeightSyncError:
    """The exception that a worker told of before it ended.

    ``WorkerError`` if it is of the user's code, which would raise again; ``WeightSyncTimeout`` if the worker was stuck,
    of which a replacement may be free.
    """
    if message.kind == "stuck":
        return WeightSyncTimeout(
            f"worker {worker_idx} (pid {pid}) was stuck: {message['at']} has not got on for {message['seconds']:.1f} s "
            f"(env_timeout)\n{message['stack']}".rstrip()
        )
    text = f"worker {worker_idx} (pid {pid}) raised in phase {message['phase']!r}: {message['message']}"
    text = f"{text}\n{message['traceback']}".rstrip()
    return WorkerError(text, remote_traceback=message["traceback"]) if message["user_code"] else WeightSyncError(text)
