"""How does a module's ``get_extra_state`` travel? As bytes beside the leaves, read with torch's weights-only loader.

Running statistics that are no buffers live there. What the loader refuses (arbitrary objects) is refused on the
sender already, and names the module: nothing that arrives is ever unpickled freely.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_weightsync.schemes.renamed import Renamed
from lightning_weightsync.schemes.strategy import EXTRA_STATE, Weights, clean_name, module_of, module_parts
from lightning_weightsync.transports.control import MAX_BLOB


def stateful_parts(source: Weights) -> dict[str, nn.Module]:
    """The submodules that have extra state, by the ``state_dict`` key of it."""
    if isinstance(source, Renamed):
        return source.keys(stateful_parts(source.source))
    module = module_of(source)
    return {
        clean_name(f"{prefix}{EXTRA_STATE}"): part
        for prefix, part in (module_parts(module) if module is not None else ())
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def pack(parts: Mapping[str, nn.Module]) -> bytes:
    """The extra state of each submodule, as bytes; empty if there is none. The modules are only read.

    Raises:
        TypeError: A state cannot be read back with the weights-only loader, or is too large; names the module.
    """
    if not parts:
        return b""
    packed = io.BytesIO()
    states = {}
    for key, part in parts.items():
        states[key] = state = part.get_extra_state()
        one = io.BytesIO()
        try:
            torch.save(state, one)
            one.seek(0)
            torch.load(one, weights_only=True)
        except Exception as error:
            raise TypeError(
                f"the extra state of {key.removesuffix('.' + EXTRA_STATE)!r} ({type(part).__name__}) cannot be "
                f"carried: torch.load(weights_only=True) does not read it back: {str(error).splitlines()[0]}"
            ) from error
    torch.save(states, packed)
    data = packed.getvalue()
    if len(data) > MAX_BLOB:
        raise TypeError(f"the extra state of {sorted(parts)} takes {len(data)} bytes; at most {MAX_BLOB} are carried")
    return data


def unpack(data: bytes) -> dict[str, Any]:
    """What ``pack`` made, read with the weights-only loader."""
    states: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True) if data else {}
    return states
