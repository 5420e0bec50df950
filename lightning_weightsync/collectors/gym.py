"""How do a policy and gymnasium environments make batches? A ``GymCollector`` has the one act in the others.

Every row of a batch is a real transition: reset steps never appear (vector environments of gymnasium make one by
default), and ``next`` is never taken from the episode that follows. Only this and what it imports (``gym_envs``,
``separate_envs``, ``vector_envs``, ``envs``, ``spaces``, ``columns``, ``returns``, ``checks``) need gymnasium.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import Tensor, nn

from lightning_weightsync.collectors.trees import tree_maker, unchecked
from lightning_weightsync.collectors.unvalidated import unvalidated
from lightning_weightsync.schemes.gate import Gate

try:
    from gymnasium.vector import VectorEnv

    from lightning_weightsync.collectors.checks import Fault, find_outside, nan_in, raise_first
    from lightning_weightsync.collectors.columns import allocate
    from lightning_weightsync.collectors.envs import Env
    from lightning_weightsync.collectors.gym_envs import build_envs
    from lightning_weightsync.collectors.returns import EpisodeSums
    from lightning_weightsync.collectors.spaces import Arrays, Leaf
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("GymCollector needs gymnasium: pip install 'lightning_weightsync[gym]'") from error

_RESERVED = ("next", "policy_version", "worker_idx")


class GymCollector:
    """Runs a policy in ``num_envs`` copies of an environment and yields batches of ``frames_per_batch`` transitions.

    A batch is a ``TensorDict`` of batch size ``[num_envs, T]`` with ``T = frames_per_batch / num_envs``; row ``e`` is
    the unbroken experience of environment ``e``, and goes on in the next batch. Its columns:

    * ``observation`` and ``("next", "observation")``: ``[num_envs, T, *shape]``, in the dtype of the environment's
      space (images stay uint8). At the end of an episode the latter is the final observation, not the first one of the
      next episode. Of a ``Dict`` space they are nested, ``("observation", "camera")``; of a ``Tuple`` space too, with
      the names ``"0"``, ``"1"``, ...
    * ``action`` and whatever else the policy writes (``sample_log_prob``, ...), as the policy writes it; of a ``Dict``
      or ``Tuple`` action space, ``("action", name)`` in the same way.
    * ``("next", "reward")`` (float32) and ``("next", "terminated" | "truncated" | "done")`` (bool; ``done`` is either
      of the two): ``[num_envs, T, 1]``.
    * ``policy_version`` (int64): the version of the weights that chose the action; ``worker_idx`` (int64).

    A batch lives in memory that is reused: it is valid until the next one is asked for. Copy what you keep.

    A vector environment that resets in the step after the end of an episode (``AutoresetMode.NEXT_STEP``) makes no
    transition there, while the others make one. A batch has as many of each all the same: what some have made beyond
    that is left out, so between two batches a row may miss a few transitions. ``SAME_STEP`` and ``DISABLED`` lose none.

    Each policy call holds the gate; nothing else that could wait does. Who switches weights waits for at most one batch
    with ``update_at="batch"``, for at most one policy call with ``"step"``.

    What an environment raises says in its notes which environment it was, and at which action. Before a batch is
    handed on, it is looked at for NaN in observations and rewards, and for actions outside of their space; of several
    faults the first one is told. So distributions that are made meanwhile, by the policy or an environment, do not
    validate their arguments (an eighth of a step), unless they are made with ``validate_args=True``.

    Args:
        env: A gymnasium id; a factory of an environment (called ``num_envs`` times, without arguments); or a factory of
            a vector environment of ``num_envs`` (called once), such as ``functools.partial(gymnasium.make_vec,
            "CartPole-v1", 8, vectorization_mode="vector_entry_point")``. Observation and action spaces are ``Box``,
            ``Discrete``, ``MultiDiscrete``, ``MultiBinary``, and ``Dict`` and ``Tuple`` of them.
        policy: A factory, called once without arguments, of the module that maps a ``TensorDict`` of batch size
            ``[num_envs]`` with ``observation`` to one with ``action`` (the same one or another). It is put into eval
            mode and called under ``torch.inference_mode()``; its sampling draws on torch's global generator, which is
            seeded by whoever owns the process.
        num_envs: How many environments; separate ones are stepped in turn in this process.
        frames_per_batch: Transitions per batch, over all environments; a multiple of ``num_envs``.
        worker_idx: 0-based index of the worker, a column of each batch.
        seed: Each environment gets a seed of its own, derived from this one and ``worker_idx``; a vector environment
            gets one for all of its own.
        update_at: ``"batch"``: one version per batch (the gate is held from its first action to its last environment
            step). ``"step"``: weights may change between any two policy calls.

    Attributes:
        policy: The policy, where the destination ``"policy"`` leads.
        gate: The gate under which the policy is called.

    Raises:
        TypeError: ``env`` or ``policy`` is neither of what is allowed (an instance in place of a factory, say), or the
            spaces are not of arrays.
        ValueError: ``frames_per_batch`` is not a positive multiple of ``num_envs``, ``update_at`` is unknown, or
            ``env`` returns the same object twice, or a vector environment of another size. From the first batch on:
            the policy writes no ``action``, or a name that belongs to the collector; an environment returns NaN, or
            what its space does not allow; an action is outside of its space.

    Example::

        collector = GymCollector("CartPole-v1", Actor, num_envs=8, frames_per_batch=1024, worker_idx=0, seed=1)
        batch = next(iter(collector))
        batch["next", "reward"].shape  # [8, 128, 1]
    """

    def __init__(
        self,
        env: str | Callable[[], Env | VectorEnv[Any, Any, Any]],
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
        self.gate = Gate(gradients=False)
        self.policy = _build_policy(policy)
        self._envs = build_envs(env, num_envs)
        seeds = np.random.SeedSequence(seed, spawn_key=(worker_idx,)).generate_state(num_envs)
        self._observation = self._envs.reset([int(s) for s in seeds])
        raise_first(self._nan_in(self._observation))
        self._sums = EpisodeSums(num_envs)
        self._episodes: list[tuple[float, int]] = []
        self._between_episodes = False
        self._closed = False

        self._size = torch.Size([num_envs])
        self._tree = tree_maker([leaf.path for leaf in self._envs.observations])
        self._action_keys: list[NestedKey] = [_key(leaf) for leaf in self._envs.actions]
        self._steps = frames_per_batch // num_envs
        # Where an environment may make no transition in a step, it makes one in every second step at least.
        rows = 2 * self._steps if self._envs.skips else self._steps
        self._batch, self._columns = allocate(self._envs.observations, num_envs, rows, worker_idx)
        self._written: list[tuple[NestedKey, tuple[Tensor, ...]]] = []
        self._action_columns: Arrays = []
        self._no_grad = torch.inference_mode()

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches without end; episodes go on where the last batch, of whichever iterator, left them.

        Raises:
            RuntimeError: The collector is closed.
        """
        while True:
            yield self._collect()

    def progress(self) -> tuple[int, str]:
        """How many steps and resets environments have begun so far, and what is under way; for any thread."""
        return self._envs.at.calls, str(self._envs.at)

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
        on with the next seed that nobody plays. (Whichever of all episodes end first would be the short ones.) A vector
        environment plays rounds of one episode per environment; a round begins with a reset with one seed.

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
        check_draws = interaction_type() is InteractionType.DETERMINISTIC

        def choose(observation: Arrays) -> Arrays:
            nonlocal check_draws
            drawn_before = torch.get_rng_state() if check_draws else None
            with torch.inference_mode():
                actions = self._actions(self._check_output(self._call(observation)))
            if drawn_before is not None and not torch.equal(drawn_before, torch.get_rng_state()):
                raise ValueError(_draws_anyway(self.policy))
            check_draws = False
            raise_first(self._outside([action[:, None] for action in actions]))
            return actions

        with unvalidated:
            return self._envs.play(seeds, choose)

    def close(self) -> None:
        """Close the environments. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._envs.close()

    def _collect(self) -> TensorDict:
        self._check_open()
        if self._between_episodes:
            self._observation = self._envs.reset()
            self._sums.forget()
            self._between_episodes = False
        each_step = self.update_at == "step"
        act = self._act_with_newest if each_step else self._act
        envs, columns = self._envs, self._columns
        made = np.zeros(self.num_envs, np.int64)  # transitions
        with unvalidated, nullcontext() if each_step else self.gate:
            columns.version.fill(self.gate.version)
            for t in range(columns.reward.shape[1]):
                for column, array in zip(columns.observation, self._observation, strict=True):
                    column[:, t] = array
                actions = act(self._observation, t)
                following, self._observation, reward, terminated, truncated, real = envs.step(actions)
                for column, array in zip(columns.following, following, strict=True):
                    column[:, t] = array
                columns.reward[:, t] = reward
                columns.terminated[:, t] = terminated
                columns.truncated[:, t] = truncated
                if real is not None:
                    columns.real[:, t] = real
                    made += real
                    if made.min() == self._steps:
                        break
        np.logical_or(columns.terminated, columns.truncated, out=columns.done)
        self._check_batch(t + 1)
        rows = slice(t + 1)
        self._episodes += self._sums.add(columns.reward[:, rows], columns.done[:, rows], columns.real[:, rows])
        # The tensors are shared; keys that the consumer adds stay its own.
        return self._batch.copy() if not envs.skips else self._real_rows(t + 1)

    def _real_rows(self, rows: int) -> TensorDict:
        """Of these rows, the first transitions of each environment, as many as a batch has.

        All environments step together, so one that was reset seldom has made more. What it has made beyond the batch
        would not have been made with the weights of the next one, and is left out.
        """
        skipped = torch.from_numpy(~self._columns.real[:, :rows])
        where = skipped.to(torch.uint8).argsort(dim=1, stable=True)[:, : self._steps]
        batch: TensorDict = self._batch[torch.arange(self.num_envs).unsqueeze(1), where]
        return batch

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this GymCollector is closed: build a new one")

    def _call(self, observation: Arrays) -> Any:
        """What the policy makes of observations that nobody else will write to."""
        given = unchecked(self._tree(map(torch.from_numpy, observation)), self._size)
        self._envs.at.index = None
        try:
            return self.policy(given)
        except Exception as error:
            raise_first(self._nan_in(observation), error)  # of which a policy complains in its own words
            raise

    def _act(self, observation: Arrays, t: int) -> Arrays:
        """Call the policy, keep what it writes in column ``t``, and return the actions."""
        with self._no_grad:
            out = self._call(observation)
            if not self._written:
                self._add_policy_columns(out)
            found = dict(out.items())  # at a third of what get() takes for each
            for key, column in self._written:
                column[t].copy_(found[key] if key in found else self._get(out, key))
        # Copies: what an environment does to its action stays its own.
        return [column[:, t].copy() for column in self._action_columns]

    def _act_with_newest(self, observation: Arrays, t: int) -> Arrays:
        """The same with the newest weights, whose version is written down."""
        with self.gate:
            self._columns.version[:, t] = self.gate.version
            return self._act(observation, t)

    def _actions(self, out: TensorDictBase) -> Arrays:
        return [out.get(key).cpu().numpy() for key in self._action_keys]

    # --- what is wrong -------------------------------------------------------------------------------------------

    def _check_batch(self, rows: int) -> None:
        """Look at these rows of a whole batch before anybody sees it."""
        columns, names = self._columns, self._envs.names
        raise_first(
            [
                *nan_in((column[:, :rows] for column in columns.observation), names),
                *self._outside([self._batch[key].cpu().numpy()[:, :rows] for key in self._action_keys]),
                *nan_in((column[:, :rows] for column in columns.following), names, columns.reward[:, :rows]),
            ]
        )

    def _outside(self, actions: Arrays) -> Iterator[Fault | None]:
        """What is wrong with actions, one array ``[num_envs, T, ...]`` for each leaf."""
        for leaf, array in zip(self._envs.actions, actions, strict=True):
            fault = find_outside(leaf.space, array, self._envs.names)
            yield fault and Fault(fault.step, f"{fault.text} (policy: {type(self.policy).__name__})")

    def _nan_in(self, observation: Arrays) -> list[Fault | None]:
        return nan_in((array[:, None] for array in observation), self._envs.names)

    def _check_output(self, out: Any) -> TensorDictBase:
        if isinstance(out, TensorDictBase):
            missing = [key for key in self._action_keys if out.get(key, None) is None]
            found = str(sorted(map(str, out.keys(include_nested=True, leaves_only=True))))
            if not missing:
                return out
        else:
            missing, found = self._action_keys, type(out).__name__
        raise ValueError(
            f"the policy {type(self.policy).__name__} has to return a TensorDict with "
            f"{', '.join(map(repr, missing))}; it returned {found}"
        )

    def _get(self, out: TensorDictBase, key: NestedKey) -> Tensor:
        value: Tensor | None = out.get(key, None)
        if value is None:
            raise ValueError(
                f"the policy {type(self.policy).__name__} has to write in each call what it wrote in its first one; "
                f"{key!r} is missing"
            )
        return value

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
        self._action_columns = [self._batch[key].numpy() for key in self._action_keys]


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


def _key(leaf: Leaf) -> NestedKey:
    return leaf.path if leaf.keys else leaf.path[0]
