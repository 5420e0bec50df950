"""Where do a module's tensors hang, and are they still the same? Leaves by name, found once and checked cheaply.

Walking a module's tree for each push costs more than copying a small model. So the walk is done once, and each push
only checks that every tensor still hangs where it was found: replacing a ``Parameter``
(``load_state_dict(assign=True)``) or adding a submodule is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_weightsync.schemes.strategy import Weights, WeightStrategy, module_parts, unwrap


class Leaves:
    """Named references to the live tensors of a module, TensorDict or dict.

    Args:
        source: What holds them.
        strategy: How they are found.

    Attributes:
        tensors: By dotted name, in the source's order.
    """

    def __init__(self, source: Weights, strategy: WeightStrategy) -> None:
        self.source = source
        self.tensors: dict[str, Tensor] = strategy.leaves(source)
        self._homes: list[tuple[Mapping[str, Any], str, Tensor]] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        if isinstance(source, nn.Module):
            for _, part in module_parts(unwrap(source)):
                for home in (part._parameters, part._buffers):
                    self._homes += [(home, name, tensor) for name, tensor in home.items() if tensor is not None]
                self._sizes += [(home, len(home)) for home in (part._parameters, part._buffers, part._modules)]

    def stale(self) -> bool:
        """Whether the module has other tensors or submodules now; the values do not matter."""
        for home, name, tensor in self._homes:
            if home.get(name) is not tensor:
                return True
        return any(len(home) != size for home, size in self._sizes)
