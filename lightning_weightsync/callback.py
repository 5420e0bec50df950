"""Which hook does what? The Lightning callback, hooks only; what a push is belongs to the collector or sender.

    setup                      all that is known is validated; a group's interpreters are launched (stage "fit" only)
    on_fit_start               what a module has built meanwhile is validated; others than groups get their first call
    on_sanity_check_start or   optimizers are validated; a group is connected: restored weights, the version of the
      on_train_start             checkpoint, before the first batch is pulled (whichever hook comes first); one that is
                                 connected already is pushed to
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_weightsync.cadence import Cadence, IntervalUnit
from lightning_weightsync.collectors.group import GRACE_AFTER_FAILURE, CollectorGroup
from lightning_weightsync.figures import Figures
from lightning_weightsync.paths import PathError
from lightning_weightsync.preflight import (
    builds_later,
    check_configuration,
    check_counted,
    check_length,
    check_whole,
)
from lightning_weightsync.ranks import RankWatch
from lightning_weightsync.schemes.renamed import NameMap
from lightning_weightsync.sources import Sources
from lightning_weightsync.steps import OptimizerStepCounter, owning_optimizers
from lightning_weightsync.targets import Target

log = logging.getLogger(__name__)


class UpdateWeights(pl.Callback):
    """Keeps collectors' weights in sync with the module that a Trainer trains.

    Args:
        collector: A ``CollectorGroup``, or any object with ``update_policy_weights_``.
        update_weights_interval: How many of the unit make a push due, counted since the last push: at least so many,
            never a modulus. An int; in seconds any positive number.
        policy_weights_getter: Called without arguments for the weights to push.
        weight_update_map: Destination (on the collector) -> source path (on the module, then on the trainer), or lines
            ``"destination=source"``. Wins over ``policy_weights_getter``. Several destinations are pushed as one
            version. A path is followed anew for each push; it may name a method without arguments that makes weights.
        trainer: Nothing that has to be given: ``setup`` binds the trainer that fits. It is accepted because TorchRL's
            callback of this name takes it; until ``setup``, it is what ``self.trainer`` says.
        sender: Any object with ``update_weights()``, in place of a collector.
        interval_unit: ``"batches"`` counts finished training batches, accumulated ones too. ``"optim_steps"`` counts
            real steps of the optimizers that own a mapped parameter, and pushes the weights of that very step. With a
            getter, a sender or a method nothing is known to be mapped: all optimizers count. ``"frames"`` counts what a
            group collects; with any other collector, which has to be iterable, the elements of the ``TensorDict``
            batches that are trained on. ``"seconds"`` counts the time that the fit takes, on a monotonic clock that is
            looked at when a batch ends; the time between two runs does not count.
        blocking: Whether a push waits until every worker has applied it. ``None``: where the group is ``sync=True``.
            ``False``: the trainer is held for one copy of the weights; a newer push may take the place of one that is
            still waiting. The last push of a fit is waited for in any case.
        name_map: Destination -> how the source's leaf names become the receiver's: a mapping of leading parts, or a
            function, see ``Renamed``.

    Raises:
        ValueError: Neither or both of ``collector`` and ``sender``, or one without the method that is called; no source
            of weights for a group; a map or a getter for a sender; ``blocking=False`` without a group; a bad interval
            or unit; ``"frames"`` without anything that collects them; a ``name_map`` of something that is not mapped.
        PathError: A source path or a line of the map that cannot be read, or a destination that is given twice. It is a
            ``ValueError``, too.
        TypeError: An interval that is no number, or a map of another kind.

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
        update_weights_interval: int | float = 1,
        policy_weights_getter: Callable[[], Any] | None = None,
        weight_update_map: Mapping[str, str] | Iterable[str] | None = None,
        trainer: pl.Trainer | None = None,
        *,
        sender: Any = None,
        interval_unit: IntervalUnit = "batches",
        blocking: bool | None = None,
        name_map: Mapping[str, NameMap] | None = None,
    ) -> None:
        self.trainer = trainer
        self.num_pushes = 0
        self._cadence = Cadence(update_weights_interval, interval_unit)
        self._sources = Sources(weight_update_map, policy_weights_getter, name_map)
        self._target = Target(collector, sender, blocking)
        self._target.check(self._sources, interval_unit)
        self._state_key = self._key("update_weights")  # Lightning asks for it several times per batch
        self._launched = False
        self._fit = _Fit()
        self._watch = RankWatch()
        self._steps: OptimizerStepCounter | None = None

    @property
    def collector(self) -> Any:
        """What is pushed to; ``None`` where there is a sender."""
        return self._target.collector

    @property
    def sender(self) -> Any:
        """What is told to push; ``None`` where there is a collector."""
        return self._target.sender

    @property
    def blocking(self) -> bool | None:
        """Whether a push waits until every worker has applied it; ``None``: where the group is ``sync=True``."""
        return self._target.blocking

    @property
    def update_weights_interval(self) -> float:
        """How many make a push due."""
        return self._cadence.interval

    @property
    def interval_unit(self) -> IntervalUnit:
        """Of what."""
        return self._cadence.unit

    @property
    def sources(self) -> Sources:
        """What is pushed, destination by destination."""
        return self._sources

    @property
    def weight_update_map(self) -> dict[str, str] | None:
        """Destination -> source path."""
        return self._sources.map

    @property
    def policy_weights_getter(self) -> Callable[[], Any] | None:
        """What is called for the weights to push, where nothing is mapped."""
        return self._sources.getter

    @property
    def version(self) -> int:
        """Of the newest push: the group's, or the number of pushes to any other collector or sender."""
        return self._target.version

    @property
    def stall_seconds(self) -> float:
        """How long all pushes of this fit, or of the last one, have held the trainer so far."""
        return self._fit.figures.total_stall_seconds

    @property
    def state_key(self) -> str:
        """Built from the destinations, not from the cadence, which a resumed run may change."""
        return self._state_key

    def register(self, trainer: pl.Trainer, name: str = "update_weights") -> None:
        """Add this callback to a trainer that exists.

        Args:
            trainer: The trainer.
            name: Distinguishes callbacks with the same destinations in checkpoints.
        """
        self._state_key = self._key(name)
        self.trainer = trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self not in callbacks:
            callbacks.append(self)

    # --- start ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Validate all that is known; launch the group's interpreters, and those of its evaluations. Does not block.

        Raises:
            PathError: A source path leads nowhere, and the module does not build its networks later.
            MisconfigurationException: Map and schemes differ; the train loader is a group without a length; parameters
                are not whole in each rank, or its ranks would be in different folders.
            RuntimeError: The group was started by the process that this one was forked from.
        """
        if self._group is not None:
            self._group.weights_getter = partial(self._weights_of, trainer, pl_module)
            self._group.rank = trainer.global_rank
            self._group.look_around = self._look_around
        self.trainer = trainer
        if stage != "fit":
            return
        self._fit = _Fit()
        self._sources.bind(pl_module, trainer)
        check_configuration(trainer, self._sources, self._group)
        try:
            check_whole(self._sources)
        except PathError:
            if not builds_later(pl_module):  # or else it has its networks in on_fit_start
                raise
        self._watch.stop()
        self._watch = RankWatch.start(trainer.local_rank, trainer.world_size)
        if self._group is not None and not self._group.running:
            self._launched = True
            self._group.launch()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate what a module has built meanwhile; first call of a collector or sender that is not a group.

        Raises:
            PathError: A source path leads nowhere.
            MisconfigurationException: A parameter is not whole in this process.
        """
        check_whole(self._sources)
        if self._group is None:
            self._target.call(self._sources)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate optimizers and connect the group, as ``on_train_start``, where validation runs before training."""
        self._count_steps(trainer, pl_module)
        self._connect()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate optimizers; connect the group, with restored weights, before the first batch is pulled.

        Blocks until every worker has applied the current version.

        Raises:
            TypeError: ``interval_unit="optim_steps"``, and an optimizer has no step hooks.
            MisconfigurationException: ``interval_unit="optim_steps"``, and no optimizer owns what is mapped; the
                module's train loader is a group without a length.
            ValueError: A getter gives weights for other destinations than the group has schemes for.
            WeightSyncError: A worker could not be connected; see ``CollectorGroup.connect``.
        """
        check_length(trainer, self._group)
        self._count_steps(trainer, pl_module)
        self._connect()
        self._fit.pushes_before = self.num_pushes
        self._target.start_counting_frames()
        self._cadence.start_clock()

    # --- training ------------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember which version was the newest when the batch arrived: how old the batch is, is counted from there."""
        if self._steps is not None:
            self._steps.reset_depth()
        self._fit.figures.batch_started(self._target.version)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, push if that is due, show figures if that is due."""
        self._target.check_under_way()
        self._cadence.batch_ended(self._target.new_frames(batch, needed=self._cadence.unit == "frames"))
        self._fit.batches += 1
        if self._cadence.unit != "optim_steps" and self._cadence.due:
            self._push()
        if self._fit.figures.due(trainer):
            collected = self._group.metrics() if self._group is not None else {}
            self._fit.figures.show(trainer, self.version, collected, batch)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Last push, if anything was counted since the one before: the workers end with the final weights."""
        self._stop_counting()
        if self._fit.batches and self.num_pushes == self._fit.pushes_before:
            self._warn_of_no_push(pl_module)
        pushed = self._cadence.unpushed
        if pushed:
            self._push()
        self._target.wait()
        if pushed:
            self._fit.figures.show_last(trainer, self.version)

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
        self._target.restore(*(int(state_dict[name]) for name in ("run", "version", "incarnation")))

    def __getstate__(self) -> dict[str, Any]:
        """Configuration and counts; what belongs to this process or to one fit stays here."""
        lent = ("log", "log_dict")  # Lightning hands the module's own to each callback
        own = {name: value for name, value in self.__dict__.items() if name not in lent}
        return own | {"trainer": None, "_launched": False, "_fit": _Fit(), "_steps": None}

    def __repr__(self) -> str:
        every = f"every {self.update_weights_interval} {self.interval_unit}"
        how = "" if self.blocking is None else f", blocking={self.blocking}"
        return f"{type(self).__name__}({self._target}, {self._sources}, {every}{how}, version={self.version})"

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> CollectorGroup | None:
        return self._target.group

    def _key(self, name: str) -> str:
        return f"{type(self).__name__}[{name}: {', '.join(sorted(self.weight_update_map or ()))}]"

    def _weights_of(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What is evaluated: the sources as they are now."""
        self._sources.bind(pl_module, trainer)
        return self._target.weights(self._sources)

    def _connect(self) -> None:
        """First push of this fit, once: a group that somebody else has connected may hold any weights."""
        if self._group is None or self._fit.connected:
            return
        self._fit.connected = True
        if self._group.connected:
            self._push()
            return
        self._group.connect(self._target.weights(self._sources))

    def _count_steps(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hook into the optimizers that own something mapped.

        With "batches" too: steps that a module makes in its own ``on_train_batch_end`` come after the last push.
        """
        needed = self.interval_unit == "optim_steps"
        self._stop_counting()
        try:
            counted = owning_optimizers(trainer.optimizers, self._sources.parameters())
            if needed:
                check_counted(counted, pl_module, self._sources)
            self._steps = OptimizerStepCounter(counted, self._step_happened)
        except TypeError:  # an optimizer without hooks; batches can be counted all the same
            if needed:
                raise

    def _step_happened(self) -> None:
        if self._cadence.step_happened():
            self._push()

    def _push(self) -> None:
        started = time.perf_counter()
        self._target.push(self._sources)
        self._fit.figures.pushed(time.perf_counter() - started)
        self._cadence.pushed()
        self.num_pushes += 1

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
        if self._cadence.unpushed:
            rank_zero_warn(
                f"update_weights_interval={self.update_weights_interval} ({self.interval_unit}) is longer than the "
                f"{self._cadence.pending:.6g} counted since the last push: the only push of this fit comes now, at its "
                "end, and every batch was made by the weights that it began with"
            )
        else:
            owner = f" that owns what is mapped, {self.weight_update_map}" if self.weight_update_map else ""
            rank_zero_warn(
                f"nothing was pushed: no optimizer step was counted in {self._fit.batches} batches; does "
                f"{type(pl_module).__name__} step an optimizer{owner}?"
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
    pushes_before: int = 0
    figures: Figures = field(default_factory=Figures)
