"""What does a receiver hold for one destination? Live leaves, the agreed layout, a slot for the next version.

Staging writes into the slot and touches no live tensor; applying copies the slot into the live tensors; rolling back
restores what they held before. When to do which is the transaction's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes.strategy import (
    WeightStrategy,
    clean_name,
    load_state,
    mismatch_text,
    nested,
    non_persistent,
    same_values,
    unwrap,
    write,
)
from lightning_weightsync.transports.layout import WeightLayout, allocate_slot, digest_of

Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any]


class StagedModel:
    """One destination on the receiving side.

    Args:
        model_id: The destination.
        target: The live model (or a TensorDict or dict of live tensors).
        strategy: How leaves are found and written.
        strict: Whether every leaf of the target must be in the sender's layout.

    Attributes:
        layout: The sender's layout, once ``bind`` has accepted it.
        staged: The slot that the next version is written to (uint8, ``layout.nbytes`` long).
        applied_hooks: Called with ``(target, version)`` while the gate is still held alone.
    """

    def __init__(self, model_id: str, target: Weights, strategy: WeightStrategy, *, strict: bool = True) -> None:
        self.model_id = model_id
        self.target = target
        self.strategy = strategy
        self.strict = strict
        self.applied_hooks: list[Callable[[Any, int], None]] = []
        self.layout = WeightLayout((), {})
        self.staged = allocate_slot(0)
        self._strict = strict
        self._values: dict[str, Tensor] = {}
        self._undo: Callable[[], None] | None = None

    def bind(self, layout: WeightLayout, *, strict: bool | None = None) -> None:
        """Accept a sender's layout, and make room for it.

        Raises:
            LayoutMismatchError: The target does not have the same leaves; nothing is bound.
        """
        live = self.strategy.leaves(self.target)
        ignored = non_persistent(self.target) if isinstance(self.target, nn.Module) else set()
        offered = {name: leaf for name, leaf in layout.by_name.items() if name not in ignored}
        strict = self.strict if strict is None else strict and self.strict
        missing = [name for name in live if name not in offered] if strict else []
        unexpected = [name for name in offered if name not in live]
        mismatched = {
            name: f"sender {leaf.describe()}, receiver {own}"
            for name, leaf in offered.items()
            if name in live and (own := WeightLayout.of({name: live[name]}).leaves[0].describe()) != leaf.describe()
        }
        mismatched |= _untied(offered, live, layout)
        mismatched |= {
            name: "cannot be written in place: its elements share memory"
            for name in offered
            if name in live and _overlaps(live[name])
        }
        if missing or unexpected or mismatched or not offered:
            what = f"{self.model_id!r} differs between sender and receiver"
            if not offered:
                what += "; no leaf in common"
            raise LayoutMismatchError(
                mismatch_text(what, missing, unexpected, mismatched),
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
            )
        self.layout = layout
        self.staged = allocate_slot(layout.nbytes)
        self._strict = strict
        views = layout.views(self.staged)
        self._values = {name: views[layout.by_name[name].name] for name in live if name in offered}

    def fill(self, weights: Weights) -> None:
        """Stage weights that are in this process already (no transport between)."""
        snapshot(self.strategy, weights, self.layout, self.staged, self.model_id)

    def apply(self, *, keep_backup: bool) -> None:
        """Copy the staged version into the live leaves. The caller holds the gate alone.

        Args:
            keep_backup: Copy what the leaves hold now first, so that ``roll_back`` can restore it.

        Raises:
            LayoutMismatchError: The target has changed since ``bind``; nothing was copied, names each leaf.
        """
        # Looked up anew each time: `self.mean = new_mean` puts another tensor in the place of a buffer.
        leaves = self.strategy.leaves(self.target)
        changed = [name for name, value in self._values.items() if not _fits(leaves.get(name), value)]
        if changed:
            raise LayoutMismatchError(
                f"{self.model_id!r} has changed in the receiver since it connected: {', '.join(changed)} "
                "is gone, has another shape or dtype, or cannot be written in place",
                mismatched=dict.fromkeys(changed, "changed since connect"),
            )
        if isinstance(self.target, nn.Module) and self.strategy.extract_as == "state_dict":
            self._undo = _remember(self.target)
            load_state(self.target, self._values, strict=self._strict)
            return
        live, values = [leaves[name] for name in self._values], list(self._values.values())
        if keep_backup or self.applied_hooks:
            backup = [leaf.detach().clone() for leaf in live]
            self._undo = lambda: write(live, backup)
        write(live, values)

    def roll_back(self) -> None:
        """Restore what the live leaves held before ``apply``. The caller holds the gate alone."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def forget_backup(self) -> None:
        """The version is in force: the one before is not needed any more."""
        self._undo = None

    def digest(self) -> str:
        """SHA-256 over the live leaves, in layout order, each stored leaf once."""
        live = self.strategy.leaves(self.target)
        return digest_of(live[leaf.name] for leaf in self.layout.leaves if leaf.name in live)

    def copy(self) -> TensorDict:
        """A copy of the live leaves as a nested TensorDict."""
        live = self.strategy.leaves(self.target)
        return nested({name: leaf.detach().clone() for name, leaf in live.items()})


