"""Evaluation: a validation loader of whole episodes, in a fit and without one; its workers' lives."""

import gc
import os
import pickle
import signal
import time
import warnings
import weakref
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights, WorkerDied, WorkerError
from lightning_weightsync.collectors.evaluation import Evaluation
from tests.helpers.collectors import Stream
from tests.helpers.evaluation import NUM_ENVS, STEPS, Dial, Endless, Killed, NoSecondEpisode, Stubborn, dial_collector
from tests.helpers.fit import Learner, make_trainer
from tests.helpers.policies import Policy
from tests.helpers.processes import wait_until


def make_group(num_workers=1, collector=dial_collector, *, length=2, seed=7, **kwargs):
    schemes = {"policy": DistributedWeightSyncScheme(timeout=60.0)}
    return CollectorGroup(
        collector, num_workers, weight_sync_schemes=schemes, batches_per_epoch=length, seed=seed, **kwargs
    )


class Dialled(Learner):
    """Turns its dial to the next setting at the end of each epoch; all that it needs for validation is two lines."""

    def __init__(self, settings=(), on_batch=None):
        super().__init__(on_batch=on_batch)
        self.actor = Dial()
        self.settings = list(settings)
        self.automatic_optimization = False
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        self.on_batch(batch)
        self.optimizers().step()  # ModelCheckpoint saves nothing where no step was made
        if self.settings and self.trainer.is_last_batch:
            with torch.no_grad():
                self.actor.value.fill_(self.settings[self.current_epoch])

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch)
        self.log("val/episode_return", batch["episode_return"])


def fit(module, group, *callbacks, val=None, update=None, **kwargs):
    update = update or UpdateWeights(group, weight_update_map={"policy": "actor"})
    trainer = make_trainer(update, *callbacks, **{"num_sanity_val_steps": 0, **kwargs})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(batch_size|batch size|floating).*")  # of self.log
        trainer.fit(module, group, val_dataloaders=val)
    return trainer


def of_epochs(items, episodes):
    return [torch.stack(items[k : k + episodes]) for k in range(0, len(items), episodes)]


# --- in a fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_evaluation_drives_model_checkpoint_and_early_stopping(num_workers, tmp_path, no_leftovers):
    group = make_group(num_workers)
    evaluation = group.evaluation(episodes=6)
    best = ModelCheckpoint(tmp_path, "{epoch}", monitor="val/episode_return", mode="max")
    stop = EarlyStopping(monitor="val/episode_return", mode="max", patience=2)
    module = Dialled([1, 3, 9, 5, 4, 20, 30])
    trainer = fit(module, group, best, stop, val=evaluation, max_epochs=7, enable_checkpointing=True)
    assert trainer.current_epoch == 5 and stop.stopped_epoch == 4, "not after two worse epochs"
    assert os.path.basename(best.best_model_path) == "epoch=2.ckpt"
    assert torch.load(best.best_model_path, weights_only=True)["state_dict"]["actor.value"] == 9
    rounds = of_epochs(module.evaluated, 6)
    assert len(rounds) == 5
    lengths = rounds[0]["episode_length"]
    for value, episodes in zip([1, 3, 9, 5, 4], rounds, strict=True):
        assert episodes["episode"].tolist() == list(range(6))
        assert torch.equal(episodes["episode_length"], lengths), "other episodes than in the epoch before"
        assert torch.equal(episodes["episode_return"], (value + 0.25) * lengths)
    assert best.best_model_score == pytest.approx(float((9.25 * lengths).mean()))
    assert len(lengths.unique()) > 1
    # Of the newest push: one per batch, two batches per epoch, the last one before validation.
    assert [episodes["policy_version"].unique().tolist() for episodes in rounds] == [[2], [4], [6], [8], [10]]
    assert evaluation.stats()[0]["state"] == "stopped" and not group.running
    assert not no_leftovers()


def trained_on(evaluated, num_workers, **options):
    """All that a run is given to learn from, and its versions; with an evaluation after every batch, or with none."""
    batches = []
    group = make_group(num_workers, length=4)
    module = Dialled([5, 2], on_batch=lambda batch: batches.append(batch.clone()))
    val = group.evaluation(episodes=3, **options) if evaluated else None
    kwargs = {"val_check_interval": 1, "num_sanity_val_steps": 2} if evaluated else {}
    torch.manual_seed(3)
    fit(module, group, val=val, max_epochs=2, **kwargs)
    assert len(module.evaluated) == ((8 * 3 + 2) if evaluated else 0)
    return torch.stack(batches), group.version, group.frames, torch.rand(4)


