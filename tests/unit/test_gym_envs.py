"""Spaces of any shape, and vector environments of any reset mode: what GymCollector makes of them. One process."""

from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from lightning_weightsync.collectors.gym import GymCollector
from tests.helpers.envs import LENGTHS, CountingEnv, ends_by_truncation

NUM_ENVS, STEPS = 3, 7


def collector(env, policy, *, steps=STEPS, num_envs=NUM_ENVS, seed=1):
    return GymCollector(env, policy, num_envs=num_envs, frames_per_batch=num_envs * steps, worker_idx=0, seed=seed)


def batches(source, count):
    return [batch.clone() for batch in islice(source, count)]


class Steady(nn.Module):
    """Always the same action."""

    def __init__(self, action=0):
        super().__init__()
        self.action = action

    def forward(self, td):
        return td.set("action", torch.full(td.batch_size, self.action))


# --- spaces ----------------------------------------------------------------------------------------------------------

ACTION_SPACES = {
    "discrete": Discrete(5),
    "multi_discrete": MultiDiscrete([3, 4]),
    "multi_binary": MultiBinary(3),
    "box": Box(-1, 1, (2, 2), np.float32),
    "dict": Dict(move=MultiDiscrete([3, 4]), aim=Dict(at=Box(0, 1, (2,), np.float32), fire=Discrete(2))),
    "tuple": Tuple((Discrete(5), Tuple((MultiBinary(2), Box(0, 1, (1,), np.float32))))),
}


class Recording(gymnasium.Env):
    """Keeps the actions that it was given; the observation is a tree with all kinds of leaves."""

    observation_space = Dict(
        camera=Box(0, 255, (2, 3, 1), np.uint8),
        parts=Tuple((Discrete(100), Dict(on=MultiBinary(2), level=MultiDiscrete([9, 100])))),
    )

    def __init__(self, action_space, made):
        self.action_space = action_space
        self.actions = []
        self.steps = 0
        made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.actions.append(action)
        self.steps += 1
        return self._observe(), 0.0, self.steps == 4, False, {}

    def _observe(self):
        k = self.steps
        level = np.array([k % 9, k])
        return {
            "camera": np.full((2, 3, 1), 250 + k, np.uint8),
            "parts": (k, {"on": np.array([k % 2, 1], np.int8), "level": level}),
        }


def sampled(space, n, generator):
    """A batch of actions, as nested tensors with names for the places of tuples."""
    if isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        return {str(key): sampled(part, n, generator) for key, part in parts}
    if isinstance(space, Box):
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        return low + (high - low) * torch.rand(n, *space.shape, generator=generator)
    count = torch.as_tensor(getattr(space, "nvec", 2 if isinstance(space, MultiBinary) else getattr(space, "n", 2)))
    drawn = (torch.rand(n, *space.shape, generator=generator) * count).long()
    return drawn.to(torch.int8) if isinstance(space, MultiBinary) else drawn


class Acting(nn.Module):
    def __init__(self, space):
        super().__init__()
        self.space = space
        self.generator = torch.Generator().manual_seed(3)
        self.dtypes = set()

    def forward(self, td):
        self.dtypes |= {leaf.dtype for leaf in td.values(include_nested=True, leaves_only=True)}
        return td.set("action", sampled(self.space, len(td), self.generator))


