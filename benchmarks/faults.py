"""What can happen to a worker, and to whom? Faults, and workers' processes that can be killed, stopped and slowed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from benchmarks.receivers import Receivers
from lightning_weightsync.errors import WeightSyncTimeout, WorkerDied
from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme

_LONG = 3600.0


@dataclass
class End:
    """The receiver's side of a worker that can be made slow: by SIGUSR1 a little, by SIGUSR2 too much."""

    scheme: DistributedWeightSyncScheme
    index: int

    def serve(self, model: nn.Module) -> None:
        """Connect, and take pushes in a thread; this one sits in the gate when it is told to."""
        signal.signal(signal.SIGUSR1, self._hold(0.25))
        signal.signal(signal.SIGUSR2, self._hold(1.25))
        self.scheme.init_on_receiver("policy", model=model, worker_idx=self.index)
        self.scheme.connect()
        while True:
            time.sleep(_LONG)

    def _hold(self, share: float) -> Callable[[int, FrameType | None], None]:
        def hold(number: int, frame: FrameType | None) -> None:
            with torch.no_grad(), self.scheme.gate:  # so that it may be switched in its sleep before and after
                time.sleep(share * self.scheme.timeout)

        return hold


@dataclass
class Worker:
    """A worker's process.

    Attributes:
        index: As the scheme knows it.
        process: One receiver.
        version: What it has acknowledged last.
        may_be_ahead: Whether it may have applied one version more, and was stopped before it could say so.
    """

    index: int
    process: Receivers
    version: int = 0
    may_be_ahead: bool = True

    @property
    def pid(self) -> int:
        return self.process.pids[0]

    def holds(self) -> int:
        """Checksum of its weights."""
        return self.process.ask("checksum")[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def is_stopped(self) -> bool:
        """Whether no thread of it runs any more."""
        stats = [path.read_text(encoding="utf-8") for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def close(self) -> None:
        """Whatever state it is in."""
        with suppress(ProcessLookupError, IndexError):
            self.signal(signal.SIGKILL)
        self.process.close()


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker.

    Attributes:
        name: In the table.
        signals: Sent one after the other, with ``pause`` times ``heartbeat_timeout`` between them.
        errors: What a push may fail with because of it.
        ends: Whether the worker has to be replaced.
    """

    name: str
    signals: tuple[int, ...]
    errors: tuple[type[Exception], ...] = ()
    ends: bool = False
    pause: float = 0.4


FAULTS = (
    Fault("killed", (signal.SIGKILL,), (WorkerDied,), ends=True),
    Fault("stopped", (signal.SIGSTOP,), (WeightSyncTimeout, WorkerDied), ends=True),
    Fault("paused", (signal.SIGSTOP, signal.SIGCONT)),
    Fault("slow", (signal.SIGUSR1,)),
    Fault("stuck", (signal.SIGUSR2,), (WeightSyncTimeout,)),
)
