"""GymCollector: a policy that acts in gymnasium environments, and the batches that come of it.

The only module that imports gymnasium. Every row of a batch is a real transition: reset steps never appear (vector
environments of gymnasium make one by default), and ``next`` is never taken from the episode that follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_weightsync.collectors.episodes import is_deterministic
from lightning_weightsync.schemes.gate import Gate

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from gymnasium.vector.utils import iterate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("GymCollector needs gymnasium: pip install 'lightning_weightsync[gym]'") from error

from lightning_weightsync.collectors.checks import explain, find_nan, find_outside, misfit, name_of

_Env: TypeAlias = "gymnasium.Env[Any, Any]"
_RESERVED = ("next", "policy_version", "worker_idx")


class GymCollector:
    """Runs a policy in ``num_envs`` copies of an environment and yields batches of ``frames_per_batch`` transitions.

    A batch is a ``TensorDict`` of batch size ``[num_envs, T]`` with ``T = frames_per_batch / num_envs``; row ``e`` is
    the unbroken experience of environment ``e``, and goes on in the next batch. Its columns:

    * ``observation`` and ``("next", "observation")``: ``[num_envs, T, *shape]``, in the dtype of the environment's
      space. At the end of an episode the latter is the final observation, not the first one of the next episode.
    * ``action`` and whatever else the policy writes (``sample_log_prob``, ...), as the policy writes it.
    * ``("next", "reward")`` (float32) and ``("next", "terminated" | "truncated" | "done")`` (bool; ``done`` is either
      of the two): ``[num_envs, T, 1]``.
    * ``policy_version`` (int64): the version of the weights that chose the action; ``worker_idx`` (int64).

    A batch lives in memory that is reused: it is valid until the next one is asked for. Copy what you keep.

    Each policy call holds the gate; nothing else that could wait does. Who switches weights waits for at most one batch
    with ``update_at="batch"``, for at most one policy call with ``"step"``.

    What an environment raises says in its notes which environment it was, and at which action. Before a batch is
    handed on, it is looked at for NaN in observations and rewards, and for actions outside of their space.

    Args:
        env: A gymnasium id, or a factory of an environment (called ``num_envs`` times, without arguments). Observation
            spaces are arrays of one shape (``Box``, ``Discrete``, ``MultiDiscrete``, ``MultiBinary``).
        policy: A factory, called once without arguments, of the module that maps a ``TensorDict`` of batch size
            ``[num_envs]`` with ``observation`` to one with ``action`` (the same one or another). It is put into eval
            mode and called under ``torch.inference_mode()``; its sampling draws on torch's global generator, which is
            seeded by whoever owns the process.
        num_envs: How many environments, stepped in turn in this process.
        frames_per_batch: Transitions per batch, over all environments; a multiple of ``num_envs``.
        worker_idx: 0-based index of the worker, a column of each batch.
        seed: Each environment gets a seed of its own, derived from this one and ``worker_idx``.
        update_at: ``"batch"``: one version per batch (the gate is held from its first action to its last environment
            step). ``"step"``: weights may change between any two policy calls.

    Attributes:
        policy: The policy, where the destination ``"policy"`` leads.
        gate: The gate under which the policy is called.

    Raises:
        TypeError: ``env`` or ``policy`` is neither of what is allowed (an instance in place of a factory, say), or the
            observation space is not an array's.
        ValueError: ``frames_per_batch`` is not a positive multiple of ``num_envs``, ``update_at`` is unknown, or
            ``env`` returns the same object twice. From the first batch on: the policy writes no ``action``, or a name
            that belongs to the collector; an environment returns NaN, or something of another shape than it has said;
            an action is outside of its space.

    Example::

        collector = GymCollector("CartPole-v1", Actor, num_envs=8, frames_per_batch=1024, worker_idx=0, seed=1)
        batch = next(iter(collector))
        batch["next", "reward"].shape  # [8, 128, 1]
    """

    def __init__(
        self,
        env: str | Callable[[], _Env],
        policy: Callable[[], nn.Module],
        *,
        num_envs: int = 1,
        frames_per_batch: int,
        worker_idx: int,
        seed: int,
        update_at: Literal["batch", "step"] = "batch",
    ) -> None:
        if num_envs < 1 or frames_per_batch < 1 or frames_per_batch % num_envs:
            raise ValueError(
                f"frames_per_batch={frames_per_batch} must be a positive multiple of num_envs={num_envs}: "
                "every environment contributes the same number of frames to a batch"
            )
        if update_at not in ("batch", "step"):
            raise ValueError(f"update_at={update_at!r} is unknown: use 'batch' or 'step'")
        self.num_envs = num_envs
        self.frames_per_batch = frames_per_batch
        self.worker_idx = worker_idx
        self.update_at = update_at
        self.gate = Gate()
        self.policy = _build_policy(policy)
        self._at = _At()
        self._envs = _build_envs(env, num_envs, self._at)
        self._names = [wrapper.title for wrapper in self._wrappers()]
        seeds = np.random.SeedSequence(seed, spawn_key=(worker_idx,)).generate_state(num_envs)
        with self._explained():
            self._observation: npt.NDArray[Any] = self._envs.reset(seed=[int(s) for s in seeds])[0]
        self._check_nan("an observation", self._observation[:, None])
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._episodes: list[tuple[float, int]] = []
        self._between_episodes = False
        self._closed = False

        steps = frames_per_batch // num_envs
        self._batch = _allocate(self._observation, steps, worker_idx)
        following = self._batch["next"]
        # Writing through numpy costs an eighth of the same writes through TensorDict indexing.
        self._columns = _EnvColumns(
            observation=self._batch["observation"].numpy(),
            version=self._batch["policy_version"].numpy(),
            next_observation=following["observation"].numpy(),
            reward=following["reward"].numpy()[..., 0],
            terminated=following["terminated"].numpy()[..., 0],
            truncated=following["truncated"].numpy()[..., 0],
            done=following["done"].numpy()[..., 0],
        )
        self._written: list[tuple[NestedKey, tuple[Tensor, ...]]] = []

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches without end; episodes go on where the last batch, of whichever iterator, left them.

        Raises:
            RuntimeError: The collector is closed.
        """
        while True:
            with self._explained():
                batch = self._collect()
            self._check_batch()
            yield batch

    def progress(self) -> tuple[int, str]:
        """How many steps and resets environments have begun so far, and what is under way; for any thread."""
        env = self._at.env
        return self._at.calls, f"{env.title}, in {env.doing}()," if env is not None else "the policy"

    def take_episodes(self) -> list[tuple[float, int]]:
        """Return (return, length) of each episode that finished since the last call, in the order of their ends."""
        taken, self._episodes = self._episodes, []
        return taken

    def take_sums(self) -> Mapping[str, Any]:
        """What the policy has gathered since the last call, if it has ``take_sums()`` (``CollectorGroup.reduce``)."""
        take = getattr(self.policy, "take_sums", None)
        return take() if take is not None else {}

    def play_episodes(self, seeds: Sequence[int]) -> list[tuple[float, int]]:
        """Play one whole episode per seed; blocks until the last one has ended. The next batch begins new episodes.

        The environments play side by side, each policy call is for all of them, and one that has ended its episode goes
        on with the next seed that nobody plays. (Whichever of all episodes end first would be the short ones.)

        Args:
            seeds: Each episode begins with a reset of an environment with its seed.

        Returns:
            (return, length) of each, in the order of ``seeds``.

        Raises:
            ValueError: The policy is asked to be deterministic (``tensordict.nn.set_interaction_type``), and draws
                random numbers; or it writes no ``action``.
            RuntimeError: The collector is closed.
        """
        self._check_open()
        self._between_episodes = True
        waiting = deque(enumerate(seeds))
        played = [(0.0, 0)] * len(seeds)
        playing: dict[int, int] = {}  # environment -> episode
        observation = np.zeros_like(self._observation)
        for e in range(min(self.num_envs, len(seeds))):
            playing[e], seed = waiting.popleft()
            observation[e] = self._checked(e, self._envs.envs[e].reset(seed=seed)[0])
        observation[len(playing) :] = observation[0]  # no zeros: they may not be observations
        check_draws = is_deterministic()
        while playing:
            drawn_before = torch.get_rng_state() if check_draws else None
            actions = list(iterate(self._envs.action_space, self._choose(observation.copy())))
            if drawn_before is not None and not torch.equal(drawn_before, torch.get_rng_state()):
                raise ValueError(_draws_anyway(self.policy))
            check_draws = False
            for e, episode in list(playing.items()):
                following, reward, terminated, truncated, _ = self._envs.envs[e].step(actions[e])
                observation[e] = self._checked(e, following, reward)
                value, length = played[episode]
                played[episode] = value + float(reward), length + 1
                if terminated or truncated:
                    if waiting:
                        playing[e], seed = waiting.popleft()
                        observation[e] = self._checked(e, self._envs.envs[e].reset(seed=seed)[0])
                    else:
                        del playing[e]
        return played

    def close(self) -> None:
        """Close the environments. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._envs.close()

    def _collect(self) -> TensorDict:
        self._check_open()
        if self._between_episodes:
            self._observation = self._envs.reset()[0]
            self._returns[:], self._lengths[:] = 0, 0
            self._between_episodes = False
        per_batch, per_call = self._gates()
        envs, columns, gate = self._envs, self._columns, self.gate
        observation, returns, lengths = self._observation, self._returns, self._lengths
        with per_batch:
            for t in range(columns.reward.shape[1]):
                columns.observation[:, t] = observation
                with per_call:
                    columns.version[:, t] = gate.version
                    action = self._act(observation, t)
                observation, reward, terminated, truncated, info = envs.step(action)
                columns.next_observation[:, t] = observation
                columns.reward[:, t] = reward
                columns.terminated[:, t] = terminated
                columns.truncated[:, t] = truncated
                returns += reward
                lengths += 1
                if "final_obs" in info:
                    for e in np.flatnonzero(terminated | truncated):
                        columns.next_observation[e, t] = info["final_obs"][e]
                        self._episodes.append((float(returns[e]), int(lengths[e])))
                        returns[e] = lengths[e] = 0
                self._observation = observation
        np.logical_or(columns.terminated, columns.truncated, out=columns.done)
        return self._batch.copy()  # the tensors are shared; keys that the consumer adds stay its own

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this GymCollector is closed: build a new one")

    def _gates(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is held for a whole batch, and what around each policy call."""
        if self.update_at == "batch":
            return self.gate, nullcontext()
        return nullcontext(), self.gate

    def _act(self, observation: npt.NDArray[Any], t: int) -> npt.NDArray[Any]:
        """Call the policy, keep what it writes in column ``t``, and return the actions."""
        with torch.inference_mode():
            out = self._call_policy(observation)
            if not self._written:
                self._add_policy_columns(out)
            for key, column in self._written:
                column[t].copy_(out.get(key))
            action: npt.NDArray[Any] = out.get("action").cpu().numpy()
        return action

    def _choose(self, observation: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The policy's actions, nothing else that it writes."""
        with torch.inference_mode():
            out = self._call_policy(observation)
            self._check_output(out)
            action: npt.NDArray[Any] = out.get("action").cpu().numpy()
        self._check_actions(action[:, None])
        return action

    def _call_policy(self, observation: npt.NDArray[Any]) -> Any:
        self._at.env = None
        try:
            return self.policy(TensorDict({"observation": torch.from_numpy(observation)}, [self.num_envs]))
        except Exception as error:
            # A policy that was given NaN complains of anything but that.
            fault = find_nan("an observation", observation[:, None], self._names)
            if fault is not None:
                raise ValueError(fault) from error
            raise

    # --- what is wrong -------------------------------------------------------------------------------------------

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What raises because an environment has returned something of another form than it has said, says so."""
        try:
            yield
        except (ValueError, TypeError) as error:
            for wrapper in self._wrappers():
                if (fault := wrapper.misfit()) is not None and fault != str(error):
                    raise ValueError(fault) from error
            raise

    def _check_batch(self) -> None:
        """Look at a whole batch before anybody sees it."""
        self._check_nan("an observation", self._columns.observation)
        self._check_nan("an observation", self._columns.next_observation)
        self._check_nan("a reward", self._columns.reward)
        self._check_actions(self._batch["action"].cpu().numpy())

    def _check_actions(self, actions: npt.NDArray[Any]) -> None:
        fault = find_outside(self._envs.single_action_space, actions, self._names)
        if fault is not None:
            raise ValueError(f"{fault} (policy: {type(self.policy).__name__})")

    def _check_nan(self, what: str, values: npt.NDArray[Any]) -> None:
        fault = find_nan(what, values, self._names)
        if fault is not None:
            raise ValueError(fault)

    def _checked(self, e: int, observation: Any, reward: Any = 0.0) -> Any:
        """What environment ``e`` has returned while it plays an episode, where there is no batch to look at."""
        fault = self._wrappers()[e].misfit()
        if fault is not None:
            raise ValueError(fault)
        values = {"an observation": np.asarray(observation), "a reward": np.asarray(reward, np.float64)}  # None is NaN
        for what, value in values.items():
            fault = find_nan(what, value[None, None], self._names[e : e + 1])
            if fault is not None:
                raise ValueError(fault)
        return observation

    def _wrappers(self) -> Sequence[_Transitions]:
        return self._envs.envs  # type: ignore[return-value]  # as _build_envs has made them

    def _check_output(self, out: Any) -> None:
        if not isinstance(out, TensorDictBase) or "action" not in out:
            found = sorted(map(str, out.keys())) if isinstance(out, TensorDictBase) else type(out).__name__
            raise ValueError(
                f"the policy {type(self.policy).__name__} has to return a TensorDict with 'action'; it returned {found}"
            )

    @torch.inference_mode(False)  # an inference tensor could never take part in the trainer's backward
    def _add_policy_columns(self, out: Any) -> None:
        """Allocate a column for each leaf that the policy's first output has beside the observation."""
        self._check_output(out)
        for key, value in out.items(include_nested=True, leaves_only=True):
            root = key if isinstance(key, str) else key[0]
            if root == "observation":
                continue
            if root in _RESERVED:
                raise ValueError(
                    f"the policy {type(self.policy).__name__} writes {key!r}, but {', '.join(map(repr, _RESERVED))} "
                    "are the collector's: give it another name"
                )
            buffer = torch.zeros(*self._batch.batch_size, *value.shape[1:], dtype=value.dtype)
            self._batch.set(key, buffer)
            self._written.append((key, buffer.unbind(1)))


@dataclass(frozen=True, slots=True)
class _EnvColumns:
    """numpy views of the columns that are filled at each step, each ``[num_envs, T, ...]``."""

    observation: npt.NDArray[Any]
    version: npt.NDArray[np.int64]
    next_observation: npt.NDArray[Any]
    reward: npt.NDArray[np.float32]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    done: npt.NDArray[np.bool_]


class _At:
    """Which environment is at work, and how often one has begun to be; written by one thread, read by any."""

    def __init__(self) -> None:
        self.calls = 0
        self.env: _Transitions | None = None


class _Transitions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Hands on what a batch keeps, and remembers what it needs to say who was to blame.

    That is no infos (the vector environment would merge them, at each step), and a final observation in memory of its
    own, because the reset that follows at once may overwrite the environment's.
    """

    def __init__(self, env: _Env, index: int, at: _At) -> None:
        super().__init__(env)
        self.title = name_of(env, index)
        self.doing = "reset"
        self._at = at
        self._returned: tuple[Any, ...] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.doing = "reset"
        at = self._at
        at.env, at.calls = self, at.calls + 1
        try:
            observation = self.env.reset(seed=seed, options=options)[0]
        except Exception as error:
            explain(error, f"{self.title}, in reset()")
            raise
        self._returned = (observation, 0.0)
        self.doing = "step"
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        at = self._at
        at.env, at.calls = self, at.calls + 1
        try:
            returned = self.env.step(action)
        except Exception as error:
            fault = find_outside(self.action_space, [[action]], [self.title])
            explain(error, f"{self.title}, in step()" if fault is None else fault)
            raise
        self._returned = returned
        observation, reward, terminated, truncated, _ = returned
        if terminated or truncated:
            if (fault := self.misfit()) is not None:  # else it would be broadcast into the batch
                raise ValueError(fault)
            observation = np.array(observation)
        return observation, reward, terminated, truncated, {}

    def misfit(self) -> str | None:
        """What is wrong with the form of what the environment has returned last; ``None`` if it is as it has said."""
        fault = misfit(self.observation_space, *self._returned[:2]) if self._returned is not None else None
        return None if fault is None else f"{self.title} {fault}"


def _build_policy(factory: Callable[[], nn.Module]) -> nn.Module:
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise TypeError(
            f"policy is a module ({name}), but each worker builds its own: pass a factory, such as the class {name} "
            f"itself or functools.partial({name}, ...); its weights arrive by weight sync"
        )
    if not callable(factory):
        raise TypeError(f"policy must be a factory (a callable that returns a module), not {type(factory).__name__}")
    policy = factory()
    if not isinstance(policy, nn.Module):
        raise TypeError(f"the policy factory must return a torch.nn.Module, not {type(policy).__name__}")
    return policy.eval()


def _draws_anyway(policy: nn.Module) -> str:
    name = type(policy).__name__
    return (
        f"the policy {name} is asked for its best action (deterministic=True), and draws random numbers all the same. "
        "One that samples looks at tensordict.nn.probabilistic.interaction_type(), and takes its best action where "
        "that is InteractionType.DETERMINISTIC, as tensordict's own modules do; or evaluate with deterministic=False"
    )


def _build_envs(env: str | Callable[[], _Env], num_envs: int, at: _At) -> SyncVectorEnv[Any, Any]:
    if isinstance(env, str):
        make: Callable[[], _Env] = partial(gymnasium.make, env)
    elif callable(env):
        make = env
    else:
        raise TypeError(f"env must be a gymnasium id or a factory of an environment, not {type(env).__name__}")
    envs = [_checked_env(make()) for _ in range(num_envs)]
    if len({id(e) for e in envs}) != num_envs:
        raise ValueError("the env factory returned one environment twice: it has to make a new one at each call")
    makers = [partial(_Transitions, e, index, at) for index, e in enumerate(envs)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def _checked_env(env: object) -> _Env:
    if not isinstance(env, gymnasium.Env):
        raise TypeError(f"the env factory must return a gymnasium.Env, not {type(env).__name__}")
    if not isinstance(env.observation_space, Box | Discrete | MultiBinary | MultiDiscrete):
        raise TypeError(
            f"observation space {env.observation_space} is not an array of one shape: wrap the environment, "
            "with gymnasium.wrappers.FlattenObservation for example"
        )
    return env


def _allocate(observation: npt.NDArray[Any], steps: int, worker_idx: int) -> TensorDict:
    """Make a batch with the columns that do not depend on the policy."""
    size = (len(observation), steps)
    first = torch.from_numpy(observation)
    seen = torch.zeros(*size, *first.shape[1:], dtype=first.dtype)
    flag = torch.zeros(*size, 1, dtype=torch.bool)
    following = {
        "observation": seen.clone(),
        "reward": torch.zeros(*size, 1, dtype=torch.float32),
        "terminated": flag,
        "truncated": flag.clone(),
        "done": flag.clone(),
    }
    columns = {
        "observation": seen,
        "next": TensorDict(following, size),
        "policy_version": torch.zeros(size, dtype=torch.int64),
        "worker_idx": torch.full(size, worker_idx, dtype=torch.int64),
    }
    return TensorDict(columns, size)
