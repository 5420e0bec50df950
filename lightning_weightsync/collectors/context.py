"""What stands around a collector where it runs? Its gate, its end of the link, and one way to take a batch.

The same object serves a worker process and a collector in the trainer's own process (``num_workers=0``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from lightning_weightsync.collectors.base import Collector
from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.receiver import ReceiverLink
from lightning_weightsync.transports.rendezvous import StoreInfo


class WorkerContext:
    """The receiver context of one collector's schemes.

    Args:
        collector: What collects, and where destinations are resolved.
        worker_idx: 0-based.
        info: Where the sender is; ``None`` in the sender's own process.
        values: Schedule values that are in force until the first push comes.

    Attributes:
        gate: The collector's own, or one that is held while a collector without one makes a batch.
        receiver_link: The worker's end of the link.
    """

    def __init__(
        self, collector: Collector, worker_idx: int, info: StoreInfo | None, values: Mapping[str, Any]
    ) -> None:
        if not hasattr(collector, "__iter__") or not hasattr(collector, "close"):
            raise TypeError(
                f"the collector factory returned {type(collector).__name__}; a collector is iterable and has close()"
            )
        self.collector = collector
        self.worker_idx = worker_idx
        own = getattr(collector, "gate", None)
        self.gate: Gate = own if isinstance(own, Gate) else Gate()
        self.gate.values = values
        self._gate_is_ours = self.gate is not own
        self.receiver_link = ReceiverLink(info, worker_idx, self.gate) if info is not None else None

    def get_model(self, model_id: str) -> Any:
        """The model at a destination."""
        return resolve(self.collector, model_id)

    def connect(self, schemes: Mapping[str, WeightSyncScheme], timeout: float) -> None:
        """Join the sender with all schemes, apply the initial weights, and serve pushes from a thread from then on."""
        if self.receiver_link is None:
            raise RuntimeError("this collector runs in its sender's process: there is no link")
        for model_id, scheme in schemes.items():
            scheme.init_on_receiver(model_id, context=self, worker_idx=self.worker_idx)
        self.receiver_link.connect(time.monotonic() + timeout)
        self.receiver_link.start_service()

    def next_batch(self, batches: Iterator[TensorDictBase]) -> TensorDictBase:
        """The collector's next batch, stamped with ``policy_version`` and ``worker_idx`` where it lacks them.

        Raises:
            RuntimeError: The collector has come to its end, its batch has no dimension, or it has a gate of its own and
                writes no ``policy_version``.
        """
        if self._gate_is_ours:
            with self.gate:
                version = self.gate.version
                batch = next(batches, None)
        else:
            version, batch = -1, next(batches, None)
        if batch is None:
            raise RuntimeError(f"the collector {type(self.collector).__name__} ended: it has to go on making batches")
        if not batch.batch_size:
            raise RuntimeError(
                f"the collector {type(self.collector).__name__} made a batch of batch size []: it needs a first "
                "dimension, along which the workers' batches are put together (of one sample: batch.unsqueeze(0))"
            )
        # A copy of the container, not of the tensors: a collector may yield one TensorDict again and again, and a stamp
        # that stayed in it would be taken for its own.
        batch = batch.copy()
        for name, value in (("policy_version", version), ("worker_idx", self.worker_idx)):
            if name not in batch:
                if value < 0:
                    raise RuntimeError(
                        f"the collector {type(self.collector).__name__} has a gate of its own, and has to write "
                        "'policy_version' (gate.version, read inside the gate) for each sample"
                    )
                batch[name] = torch.full(tuple(batch.batch_size), value, dtype=torch.int64)
        return batch

    def take_episodes(self) -> list[list[float | int]]:
        """[return, length] of each episode that ended since the last call, where the collector tells."""
        take = getattr(self.collector, "take_episodes", None)
        return [[float(value), int(length)] for value, length in take()] if take is not None else []

    def take_sums(self) -> dict[str, Any]:
        """What adds up, gathered since the last call, as (nested lists of) numbers, where the collector tells."""
        take = getattr(self.collector, "take_sums", None)
        sums = take() if take is not None else {}
        return {name: torch.as_tensor(value).double().tolist() for name, value in sums.items()}

    def end(self) -> None:
        """End the link."""
        if self.receiver_link is not None:
            self.receiver_link.end(keep_models=False)  # the process is about to end
