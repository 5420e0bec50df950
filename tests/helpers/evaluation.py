"""A game whose returns are known, and policies that play it. Workers import this, so no Lightning here."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import nn

from lightning_weightsync import GymCollector

NUM_ENVS, STEPS = 2, 4


class LengthBySeed(gymnasium.Env):
    """An episode's length, 1 to 9, is drawn when it begins, so it depends on the seed of its reset alone.

    The observation is ``[length, steps]``; the reward of a step is the action plus a quarter.
    """

    action_space = Discrete(1001, start=-1)
    observation_space = Box(0, 10, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.length, self.steps = int(self.np_random.integers(1, 10)), 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.steps < self.length, "stepped beyond the end of an episode"
        self.steps += 1
        done = self.steps == self.length
        observation = np.array([self.length, self.steps], np.float32)
        return observation, float(action) + 0.25, done and self.length % 2 == 0, done and self.length % 2 == 1, {}


class Dial(nn.Module):
    """Acts with its one number; when it samples, with that or the next one."""

    heeds = True

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(-1.0))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        action = self.value.detach().round().long().expand(td.batch_size).clone()
        if not (self.heeds and interaction_type() is InteractionType.DETERMINISTIC):
            action += torch.randint(2, td.batch_size)
        td["action"] = action
        return td


class Stubborn(Dial):
    """Samples, whatever it is asked for."""

    heeds = False


def dial_collector(*, worker_idx: int, seed: int, policy: Any = Dial, env: Any = LengthBySeed) -> GymCollector:
    return GymCollector(
        env, policy, num_envs=NUM_ENVS, frames_per_batch=NUM_ENVS * STEPS, worker_idx=worker_idx, seed=seed
    )


class NoSecondEpisode(LengthBySeed):
    """Raises in its second reset with a seed: in the first episode that is played, after the collector's own reset."""

    seeded = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.seeded += seed is not None
        if self.seeded == 2:
            raise ArithmeticError("no second episode")
        return super().reset(seed=seed, options=options)


class Killed(LengthBySeed):
    """Ends its process in the first episode that is played."""

    seeded = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.seeded += seed is not None
        if self.seeded == 2:
            import os

            os._exit(9)
        return super().reset(seed=seed, options=options)


class Endless(LengthBySeed):
    """Its episodes never end."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return np.zeros(2, np.float32), 0.0, False, False, {}
