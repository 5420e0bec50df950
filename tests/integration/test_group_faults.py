"""Whatever goes wrong in a worker ends in one clear error, in time: who, where, what, and what to do about it."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, WeightSyncTimeout, WorkerDied, WorkerError
from tests.helpers import collectors, envs
from tests.helpers.collectors import NUM_ENVS, STEPS, MisbehavingEnv, Stream, gym_collector, times
from tests.helpers.envs import Distorted
from tests.helpers.policies import Policy, fingerprint

ENV_TIMEOUT = 1.0
IN_TIME = ENV_TIMEOUT + 2
"""It is looked ten times in ``ENV_TIMEOUT``; the rest is for a busy machine."""


def group_of(num_workers, collector, **kwargs):
    return CollectorGroup(
        collector, num_workers, weight_sync_schemes={"policy": DistributedWeightSyncScheme(timeout=60.0)}, **kwargs
    )


def misbehaving(fault, at=2):
    """The first environment of a collector does ``fault()`` in its step ``at``; all others are well."""
    made = []

    def make_env():
        made.append(None)
        return MisbehavingEnv(fault if len(made) == 1 else int, at)

    return make_env


class Reckless(Policy):
    """Acts with 7."""

    def forward(self, td):
        td["action"] = super().forward(td)["action"] * 0 + 7
        return td


class FirstHangs(Stream):
    def __iter__(self):
        collectors.doze()
        yield from super().__iter__()


# --- raises ----------------------------------------------------------------------------------------------------------


def test_an_environment_that_raises_is_named_with_its_traceback(no_leftovers):
    factory = partial(gym_collector, env=misbehaving(collectors.stumble, at=STEPS + 1))
    with group_of(1, factory) as group:
        group.update_policy_weights_(Policy(1))
        next(iter(group))
        with pytest.raises(WorkerError) as caught:
            next(iter(group))
    text = str(caught.value)
    assert "worker 0 (pid" in text and "raised in phase 'collect': ArithmeticError: the dice rolled off" in text
    assert "environment 0 (CountingEnv), in step()" in text
    assert "in stumble" in caught.value.remote_traceback
    assert group.stats()[0]["restarts"] == 0


# --- hangs -----------------------------------------------------------------------------------------------------------


def test_an_environment_that_hangs_is_named_in_time_with_its_stack(no_leftovers):
    factory = partial(gym_collector, env=misbehaving(collectors.doze))
    with group_of(1, factory, env_timeout=ENV_TIMEOUT, max_restarts=0) as group:
        group.update_policy_weights_(Policy(1))
        pid = group.stats()[0]["pid"]
        started = time.monotonic()
        with pytest.raises(WeightSyncTimeout) as caught:
            next(iter(group))
        assert ENV_TIMEOUT <= time.monotonic() - started < IN_TIME
        started = time.monotonic()
    assert time.monotonic() - started < 1, "it was waited for"
    text = str(caught.value)
    assert f"worker 0 (pid {pid}) was stuck: environment 0 (CountingEnv), in step(), has not got on for 1." in text
    assert "env_timeout" in text and "in doze" in text


def test_a_worker_that_hangs_is_replaced_and_one_that_is_slow_is_not(no_leftovers, tmp_path):
    """Worker 0 takes almost twice ``env_timeout`` for a batch, and gets on all the time."""

    def factory(*, worker_idx, seed):
        if worker_idx == 0:
            env = partial(collectors.SlowEnv, 1.9 * ENV_TIMEOUT / NUM_ENVS / STEPS)
        else:
            env = partial(MisbehavingEnv, partial(times, tmp_path, 1, collectors.doze), at=2)
        return gym_collector(worker_idx=worker_idx, seed=seed, env=env)

    policy = Policy(1)
    with group_of(2, factory, env_timeout=ENV_TIMEOUT) as group:
        group.update_policy_weights_(policy)
        batch = next(iter(group))
        assert batch["worker_idx"][:, 0].tolist() == [0] * NUM_ENVS + [1] * NUM_ENVS
        assert batch["fingerprint"].eq(fingerprint(policy)).all()
        stats = group.stats()
        assert [stats[i]["restarts"] for i in (0, 1)] == [0, 1]
        assert "environment 0 (CountingEnv), in step(), has not got on" in stats[1]["cause"]


@pytest.mark.slow
def test_a_worker_that_hangs_again_and_again_ends_the_run_with_every_cause_and_the_last_stack(no_leftovers):
    factory = partial(gym_collector, env=misbehaving(collectors.doze))
    with group_of(1, factory, env_timeout=ENV_TIMEOUT, max_restarts=1) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(WorkerDied, match=r"lost 2 times.* 1\) .*was stuck.*2\) .*was stuck") as caught:
            next(iter(group))
    assert str(caught.value).count("in doze") == 1


@pytest.mark.slow
def test_a_collector_that_tells_of_no_progress_has_env_timeout_for_a_batch(no_leftovers):
    with group_of(1, FirstHangs, env_timeout=ENV_TIMEOUT, max_restarts=0) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(WeightSyncTimeout, match=r"no progress\(\) to tell more, has not got on for 1\.") as caught:
            next(iter(group))
    assert "in doze" in str(caught.value)


@pytest.mark.slow
def test_an_environment_that_hangs_in_an_evaluation_is_named_too(no_leftovers):
    factory = partial(gym_collector, env=misbehaving(collectors.doze))
    with group_of(1, factory, env_timeout=ENV_TIMEOUT, max_restarts=0) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(WeightSyncTimeout, match=r"environment 0 \(CountingEnv\), in step\(\), has not got on"):
            group.evaluation(episodes=6, deterministic=False).play()


# --- what is returned ------------------------------------------------------------------------------------------------

FAULTS = {
    # distort: what is told
    envs.nan_observation: "environment 0 (CountingEnv) returned NaN as an observation in step 2 of a batch: [",
    envs.short_observation: "environment 0 (CountingEnv) returned an observation of shape (1,), and its space",
    envs.nan_reward: "environment 0 (CountingEnv) returned NaN as a reward in step 2 of a batch: nan",
    envs.no_reward: "environment 0 (CountingEnv) returned NaN as a reward in step 2 of a batch: nan",
    envs.two_rewards: "environment 0 (CountingEnv) returned a reward of shape (2,): it has to be one number",
}


@pytest.mark.parametrize("distort", FAULTS, ids=lambda distort: distort.__name__)
def test_what_an_environment_returns_wrongly_never_reaches_the_trainer(distort):
    """In the last step of a batch, which is that of an episode, too: no policy sees it."""
    with group_of(0, partial(gym_collector, env=partial(Distorted, distort, at=STEPS))) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(ValueError) as caught:
            next(iter(group))
    assert FAULTS[distort] in str(caught.value)


@pytest.mark.parametrize("distort", [envs.short_observation, envs.two_rewards])
def test_in_the_middle_of_an_episode_too(distort):
    with group_of(0, partial(gym_collector, env=partial(Distorted, distort))) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(ValueError, match=r"environment 0 \(CountingEnv\) returned"):
            next(iter(group))


def test_a_policy_that_chokes_on_nan_is_not_the_one_to_blame():
    """``multinomial`` complains of probabilities."""
    with group_of(0, partial(gym_collector, env=partial(Distorted, envs.nan_observation))) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(ValueError, match="returned NaN as an observation") as caught:
            next(iter(group))
    assert "probability" in str(caught.value.__cause__)


class Diverged(nn.Module):
    """A policy whose weights have become NaN, with a distribution that makes actions of them all the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float("nan")))

    def forward(self, td):
        td["action"] = torch.distributions.Normal(self.weight.expand(td.batch_size[0], 1), 1.0).sample()
        return td


