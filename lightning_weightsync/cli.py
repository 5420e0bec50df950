"""The ``lightning-weightsync`` command: compose a configuration, build what it names, and fit.

    lightning-weightsync --config-dir configs --config-name cartpole_ppo [key=value ...]

Nodes: ``seed``, ``module``, ``collector``, ``trainer``, ``logger``, ``callbacks``, ``ckpt_path``, and ``evaluation``,
whose arguments are those of ``CollectorGroup.evaluation`` (the run is then validated on its episodes). Exits with 1 if
the configuration has an ``EarlyStopping`` with a ``stopping_threshold`` (it is then *solved* or not) that was not
reached.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import os  # noqa: E402
import sys  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

import hydra  # noqa: E402
from hydra.utils import instantiate  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_weightsync.collectors.group import CollectorGroup


def main() -> None:
    """Entry point of the console script."""
    # A console script has its own folder on sys.path, not the one where the user's modules are.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    _main()


@hydra.main(version_base="1.3", config_path=None)
def _main(config: DictConfig) -> None:
    sys.exit(train(config))


def train(config: DictConfig) -> int:
    """Build module, collectors, callbacks, loggers and trainer from their nodes, and fit.

    Prints one last line, ``solved|unsolved|finished frames=… seconds=… return=… version=…``.

    Returns:
        The exit code: 0, or 1 for an unsolved run.
    """
    import lightning.pytorch as pl

    if config.get("seed") is not None:
        pl.seed_everything(config.seed, verbose=False)
    module: pl.LightningModule = instantiate(config.module)
    group: CollectorGroup = instantiate(config.collector, _convert_="all")
    callbacks = [_callback(node, group) for node in (config.get("callbacks") or {}).values() if node is not None]
    loggers = [instantiate(node) for node in (config.get("logger") or {}).values() if node is not None]
    trainer: pl.Trainer = instantiate(config.trainer, callbacks=callbacks, logger=loggers, _convert_="all")
    wanted: Any = config.get("evaluation")
    evaluation = group.evaluation(**wanted) if wanted is not None else None
    trainer.fit(module, group, val_dataloaders=evaluation, ckpt_path=config.get("ckpt_path"))
    outcome = _outcome(trainer)
    if trainer.is_global_zero:
        mean_return = group.metrics().get("collect/episode_return", float("nan"))
        seconds = time.perf_counter() - _STARTED
        print(
            f"{outcome} frames={group.frames} seconds={seconds:.1f} return={mean_return:.1f} version={group.version}",
            flush=True,
        )
    return int(outcome == "unsolved")


def _callback(node: DictConfig, group: CollectorGroup) -> pl.Callback:
    """Build a callback; an ``UpdateWeights`` that names no target gets the one group that was built.

    An interpolation of the collector's node would build a second group.
    """
    from lightning_weightsync.callback import UpdateWeights

    named: Any = node.get("_target_")
    cls = hydra.utils.get_object(named) if isinstance(named, str) else None
    is_ours = isinstance(cls, type) and issubclass(cls, UpdateWeights)
    extra = {"collector": group} if is_ours and node.get("collector") is None and node.get("sender") is None else {}
    callback: pl.Callback = instantiate(node, **extra, _convert_="all")
    return callback


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


if __name__ == "__main__":
    main()
