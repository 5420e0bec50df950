"""What does a group know of itself, now and when its run is resumed?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_weightsync.collectors.inline import InlinePool
from lightning_weightsync.collectors.ledger import Ledger
from lightning_weightsync.collectors.member import WorkerState
from lightning_weightsync.collectors.pool import WorkerPool
from lightning_weightsync.transports.hub import LinkHub


class GroupState(Enum):
    """``NEW -launch-> LAUNCHED -connect-> RUNNING -shutdown-> STOPPED -launch-> ...``."""

    NEW = "new"
    LAUNCHED = "launched"
    RUNNING = "running"
    STOPPED = "stopped"


class GroupRecord:
    """The part of a ``CollectorGroup`` that counts, tells and remembers.

    Args:
        seed: Base of every worker's seed; ``None`` takes ``torch.initial_seed()``.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.rank = 0
        self._ledger = Ledger()
        self._run = 1
        self._version = 0
        self._incarnation = 0
        self._restarts = 0
        self._owner = 0  # the process that has launched it
        self._base_seed: int | None = None
        self._values: dict[str, Any] = {}
        self._pool: WorkerPool | InlinePool | None = None
        self._state = GroupState.NEW

    # --- now -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the group has been launched and not stopped since."""
        return self._state in (GroupState.LAUNCHED, GroupState.RUNNING)

    def check_process(self) -> None:
        """Raise in a process that was forked from the one that runs the group.

        Raises:
            RuntimeError: Two processes would speak to the same workers over the same sockets.
        """
        if self.running and self._owner != os.getpid():
            raise RuntimeError(
                f"this group was started in process {self._owner}, and process {os.getpid()} was forked from it (by "
                "strategy='ddp_notebook' or 'ddp_fork'): its workers cannot serve several ranks. Do not start the "
                "group before fit: UpdateWeights starts it in each rank"
            )

    @property
    def connected(self) -> bool:
        """Whether batches can be asked for."""
        return self._state is GroupState.RUNNING

    @property
    def frames(self) -> int:
        """Transitions handed to the trainer so far, over resumes."""
        return self._ledger.frames

    @property
    def incarnation(self) -> int:
        """Goes into every worker's seed; grows with each start of the group, and of a replacement, and over resumes."""
        return self._incarnation

    @property
    def restarts(self) -> int:
        """Replacements of lost workers so far, over resumes."""
        return self._restarts + (self._pool.restarts if isinstance(self._pool, WorkerPool) else 0)

    @property
    def hub(self) -> LinkHub | None:
        """The links to the workers; ``None`` without worker processes."""
        return self._pool.hub if isinstance(self._pool, WorkerPool) else None

    @property
    def run(self) -> int:
        """Grows with each start, and over resumes."""
        return self._counter("run", self._run)

    @property
    def version(self) -> int:
        """Of the newest push."""
        return self._counter("version", self._version)

    @property
    def values(self) -> dict[str, Any]:
        """What was broadcast so far; workers have it with the next push."""
        return dict(self._values)

    def stats(self) -> dict[int, dict[str, Any]]:
        """For each worker: pid, state, cause, run, version, generation, restarts, frames, dropped (batches).

        ``cause`` is why the worker, or the one that it has replaced, was lost; ``frames`` are those of all that had
        this index in this start of the group.
        """
        return self._pool.stats() if self._pool is not None else {}

    def metrics(self) -> dict[str, float]:
        """Figures for a logger.

        ``collect/frames_per_sec`` is over the time since the last call; ``collect/episode_return`` and
        ``episode_length`` are means of the last 100 finished episodes, and absent before the first;
        ``collect/batches_dropped`` counts, since the group was started, those that were older than ``max_staleness``.
        """
        states = self._pool.stats().values() if self._pool is not None else ()
        return self._ledger.figures() | {
            "collect/batches_dropped": float(sum(stat["dropped"] for stat in states)),
            "weight_sync/bytes": float(self._counter("bytes_pushed", 0)),
            "weight_sync/bytes_saved": float(self._counter("bytes_saved", 0)),
            "weight_sync/workers_alive": float(sum(WorkerState(stat["state"]).is_up for stat in states)),
            "weight_sync/worker_restarts": float(self.restarts),
        }

    def reduce(self) -> dict[str, Tensor]:
        """Take what has added up, over all workers, in the batches that were handed over since the last call.

        What collectors return from ``take_sums()`` (with ``GymCollector``, its policy's ``take_sums()``) travels with
        each batch, and is summed: counts, sums and squares of observations, say. A batch that is lost with its worker
        takes its sums with it; one that was too old to be handed over (``max_staleness``) does not. Does not block.

        Returns:
            Name -> sum, float64, of the shape that collectors have told. Empty if nothing came.

        Example::

            module.actor.norm.seen += group.reduce()["seen"]  # and it travels back with the next push, as extra state
        """
        return self._ledger.take_sums()

    # --- over resumes --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: run, version, frames, seed stream, restarts, values, and the last episodes."""
        return {
            "run": self.run,
            "version": self.version,
            "seed": self._base_seed,
            "incarnation": self.incarnation,
            "restarts": self.restarts,
            "values": self.values,
            **self._ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run was: a newer run of the same version, new episodes. Idempotent.

        Raises:
            RuntimeError: The group is connected: its workers have their seeds.
        """
        if self._state is GroupState.RUNNING:
            raise RuntimeError("a group's state is loaded before it is connected")
        self.restore_version(int(state["run"]), int(state["version"]), int(state["incarnation"]))
        self._restarts = int(state["restarts"])
        self._base_seed = None if state["seed"] is None else int(state["seed"])
        self._values = dict(state["values"])
        self._ledger.load_state_dict(state)

    @classmethod
    def is_state(cls, state: object) -> bool:
        """Whether this is what a group's ``state_dict`` returns."""
        keys = {"run", "version", "frames", "seed", "incarnation", "restarts", "episodes", "values"}
        return isinstance(state, Mapping) and state.keys() == keys

    def restore_version(self, run: int, version: int, incarnation: int) -> None:
        """Go on after (run, version): in a newer run, never backwards, with other episodes. Idempotent.

        Before ``connect``. It is all that a resumed run gets where the group is not the trainer's loader itself.

        Args:
            run: Of the run that goes on.
            version: Of its newest push.
            incarnation: The last one that its workers' seeds were made of.
        """
        if (run + 1, version) > (self._run, self._version):
            self._run, self._version = run + 1, version
        self._incarnation = max(self._incarnation, incarnation + 1)

    @property
    def base_seed(self) -> int:
        """What all seeds are derived from, fixed when it is first asked for, or restored."""
        if self._base_seed is None:
            self._base_seed = torch.initial_seed() if self.seed is None else self.seed
        return self._base_seed

    # --- inside --------------------------------------------------------------------------------------------------

    def _running_pool(self) -> WorkerPool | InlinePool:
        if self._pool is None or not self.running:
            raise RuntimeError(f"the group is {self._state.value}: call start() first")
        return self._pool

    def _counter(self, name: str, before: int) -> int:
        if self._state is not GroupState.RUNNING:
            return before
        owner = self.hub if self.hub is not None else self._pool
        return int(getattr(owner, name))

    def _seed_of(self, worker_idx: int) -> int:
        """Of one worker, from (seed, rank, worker_idx, incarnation)."""
        sequence = np.random.SeedSequence([self.base_seed, self.rank, worker_idx, self._incarnation])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _new_seed(self, worker_idx: int) -> int:
        """Of a replacement: a seed that no worker of this index has had. Called by one thread at a time."""
        self._incarnation += 1
        return self._seed_of(worker_idx)
