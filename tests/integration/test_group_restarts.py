"""A worker that is lost is replaced while the others go on: same index, newest weights, other episodes."""

import logging
import os
import signal
import threading
import time
from functools import partial
from itertools import islice

import pytest
import torch
from lightning.pytorch import Callback

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, WorkerDied, WorkerError
from tests.helpers import collectors
from tests.helpers.collectors import (
    NUM_ENVS,
    STEPS,
    MisbehavingEnv,
    Mortal,
    ParentEnv,
    Reluctant,
    gym_collector,
    misbehaving_collector,
    replacements_misbehave,
    times,
)
from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.policies import Policy, fingerprint, sha256
from tests.helpers.processes import wait_until, zombies

JOIN_SECONDS = 30
"""More than an interpreter needs to start on a busy machine."""


def group_of(num_workers, collector=gym_collector, *, heartbeat_timeout=30.0, timeout=60.0, **kwargs):
    scheme = DistributedWeightSyncScheme(timeout=timeout, heartbeat_timeout=heartbeat_timeout)
    return CollectorGroup(collector, num_workers, weight_sync_schemes={"policy": scheme}, **kwargs)


def take(group, count=1):
    return list(islice(group, count))


def pid_of(group, index):
    return group.stats()[index]["pid"]


def kill(group, index, number=signal.SIGKILL):
    pid = pid_of(group, index)
    os.kill(pid, number)
    return pid


def all_up(group):
    return all(stat["state"] == "connected" for stat in group.stats().values())


def check(batch, group, policy, num_workers=2):
    """Complete, in worker order, and made by the newest weights."""
    assert batch["worker_idx"][:, 0].tolist() == [i for i in range(num_workers) for _ in range(NUM_ENVS)]
    assert batch["policy_version"].eq(group.version).all()
    assert batch["fingerprint"].eq(fingerprint(policy)).all()


def rows(batches):
    """Of each environment step what tells it from all others: the episode's mark, and its number."""
    return [tuple(row.tolist()) for batch in batches for row in batch["next", "observation"].reshape(-1, 3)]


def change(policy):
    with torch.no_grad():
        policy.head.bias.add_(1.0)


# --- wherever a worker dies ------------------------------------------------------------------------------------------


def test_a_worker_that_dies_idle_is_replaced_with_the_newest_weights(no_leftovers, caplog):
    """Its environments' processes die with it."""
    caplog.set_level(logging.INFO, "lightning_weightsync")
    policy = Policy(1)
    with group_of(2, partial(gym_collector, env=ParentEnv), seed=5) as group:
        group.update_policy_weights_(policy)
        batches = take(group)
        before = group.stats()
        lost = kill(group, 1)
        change(policy)
        group.update_policy_weights_(policy)  # returns, though worker 1 has not applied it
        assert group.version == 1 and group.stats()[0]["version"] == 1
        batches += take(group)
        check(batches[-1], group, policy)
        assert all_up(group) and group.digest() == dict.fromkeys((0, 1), sha256(policy))

        stats = group.stats()
        assert stats[0]["pid"] == before[0]["pid"] and stats[1]["pid"] != lost
        assert [stats[i]["restarts"] for i in (0, 1)] == [0, 1]
        assert [stats[i]["generation"] for i in (0, 1)] == [0, 1]
        assert [stats[i]["frames"] for i in (0, 1)] == [2 * NUM_ENVS * STEPS] * 2, "frames are kept over restarts"
        assert "killed by SIGKILL" in stats[1]["cause"] and stats[0]["cause"] is None
        metrics = group.metrics()
        assert metrics["weight_sync/worker_restarts"] == 1 and metrics["weight_sync/workers_alive"] == 2
        assert len(no_leftovers()) == 2 + 2 * NUM_ENVS, "processes of the lost worker's environments"

        change(policy)
        group.update_policy_weights_(policy)
        batches += take(group)
        check(batches[-1], group, policy)
        seen = rows(batches)
        assert len(set(seen)) == len(seen), "a transition was seen twice"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    why = "killed by SIGKILL (is the machine out of memory?)"
    assert f"worker 1 (pid {lost}) ended: {why}; its replacement starts now (restart 1)" in lines[0]
    assert f"worker 1 (pid {stats[1]['pid']}) has joined" in lines[1]


@pytest.mark.slow
def test_a_worker_that_nobody_asks_anything_is_replaced_all_the_same(no_leftovers):
    with group_of(2) as group:
        group.update_policy_weights_(Policy(1))
        kill(group, 0)
        assert wait_until(lambda: group.stats()[0]["restarts"] == 1 and all_up(group), JOIN_SECONDS)
        assert group.stats()[0]["version"] == 0


