"""How do the values of a space become arrays, and arrays values? A tree of spaces is a list of leaves.

Observations and actions are trees (``Dict`` and ``Tuple`` spaces) whose leaves are arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

Arrays: TypeAlias = "list[npt.NDArray[Any]]"
"""One for each leaf of a space."""

Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Leaf(NamedTuple):
    """One array of a space: its path in a batch, how it is reached in a value of the space, and what it is."""

    path: tuple[str, ...]
    keys: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    space: Space[Any]

    def of(self, value: Any) -> Any:
        """The leaf of a value of the space."""
        for key in self.keys:
            value = value[key]
        return value


def leaves_of(space: Space[Any], *path: str) -> list[Leaf]:
    """The leaves of a space; their paths begin with ``path``, or with ``"observation"``.

    Raises:
        TypeError: A leaf is no array of one shape.
    """
    return list(_leaves(space, path or ("observation",), (), space))


def _leaves(space: Space[Any], path: tuple[str, ...], keys: tuple[Any, ...], root: Space[Any]) -> Iterator[Leaf]:
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _leaves(part, (*path, str(key)), (*keys, key), root)
    elif isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete):
        assert space.shape is not None
        yield Leaf(path, keys, space.shape, space.dtype, space)
    else:
        raise TypeError(
            f"{path[0]} space {root}: {space} is not an array of one shape: wrap the environment, with "
            "gymnasium.wrappers.FlattenObservation or TransformAction for example"
        )


def tree_of(space: Space[Any], arrays: Iterator[Any]) -> Any:
    """The leaves of a space, put together again: nested dicts and tuples, as gymnasium has them."""
    if isinstance(space, Dict):
        return {key: tree_of(part, arrays) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(tree_of(part, arrays) for part in space.spaces)
    return next(arrays)


def checked(leaf: Leaf, array: npt.NDArray[Any], num_envs: int) -> npt.NDArray[Any]:
    """The array, ``[num_envs, *shape]`` in the leaf's dtype.

    Raises:
        ValueError: It has another shape, or a dtype that is not of the same kind.
    """
    if array.shape != (num_envs, *leaf.shape):
        raise ValueError(_unlike(leaf, array.shape[1:], array.dtype))
    if array.dtype != leaf.dtype:
        if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            raise ValueError(_unlike(leaf, array.shape[1:], array.dtype))
        array = array.astype(leaf.dtype)
    return array


def _unlike(leaf: Leaf, shape: tuple[int, ...], dtype: npt.DTypeLike) -> str:
    return (
        f"an environment returned {'.'.join(leaf.path)} of shape {shape} and dtype {dtype}; its observation space says "
        f"{leaf.shape} and {leaf.dtype}"
    )
