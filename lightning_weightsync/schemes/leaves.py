"""Where do a module's tensors hang, and are they still the same? Leaves by name, found once and checked cheaply.

Walking a module's tree for each push costs more than copying a small model. So the walk is done once, and each push
only checks that every tensor still hangs where it was found, in its shape and dtype: replacing a ``Parameter``
(``load_state_dict(assign=True)``), adding a submodule or ``module.double()`` is noticed. A ``state_dict`` may be made
of tensors that are computed anew each time, and a dict is quickly walked: these are asked again for each push.
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
        self._strategy = strategy
        self._forms = [(t, t.dtype, t.shape, t.stride()) for t in self.tensors.values()]
        self._homes: list[tuple[Mapping[str, Any], str, Tensor | nn.Module]] = []
        self._sizes: list[tuple[Mapping[str, Any], int]] = []
        self._walk_again = not isinstance(source, nn.Module) or strategy.extract_as == "state_dict"
        if isinstance(source, nn.Module):
            for _, part in module_parts(unwrap(source)):
                homes: list[Mapping[str, Any]] = [part._parameters, part._buffers, part._modules]
                self._homes += [
                    (home, name, thing) for home in homes for name, thing in home.items() if thing is not None
                ]
                self._sizes += [(home, len(home)) for home in homes]

    def stale(self) -> bool:
        """Whether there are other tensors or submodules now, or other shapes, strides or dtypes; values do not matter.

        Raises:
            TypeError, ValueError: The source has come to hold something that is no weight; see ``WeightStrategy``.
        """
        for home, name, thing in self._homes:
            if home.get(name) is not thing:
                return True
        if any(len(home) != size for home, size in self._sizes):
            return True
        for tensor, dtype, shape, stride in self._forms:
            if tensor.dtype is not dtype or tensor.shape != shape or tensor.stride() != stride:
                return True
        if self._walk_again:
            now = self._strategy.leaves(self.source)
            return now.keys() != self.tensors.keys() or any(now[name] is not t for name, t in self.tensors.items())
        return False
