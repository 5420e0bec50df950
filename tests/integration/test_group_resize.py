"""A group gets more or fewer workers between two batches."""

import os
import signal
from functools import partial
from itertools import islice

import pytest
import torch
from lightning.pytorch import Callback

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, WorkerDied, WorkerError
from tests.helpers import collectors
from tests.helpers.collectors import NUM_ENVS, STEPS, gym_collector, misbehaving_factory
from tests.helpers.fit import Audit, Learner, fit, make_callback, make_group
from tests.helpers.policies import Policy, fingerprint, sha256
from tests.helpers.processes import zombies


def group_of(num_workers, collector=gym_collector, **kwargs):
    return CollectorGroup(
        collector, num_workers, weight_sync_schemes={"policy": DistributedWeightSyncScheme(timeout=60.0)}, **kwargs
    )


def take(group, count=1):
    return list(islice(group, count))


def check(group, policy, num_workers):
    (batch,) = take(group)
    assert batch["worker_idx"][:, 0].tolist() == [i for i in range(num_workers) for _ in range(NUM_ENVS)]
    assert batch["policy_version"].eq(group.version).all()
    assert batch["fingerprint"].eq(fingerprint(policy)).all()
    return batch


def change(policy):
    with torch.no_grad():
        policy.head.bias.add_(1.0)


def test_a_group_grows_and_shrinks_and_grows_again(no_leftovers):
    """Late joiners start from the newest weights, under their version; nobody replays another's episodes."""
    policy, starts = Policy(1), []
    with group_of(1, batches_per_epoch=7, seed=3) as group:
        group.update_policy_weights_(policy)
        for num_workers in (1, 3, 2, 3):
            change(policy)
            group.update_policy_weights_(policy)
            version = group.version
            group.resize(num_workers)
            assert group.version == version, "joining took a version"
            assert group.num_workers == num_workers == len(group.stats()) == len(no_leftovers())
            assert group.digest() == dict.fromkeys(range(num_workers), sha256(policy))
            starts += check(group, policy, num_workers)["observation"][:, 0].tolist()
            change(policy)
            group.update_policy_weights_(policy)
            check(group, policy, num_workers)
        assert group.frames == 2 * (1 + 3 + 2 + 3) * NUM_ENVS * STEPS
        assert len(group) == 7
        metrics = group.metrics()
        assert (metrics["weight_sync/worker_restarts"], metrics["weight_sync/workers_alive"]) == (0, 3)
        assert [stat["generation"] for stat in group.stats().values()] == [0, 0, 1]
        assert len({tuple(start) for start in starts}) == len(starts), "episodes were replayed"
        held = {
            str(holder) for slot in group.weight_sync_schemes["policy"]._pool._slots.values() for holder in slot.holders
        }
        assert "('worker', 2, 0)" not in held
    assert not zombies()


@pytest.mark.slow
def test_a_worker_that_joined_late_is_replaced_like_any_other(no_leftovers):
    policy = Policy(1)
    with group_of(1) as group:
        group.update_policy_weights_(policy)
        group.resize(2)
        os.kill(group.stats()[1]["pid"], signal.SIGKILL)
        change(policy)
        group.update_policy_weights_(policy)
        check(group, policy, 2)
        assert [stat["restarts"] for stat in group.stats().values()] == [0, 1]
        os.kill(group.stats()[1]["pid"], signal.SIGKILL)
        group.resize(1)  # whatever becomes of its replacement
        check(group, policy, 1)


@pytest.mark.slow
def test_a_late_joiner_starts_from_what_was_meant_for_all_and_a_replacement_from_what_was_meant_for_it(no_leftovers):
    common, own = Policy(1), Policy(2)
    with group_of(1) as group:
        group.update_policy_weights_(common)
        group.resize(2)
        group.update_policy_weights_(common)
        group.update_policy_weights_(own, worker_ids=1)
        group.resize(3)
        assert group.digest() == {0: sha256(common), 1: sha256(own), 2: sha256(common)}
        assert [stat["version"] for stat in group.stats().values()] == [1, 2, 1]
        os.kill(group.stats()[1]["pid"], signal.SIGKILL)
        (batch,) = take(group)
        assert batch["policy_version"][::NUM_ENVS, 0].tolist() == [1, 2, 1]
        assert group.digest() == {0: sha256(common), 1: sha256(own), 2: sha256(common)}
        group.update_policy_weights_(own)
        check(group, own, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (collectors.stumble, WorkerError, "the dice"),
        (collectors.leave, WorkerError, "SystemExit: 3"),
        (collectors.vanish, WorkerDied, "exit code 9"),
    ],
)
def test_a_group_that_cannot_grow_is_as_it_was(no_leftovers, fault, error, text):
    policy = Policy(1)
    with group_of(1, partial(misbehaving_factory, fault=fault, only=2), max_restarts=0) as group:
        group.update_policy_weights_(policy)
        with pytest.raises(error, match=text) as caught:
            group.resize(3)
        assert list(caught.value.failed) == [2]
        assert group.num_workers == 1 == len(group.stats()) == len(no_leftovers())
        change(policy)
        group.update_policy_weights_(policy)
        check(group, policy, 1)
        group.resize(2)
        check(group, policy, 2)


def test_a_group_that_does_not_run_yet_is_only_told(no_leftovers):
    group = group_of(2)
    group.resize(1)
    with group:
        with pytest.raises(RuntimeError, match="launched, not connected"):
            group.resize(2)
        group.update_policy_weights_(Policy(1))
        check(group, Policy(1), 1)
        with pytest.raises(ValueError, match=r"resize\(0\) of 1"):
            group.resize(0)
    with pytest.raises(ValueError, match=r"resize\(2\) of 0"):
        group_of(0).resize(2)


def test_a_callback_may_resize_the_group_while_it_trains(no_leftovers):
    group, module = make_group(1, length=6), Learner(seed=2)

    class Resizes(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx in (1, 3):
                group.resize(2 if batch_idx == 1 else 1)

    audit = Audit(group, lambda: module.actor)
    fit(module, group, audit, make_callback(group), Resizes())
    assert [len(batch) // NUM_ENVS for batch in audit.batches] == [1, 1, 2, 2, 1, 1]
    assert group.frames == 8 * NUM_ENVS * STEPS
