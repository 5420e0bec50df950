"""How do environments that know nothing of each other make one step together? They are stepped in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space, iterate

from lightning_weightsync.collectors.checks import find_outside, misfit, name_of, nan_in, raise_first
from lightning_weightsync.collectors.envs import At, Choose, Env, Step
from lightning_weightsync.collectors.spaces import Arrays, Leaf, checked, leaves_of, tree_of
from lightning_weightsync.errors import explain


class SeparateEnvs:
    """Environments that are stepped in turn, each reset as soon as its episode has ended.

    ``gymnasium.vector.SyncVectorEnv`` does the same and, at each step, merges infos and copies observations once more,
    which takes it a third of the time of eight CartPoles.
    """

    skips = False

    def __init__(self, envs: Sequence[Any]) -> None:
        for env in envs:
            if not isinstance(env, gymnasium.Env):
                raise TypeError(
                    f"the env factory must return a gymnasium.Env, not {type(env).__name__}; or one "
                    "gymnasium.vector.VectorEnv of all num_envs environments"
                )
        if len({id(env) for env in envs}) != len(envs):
            raise ValueError("the env factory returned one environment twice: it has to make a new one at each call")
        self._envs: list[Env] = list(envs)
        self.names = [name_of(env, e) for e, env in enumerate(envs)]
        self.at = At(self.names)
        first = self._envs[0]
        for env in self._envs:
            for space, other in (
                (first.observation_space, env.observation_space),
                (first.action_space, env.action_space),
            ):
                if space != other:
                    raise ValueError(f"the env factory returned environments of different spaces: {space} and {other}")
        self.observations = leaves_of(first.observation_space)
        self.actions = leaves_of(first.action_space, "action")
        self._action_spaces = batch_space(first.action_space, len(envs))
        self._one_array = [leaf.keys for leaf in self.actions] == [()]
        self._nowhere = np.zeros(len(envs), np.bool_)
        self._nowhere.flags.writeable = False

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """See ``Envs``."""
        each: Sequence[int | None] = [None] * len(self._envs) if seeds is None else seeds
        return self._stack([self._reset(e, seed) for e, seed in enumerate(each)])

    def step(self, actions: Arrays) -> Step:
        """See ``Envs``."""
        rows, rewards = [], []
        last: dict[int, Any] = {}
        terminated = truncated = self._nowhere
        at = self.at
        at.doing = "step"
        for e, (env, action) in enumerate(zip(self._envs, self._each(actions), strict=True)):
            # Written out: at.begin() and _step(), called for each, take a thirtieth of the time of eight CartPoles.
            at.calls += 1
            at.index = e
            try:
                observation, reward, ended, cut, _ = env.step(action)
            except BaseException as error:
                self._explain_step(e, action, error)
                raise
            rewards.append(reward)
            if ended or cut:
                if not last:
                    terminated, truncated = terminated.copy(), truncated.copy()
                terminated[e], truncated[e] = ended, cut
                last[e] = deepcopy(observation)  # the reset may overwrite it
                observation = self._reset(e, None)
                at.doing = "step"
            rows.append(observation)
        now = following = self._stack(rows)
        if last:
            following = self._stack([last.get(e, row) for e, row in enumerate(rows)])
        return Step(following, now, self._numbers(rewards), terminated, truncated, None)

    def play(self, seeds: Sequence[int], choose: Choose) -> list[tuple[float, int]]:
        """One environment that has ended its episode goes on with the next seed that nobody plays."""
        waiting = deque(enumerate(seeds))
        played = [(0.0, 0)] * len(seeds)
        playing: dict[int, int] = {}  # environment -> episode
        rows: list[Any] = []
        for e in range(min(len(self._envs), len(seeds))):
            playing[e], seed = waiting.popleft()
            rows.append(self._looked_at(e, self._reset(e, seed)))
        rows += [rows[0]] * (len(self._envs) - len(rows))  # no zeros: they may not be observations
        while playing:
            actions = list(self._each(choose(self._stack(rows))))
            for e, episode in list(playing.items()):
                observation, reward, ended, cut = self._step(e, actions[e])
                rows[e] = self._looked_at(e, observation, reward)
                value, length = played[episode]
                played[episode] = value + float(reward), length + 1
                if ended or cut:
                    if waiting:
                        playing[e], seed = waiting.popleft()
                        rows[e] = self._looked_at(e, self._reset(e, seed))
                    else:
                        del playing[e]
        return played

    def close(self) -> None:
        """See ``Envs``."""
        for env in self._envs:
            env.close()

    def _reset(self, e: int, seed: int | None) -> Any:
        self.at.begin(e, "reset")
        try:
            return self._envs[e].reset(seed=seed)[0]
        except BaseException as error:
            explain(error, f"{self.names[e]}, in reset()")
            raise

    def _step(self, e: int, action: Any) -> tuple[Any, Any, bool, bool]:
        self.at.begin(e, "step")
        try:
            return self._envs[e].step(action)[:4]
        except BaseException as error:
            self._explain_step(e, action, error)
            raise

    def _explain_step(self, e: int, action: Any, error: BaseException) -> None:
        fault = find_outside(self._envs[e].action_space, [[action]], self.names[e : e + 1])
        explain(error, f"{self.names[e]}, in step()" if fault is None else fault.text)

    def _numbers(self, rewards: list[Any]) -> npt.NDArray[Any]:
        try:
            return np.array(rewards, np.float64).reshape(len(rewards))
        except (ValueError, TypeError):
            for name, reward in zip(self.names, rewards, strict=True):
                if (fault := misfit(None, None, reward)) is not None:
                    raise ValueError(f"{name} {fault}") from None
            raise

    def _looked_at(self, e: int, observation: Any, reward: Any = 0.0) -> Any:
        """What an environment has returned while it plays an episode, where there is no batch to look at."""
        arrays = []
        for leaf in self.observations:
            fault = misfit(leaf.space, leaf.of(observation), reward)
            if fault is not None:
                raise ValueError(f"{self.names[e]} {fault}")
            arrays.append(np.asarray(leaf.of(observation))[None, None])
        number = np.asarray(reward, np.float64).reshape(1, 1)  # None is NaN
        raise_first(nan_in(arrays, self.names[e : e + 1], number))
        return observation

    def _each(self, actions: Arrays) -> Iterator[Any]:
        """The actions of each environment."""
        if self._one_array:  # what iterate() does with it, in less time
            return iter(actions[0])
        each: Iterator[Any] = iterate(self._action_spaces, tree_of(self._envs[0].action_space, iter(actions)))
        return each

    def _stack(self, rows: list[Any]) -> Arrays:
        return [self._stacked(leaf, list(map(leaf.of, rows)) if leaf.keys else rows) for leaf in self.observations]

    def _stacked(self, leaf: Leaf, rows: list[Any]) -> npt.NDArray[Any]:
        try:
            return checked(leaf, np.array(rows), len(rows))
        except ValueError as error:
            for name, row in zip(self.names, rows, strict=True):
                if (fault := misfit(leaf.space, row, 0.0)) is not None:
                    raise ValueError(f"{name} {fault}") from error
            raise
