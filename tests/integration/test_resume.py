"""A run goes on from a checkpoint: version, weights of the first batch, cadence, and new episodes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError
from tests.helpers.fit import Audit, Learner, ManualLearner, Recorder, Rows, make_callback, make_group, make_trainer
from tests.helpers.holdings import tcp_listeners
from tests.helpers.policies import Policy, fingerprint, sha256


class SaveAt(Callback):
    """Saves after batch ``at`` (counted from 1), and goes on or fails right after the next batch has arrived."""

    def __init__(self, path, at, *, then_fail=True):
        self.path = path
        self.at = at
        self.then_fail = then_fail
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.count >= self.at + 1 and self.then_fail:
            raise ArithmeticError("crashed, two batches in, one push beyond the checkpoint")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1
        if self.count == self.at:
            trainer.save_checkpoint(self.path)


def run(*, ckpt_path=None, save=None, interval=1, unit="batches", module=None, loaders=(), **kwargs):
    """Fit, resumed or crashing, in this process, with one collector; returns module, group, callback, audit."""
    max_epochs, trainer_kwargs = kwargs.pop("max_epochs", 2), kwargs.pop("trainer", {})
    group = make_group(0, **{"length": 4, "seed": 7, **kwargs})
    module = module or Learner(seed=1)
    callback = make_callback(group, interval, unit)
    audit = Audit(group, lambda: module.actor)
    callbacks = [audit, callback, *([save] if save else [])]
    trainer = make_trainer(*callbacks, max_epochs=max_epochs, **trainer_kwargs)
    try:
        trainer.fit(module, group, *loaders, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    except ArithmeticError:
        assert save is not None
    return module, group, callback, audit


@pytest.fixture
def path(tmp_path):
    return tmp_path / "middle.ckpt"


@pytest.mark.slow
def test_a_run_goes_on_in_a_new_process_with_real_workers(path):
    """Save in the middle of an epoch, crash one push later, go on elsewhere."""
    module, group, _, audit = run(save=SaveAt(path, 3))
    assert [version for version, _ in audit.pushes] == [0, 1, 2, 3, 4]  # one beyond the checkpoint
    crashed_with = fingerprint(module.actor).item()
    restored = Learner()
    restored.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    options = {"num_workers": 1, "length": 4, "max_epochs": 2, "ckpt_path": os.fspath(path), "actor": 99}
    command = [sys.executable, "-m", "tests.helpers.fit_script", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])

    assert seen["run"] == group.run + 1
    assert seen["versions"] == [[3], [4], [5], [6], [7]]  # one batch was left of the first epoch
    assert seen["after"] == [4, 5, 6, 7, 8]
    assert seen["num_pushes"] == 8
    assert seen["made_by"][0] == [seen["fingerprint"]] == [fingerprint(restored.actor).item()] != [crashed_with]
    assert seen["frames"] == 3 * audit.batches[0].numel() + 5 * 3  # of the run before, and one worker's 5 batches here
    marks = [batch["observation"][0, 0, 2].item() for batch in audit.batches]
    assert not set(seen["marks"]) & set(marks), "the episodes of the first run were replayed"


def test_a_checkpoint_holds_ints_and_strings_and_loads_with_weights_only(path):
    *_, callback, _ = run(save=SaveAt(path, 3), interval=2)
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["UpdateWeights[update_weights: policy]"]
    # One batch, and its one step, since the push after the second batch: everything is counted, whatever the unit.
    assert 0 <= state.pop("milliseconds") < 10_000
    counted = {"batches": 1, "optim_steps": 1, "frames": 6}
    assert state == {"run": 1, "version": 1, "incarnation": 0, "num_pushes": 1, **counted}
    assert callback.state_key == "UpdateWeights[update_weights: policy]"
    assert all(type(key) is str and type(value) in (int, str) for key, value in state.items())
    (loader,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (loader["run"], loader["version"], loader["seed"], loader["incarnation"]) == (1, 1, 7, 0)


def test_the_first_batch_after_a_resume_comes_from_the_restored_weights(path):
    """The module is built from another seed; nothing is trained or pushed between connecting and the first batch."""
    run(save=SaveAt(path, 2))
    restored = torch.load(path, weights_only=True)["state_dict"]
    _, group, callback, audit = run(ckpt_path=path, module=Learner(seed=1234))
    reference = Learner()
    reference.load_state_dict(restored)
    assert audit.pushes[0] == (2, sha256(reference.actor))
    assert audit.batches[0]["policy_version"].eq(2).all()
    assert audit.batches[0]["fingerprint"].eq(fingerprint(reference.actor)).all()
    assert [version for version, _ in audit.pushes] == [2, 3, 4, 5, 6, 7, 8]
    assert callback.num_pushes == callback.version == 8 and group.run == 2


@pytest.mark.parametrize(
    ("unit", "make_module", "factor"),
    [("batches", Learner, 1), ("optim_steps", ManualLearner, 3), ("frames", Learner, 6)],
)
def test_what_was_counted_before_the_checkpoint_counts_after_it(unit, make_module, factor, path):
    """Interval 3 batches, saved after 4: the next push is due after 2 more. The same for 3 steps, 6 frames a batch."""
    run(save=SaveAt(path, 4), interval=3 * factor, unit=unit, module=make_module(seed=1))
    *_, audit = run(ckpt_path=path, interval=3 * factor, unit=unit, module=make_module(seed=1), max_epochs=3)
    assert [version for version, _ in audit.pushes] == [1, 2, 3, 4]
    assert [b["policy_version"].unique().tolist() for b in audit.batches] == [[1], [1], [2], [2], [2], [3], [3], [3]]


def test_what_the_checkpoint_had_counted_is_not_taken_for_this_fits(path):
    """Saved after 5 batches, 3 are left: none of the two fits pushes before its end."""
    run(save=SaveAt(path, 5), interval=10)
    with pytest.warns(UserWarning, match="is longer than the 8 counted since the last push: the only push of this fit"):
        *_, callback, audit = run(ckpt_path=path, interval=10)
    assert callback.num_pushes == 1 and len(audit.batches) == 3


def test_the_cadence_may_change_on_resume(path):
    run(save=SaveAt(path, 3), interval=3)
    *_, callback, audit = run(ckpt_path=path, interval=2, unit="optim_steps")
    assert callback.state_key == "UpdateWeights[update_weights: policy]"
    assert [version for version, _ in audit.pushes] == [1, 2, 3, 4]  # 5 steps are left
    assert callback.num_pushes == 4


def test_after_ten_pushes_the_next_version_is_eleven(path):
    """Saved after ten pushes; two more before the crash; another cadence afterwards. Nothing older is ever newer."""
    module, crashed, _, before = run(save=SaveAt(path, 10), length=20)
    assert [version for version, _ in before.pushes] == [*range(12)]
    restored = Learner()
    restored.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    _, group, callback, audit = run(ckpt_path=path, interval=2, unit="optim_steps", length=20, max_epochs=1)
    assert audit.pushes[0] == (10, sha256(restored.actor)) != (10, sha256(module.actor))
    assert audit.batches[0]["policy_version"].eq(10).all()
    assert [version for version, _ in audit.pushes[1:]] == [11, 12, 13, 14, 15]
    assert (group.run, group.version) > (crashed.run, crashed.version) and callback.num_pushes == 15


@pytest.mark.slow
def test_a_worker_that_is_left_over_from_a_crashed_run_is_refused_by_the_resumed_one(path):
    """Ten pushes, save, crash; a new process with another cadence; the old run's worker finds its port, and knocks."""
    group, module = make_group(1, length=20, seed=7), Learner(seed=1)
    left_over = {}

    class Keeps(Callback):
        def on_train_start(self, trainer, pl_module):
            left_over.update(group.hub.info)

    trainer = make_trainer(make_callback(group), SaveAt(path, 10), Keeps(), max_epochs=2)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, group)
    assert group.version == 11
    restored = Learner()
    restored.load_state_dict(torch.load(path, weights_only=True)["state_dict"])

    options = {"length": 20, "interval": 2, "unit": "optim_steps", "pause": 0.1, "ckpt_path": os.fspath(path)}
    command = [sys.executable, "-m", "tests.helpers.fit_script", json.dumps(options | {"actor": 99})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as resumed:
        assert [resumed.stdout.readline() for _ in range(2)] == ["launched\n", "training\n"]
        ((host, port),) = tcp_listeners(resumed.pid)
        stale = DistributedWeightSyncScheme(connect_timeout=5)
        stale.init_on_receiver(
            "policy", model=Policy(), worker_idx=0, store_info=left_over | {"host": host, "port": port, "local": ""}
        )
        with pytest.raises(WeightSyncError, match="could not join the sender"):
            stale.connect()
        assert stale.version == -1
        stale.shutdown()
        out, err = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, err
    seen = json.loads(out.splitlines()[-1])
    assert seen["run"] == 2 and seen["versions"][:5] == [[10], [10], [11], [11], [12]] and seen["num_pushes"] == 15
    assert seen["made_by"][0] == [fingerprint(restored.actor).item()] != [fingerprint(module.actor).item()]


def test_resuming_with_validation_connects_before_the_first_batch(path):
    """Lightning makes no sanity check then, and loads the group's state later than it otherwise would."""

    class Validated(Learner):
        def validation_step(self, batch, batch_idx):
            pass

    run(save=SaveAt(path, 2), module=Validated(seed=1), loaders=[Rows(1)])
    _, group, _, audit = run(ckpt_path=path, module=Validated(seed=5), loaders=[Rows(1)])
    assert audit.pushes[0][0] == 2 and group.run == 2 and len(audit.batches) == 6


def test_a_loader_that_lightning_sets_up_too_early_replays_no_episodes(path):
    """``estimated_stepping_batches`` makes Lightning set the loader up before it restores it; it never does then."""

    class Scheduled(Learner):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]

    *_, before = run(save=SaveAt(path, 2), module=Scheduled(seed=1))
    _, group, _, after = run(ckpt_path=path, module=Scheduled(seed=5))
    assert after.pushes[0][0] == 2 and group.run == 2
    assert group.frames == 8 * before.batches[0].numel()
    marks = [{*audit.batches[0]["observation"][:, 0, 2].tolist()} for audit in (before, after)]
    assert not marks[0] & marks[1]


