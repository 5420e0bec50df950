"""What if the source calls its leaves other than the receiver does? Weights under other names.

Wrappers (adapters, say) put parts into names that no receiver knows. A strict receiver refuses those, with both lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from lightning_weightsync.wording import nearest_or_listed

if TYPE_CHECKING:
    from lightning_weightsync.schemes.strategy import Weights

NameMap: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""Leading parts of the source's names -> what stands there instead, or a function from name to name."""


class Renamed:
    """A source whose leaves travel under other names. Nothing is copied; it can be pushed wherever the source can.

    Args:
        source: A module, a TensorDict or a dict of tensors.
        names: A mapping from leading parts of the source's names to those of the receiver: of ``net.0.weight`` that is
            ``"net.0.weight"``, ``"net.0"``, ``"net"`` or ``""``, and the longest that is there counts. ``""`` as a
            value takes the parts away. ``None`` leaves the leaf out: it does not travel. Names that nothing is said
            about stay as they are. Or a function that does all that for one name.

    Raises:
        TypeError: ``names`` is neither, or holds something that is no string.

    Example::

        group.update_policy_weights_(Renamed(adapted, {"base_layer": "", "adapter": None}))
    """

    def __init__(self, source: Weights, names: NameMap) -> None:
        if isinstance(names, Mapping):
            wrong = [item for item in names.items() if not isinstance(item[0], str)]
            wrong += [item for item in names.items() if not (item[1] is None or isinstance(item[1], str))]
            if wrong:
                raise TypeError(f"a name map has strings, and None for leaves that stay behind; got {wrong[0]!r}")
        elif not callable(names):
            raise TypeError(f"a name map is a mapping or a function from name to name, not {type(names).__name__}")
        self.source = source
        self.names = names

    def rename(self, name: str) -> str | None:
        """The name under which a leaf of the source travels; ``None`` if it does not."""
        if not isinstance(self.names, Mapping):
            return self.names(name)
        start = _start(self.names, name)
        if start is None:
            return name
        new = self.names[start]
        return None if new is None else ".".join(filter(None, (new, name[len(start) :].lstrip("."))))

    def leaves(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The source's own leaves under their new names.

        Raises:
            ValueError: Two leaves get one name, no leaf is left, or something in the map is the beginning of no name.
        """
        if isinstance(self.names, Mapping):
            used = {_start(self.names, name) for name in own}
            unused = [start for start in self.names if start not in used]
            if unused:
                raise ValueError(
                    f"name map: no leaf begins with {unused[0]!r}{nearest_or_listed(unused[0], own, 5, 0.5)}"
                )
        renamed: dict[str, Tensor] = {}
        for name, leaf in own.items():
            new = self.rename(name)
            if new is None:
                continue
            if new in renamed:
                raise ValueError(f"name map: {name!r} is not the only leaf that gets the name {new!r}")
            renamed[new] = leaf
        if own and not renamed:
            raise ValueError(f"name map: none of the {len(own)} leaves is left")
        return renamed

    def keys(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Anything that is named like the leaves (extra state, for example) under its new names."""
        return {new: thing for name, thing in own.items() if (new := self.rename(name)) is not None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.source).__name__}, {self.names})"


def _start(names: Mapping[str, str | None], name: str) -> str | None:
    """The longest key that is the beginning of a name, by whole parts."""
    start = name
    while start not in names:
        if not start:
            return None
        start = start.rpartition(".")[0]
    return start