@pytest.mark.parametrize(
    ("num_workers", "options"), [(0, {}), pytest.param(2, {"deterministic": False}, marks=pytest.mark.slow)]
)
def test_training_batches_are_bit_equal_with_and_without_evaluation(num_workers, options, no_leftovers):
    without, with_it = (trained_on(evaluated, num_workers, **options) for evaluated in (False, True))
    batches, others = without[0], with_it[0]
    assert batches.batch_size == (8, NUM_ENVS * max(1, num_workers), STEPS)
    assert set(batches.keys(True, True)) == set(others.keys(True, True))
    for key in batches.keys(True, True):
        assert torch.equal(batches[key], others[key]), key
    assert without[1:3] == with_it[1:3], "evaluations are counted as versions or frames of the training"
    assert torch.equal(without[3], with_it[3]), "the trainer's own random numbers were used"
    assert len(batches["action"].unique()) > 2


def test_the_sanity_check_plays_the_restored_weights(tmp_path):
    group = make_group(0)
    module = Dialled([7])
    trainer = fit(module, group, max_epochs=1)
    trainer.save_checkpoint(path := tmp_path / "seven.ckpt")
    group, module = make_group(0), Dialled([7, 8])
    evaluation = group.evaluation(episodes=4)
    update = UpdateWeights(group, weight_update_map={"policy": "actor"})
    trainer = make_trainer(update, num_sanity_val_steps=2, max_epochs=2)
    trainer.validate(module, evaluation, ckpt_path=path, verbose=False, weights_only=True)
    lengths = torch.stack(module.evaluated)["episode_length"]
    assert torch.equal(torch.stack(module.evaluated)["episode_return"], 7.25 * lengths)
    assert not group.running and evaluation.stats()[0]["state"] == "stopped"

    fresh, module = make_group(0), Dialled([7, 8])
    with torch.no_grad():
        module.actor.value.fill_(4.0)
    fit(module, fresh, val=fresh.evaluation(episodes=4), max_epochs=1, num_sanity_val_steps=2)
    sanity, after = torch.stack(module.evaluated[:2]), torch.stack(module.evaluated[2:])
    assert torch.equal(sanity["episode_return"], 4.25 * lengths[:2]), "the same seed, other episodes"
    assert torch.equal(after["episode_return"], 7.25 * lengths)
    assert sanity["policy_version"].tolist() == [0, 0]


def test_averaged_weights_that_are_swapped_in_for_validation_are_those_evaluated():
    """Lightning swaps them after ``on_validation_start``, before the first item; those that collect never get them."""
    group, module = make_group(0, length=1), Dialled([8, 4])
    average = WeightAveraging(avg_fn=lambda average, current, count: (average + current) / 2)
    collected = []
    module.on_batch = lambda batch: collected.append(int(batch["action"].min()))
    fit(module, group, average, val=group.evaluation(3), max_epochs=2)
    first, second = of_epochs(module.evaluated, 3)
    used = [float((e["episode_return"] / e["episode_length"]).unique()) - 0.25 for e in (first, second)]
    assert used == [8, (8 + 4) / 2], "not the average"
    assert collected == [-1, 8]


@pytest.mark.slow
def test_validate_and_fit_each_start_and_stop_the_evaluations_workers(no_leftovers):
    group, module = make_group(1), Dialled([2])
    evaluation = group.evaluation(episodes=3, num_workers=2)
    update = UpdateWeights(group, weight_update_map={"policy": "actor"})
    trainer = fit(module, group, val=evaluation, update=update, max_epochs=1)
    in_fit = torch.stack(module.evaluated)
    assert not no_leftovers()
    trainer.validate(module, evaluation, verbose=False)
    assert not no_leftovers() and len(evaluation.stats()) == 2
    again = torch.stack(module.evaluated[3:])
    assert torch.equal(again["episode_return"], in_fit["episode_return"])
    assert again["worker_idx"].tolist() == [0, 1, 0]
    assert pickle.loads(pickle.dumps(group)).evaluation(1, num_workers=0).play({"policy": turned(1.0)}).shape == (1,)


# --- without a trainer -----------------------------------------------------------------------------------------------


def turned(value):
    dial = Dial()
    with torch.no_grad():
        dial.value.fill_(value)
    return dial


@pytest.mark.slow
def test_an_evaluation_works_without_lightning_and_reads_the_weights_as_they_are(no_leftovers):
    dial = turned(2.0)
    with make_group(1) as group:
        evaluation = group.evaluation(episodes=5, num_workers=2)
        group.update_policy_weights_(dial)
        assert len(evaluation) == 5 and repr(evaluation) == "Evaluation(5 episodes, deterministic, num_workers=2)"
        first = evaluation.play()
        assert torch.equal(first["episode_return"], 2.25 * first["episode_length"])
        with torch.no_grad():
            dial.value.fill_(6.0)
        items = list(evaluation)
        assert [item.batch_size for item in items] == [()] * 5
        assert torch.equal(torch.stack(items)["episode_return"], 6.25 * first["episode_length"])
        other = evaluation.play({"policy": turned(3.0)})
        assert torch.equal(other["episode_return"], 3.25 * first["episode_length"])
        assert group.version == 0 and other["policy_version"].tolist() == [0] * 5
        assert set(group.digest()) == {0}
        pids = {stat["pid"] for stat in (*group.stats().values(), *evaluation.stats().values())}
        assert len(pids) == 3 and pids <= set(no_leftovers())


