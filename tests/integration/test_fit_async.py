"""A group with ``sync=False`` under ``Trainer.fit``: epochs, versions, the last push, resumes, errors, metrics."""

import csv
import time
from collections import Counter
from functools import partial

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_weightsync import WorkerError
from tests.helpers import collectors
from tests.helpers.collectors import NUM_ENVS, STEPS, misbehaving_collector, paced_collector
from tests.helpers.envs import steps_before
from tests.helpers.fit import Learner, ManualLearner, fit, make_callback, make_group, make_trainer
from tests.helpers.policies import fingerprint, sha256

UNEVEN = partial(paced_collector, seconds=(0.0, 0.01))


class Watch(Callback):
    """What arrives, which weights each version had, and what the workers hold when training ends."""

    def __init__(self, group):
        self.group = group
        self.batches, self.ages, self.made_by, self.digests = [], [], {}, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.made_by.setdefault(self.group.version, fingerprint(pl_module.actor))
        self.batches.append(batch)
        self.ages.append(self.group.version - int(batch["policy_version"].min()))
        (version,) = batch["policy_version"].unique().tolist()
        assert batch["fingerprint"].eq(self.made_by[version]).all(), "a sample of other weights than its version's"

    def on_train_end(self, trainer, pl_module):
        self.made_by.setdefault(self.group.version, fingerprint(pl_module.actor))
        self.digests.append((self.group.digest(), sha256(pl_module.actor)))

    def numbers(self, worker):
        """How many batches that worker had made before each of those that arrived."""
        mine = [batch["observation"][0, 0] for batch in self.batches if batch["worker_idx"][0, 0] == worker]
        return [steps_before(int(episode), int(step)) // STEPS for episode, step, _ in mine]


@pytest.mark.parametrize(
    ("bound", "blocking"),
    [(None, None), pytest.param(1, None, marks=pytest.mark.slow), pytest.param(None, True, marks=pytest.mark.slow)],
)
def test_workers_collect_ahead_and_end_with_the_final_weights(bound, blocking, no_leftovers, tmp_path):
    group, module = make_group(2, UNEVEN, length=10, sync=False, max_staleness=bound), Learner()
    watch, callback = Watch(group), make_callback(group, blocking=blocking)
    fit(module, group, watch, callback, max_epochs=3, logs_to=tmp_path)
    assert len(watch.batches) == 30 and callback.num_pushes == callback.version == 30
    assert all(batch.batch_size == (NUM_ENVS, STEPS) for batch in watch.batches)
    assert watch.digests == [(dict.fromkeys((0, 1), sha256(module.actor)), sha256(module.actor))]
    if bound is None:
        assert max(watch.ages) >= 1, "nobody collected ahead"
        for worker in range(2):
            assert watch.numbers(worker) == list(range(len(watch.numbers(worker)))), "a batch was lost between epochs"
    else:
        assert max(watch.ages) <= bound
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("weight_sync/staleness_max")]
    assert [float(row["weight_sync/staleness_max"]) for row in rows] == watch.ages
    dropped = [float(row["collect/batches_dropped"]) for row in rows]
    assert dropped == sorted(dropped) and (bound is not None or not any(dropped))
    assert float(rows[-1]["weight_sync/workers_alive"]) == 2


@pytest.mark.slow
def test_a_bound_holds_when_every_optimizer_step_is_pushed(no_leftovers):
    """Three versions per batch: what was begun before a training step is too old after it."""
    group, module = make_group(2, UNEVEN, length=20, sync=False, max_staleness=2), ManualLearner(3)
    ages, digests = [], []

    class Ages(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            ages.append(group.version - int(batch["policy_version"].min()))

        def on_train_end(self, trainer, pl_module):
            digests.append(set(group.digest().values()))

    callback = make_callback(group, 1, "optim_steps")
    fit(module, group, Ages(), callback)
    assert len(ages) == 20 and max(ages) <= 2
    assert callback.num_pushes == 60
    assert digests == [{sha256(module.actor)}]


def test_an_epoch_that_is_left_early_and_a_second_fit_go_on_with_what_is_ready(no_leftovers):
    class Stops(Learner):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 4

    with make_group(2, UNEVEN, length=10, sync=False) as group:
        module = Stops()
        watch = Watch(group)
        for _ in range(2):
            fit(module, group, watch, make_callback(group), max_epochs=3)
        assert len(watch.batches) == 10
        assert [wanted for _, wanted in watch.digests] == [next(iter(digests.values())) for digests, _ in watch.digests]
        for worker in range(2):
            assert watch.numbers(worker) == list(range(len(watch.numbers(worker))))
        assert group.connected


@pytest.mark.slow
def test_a_fit_that_stops_its_group_starts_a_new_one_with_fresh_batches(no_leftovers):
    group, module = make_group(2, UNEVEN, length=6, sync=False), Learner()
    for count in (1, 2):
        watch = Watch(group)
        fit(module, group, watch, make_callback(group))
        assert group.run == count and not group.running
        assert min(int(batch["policy_version"].min()) for batch in watch.batches) >= 6 * (count - 1)


@pytest.mark.slow
def test_a_resumed_run_goes_on_after_the_checkpoints_version(no_leftovers, tmp_path):
    first = make_group(1, UNEVEN, length=5, sync=False, seed=3)
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    module, callback, before = Learner(), make_callback(first), Watch(first)
    fit(module, first, before, callback, checkpoint, enable_checkpointing=True)

    resumed = make_group(1, UNEVEN, length=5, sync=False, max_staleness=3, seed=3)
    again, after, callback = Learner(seed=9), Watch(resumed), make_callback(resumed)
    make_trainer(after, callback, max_epochs=2).fit(again, resumed, ckpt_path=tmp_path / "last.ckpt")
    assert (resumed.run, resumed.version) == (2, 10)
    assert len(after.batches) == 5 and max(after.ages) <= 3
    assert min(int(batch["policy_version"].min()) for batch in after.batches) >= 5
    assert resumed.frames == 10 * NUM_ENVS * STEPS
    marks = [{float(batch["observation"][0, 0, 2]) for batch in watch.batches} for watch in (before, after)]
    assert not marks[0] & marks[1], "the first episodes were replayed"


def test_without_workers_fit_is_the_same_as_with_a_synchronous_group():
    group, module = make_group(0, length=4, sync=False, max_staleness=0), Learner()
    watch = Watch(group)
    fit(module, group, watch, make_callback(group))
    assert watch.ages == [0] * 4 and watch.numbers(0) == [0, 1, 2, 3]


def test_an_error_in_a_workers_environment_ends_fit_while_the_other_one_delivers(no_leftovers):
    group = make_group(
        2, partial(misbehaving_collector, fault=collectors.stumble, at=30, only=1), length=10**6, sync=False
    )
    seen = Counter()

    class Counts(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen[int(batch["worker_idx"].max())] += 1

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) raised in phase 'collect': ArithmeticError"):
        fit(Learner(), group, Counts(), make_callback(group))
    assert time.monotonic() - started < 30
    assert seen[0] and seen[1] <= 30 // STEPS
    assert not group.running and not no_leftovers()
