"""What if there are no worker processes? One collector in the trainer's process, for a debugger or a notebook.

The same transactions under the same gate as in a worker, without a link and without a transport. The collector has a
random stream of its own: the trainer's is left as it was.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from lightning_weightsync.collectors.base import CollectorFactory
from lightning_weightsync.collectors.context import WorkerContext
from lightning_weightsync.collectors.member import Rollout, WorkerState
from lightning_weightsync.collectors.recycling import BatchMemory
from lightning_weightsync.collectors.rollouts import plain
from lightning_weightsync.collectors.values import serving
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.extra_state import unpack
from lightning_weightsync.schemes.push import PerWorker, is_per_worker
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.schemes.transaction import Staged, Transaction
from lightning_weightsync.transports.hub import check_ids
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.slots import SlotPool

_NEVER = 365 * 86400.0  # seconds; the gate's condition variable takes no infinity


class InlinePool:
    """Stands in for ``WorkerPool`` with ``num_workers=0``; a group with ``sync=False`` uses it as one with ``True``.

    Args:
        schemes: By destination; only their configuration is used.
    """

    num_workers = 0

    def __init__(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        self.schemes = schemes
        self.run = 1
        self.version = 0
        self.values: Mapping[str, Any] = {}
        self.next_values: Mapping[str, Any] = {}
        self.bytes_pushed = 0
        self.bytes_saved = 0
        self._pushing = threading.Lock()
        self._context: WorkerContext | None = None
        self._models: dict[str, tuple[Source, StagedModel, SlotPool]] = {}
        self._memory = BatchMemory()
        self._batches: Iterator[TensorDictBase] = iter(())
        self._random_state = torch.get_rng_state()
        self._frames = 0
        self._state = WorkerState.STARTING

    def connect(
        self,
        factory: CollectorFactory,
        seeds: Sequence[int],
        weights: Mapping[str, Weights | PerWorker],
        look_around: Callable[[], None],
    ) -> None:
        """Build the collector and give it the current weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds[0])
            with serving(lambda: self.values):
                collector = factory(worker_idx=0, seed=seeds[0])
            self._context = WorkerContext(collector, 0, None, self.values)
            self._random_state = torch.get_rng_state()
        for model_id, scheme in self.schemes.items():
            model = StagedModel(model_id, self._context.get_model(model_id), scheme.strategy, strict=scheme.strict)
            source = Source(model_id, _own(weights[model_id]), scheme.strategy, scheme.wire_dtype)
            model.bind(source.layout, extra_keys=source.extra_keys, casts=scheme.wire_dtype is not None)
            self._models[model_id] = (source, model, SlotPool(source.layout, 1, shared=False))
        self.push(weights, [0], timeout=_NEVER, initial=True)
        self._batches = iter(self._context.collector)
        self._state = WorkerState.CONNECTED

    def check_ids(self, worker_ids: int | Sequence[int] | None) -> list[int]:
        """The targeted indices: the one collector is worker 0. Raises ``ValueError`` for another one."""
        return check_ids(worker_ids, 1)

    def push(
        self,
        weights: Mapping[str, Weights | PerWorker],
        worker_ids: Sequence[int],
        *,
        timeout: float,
        initial: bool = False,
        replaceable: bool = False,
    ) -> None:
        """One version of these destinations, applied by the calling thread; where nobody is targeted, only counted."""
        deadline = time.monotonic() + timeout
        context = self._built()
        with self._pushing:
            if not worker_ids:
                self.version += 1
                return
            staged = []
            for model_id, given in weights.items():
                source, model, slots = self._models[model_id]
                slot = slots.try_acquire(self)
                assert slot is not None  # there is one, and a push at a time
                slots.release(slot, self)
                extra = source.read(slot, _own(given))
                staged.append(Staged(model, SlotMemory(slot.memory), unpack(extra)))
                self.bytes_pushed += slot.memory.numel()
            if not initial:
                self.version += 1
            self.values = self.next_values
            push = Transaction(context.gate, self.run, self.version, deadline, values=self.values)
            push.stage(staged)
            with serving(lambda: context.gate.values):
                push.commit()

    def collect(self, look_around: Callable[[], None]) -> Rollout:
        """One batch, made here and now; a copy, since a collector may make the next one in the same memory."""
        context = self._built()
        self._state = WorkerState.COLLECTING
        try:
            with torch.random.fork_rng(devices=[]), serving(lambda: context.gate.values):
                torch.set_rng_state(self._random_state)
                batch = context.next_batch(self._batches)
                self._random_state = torch.get_rng_state()
        except BaseException:
            self._batches = iter(context.collector)  # a generator through which something was raised has ended
            raise
        finally:
            self._state = WorkerState.CONNECTED
        self._frames += batch.numel()
        episodes = [(float(value), int(length)) for value, length in context.take_episodes()]
        return Rollout(self._memory.concatenated([plain(batch)]), episodes, [context.take_sums()])

    def beyond_repair(self, failed: Mapping[int, Exception]) -> dict[int, Exception]:
        """Nothing is repaired here."""
        return dict(failed)

    def digest(self, model_id: str) -> dict[int, str]:
        """SHA-256 over the collector's live leaves, as worker 0."""
        with self._pushing:
            return {0: self._models[model_id][1].digest()}

    def stats(self) -> dict[int, dict[str, Any]]:
        """What is known of the one collector, as worker 0."""
        gate = self._context.gate if self._context is not None else None
        return {
            0: {
                "pid": os.getpid(),
                "state": self._state.value,
                "cause": None,
                "run": gate.run if gate is not None else -1,
                "version": gate.version if gate is not None else -1,
                "generation": 0,
                "restarts": 0,
                "frames": self._frames,
                "dropped": 0,
            }
        }

    def shutdown(self, timeout: float) -> None:
        """Close the collector. Idempotent."""
        state, self._state = self._state, WorkerState.STOPPED
        if self._context is not None and state is not WorkerState.STOPPED:
            self._context.collector.close()
        self._memory.clear()

    def _built(self) -> WorkerContext:
        if self._context is None:
            raise WeightSyncError("the collector is not built yet: connect first")
        return self._context


def _own(weights: Weights | PerWorker) -> Weights:
    return weights[0] if is_per_worker(weights) else weights
