"""What is shown of a fit? Figures of pushes, batches and workers, for loggers, the progress bar and other callbacks.

They do not go through ``LightningModule.log``, which costs 0.1 to 0.3 ms per figure and batch, and a little in every
later batch of the epoch: more than a callback that does not push may cost. They end up in the same places: the
trainer's loggers, ``progress_bar_metrics`` and ``callback_metrics``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

if TYPE_CHECKING:
    import lightning.pytorch as pl

_IN_PROGRESS_BAR = ("version", "staleness_mean", "frames_per_sec", "episode_return", "workers_alive")
_AT_LEAST_EVERY = 1.0


class Figures:
    """Gathers figures during a batch, and shows them at its end when that is due.

    They are shown whenever weights were pushed in the batch, when Lightning's loggers are due
    (``Trainer(log_every_n_steps=...)``), in the first batch that is seen and in the last one of each epoch, and in
    every batch that ends more than a second after they were shown last. Loggers take them when they are due only.

    Args:
        clock: Seconds that never go backwards.

    Attributes:
        total_stall_seconds: How long all pushes so far have held the trainer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_stall_seconds = 0.0
        self._clock = clock
        self._shown_at: float | None = None
        self._push_seconds = 0.0
        self._stall_seconds = 0.0
        self._version = 0

    def batch_started(self, version: int) -> None:
        """A batch has arrived while this version was the newest."""
        self._stall_seconds = 0.0
        self._version = version

    def pushed(self, seconds: float) -> None:
        """A push has held the trainer for so long."""
        self._push_seconds = seconds
        self._stall_seconds += seconds
        self.total_stall_seconds += seconds

    def due(self, trainer: pl.Trainer) -> bool:
        """Whether they are to be shown at the end of this batch."""
        return bool(
            self._stall_seconds
            or self._shown_at is None
            or self._clock() - self._shown_at > _AT_LEAST_EVERY
            or trainer.is_last_batch
            or (trainer.loggers and trainer._logger_connector.should_update_logs)
        )

    def show(self, trainer: pl.Trainer, version: int, collected: Mapping[str, float], batch: Any) -> None:
        """Hand the figures on, at the end of a batch.

        Args:
            trainer: Whose loggers and progress bar.
            version: Of the newest push.
            collected: Figures of the group; empty where there is none.
            batch: What was trained on; if a group has labelled it, its age is one of the figures.
        """
        self._shown_at = self._clock()
        figures = {
            "weight_sync/version": float(version),
            "weight_sync/push_ms": 1e3 * self._push_seconds,
            "weight_sync/stall_ms": 1e3 * self._stall_seconds,
        }
        if collected and isinstance(batch, TensorDictBase) and "policy_version" in batch:
            ages = self._version - batch["policy_version"]
            figures["weight_sync/staleness_mean"] = float(ages.float().mean())
            figures["weight_sync/staleness_max"] = float(ages.max())
        figures |= collected
        self._show(trainer, figures, to_loggers=self._loggers_take(trainer))

    def show_last(self, trainer: pl.Trainer, version: int) -> None:
        """The version that a fit ends with, when it was pushed after the last batch; loggers take it in any case."""
        self._show(trainer, {"weight_sync/version": float(version)}, to_loggers=True)

    def _show(self, trainer: pl.Trainer, figures: Mapping[str, float], *, to_loggers: bool) -> None:
        in_bar = {name: value for name, value in figures.items() if name.rpartition("/")[2] in _IN_PROGRESS_BAR}
        trainer.progress_bar_metrics.update(in_bar)
        tensors = {name: torch.tensor(value) for name, value in figures.items()}
        trainer.callback_metrics.update(tensors)
        if to_loggers:
            trainer._logger_connector.log_metrics(tensors)  # under the same step as what Lightning logs now

    def _loggers_take(self, trainer: pl.Trainer) -> bool:
        """Whether Lightning hands its own figures to the loggers at the end of this batch."""
        accumulating = trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
        return not accumulating and trainer._logger_connector.should_update_logs
