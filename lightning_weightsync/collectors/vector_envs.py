"""How does a vector environment make a step of which every row is a real transition, in whichever way it resets?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_weightsync.collectors.checks import name_of, nan_in, raise_first
from lightning_weightsync.collectors.envs import At, Choose, Step
from lightning_weightsync.collectors.spaces import Arrays, Flags, checked, leaves_of, tree_of
from lightning_weightsync.errors import explain


class VectorEnvs:
    """A vector environment, whatever the way in which it resets.

    With ``NEXT_STEP``, an environment whose episode has ended makes no transition in the step after (``Step.real``).
    With ``DISABLED``, it is told to reset those that have ended, by ``reset(options={"reset_mask": ...})``.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], num_envs: int) -> None:
        name = type(envs.unwrapped).__name__
        if envs.num_envs != num_envs:
            raise ValueError(f"the vector environment {name} has num_envs={envs.num_envs}, not {num_envs}")
        mode = getattr(envs, "metadata", {}).get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise ValueError(
                f"the vector environment {name} does not say how it resets: metadata['autoreset_mode'] has to be one "
                f"of {', '.join(map(str, AutoresetMode))}, not {mode!r}"
            )
        self.names = [name_of(envs, e) for e in range(num_envs)]
        self._title = f"the vector environment {name}"
        self.at = At([self._title])
        self._envs = envs
        self._mode = mode
        self.skips = mode is AutoresetMode.NEXT_STEP
        self.observations = leaves_of(envs.single_observation_space)
        self.actions = leaves_of(envs.single_action_space, "action")
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """See ``Envs``."""
        self._ended[:] = False
        # Of several seeds not every implementation knows what to do.
        return self._arrays(self._call("reset", seed=None if seeds is None else int(seeds[0]))[0])

    def step(self, actions: Arrays) -> Step:
        """See ``Envs``."""
        action = tree_of(self._envs.single_action_space, iter(actions))
        value, reward, terminated, truncated, info = self._call("step", action)
        now = following = self._arrays(value)
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        real = ~self._ended if self.skips else None
        ended = terminated | truncated
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            following = self._with_last(now, info, ended)
        elif self._mode is AutoresetMode.DISABLED and ended.any():
            now = self._arrays(self._call("reset", options={"reset_mask": ended})[0])
        self._ended = ended
        return Step(following, now, np.asarray(reward), terminated, truncated, real)

    def play(self, seeds: Sequence[int], choose: Choose) -> list[tuple[float, int]]:
        """In rounds of one episode per environment, each of which begins with the seed of its first."""
        played: list[tuple[float, int]] = []
        while len(played) < len(seeds):
            observation = self.reset([seeds[len(played)]])
            playing = np.ones(self._envs.num_envs, np.bool_)
            returns, lengths = np.zeros(len(playing)), np.zeros(len(playing), np.int64)
            while playing.any():
                step = self.step(choose(observation))
                following = (array[:, None] for array in step.following)
                raise_first(nan_in(following, self.names, step.reward[:, None]))
                returns[playing] += step.reward[playing]
                lengths[playing] += 1
                playing &= ~(step.terminated | step.truncated)
                observation = step.observation
            played += zip(returns.tolist(), lengths.tolist(), strict=True)
        return played[: len(seeds)]

    def close(self) -> None:
        """See ``Envs``."""
        self._envs.close()

    def _call(self, doing: str, *args: Any, **kwargs: Any) -> Any:
        self.at.begin(0, doing)
        try:
            return getattr(self._envs, doing)(*args, **kwargs)
        except BaseException as error:
            explain(error, f"{self._title}, in {doing}()")
            raise

    def _arrays(self, value: Any) -> Arrays:
        # Copied: some implementations hand out the same memory again and again.
        return [checked(leaf, np.array(leaf.of(value)), self._envs.num_envs) for leaf in self.observations]

    def _with_last(self, now: Arrays, info: dict[str, Any], ended: Flags) -> Arrays:
        if "final_obs" not in info:
            raise ValueError(
                f"the vector environment {type(self._envs.unwrapped).__name__} resets in the same step, and did not "
                "hand over the last observations as info['final_obs']"
            )
        following = [array.copy() for array in now]
        final = info["final_obs"]
        for e in np.flatnonzero(ended):
            for leaf, array in zip(self.observations, following, strict=True):
                # One array of trees (gymnasium's own), or one tree of arrays.
                array[e] = leaf.of(final[e]) if isinstance(final, np.ndarray) else leaf.of(final)[e]
        return following
