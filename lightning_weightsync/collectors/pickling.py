"""How does what the user gives a group travel to its workers? By cloudpickle, with configuration resolved before.

A node of an OmegaConf configuration that is not resolved would be resolved in the worker, where ``${hydra:...}`` means
nothing and ``${now:...}`` another time.
"""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle by cloudpickle; configuration nodes in it arrive resolved, and without what they are part of.

    Raises:
        Exception: Whatever pickling, or an interpolation, raises.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._resolved: dict[int, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        omegaconf = sys.modules.get("omegaconf")  # who has not imported it has no nodes
        if omegaconf is None or not isinstance(obj, omegaconf.DictConfig | omegaconf.ListConfig):
            return super().reducer_override(obj)
        if id(obj._get_root()) in self._resolved:
            return NotImplemented
        return _itself, (self._resolve(omegaconf.OmegaConf, obj),)

    def _resolve(self, omega_conf: Any, node: Any) -> Any:
        node = copy.deepcopy(node)  # of the same parent, which interpolations may go through
        omega_conf.resolve(node)
        node._set_parent(None)
        self._resolved[id(node)] = node
        return node


def _itself(value: Any) -> Any:
    return value
