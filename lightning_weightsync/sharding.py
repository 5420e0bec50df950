"""Are parameters whole in this process? A rank whose parameters are spread over others cannot push them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_SHARDING_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")
_WAY_OUT = (
    "UpdateWeights pushes whole parameters: train with strategy='ddp', where each rank holds them all, or, instead of "
    "weight_update_map, give a policy_weights_getter that gathers them and returns a dict of whole tensors (all ranks "
    "call it at the same pushes)"
)


def sharding_strategy(strategy: object) -> str | None:
    """Why sources cannot be read under a Lightning strategy, or ``None`` if each rank has whole parameters.

    DeepSpeed's stages 1 and 2 leave parameters whole.
    """
    for cls in type(strategy).__mro__:
        if cls.__name__ in _SHARDING_STRATEGIES and getattr(strategy, "zero_stage_3", True):
            return f"{type(strategy).__name__} spreads parameters over its ranks, and {_WAY_OUT}"
    return None


def sharded_parameter(sources: Mapping[str, Any]) -> str | None:
    """The first parameter of these sources that is not whole in this process, in words; ``None`` if all are.

    Args:
        sources: By destination; what is no module is left alone.
    """
    for destination, source in sources.items():
        for name, parameter in source.named_parameters() if isinstance(source, nn.Module) else ():
            why = _sharded(parameter)
            if why is not None:
                return f"parameter {name!r} of what goes to {destination!r} {why}, and {_WAY_OUT}"
        for name, module in source.named_modules() if isinstance(source, nn.Module) else ():
            if type(module).__name__ == "FullyShardedDataParallel":
                return f"module {name!r} of what goes to {destination!r} is sharded (FSDP), and {_WAY_OUT}"
    return None


def _sharded(parameter: nn.Parameter) -> str | None:
    if hasattr(parameter, "ds_id"):
        return "is kept by DeepSpeed's ZeRO-3, which has emptied it"
    if getattr(parameter, "_is_flat_param", False):
        return "is a flat parameter of FSDP"
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return "is spread over ranks (DTensor)"
    return None
