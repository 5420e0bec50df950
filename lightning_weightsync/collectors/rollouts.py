"""How does a batch get from a worker to the trainer? Through slots of shared memory, into which the worker copies it.

The parent makes an anonymous memory file per worker, which the worker inherits. The worker's first batch fixes the
schema: it sizes the file, and its layout travels once, as JSON. A slot is the worker's from the request that names it
to the message that says it is full, and the parent's from then on until the next request that names it.

A batch needs no copy out where it lies in one piece: its slot is *lent* to whoever has the batch, and comes back when
the last tensor that looks into it, any view included, is gone, which its storage tells by ending. There are a few slots
for that; who keeps more batches than those gets copies. The parts of several workers lie in one piece in *joint* slots
(``joint``), whose numbers follow those of a worker's own.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from lightning_weightsync.collectors.trees import nested, unchecked
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.writing import write
from lightning_weightsync.transports.layout import Leaf, WeightLayout
from lightning_weightsync.transports.memory import map_memory

NUM_SLOTS = 2
"""Batches of a worker that wait for the trainer, or are being filled: one each, so that neither waits for the other."""

LENT_SLOTS = 2
"""Further slots, for batches that the trainer has: the one it asks for, and the one before, which it still names."""

OWN_SLOTS = NUM_SLOTS + LENT_SLOTS
"""Slots of one memory file: a worker's own, or those that several have together."""