def snapshot(strategy: WeightStrategy, weights: Weights, layout: WeightLayout, slot: Tensor, model_id: str) -> None:
    """Copy weights into a slot, leaf by leaf; the source is only read.

    Raises:
        LayoutMismatchError: The weights are not those that both sides agreed on; names each leaf.
    """
    leaves = strategy.leaves(weights)
    ignored = non_persistent(weights) if isinstance(weights, nn.Module) else set()
    named = layout.by_name
    missing = [name for name in named if name not in leaves]
    unexpected = [name for name in leaves if name not in named and name not in ignored]
    mismatched = {}
    for leaf in layout.leaves:
        given = leaves.get(leaf.name)
        if given is not None and (tuple(given.shape) != leaf.shape or str(given.dtype) != f"torch.{leaf.dtype}"):
            mismatched[leaf.name] = f"given {given.dtype}{list(given.shape)}, agreed {leaf.describe()}"
    for alias, name in layout.aliases.items():
        both = alias in leaves and name in leaves and leaves[alias].data_ptr() != leaves[name].data_ptr()
        if both and not same_values(leaves[alias], leaves[name]):
            mismatched[alias] = f"was tied to {name} when the two sides connected, and is not any more"
    if missing or unexpected or mismatched:
        raise LayoutMismatchError(
            mismatch_text(
                f"the weights given for {model_id!r} are not those of connect", missing, unexpected, mismatched
            ),
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
        )
    views = layout.views(slot)
    write(list(views.values()), [leaves[name].detach() for name in views])


def _remember(module: nn.Module) -> Callable[[], None]:
    """What puts a module back into the state that it is in now, if loading another one fails half-way or later."""
    module = unwrap(module)
    state = {clean_name(key): value.detach().clone() for key, value in module.state_dict().items()}
    tensors: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (registry, name, tensor, tensor.detach().clone())
        for part in module.modules()
        for registry in (part._parameters, part._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]

    def put_back() -> None:
        # Through its own hooks first, for what it derives from its tensors; they may be what failed, or not invertible.
        with contextlib.suppress(Exception):
            load_state(module, state, strict=True)
        for registry, name, tensor, _ in tensors:
            registry[name] = tensor
        write([tensor for _, _, tensor, _ in tensors], [value for _, _, _, value in tensors])

    return put_back


def _fits(leaf: Tensor | None, value: Tensor) -> bool:
    return leaf is not None and leaf.shape == value.shape and leaf.dtype == value.dtype and not _overlaps(leaf)


def _overlaps(tensor: Tensor) -> bool:
    """Whether several elements lie at one address, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _untied(offered: Mapping[str, Any], live: Mapping[str, Tensor], layout: WeightLayout) -> dict[str, str]:
    """Leaves that are one tensor here and two over there: one tensor cannot hold both."""
    own = WeightLayout.of({name: live[name] for name in offered if name in live})
    return {
        alias: f"tied to {name} in the receiver, separate in the sender"
        for alias, name in own.aliases.items()
        if layout.by_name[alias] is not layout.by_name[name]
    }
