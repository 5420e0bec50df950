"""Returns and lengths of episodes, against a loop that adds up one row after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_weightsync.collectors.returns import EpisodeSums


@settings(max_examples=200, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    often=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
)
def test_sums_are_those_of_a_loop_over_rows(num_envs: int, batches: list[int], seed: int, often: float) -> None:
    rng = np.random.default_rng(seed)
    sums = EpisodeSums(num_envs)
    returns, lengths = [0.0] * num_envs, [0] * num_envs
    for rows in batches:
        shape = (num_envs, rows)
        reward = rng.integers(-8, 8, shape).astype(np.float32)
        real = rng.random(shape) < 0.8
        done = real & (rng.random(shape) < often)
        expected = []
        for t in range(rows):
            for e in range(num_envs):
                returns[e] += float(reward[e, t]) * bool(real[e, t])
                lengths[e] += int(real[e, t])
                if done[e, t]:
                    expected.append((returns[e], lengths[e]))
                    returns[e], lengths[e] = 0.0, 0
        assert sums.add(reward, done, real) == expected


def test_rows_that_may_lie_anywhere() -> None:
    """A batch that makes fewer rows than it has room for hands over a part of its columns."""
    sums = EpisodeSums(2)
    reward, done = np.arange(12.0).reshape(2, 6), np.zeros((2, 6), np.bool_)
    done[0, 2] = done[1, 1] = done[1, 4] = True
    real = np.ones_like(done)
    assert sums.add(reward[:, :3], done[:, :3], real[:, :3]) == [(6.0 + 7, 2), (0.0 + 1 + 2, 3)]
    assert sums.add(reward[:, 3:], done[:, 3:], real[:, 3:]) == [(8.0 + 9 + 10, 3)]


def test_a_reward_that_is_infinite_stays_in_its_episode() -> None:
    sums = EpisodeSums(1)
    reward, done = np.array([[1.0, np.inf, 2.0, 3.0]]), np.array([[False, True, False, True]])
    assert sums.add(reward, done, np.ones_like(done)) == [(np.inf, 2), (5.0, 2)]


def test_what_is_no_transition_counts_for_nothing_whatever_it_holds() -> None:
    sums = EpisodeSums(1)
    reward, real = np.array([[np.nan, 2.0]], np.float32), np.array([[False, True]])
    assert sums.add(reward, np.array([[False, True]]), real) == [(2.0, 1)]


@pytest.mark.parametrize("forgets", [False, True])
def test_new_episodes_begin_at_nothing(forgets: bool) -> None:
    sums = EpisodeSums(1)
    one, no, yes = np.ones((1, 1)), np.zeros((1, 1), np.bool_), np.ones((1, 1), np.bool_)
    assert sums.add(one, no, yes) == []
    if forgets:
        sums.forget()
    assert sums.add(one, yes, yes) == [(1.0, 1) if forgets else (2.0, 2)]


def test_returns_are_added_up_in_double_precision() -> None:
    sums = EpisodeSums(1)
    rows = 4096
    reward = np.full((1, rows), 16777217.0 / 16777216.0 * 0.1, np.float32)
    done = np.zeros((1, rows), np.bool_)
    done[0, -1] = True
    [(value, _)] = sums.add(reward, done, np.ones_like(done))
    assert value == pytest.approx(rows * float(reward[0, 0]), rel=1e-12)
