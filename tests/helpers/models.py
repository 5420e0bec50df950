"""Small modules, each with something that is easily lost on the way from one process to another."""

from __future__ import annotations

import torch
from torch import nn


class Mixed(nn.Module):
    """Leaves of several dtypes, a 0-dim one, an empty one, a frozen one, and a buffer that is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.narrow = nn.Parameter(torch.randn(5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("nothing", None)


class Tied(nn.Module):
    """``encoder.weight`` and ``decoder.weight`` are one parameter (or, ``tied=False``, two)."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3, bias=False)
        if tied:
            self.decoder.weight = self.encoder.weight


class WithExtraState(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"n": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass
