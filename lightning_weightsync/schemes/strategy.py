"""Which tensors are "the weights"? Turns modules, TensorDicts and dicts into named leaves, and has models load them.

Names are those of ``state_dict()``, whatever wrapper the module is in: ``torch.compile`` and DDP leave no prefix.
Carried are parameters and persistent buffers. Nothing here copies a tensor, except ``apply_weights``, which is told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn, TypeAlias

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.schemes.options import choose
from lightning_weightsync.schemes.renamed import Renamed
from lightning_weightsync.schemes.writing import write
from lightning_weightsync.transports.layout import WeightLayout, describe, digest_of

StrategyName = Literal["tensordict", "state_dict"]
Weights: TypeAlias = nn.Module | TensorDictBase | Mapping[str, Any] | Renamed
"""What a push can be given: a module, a TensorDict, a flat or nested dict of tensors, or one of these ``Renamed``."""

_COMPILED = "_orig_mod"
EXTRA_STATE = "_extra_state"
"""Last part of the ``state_dict`` key under which a module keeps what it returns from ``get_extra_state``."""


class WeightStrategy:
    """How weights are taken from a source and written to a model.

    Args:
        extract_as: ``"tensordict"`` copies leaf by leaf into the model's own tensors; ``"state_dict"`` goes through the
            model's ``load_state_dict``, for models with hooks of their own there.
    """

    def __init__(self, extract_as: StrategyName = "tensordict") -> None:
        choose("strategy", extract_as, ("tensordict", "state_dict"))
        self.extract_as = extract_as

    def leaves(self, source: Weights) -> dict[str, Tensor]:
        """Named references to the tensors of a source, in its order; nothing is copied.

        Raises:
            TypeError: The source is none of the above, or holds something that is no tensor; names it.
            ValueError: A module has parameters that are not initialised yet or were emptied by a sharding engine, or
                two leaves of a dict have one name.
        """
        if isinstance(source, Renamed):
            return source.leaves(self.leaves(source.source))
        if isinstance(source, nn.Module):
            module = unwrap(source)
            pairs = _state_dict_leaves(module) if self.extract_as == "state_dict" else _module_leaves(module)
        elif isinstance(source, TensorDictBase):
            pairs = _mapping_leaves(source.to_dict(convert_tensors=False), "")
        elif isinstance(source, Mapping):
            pairs = _mapping_leaves(source, "")
        else:
            raise TypeError(f"weights are an nn.Module, a TensorDict or a dict of tensors, not {type(source).__name__}")
        leaves: dict[str, Tensor] = {}
        for raw_name, tensor in pairs:
            name = clean_name(raw_name)
            if name in leaves:
                raise ValueError(f"weights: two leaves have the name {name!r}")
            leaves[name] = tensor
        return leaves

    def extract_weights(self, source: Weights) -> TensorDict | dict[str, Tensor]:
        """References to the leaves: a nested TensorDict (``"tensordict"``) or a flat dict (``"state_dict"``)."""
        leaves = {name: leaf.detach() for name, leaf in self.leaves(source).items()}
        return leaves if self.extract_as == "state_dict" else nested(leaves)

    def apply_weights(self, destination: nn.Module, weights: Any, inplace: bool = True) -> None:
        """Copy weights into a module; every ``Parameter`` keeps its identity, with ``inplace=False`` too.

        Raises:
            LayoutMismatchError: A leaf is missing, unexpected, or of another shape or dtype; nothing was copied.
        """
        target, source = self.leaves(destination), self.leaves(weights)
        missing = [name for name in target if name not in source]
        unexpected = [name for name in source if name not in target]
        mismatched = {
            name: f"given {describe(source[name])}, model {describe(target[name])}"
            for name in target
            if name in source and describe(source[name]) != describe(target[name])
        }
        for alias, name in WeightLayout.of(target).aliases.items():
            if alias in source and name in source and not same_values(source[alias], source[name]):
                mismatched[alias] = f"tied to {name} in the model, and given another value"
        if missing or unexpected or mismatched:
            raise_mismatch("the weights do not fit the model", missing, unexpected, mismatched)
        if self.extract_as == "state_dict":
            load_state(destination, source, strict=True)
        else:
            write(list(target.values()), [source[name] for name in target])


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(module, _COMPILED, None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def module_of(source: object) -> nn.Module | None:
    """The module that weights are read from, if it is one; without what ``torch.compile`` and DDP wrap around it."""
    if isinstance(source, Renamed):
        return module_of(source.source)
    return unwrap(source) if isinstance(source, nn.Module) else None


def non_persistent(source: object) -> set[str]:
    """Names of the buffers that ``state_dict()`` leaves out, and so do we; none if the source is no module."""
    if isinstance(source, Renamed):
        return set(source.keys(dict.fromkeys(non_persistent(source.source))))
    module = module_of(source)
    return {
        clean_name(f"{prefix}{name}")
        for prefix, part in (module_parts(module) if module is not None else ())
        for name in part._non_persistent_buffers_set
    }


def module_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every submodule with its dotted prefix, in ``state_dict`` order, shared ones once for each name."""
    for path, part in module.named_modules(remove_duplicate=False):
        yield (f"{path}." if path else ""), part


