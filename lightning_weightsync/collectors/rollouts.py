"""How does a batch get from a worker to the trainer? Through slots of shared memory, into which the worker copies it.

The parent makes an anonymous memory file per worker, which the worker inherits. The worker's first batch fixes the
schema: it sizes the file, and its layout travels once, as JSON. A slot is the worker's from the request that names it
to the message that says it is full, and the parent's from then on until the next request that names it.

A batch of one worker needs no copy out: its slot is *lent* to whoever has the batch, and comes back when the last
tensor that looks into it, any view included, is gone, which its storage tells by ending. There are a few slots for
that; who keeps more batches than those gets copies.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.writing import write
from lightning_weightsync.transports.layout import Leaf, WeightLayout
from lightning_weightsync.transports.memory import map_memory

NUM_SLOTS = 2
"""Batches of a worker that wait for the trainer, or are being filled: one each, so that neither waits for the other."""

LENT_SLOTS = 2
"""Further slots, for batches that the trainer has: the one it asks for, and the one before, which it still names."""


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
            self._views = [list(layout.views(slot).values()) for slot in _map_slots(self._descriptor, layout)]
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
        self._slots: list[Tensor] = []
        self._leaves: Sequence[Leaf] = ()
        self._batch_size: list[int] = []
        self._lent: Counter[int] = Counter()  # slot -> how many of its leaves are still there
        self._ended: deque[int] = deque()  # the slots of those that are not; appended to by whichever thread drops one

    def open(self, schema: Mapping[str, Any]) -> None:
        """Map the slots, as the schema that came with the first batch says."""
        layout = WeightLayout.from_json(schema["layout"])
        self._slots = _map_slots(self._descriptor, layout)
        self._leaves, self._batch_size = layout.leaves, schema["batch_size"]

    def read(self, slot: int) -> TensorDict:
        """The batch in a slot as views into shared memory, valid until the slot is given back."""
        memory = self._slot(slot)
        return self._batch([memory[leaf.offset : leaf.offset + leaf.nbytes] for leaf in self._leaves])

    def lend(self, slot: int) -> TensorDict | None:
        """The batch in a slot as views into shared memory that stay as they are; ``None`` if too many are lent.

        The slot must not be named in a request before ``take_back`` has returned it.
        """
        self.take_back()
        if len(self._lent) == LENT_SLOTS:
            return None
        memory, parts = self._slot(slot).numpy(), []
        for leaf in self._leaves:
            # With a storage of its own, so that who keeps or saves one leaf does so with no other. The storage is the
            # only one that knows this array, which therefore ends with the last view of it.
            lease = memory[leaf.offset : leaf.offset + leaf.nbytes]
            weakref.finalize(lease, self._ended.append, slot).atexit = False
            parts.append(torch.from_numpy(lease))
        self._lent[slot] = len(parts)
        return self._batch(parts)

    def take_back(self) -> list[int]:
        """The slots that were lent, and that nobody looks into any more since the last call."""
        back = []
        while self._ended:
            slot = self._ended.popleft()
            self._lent[slot] -= 1
            if not self._lent[slot]:
                del self._lent[slot]
                back.append(slot)
        return back

    def free_slot(self) -> int:
        """A slot that is not lent."""
        self.take_back()
        return min(set(range(NUM_SLOTS + LENT_SLOTS)) - self._lent.keys())

    def close(self) -> None:
        """Give the memory back, once nobody has a lent batch any more."""
        self._slots = []

    def _slot(self, slot: int) -> Tensor:
        if not self._slots:
            raise WeightSyncError("the workers were stopped: their batches are gone")
        return self._slots[slot]

    def _batch(self, parts: Sequence[Tensor]) -> TensorDict:
        """The leaves, of which these are the bytes, as a batch."""
        views = {
            tuple(leaf.name.split(".")): part.view(leaf.torch_dtype).view(leaf.shape)
            for leaf, part in zip(self._leaves, parts, strict=True)
        }
        return TensorDict(views, self._batch_size)


def _map_slots(descriptor: int, layout: WeightLayout) -> list[Tensor]:
    number = NUM_SLOTS + LENT_SLOTS
    return list(map_memory(descriptor, number * layout.nbytes).view(number, layout.nbytes))


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
