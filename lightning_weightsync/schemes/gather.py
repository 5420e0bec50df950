"""How do leaves get into a slot quickly, on a machine whose cores are busy?

A copy of a small tensor is all overhead, and torch's first operation after a while costs as much as fifty: a few small
leaves are moved as bytes (docs/performance.md). Long runs of small leaves are concatenated into the part of the slot
that they fill, padding included: one operation for a whole model of many. Large leaves are moved by the calling thread
and one helper, piece by piece: torch's parallel copy takes ten times as long where its threads must wait for a core.
Leaves that need a cast, or lie elsewhere than in one piece on the CPU, are torch's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from lightning_weightsync.schemes.writing import wait_for_devices, write
from lightning_weightsync.transports.comparing import same_bytes
from lightning_weightsync.transports.layout import Leaf, WeightLayout
from lightning_weightsync.transports.slots import Slot

_LARGE = 64 << 10
_FEW = 64
_PIECE = 2 << 20
_WORTH_A_HELPER = 32 << 20


@dataclass
class _Run:
    """Neighbours in a slot.

    Attributes:
        start: First byte.
        end: One past the last one.
        parts: The bytes, as views of the live leaves, and zeros for the padding between them.
    """

    start: int
    end: int
    parts: list[Tensor] = field(default_factory=list)


class Gather:
    """The copy of certain tensors into slots of their layout, planned once.

    Args:
        layout: Of the slots.
        tensors: The live tensors of its stored leaves, in its order; read by each ``copy_to``. They must stay in their
            memory: make another one when ``Leaves`` says that they have not.
        join: Whether to join small leaves, which pays for tensors that are copied more than once, and as a whole.
    """

    def __init__(self, layout: WeightLayout, tensors: Sequence[Tensor], *, join: bool = True) -> None:
        self._tensors = list(tensors)
        self._runs: list[_Run] = []
        self._moved: list[tuple[Leaf, Tensor]] = []
        self._others: list[tuple[int, int, Tensor]] = []
        run: list[tuple[Leaf, Tensor]] = []
        for position, (leaf, tensor) in enumerate(zip(layout.leaves, tensors, strict=True)):
            if not _is_plain(leaf, tensor):
                self._others.append((leaf.offset, position, tensor))
            elif join and leaf.nbytes < _LARGE:
                run.append((leaf, tensor))
                continue
            else:
                self._moved.append((leaf, tensor))
            self._end(run)
        self._end(run)

    def copy_to(self, slot: Slot) -> None:
        """Copy the values of now; they are there when this returns."""
        if not slot.memory.is_cpu:
            write(slot.views, self._tensors)
            wait_for_devices([slot.memory])
            return
        self._copy_by_torch(slot)
        start = slot.memory.data_ptr()
        move([(start + leaf.offset, tensor.data_ptr(), leaf.nbytes) for leaf, tensor in self._moved])

    def copy_in_order_to(self, slot: Slot) -> Iterator[int]:
        """The same, into a slot on the CPU, from its first byte to its last; yields up to where it has come.

        Only the calling thread copies: whoever reads along needs the other core.
        """
        base = slot.memory.data_ptr()
        parts: list[tuple[int, Callable[[], Iterator[int]]]] = []
        parts += [(run.start, partial(_join_piece, run, slot)) for run in self._runs]
        parts += [(leaf.offset, partial(_move_pieces, leaf, tensor, base)) for leaf, tensor in self._moved]
        parts += [
            (start, partial(_write_one, slot.views[at], tensor)) for start, at, tensor in self._others if tensor.numel()
        ]
        for start, copy in sorted(parts, key=itemgetter(0)):
            yield start
            yield from copy()

    def copy_changed_to(self, slot: Slot) -> int:
        """Copy the values of now where the slot holds others; returns how many bytes were there already.

        To compare costs half a copy where they are equal, and next to nothing where they differ.
        """
        self._copy_by_torch(slot)
        saved, start = 0, slot.memory.data_ptr()
        for leaf, tensor in self._moved:
            if same_bytes(start + leaf.offset, tensor.data_ptr(), leaf.nbytes):
                saved += leaf.nbytes
            else:
                ctypes.memmove(start + leaf.offset, tensor.data_ptr(), leaf.nbytes)
        return saved

    def _copy_by_torch(self, slot: Slot) -> None:
        for run in self._runs:
            _join(run, slot)
        write([slot.views[at] for _, at, _ in self._others], [tensor for *_, tensor in self._others])

    def _end(self, run: list[tuple[Leaf, Tensor]]) -> None:
        if len(run) < _FEW:
            self._moved += run
        else:
            joined = _Run(run[0][0].offset, run[0][0].offset)
            for leaf, tensor in run:
                if leaf.offset > joined.end:
                    joined.parts.append(torch.zeros(leaf.offset - joined.end, dtype=torch.uint8))
                joined.parts.append(tensor.detach().view(-1).view(torch.uint8))
                joined.end = leaf.offset + leaf.nbytes
            self._runs.append(joined)
        run.clear()


def move(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy ``nbytes`` from one address to another, for each (target, source, nbytes), where it is much with a helper.

    The two take pieces from one heap: a helper that gets no core holds up one piece, and not all of them. How many
    threads torch may compute with says nothing about it: ``torchrun``, and TorchRL's collectors, set that to one.
    """
    if sum(map(itemgetter(2), copies)) < _WORTH_A_HELPER or _cores() == 1:
        for target, source, nbytes in copies:
            ctypes.memmove(target, source, nbytes)
        return
    pieces = deque(piece for copy in copies for piece in _pieces_of(*copy))

    def work() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                ctypes.memmove(*pieces.popleft())

    helper = threading.Thread(target=work, name="weight-sync-copy", daemon=True)
    try:
        helper.start()
        work()
    finally:
        pieces.clear()  # after Ctrl-C: the target may be given to somebody else
        if helper.is_alive():
            helper.join()


def _cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pieces_of(target: int, source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    for done in range(0, nbytes, _PIECE):
        yield target + done, source + done, min(_PIECE, nbytes - done)


def _join(run: _Run, slot: Slot) -> None:
    with torch.inference_mode():
        torch.cat(run.parts, out=slot.memory[run.start : run.end])


def _join_piece(run: _Run, slot: Slot) -> Iterator[int]:
    _join(run, slot)
    yield run.end


def _move_pieces(leaf: Leaf, tensor: Tensor, base: int) -> Iterator[int]:
    for target, source, size in _pieces_of(base + leaf.offset, tensor.data_ptr(), leaf.nbytes):
        ctypes.memmove(target, source, size)
        yield target + size - base


def _write_one(view: Tensor, tensor: Tensor) -> Iterator[int]:
    write([view], [tensor])
    yield from ()


def _is_plain(leaf: Leaf, tensor: Tensor) -> bool:
    """Whether its bytes are the leaf's, in one piece."""
    if leaf.nbytes == 0 or type(tensor.data) is not Tensor:  # a subclass may keep its values elsewhere
        return False
    if tensor.dtype != leaf.torch_dtype or not tensor.is_cpu or not tensor.is_contiguous():
        return False
    return not tensor.is_conj() and not tensor.is_neg()
