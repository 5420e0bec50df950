"""Which source goes to which destination, by which scheme? From the map's two forms, and the schemes' two nodes.

    callbacks.*.weight_update_map    {destination: source}, or ["destination=source", ...]
    weight_sync_schemes              {destination: scheme}: exact
    weight_sync_scheme               the scheme of every destination that is not among those, an instance for each

Nothing may be left over: a destination without a scheme is an error, and so is a scheme without a destination.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.commands.schema import MISSING
from lightning_weightsync.paths import PathError, read_map
from lightning_weightsync.wording import nearest

KEY = "weight_update_map"


def as_mapping(given: Any, key: str) -> dict[str, str] | None:
    """A map in either form as a mapping, see ``paths.read_map``; ``None`` for ``None``.

    Args:
        given: As YAML has it. The list can hold what Hydra's command line cannot have in a key:
            ``"replay_buffer.transforms[0]=critic"``.
        key: Where it is, for messages.

    Raises:
        ConfigError: It is no map, or a source is not filled in.

    Example:
        >>> as_mapping(["policy=actor", "replay_buffer.transforms[0]=critic"], "weight_update_map")
        {'policy': 'actor', 'replay_buffer.transforms[0]': 'critic'}
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        open_ones = [name for name, source in given.items() if source == MISSING]
        if open_ones:
            named = "name its source on the module, for example 'actor'"
            raise ConfigError([f"{key}.{destination} has no value (???): {named}" for destination in open_ones])
    try:
        return read_map(given)
    except (PathError, TypeError) as error:
        raise ConfigError(f"{key}: {error}") from None


def scheme_nodes(destinations: list[str], exact: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The node that makes each destination's scheme.

    Args:
        destinations: Those of the map.
        exact: ``weight_sync_schemes``.
        default: ``weight_sync_scheme``; ``None`` if there is none.

    Raises:
        ConfigError: A destination without a scheme, or a scheme without a destination; shows both lists.
    """
    extra = [name for name in exact if name not in destinations]
    missing = [name for name in destinations if name not in exact] if default is None else []
    if extra or missing:
        what = []
        if missing:
            what.append(f"without a scheme: {missing} (add weight_sync_scheme, a default for all, or an entry each)")
        for name in extra:
            what.append(f"a scheme without a source: {name!r}{nearest(name, destinations)}")
        raise ConfigError(
            f"weight_update_map has the destinations {sorted(destinations)}, weight_sync_schemes {sorted(exact)}; "
            + "; ".join(what)
        )
    return {name: exact.get(name, default) for name in destinations}
