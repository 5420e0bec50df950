"""How do several environments make one step together, so that every row of it is a real transition?

Two kinds: separate environments, which are stepped in turn here, and a vector environment of gymnasium's interface,
which steps all of its own. Observations and actions are lists of arrays, one for each leaf of their space (see
``spaces``), with the environments along dimension 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from lightning_weightsync.collectors.checks import check_nan, find_outside, misfit, name_of
from lightning_weightsync.collectors.spaces import Arrays, Flags, Leaf, checked, leaves_of, tree_of
from lightning_weightsync.errors import explain

Env: TypeAlias = "gymnasium.Env[Any, Any]"
Choose: TypeAlias = "Callable[[Arrays], Arrays]"
"""Observations -> actions, of all environments."""


class Step(NamedTuple):
    """What a step of all environments has brought.

    Attributes:
        following: The observations that it led to; where an episode has ended, its last one.
        observation: What the next action is for; where an episode has ended, the first one of the next.
        reward: ``[num_envs]``.
        terminated: ``[num_envs]``.
        truncated: ``[num_envs]``.
        real: Which environments have made a transition; the others were reset. ``None``: all of them.
    """

    following: Arrays
    observation: Arrays
    reward: npt.NDArray[Any]
    terminated: Flags
    truncated: Flags
    real: Flags | None


@dataclass
class At:
    """Which environment is at work; written by the thread that steps them, read by any.

    Attributes:
        calls: How many steps and resets have begun.
        title: Of the environment, or of all of them where they are stepped as one; ``None``: none is at work.
        doing: ``"step"`` or ``"reset"``.
    """

    calls: int = 0
    title: str | None = None
    doing: str = "reset"

    def begin(self, title: str, doing: str) -> None:
        """An environment is called."""
        self.calls += 1
        self.title = title
        self.doing = doing


class Envs(Protocol):
    """``num_envs`` environments. What one of them raises says in its notes which it was.

    Attributes:
        at: What is under way.
        names: Of the environments, in messages.
        observations: Leaves of one environment's observation.
        actions: Leaves of one environment's action.
        skips: Whether a step may make no transition in some environments (``Step.real``).
    """

    at: At
    names: list[str]
    observations: list[Leaf]
    actions: list[Leaf]
    skips: bool

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Begin an episode everywhere; seeds, if any, are one for each environment."""
        ...

    def step(self, actions: Arrays) -> Step:
        """Step all of them.

        Raises:
            ValueError: An observation has another shape or dtype than the space says, or a reward is not one number.
        """
        ...

    def play(self, seeds: Sequence[int], choose: Choose) -> list[tuple[float, int]]:
        """Play one whole episode per seed; (return, length) of each, in their order.

        Raises:
            ValueError: See ``step``; or an observation or a reward is NaN.
        """
        ...

    def close(self) -> None:
        """Close all of them."""
        ...


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
        self.at = At()
        self.names = [name_of(env, e) for e, env in enumerate(envs)]
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

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """See ``Envs``."""
        each: Sequence[int | None] = [None] * len(self._envs) if seeds is None else seeds
        return self._stack([self._reset(e, seed) for e, seed in enumerate(each)])

    def step(self, actions: Arrays) -> Step:
        """See ``Envs``."""
        rows, rewards, terminated, truncated = [], [], [], []
        last: dict[int, Any] = {}
        at, names = self.at, self.names
        for e, (env, action) in enumerate(zip(self._envs, self._each(actions), strict=True)):
            # Written out: at.begin() and _step(), called for each, take a thirtieth of the time of eight CartPoles.
            at.calls += 1
            at.title = names[e]
            at.doing = "step"
            try:
                observation, reward, ended, cut, _ = env.step(action)
            except BaseException as error:
                self._explain_step(e, action, error)
                raise
            rewards.append(reward)
            terminated.append(ended)
            truncated.append(cut)
            if ended or cut:
                last[e] = deepcopy(observation)  # the reset may overwrite it
                observation = self._reset(e, None)
            rows.append(observation)
        now = following = self._stack(rows)
        if last:
            following = self._stack([last.get(e, row) for e, row in enumerate(rows)])
        return Step(
            following,
            now,
            self._numbers(rewards),
            np.array(terminated, np.bool_),
            np.array(truncated, np.bool_),
            None,
        )

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
        self.at.begin(self.names[e], "reset")
        try:
            return self._envs[e].reset(seed=seed)[0]
        except BaseException as error:
            explain(error, f"{self.names[e]}, in reset()")
            raise

    def _step(self, e: int, action: Any) -> tuple[Any, Any, bool, bool]:
        self.at.begin(self.names[e], "step")
        try:
            return self._envs[e].step(action)[:4]
        except BaseException as error:
            self._explain_step(e, action, error)
            raise

    def _explain_step(self, e: int, action: Any, error: BaseException) -> None:
        fault = find_outside(self._envs[e].action_space, [[action]], self.names[e : e + 1])
        explain(error, f"{self.names[e]}, in step()" if fault is None else fault)

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
        check_nan(arrays, number, self.names[e : e + 1])
        return observation

    def _each(self, actions: Arrays) -> Iterator[Any]:
        """The actions of each environment."""
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
        self.at = At()
        self.names = [name_of(envs, e) for e in range(num_envs)]
        self._title = f"the vector environment {name}"
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
                check_nan([array[:, None] for array in step.following], step.reward[:, None], self.names)
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
        self.at.begin(self._title, doing)
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