def test_the_last_checkpoint_of_a_run_that_is_over_starts_nothing_that_stays(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, filename="last")
    run(save=checkpoints, max_epochs=1, trainer={"enable_checkpointing": True})
    _, group, callback, audit = run(ckpt_path=tmp_path / "last.ckpt", max_epochs=1)
    assert not audit.batches and not audit.pushes and not group.running
    assert callback.num_pushes == callback.version == 4


def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(tmp_path):
    checkpoints = ModelCheckpoint(tmp_path, filename="last")
    *_, before = run(save=checkpoints, max_epochs=1, trainer={"enable_checkpointing": True})
    _, group, _, after = run(ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert [version for version, _ in after.pushes] == [4, 5, 6, 7, 8]
    assert group.frames == 8 * before.batches[0].numel() and group.run == 2
    assert len(group.state_dict()["episodes"]) == 16  # in each environment and run 4 (of 3, 1, 5 and 2 steps)
    assert not torch.equal(before.batches[0]["observation"], after.batches[0]["observation"])


def test_a_second_fit_of_one_trainer_may_resume(path):
    """Versions never go backwards, even though the checkpoint is older than what this process has pushed."""
    group, module = make_group(0, seed=7), Learner(seed=1)
    callback, audit = make_callback(group), Audit(group, lambda: module.actor)
    trainer = make_trainer(audit, callback, SaveAt(path, 2, then_fail=False), max_epochs=1)
    trainer.fit(module, group)
    assert callback.version == 4
    trainer.fit(module, group, ckpt_path=path)
    assert [version for version, _ in audit.pushes] == [0, 1, 2, 3, 4, 4, 5, 6]
    assert group.run == 2


def test_two_callbacks_with_the_same_destinations_keep_their_own_state(path):
    def callbacks():
        trainer = make_trainer(SaveAt(path, 3), max_epochs=2)
        made = [make_callback(Recorder(), interval) for interval in (1, 2)]
        for name, callback in zip("ab", made, strict=True):
            callback.register(trainer, name)
            trainer.callbacks.insert(0, trainer.callbacks.pop())  # before the one that saves
        return trainer, made

    trainer, _ = callbacks()
    with pytest.raises(ArithmeticError):
        trainer.fit(Learner(), Rows(4))
    trainer, made = callbacks()
    trainer.callbacks[2].then_fail = False
    trainer.fit(Learner(), Rows(4), ckpt_path=path)
    assert [callback.num_pushes for callback in made] == [8, 4]
    assert [len(callback.collector.calls) for callback in made] == [1 + 5, 1 + 3]
