import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import islice, repeat

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Dict, Text
from tensordict import TensorDict
from torch import nn

from lightning_weightsync.collectors.base import Collector
from lightning_weightsync.collectors.gym import GymCollector
from tests.helpers.envs import LENGTHS, CountingEnv, ends_by_truncation


class Alternating(nn.Module):
    """Action = (episode + step) mod 2; hands back what it saw, in a new TensorDict."""

    def forward(self, td):
        seen = td["observation"]
        action = (seen[:, 0] + seen[:, 1]).long() % 2
        return TensorDict(
            {"observation": seen, "action": action, "aux": {"seen": seen.clone(), "half": seen.bfloat16()}},
            td.batch_size,
        )


class Versioned(nn.Module):
    """Writes the weight that was in force when the call began, and when it ended."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.called = threading.Event()

    def forward(self, td):
        td["action"] = torch.zeros(td.batch_size, dtype=torch.int64)
        td["begin"] = self.weight.expand(td.batch_size).clone()
        self.called.set()
        time.sleep(1e-4)  # lets the switching thread run; what is asserted does not depend on it
        td["end"] = self.weight.expand(td.batch_size).clone()
        return td


def collector(env=CountingEnv, policy=Alternating, *, num_envs=3, steps=7, worker_idx=0, seed=1, **kwargs):
    return GymCollector(
        env, policy, num_envs=num_envs, frames_per_batch=num_envs * steps, worker_idx=worker_idx, seed=seed, **kwargs
    )


def collect(source, num_batches):
    """Several batches side by side: row ``e`` is the unbroken experience of environment ``e``."""
    return torch.cat([batch.clone() for batch in islice(source, num_batches)], dim=1)


def expected_rows(num_rows):
    """(episode, step before, episode's length) of each transition of one environment."""
    episode, step = 0, 0
    for _ in range(num_rows):
        length = LENGTHS[episode % len(LENGTHS)]
        yield episode, step, length
        step += 1
        if step == length:
            episode, step = episode + 1, 0


@contextmanager
def switching(gate, policy):
    """Another thread that switches to the next version whenever the policy was called and the gate lets it."""
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            if policy.called.wait(0.01):
                policy.called.clear()
                with gate.alone(time.monotonic() + 30), torch.no_grad():
                    policy.weight += 1
                    gate.version += 1

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_at", ["batch", "step"])
@pytest.mark.parametrize("reuse_memory", [False, True])
def test_every_row_is_the_transition_that_the_environment_made(update_at, reuse_memory):
    rows = collect(collector(partial(CountingEnv, reuse_memory=reuse_memory), update_at=update_at), 6)
    assert rows.batch_size == (3, 42)
    following = rows["next"]
    for e in range(3):
        for t, (episode, step, length) in enumerate(expected_rows(42)):
            ended = step + 1 == length
            action = (episode + step) % 2
            assert rows["observation"][e, t, :2].tolist() == [episode, step]
            assert rows["action"][e, t] == action
            assert following["observation"][e, t, :2].tolist() == [episode, step + 1]
            assert following["reward"][e, t].tolist() == [10.0 * (step + 1) + action]
            assert following["terminated"][e, t].tolist() == [ended and not ends_by_truncation(episode)]
            assert following["truncated"][e, t].tolist() == [ended and ends_by_truncation(episode)]
            assert following["done"][e, t].tolist() == [ended]
            # The mark is drawn per episode, so this also tells episodes of different environments apart.
            assert following["observation"][e, t, 2] == rows["observation"][e, t, 2]


def test_a_row_continues_the_one_before_across_batches_unless_an_episode_ended():
    rows = collect(collector(steps=1), 30)
    before, after = rows[:, :-1], rows[:, 1:]
    done = before["next", "done"][..., 0]
    assert done.any() and not done.all()
    torch.testing.assert_close(before["next", "observation"][~done], after["observation"][~done], rtol=0, atol=0)
    assert (after["observation"][done][:, 1] == 0).all()


def test_iterators_of_one_collector_share_its_episodes_and_making_one_collects_nothing():
    source = collector(num_envs=1, steps=2)
    first, second = iter(source), iter(source)
    steps = [next(iterator)["observation"][0, :, :2].tolist() for iterator in (first, second, first)]
    assert steps == [[[0, 0], [0, 1]], [[0, 2], [1, 0]], [[2, 0], [2, 1]]]


def test_the_policy_acts_on_the_observation_of_its_row():
    rows = collect(collector(), 3)
    assert torch.equal(rows["aux", "seen"], rows["observation"])
    assert torch.equal(rows["aux", "half"], rows["observation"].bfloat16())


def test_columns_have_the_promised_shapes_and_dtypes():
    batch = next(iter(collector(num_envs=2, steps=4, worker_idx=3)))
    columns = {
        key if isinstance(key, str) else ".".join(key): (tuple(leaf.shape), leaf.dtype)
        for key, leaf in batch.items(include_nested=True, leaves_only=True)
    }
    assert columns == {
        "observation": ((2, 4, 3), torch.float32),
        "action": ((2, 4), torch.int64),
        "aux.seen": ((2, 4, 3), torch.float32),
        "aux.half": ((2, 4, 3), torch.bfloat16),
        "policy_version": ((2, 4), torch.int64),
        "worker_idx": ((2, 4), torch.int64),
        "next.observation": ((2, 4, 3), torch.float32),
        "next.reward": ((2, 4, 1), torch.float32),
        "next.terminated": ((2, 4, 1), torch.bool),
        "next.truncated": ((2, 4, 1), torch.bool),
        "next.done": ((2, 4, 1), torch.bool),
    }
    assert (batch["worker_idx"] == 3).all()
    assert not any(leaf.is_inference() for leaf in batch.values(include_nested=True, leaves_only=True))


def test_keys_that_a_consumer_adds_to_a_batch_do_not_come_back_in_the_next():
    batches = iter(collector())
    first = next(batches)
    first["advantage"] = torch.zeros(first.batch_size)
    first["next", "value"] = torch.zeros(first.batch_size)
    second = next(batches)
    assert "advantage" not in second and ("next", "value") not in second.keys(include_nested=True)


def test_episodes_are_taken_once_with_their_returns_and_lengths():
    source = collector(num_envs=1, steps=9)  # episodes 0, 1 and 2, of 3, 1 and 5 steps
    batches = iter(source)
    assert source.take_episodes() == []
    next(batches)
    # Rewards are 10 * step + action, and the first action of an episode is its parity.
    assert source.take_episodes() == [(60.0 + 1, 3), (10.0 + 1, 1), (150.0 + 2, 5)]
    assert source.take_episodes() == []
    next(batches)
    assert [length for _, length in source.take_episodes()] == [2, 4, 3]


def test_cartpole_rows_are_those_of_a_bare_environment_with_the_same_actions_and_seed():
    def policy():
        return nn.Sequential(RandomActions())

    rows = collect(collector("CartPole-v1", policy, num_envs=1, steps=64, seed=5), 4)[0]
    env = gymnasium.make("CartPole-v1")
    seed = int(np.random.SeedSequence(5, spawn_key=(0,)).generate_state(1)[0])
    observation, _ = env.reset(seed=seed)
    assert rows["next", "done"].sum() > 3
    for row in rows.unbind(0):
        np.testing.assert_array_equal(row["observation"].numpy(), observation)
        observation, _, terminated, truncated, _ = env.step(row["action"].item())
        np.testing.assert_array_equal(row["next", "observation"].numpy(), observation)
        assert row["next", "done"].item() == (terminated or truncated)
        if terminated or truncated:
            observation, _ = env.reset()


class RandomActions(nn.Module):
    def forward(self, td):
        return td.set("action", torch.randint(0, 2, td.batch_size))


# --- versions --------------------------------------------------------------------------------------------------------


def batches_until(source, enough, deadline=60.0):
    """Batches, each of one version or with all its calls consistent, until ``enough(all versions so far)``."""
    end = time.monotonic() + deadline
    seen = [[0]]
    for batch in source:
        versions = batch["policy_version"]
        assert torch.equal(batch["begin"], batch["end"]), "the weights changed inside a policy call"
        assert torch.equal(batch["begin"].long(), versions), "a sample's version is not that of the weights"
        assert (versions == versions[:1]).all(), "environments of one policy call differ in version"
        seen.append(versions[0].tolist())
        assert seen[-2][-1:] + seen[-1] == sorted(seen[-2][-1:] + seen[-1]), "a version came back"
        if enough(seen):
            return seen
        assert time.monotonic() < end, f"no such batch within {deadline} s"
    raise AssertionError("unreachable")


def test_a_batch_has_one_version_when_weights_are_updated_between_batches():
    source = collector(policy=Versioned)
    with switching(source.gate, source.policy):
        seen = batches_until(source, lambda seen: len({v for batch in seen for v in batch}) >= 5)
    assert all(len(set(versions)) == 1 for versions in seen)


def test_weights_change_between_policy_calls_of_a_batch_when_updated_at_steps():
    source = collector(policy=Versioned, update_at="step")
    with switching(source.gate, source.policy):
        batches_until(source, lambda seen: len(set(seen[-1])) >= 3)


@pytest.mark.parametrize(("update_at", "held"), [("batch", True), ("step", False)])
def test_the_gate_is_held_in_environment_steps_only_when_weights_are_updated_between_batches(update_at, held):
    inside = []

    class Watching(CountingEnv):
        def step(self, action):
            inside.append(source.gate.inside)
            return super().step(action)

    source = collector(Watching, num_envs=1, steps=4, update_at=update_at)
    next(iter(source))
    assert inside == [held] * 4
    assert not source.gate.inside


@pytest.mark.parametrize("update_at", ["batch", "step"])
def test_an_error_of_the_environment_or_the_policy_comes_through_and_leaves_the_gate(update_at):
    class Broken(CountingEnv):
        def step(self, action):
            raise OSError("no such joint")

    class Leaving(CountingEnv):
        def step(self, action):
            raise SystemExit("no licence")

    class Confused(nn.Module):
        def forward(self, td):
            raise ArithmeticError("not today")

    for source, error in (
        (collector(Broken, update_at=update_at), OSError),
        (collector(Leaving, update_at=update_at), SystemExit),
        (collector(policy=Confused), ArithmeticError),
    ):
        with pytest.raises(error) as caught:
            next(iter(source))
        named = any("in step()" in note for note in getattr(caught.value, "__notes__", []))
        assert named == (error is not ArithmeticError)
        assert not source.gate.inside


# --- seeds -----------------------------------------------------------------------------------------------------------


def marks(**kwargs):
    return collect(collector(steps=9, **kwargs), 2)["observation"][..., 2]


def test_the_same_seed_and_worker_give_the_same_episodes():
    assert torch.equal(marks(seed=7, worker_idx=1), marks(seed=7, worker_idx=1))


def test_environments_workers_and_seeds_differ():
    first = torch.cat([marks(seed=seed, worker_idx=idx)[:, 0] for seed in (7, 8) for idx in (0, 1)])
    assert first.unique().numel() == first.numel() == 12


def test_a_seed_may_be_larger_than_a_word():
    assert not torch.equal(marks(seed=2**80), marks(seed=2**80 + 1))


def test_global_random_streams_are_left_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    collect(collector(), 2)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()


class Chatting(CountingEnv):
    observation_space = Dict(said=Text(9))


# --- construction, end -----------------------------------------------------------------------------------------------


def test_it_is_a_collector_whose_policy_is_in_eval_mode():
    source = collector()
    assert isinstance(source, Collector)
    assert not source.policy.training


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_envs": 3, "frames_per_batch": 10}, ValueError, "frames_per_batch=10 .* num_envs=3"),
        ({"num_envs": 3, "frames_per_batch": 0}, ValueError, "frames_per_batch=0 .* num_envs=3"),
        ({"num_envs": 0, "frames_per_batch": 4}, ValueError, "num_envs=0"),
        ({"update_at": "frame"}, ValueError, "'frame' .* 'batch' or 'step'"),
        ({"policy": nn.Linear(3, 2)}, TypeError, r"functools.partial\(Linear"),
        ({"policy": "net"}, TypeError, "policy must be a factory"),
        ({"policy": lambda: lambda td: td}, TypeError, "must return a torch.nn.Module, not function"),
        ({"env": CountingEnv()}, TypeError, "factory of an environment, not CountingEnv"),
        ({"env": lambda: "CartPole-v1"}, TypeError, "must return a gymnasium.Env, not str"),
        ({"env": partial(next, repeat(CountingEnv()))}, ValueError, "returned one environment twice"),
        ({"env": Chatting}, TypeError, "observation space Dict.*Text.*FlattenObservation"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_way_out(change, error, message):
    arguments = {"env": CountingEnv, "policy": Alternating, "num_envs": 2, "frames_per_batch": 8} | change
    with pytest.raises(error, match=message):
        GymCollector(**arguments, worker_idx=0, seed=0)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"actions": 0}, "Writes has to return a TensorDict with 'action'; it returned .*'actions'"),
        (None, "it returned NoneType"),
        ({"action": 0, "worker_idx": 1}, "writes 'worker_idx', but 'next', 'policy_version', 'worker_idx' are"),
    ],
)
def test_a_policy_that_writes_the_wrong_keys_is_named(written, message):
    class Writes(nn.Module):
        def forward(self, td):
            if written is None:
                return None
            return td.update({key: torch.full(td.batch_size, value) for key, value in written.items()})

    with pytest.raises(ValueError, match=message):
        next(iter(collector(policy=Writes)))


