"""What travels beside weights and batches: values with pushes, sums with batches."""

import copy
import os
import re
import signal
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, WeightSyncError, values
from tests.helpers.collectors import NUM_ENVS, STEPS, gym_collector, update_at_batch_or_step
from tests.helpers.envs import CountingEnv
from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.policies import Policy
from tests.helpers.processes import wait_until

DOCS = Path(__file__).parents[2] / "docs" / "collectors.md"


class Scheduled(Policy):
    """Writes the value that it sees, -1 if there is none, and how often it was called."""

    calls = 0

    def forward(self, td):
        td["epsilon"] = torch.full(tuple(td.batch_size), values.get("epsilon", -1.0), dtype=torch.float64)
        self.calls += len(td)
        return super().forward(td)

    def take_sums(self):
        taken, self.calls = self.calls, 0
        return {"calls": torch.tensor(taken), "pair": torch.tensor([0.1, taken], dtype=torch.float64)}


class Picky(Scheduled):
    """Applies no weights at level 13."""

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        if values.get("level") == 13:
            raise ValueError("unlucky")


class Levelled(CountingEnv):
    """The reward: the level when it was built, and 10 times that of its last reset, and 100 times that of now."""

    def __init__(self):
        super().__init__()
        self.built = values.get("level", 0)

    def reset(self, **kwargs):
        self.began = values.get("level", 0)
        return super().reset(**kwargs)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return (observation, self.built + 10 * self.began + 100 * values.get("level", 0), *rest)


def group_of(num_workers, collector=None, **kwargs):
    scheme = DistributedWeightSyncScheme(timeout=60.0)
    factory = collector or partial(gym_collector, env=Levelled, policy=Scheduled)
    return CollectorGroup(factory, num_workers, weight_sync_schemes={"policy": scheme}, **kwargs)


def seen(batch, worker=None):
    """(values of epsilon, rewards) in a batch."""
    rows = batch if worker is None else batch[batch["worker_idx"][:, 0] == worker]
    return set(rows["epsilon"].unique().tolist()), set(rows["next", "reward"].unique().tolist())


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_values_come_into_force_with_the_next_push_wherever_code_runs(no_leftovers, num_workers):
    policy = Scheduled(1)
    with group_of(num_workers, seed=3) as group:
        group.broadcast(epsilon=torch.tensor(0.5), level=1)
        group.update_policy_weights_(policy)
        batches = iter(group)
        assert seen(next(batches)) == ({0.5}, {111.0})
        group.broadcast(epsilon=1 / 3)
        assert seen(next(batches)) == ({0.5}, {111.0}), "there was no push yet"
        group.update_policy_weights_(policy)
        assert seen(next(batches)) == ({1 / 3}, {111.0}), "a value that was not named stays"
        group.broadcast(level=2)
        group.update_policy_weights_(policy)
        epsilons, rewards = seen(next(batches))
        assert epsilons == {1 / 3} and 211.0 in rewards | {211.0} and rewards <= {211.0, 221.0}
        assert group.values == {"epsilon": 1 / 3, "level": 2}
        if num_workers == 0:
            assert dict(values) == {}, "the trainer's own code is no collector"
        with pytest.raises(TypeError, match="level"):
            group.broadcast(level=torch.zeros(2))
        assert group.values["level"] == 2


def test_replacements_and_late_joiners_have_the_current_values(no_leftovers):
    policy = Scheduled(1)
    with group_of(2) as group:
        group.broadcast(epsilon=0.5, level=1)
        group.update_policy_weights_(policy)
        group.broadcast(epsilon=0.25, level=2)
        group.update_policy_weights_(policy)
        group.broadcast(epsilon=0.125, level=3)  # not pushed yet
        os.kill(group.stats()[1]["pid"], signal.SIGKILL)
        batch = next(iter(group))
        assert group.stats()[1]["restarts"] == 1
        assert seen(batch, 1) == ({0.25}, {222.0}), "its environments were built with them, too"
        assert seen(batch, 0)[0] == {0.25}
        group.resize(3)
        assert seen(next(iter(group)), 2) == ({0.25}, {222.0})
        group.update_policy_weights_(policy)
        assert seen(next(iter(group)))[0] == {0.125}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_push_that_fails_brings_no_values(no_leftovers, num_workers):
    with group_of(num_workers, partial(gym_collector, policy=Picky)) as group:
        group.broadcast(epsilon=0.5, level=1)
        group.update_policy_weights_(Picky(1))
        group.broadcast(epsilon=0.25, level=13)
        group.update_policy_weights_(Picky(2))  # while it is applied the level is 1 yet
        with pytest.raises((WeightSyncError, ValueError), match="unlucky"):
            group.broadcast(epsilon=0.125)
            group.update_policy_weights_(Picky(3))
        batch = next(iter(group))
        assert seen(batch)[0] == {0.25} and batch["policy_version"].eq(1).all()


@pytest.mark.slow
def test_every_sample_has_the_values_of_its_version(no_leftovers):
    """Pushes in the background, workers that switch between batches and between policy calls."""
    value_of = {0: -1.0}
    with group_of(2, partial(update_at_batch_or_step, policy=Scheduled, steps=40), sync=False) as group:
        policy = Scheduled(1)
        group.update_policy_weights_(policy)
        versions = set()
        for batch in islice(group, 200):
            group.broadcast(epsilon=float(torch.rand(())))
            group.send_async({"policy": policy})
            value_of[group.version] = group.values["epsilon"]
            expected = [[value_of[version] for version in row] for row in batch["policy_version"].tolist()]
            assert batch["epsilon"].tolist() == expected
            versions |= set(batch["policy_version"].unique().tolist())
        assert len(versions) > 20