def row_of(space, columns, e, t):
    """What one environment is to be given at one step."""
    if isinstance(space, Dict):
        return {key: row_of(part, columns[key], e, t) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(row_of(part, columns[str(k)], e, t) for k, part in enumerate(space.spaces))
    return columns[e, t].numpy()


def assert_same(left, right):
    assert type(left) is type(right) or not isinstance(left, dict | tuple)
    if isinstance(left, dict | tuple):
        assert len(left) == len(right)
        for key in left if isinstance(left, dict) else range(len(left)):
            assert_same(left[key], right[key])
    else:
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_actions_of_every_space_reach_the_environment_whose_row_they_are(name):
    space, made = ACTION_SPACES[name], []
    source = collector(partial(Recording, space, made), partial(Acting, space))
    rows = torch.cat(batches(source, 2), dim=1)
    for e, env in enumerate(made):
        for t, action in enumerate(env.actions):
            assert_same(action, row_of(space, rows["action"], e, t))


def test_observations_of_dict_and_tuple_spaces_are_nested_columns_of_the_spaces_dtypes():
    source = collector(partial(Recording, Discrete(5), []), Steady)
    rows = torch.cat(batches(source, 2), dim=1)
    steps = torch.arange(2 * STEPS).remainder(4).expand(NUM_ENVS, -1)
    for side, k in ((rows, steps), (rows["next"], steps + 1)):
        seen = side["observation"]
        assert torch.equal(seen["camera"], (250 + k).to(torch.uint8)[..., None, None, None].expand(-1, -1, 2, 3, 1))
        assert torch.equal(seen["parts", "0"], k)
        assert torch.equal(seen["parts", "1", "on"], torch.stack([k % 2, torch.ones_like(k)], -1).to(torch.int8))
        assert torch.equal(seen["parts", "1", "level"], torch.stack([k % 9, k], -1))


def test_the_policy_is_given_bytes_as_bytes():
    space = Discrete(5)
    source = collector(partial(Recording, space, []), partial(Acting, space))
    next(iter(source))
    assert source.policy.dtypes == {torch.uint8, torch.int8, torch.int64}


def test_a_policy_that_lacks_a_part_of_the_action_is_told_which():
    space = ACTION_SPACES["tuple"]

    class Half(nn.Module):
        def forward(self, td):
            return td.set("action", {"0": torch.zeros(len(td), dtype=torch.int64)})

    with pytest.raises(ValueError, match=r"Half .*\('action', '1', '0'\), \('action', '1', '1'\); it returned"):
        next(iter(collector(partial(Recording, space, []), Half)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            np.zeros(1, np.float32),
            r"environment 0 \(Wrong\) returned .* shape \(1,\), and its space .* has \(3,\)",
        ),  # numpy would broadcast it
        (np.zeros((3, 1), np.float32), r"shape \(3, 1\)"),
        (np.zeros(3, np.complex64), "dtype complex64"),
    ],
)
def test_an_observation_that_its_space_does_not_allow_is_an_error(wrong, message):
    class Wrong(CountingEnv):
        def step(self, action):
            return wrong, *super().step(action)[1:]

    with pytest.raises(ValueError, match=message):
        next(iter(collector(Wrong, Steady)))