def test_the_part_of_a_worker_that_dies_in_the_middle_of_a_batch_is_collected_again(no_leftovers, tmp_path):
    """And only that part: worker 0 makes no batch twice."""

    def factory(*, worker_idx, seed):
        fault = partial(times, tmp_path, 1, collectors.vanish) if worker_idx == 1 else int

        def make_env():
            return MisbehavingEnv(fault, at=STEPS + 2)  # in the second batch

        return gym_collector(worker_idx=worker_idx, seed=seed, env=make_env)

    policy = Policy(1)
    with group_of(2, factory) as group:
        batches = []
        for _ in range(4):
            group.update_policy_weights_(policy)
            batches += take(group)
            check(batches[-1], group, policy)
            change(policy)
        stats = group.stats()
        assert stats[1]["restarts"] == 1 and "exit code 9" in stats[1]["cause"]
        assert [stats[i]["frames"] for i in (0, 1)] == [4 * NUM_ENVS * STEPS] * 2
        assert group.frames == 8 * NUM_ENVS * STEPS
        seen = rows(batches)
        assert len(set(seen)) == len(seen)


@pytest.mark.slow
def test_a_worker_that_dies_while_it_applies_a_push_is_replaced(no_leftovers, tmp_path):
    """A worker that is half-way through: neither reported as done, nor an error; the others have applied it."""

    def factory(*, worker_idx, seed):
        mortal = partial(Mortal, tmp_path, collectors.vanish) if worker_idx == 0 else Mortal
        return gym_collector(worker_idx=worker_idx, seed=seed, policy=mortal)

    policy = Mortal()
    with group_of(2, factory) as group:
        for version in range(4):
            policy.version = version
            change(policy)
            group.update_policy_weights_(policy)
            assert group.stats()[1]["version"] == version
            (batch,) = take(group)
            assert batch["policy_version"].eq(version).all()
            assert batch["fingerprint"].eq(batch["fingerprint"][0, 0]).all()
        assert [stat["restarts"] for stat in group.stats().values()] == [1, 0]


@pytest.mark.slow
def test_a_replacement_that_dies_while_it_starts_is_replaced_too(no_leftovers, tmp_path):
    factory = partial(replacements_misbehave, directory=tmp_path, fault=collectors.vanish, count=2)
    policy = Policy(1)
    with group_of(2, factory) as group:
        group.update_policy_weights_(policy)
        kill(group, 1)
        for _ in range(2):
            change(policy)
            group.update_policy_weights_(policy)
            (batch,) = take(group)
            check(batch, group, policy)
        assert group.stats()[1]["restarts"] == 3


@pytest.mark.slow
def test_all_workers_at_once(no_leftovers):
    policy = Policy(1)
    with group_of(2) as group:
        group.update_policy_weights_(policy)
        for index in range(2):
            kill(group, index)
        change(policy)
        group.update_policy_weights_(policy)
        (batch,) = take(group)
        check(batch, group, policy)
        assert group.metrics()["weight_sync/worker_restarts"] == 2


@pytest.mark.slow
def test_nobody_waits_for_a_replacement_but_the_next_batch(no_leftovers):
    """Pushes go on while it starts; and a stop request ends the wait for the batch."""

    class Enough(Exception):
        pass

    policy = Policy(1)
    with group_of(2) as group:
        group.update_policy_weights_(policy)
        kill(group, 1)
        assert wait_until(lambda: group.stats()[1]["state"] == "starting", 5)
        slowest, pushes = 0.0, 0
        while group.stats()[1]["state"] == "starting":
            started = time.monotonic()
            group.update_policy_weights_(policy)
            slowest, pushes = max(slowest, time.monotonic() - started), pushes + 1
        assert pushes > 10 and slowest < 1.0
        kill(group, 1)
        asked = time.monotonic()

        def enough():
            if time.monotonic() - asked > 0.3:
                raise Enough

        group.look_around = enough
        with pytest.raises(Enough):
            take(group)
        assert time.monotonic() - asked < 1.5
        group.look_around = lambda: None
        change(policy)
        group.update_policy_weights_(policy)
        (batch,) = take(group)
        check(batch, group, policy)


@pytest.mark.slow
def test_a_background_push_that_meets_a_death_says_so_and_the_replacement_has_it(no_leftovers):
    policy = Policy(1)
    with group_of(2) as group:
        group.update_policy_weights_(policy)
        kill(group, 0)
        change(policy)
        handle = group.send_async({"policy": policy})
        with pytest.raises(WorkerDied, match="worker 0"):
            handle.wait(10)
        group.settle(handle)
        assert wait_until(lambda: all_up(group), JOIN_SECONDS)
        assert group.digest() == dict.fromkeys((0, 1), sha256(policy))
        group.settle(handle)


