"""Which models are pushed? One small, one of many leaves, one large; all float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """A model to measure with.

    Attributes:
        name: As on the command line.
        build: Makes it; called in the sender and in each receiver.
    """

    name: str
    build: Callable[[], nn.Module]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def _many() -> nn.Module:
    return nn.ModuleList(nn.Linear(1, 512) for _ in range(500))  # a weight and a bias of 2,048 bytes each


def _large() -> nn.Module:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


KINDS = {kind.name: kind for kind in (Kind("mlp", _mlp), Kind("many", _many), Kind("large", _large))}


def leaves(model: nn.Module) -> list[Tensor]:
    """The tensors of a model, detached."""
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def size(model: nn.Module) -> int:
    """Bytes of all leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(model))


def change(model: nn.Module) -> None:
    """Give the model other values, as an optimizer would."""
    for leaf in leaves(model):
        leaf.add_(torch.rand(()))


def checksum(tensors: Iterable[Tensor]) -> int:
    """Exact and the same in every process, whatever the number of threads: over the bits, as integers."""
    total = 0
    for position, tensor in enumerate(tensors, start=1):
        total += position * int(tensor.contiguous().view(torch.int32).sum(dtype=torch.int64))
    return total
