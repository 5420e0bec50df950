"""Where does the memory of batches that are copied come from? From those that nobody has any more.

Large new memory is mapped page by page while it is first written, which takes several times as long as the copy itself,
and is given back to the system when the batch is dropped. Here it is kept for a later batch. A tensor owns its memory
as long as it, or any view of it, lives: a batch stays as it is however long it is kept, and memory is used again only
when the last tensor in it is gone.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor

from lightning_weightsync.schemes.gather import move

SMALL = 1 << 18
"""Bytes below which a column comes from torch's allocator, which reuses memory of that size by itself."""

KEPT = 4
"""How many unused pieces of memory of one size are kept: what one batch has of them, as a rule two."""

Memory: TypeAlias = "npt.NDArray[np.uint8]"


class BatchMemory:
    """Makes batches in memory that is used again. Any thread may drop a batch; one makes them. Pickled, it is empty."""

    def __init__(self) -> None:
        self._unused: dict[int, deque[Memory]] = {}

    def concatenated(self, batches: Sequence[TensorDict]) -> TensorDict:
        """A copy of these batches, one after the other along dimension 0; of a single one too.

        Raises:
            RuntimeError: They differ in more than the size of dimension 0.
        """
        first = batches[0]
        columns = [_columns(batch) for batch in batches]
        if any(others != columns[0] for others in columns[1:]):
            raise RuntimeError(f"the workers' batches have different columns: {columns}")
        rows = sum(batch.shape[0] for batch in batches)
        made: TensorDict = first.apply(
            lambda leaf: self._empty((rows, *leaf.shape[1:]), leaf.dtype), batch_size=[rows, *first.shape[1:]]
        )
        moves: list[tuple[int, int, int]] = []
        for key, target in made.items(include_nested=True, leaves_only=True):
            parts = [batch.get(key) for batch in batches]
            if target.nbytes < SMALL or not all(part.is_contiguous() and part.is_cpu for part in parts):
                torch.cat(parts, dim=0, out=target)
                continue
            place = target.data_ptr()
            for part in parts:
                moves.append((place, part.data_ptr(), part.nbytes))
                place += part.nbytes
        move(moves)
        return made

    def clear(self) -> None:
        """Keep no unused memory, and none that is dropped from now on of batches that were made before."""
        self._unused = {}

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        return BatchMemory, ()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype)
        unused = self._unused.setdefault(size, deque(maxlen=KEPT))
        try:
            memory = unused.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        # The tensor's storage is the only one that knows this array, which therefore ends with the last view of it.
        lease = memory[:]
        weakref.finalize(lease, unused.append, memory).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)


def _columns(batch: TensorDict) -> dict[NestedKey, tuple[torch.Size, torch.dtype]]:
    leaves = batch.items(include_nested=True, leaves_only=True)
    return {key: (leaf.shape[1:], leaf.dtype) for key, leaf in leaves}