def test_a_policy_whose_weights_are_nan_is_to_blame_for_what_the_environment_makes_of_them():
    """The environment's next observation is NaN too, which comes after the action."""
    with group_of(0, partial(gym_collector, env="Pendulum-v1", policy=Diverged)) as group:
        group.update_policy_weights_(Diverged())
        with pytest.raises(ValueError, match=r"the action \[nan\] for environment 0 .*in step 0 .*Diverged") as caught:
            next(iter(group))
    assert "are the policy's weights finite?" in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_an_action_outside_of_its_space_is_told_whether_the_environment_minds_or_not(strict):
    class Strict(envs.CountingEnv):
        def step(self, action):
            assert not strict or self.action_space.contains(action), f"{action!r} is invalid"
            return super().step(action)

    error = AssertionError if strict else ValueError
    told = r"the action 7 for environment 0 \(Strict\).* is outside of its action space Discrete\(2\)"
    with group_of(0, partial(gym_collector, env=Strict, policy=Reckless)) as group:
        group.update_policy_weights_(Reckless(1))
        with pytest.raises(error, match=told):
            next(iter(group))


@pytest.mark.parametrize("distort", FAULTS, ids=lambda distort: distort.__name__)
def test_an_evaluation_is_not_made_of_such_either(distort):
    with group_of(0, partial(gym_collector, env=partial(Distorted, distort))) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(ValueError, match=r"environment 0 \(CountingEnv\) returned"):
            group.evaluation(episodes=6, deterministic=False).play()


def test_a_first_observation_that_is_wrong_is_told_when_the_collector_is_built():
    class Late(envs.CountingEnv):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            return np.full_like(observation, np.nan), info

    with pytest.raises(ValueError, match=r"environment 0 \(Late\) returned NaN as an observation"):
        gym_collector(worker_idx=0, seed=1, env=Late)


@pytest.mark.slow
def test_a_worker_tells_of_it_as_of_any_error_in_the_users_code(no_leftovers):
    with group_of(1, partial(gym_collector, policy=Reckless)) as group:
        group.update_policy_weights_(Reckless(1))
        with pytest.raises(WorkerError, match=r"worker 0 .*'collect': ValueError: the action 7 for environment 0"):
            next(iter(group))
        assert group.stats()[0]["restarts"] == 0


# --- killed ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_for_memory_is_told_so(no_leftovers):
    """What the system does then is ``kill -9``."""
    with group_of(1, gym_collector, max_restarts=0) as group:
        group.update_policy_weights_(Policy(1))
        pid = group.stats()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied, match=rf"worker 0 \(pid {pid}\) ended: killed by SIGKILL \(is the machine out of memory\?\)"
        ):
            next(iter(group))
