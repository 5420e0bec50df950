"""Policies that tell which weights they acted with. Workers import this, so no Lightning here."""

from __future__ import annotations

import hashlib

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn


def fingerprint(module: nn.Module) -> Tensor:
    """One float64 that differs, for all practical purposes, between any two sets of weights and buffers."""
    parts = [leaf.detach().double().sum() * (3 + k) for k, leaf in enumerate(module.state_dict().values())]
    return torch.stack(parts).sum()


def sha256(module: nn.Module) -> str:
    """Over the tensors of the module's ``state_dict``, in its order: what ``group.digest()`` is compared with."""
    sha = hashlib.sha256()
    for name, leaf in module.state_dict().items():
        if name.endswith("_extra_state"):
            continue
        sha.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Policy(nn.Module):
    """Two linear layers with a BatchNorm between them; writes ``action`` and the ``fingerprint`` of its weights.

    Args:
        seed: Of its initial weights; ``None`` leaves the global generator alone.
        width: Of the hidden layer.
        batch_norm: Whether there is one; without, the hidden layer goes straight to the head.
    """

    def __init__(self, seed: int | None = None, *, width: int = 4, batch_norm: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.body = nn.Linear(3, width)
            self.norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
            self.head = nn.Linear(width, 2)

    def logits(self, observation: Tensor) -> Tensor:
        rows = observation.reshape(-1, 3) / 2**24
        return self.head(self.norm(self.body(rows)))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        logits = self.logits(td["observation"])
        td["action"] = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        td["fingerprint"] = fingerprint(self).expand(td.batch_size).clone()
        return td


class Value(nn.Module):
    """One number: writes it when the call begins and again when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((), -1.0))
        self.register_buffer("twin", torch.full((), -1.0))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        size = td.batch_size
        td["begin"] = self.value.detach().expand(size).clone()
        # Long enough for many switches to be tried meanwhile.
        sum(float(torch.ones(64, 64).mm(torch.ones(64, 64)).sum()) for _ in range(20))
        td["end"] = self.twin.expand(size).clone()
        td["action"] = torch.zeros(size, dtype=torch.int64)
        return td