def test_a_policy_that_stops_writing_what_it_wrote_is_named():
    class Forgets(nn.Module):
        calls = 0

        def forward(self, td):
            self.calls += 1
            td["action"] = torch.zeros(td.batch_size, dtype=torch.int64)
            return td.set("value", td["action"]) if self.calls < 3 else td

    with pytest.raises(ValueError, match="Forgets has to write in each call .*'value' is missing"):
        next(iter(collector(policy=Forgets)))


def test_discrete_observations_and_continuous_actions_are_columns_too():
    class Pendulum(nn.Module):
        def forward(self, td):
            return td.set("action", torch.rand(*td.batch_size, 1))

    class Right(nn.Module):
        def forward(self, td):
            return td.set("action", torch.full(td.batch_size, 2))

    assert collect(collector("Pendulum-v1", Pendulum), 1)["action"].shape == (3, 7, 1)
    lake = collect(collector("FrozenLake-v1", Right, num_envs=2), 1)
    assert lake["observation"].shape == (2, 7) and lake["observation"].dtype == torch.int64


def test_closing_closes_the_environments_and_ends_collection():
    envs = []

    def make():
        envs.append(CountingEnv())
        return envs[-1]

    source = collector(make)
    batches = iter(source)
    next(batches)
    source.close()
    source.close()
    assert len(envs) == 3 and all(env.closed for env in envs)
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)