# --- stopped rather than dead ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_replaced_when_a_push_gives_it_up(no_leftovers):
    policy = Policy(1)
    with group_of(2, heartbeat_timeout=1.0) as group:
        group.update_policy_weights_(policy)
        stopped = kill(group, 1, signal.SIGSTOP)
        change(policy)
        started = time.monotonic()
        group.update_policy_weights_(policy)
        assert time.monotonic() - started < 4
        (batch,) = take(group)
        check(batch, group, policy)
        assert "silent for" in group.stats()[1]["cause"]
        assert stopped not in no_leftovers() and len(no_leftovers()) == 2


def test_a_worker_that_is_stopped_while_it_collects_is_noticed_by_its_silence(no_leftovers):
    """One that is merely slow is not: worker 0 takes three times as long as a silent one may."""

    def factory(*, worker_idx, seed):
        return gym_collector(
            worker_idx=worker_idx,
            seed=seed,
            env=partial(MisbehavingEnv, partial(time.sleep, 3.0) if worker_idx == 0 else int, at=2),
        )

    policy = Policy(1)
    with group_of(2, factory, heartbeat_timeout=1.0) as group:
        group.update_policy_weights_(policy)
        pid = pid_of(group, 1)
        os.kill(pid, signal.SIGSTOP)
        (batch,) = take(group)
        check(batch, group, policy)
        stats = group.stats()
        assert [stats[i]["restarts"] for i in (0, 1)] == [0, 1]
        assert "silent for" in stats[1]["cause"]


@pytest.mark.slow
def test_without_restarts_a_worker_that_is_stopped_while_it_collects_ends_the_wait(no_leftovers):
    with group_of(2, heartbeat_timeout=1.0, max_restarts=0) as group:
        group.update_policy_weights_(Policy(1))
        kill(group, 1, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(Exception, match=r"worker 1 .*silent for"):
            take(group)
        assert time.monotonic() - started < 5


# --- ends ------------------------------------------------------------------------------------------------------------


def test_after_max_restarts_the_run_ends_and_the_error_tells_how_often_and_why(no_leftovers, tmp_path):
    factory = partial(replacements_misbehave, directory=tmp_path, fault=collectors.vanish, count=100)
    group = group_of(2, factory, max_restarts=2)
    group.start({"policy": Policy(1)})
    kill(group, 1)
    causes = r"1\) .*SIGKILL \(is the machine out of memory\?\); 2\) .*code 9; 3\) .*code 9"
    told = rf"worker 1 was lost 3 times.*at most 2 times \(max_restarts\): {causes}"
    with pytest.raises(WorkerDied, match=told) as caught:
        take(group)
    assert list(caught.value.failed) == [1]
    with pytest.raises(WorkerDied, match=told):
        group.update_policy_weights_()
    stats = group.stats()
    assert (stats[0]["version"], stats[1]["state"], stats[1]["restarts"]) == (1, "failed", 2)
    group.shutdown(2.0)
    assert not no_leftovers() and not zombies()


def test_an_error_in_a_replacements_factory_is_the_users_and_ends_the_run(no_leftovers, tmp_path):
    factory = partial(replacements_misbehave, directory=tmp_path, fault=collectors.stumble, count=1)
    with group_of(2, factory) as group:
        group.update_policy_weights_(Policy(1))
        kill(group, 1)
        with pytest.raises(WorkerError, match=r"worker 1 .*'build': ArithmeticError") as caught:
            take(group)
        assert "in stumble" in caught.value.remote_traceback
        assert group.stats()[1]["restarts"] == 1


@pytest.mark.parametrize(("env", "sync"), [(MisbehavingEnv, True), (Reluctant, True), (Reluctant, False)])
def test_an_error_in_an_environment_is_not_restarted(no_leftovers, env, sync):
    """Nothing is pushed to its worker any more, though it may need a while to end, and its link is up as long."""
    factory = partial(misbehaving_collector, fault=collectors.stumble, at=4, only=1, env=env)
    with group_of(2, factory, sync=sync) as group:
        group.update_policy_weights_(Policy(1))
        with pytest.raises(WorkerError, match="ArithmeticError"):
            take(group, 2 if sync else 10_000)  # else the other one may come first
        assert group.stats()[1]["restarts"] == 0
        with pytest.raises(WorkerError, match="ArithmeticError"):
            group.update_policy_weights_(Policy(1))
        assert group.stats()[1]["version"] == 0
        group.update_policy_weights_(Policy(2), worker_ids=0)
        assert group.stats()[0]["version"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.5])
def test_once_stopping_nothing_is_restarted(no_leftovers, seconds):
    """A group is stopped at any moment of a replacement's start."""
    group = group_of(2)
    group.start({"policy": Policy(1)})
    kill(group, 1)
    time.sleep(seconds)
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 4
    assert not no_leftovers() and not zombies()
    assert {stat["state"] for stat in group.stats().values()} <= {"stopped", "failed"}