def is_extra_state(name: str) -> bool:
    """Whether a ``state_dict`` key is that of a module's extra state."""
    return name.rpartition(".")[2] == EXTRA_STATE


def nested(leaves: Mapping[str, Tensor]) -> TensorDict:
    """Dotted names as a nested TensorDict."""
    return TensorDict({tuple(name.split(".")): leaf for name, leaf in leaves.items()}, batch_size=[])


def clean_name(name: str) -> str:
    """A leaf's name without the parts that ``torch.compile`` puts in."""
    return ".".join(part for part in name.split(".") if part != _COMPILED) if _COMPILED in name else name


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit (NaNs too), in dtype and in shape."""
    return describe(one) == describe(other) and digest_of([one]) == digest_of([other])


def load_state(module: nn.Module, values: Mapping[str, Tensor], *, strict: bool) -> None:
    """Have a module load copies of these leaves in its own way: it may keep or change what it is given."""
    module = unwrap(module)
    state = module.state_dict()  # for its keys, and its metadata: without them a module takes it for an older format
    for key in list(state):
        if clean_name(key) in values:
            state[key] = values[clean_name(key)].detach().clone()
        elif not is_extra_state(key):  # carried apart from the tensors: the module keeps its own
            del state[key]
    module.load_state_dict(state, strict=strict)


def raise_mismatch(what: str, missing: list[str], unexpected: list[str], mismatched: Mapping[str, str]) -> NoReturn:
    """Raise the error that names every leaf.

    Raises:
        LayoutMismatchError: Always.
    """
    parts = [what]
    if missing:
        parts.append(f"missing from the sender: {', '.join(missing)}")
    if unexpected:
        parts.append(f"unknown to the receiver: {', '.join(unexpected)}")
    parts += [f"{name}: {text}" for name, text in mismatched.items()]
    raise LayoutMismatchError("; ".join(parts), missing=missing, unexpected=unexpected, mismatched=dict(mismatched))


def _module_leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in module_parts(module):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or name in part._non_persistent_buffers_set:
                continue
            if is_lazy(tensor):
                raise ValueError(
                    f"parameter {prefix}{name} is not initialised yet: call the module once before it is synced"
                )
            if hasattr(tensor, "ds_id"):
                raise ValueError(
                    f"parameter {prefix}{name} belongs to a sharding engine (DeepSpeed ZeRO-3), which keeps its values "
                    "elsewhere: gather the parameters, and push a dict of them"
                )
            yield f"{prefix}{name}", tensor


def _state_dict_leaves(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for _ in _module_leaves(module):  # for its checks
        pass
    state = module.state_dict(keep_vars=True)
    yield from _mapping_leaves({key: value for key, value in state.items() if not is_extra_state(key)}, "")


def _mapping_leaves(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in mapping.items():
        if is_extra_state(str(key)):
            continue  # carried apart from the tensors, and only from a module
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, TensorDictBase):
            yield from _mapping_leaves(value.to_dict(convert_tensors=False), f"{prefix}{key}.")
        elif isinstance(value, Mapping):
            yield from _mapping_leaves(value, f"{prefix}{key}.")
        else:
            raise TypeError(f"weights: {prefix}{key} is {type(value).__name__}, not a tensor")
