"""May this fit begin? What is wrong with map, loader, strategy, sources or optimizers is told as early as it is known.

In ``setup``, nothing has been started yet; when a group is connected, no worker has been given anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_weightsync.collectors.group import CollectorGroup
from lightning_weightsync.collectors.group_weights import unmatched
from lightning_weightsync.sharding import sharded_parameter, sharding_strategy
from lightning_weightsync.sources import Sources

__all__ = ["builds_later", "check_configuration", "check_counted", "check_length", "check_whole"]


def builds_later(module: pl.LightningModule) -> bool:
    """Whether a module may build its networks only when a fit begins, so that paths need not lead anywhere before."""
    return is_overridden("setup", module) or is_overridden("configure_model", module)


def check_configuration(trainer: pl.Trainer, sources: Sources, group: CollectorGroup | None) -> None:
    """See whether map, schemes, strategy and loader fit each other: all that is known before anything is built.

    Raises:
        MisconfigurationException: They do not.
        RuntimeError: The group was started by the process that this one was forked from.
    """
    if group is not None:
        group.check_process()
        if sources.map is not None:
            _refuse(unmatched("weight_update_map", sources.map, group.weight_sync_schemes))
    if sources.map is not None:
        _refuse(sharding_strategy(trainer.strategy))
    if trainer.world_size > 1:
        _refuse(_separate_sweeps(trainer.strategy))
    check_length(trainer, group)


def check_length(trainer: pl.Trainer, group: CollectorGroup | None) -> None:
    """See whether a group that is the train loader has a length; a module's loader is known once fit has asked for it.

    Raises:
        MisconfigurationException: It has none, and the trainer does not limit it.
    """
    loader = trainer.train_dataloader
    if loader is None:
        loader = trainer.fit_loop._data_source.instance  # what fit was given
    limited = isinstance(trainer.limit_train_batches, int)
    if group is not None and loader is group and sized_len(group) is None and not limited:
        raise MisconfigurationException(
            "Lightning prefetches from a loader without a length, so each batch would be collected before the one "
            "before it is learned from: give the CollectorGroup batches_per_epoch (or the Trainer an int "
            "limit_train_batches)"
        )


def check_whole(sources: Sources) -> None:
    """See whether every source is there, with whole parameters.

    Raises:
        PathError: A path names nothing.
        MisconfigurationException: A parameter is spread over ranks.
    """
    _refuse(sharded_parameter(sources.resolve()))


def check_counted(optimizers: Sequence[object], module: pl.LightningModule, sources: Sources) -> None:
    """See whether there is an optimizer whose steps can be counted.

    Args:
        optimizers: Those that own what is mapped; all, where that cannot be known.
        module: Whose they are.
        sources: What is mapped.

    Raises:
        MisconfigurationException: There is none.
    """
    if not optimizers:
        owned = f" owns a parameter of {sorted(sources.map.values())}" if sources.map else " is there to be counted"
        raise MisconfigurationException(
            f"interval_unit='optim_steps': no optimizer of {type(module).__name__}{owned}; use interval_unit='batches'"
        )


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise MisconfigurationException(reason)


def _separate_sweeps(strategy: Any) -> str | None:
    """Why the ranks of a Hydra job would not be in one folder, or ``None`` if they are.

    Args:
        strategy: Lightning's; what is spawned or forked runs no command.
    """
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    by_command = type(strategy.launcher).__name__ == "_SubprocessScriptLauncher"
    if hydra_config is None or not by_command or not hydra_config.HydraConfig.initialized():
        return None
    node = hydra_config.HydraConfig.get()
    written = {key: node.sweep._get_node(key)._value() for key in ("dir", "subdir")}
    if node.mode is None or node.mode.name != "MULTIRUN" or not any("${now" in str(text) for text in written.values()):
        return None
    return (
        "Lightning's 'ddp' starts each further rank by running the command again, here a whole Hydra sweep, and "
        f"hydra.sweep.dir has the time in it ({written['dir']}): that rank would be in another folder. Set "
        "hydra.sweep.dir to a fixed path, or strategy='ddp_spawn'"
    )
