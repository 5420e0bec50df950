"""How do many leaves get into one slot quickly? Neighbours that are small travel together, as bytes.

A copy of a small tensor is all overhead, so runs of small leaves are concatenated into the part of the slot that they
fill, padding included: one operation for a whole model, in the usual case. Large leaves, and those that need a cast or
lie elsewhere than in one piece on the CPU, are copied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_weightsync.schemes.strategy import write
from lightning_weightsync.transports.layout import Leaf, WeightLayout
from lightning_weightsync.transports.slots import Slot

_SMALL = 64 << 10


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
    """

    def __init__(self, layout: WeightLayout, tensors: Sequence[Tensor]) -> None:
        self._runs: list[_Run] = []
        self._single: list[int] = []
        self._tensors: list[Tensor] = []
        pending: list[tuple[int, Leaf, Tensor]] = []
        for position, (leaf, tensor) in enumerate(zip(layout.leaves, tensors, strict=True)):
            if _is_small(leaf, tensor):
                pending.append((position, leaf, tensor))
                continue
            self._flush(pending)
            self._alone(position, tensor)
        self._flush(pending)

    def copy_to(self, slot: Slot) -> None:
        """Copy the values of now."""
        with torch.inference_mode():
            for run in self._runs:
                torch.cat(run.parts, out=slot.memory[run.start : run.end])
        if self._single:
            views = slot.views
            write([views[position] for position in self._single], self._tensors)

    def _alone(self, position: int, tensor: Tensor) -> None:
        self._single.append(position)
        self._tensors.append(tensor)

    def _flush(self, pending: list[tuple[int, Leaf, Tensor]]) -> None:
        if len(pending) < 2:
            for position, _, tensor in pending:
                self._alone(position, tensor)
        else:
            run = _Run(pending[0][1].offset, pending[0][1].offset)
            for _, leaf, tensor in pending:
                if leaf.offset > run.end:
                    run.parts.append(torch.zeros(leaf.offset - run.end, dtype=torch.uint8))
                run.parts.append(tensor.detach().view(-1).view(torch.uint8))
                run.end = leaf.offset + leaf.nbytes
            self._runs.append(run)
        pending.clear()


def _is_small(leaf: Leaf, tensor: Tensor) -> bool:
    if not 0 < leaf.nbytes < _SMALL or tensor.dtype != leaf.torch_dtype or not tensor.is_cpu:
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
