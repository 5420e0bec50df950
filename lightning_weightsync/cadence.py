"""How much has been trained since the last push?

Counts finished batches, real optimizer steps, collected frames and seconds. Steps are counted by hooks on
``torch.optim.Optimizer`` because everything that Lightning counts is wrong somewhere: ``global_step`` stands still when
a module steps its raw optimizer, and moves when a gradient scaler skips a step; ``on_before_optimizer_step`` fires once
per closure call of LBFGS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_weightsync.wording import nearest

__all__ = ["Cadence", "IntervalUnit", "OptimizerStepCounter", "owning_optimizers"]

IntervalUnit = Literal["batches", "optim_steps", "frames", "seconds"]

_UNITS: tuple[str, ...] = get_args(IntervalUnit)


class Cadence:
    """Says when a push is due: at least ``interval`` counted since the last push.

    It is never a modulus of a total, so a push that comes late, or an interval that is overridden on resume, does not
    make the next one come early or never.

    Args:
        interval: How many make a push due; at least 1. An int; with ``"seconds"`` any positive number.
        unit: What is counted. ``"batches"``: finished training batches. ``"optim_steps"``: real optimizer steps.
            ``"frames"``: what `batch_ended` is told. ``"seconds"``: the time between two looks at the clock, which is
            looked at when a batch ends; the time before `start_clock`, between two runs for example, does not count.
        clock: Seconds that never go backwards.

    Raises:
        ValueError: ``interval`` is below 1 (not positive, in seconds), or there is no such unit.
        TypeError: ``interval`` is no int, or in seconds no number.

    Example:
        >>> cadence = Cadence(2, "batches")
        >>> cadence.batch_ended()
        >>> cadence.due
        False
        >>> cadence.batch_ended()
        >>> cadence.due, cadence.pending
        (True, 2)
        >>> cadence.pushed()
        >>> cadence.pending
        0
    """

    def __init__(
        self,
        interval: float = 1,
        unit: IntervalUnit | str = "batches",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if unit not in _UNITS:
            raise ValueError(f"interval_unit={unit!r} is none of {', '.join(map(repr, _UNITS))}{nearest(unit, _UNITS)}")
        _check_interval(interval, unit)
        self.interval = interval
        self.unit: IntervalUnit = unit  # type: ignore[assignment]
        self._counted = f"_{unit}"
        self._clock = clock
        self._looked: float | None = None
        self._load({})

    def start_clock(self) -> None:
        """Count seconds from now on, beside those that were counted before; the time in between does not count."""
        self._looked = self._clock()

    def batch_ended(self, frames: int = 0) -> None:
        """Count one finished training batch, what was collected since the one before, and the time.

        Args:
            frames: Transitions that were collected since the last call.
        """
        self._batches += 1
        self._frames += frames
        if self._looked is not None:
            now = self._clock()
            self._seconds += now - self._looked
            self._looked = now

    def step_happened(self) -> None:
        """Count one real optimizer step."""
        self._optim_steps += 1

    def pushed(self) -> None:
        """Start counting anew: the weights as they are now have been pushed."""
        self._load({})
        if self._looked is not None:
            self._looked = self._clock()

    @property
    def pending(self) -> float:
        """How many of the unit were counted since the last push; an int, but for seconds."""
        counted: float = getattr(self, self._counted)
        return counted

    @property
    def stale(self) -> bool:
        """Whether anything that may have changed the weights was counted since the last push.

        That is an optimizer step, and a batch too, unless it is steps that are counted.
        """
        return bool(self._optim_steps or (self._batches and self.unit != "optim_steps"))

    @property
    def due(self) -> bool:
        """Whether at least ``interval`` were counted since the last push."""
        return self.pending >= self.interval

    def state_dict(self) -> dict[str, int]:
        """What was counted since the last push, as ints; neither interval nor unit, which a resumed run may change."""
        return {
            "batches": self._batches,
            "optim_steps": self._optim_steps,
            "frames": self._frames,
            "milliseconds": round(1e3 * self._seconds),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from a saved state; loading twice is loading once."""
        self._load(state)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_looked": None}  # clocks of other processes show other times

    def _load(self, state: Mapping[str, int]) -> None:
        self._batches = int(state.get("batches", 0))
        self._optim_steps = int(state.get("optim_steps", 0))
        self._frames = int(state.get("frames", 0))
        self._seconds = int(state.get("milliseconds", 0)) / 1e3


