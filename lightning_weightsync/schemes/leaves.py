"""Where do a module's tensors hang, and are they still the same? Leaves by name, found once and checked cheaply.

Walking a module's tree for each push costs more than copying a small model. So the walk is done once, and each push
only checks that every tensor still hangs where it was found, in its memory, shape and strides: replacing a
``Parameter`` (``load_state_dict(assign=True)``), adding a submodule or ``module.double()`` is noticed; reading the same
memory as another dtype of the same width (``t.data = t.data.view(...)``) is not. With thousands
of leaves even the check counts: it loops in C only. A ``state_dict`` may be made of tensors that are computed anew
each time, and a dict is quickly walked: these are asked again for each push.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from lightning_weightsync.schemes.strategy import Weights, WeightStrategy, module_of, module_parts


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
        module = module_of(source)
        self._walk_again = module is None or strategy.extract_as == "state_dict"
        homes: list[dict[str, Any]] = []
        if module is not None:
            for _, part in module_parts(module):
                homes += (part._parameters, part._buffers, part._modules)
        self._homes = [home for home in homes if home]
        self._empty = [home for home in homes if not home]
        self._things = list(chain.from_iterable(map(dict.values, self._homes)))
        self.remember_forms()

    def remember_forms(self) -> None:
        """Take the memory, shapes and strides of the moment for what they should be."""
        self._live = list(self.tensors.values())
        self._forms = [tensor.detach() for tensor in self._live]

    def stale(self) -> bool:
        """Whether there are other tensors or submodules now, or other memory, shapes or strides; values do not matter.

        Raises:
            TypeError, ValueError: The source has come to hold something that is no weight; see ``WeightStrategy``.
        """
        if any(self._empty) or sum(map(len, self._homes)) != len(self._things):
            return True
        if not all(map(is_, chain.from_iterable(map(dict.values, self._homes)), self._things)):
            return True
        if not self._in_form():
            return True
        if self._walk_again:
            now = self._strategy.leaves(self.source)
            return now.keys() != self.tensors.keys() or any(now[name] is not t for name, t in self.tensors.items())
        return False

    def _in_form(self) -> bool:
        try:
            return all(map(Tensor.is_set_to, self._live, self._forms))
        except (RuntimeError, NotImplementedError):  # it is on another device, for example
            return False
