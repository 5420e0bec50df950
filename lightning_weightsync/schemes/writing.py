"""How are tensors written in place? As one operation, without a trace for autograd, and done when it is said to be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def write(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors in place, without a trace for autograd.

    Their version counters go up: a backward pass that needs the old values raises, and is not silently wrong.
    """
    if targets:
        with torch.inference_mode():  # no_grad may not write to a model that was built in inference mode
            torch._foreach_copy_(targets, values)


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Block until what was queued for these tensors' devices, in the calling thread, is done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
