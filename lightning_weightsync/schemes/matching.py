"""Which live leaf takes which leaf of the sender's layout? Found by name; what does not fit is told before any byte is.

It also says which live tensors can be switched, and of which the copy can fail; how they are written is ``staging``'s.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_weightsync.schemes.extra_state import stateful_parts
from lightning_weightsync.schemes.leaves import Leaves
from lightning_weightsync.schemes.strategy import non_persistent, raise_mismatch
from lightning_weightsync.transports.layout import Leaf, WeightLayout, describe


@dataclass(frozen=True)
class Match:
    """What a layout brings to a target.

    Attributes:
        pairs: Each live tensor once, in the target's order, and the stored leaf that it takes.
        extra_parts: The submodules whose extra state comes with it, by ``state_dict`` key.
    """

    pairs: list[tuple[Tensor, Leaf]]
    extra_parts: dict[str, nn.Module]


def match(
    model_id: str, leaves: Leaves, layout: WeightLayout, *, extra_keys: Collection[str], casts: bool, strict: bool
) -> Match:
    """Compare a target with a sender's layout.

    Args:
        model_id: The destination, for errors.
        leaves: Of the target.
        layout: Of the sender.
        extra_keys: ``state_dict`` keys of the extra states that travel with it.
        casts: Whether floating-point leaves may be of another floating dtype (``wire_dtype``).
        strict: Whether every leaf of the target must be in the layout.

    Raises:
        LayoutMismatchError: They do not have the same leaves; names each.
    """
    live, target = leaves.tensors, leaves.source
    ignored = non_persistent(target) if isinstance(target, nn.Module) else set()
    offered = {name: leaf for name, leaf in layout.by_name.items() if name not in ignored}
    parts = stateful_parts(target)
    missing = [n for n in live if n not in offered] + [k for k in parts if k not in extra_keys]
    unexpected = [n for n in offered if n not in live] + [k for k in extra_keys if k not in parts]
    if not isinstance(target, nn.Module):
        unexpected = [name for name in unexpected if name not in extra_keys]
    if not strict:
        missing = []
    common = {name: live[name] for name in offered if name in live}
    mismatched = {
        name: f"sender {offered[name].describe()}, receiver {describe(tensor)}"
        for name, tensor in common.items()
        if not _fits(offered[name], tensor, casts=casts)
    }
    mismatched |= _untied(common, layout)
    mismatched |= {
        name: "cannot be written in place: its elements share memory"
        for name, tensor in common.items()
        if _overlaps(tensor)
    }
    if missing or unexpected or mismatched or not offered:
        what = f"{model_id!r} differs between sender and receiver"
        if not offered:
            what += "; no leaf in common"
        raise_mismatch(what, missing, unexpected, mismatched)
    once: dict[int, tuple[Tensor, Leaf]] = {}
    for name, tensor in live.items():
        if name in offered:
            once.setdefault(id(tensor), (tensor, offered[name]))
    return Match(list(once.values()), {key: part for key, part in parts.items() if key in extra_keys})


def has_form_of_bytes(tensor: Tensor, leaf: Leaf) -> bool:
    """Whether a parameter's values could be the leaf's bytes as they are, wherever these lie in memory of the CPU."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_cpu or tensor.is_inference():
        return False
    return type(tensor.data) is Tensor and tensor.dtype == leaf.torch_dtype and tensor.is_contiguous()


def owns_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all that lies in its storage, and the storage this process's own."""
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return False
    return not tensor.is_shared()  # type: ignore[no-untyped-call]


def copy_may_fail(tensor: Tensor, leaf: Leaf) -> bool:
    """Whether writing the leaf needs memory of a device, or code of somebody else's.

    A cast on the CPU needs neither, and a plain copy to a device is nothing but a transfer.
    """
    if type(tensor.data) is not Tensor:
        return True
    return not tensor.is_cpu and (tensor.dtype != leaf.torch_dtype or not tensor.is_contiguous())


def _fits(leaf: Leaf, live: Tensor, *, casts: bool) -> bool:
    if leaf.shape != tuple(live.shape):
        return False
    both_floating = leaf.torch_dtype.is_floating_point and live.dtype.is_floating_point
    return leaf.torch_dtype == live.dtype or (casts and both_floating)


def _overlaps(tensor: Tensor) -> bool:
    """Whether several elements lie at one address, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _untied(live: dict[str, Tensor], layout: WeightLayout) -> dict[str, str]:
    """Leaves that are one tensor here and two over there: one tensor cannot hold both."""
    return {
        alias: f"tied to {name} in the receiver, separate in the sender"
        for alias, name in WeightLayout.of(live).aliases.items()
        if layout.by_name[alias] is not layout.by_name[name]
    }
