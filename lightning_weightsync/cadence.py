"""How much has been trained since the last push?

Counts finished batches and real optimizer steps. Steps are counted by hooks on ``torch.optim.Optimizer`` because
everything that Lightning counts is wrong somewhere: ``global_step`` stands still when a module steps its raw optimizer,
and moves when a gradient scaler skips a step; ``on_before_optimizer_step`` fires once per closure call of LBFGS.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["Cadence", "IntervalUnit", "OptimizerStepCounter", "owning_optimizers"]

IntervalUnit = Literal["batches", "optim_steps"]

_COUNTED = ("batches", "optim_steps")
_LATER = ("frames", "seconds")


class Cadence:
    """Says when a push is due: at least ``interval`` counted since the last push.

    It is never a modulus of a total, so a push that comes late, or an interval that is overridden on resume, does not
    make the next one come early or never.

    Args:
        interval: How many make a push due; at least 1.
        unit: What is counted: ``"batches"`` or ``"optim_steps"``.

    Raises:
        ValueError: ``interval`` is below 1, or there is no such unit.
        TypeError: ``interval`` is no int.
        NotImplementedError: The unit is ``"frames"`` or ``"seconds"``.

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

    def __init__(self, interval: int = 1, unit: IntervalUnit | str = "batches") -> None:
        if isinstance(interval, bool) or not isinstance(interval, int):
            raise TypeError(f"the interval is an int, got {interval!r} ({type(interval).__name__})")
        if interval < 1:
            raise ValueError(f"the interval is at least 1, got {interval}")
        if unit in _LATER:
            raise NotImplementedError(
                f"interval_unit={unit!r} is not there yet; use {' or '.join(map(repr, _COUNTED))}"
            )
        if unit not in _COUNTED:
            close = difflib.get_close_matches(str(unit), _COUNTED, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"interval_unit={unit!r} is none of {', '.join(map(repr, _COUNTED + _LATER))}{hint}")
        self.interval = interval
        self.unit = unit
        self._since_push = dict.fromkeys(_COUNTED, 0)

    def batch_ended(self) -> None:
        """Count one finished training batch."""
        self._since_push["batches"] += 1

    def step_happened(self) -> None:
        """Count one real optimizer step."""
        self._since_push["optim_steps"] += 1

    def pushed(self) -> None:
        """Start counting anew: the weights as they are now have been pushed."""
        self._since_push = dict.fromkeys(_COUNTED, 0)

    @property
    def pending(self) -> int:
        """How many of the unit were counted since the last push."""
        return self._since_push[self.unit]

    @property
    def stale(self) -> bool:
        """Whether anything of the unit, or any optimizer step, was counted since the last push."""
        return bool(self.pending or self._since_push["optim_steps"])

    @property
    def due(self) -> bool:
        """Whether at least ``interval`` were counted since the last push."""
        return self.pending >= self.interval

    def state_dict(self) -> dict[str, int]:
        """What was counted since the last push, per unit; neither interval nor unit, which a resumed run may change."""
        return dict(self._since_push)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from a saved state; loading twice is loading once."""
        self._since_push = {unit: int(state.get(unit, 0)) for unit in _COUNTED}


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
            self._handles.append(optimizer.register_step_pre_hook(self._step_begins))
            self._handles.append(optimizer.register_step_post_hook(self._step_ended))
        except AttributeError:  # no such method, or a subclass that did not call Optimizer.__init__
            raise TypeError(
                f"the steps of {type(optimizer).__name__} cannot be counted: it has no step hooks of torch.optim."
                "Optimizer; use interval_unit='batches'"
            ) from None

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1

    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[id(optimizer)] = depth = self._depth.get(id(optimizer), 0) - 1
        if depth == 0 and not _skipped_by_scaler(optimizer):
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


def _skipped_by_scaler(optimizer: Optimizer) -> bool:
    """Whether this step updated nothing: a fused optimizer is stepped all the same, and heeds the scaler itself."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf.item())
