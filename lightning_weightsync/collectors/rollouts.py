"""How does a batch get from a worker to the trainer? Through slots of shared memory, one copy in and one out.

The parent makes an anonymous memory file per worker, which the worker inherits. The worker's first batch fixes the
schema: it sizes the file, and its layout travels once, as JSON. A slot is the worker's from the request that names it
to the message that says it is full, and the parent's from then on until the next request that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lightning_weightsync.schemes.strategy import write
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.memory import map_memory

NUM_SLOTS = 2


class BatchWriter:
    """The worker's end of its ring.

    Args:
        descriptor: The inherited memory file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._layout: WeightLayout | None = None
        self._batch_size: list[int] = []
        self._views: list[list[Tensor]] = []

    def write(self, slot: int, batch: TensorDictBase) -> dict[str, Any]:
        """Copy a batch into a slot.

        Returns:
            The schema if this was the first batch, else an empty dict.

        Raises:
            TypeError: A leaf is no tensor.
            ValueError: The batch has other keys, shapes or dtypes than the first one.
        """
        leaves = _leaves(batch)
        if self._layout is not None and leaves.keys() == self._layout.by_name.keys():
            leaves = {name: leaves[name] for name in self._layout.by_name}  # the order of keys may differ
        layout = WeightLayout.of(leaves, find_aliases=False)
        if self._layout is None:
            self._layout, self._batch_size = layout, list(batch.batch_size)
            self._views = _map_slots(self._descriptor, layout)
            write(self._views[slot], list(leaves.values()))
            return {"layout": layout.to_json(), "batch_size": self._batch_size}
        if layout != self._layout or list(batch.batch_size) != self._batch_size:
            raise ValueError(_difference(self._layout, layout, self._batch_size, list(batch.batch_size)))
        write(self._views[slot], list(leaves.values()))
        return {}


class BatchReader:
    """The parent's end of a worker's ring.

    Args:
        descriptor: The memory file that the worker inherited.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._batches: list[TensorDict] = []

    def open(self, schema: Mapping[str, Any]) -> None:
        """Map the slots, as the schema that came with the first batch says."""
        layout = WeightLayout.from_json(schema["layout"])
        names = [tuple(leaf.name.split(".")) for leaf in layout.leaves]
        self._batches = [
            TensorDict(dict(zip(names, views, strict=True)), batch_size=schema["batch_size"])
            for views in _map_slots(self._descriptor, layout)
        ]

    def read(self, slot: int) -> TensorDict:
        """The batch in a slot as views into shared memory, valid until the slot is given back."""
        return self._batches[slot]


def _map_slots(descriptor: int, layout: WeightLayout) -> list[list[Tensor]]:
    memory = map_memory(descriptor, NUM_SLOTS * layout.nbytes)
    slots = [memory[i * layout.nbytes : (i + 1) * layout.nbytes] for i in range(NUM_SLOTS)]
    return [list(layout.views(slot).values()) for slot in slots]


def _leaves(batch: TensorDictBase) -> dict[str, Tensor]:
    leaves: dict[str, Tensor] = {}
    # By default items() passes over what is no tensor without a word.
    for key, leaf in batch.items(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
        path = (key,) if isinstance(key, str) else key
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a batch holds tensors only; {'.'.join(path)!r} is {type(leaf).__name__}")
        if any("." in part for part in path):
            raise ValueError(f"a batch's keys have no dots; {path!r} has")
        leaves[".".join(path)] = leaf
    return leaves


def _difference(first: WeightLayout, now: WeightLayout, first_size: list[int], now_size: list[int]) -> str:
    before, after = ({leaf.name: leaf.describe() for leaf in layout.leaves} for layout in (first, now))
    lines = [
        f"{name}: {before.get(name, 'absent')} in the first batch, {after.get(name, 'absent')} now"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    if first_size != now_size:
        lines.insert(0, f"batch size {first_size} in the first batch, {now_size} now")
    return f"every batch of a collector has the shape of its first one; {'; '.join(lines)}"
