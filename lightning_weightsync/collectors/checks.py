"""Have environments and policy given each other what their spaces promise? And if not: who, what, and in which step?

A check of every step would cost a tenth of a cheap environment's step. A whole batch is looked at in a few dozen
microseconds, before anybody learns from it; what raises in the middle of a batch is explained where it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from gymnasium.vector import VectorEnv

_Array = npt.NDArray[Any]
_ROUNDING = 1e-5
"""How far beyond a bound an action may be, relative to the bound: a squashed one is rounded."""


class Fault(NamedTuple):
    """Something that is wrong: in which of the steps that were looked at, and what."""

    step: int
    text: str


def raise_first(faults: Iterable[Fault | None], cause: Exception | None = None) -> None:
    """Raise ``ValueError`` of the fault that came first, if there is one: those that follow may come of it.

    Args:
        faults: Of one step's, the one that is named first came first.
        cause: What has raised because of it.
    """
    found = [fault for fault in faults if fault is not None]
    if found:
        raise ValueError(min(found, key=lambda fault: fault.step).text) from cause


def name_of(env: Env[Any, Any] | VectorEnv[Any, Any, Any], index: int) -> str:
    """How an environment is called in messages: ``environment 3 (CartPole-v1)``."""
    return f"environment {index} ({env.spec.id if env.spec is not None else type(env.unwrapped).__name__})"


def misfit(space: Space[Any] | None, observation: Any, reward: Any) -> str | None:
    """What is wrong with the form of what one environment has returned; ``None`` if it fits.

    Args:
        space: Of its observations, or of one leaf of them; ``None``, and spaces of other kinds, are not looked at.
        observation: What it has returned, or that leaf.
        reward: Beside it.
    """
    if isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete) and np.shape(observation) != space.shape:
        return f"returned an observation of shape {np.shape(observation)}, and its space {space} has {space.shape}"
    if np.size(reward) != 1:
        return f"returned a reward of shape {np.shape(reward)}: it has to be one number"
    return None


def find_nan(what: str, values: _Array, names: Sequence[str]) -> Fault | None:
    """Which environment has returned something that is not a number; ``None`` if none has.

    Args:
        what: "reward", say.
        values: ``[num_envs, T, ...]``, of any dtype.
        names: Of the environments.
    """
    if values.dtype.kind != "f":
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isnan(np.sum(values)):  # takes half as long as asking each of them
            return None
    where = np.isnan(values)
    if not where.any():  # inf minus inf
        return None
    env, step = _first(where)
    return Fault(step, f"{names[env]} returned NaN as {what}{_in_step(values, step)}: {_shown(values[env, step])}")


def nan_in(observations: Iterable[_Array], names: Sequence[str], rewards: _Array | None = None) -> list[Fault | None]:
    """What ``find_nan`` says of what environments have returned.

    Args:
        observations: One array ``[num_envs, T, ...]`` for each leaf.
        names: Of the environments.
        rewards: ``[num_envs, T]``, if they are looked at too.
    """
    found = [find_nan("an observation", values, names) for values in observations]
    return found if rewards is None else [*found, find_nan("a reward", rewards, names)]


def find_outside(space: Space[Any], actions: npt.ArrayLike, names: Sequence[str]) -> Fault | None:
    """Which action is none of the action space; ``None`` if all are, or the space is of a kind that is not looked at.

    Args:
        space: Of one environment's actions.
        actions: ``[num_envs, T, ...]``.
        names: Of the environments.
    """
    if isinstance(space, Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, MultiBinary):
        low, high = 0, 1
    elif isinstance(space, Box):
        low, high = _loosened(space.low, -1), _loosened(space.high, 1)
    else:
        return None
    actions = np.asarray(actions)
    if actions.shape[2:] != space.shape:
        return Fault(0, f"an action has the shape {actions.shape[2:]}, and the action space {space} has {space.shape}")
    inside = (actions >= low) & (actions <= high)  # of NaN, neither is true
    if inside.all():
        return None
    env, step = _first(~inside)
    action = actions[env, step]
    advice = ""
    if isinstance(space, Box):
        clip = "; clip it, or wrap the environment in gymnasium.wrappers.ClipAction"
        advice = "; are the policy's weights finite?" if np.isnan(action).any() else clip
    return Fault(
        step,
        f"the action {_shown(action)} for {names[env]}{_in_step(actions, step)} is outside of its action space "
        f"{space}{advice}",
    )


def _loosened(bound: _Array, sign: int) -> _Array:
    loosened: _Array = bound + sign * _ROUNDING * np.maximum(1.0, np.abs(bound))
    return loosened


def _first(where: _Array) -> tuple[int, int]:
    """(environment, step) of what came first in time."""
    by_step = where.reshape(*where.shape[:2], -1).any(axis=-1).T
    step, env = np.argwhere(by_step)[0]
    return int(env), int(step)


def _in_step(values: _Array, step: int) -> str:
    return f" in step {step} of a batch" if values.shape[1] > 1 else ""


def _shown(value: _Array) -> str:
    return np.array2string(value, threshold=8)
