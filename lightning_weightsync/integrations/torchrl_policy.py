"""Where does a policy that came without values get them?

TorchRL sends a policy to its workers with all tensors on the meta device. Its leaves get their values from the sender.
Buffers that are not persistent do not travel with a push: the scheme carries them as *constants* when it is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.push import is_per_worker
from lightning_weightsync.schemes.strategy import WeightStrategy, module_parts, non_persistent, unwrap
from lightning_weightsync.transports.layout import WeightLayout


def model_of(collector: Any, model_id: str) -> Any:
    """The model that a collector has under this name.

    Raises:
        ValueError: It has none.
    """
    try:
        model = collector.get_model(model_id) if hasattr(collector, "get_model") else resolve(collector, model_id)
    except (ValueError, AttributeError):
        model = None
    if model is None:
        raise ValueError(
            f"{type(collector).__name__} has no model {model_id!r}: give it policy= beside policy_factory=, or call "
            f"scheme.init_on_sender({model_id!r}, model=net, num_workers=n) before"
        )
    return model


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, on the CPU, of the buffers that are not persistent, by name."""
    names = non_persistent(model)
    return {name: b.detach().cpu().clone() for name, b in unwrap(model).named_buffers() if name in names}


def carried(weights: Any, strategy: WeightStrategy, constants: Mapping[str, Tensor]) -> Any:
    """Weights without the tensors that do not travel: ``TensorDict.from_module`` has non-persistent buffers too."""
    if not constants or not isinstance(weights, TensorDictBase | Mapping) or is_per_worker(weights):
        return weights
    return {name: leaf for name, leaf in strategy.leaves(weights).items() if name not in constants}


def materialize(model: nn.Module, constants: Mapping[str, Tensor]) -> set[str]:
    """Give memory on the CPU to tensors that are on the meta device.

    Args:
        model: Its other tensors stay what they are.
        constants: Values of the buffers that are not persistent, by name.

    Returns:
        The names of the tensors that have no values yet.
    """
    unfilled: set[str] = set()
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    for prefix, part in module_parts(unwrap(model)):
        homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for home in homes:
            tensors: dict[str, Any] = home
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _with_memory(tensor)
                tensors[name] = made[id(tensor)]
                if f"{prefix}{name}" in constants:
                    made[id(tensor)].copy_(constants[f"{prefix}{name}"])
                else:
                    unfilled.add(f"{prefix}{name}")
    return unfilled


def check_filled(model_id: str, unfilled: set[str], layout: WeightLayout) -> None:
    """See whether tensors that ``materialize`` left without values have got them from the sender.

    Raises:
        LayoutMismatchError: The sender's layout lacks some; names each.
    """
    missing = sorted(unfilled - layout.by_name.keys())
    if missing:
        raise LayoutMismatchError(
            f"{model_id!r} came to the worker without values, and the sender has none for {', '.join(missing)}: "
            "give a policy_factory",
            missing=missing,
        )


def _with_memory(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