def test_the_same_episodes_whatever_the_number_of_workers():
    played = []
    for num_workers in (0, 3):
        group = make_group(0)
        evaluation = group.evaluation(6, num_workers=num_workers)
        played.append(evaluation.play({"policy": turned(2.0)}))
        group.shutdown()
    for name in ("episode", "episode_return", "episode_length"):
        assert torch.equal(played[0][name], played[1][name])


def played_by(group):
    with group:
        return group.evaluation(8).play({"policy": turned(2.0)})["episode_length"].tolist()


def test_each_rank_plays_its_own_episodes_and_a_resumed_run_those_of_the_run_before():
    groups = [make_group(0, seed=None) for _ in range(3)]
    torch.manual_seed(11)
    first = played_by(groups[0])
    torch.manual_seed(12)
    assert played_by(groups[1]) != first, "another seed, the same episodes"
    torch.manual_seed(13)
    groups[2].load_state_dict(groups[0].state_dict())
    assert played_by(groups[2]) == first
    groups[2].rank = 1
    assert played_by(groups[2]) != first


def test_a_group_that_was_given_tensors_says_that_it_cannot_read_them_again():
    with make_group(0) as group:
        evaluation = group.evaluation(2)
        with pytest.raises(RuntimeError, match=r"does not know a source of \['policy'\]"):
            evaluation.play()
        group.update_policy_weights_({"value": torch.tensor(3.0)})
        with pytest.raises(RuntimeError, match="was not connected with modules"):
            evaluation.play()
        with pytest.raises(ValueError, match="each worker has its own weights for 'policy'"):
            evaluation.play({"policy": {0: turned(1.0)}})
        played = evaluation.play({"policy": {"value": torch.tensor(3.0)}})
        assert torch.equal(played["episode_return"], 3.25 * played["episode_length"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"episodes": 0}, "at least one"), ({"episodes": 2, "num_workers": 3}, "one for each worker")],
)
def test_an_evaluation_that_makes_no_sense_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        make_group(2).evaluation(**arguments)


class Told:
    """A factory of collectors that remembers which ``worker_idx`` each was told, and which of them are closed."""

    def __init__(self):
        self.indices, self.closed = [], []
        self.close_raises = False

    def __call__(self, *, worker_idx, seed):
        self.indices.append(worker_idx)
        made = dial_collector(worker_idx=worker_idx, seed=seed)
        close = made.close

        def closing():
            self.closed.append(worker_idx)
            close()
            if self.close_raises:
                raise OSError(f"collector {worker_idx} does not close")

        made.close = closing
        return made


DIAL = {"policy": turned(2.0)}


def test_no_two_workers_of_a_trainer_are_told_the_same_index():
    told = Told()
    with make_group(0, told) as group:
        first, second, third = (group.evaluation(2, num_workers=0) for _ in range(3))
        first.play(DIAL)
        second.play(DIAL)
        group.update_policy_weights_(turned(1.0))
        first.play()
        assert told.indices == [1, 2, 0]
        first.shutdown()
        third.play(DIAL)
        first.play(DIAL)
        assert told.indices == [1, 2, 0, 3, 4]
    second.play(DIAL)
    assert told.indices[-1] == 1, "all others have been stopped"
    second.shutdown()


def test_a_group_that_grows_needs_the_indices_of_its_evaluations():
    told = Told()
    group = make_group(2, told)
    near, far = group.evaluation(2, num_workers=0), group.evaluation(2, num_workers=0)
    near.play(DIAL)
    far.play(DIAL)
    assert told.indices == [2, 3]
    group.resize(3)
    assert told.closed == [2]
    near.play(DIAL)
    far.play(DIAL)
    assert told.indices == [2, 3, 4]
    group.resize(1)
    assert told.closed == [2]
    group.stop_evaluations()
    assert sorted(told.closed) == [2, 3, 4]


def test_an_evaluation_that_nobody_has_any_more_is_stopped_and_not_started_again(monkeypatch):
    told, launched = Told(), []
    group = make_group(0, told)
    kept, dropped = group.evaluation(1, num_workers=0), group.evaluation(2, num_workers=0)
    dropped.play(DIAL)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None and told.closed == []
    another = group.evaluation(3, num_workers=0)
    assert told.closed == [1], "its workers run on"
    monkeypatch.setattr(Evaluation, "launch", lambda self: launched.append(self.episodes))
    with group:
        pass
    assert launched == [kept.episodes, another.episodes]