def test_an_evaluation_plays_with_the_values_of_its_group():
    class ByLevel(CountingEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return (observation, float(values.get("level", 0)), *rest)

    with group_of(0, partial(gym_collector, env=ByLevel, policy=Scheduled)) as group:
        group.broadcast(level=1)
        group.update_policy_weights_(Scheduled(1))
        evaluation = group.evaluation(episodes=4, deterministic=False)
        for level in (1, 5):
            group.broadcast(level=level)
            played = evaluation.play()
            assert torch.equal(played["episode_return"], level * played["episode_length"])


def test_values_are_checkpointed_with_the_group():
    group = group_of(0)
    group.broadcast(epsilon=0.5, levels=[1, 2])
    state = group.state_dict()
    assert CollectorGroup.is_state(state)
    resumed = group_of(0)
    resumed.load_state_dict(state)
    with resumed:
        resumed.update_policy_weights_(Scheduled(1))
        assert seen(next(iter(resumed)))[0] == {0.5}


def test_a_group_without_schemes_is_told_that_nothing_would_bring_them():
    with CollectorGroup(gym_collector, 0) as group, pytest.raises(RuntimeError, match="no weight_sync_schemes"):
        group.broadcast(epsilon=0.5)


def test_a_module_broadcasts_while_it_is_trained():
    class Annealing(Learner):
        def training_step(self, batch, batch_idx):
            group.broadcast(epsilon=1.0 / (2 + batch_idx))
            return super().training_step(batch, batch_idx)

    epsilons = []
    group = make_group(0, partial(gym_collector, policy=Scheduled), length=4)
    module = Annealing(on_batch=lambda batch: epsilons.append(batch["epsilon"].unique().tolist()))
    fit(module, group, make_callback(group))
    assert epsilons == [[-1.0], [1 / 2], [1 / 3], [1 / 4]]


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_workers_gather_is_summed_once(no_leftovers, num_workers):
    count = max(1, num_workers) * NUM_ENVS * STEPS
    with group_of(num_workers) as group:
        group.update_policy_weights_(Scheduled(1))
        assert group.reduce() == {}
        batches = iter(group)
        next(batches), next(batches)
        sums = group.reduce()
        assert sums["calls"].dtype == torch.float64 and sums["calls"] == 2 * count
        tenths = sum([0.1] * 2 * max(1, num_workers))
        assert torch.equal(sums["pair"], torch.tensor([tenths, 2 * count], dtype=torch.float64)), "to the last bit"
        assert group.reduce() == {}
        if num_workers:
            os.kill(group.stats()[1]["pid"], signal.SIGKILL)
        next(batches)
        assert group.reduce()["calls"] == count


@pytest.mark.slow
def test_what_was_gathered_for_batches_that_were_too_old_counts_too(no_leftovers):
    with group_of(1, sync=False, max_staleness=0) as group:
        policy = Scheduled(1)
        group.update_policy_weights_(policy)
        total, handed_over = 0.0, 0
        for _ in islice(group, 20):
            total += float(group.reduce()["calls"])
            handed_over += NUM_ENVS * STEPS
            group.update_policy_weights_(policy)
            group.update_policy_weights_(policy)
        assert wait_until(lambda: group.stats()[0]["state"] == "connected", 10)
        frames = group.stats()[0]["frames"]
        assert handed_over <= total <= frames


# --- the examples of the docs ----------------------------------------------------------------------------------------


def blocks_of(title):
    """The code of a section of docs/collectors.md."""
    section = DOCS.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_example_of_running_statistics_merges_exactly_what_was_seen_and_workers_get_it_back(no_leftovers):
    (code,) = blocks_of("Statistics that workers gather")
    batches, pushed = [], []

    def learn(actor, batch):
        if pushed:  # the worker's weights are those of the last push, statistics included
            before = pushed[-1]
            torch.testing.assert_close(batch["logits"], before.head(before.norm(batch["observation"])))
        with torch.no_grad():
            actor.head.weight.add_(0.1)
        batches.append(batch["observation"].reshape(-1, 4).double())
        rows = torch.cat(batches)
        expected = torch.stack([torch.full((4,), len(rows)).double(), rows.sum(0), rows.square().sum(0)])
        torch.testing.assert_close(actor.norm.seen, expected, rtol=1e-12, atol=1e-12)
        pushed.append(copy.deepcopy(actor))

    exec(code, {"learn": learn, "__name__": "docs_example"})
    assert len(batches) == 5 and sum(map(len, batches)) == 5 * 2 * 64


def test_the_example_of_values_runs():
    code, use = blocks_of("Values that are not weights")
    namespace = {"__name__": "docs_example"}
    exec(code, namespace)
    first, last = (line for line in use.splitlines() if line.startswith("group."))

    import gymnasium

    def make_env():
        return namespace["Windy"](gymnasium.make("CartPole-v1"))

    with group_of(0, partial(gym_collector, env=make_env, policy=namespace["Actor"], num_envs=4, steps=64)) as group:
        namespace["group"] = group
        exec(first, namespace)
        actor = namespace["Actor"]()
        group.update_policy_weights_(actor)
        exec(last, namespace)
        group.update_policy_weights_(actor)
        batch = next(iter(group))
        best = actor.net(batch["observation"]).argmax(-1)
        assert 0.85 < (batch["action"] == best).float().mean() < 1.0
    assert "docs_example" not in sys.modules
