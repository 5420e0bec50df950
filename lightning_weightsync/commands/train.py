"""``train``: is the task learned? Builds what a configuration names, and fits.

Exits with 1 if the configuration has an ``EarlyStopping`` with a ``stopping_threshold`` (it is then *solved* or not)
that was not reached.
"""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_weightsync.commands.application import Application
from lightning_weightsync.commands.problems import EXIT_UNSOLVED, ConfigError
from lightning_weightsync.errors import LayoutMismatchError, WeightSyncError, WorkerError
from lightning_weightsync.paths import PathError
from lightning_weightsync.report.recorder import Recorder

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_weightsync.commands.built import Built


def train(application: Application, started: float) -> int:
    """Fit. Prints one last line, ``solved|unsolved|finished frames=… seconds=… return=… version=…``.

    Args:
        application: What to build.
        started: When the command began, on ``time.perf_counter``.

    Returns:
        The exit code: 0, or 1 for an unsolved run.

    Raises:
        ConfigError: What was found to be wrong before the first batch.
    """
    # The run folder is never empty: Hydra has written there. And Lightning asks torch's pytree in a way of yesterday.
    for known in ("Experiment logs directory", "`isinstance\\(treespec, LeafSpec\\)`"):
        warnings.filterwarnings("ignore", message=f".*{known}")
    built = application.build()
    group, trainer = built.group, built.trainer
    evaluation = application.build_evaluation(group)
    recorder = _recorder(application, built)
    if recorder is not None:  # after UpdateWeights, whose figures it reads
        trainer.callbacks.append(recorder)  # type: ignore[attr-defined]
    try:
        trainer.fit(built.module, group, val_dataloaders=evaluation, ckpt_path=application.config.get("ckpt_path"))
    except (MisconfigurationException, PathError) as error:
        if group.frames:
            raise
        raise ConfigError(str(error)) from error
    except WeightSyncError as error:
        if group.frames or not isinstance(error, LayoutMismatchError | WorkerError):
            raise
        raise ConfigError(f"{_in_short(error)} (found without starting a worker by `check`)") from error
    outcome = _outcome(trainer)
    if trainer.is_global_zero:
        if recorder is not None:
            print(recorder.totals)
        mean_return = group.metrics().get("collect/episode_return", float("nan"))
        seconds = time.perf_counter() - started
        print(
            f"{outcome} frames={group.frames} seconds={seconds:.1f} return={mean_return:.1f} version={group.version}",
            flush=True,
        )
    return EXIT_UNSOLVED if outcome == "unsolved" else 0


def _in_short(error: WeightSyncError) -> str:
    """What workers have told before the first batch, once, and without their tracebacks."""
    texts = [str(cause).splitlines()[0] for _, cause in sorted(error.failed.items())] or [str(error)]
    return "; ".join(dict.fromkeys(re.sub(r"^worker \d+ (\(pid \d+\) )?|^worker \d+: ", "a worker ", t) for t in texts))


def _recorder(application: Application, built: Built) -> Recorder | None:
    if not application.config.get("record", True):
        return None
    folder, trace = Path(HydraConfig.get().runtime.output_dir), bool(application.config.get("trace"))
    return Recorder(folder, built.group, list(built.updates.values()), trace)


def _outcome(trainer: pl.Trainer) -> str:
    """``solved`` if every threshold that ends the run early was reached; ``finished`` if there is none."""
    from lightning.pytorch.callbacks import EarlyStopping

    aims = [c for c in trainer.early_stopping_callbacks if isinstance(c, EarlyStopping)]
    aims = [c for c in aims if c.stopping_threshold is not None]
    if not aims:
        return "finished"
    # Not c.best_score: it is not updated by the value that reaches the threshold.
    seen = trainer.callback_metrics
    solved = all(c.monitor in seen and c.monitor_op(seen[c.monitor], c.stopping_threshold) for c in aims)
    return "solved" if solved else "unsolved"