def test_evaluations_are_stopped_within_one_deadline_and_leave_the_group_its_time(monkeypatch):
    group, given = make_group(0), []
    evaluations = [group.evaluation(1, num_workers=0) for _ in range(4)]

    def hang(timeout):
        given.append(timeout)
        time.sleep(timeout)

    for evaluation in evaluations:
        monkeypatch.setattr(evaluation._players, "shutdown", hang)
    started = time.monotonic()
    group.stop_evaluations(0.3)
    assert time.monotonic() - started < 1.0
    assert given[0] == pytest.approx(0.3, abs=0.1) and given[1:] == [0.0] * 3


def test_a_collector_that_does_not_close_leaves_nothing_running():
    told = Told()
    group = make_group(0, told)
    group.start(DIAL)
    evaluations = [group.evaluation(1, num_workers=0) for _ in range(2)]
    for evaluation in evaluations:
        evaluation.play()
    told.close_raises = True
    with pytest.raises(OSError, match="collector 0 does not close"):
        group.shutdown()
    assert sorted(told.closed) == [0, 1, 2]
    assert not group.running and group.stats()[0]["state"] == "stopped"
    assert not any(evaluation._players.running for evaluation in evaluations)
    group.shutdown()
    assert len(told.closed) == 3


def test_an_evaluation_that_is_pickled_is_its_groups_again(monkeypatch):
    """As for ``ddp_spawn``: the group goes along with the loader."""
    loaded, launched = pickle.loads(pickle.dumps(make_group(0).evaluation(2))), []
    monkeypatch.setattr(Evaluation, "launch", lambda self: launched.append(self))
    with loaded._of:
        assert launched == [loaded]


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collector", "error", "text"),
    [
        (partial(dial_collector, env=NoSecondEpisode), WorkerError, "'collect': ArithmeticError: no second episode"),
        pytest.param(partial(dial_collector, env=Killed), WorkerDied, "exit code 9", marks=pytest.mark.slow),
        (partial(dial_collector, policy=Stubborn), WorkerError, "Stubborn is asked for its best action"),
        (Stream, WorkerError, "Stream cannot be evaluated"),
    ],
)
def test_a_fault_in_an_evaluation_ends_the_fit_and_leaves_nothing(collector, error, text, no_leftovers):
    group, module = make_group(1, collector, length=1), Dialled()
    if collector is Stream:
        module.actor = Policy(1)
    with pytest.raises(error, match=text) as caught:
        fit(module, group, val=group.evaluation(2), max_epochs=1)
    notes = getattr(caught.value, "__notes__", ["in an evaluation of 2 episodes"])
    assert any("in an evaluation of 2 episodes" in note for note in notes)
    assert not no_leftovers() and not group.running


def test_a_worker_that_was_killed_is_replaced_and_plays_the_same_episodes(no_leftovers):
    with make_group(1) as group:
        group.update_policy_weights_(dial := turned(2.0))
        evaluation = group.evaluation(3)
        before = evaluation.play()
        for weights in (None, {"policy": dial}):
            os.kill(evaluation.stats()[0]["pid"], signal.SIGKILL)
            after = evaluation.play(weights)
            assert torch.equal(after["episode_return"], before["episode_return"])
        assert len(next(iter(group))) == NUM_ENVS, "the group's own worker was touched"


@pytest.mark.slow
def test_where_nothing_is_replaced_a_killed_worker_ends_the_evaluation_and_the_next_starts_a_new_one(no_leftovers):
    with make_group(1, max_restarts=0) as group:
        group.update_policy_weights_(turned(2.0))
        evaluation = group.evaluation(3)
        before = evaluation.play()
        os.kill(evaluation.stats()[0]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            evaluation.play()
        assert torch.equal(evaluation.play()["episode_return"], before["episode_return"])


@pytest.mark.slow
def test_a_request_to_stop_ends_an_evaluation_that_takes_for_ever(no_leftovers):
    class Impatient(RuntimeError):
        pass

    with make_group(1, partial(dial_collector, env=Endless)) as group:
        group.update_policy_weights_(turned(2.0))
        evaluation = group.evaluation(1)
        started = []

        def look_around():
            if evaluation.stats()[0]["state"] == "collecting":
                started.append(time.monotonic())
                if len(started) > 3:
                    raise Impatient

        group.look_around = look_around
        with pytest.raises(Impatient):
            evaluation.play()
        assert time.monotonic() - started[0] < 5
        assert wait_until(lambda: len(no_leftovers()) == 1, 5), "the evaluation's worker plays on"
