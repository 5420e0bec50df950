"""What do a module's leaves hold? Copies, other values, and comparison bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def leaves_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters and persistent buffers."""
    return {name: leaf.detach().clone() for name, leaf in model.state_dict().items()}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, non-persistent ones too."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Other values for every parameter and persistent buffer; returns the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    return module


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Dtype, shape and bytes: equal exactly where two tensors are, NaNs and signed zeros included."""
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names and, bit for bit, equal tensors."""
    assert actual.keys() == expected.keys()
    differing = [name for name in expected if bits(actual[name]) != bits(expected[name])]
    assert differing == []


def fill(model: nn.Module, value: float) -> None:
    """Every leaf of a module holds this value, as far as its dtype can."""
    with torch.no_grad():
        for leaf in model.state_dict().values():
            leaf.fill_(value)


def scramble(tensors: Iterable[Tensor], seed: int) -> None:
    """Random bytes in every tensor, NaNs too: values that no conversion would leave as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dtype is torch.bool:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator).bool())
            elif tensor.numel():
                size = tensor.numel() * tensor.element_size()
                noise = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
                tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