def test_shutdown_from_another_thread_ends_the_wait_for_a_replacement(no_leftovers):
    group = group_of(2)
    group.start({"policy": Policy(1)})
    kill(group, 1)
    threading.Timer(0.5, group.shutdown).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="stopped"):
        take(group, 1000)
    assert time.monotonic() - started < 5
    assert wait_until(lambda: not group.running, 10)


# --- seeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_neither_replacements_nor_resumed_runs_replay_episodes(no_leftovers):
    def marks(batches):
        return {row[2] for row in rows(batches)}

    with group_of(1, seed=5) as group:
        group.update_policy_weights_(Policy(1))
        batches = [take(group)]
        for _ in range(2):
            kill(group, 0)
            batches.append(take(group))
        state = group.state_dict()
        assert (state["incarnation"], state["restarts"]) == (2, 2)
    resumed = group_of(1, seed=5)
    resumed.load_state_dict(state)
    versions_only = group_of(0, seed=5)
    versions_only.restore_version(group.run, group.version, group.incarnation)
    for other in (resumed, versions_only):
        with other:
            other.update_policy_weights_(Policy(1))
            batches.append(take(other))
            assert other.metrics()["weight_sync/worker_restarts"] == (2 if other is resumed else 0)
    own = [marks(some) for some in batches[:4]]  # the last two groups have the same seeds
    assert own[3] == marks(batches[4])
    assert len(set.union(*own)) == sum(map(len, own)), "episodes were replayed"


# --- training --------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Checks every batch, and kills a worker again and again while all are well.

    Args:
        kills: How often.
        pause: Seconds for which all have been well before the next kill.
    """

    def __init__(self, group, kills, pause, *, exact=True):
        self.group, self.kills, self.pause, self.exact = group, kills, pause, exact
        self.killed, self.batches, self.made_by = [], [], {}
        self.well_since = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.made_by[self.group.version] = fingerprint(pl_module.actor)
        versions = batch["policy_version"]
        if self.exact:
            assert versions.eq(self.group.version).all()
        for version in versions.unique().tolist():
            assert batch["fingerprint"][versions == version].eq(self.made_by[version]).all()
        self.batches.append(batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.monotonic()
        if not all(stat["state"] in ("connected", "collecting") for stat in self.group.stats().values()):
            self.well_since = None
        elif self.well_since is None:
            self.well_since = now
        elif now - self.well_since > self.pause:
            if len(self.killed) == self.kills:
                trainer.should_stop = True
                return
            index = len(self.killed) % self.group.num_workers
            self.killed.append(kill(self.group, index))
            self.well_since = None


def train_under_kills(num_workers, kills, pause, *, sync=True, **callback):
    group, module = make_group(num_workers, length=10**6, max_restarts=kills, sync=sync), Learner(seed=1)
    watch = Watch(group, kills, pause, exact=sync and callback.get("blocking") is not False)
    figures = []

    class AtEnd(Callback):
        def on_train_end(self, trainer, pl_module):
            assert wait_until(lambda: all_up(group) or not sync, JOIN_SECONDS)
            figures.append((group.digest(), group.stats(), group.metrics()))

    fit(module, group, watch, make_callback(group, **callback), AtEnd(), gradient_clip_val=0.1)
    ((digest, stats, metrics),) = figures
    assert len(watch.killed) == kills
    assert digest == dict.fromkeys(range(num_workers), sha256(module.actor))
    assert sum(stat["restarts"] for stat in stats.values()) == kills == metrics["weight_sync/worker_restarts"]
    parts = [range(num_workers)] if sync else [[i] for i in range(num_workers)]
    orders = [[i for i in part for _ in range(NUM_ENVS)] for part in parts]
    assert all(batch.batch_size == (len(orders[0]), STEPS) for batch in watch.batches)
    assert all(batch["worker_idx"][:, 0].tolist() in orders for batch in watch.batches)
    seen = rows(watch.batches)
    assert len(set(seen)) == len(seen), "a transition was seen twice"
    assert group.frames == len(seen)


def test_fit_goes_on_while_workers_are_killed(no_leftovers):
    train_under_kills(2, kills=3, pause=0.2)


@pytest.mark.slow
def test_fit_that_waits_for_no_push_goes_on_while_workers_are_killed(no_leftovers):
    train_under_kills(2, kills=2, pause=0.2, blocking=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", [True, False])
def test_four_workers_ten_kills(no_leftovers, sync):
    """With ``sync=False`` they are killed while they collect."""
    train_under_kills(4, kills=10, pause=1.0, sync=sync)
