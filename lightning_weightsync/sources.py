"""WHAT does the callback push? The weights of each destination: mapped sources, or what a getter returns.

A source path is followed again for each push. So what a module puts in the place of what was there (a new network, an
optimizer's average) is what travels; and a path may name a property, or a method without arguments, that makes weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_weightsync.paths import parse_path, read_map, resolve_first
from lightning_weightsync.schemes.renamed import NameMap, Renamed


class Sources:
    """Destination -> weights, as they are at the moment.

    Args:
        weight_update_map: Destination -> source path, or lines ``"destination=source"``. Wins over the getter.
        getter: Called without arguments for the weights of the only destination, or for those of each by destination.
        name_map: Destination -> how the source's leaf names become the receiver's, see ``Renamed``.

    Raises:
        PathError: A path cannot be read.
        TypeError: A map of another kind.
        ValueError: ``name_map`` names a destination that is not mapped.
    """

    def __init__(
        self,
        weight_update_map: Mapping[str, str] | Iterable[str] | None,
        getter: Callable[[], Any] | None,
        name_map: Mapping[str, NameMap] | None = None,
    ) -> None:
        self.map = None if weight_update_map is None else read_map(weight_update_map)
        self.getter = getter if self.map is None else None
        self.name_map: dict[str, NameMap] = dict(name_map or {})
        unmapped = [name for name in self.name_map if name not in (self.map or {})]
        if unmapped:
            raise ValueError(f"name_map is for {unmapped[0]!r}, and weight_update_map has {sorted(self.map or {})}")
        for names in self.name_map.values():
            Renamed({}, names)  # for its checks
        self._paths = {name: parse_path(path) for name, path in (self.map or {}).items()}
        self._roots: list[tuple[str, object]] = []
        self._renamed: dict[str, Renamed] = {}

    def bind(self, module: object, trainer: object) -> None:
        """Follow the paths from these objects from now on."""
        self._roots = [("LightningModule", module), ("Trainer", trainer)]

    def resolve(self) -> dict[str, Any]:
        """What the paths name: modules, TensorDicts, dicts, and methods that have not been called.

        Raises:
            PathError: A path names nothing; tells where it fails, and the nearest names.
            RuntimeError: There is nothing yet to follow them from.
        """
        return {name: self.source_of(name) for name in self._paths}

    def source_of(self, destination: str) -> Any:
        """What the path of one mapped destination names; raises what `resolve` raises."""
        if not self._roots:
            raise RuntimeError("source paths are followed from a module and a trainer: bind() comes first")
        return resolve_first(self._roots, self._paths[destination])

    def weights(self) -> dict[str, Any]:
        """The weights of each mapped destination, under the receiver's names."""
        return {name: self.weights_of(name) for name in self._paths}

    def weights_of(self, destination: str) -> Any:
        """The weights of one mapped destination, under the receiver's names; raises what `resolve` raises."""
        source = self.source_of(destination)
        weights = source() if callable(source) and not isinstance(source, nn.Module) else source
        return self._under_other_names(destination, weights) if destination in self.name_map else weights

    def parameters(self) -> list[Tensor] | None:
        """Those of the mapped modules; ``None`` where it cannot be known what is pushed.

        That is with a getter, with a sender, and where a path names a method.
        """
        sources = list(self.resolve().values())
        if not sources or any(callable(source) and not isinstance(source, nn.Module) for source in sources):
            return None
        return [p for source in sources if isinstance(source, nn.Module) for p in source.parameters()]

    def _under_other_names(self, destination: str, source: Any) -> Renamed:
        """The same object for the same source: who has seen it need not look for its leaves again."""
        known = self._renamed.get(destination)
        if known is None or known.source is not source:
            known = self._renamed[destination] = Renamed(source, self.name_map[destination])
        return known

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_roots": [], "_renamed": {}}

    def __repr__(self) -> str:
        if self.map is None and self.getter is None:
            return "its own weights"
        of = str(self.map) if self.map is not None else f"{getattr(self.getter, '__name__', self.getter)}()"
        return f"{of}, renamed {sorted(self.name_map)}" if self.name_map else of