@dataclass(frozen=True)
class BatchSchema:
    """What every batch of a worker looks like.

    Attributes:
        layout: Its leaves, each of which has the batch's sizes in front.
        batch_size: The batch's sizes.
    """

    layout: WeightLayout
    batch_size: tuple[int, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BatchSchema:
        """As it came with a worker's first batch."""
        return cls(WeightLayout.from_json(data["layout"]), tuple(data["batch_size"]))

    def to_json(self) -> dict[str, Any]:
        """As plain lists, ints and strings."""
        return {"layout": self.layout.to_json(), "batch_size": list(self.batch_size)}

    def joint(self, parts: int) -> BatchSchema:
        """That of so many of these batches, one after the other along dimension 0."""
        leaves = [[leaf.name, [parts * leaf.shape[0], *leaf.shape[1:]], leaf.dtype] for leaf in self.layout.leaves]
        layout = WeightLayout.from_json({"leaves": leaves, "aliases": {}})
        return BatchSchema(layout, (parts * self.batch_size[0], *self.batch_size[1:]))


class BatchWriter:
    """The worker's end of its ring.

    Args:
        descriptor: The inherited memory file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._schema: BatchSchema | None = None
        self._seen: dict[str, tuple[object, ...]] = {}
        self._own: list[list[Tensor]] = []
        self._joint: list[list[Tensor]] = []

    def write(self, slot: int, batch: TensorDictBase) -> dict[str, Any]:
        """Copy a batch into a slot.

        Returns:
            The schema if this was the first batch, else an empty dict.

        Raises:
            TypeError: A leaf is no tensor.
            ValueError: The batch has other keys, shapes or dtypes than the first one.
        """
        leaves = _leaves(batch)
        seen = {name: _looks(leaf) for name, leaf in leaves.items()}
        if self._schema is not None and seen == self._seen and tuple(batch.batch_size) == self._schema.batch_size:
            if list(seen) != list(self._seen):  # the order of keys may differ
                leaves = {name: leaves[name] for name in self._seen}
            self._put(slot, leaves)
            return {}
        schema = BatchSchema(WeightLayout.of(leaves, find_aliases=False), tuple(batch.batch_size))
        if self._schema is not None:
            raise ValueError(_difference(self._schema, schema))
        self._schema, self._seen = schema, seen
        self._own = [list(schema.layout.views(memory).values()) for memory in _map_slots(self._descriptor, schema)]
        self._put(slot, leaves)
        return schema.to_json()

    def join(self, descriptor: int, parts: int, part: int) -> None:
        """Write to the joint slots of this file too, after the first batch.

        Args:
            descriptor: The memory file; not closed here.
            parts: How many workers write to each slot.
            part: Which part is this worker's.
        """
        assert self._schema is not None
        rows, whole = self._schema.batch_size[0], self._schema.joint(parts)
        self._joint = [
            [view.narrow(0, part * rows, rows) for view in whole.layout.views(memory).values()]
            for memory in _map_slots(descriptor, whole)
        ]

    def _put(self, slot: int, leaves: Mapping[str, Tensor]) -> None:
        views = self._own[slot] if slot < OWN_SLOTS else self._joint[slot - OWN_SLOTS]
        write(views, list(leaves.values()))


class BatchReader:
    """The parent's end of a worker's ring, or of joint slots.

    Args:
        descriptor: The memory file that workers have, too; of no interest once it is open.
    """

    def __init__(self, descriptor: int) -> None:
        self.schema: BatchSchema | None = None
        self._descriptor = descriptor
        self._slots: list[npt.NDArray[np.uint8]] = []
        self._leaves: Sequence[Leaf] = ()
        self._paths: list[tuple[str, ...]] = []
        self._lent: dict[int, list[weakref.ref[Any]]] = {}  # slot -> a watch for the end of each of its leaves
        self._left: Counter[int] = Counter()  # slot -> how many of its leaves are still there
        self._ended: deque[int] = deque()  # the slots of those that are not; appended to by whichever thread drops one

    def open(self, schema: Mapping[str, Any]) -> None:
        """Map the slots, as the schema that came with the first batch says.

        Raises:
            ValueError: It is none.
        """
        self.schema = BatchSchema.from_json(schema)
        self._slots = [slot.numpy() for slot in _map_slots(self._descriptor, self.schema)]
        self._leaves = self.schema.layout.leaves
        self._paths = [tuple(leaf.name.split(".")) for leaf in self._leaves]

    def read(self, slot: int) -> TensorDict:
        """The batch in a slot as views into shared memory, valid until the slot is given back."""
        return self._batch(self._pieces(slot))

    def lend(self, slot: int) -> TensorDict | None:
        """The batch in a slot as views into shared memory that stay as they are; ``None`` if too many are lent.

        How many are lent is known as of the last ``take_back``. The slot must not be named in a request before
        ``take_back`` has returned it.
        """
        if len(self._lent) == LENT_SLOTS:
            return None
        pieces, ended = self._pieces(slot), self._ended

        def end(_: weakref.ref[Any]) -> None:
            ended.append(slot)

        self._lent[slot] = [weakref.ref(piece, end) for piece in pieces]
        self._left[slot] = len(pieces)
        return self._batch(pieces)

    def take_back(self) -> list[int]:
        """The slots that were lent, and that nobody looks into any more since the last call."""
        back = []
        while self._ended:
            slot = self._ended.popleft()
            self._left[slot] -= 1
            if not self._left[slot]:
                del self._lent[slot]
                back.append(slot)
        return back

    def free_slot(self) -> int:
        """A slot that is not lent. Takes back what is not any more."""
        self.take_back()
        return min(set(range(OWN_SLOTS)) - self._lent.keys())

    def close(self) -> None:
        """Give the memory back, once nobody has a lent batch any more."""
        self._slots = []

    def _pieces(self, slot: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each leaf. Each ends with the last tensor that looks into it: nobody else will know it."""
        if not self._slots:
            raise WeightSyncError("the workers were stopped: their batches are gone")
        memory = self._slots[slot]
        return [memory[leaf.offset : leaf.offset + leaf.nbytes] for leaf in self._leaves]

    def _batch(self, pieces: Sequence[npt.NDArray[np.uint8]]) -> TensorDict:
        """The leaves, of which these are the bytes, as a batch.

        Each has a storage of its own, so that who keeps or saves one leaf does so with no other.
        """
        assert self.schema is not None
        leaves = [
            torch.from_numpy(piece).view(leaf.torch_dtype).view(leaf.shape)
            for leaf, piece in zip(self._leaves, pieces, strict=True)
        ]
        return unchecked(nested(self._paths, leaves), torch.Size(self.schema.batch_size))


def _map_slots(descriptor: int, schema: BatchSchema) -> list[Tensor]:
    nbytes = schema.layout.nbytes
    return list(map_memory(descriptor, OWN_SLOTS * nbytes).view(OWN_SLOTS, nbytes))


def _looks(leaf: Tensor) -> tuple[object, ...]:
    """Of a leaf, what decides whether it fits a layout."""
    return leaf.shape, leaf.dtype, leaf.layout, leaf.is_nested, leaf.is_meta


def plain(batch: TensorDictBase) -> TensorDict:
    """The tensors of a batch, whatever it is (a lazy stack, say), as it is after it has been in a slot.

    Raises:
        TypeError: A leaf is no tensor.
        ValueError: A key has a dot.
    """
    leaves = {tuple(name.split(".")): leaf for name, leaf in _leaves(batch).items()}
    return TensorDict(leaves, batch.batch_size)


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


def _difference(first: BatchSchema, now: BatchSchema) -> str:
    before, after = ({leaf.name: leaf.describe() for leaf in schema.layout.leaves} for schema in (first, now))
    lines = [
        f"{name}: {before.get(name, 'absent')} in the first batch, {after.get(name, 'absent')} now"
        for name in before | after
        if before.get(name) != after.get(name)
    ]
    if first.batch_size != now.batch_size:
        lines.insert(0, f"batch size {list(first.batch_size)} in the first batch, {list(now.batch_size)} now")
    return f"every batch of a collector has the shape of its first one; {'; '.join(lines)}"