def _check_interval(interval: object, unit: str) -> None:
    kind, name, least = (int | float, "a number", "positive") if unit == "seconds" else (int, "an int", "at least 1")
    if isinstance(interval, bool) or not isinstance(interval, kind):
        raise TypeError(f"the interval in {unit} is {name}, got {interval!r} ({type(interval).__name__})")
    if not (interval > 0 if unit == "seconds" else interval >= 1):
        raise ValueError(f"the interval in {unit} is {least}, got {interval}")


class OptimizerStepCounter:
    """Calls back after every real step of the given optimizers, until `remove`.

    Once per step even where a subclass calls ``super().step()``, which makes torch run the hooks twice, and where LBFGS
    calls its closure several times. Not at all where a gradient scaler skips the step. The callback runs inside
    ``optimizer.step()``, after the update; what it raises leaves through ``step()``.

    A step that raises skips its post-hooks: call `reset_depth` at the start of every batch, or later steps are missed.

    Args:
        optimizers: The optimizers to watch; LightningOptimizers are unwrapped.
        on_step: Called without arguments after each step.

    Raises:
        TypeError: An optimizer has no step hooks.
    """

    def __init__(self, optimizers: Iterable[object], on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._depth: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        try:
            for optimizer in map(_unwrapped, optimizers):
                self._register(optimizer)
        except TypeError:
            self.remove()
            raise

    def reset_depth(self) -> None:
        """Forget steps that began and did not end; to be called outside of any step."""
        self._depth.clear()

    def remove(self) -> None:
        """Take the hooks off the optimizers; a second call does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _register(self, optimizer: Any) -> None:
        try:
            if _may_run_hooks_twice(type(optimizer)):
                self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
                self._handles.append(optimizer.register_step_post_hook(self._step_ended))
            else:
                self._handles.append(optimizer.register_step_post_hook(self._stepped))
        except AttributeError:  # no such method, or a subclass that did not call Optimizer.__init__
            raise TypeError(
                f"the steps of {type(optimizer).__name__} cannot be counted: it has no step hooks of torch.optim."
                "Optimizer; use interval_unit='batches'"
            ) from None

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1

    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 0) - 1
        if depth == 0:
            self._stepped(optimizer, args, kwargs)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if "found_inf" not in optimizer.__dict__ or not _skipped_by_scaler(optimizer):
            self._on_step()


def owning_optimizers(optimizers: Iterable[object], parameters: Iterable[Tensor]) -> list[Any]:
    """Those optimizers that own at least one of the parameters, compared by identity.

    Args:
        optimizers: Optimizers or LightningOptimizers; the latter are unwrapped in what is returned.
        parameters: For example those of the mapped modules.

    Returns:
        The owners, each once, in the order given.

    Raises:
        TypeError: Something given has no ``param_groups``.
    """
    wanted = {id(parameter) for parameter in parameters}
    owners: dict[int, Any] = {}
    for optimizer in map(_unwrapped, optimizers):
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"{type(optimizer).__name__} is no optimizer that can be watched: it has no param_groups; "
                "use interval_unit='batches'"
            )
        if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
            owners[id(optimizer)] = optimizer
    return list(owners.values())


def _unwrapped(optimizer: object) -> Any:
    """The optimizer whose ``step`` runs the hooks.

    A LightningOptimizer poses as a subclass of the optimizer that it wraps, without having been initialised as one; an
    optimizer that merely builds on another one (a Lookahead) owns its parameter groups, and its own step is the one
    to count.
    """
    if isinstance(optimizer, Optimizer) and "param_groups" in vars(optimizer):
        return optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _may_run_hooks_twice(kind: type) -> bool:
    """Whether a ``step`` of this class may call another one: torch lets the hooks run around each of them."""
    return sum("step" in vars(cls) for cls in kind.__mro__ if cls is not Optimizer) > 1


def _skipped_by_scaler(optimizer: Optimizer) -> bool:
    """Whether this step updated nothing: a fused optimizer is stepped all the same, and heeds the scaler itself."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf.item())
