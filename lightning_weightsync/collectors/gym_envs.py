"""Which environments does a ``GymCollector`` step? Those that it is told of: separate ones, or a vector environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

from lightning_weightsync.collectors.envs import Env, Envs
from lightning_weightsync.collectors.separate_envs import SeparateEnvs
from lightning_weightsync.collectors.vector_envs import VectorEnvs


def build_envs(env: str | Callable[[], Env | VectorEnv[Any, Any, Any]], num_envs: int) -> Envs:
    """Make the environments.

    Args:
        env: A gymnasium id, a factory of one environment, or a factory of a vector environment.
        num_envs: How many there are to be.

    Raises:
        TypeError: ``env`` is none of these, or a space has leaves that are no arrays.
        ValueError: The factory returned one environment twice or of different spaces, or the vector environment has
            another number of them or does not say how it resets.
    """
    if isinstance(env, str):
        make: Callable[[], Any] = partial(gymnasium.make, env)
    elif callable(env):
        make = env
    else:
        raise TypeError(f"env must be a gymnasium id or a factory of an environment, not {type(env).__name__}")
    first = make()
    if isinstance(first, VectorEnv):
        return VectorEnvs(first, num_envs)
    return SeparateEnvs([first, *[make() for _ in range(num_envs - 1)]])
