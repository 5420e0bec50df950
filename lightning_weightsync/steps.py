"""When has an optimizer really stepped?

Steps are counted by hooks on ``torch.optim.Optimizer`` because everything that Lightning counts is wrong somewhere:
``global_step`` stands still when a module steps its raw optimizer, and moves when a gradient scaler skips a step;
``on_before_optimizer_step`` fires once per closure call of LBFGS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["OptimizerStepCounter", "owning_optimizers"]


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


def owning_optimizers(optimizers: Iterable[object], parameters: Iterable[Tensor] | None) -> list[Any]:
    """Those optimizers that own at least one of the parameters, compared by identity.

    Args:
        optimizers: Optimizers or LightningOptimizers; the latter are unwrapped in what is returned.
        parameters: For example those of the mapped modules; ``None`` where they are not known: any may own them.

    Returns:
        The owners, each once, in the order given.

    Raises:
        TypeError: Something given has no ``param_groups``.
    """
    if parameters is None:
        return list(map(_unwrapped, optimizers))
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
