"""What does a sender read for one destination? The source's leaves, checked, and copied into a slot.

The source is only read: no gradient, no ``requires_grad``, no version counter of it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_weightsync.schemes.extra_state import pack, stateful_parts
from lightning_weightsync.schemes.gather import Gather
from lightning_weightsync.schemes.leaves import Leaves
from lightning_weightsync.schemes.strategy import (
    Weights,
    WeightStrategy,
    module_of,
    non_persistent,
    raise_mismatch,
    same_values,
)
from lightning_weightsync.transports.layout import WeightLayout, describe
from lightning_weightsync.transports.slots import Slot


class Source:
    """The weights of one destination, on the sender.

    Args:
        model_id: The destination.
        weights: What ``connect`` was given; read again by each push without weights.
        strategy: How leaves are found.
        wire_dtype: Floating-point leaves travel in this dtype; ``None`` keeps their own.
        only_changed: Whether to compare first, and to write only leaves that the slot does not hold already.

    Attributes:
        layout: What travels.
        extra_keys: ``state_dict`` keys of the extra states that travel with it.
    """

    def __init__(
        self,
        model_id: str,
        weights: Weights,
        strategy: WeightStrategy,
        wire_dtype: torch.dtype | None = None,
        *,
        only_changed: bool = False,
    ) -> None:
        self.model_id = model_id
        self.weights = weights
        self._strategy = strategy
        self._leaves = Leaves(weights, strategy)
        self._extra_parts = stateful_parts(weights)
        self._layout_here = WeightLayout.of(self._leaves.tensors)
        self.layout = self._layout_here if wire_dtype is None else self._layout_here.cast(wire_dtype)
        self.extra_keys = sorted(self._extra_parts)
        self._expected = {leaf.name: (torch.Size(leaf.shape), leaf.torch_dtype) for leaf in self._layout_here.leaves}
        self._only_changed = only_changed
        self._gather = self._plan([self._leaves.tensors[leaf.name] for leaf in self.layout.leaves])

    def read(self, slot: Slot, weights: Weights | None = None) -> bytes:
        """Copy weights (``None``: those of ``connect``) into a slot; returns the extra state as bytes.

        Raises:
            LayoutMismatchError: They are not those that both sides agreed on; names each leaf. The slot may be written.
        """
        gather, extra = self._look(weights)
        if self._only_changed:
            slot.saved = gather.copy_changed_to(slot)
        else:
            gather.copy_to(slot)
        return extra

    def read_in_order(self, slot: Slot, weights: Weights | None = None) -> tuple[Callable[[], Iterator[int]], bytes]:
        """Check weights now, and copy them when and as fast as the caller asks: see ``Filling``; no ``only_changed``.

        Raises:
            LayoutMismatchError: See ``read``; nothing was written.
        """
        gather, extra = self._look(weights)
        return partial(gather.copy_in_order_to, slot), extra

    def _look(self, weights: Weights | None) -> tuple[Gather, bytes]:
        """The copy to make, and the extra state as bytes, once the weights have been found to be the agreed ones."""
        if weights is None or weights is self.weights:
            if self._leaves.stale():
                leaves = Leaves(self.weights, self._strategy)
                self._gather = self._plan(self._agreed(leaves.tensors, self.weights))
                self._extra_parts = stateful_parts(self.weights)
                self._leaves = leaves  # once they are accepted: leaves that were refused are refused again
            gather, parts = self._gather, self._extra_parts
            self._check_ties(self._leaves.tensors)
        else:
            given = self._agreed(self._strategy.leaves(weights), weights)
            gather, parts = Gather(self.layout, given, join=False), stateful_parts(weights)
        source = self.weights if weights is None else weights
        if sorted(parts) != self.extra_keys and module_of(source) is not None:
            self._raise(sorted(set(self.extra_keys) - set(parts)), sorted(set(parts) - set(self.extra_keys)), {})
        return gather, pack(parts)

    def _plan(self, tensors: list[Tensor]) -> Gather:
        return Gather(self.layout, tensors, join=not self._only_changed)

    def _agreed(self, leaves: dict[str, Tensor], weights: Weights) -> list[Tensor]:
        """The tensors in the layout's order, if these leaves are those of the layout."""
        ignored = non_persistent(weights)
        named = self.layout.by_name
        missing = [name for name in named if name not in leaves]
        unexpected = [name for name in leaves if name not in named and name not in ignored]
        mismatched = {
            name: f"given {describe(leaves[name])}, agreed {self._layout_here.by_name[name].describe()}"
            for name, (shape, dtype) in self._expected.items()
            if name in leaves and (leaves[name].shape != shape or leaves[name].dtype != dtype)
        }
        if missing or unexpected or mismatched:
            self._raise(missing, unexpected, mismatched)
        self._check_ties(leaves)
        return [leaves[leaf.name] for leaf in self.layout.leaves]

    def _check_ties(self, leaves: dict[str, Tensor]) -> None:
        """Leaves that travel as one must still be one, or at least equal."""
        for alias, name in self.layout.aliases.items():
            one, other = leaves[name], leaves[alias]
            if one is not other and one.data_ptr() != other.data_ptr() and not same_values(one, other):
                self._raise([], [], {alias: f"was tied to {name} when the two sides connected, and is not any more"})

    def _raise(self, missing: list[str], unexpected: list[str], mismatched: dict[str, str]) -> NoReturn:
        what = f"the weights given for {self.model_id!r} are not those of connect"
        raise_mismatch(what, missing, unexpected, mismatched)
