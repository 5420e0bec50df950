"""WHEN are weights pushed? The Lightning callback: hooks only; what a push is belongs to the collector or sender.

    setup                      everything is validated; a group's interpreters are launched (stage "fit" only)
    on_sanity_check_start or   a group is connected: restored weights, the version of the checkpoint, before the first
      on_train_start             batch is pulled (whichever hook comes first); one that is connected is pushed to
    optimizer step             unit "optim_steps": counted, and pushed inside the batch when due
    on_train_batch_end         the other units: counted, and pushed when due; figures are logged
    on_train_end               pushed once more if anything was counted since the last push
    teardown, on_exception     a group that the callback launched is stopped

Lightning runs a callback's ``on_train_batch_end`` before the module's own: what a module changes there travels with the
next push.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import TensorDictBase
from torch import nn

from lightning_weightsync.cadence import Cadence, IntervalUnit, OptimizerStepCounter, owning_optimizers
from lightning_weightsync.collectors.group import GRACE_AFTER_FAILURE, CollectorGroup
from lightning_weightsync.paths import PathError, resolve_first
from lightning_weightsync.ranks import RankWatch, separate_sweeps, sharded_parameter, sharding_strategy
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.transports.pushing import PushHandle, PushState

log = logging.getLogger(__name__)


class UpdateWeights(pl.Callback):
    """Keeps collectors' weights in sync with the module that a Trainer trains.

    Args:
        collector: A ``CollectorGroup``, or any object with ``update_policy_weights_``.
        update_weights_interval: How many of the unit make a push due, counted since the last push: at least so many,
            never a modulus. An int; in seconds any positive number.
        policy_weights_getter: Called without arguments for the weights to push.
        weight_update_map: Destination (on the collector) -> source path (on the module, then on the trainer). Wins over
            ``policy_weights_getter``. Several destinations are pushed as one version.
        trainer: Bound early; Lightning's hooks would bind it anyway.
        sender: Any object with ``update_weights()``, in place of a collector.
        interval_unit: ``"batches"`` counts finished training batches, accumulated ones too. ``"optim_steps"`` counts
            real steps of the optimizers that own a mapped parameter, and pushes the weights of that very step. With a
            getter or a sender nothing is mapped: all optimizers count. ``"frames"`` counts what a group collects; with
            any other collector, which has to be iterable, the elements of the ``TensorDict`` batches that are trained
            on. ``"seconds"`` counts the time that the fit takes, on a monotonic clock that is looked at when a batch
            ends; the time between two runs does not count.
        blocking: Whether a push waits until every worker has applied it. ``None``: where the group is ``sync=True``.
            ``False``: the trainer is held for one copy of the weights; a newer push may take the place of one that is
            still waiting. The last push of a fit is waited for in any case.

    Raises:
        ValueError: Neither or both of ``collector`` and ``sender``; no source of weights; a bad interval or unit;
            ``"frames"`` without anything that collects them.
        TypeError: An interval that is no number.

    Attributes:
        num_pushes: Completed pushes, over resumes. A group's connecting, which delivers the current version, is not
            one.

    Example::

        group = CollectorGroup(factory, 2, weight_sync_schemes={"policy": scheme}, batches_per_epoch=10)
        trainer = Trainer(callbacks=[UpdateWeights(group, weight_update_map={"policy": "actor"})])
        trainer.fit(module, group)
    """

    def __init__(
        self,
        collector: Any = None,
        update_weights_interval: float = 1,
        policy_weights_getter: Callable[[], Any] | None = None,
        weight_update_map: Mapping[str, str] | None = None,
        trainer: pl.Trainer | None = None,
        *,
        sender: Any = None,
        interval_unit: IntervalUnit = "batches",
        blocking: bool | None = None,
    ) -> None:
        if (collector is None) == (sender is None):
            raise ValueError("give either a collector or a sender")
        if sender is not None and (policy_weights_getter is not None or weight_update_map is not None):
            raise ValueError(
                "a sender has its own weights: give no policy_weights_getter and no weight_update_map with it"
            )
        for given, method in ((collector, "update_policy_weights_"), (sender, "update_weights")):
            if given is not None and not callable(getattr(given, method, None)):
                raise ValueError(f"{type(given).__name__} cannot be pushed to: it has no method {method}()")
        group = collector if isinstance(collector, CollectorGroup) else None
        if group is not None and policy_weights_getter is None and weight_update_map is None:
            raise ValueError(
                "a CollectorGroup needs a source: give weight_update_map, for example "
                f"{dict.fromkeys(group.weight_sync_schemes, 'actor') or {'policy': 'actor'}}, or policy_weights_getter"
            )
        if blocking is False and group is None:
            raise ValueError(
                "blocking=False needs a CollectorGroup: nothing else is known to deliver in the background"
            )
        if interval_unit == "frames" and not hasattr(collector, "__iter__"):
            whose = "a sender" if collector is None else f"{type(collector).__name__}, which is not iterable,"
            raise ValueError(
                f"interval_unit='frames' needs a collector whose frames can be counted, a CollectorGroup or an "
                f"iterable of TensorDicts; {whose} has none: use 'batches', 'optim_steps' or 'seconds'"
            )
        self.collector = collector
        self.sender = sender
        self.policy_weights_getter = policy_weights_getter if weight_update_map is None else None
        self.weight_update_map = (
            None if weight_update_map is None else {str(k): str(v) for k, v in weight_update_map.items()}
        )
        self.trainer = trainer
        self.interval_unit: IntervalUnit = interval_unit
        self.blocking = blocking
        self.num_pushes = 0
        self._cadence = Cadence(update_weights_interval, interval_unit)
        self._group = group
        self._name = "update_weights"
        self._version = 0
        self._launched = False
        self._fit = _Fit()
        self._watch = RankWatch()
        self._under_way: list[PushHandle] = []
        self._sources: dict[str, Any] = {}
        self._steps: OptimizerStepCounter | None = None
        self._push_seconds = 0.0
        self._staleness: tuple[float, float] | None = None

    @property
    def update_weights_interval(self) -> float:
        """How many make a push due."""
        return self._cadence.interval

    @property
    def version(self) -> int:
        """Of the newest push: the group's, or the number of pushes to any other collector or sender."""
        return self._group.version if self._group is not None else self._version

    @property
    def state_key(self) -> str:
        """Built from the destinations, not from the cadence, which a resumed run may change."""
        return f"{type(self).__name__}[{self._name}: {', '.join(sorted(self.weight_update_map or ()))}]"

    def register(self, trainer: pl.Trainer, name: str = "update_weights") -> None:
        """Add this callback to a trainer that exists.

        Args:
            trainer: The trainer.
            name: Distinguishes callbacks with the same destinations in checkpoints.
        """
        self._name = name
        self.trainer = trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self not in callbacks:
            callbacks.append(self)

    # --- start ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Validate paths, map and schemes; launch the group's interpreters, and those of its evaluations."""
        if self._group is not None:
            self._group.weights_getter = partial(self._weights_of, trainer, pl_module)
            self._group.rank = trainer.global_rank
            self._group.look_around = self._look_around
        self.trainer = trainer
        if stage != "fit":
            return
        self._fit = _Fit()
        self._check_map()
        self._check_strategy(trainer)
        try:
            self._resolve(trainer, pl_module)
        except PathError:
            # A module that builds its networks in setup() or configure_model() has them only in on_fit_start.
            if not (is_overridden("setup", pl_module) or is_overridden("configure_model", pl_module)):
                raise
        self._watch.stop()
        self._watch = RankWatch.start(trainer.local_rank, trainer.world_size)
        if self._group is not None and not self._group.running:
            self._launched = True
            self._group.launch()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resolve what a module has built meanwhile; first call of a collector or sender that is not a group."""
        self._resolve(trainer, pl_module)
        if self._group is None:
            self._call_other()

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect the group, if validation runs before training."""
        self._connect()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect the group, with restored weights, before the first batch is pulled; start counting steps."""
        self._connect()
        self._fit.pushes_before = self.num_pushes
        unsized = trainer.num_training_batches == float("inf")
        if unsized and self._group is not None and trainer.train_dataloader is self._group:
            raise MisconfigurationException(
                "Lightning prefetches from a loader without a length, so each batch would be collected before the one "
                "before it is learned from: give the CollectorGroup batches_per_epoch (or the Trainer an int "
                "limit_train_batches)"
            )
        self._count_steps(trainer, pl_module)
        if self._group is not None:
            self._fit.frames = self._group.frames
        self._cadence.start_clock()

    # --- training ------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure how old the batch is."""
        if self._steps is not None:
            self._steps.reset_depth()
        self._push_seconds = 0.0
        self._staleness = None
        if self._group is not None and isinstance(batch, TensorDictBase) and "policy_version" in batch:
            ages = self.version - batch["policy_version"]
            self._staleness = float(ages.float().mean()), float(ages.max())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, push if that is due, log."""
        self._check_under_way()
        self._cadence.batch_ended(self._new_frames(batch))
        self._fit.batches += 1
        if self.interval_unit != "optim_steps" and self._cadence.due:
            self._push()
        figures = self._figures()
        shown = {name for name in figures if name.rpartition("/")[2] in _IN_PROGRESS_BAR}
        pl_module.log_dict({n: v for n, v in figures.items() if n in shown}, prog_bar=True, batch_size=1)
        pl_module.log_dict({n: v for n, v in figures.items() if n not in shown}, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Last push, if anything was counted since the one before: the workers end with the final weights."""
        self._stop_counting()
        if self._fit.batches and self.num_pushes == self._fit.pushes_before:
            self._warn_of_no_push(pl_module)
        pushed = self._cadence.stale
        if pushed:
            self._push()
        for handle in self._under_way:
            self._settle(handle)
        self._under_way.clear()
        if pushed:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics({"weight_sync/version": float(self.version)}, step=step)

    # --- end -----------------------------------------------------------------------------------------------------

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop the group that this callback has launched."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The same after an exception, Ctrl-C or SIGTERM; never raises, so that other callbacks are cleaned up too."""
        try:
            self._stop(GRACE_AFTER_FAILURE)
        except Exception:
            log.exception("stopping the collectors failed")

    # --- state ---------------------------------------------------------------------------------------------------

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the group from where Lightning has saved it, as a loader's state.

        Lightning itself loads that only into an epoch that was not finished, and never where the module has asked for
        ``estimated_stepping_batches``. Where it does, it loads the same state a second time.
        """
        loop = (checkpoint.get("loops") or {}).get("fit_loop") or {}
        states = [s for s in loop.get("state_dict", {}).get("combined_loader", ()) if CollectorGroup.is_state(s)]
        group = self._group
        if group is not None and group.running and not group.connected and len(states) == 1:
            group.load_state_dict(states[0])

    def state_dict(self) -> dict[str, Any]:
        """Run, version, incarnation and counts: ints only.

        The group's own state is checkpointed by Lightning, as a loader's.
        """
        group = self._group
        return {
            "run": group.run if group is not None else 0,
            "version": self.version,
            "incarnation": group.incarnation if group is not None else 0,
            "num_pushes": self.num_pushes,
            **self._cadence.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a checkpoint; idempotent. Versions never go backwards."""
        self.num_pushes = int(state_dict["num_pushes"])
        self._cadence.load_state_dict(state_dict)
        self._version = max(self._version, int(state_dict["version"]))
        if self._group is not None:
            counts = (int(state_dict[name]) for name in ("run", "version", "incarnation"))
            self._group.restore_version(*counts)

    def __repr__(self) -> str:
        target = self.collector if self.collector is not None else self.sender
        to = target if self._group is not None else type(target).__name__
        every = f"{self.update_weights_interval} {self.interval_unit}"
        return f"{type(self).__name__}({to}, every {every}, {self.weight_update_map}, version={self.version})"

    # --- inside --------------------------------------------------------------------------------------------------

    def _check_map(self) -> None:
        if self._group is None or self.weight_update_map is None:
            return
        destinations, schemes = set(self.weight_update_map), set(self._group.weight_sync_schemes)
        if destinations != schemes:
            raise MisconfigurationException(
                f"weight_update_map has the destinations {sorted(destinations)}, the group's weight_sync_schemes "
                f"{sorted(schemes)}: without a scheme {sorted(destinations - schemes)}, without a source "
                f"{sorted(schemes - destinations)}"
            )

    def _check_strategy(self, trainer: pl.Trainer) -> None:
        if self._group is not None:
            self._group.check_process()
        reason = sharding_strategy(trainer.strategy) if self.weight_update_map is not None else None
        if reason is None and trainer.world_size > 1:
            reason = separate_sweeps(trainer.strategy)
        if reason is not None:
            raise MisconfigurationException(reason)

    def _resolve(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        roots = [("LightningModule", pl_module), ("Trainer", trainer)]
        for destination, path in (self.weight_update_map or {}).items():
            self._sources[destination] = resolve_first(roots, path)
        reason = sharded_parameter(self._sources)
        if reason is not None:
            raise MisconfigurationException(reason)

    def _weights(self) -> dict[str, Any]:
        """What the group is given: the mapped sources, or what the getter returns for its only destination."""
        if self._sources:
            return dict(self._sources)
        assert self.policy_weights_getter is not None and self._group is not None
        weights = self.policy_weights_getter()
        schemes = list(self._group.weight_sync_schemes)
        return {schemes[0]: weights} if len(schemes) == 1 else dict(weights)

    def _weights_of(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What is evaluated: the sources as they are now."""
        self._resolve(trainer, pl_module)
        return self._weights()

    def _connect(self) -> None:
        """First push of this fit, once: a group that somebody else has connected may hold any weights."""
        if self._group is None or self._fit.connected:
            return
        self._fit.connected = True
        if self._group.connected:
            self._push()
            return
        self._group.connect(self._weights())

    def _count_steps(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook into the optimizers that own something mapped.

        With "batches" too: steps that a module makes in its own ``on_train_batch_end`` come after the last push.
        """
        optimizers: list[Any] = list(trainer.optimizers)
        needed = self.interval_unit == "optim_steps"
        self._stop_counting()
        try:
            if self._sources:
                mapped = [source for source in self._sources.values() if isinstance(source, nn.Module)]
                optimizers = owning_optimizers(optimizers, (p for source in mapped for p in source.parameters()))
            self._steps = OptimizerStepCounter(optimizers, self._step_happened)
        except TypeError:  # an optimizer without hooks; batches can be counted all the same
            if needed:
                raise
        if needed and not optimizers:
            raise MisconfigurationException(
                f"interval_unit='optim_steps': no optimizer of {type(pl_module).__name__} owns a parameter of "
                f"{sorted((self.weight_update_map or {}).values())}; use interval_unit='batches'"
            )

    def _step_happened(self) -> None:
        self._cadence.step_happened()
        if self.interval_unit == "optim_steps" and self._cadence.due:
            self._push()

    def _new_frames(self, batch: Any) -> int:
        """What was collected since the last call; where no group counts, the batch is what was collected."""
        if self._group is not None:
            before, self._fit.frames = self._fit.frames, self._group.frames
            return self._fit.frames - before
        if isinstance(batch, TensorDictBase):
            return int(batch.numel())
        if self.interval_unit == "frames":
            raise TypeError(
                f"interval_unit='frames' counts TensorDict batches of a {type(self.collector).__name__}; this one is "
                f"{type(batch).__name__}: use 'batches', 'optim_steps' or 'seconds'"
            )
        return 0

    def _push(self) -> None:
        started = time.perf_counter()
        if self._group is not None and not self._waits:
            handle = self._group.send_async(self._weights())
            if handle is not None:
                self._under_way.append(handle)
        elif self._group is not None:
            self._group.update_policy_weights_(weights_dict=self._weights())
        else:
            self._call_other()
            self._version += 1
        self._push_seconds += time.perf_counter() - started
        self._cadence.pushed()
        self.num_pushes += 1

    @property
    def _waits(self) -> bool:
        return self.blocking if self.blocking is not None else self._group is None or self._group.sync

    def _check_under_way(self) -> None:
        """Raise what a push that nobody waited for has run into."""
        under_way, self._under_way = self._under_way, []
        for handle in under_way:
            if handle.state is PushState.PENDING:
                self._under_way.append(handle)
            else:
                self._settle(handle)

    def _settle(self, handle: PushHandle) -> None:
        """Raise what a push has run into, except for workers that the group replaces: those it has logged."""
        assert self._group is not None
        self._group.settle(handle)

    def _call_other(self) -> None:
        """Push through an object that is not ours."""
        if self.sender is not None:
            self.sender.update_weights()
        elif self._sources:
            extract = WeightStrategy().extract_weights
            weights = {name: extract(source) for name, source in self._sources.items()}
            # A TorchRL collector without schemes ignores a weights_dict, and says nothing.
            if weights.keys() == {"policy"} and not getattr(self.collector, "_weight_sync_schemes", True):
                self.collector.update_policy_weights_(weights["policy"])
            else:
                self.collector.update_policy_weights_(weights_dict=weights)
        elif self.policy_weights_getter is not None:
            self.collector.update_policy_weights_(self.policy_weights_getter())
        else:
            self.collector.update_policy_weights_()

    def _figures(self) -> dict[str, float]:
        figures = {
            "weight_sync/version": float(self.version),
            "weight_sync/push_ms": 1e3 * self._push_seconds,
            "weight_sync/stall_ms": 1e3 * self._push_seconds,
        }
        if self._staleness is not None:
            figures["weight_sync/staleness_mean"], figures["weight_sync/staleness_max"] = self._staleness
        if self._group is not None:
            figures |= self._group.metrics()
        return figures

    def _look_around(self) -> None:
        """Called while the group waits for a batch: Lightning itself looks at SIGTERM only when a batch has ended."""
        if self.trainer is not None and self.trainer.received_sigterm:
            raise SIGTERMException
        if self.trainer is not None and self.trainer.training:
            self._watch.look()

    def _stop_counting(self) -> None:
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def _warn_of_no_push(self, pl_module: pl.LightningModule) -> None:
        if self._cadence.stale:
            rank_zero_warn(
                f"update_weights_interval={self.update_weights_interval} ({self.interval_unit}) is longer than this "
                f"run of {self._cadence.pending:.6g}: its only push comes now, at its end, and every batch was made by "
                "the first weights"
            )
        else:
            rank_zero_warn(
                f"nothing was pushed: no optimizer step was counted in {self._fit.batches} batches; does "
                f"{type(pl_module).__name__} step an optimizer that owns what is mapped, {self.weight_update_map}?"
            )

    def _stop(self, timeout: float = 10.0) -> None:
        self._stop_counting()
        self._watch.stop()
        if self._launched and self._group is not None:
            self._launched = False
            self._group.shutdown(timeout)
        elif self._group is not None and not self._group.running:
            self._group.stop_evaluations(timeout)  # of trainer.validate


@dataclass
class _Fit:
    """What concerns one ``fit`` only."""

    connected: bool = False
    batches: int = 0
    frames: int = 0
    """Collected up to the last batch's end, over resumes."""
    pushes_before: int = 0


_IN_PROGRESS_BAR = ("version", "staleness_mean", "frames_per_sec", "episode_return")
