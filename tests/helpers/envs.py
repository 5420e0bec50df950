"""Environments that say where they are, so that a test can tell a real transition from any other row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

LENGTHS = (3, 1, 5, 2, 4)


def ends_by_truncation(episode: int) -> bool:
    return episode % 2 == 1


def steps_before(episode: int, step: int) -> int:
    """How many steps a ``CountingEnv`` had made when it showed this observation."""
    rounds, rest = divmod(episode, len(LENGTHS))
    return rounds * sum(LENGTHS) + sum(LENGTHS[:rest]) + step


class CountingEnv(gymnasium.Env):
    """Episode ``k`` (from 0) lasts ``lengths[k % len(lengths)]`` steps; odd ones are truncated, even ones terminated.

    The observation is ``[episode, step, mark]``, where ``mark`` is drawn from the environment's generator when an
    episode begins; the reward of a step is ``10 * step + action``.

    Args:
        lengths: Steps of the episodes, in turn.
        reuse_memory: Return the same array each time, overwritten, as environments that save allocations do.
    """

    action_space = Discrete(2)
    observation_space = Box(0, 2**24, (3,), np.float32)

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, *, reuse_memory: bool = False) -> None:
        self.lengths = lengths
        self.reuse_memory = reuse_memory
        self.episode = -1
        self.count = 0
        self.closed = False
        self._observation = np.zeros(3, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode += 1
        self.count = 0
        self._observation[2] = self.np_random.integers(2**24)
        return self._observe(), {"reset": True}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        length = self.lengths[self.episode % len(self.lengths)]
        assert self.count < length, "stepped beyond the end of an episode"
        self.count += 1
        done, truncation = self.count == length, ends_by_truncation(self.episode)
        reward = 10.0 * self.count + float(action)
        # Its shape differs between environments: what a vector environment cannot merge.
        info = {"path": np.zeros(int(self._observation[2]) % 5)}
        return self._observe(), reward, done and not truncation, done and truncation, info

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> np.ndarray:
        self._observation[:2] = self.episode, self.count
        return self._observation if self.reuse_memory else self._observation.copy()


class Distorted(gymnasium.Wrapper):
    """In step ``at`` (from 1, over its life), what a ``CountingEnv`` returns is what ``distort`` makes of it."""

    def __init__(self, distort: Callable[[np.ndarray, float], tuple[Any, Any]], at: int = 2) -> None:
        super().__init__(CountingEnv())
        self.distort, self.at, self.steps = distort, at, 0

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        self.steps += 1
        if self.steps == self.at:
            observation, reward = self.distort(observation, reward)
        return (observation, reward, *rest)


def nan_observation(observation: np.ndarray, reward: float) -> tuple[Any, Any]:
    return np.array([observation[0], np.nan, observation[2]], np.float32), reward


def short_observation(observation: np.ndarray, reward: float) -> tuple[Any, Any]:
    return observation[:1], reward


def nan_reward(observation: np.ndarray, reward: float) -> tuple[Any, Any]:
    return observation, float("nan")


def no_reward(observation: np.ndarray, reward: float) -> tuple[Any, Any]:
    return observation, None


def two_rewards(observation: np.ndarray, reward: float) -> tuple[Any, Any]:
    return observation, np.array([reward, reward])