def test_environments_of_different_spaces_are_refused():
    spaces = iter([Discrete(2), Discrete(3)])

    class Other(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = next(spaces)

    with pytest.raises(ValueError, match=r"different spaces: Discrete\(2\) and Discrete\(3\)"):
        collector(Other, Steady, num_envs=2)


# --- vector environments ---------------------------------------------------------------------------------------------


class Plain(CountingEnv):
    """Without infos, which a vector environment would have to merge."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {}

    def step(self, action):
        return *super().step(action)[:4], {}


class Nested(Plain):
    observation_space = Dict(counts=Box(0, 2**24, (3,), np.float32), last=Tuple((Discrete(99),)))

    def _observe(self):
        return {"counts": super()._observe(), "last": (self.count,)}


def vector_env(mode, *, env=Plain, num_envs=NUM_ENVS, copy=True):
    return SyncVectorEnv([env] * num_envs, autoreset_mode=mode, copy=copy)


def assert_is_transition(row, counts, following):
    """Of a ``CountingEnv``, with action 1."""
    episode, step, mark = row["observation"][counts].tolist() if counts else row["observation"].tolist()
    length = LENGTHS[int(episode) % len(LENGTHS)]
    ended = step + 1 == length
    assert (following[counts] if counts else following).tolist() == [episode, step + 1, mark]
    assert row["next", "reward"].tolist() == [10.0 * (step + 1) + 1]
    assert row["next", "terminated"].item() == (ended and not ends_by_truncation(int(episode)))
    assert row["next", "truncated"].item() == (ended and ends_by_truncation(int(episode)))
    assert row["next", "done"].item() == ended


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("env", [Plain, Nested])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_row_of_a_vector_environment_is_a_transition_whenever_it_resets(mode, env, copy):
    source = collector(partial(vector_env, mode, env=env, copy=copy), partial(Steady, 1))
    counts = "counts" if env is Nested else None
    last = [(-1.0, 0.0)] * NUM_ENVS
    for batch in batches(source, 4):
        assert batch.batch_size == (NUM_ENVS, STEPS)
        for e in range(NUM_ENVS):
            for t, row in enumerate(batch[e].unbind(0)):
                assert_is_transition(row, counts, row["next", "observation"])
                if env is Nested:
                    seen = row["observation", "counts"]
                    assert row["observation", "last", "0"] == seen[1]
                    assert row["next", "observation", "last", "0"] == seen[1] + 1
                else:
                    seen = row["observation"]
                episode, step = seen[:2].tolist()
                unbroken = (last[e][0], last[e][1] + 1), (last[e][0] + 1, 0.0)
                if t or mode is not AutoresetMode.NEXT_STEP:  # else some may be left out between two batches
                    assert (episode, step) in unbroken
                else:
                    assert (episode, step) > last[e]
                last[e] = episode, step


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_episodes_of_a_vector_environment_are_told_with_their_returns_and_lengths(mode):
    source = collector(partial(vector_env, mode, num_envs=1), partial(Steady, 1), num_envs=1, steps=9)
    next(iter(source))
    assert source.take_episodes() == [(60.0 + 3, 3), (10.0 + 1, 1), (150.0 + 5, 5)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_environment_plays_whole_episodes(mode):
    source = collector(partial(vector_env, mode), partial(Steady, 1))
    played = source.play_episodes([5, 6, 7, 8, 9])
    # Each environment's next episode in each of two rounds, whatever it did before: its episodes are 1, 2, 3, ...
    lengths = [length for _, length in played]
    assert len(played) == 5 and set(lengths) <= set(LENGTHS)
    assert all(value == 10 * sum(range(1, length + 1)) + length for value, length in played)


def test_cartpoles_own_vector_environment_makes_no_row_of_a_reset():
    make = partial(gymnasium.make_vec, "CartPole-v1", 8, vectorization_mode="vector_entry_point")
    source = collector(make, partial(Steady, 1), num_envs=8, steps=40)
    for batch in batches(source, 3):
        done = batch["next", "done"][..., 0]
        assert done.any()
        assert (batch["next", "reward"] == 1).all(), "a reset step has no reward"
        before, after = batch[:, :-1], batch[:, 1:]
        torch.testing.assert_close(
            before["next", "observation"][~done[:, :-1]], after["observation"][~done[:, :-1]], rtol=0, atol=0
        )
        assert (after["observation"][done[:, :-1]].abs() <= 0.05).all(), "what follows an end is a first observation"
    returns = source.take_episodes()
    assert returns and all(value == length > 5 for value, length in returns)


def test_a_vector_environments_experience_depends_on_its_seed_and_on_nothing_else():
    def seen(seed):
        make = partial(gymnasium.make_vec, "CartPole-v1", 4, vectorization_mode="vector_entry_point")
        return batches(collector(make, Steady, num_envs=4, seed=seed), 1)[0]["observation"]

    first = seen(1)
    assert torch.equal(first, seen(1)) and not torch.equal(first, seen(2))
    assert first[:, 0].unique(dim=0).shape[0] == 4


class Unsaid(SyncVectorEnv):
    def __init__(self, **change):
        super().__init__([Plain] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        self.metadata = self.metadata | change

    def step(self, actions):
        return *super().step(actions)[:4], {}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (partial(vector_env, AutoresetMode.SAME_STEP, num_envs=3), "SyncVectorEnv has num_envs=3, not 2"),
        (partial(Unsaid, autoreset_mode=None), "does not say how it resets.*not None"),
        (Unsaid, "resets in the same step, and did not hand over the last observations"),
    ],
)
def test_a_vector_environment_that_cannot_be_used_is_refused_with_the_reason(env, message):
    with pytest.raises(ValueError, match=message):
        next(iter(collector(env, Steady, num_envs=2)))
