"""Which leaves does a model have, and where does each lie in its flat slot?

A layout is built from named tensors on each side, and compared before any byte flows: gloo checks neither dtype nor
size, and shared memory checks nothing at all, so nothing may be moved that was not agreed on. The same layout describes
a batch of rollouts in its slot.

Names are dotted. Leaves that share memory exactly (tied weights) are stored once; the others are aliases of the first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every dtype's size, so that each leaf can be viewed in place."""

_WITHOUT_BYTES = re.compile(r"torch\.(q.*|u?int[1-7])")  # quantised, or narrower than a byte: torch cannot copy them
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not _WITHOUT_BYTES.fullmatch(str(value))
}


@dataclass(frozen=True)
class Leaf:
    """One tensor of the model.

    Attributes:
        name: Dotted name, as in ``state_dict()``.
        shape: Its sizes.
        dtype: Name of its dtype without ``torch.``.
        offset: Where it starts in the slot, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        return _DTYPES[self.dtype]

    @cached_property  # asked for in each push and each batch
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def describe(self) -> str:
        """Dtype and shape, as errors show them."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes, dtypes, byte offsets and aliases of the leaves of one model.

    Attributes:
        leaves: The stored leaves, in the order of the source (a module's ``state_dict`` order).
        aliases: Name of each further leaf that shares the memory of a stored one -> that leaf's name.

    Example:
        >>> layout = WeightLayout.of({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
        >>> [(leaf.name, leaf.offset) for leaf in layout.leaves], layout.nbytes
        ([('weight', 0), ('bias', 64)], 128)
    """

    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, find_aliases: bool = True) -> WeightLayout:
        """Lay out named tensors, in their order.

        Args:
            tensors: Dense tensors by their dotted names.
            find_aliases: Store leaves that share memory exactly once. Off for data, whose aliases are accidents.

        Raises:
            TypeError: A tensor has no dense bytes (sparse, nested, quantised, on the meta device); names it.
        """
        leaves: list[Leaf] = []
        aliases: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        offset = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
            if dtype not in _DTYPES or not dense:
                what = "nested" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
                raise TypeError(f"leaf {name!r} cannot be laid out: {what}, {tensor.dtype}; only dense tensors can")
            shared = find_aliases and tensor.numel() > 0
            if shared and (original := first.setdefault(_memory(tensor), name)) != name:
                aliases[name] = original
                continue
            leaf = Leaf(name, tuple(tensor.shape), dtype, offset)
            leaves.append(leaf)
            offset += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(leaves), aliases)

    @cached_property
    def nbytes(self) -> int:
        """Size of a slot in bytes, padding included."""
        if not self.leaves:
            return 0
        last = self.leaves[-1]
        return last.offset + -(-last.nbytes // ALIGNMENT) * ALIGNMENT

    @cached_property
    def by_name(self) -> dict[str, Leaf]:
        """Every name, aliases included, and the stored leaf that holds its bytes."""
        stored = {leaf.name: leaf for leaf in self.leaves}
        return stored | {alias: stored[name] for alias, name in self.aliases.items()}

    def cast(self, dtype: torch.dtype) -> WeightLayout:
        """The same leaves, with floating-point ones in another dtype."""
        name = str(dtype).removeprefix("torch.")
        leaves = [
            [leaf.name, list(leaf.shape), name if leaf.torch_dtype.is_floating_point else leaf.dtype]
            for leaf in self.leaves
        ]
        return self.from_json({"leaves": leaves, "aliases": self.aliases})

    def views(self, slot: Tensor) -> dict[str, Tensor]:
        """Each stored leaf as a view into a slot (uint8, 1-dimensional, ``nbytes`` long)."""
        return {leaf.name: self._view(slot, leaf) for leaf in self.leaves}

    @staticmethod
    def _view(slot: Tensor, leaf: Leaf) -> Tensor:
        raw = slot[leaf.offset : leaf.offset + leaf.nbytes]
        return raw.view(_DTYPES[leaf.dtype]).view(leaf.shape)

    def to_json(self) -> dict[str, Any]:
        """The layout as plain lists, ints and strings."""
        return {
            "leaves": [[leaf.name, list(leaf.shape), leaf.dtype] for leaf in self.leaves],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WeightLayout:
        """Rebuild a layout; offsets are computed, never believed.

        Raises:
            ValueError: The data are not a layout.
        """
        leaves: list[Leaf] = []
        offset = 0
        try:
            stored, aliases = data["leaves"], data["aliases"]
            if not isinstance(stored, list) or not isinstance(aliases, dict):
                raise ValueError("not a layout: leaves are a list, and aliases a dict")
            for name, shape, dtype in stored:
                # type(...), not isinstance: True is an int, and would be read as a size of 1.
                if type(name) is not str or type(shape) is not list or any(type(s) is not int or s < 0 for s in shape):
                    raise ValueError(f"not a leaf: {name!r}, {shape!r}, {dtype!r}")
                leaf = Leaf(name, tuple(shape), dtype, offset)
                leaves.append(leaf)
                offset += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
            names = {leaf.name for leaf in leaves}
            if len(names) != len(leaves) or names & aliases.keys() or not names.issuperset(aliases.values()):
                raise ValueError("a name occurs twice, or an alias names no leaf")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a layout: {error!r}") from error
        return cls(tuple(leaves), dict(aliases))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors exactly where they are the same values at the same place."""
    lazy = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), lazy


def describe(tensor: Tensor) -> str:
    """Dtype and shape, as errors show them."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def digest_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors in their order, as hexadecimal digits."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return sha.hexdigest()
