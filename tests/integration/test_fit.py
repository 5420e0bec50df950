"""A group under ``Trainer.fit``: what is pushed when, what batches are labelled with, life cycles, errors, metrics."""

import contextlib
import csv
import itertools
import math
import os
import pickle
import signal
import time
import warnings
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from tensordict import TensorDict
from torch import nn

from lightning_weightsync import (
    DistributedWeightSyncScheme,
    LayoutMismatchError,
    UpdateWeights,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.cadence import Cadence
from lightning_weightsync.paths import PathError
from tests.helpers import collectors
from tests.helpers.collectors import NUM_ENVS, STEPS, Stream, gym_collector, misbehaving_collector, misbehaving_factory
from tests.helpers.fit import (
    Audit,
    Learner,
    ManualLearner,
    Recorder,
    RivalsLearner,
    Rows,
    fit,
    make_callback,
    make_group,
    make_trainer,
)
from tests.helpers.policies import Policy, fingerprint, sha256


class AtTrainEnd(Callback):
    """Does something in ``on_train_end``, after UpdateWeights has: the group is still running."""

    def __init__(self, action):
        self.action = action

    def on_train_end(self, trainer, pl_module):
        self.action()


class Raises(Callback):
    def __init__(self, hook):
        def fail(*args, **kwargs):
            raise ArithmeticError(f"another callback's {hook}")

        setattr(self, hook, fail)


class Other:
    """A sender."""

    def update_weights(self):
        pass


def audited(group, module, *args, **kwargs):
    return Audit(group, lambda: module.actor), make_callback(group, *args, **kwargs)


# --- pushes reach the workers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """Two workers that are started here, for many fits: a callback does not stop what it has not started."""
    with make_group(2) as group:
        yield group


@pytest.fixture
def shared(pair):
    yield pair
    pair.__dict__.pop("connect", None), pair.__dict__.pop("update_policy_weights_", None)


@pytest.mark.parametrize(
    ("make_module", "interval", "unit", "pushes"),
    [
        (Learner, 1, "batches", 4),
        (Learner, 3, "batches", 2),
        (ManualLearner, 1, "optim_steps", 12),
        (ManualLearner, 5, "optim_steps", 3),  # after the steps 5 and 10, and the last two at the end
        (ManualLearner, 100, "optim_steps", 1),
        (Learner, 12, "frames", 4),  # as many as one batch has
        (Learner, 13, "frames", 2),  # at least so many: after two batches
        (ManualLearner, 25, "frames", 2),  # after three batches, and the last one at the end
    ],
)
@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
def test_after_every_push_each_worker_equals_the_trainer_bit_for_bit(shared, make_module, interval, unit, pushes):
    """BatchNorm's statistics too; and every sample is of the newest push, made by its very weights."""
    module = make_module(seed=interval)
    audit, callback = audited(shared, module, interval, unit)
    before = shared.version
    fit(module, shared, audit, callback)
    first = audit.pushes.pop(0)  # before the first batch
    assert len(audit.pushes) == pushes
    assert len({digest for _, digest in [first, *audit.pushes]}) == pushes + 1, "a push without new weights"
    assert [version for version, _ in audit.pushes] == [first[0] + 1 + k for k in range(pushes)]
    assert callback.version == shared.version == audit.pushes[-1][0]
    assert callback.num_pushes == pushes + (before > 0 or first[0] > 0)
    assert len(audit.batches) == 4
    assert audit.batches[0].batch_size == (2 * NUM_ENVS, STEPS)
    assert audit.batches[0]["worker_idx"][:, 0].tolist() == [0, 0, 1, 1]
    assert shared.digest() == dict.fromkeys((0, 1), sha256(module.actor)), "the workers do not hold the final weights"
    assert int(module.actor.norm.num_batches_tracked) == (12 if make_module is ManualLearner else 4)
    assert shared.connected, "a group that the user started was stopped"


@pytest.mark.parametrize("num_workers", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_every_sample_is_of_the_newest_push_whatever_the_number_of_workers(num_workers, no_leftovers):
    """Two workers are everywhere else. A run that deadlocks ends in pytest's timeout."""
    group, module, digests = make_group(num_workers), ManualLearner(2, seed=1), []
    audit, callback = audited(group, module, 3, "optim_steps")  # after the steps 3, 6 and 8 of two per batch
    fit(module, group, audit, callback, AtTrainEnd(lambda: digests.append(group.digest())), max_epochs=1)
    assert callback.num_pushes == 3 and callback.version == 3
    assert [version for version, _ in audit.pushes] == [0, 1, 2, 3]
    count = max(1, num_workers)
    assert [b["policy_version"].unique().tolist() for b in audit.batches] == [[0], [0], [1], [2]]
    assert all(b.batch_size == (count * NUM_ENVS, STEPS) for b in audit.batches)
    assert audit.batches[0]["worker_idx"][::NUM_ENVS, 0].tolist() == list(range(count))
    assert digests == [dict.fromkeys(range(count), sha256(module.actor))]
    assert not group.running
    assert not torch.distributed.is_initialized()


def test_the_first_batch_is_made_by_the_trainers_weights_not_by_the_factorys(shared):
    """Workers' factories are seeded differently; validation, which runs before training, comes after the first push."""
    seen = []

    class Validated(Learner):
        def validation_step(self, batch, batch_idx):
            seen.append(("validation", set(shared.digest().values())))

        def on_train_start(self):
            seen.append(("start", set(shared.digest().values())))

    module = Validated(seed=77)
    initial = sha256(module.actor)
    audit, callback = audited(shared, module)
    trainer = make_trainer(audit, callback)
    trainer.fit(module, shared, Rows(1))
    assert seen[:2] == [("validation", {initial}), ("start", {initial})]
    assert audit.pushes[0][1] == initial


def test_two_destinations_out_of_two_places_are_pushed_as_one_version():
    group = make_group(
        0,
        Stream,
        weight_sync_schemes={"policy": DistributedWeightSyncScheme(), "nets['q']": DistributedWeightSyncScheme()},
    )
    module, digests = Learner(seed=3), []
    module.critics = nn.ModuleList([nn.Linear(2, 1)])
    callback = make_callback(group, weight_update_map={"policy": "actor", "nets['q']": "critics.0"})
    made_of = {}

    def on_batch(batch):
        (version,) = batch["policy_version"].unique().tolist()
        made_of[version] = batch["fingerprint"], batch["q"]
        assert batch["fingerprint"].eq(fingerprint(module.actor)).all()
        assert batch["q"].eq(module.critics[0].weight.sum()).all()
        with torch.no_grad():
            module.critics[0].weight.add_(1.0)

    module.on_batch = on_batch
    fit(
        module,
        group,
        callback,
        AtTrainEnd(lambda: digests.append((group.digest(), group.digest("nets['q']")))),
    )
    assert sorted(made_of) == [0, 1, 2, 3] and callback.num_pushes == callback.version == 4
    assert digests == [({0: sha256(module.actor)}, {0: sha256(module.critics[0])})]


def test_a_getter_gives_weights_and_can_give_each_worker_its_own(shared):
    module = Learner(seed=4)
    mine = Policy(5)

    def getter():
        return {0: module.actor, 1: mine}

    callback = UpdateWeights(shared, 2, policy_weights_getter=getter)
    fit(module, shared, callback)
    assert shared.digest() == {0: sha256(module.actor), 1: sha256(mine)}


def test_a_default_process_group_of_the_users_is_left_as_it_was(no_leftovers):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        group, module = make_group(1), Learner(seed=8)
        audit, callback = audited(group, module)
        fit(module, group, audit, callback)
        assert len(audit.pushes) == 5
        assert torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1
        value = torch.tensor([3.0])
        torch.distributed.all_reduce(value)
        assert value.tolist() == [3.0]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("unit", ["batches", "optim_steps"])
def test_without_blocking_every_push_is_on_its_way_and_the_last_one_has_arrived(pair, unit):
    """A sample's version may lag behind; it never goes backwards, and is one version within a batch."""
    versions, ends = [], []
    module = Learner(on_batch=lambda batch: versions.append(batch["policy_version"].unique().tolist()))
    callback = make_callback(pair, 1, unit, blocking=False)
    before = pair.version

    def look():
        ends.append((set(pair.digest().values()), sha256(module.actor)))

    fit(module, pair, callback, AtTrainEnd(look), max_epochs=3)
    # A group that another fit has connected gets the new module's weights as one more push.
    assert pair.version - before == callback.num_pushes in (12, 13)
    assert ends == [({sha256(module.actor)}, sha256(module.actor))]
    assert all(len(version) <= 2 for version in versions)  # two workers, each with one version
    newest = [version[-1] for version in versions]
    assert newest == sorted(newest) and newest[0] >= before
    assert [stat["version"] for stat in pair.stats().values()] == [pair.version] * 2


# --- cadence, through fit --------------------------------------------------------------------------------------------


def recorded(module, interval, unit, loader, *, source=None, **kwargs):
    """The weights at each push (the one before the first batch left out), and the callback."""
    recorder = Recorder(module.actor)
    callback = make_callback(recorder, interval, unit, **({"weight_update_map": {"policy": source}} if source else {}))
    fit(module, loader, callback, **kwargs)
    return recorder.pushed[1:], callback


def distinct(pushed):
    return len({tuple(leaf.sum().item() for leaf in weights.values()) for weights in pushed})


class Ascending(Learner):
    """Each optimizer step adds exactly 1 to the head's bias, so that it counts the steps."""

    def loss(self, batch):
        return -self.actor.head.bias.sum()

    def configure_optimizers(self):
        nn.init.zeros_(self.actor.head.bias)
        return torch.optim.SGD([self.actor.head.bias], lr=1.0)


def steps_at(pushed):
    # Rounded up: the step at the end of a run may be one over less than the accumulated batches.
    return [math.ceil(weights["head.bias"][0].item()) for weights in pushed]


@pytest.mark.parametrize(
    ("interval", "unit", "batches", "accumulate", "expected"),
    [
        (1, "optim_steps", 16, 4, [1, 2, 3, 4]),
        (2, "batches", 16, 4, [0, 1, 1, 2, 2, 3, 3, 4]),  # every other one with unchanged weights
        (2, "optim_steps", 5, 2, [2, 3]),  # Lightning steps at the last batch too; that third step is left over
        (2, "batches", 5, 2, [1, 2, 3]),
        (100, "batches", 1, 1, [1]),
        (100, "optim_steps", 1, 1, [1]),
        (1, "optim_steps", 1, 1, [1]),
        (3, "optim_steps", 7, 1, [3, 6, 7]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
def test_pushes_with_accumulated_gradients_and_the_last_one(interval, unit, batches, accumulate, expected):
    pushed, callback = recorded(Ascending(), interval, unit, Rows(batches), accumulate_grad_batches=accumulate)
    assert steps_at(pushed) == expected
    assert callback.num_pushes == len(expected)


def test_the_weights_of_the_very_step_are_pushed_inside_the_batch():
    pushed, _ = recorded(ManualLearner(3), 1, "optim_steps", Rows(2))
    assert len(pushed) == 6 == distinct(pushed)
    reference = ManualLearner(3)  # the same run, without any callback
    steps = []
    reference.configure_optimizers = lambda: watched(torch.optim.SGD(reference.parameters(), lr=0.1), reference, steps)
    fit(reference, Rows(2))
    for weights, step in zip(pushed, steps, strict=True):
        assert all(torch.equal(weights[name], step[name]) for name in step if "norm" not in name)


def watched(optimizer, module, steps):
    state = module.actor.state_dict
    optimizer.register_step_post_hook(lambda *_: steps.append({k: v.clone() for k, v in state().items()}))
    return optimizer


@pytest.mark.parametrize(
    ("source", "expected"),
    [("actor", [3, 6, 9, 12]), ("actor.head", [3, 6]), ("rival", [3, 6])],
)
def test_only_steps_of_optimizers_that_own_a_mapped_parameter_are_counted(source, expected):
    """GAN-like: 6 batches, 12 steps. With one optimizer mapped, the 3rd and 6th of its 6 steps push."""
    module = RivalsLearner()
    taken = []

    class Steps(Callback):
        def on_train_start(self, trainer, pl_module):
            for k, optimizer in enumerate(trainer.optimizers):
                optimizer.register_step_post_hook(lambda *_, k=k: taken.append(k))

    recorder = Recorder(module.actor)
    at = []
    push = recorder.update_policy_weights_
    recorder.update_policy_weights_ = lambda **kwargs: (at.append(len(taken)), push(**kwargs))
    callback = make_callback(recorder, 3, "optim_steps", weight_update_map={"policy": source})
    fit(module, Rows(6), Steps(), callback)
    assert taken == [0, 1] * 6
    steps_of_both = expected if source == "actor" else [2 * k for k in expected]
    assert at == [0, *steps_of_both]
    assert callback.num_pushes == len(expected)


class RawLearner(ManualLearner):
    """Steps the raw optimizer: ``global_step`` stands still."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class LBFGSLearner(Learner):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.actor.head.parameters(), lr=0.1, max_iter=4)


class SkippingLearner(Learner):
    """Every second batch gives nothing to learn from."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx % 2 else None


@pytest.mark.parametrize(("make_module", "batches"), [(RawLearner, 4), (LBFGSLearner, 3)])
def test_one_push_per_real_step_however_the_module_steps(make_module, batches):
    module = make_module()
    pushed, callback = recorded(module, 1, "optim_steps", Rows(batches))
    assert len(pushed) == batches == callback.num_pushes == distinct(pushed)
    final = module.actor.state_dict()
    assert all(torch.equal(pushed[-1][name], final[name]) for name in final if "norm" not in name)


def test_a_step_that_raises_is_not_counted():
    class Clumsy(ManualLearner):
        def training_step(self, batch, batch_idx):
            def closure():
                if batch_idx == 1:
                    raise ArithmeticError("no gradient today")
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer = self.optimizers()
            with contextlib.suppress(ArithmeticError):
                optimizer.step(closure)

    pushed, _ = recorded(Clumsy(), 1, "optim_steps", Rows(4))
    assert len(pushed) == 3


def test_an_optimizer_step_that_pushes_keeps_gradients_and_modes_as_they_were():
    class Strict(ManualLearner):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            assert torch.is_grad_enabled() and self.actor.training
            assert all(p.grad is not None and p.requires_grad for p in self.actor.parameters())

    recorded(Strict(2), 1, "optim_steps", Rows(2))


def test_what_a_module_does_after_the_callback_travels_with_the_next_push():
    """``Callback.on_train_batch_end`` runs before the module's own hook: documented."""

    class Late(Ascending):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.actor.head.bias.add_(100.0)

    pushed, _ = recorded(Late(), 1, "batches", Rows(3))
    assert steps_at(pushed) == [1, 102, 203]


class TickingLearner(Ascending):
    """Each batch takes four seconds, by a clock of its own."""

    now = 0.0

    def training_step(self, batch, batch_idx):
        self.now += 4.0
        return super().training_step(batch, batch_idx)


def ticking(module, interval, recorder):
    """The callback on the module's clock."""
    callback = make_callback(recorder, interval, "seconds")
    callback._cadence = Cadence(interval, "seconds", clock=lambda: module.now)
    return callback


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(4, [1, 2, 3, 4, 5]), (5, [2, 4, 5]), (9.5, [3, 5]), (0.1, [1, 2, 3, 4, 5])],
)
def test_seconds_push_when_a_batch_ends_and_the_time_is_up(interval, expected):
    module = TickingLearner()
    recorder = Recorder(module.actor)
    callback = ticking(module, interval, recorder)
    fit(module, Rows(5), callback)
    assert steps_at(recorder.pushed[1:]) == expected
    assert callback.num_pushes == len(expected)


def test_seconds_of_two_fits_add_up_without_the_time_between_them():
    module = TickingLearner()
    recorder = Recorder(module.actor)
    callback = ticking(module, 9, recorder)
    trainer = make_trainer(callback)
    trainer.fit(module, Rows(4))
    assert steps_at(recorder.pushed) == [0, 3, 4]
    module.now += 1000
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, Rows(4))  # its optimizer counts anew
    assert steps_at(recorder.pushed[3:]) == [0, 3, 4]


def test_by_the_real_clock_an_interval_in_seconds_is_met():
    class Slow(Ascending):
        def training_step(self, batch, batch_idx):
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    pushed, _ = recorded(Slow(), 0.12, "seconds", Rows(7))
    steps = steps_at(pushed)
    assert steps[-1] == 7 and 1 <= len(steps) <= 3
    assert all(b - a >= 2 for a, b in itertools.pairwise([0, *steps[:-1]])), steps  # two batches may last 0.12 s


class IterableRecorder(Recorder):
    """A foreign collector that is a loader too; batch k (from 1) has 2k frames."""

    batch_of = staticmethod(lambda k: TensorDict({"observation": torch.ones(k, 2, 3)}, [k, 2]))

    def __len__(self):
        return 5

    def __iter__(self):
        return (self.batch_of(k + 1) for k in range(len(self)))


@pytest.mark.parametrize(("interval", "expected"), [(2, [1, 2, 3, 4, 5]), (6, [2, 3, 4, 5]), (7, [3, 4, 5])])
def test_frames_of_a_foreign_collector_are_those_of_its_batches(interval, expected):
    module = Ascending()
    recorder = IterableRecorder(module.actor)
    fit(module, recorder, make_callback(recorder, interval, "frames"))
    assert steps_at(recorder.pushed[1:]) == expected


def test_batches_whose_frames_cannot_be_counted_are_refused():
    class Plain(IterableRecorder):
        batch_of = staticmethod(lambda k: {"observation": torch.ones(k, 3)})

    recorder = Plain()
    with pytest.raises(TypeError, match="counts TensorDict batches of a Plain; this one is dict: use 'batches'"):
        fit(Ascending(), recorder, make_callback(recorder, 5, "frames"))


@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
def test_frames_count_what_the_group_collects_not_what_is_trained_on(no_leftovers):
    """A replay buffer in front: each batch of the loader stands for two batches of the group."""
    group, module = make_group(0, length=None), Learner()
    frames = NUM_ENVS * STEPS

    class Replay(Rows):
        def __iter__(self):
            stream = iter(group)
            for _ in range(self.count):
                next(stream)
                yield {"observation": next(stream)["observation"]}

    callback = make_callback(group, 4 * frames, "frames")
    versions = []
    module.on_batch = lambda batch: versions.append((group.version, group.frames))
    fit(module, Replay(5), callback)
    assert versions == [(0, 2 * frames), (0, 4 * frames), (1, 6 * frames), (1, 8 * frames), (2, 10 * frames)]
    assert callback.num_pushes == 3


@pytest.mark.parametrize(("unit", "length"), [("batches", 5), ("optim_steps", 5), ("frames", 30), ("seconds", 20)])
def test_an_interval_longer_than_the_run_is_told_once(unit, length):
    module = TickingLearner()
    recorder = IterableRecorder(module.actor)
    callback = ticking(module, 100, recorder) if unit == "seconds" else make_callback(recorder, 100, unit)
    text = rf"update_weights_interval=100 \({unit}\) is longer than the {length} counted since the last push:"
    with pytest.warns(UserWarning, match=text) as caught:
        fit(module, recorder, callback)
    assert sum("is longer than" in str(w.message) for w in caught) == 1
    assert steps_at(recorder.pushed[1:]) == [5]


class Idle(ManualLearner):
    def training_step(self, batch, batch_idx):
        pass


def test_a_run_that_counts_no_step_at_all_is_told_once():
    text = r"no optimizer step was counted in 3 batches; .* that owns what is mapped, \{'policy': 'actor'\}\?"
    with pytest.warns(UserWarning, match=text):
        pushed, callback = recorded(Idle(), 1, "optim_steps", Rows(3))
    assert not pushed and callback.num_pushes == 0


@pytest.mark.parametrize("given", [{"sender": Other()}, {"collector": Recorder(), "policy_weights_getter": dict}])
def test_where_nothing_is_mapped_the_warning_names_no_map(given):
    text = r"no optimizer step was counted in 3 batches; does Idle step an optimizer\?"
    with pytest.warns(UserWarning, match=text):
        fit(Idle(), Rows(3), UpdateWeights(**given, interval_unit="optim_steps"))


def test_a_cadence_that_fits_the_run_is_silent():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(is longer than|was counted).*")
        recorded(Ascending(), 2, "batches", Rows(3))


# --- others than groups ----------------------------------------------------------------------------------------------


def test_a_foreign_collector_is_called_before_training_and_at_each_push():
    module, recorder = Ascending(), Recorder()
    fit(module, Rows(4), make_callback(recorder, 2))
    assert len(recorder.calls) == 3
    for args, kwargs in recorder.calls:
        assert not args and list(kwargs) == ["weights_dict"] and list(kwargs["weights_dict"]) == ["policy"]
        weights = kwargs["weights_dict"]["policy"]
        assert set(weights.flatten_keys(".").keys()) == set(module.actor.state_dict())
        assert not any(leaf.requires_grad for leaf in weights.values(True, True))

    recorder = Recorder()
    fit(module, Rows(2), UpdateWeights(recorder, policy_weights_getter=lambda: "mine"))
    assert recorder.calls == [(("mine",), {})] * 3
    recorder = Recorder()
    fit(module, Rows(2), UpdateWeights(recorder, 2))
    assert recorder.calls == [((), {})] * 2


def test_a_sender_is_told_to_update():
    class Sender:
        updates = 0

        def update_weights(self):
            self.updates += 1

    sender = Sender()
    callback = UpdateWeights(sender=sender, update_weights_interval=1, interval_unit="optim_steps")
    fit(RivalsLearner(), Rows(3), callback)  # nothing is mapped: both optimizers count
    assert sender.updates == 1 + 6
    assert callback.num_pushes == 6


def test_a_callback_can_be_added_to_a_trainer_that_exists():
    module, recorder = Ascending(), Recorder()
    trainer = make_trainer(max_epochs=1)
    callback = make_callback(recorder, 2)
    callback.register(trainer, name="mine")
    callback.register(trainer, name="mine")
    assert trainer.callbacks.count(callback) == 1 and "mine" in callback.state_key
    other = make_callback(Recorder(), 1)
    other.register(trainer, name="other")
    trainer.fit(module, Rows(4))
    assert len(recorder.calls) == 3 and len(other.collector.calls) == 5
    assert callback.trainer is trainer


# --- life cycles -----------------------------------------------------------------------------------------------------


def test_only_fit_starts_workers(no_leftovers):
    class Evaluated(Learner):
        def validation_step(self, batch, batch_idx):
            assert not no_leftovers()

        test_step = predict_step = validation_step

    group = make_group(2)
    trainer = make_trainer(make_callback(group))
    module = Evaluated()
    trainer.validate(module, Rows(1), verbose=False)
    trainer.test(module, Rows(1), verbose=False)
    trainer.predict(module, Rows(1))
    assert not group.running and group.stats() == {}


def test_fit_validate_fit_are_two_clean_life_cycles(no_leftovers):
    class Evaluated(Learner):
        def validation_step(self, batch, batch_idx):
            pass

    group, module, runs = make_group(1, length=3), Evaluated(), []
    audit, callback = audited(group, module, 2)
    trainer = make_trainer(audit, callback, AtTrainEnd(lambda: runs.append(group.run)), max_epochs=1)
    trainer.fit(module, group)
    assert not no_leftovers() and not group.running
    assert callback.version == callback.num_pushes == 2
    assert not any(hooks for hooks in (o._optimizer_step_post_hooks for o in trainer.optimizers))
    trainer.validate(module, Rows(1), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, group)
    assert [version for version, _ in audit.pushes] == [0, 1, 2, 2, 3, 4]
    assert callback.version == callback.num_pushes == 4
    assert runs == [1, 2]
    first, again = audit.batches[0], audit.batches[3]
    assert not torch.equal(first["observation"], again["observation"]), "the second fit replays the episodes"


def test_fast_dev_run():
    group, module = make_group(0, length=50), Learner()
    audit, callback = audited(group, module)
    fit(module, group, audit, callback, fast_dev_run=True)
    assert len(audit.batches) == 1 and callback.num_pushes == 1


def test_a_second_fit_works_after_one_that_failed(no_leftovers):
    group, module = make_group(0), Learner()
    with pytest.raises(ArithmeticError):
        fit(module, group, make_callback(group), Raises("on_train_batch_start"))
    assert not group.running
    audit, callback = audited(group, module)
    fit(module, group, audit, callback)
    assert group.run == 2 and len(audit.batches) == 4


@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
def test_early_stopping_in_the_middle_of_an_epoch_pushes_the_last_weights(shared):
    class Stops(Learner):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = batch_idx == 1

    module = Stops(seed=12)
    fit(module, shared, make_callback(shared, 10), max_epochs=3)
    assert shared.digest() == dict.fromkeys((0, 1), sha256(module.actor))


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_on_the_progress_bar_and_in_the_loggers_while_it_runs(tmp_path):
    group, module, shown = make_group(0, length=3), ManualLearner(2), []

    class Shown(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            shown.append(dict(trainer.progress_bar_metrics))

    callback = make_callback(group, 3, "optim_steps")
    fit(module, group, callback, Shown(), logs_to=tmp_path, max_epochs=3)
    wanted = {f"weight_sync/{name}" for name in ("version", "staleness_mean", "workers_alive")}
    wanted |= {"collect/frames_per_sec", "collect/episode_return"}
    assert all(wanted <= set(metrics) for metrics in shown), shown[0]
    assert [metrics["weight_sync/version"] for metrics in shown] == [0, 1, 2, 2, 3, 4, 4, 5, 6]
    assert {metrics["weight_sync/staleness_mean"] for metrics in shown} == {0.0}
    assert all(metrics["collect/frames_per_sec"] > 0 for metrics in shown)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("weight_sync/version")]
    assert [float(row["weight_sync/version"]) for row in rows] == [0, 1, 2, 2, 3, 4, 4, 5, 6]
    assert callback.num_pushes == 6 == float(rows[-1]["weight_sync/version"])
    others = ("push_ms", "stall_ms", "bytes", "staleness_max", "workers_alive", "worker_restarts")
    for name in [f"weight_sync/{name}" for name in others] + ["collect/episode_length"]:
        assert all(math.isfinite(float(row[name])) for row in rows), name


@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
@pytest.mark.parametrize("interval", [1, 2, 4, 100])
def test_the_last_logged_version_is_the_number_of_pushes(interval, tmp_path):
    group = make_group(0, length=5)
    callback = make_callback(group, interval)
    fit(Learner(), group, callback, logs_to=tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        versions = [row["weight_sync/version"] for row in csv.DictReader(file) if row["weight_sync/version"]]
    assert float(versions[-1]) == callback.num_pushes == math.ceil(5 / interval)


def test_the_mean_return_is_over_the_last_hundred_episodes(tmp_path):
    group = make_group(0, partial(gym_collector, num_envs=30, steps=12), length=2)
    fit(Learner(), group, make_callback(group), logs_to=tmp_path)
    returns = [value for value, _ in group.state_dict()["episodes"]]
    assert len(returns) == 100
    assert group.metrics()["collect/episode_return"] == pytest.approx(sum(returns) / 100)


# --- misconfiguration is found in setup, before a worker starts ------------------------------------------------------


@pytest.mark.parametrize(
    ("source_map", "error", "texts"),
    [
        ({"polizy": "actor"}, MisconfigurationException, [r"\['polizy'\]", r"\['policy'\]"]),
        (
            {"policy": "actor", "value": "critic"},
            MisconfigurationException,
            [r"\['policy', 'value'\]", r"\['policy'\]"],
        ),
        ({"policy": "aktor"}, PathError, ["did you mean 'actor'", "aktor"]),
        ({"policy": "actor.body[0]"}, PathError, [r"'\[0\]' on 'actor\.body'"]),
        ({"policy": "actor..body"}, PathError, ["malformed"]),
    ],
)
def test_a_map_that_matches_nothing_is_found_before_any_worker_starts(source_map, error, texts, no_leftovers):
    group = make_group(2)
    with pytest.raises(error) as caught:
        fit(Learner(), group, make_callback(group, weight_update_map=source_map))
    for text in texts:
        assert caught.match(text)
    assert group.stats() == {}, "workers were started"


def test_a_module_may_build_its_networks_in_setup(shared):
    class Lazy(Learner):
        def __init__(self):
            super().__init__()
            del self.actor

        def setup(self, stage):
            self.actor = Policy(21)

    module = Lazy()
    fit(module, shared, make_callback(shared))
    assert shared.digest() == dict.fromkeys((0, 1), sha256(module.actor))


def test_what_no_optimizer_owns_cannot_be_counted_in_steps():
    module = Learner()
    module.frozen = Policy(3)
    module.configure_optimizers = lambda: torch.optim.SGD(module.actor.parameters(), lr=0.1)
    callback = make_callback(Recorder(), 1, "optim_steps", weight_update_map={"policy": "frozen"})
    with pytest.raises(MisconfigurationException, match=r"a parameter of \['frozen'\]; use interval_unit='batches'"):
        fit(module, Rows(2), callback)


class Validated(Learner):
    def validation_step(self, batch, batch_idx):
        pass


class Unhooked:
    """All that Lightning wants of an optimizer, without hooks."""

    def __init__(self, parameters):
        self._sgd = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups, self.defaults, self.state = self._sgd.param_groups, self._sgd.defaults, self._sgd.state
        self.step, self.zero_grad = self._sgd.step, self._sgd.zero_grad
        self.state_dict, self.load_state_dict = self._sgd.state_dict, self._sgd.load_state_dict


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize(
    ("source", "optimizer", "error", "text"),
    [
        ("frozen", torch.optim.SGD, MisconfigurationException, r"no optimizer of Validated owns a parameter of"),
        ("actor", Unhooked, TypeError, "the steps of Unhooked cannot be counted"),
    ],
)
def test_steps_that_cannot_be_counted_are_found_before_workers_are_connected(
    source, optimizer, error, text, validated, no_leftovers
):
    module, group, connected = Validated(), make_group(0), []
    module.frozen = Policy(3)
    module.configure_optimizers = lambda: optimizer(module.actor.parameters())
    group.connect = connected.append
    trainer = make_trainer(make_callback(group, 1, "optim_steps", weight_update_map={"policy": source}))
    with pytest.raises(error, match=text):
        trainer.fit(module, group, Rows(1) if validated else None)
    assert not connected and not group.running


@pytest.mark.parametrize("validated", [False, True])
def test_a_group_without_a_length_is_refused_before_any_worker_starts(validated, no_leftovers):
    """Lightning prefetches from a loader without a length: batch k + 1 would be collected before batch k is learned."""
    group = make_group(0, length=None)
    trainer = make_trainer(make_callback(group))
    with pytest.raises(MisconfigurationException, match="give the CollectorGroup batches_per_epoch"):
        trainer.fit(Validated(), group, Rows(1) if validated else None)
    assert group.stats() == {}, "workers were started"


@pytest.mark.parametrize("validated", [False, True])
def test_a_group_without_a_length_is_refused_where_the_module_makes_the_loader(validated, no_leftovers):
    """Lightning asks for that loader when workers have been started, and when it validates first, connected."""
    module, group = Validated(), make_group(0, length=None)
    module.train_dataloader = lambda: group
    trainer = make_trainer(make_callback(group))
    with pytest.raises(MisconfigurationException if validated else RuntimeError, match="batches_per_epoch"):
        trainer.fit(module, val_dataloaders=Rows(1) if validated else None)
    assert not group.running


def test_a_group_without_a_length_is_fine_where_the_trainer_limits_it(no_leftovers):
    group, module = make_group(0, length=None), Learner()
    audit, callback = audited(group, module)
    fit(module, group, audit, callback, limit_train_batches=3)
    assert len(audit.batches) == 3 and callback.num_pushes == 3


def test_a_group_without_a_callback_says_what_is_missing():
    with pytest.raises(RuntimeError, match=r"add UpdateWeights\(group, \.\.\.\)"):
        fit(Learner(), make_group(1))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "either a collector or a sender"),
        ({"collector": Recorder(), "sender": Recorder()}, ValueError, "either a collector or a sender"),
        ({"sender": Recorder()}, ValueError, r"Recorder cannot be pushed to: it has no method update_weights\(\)"),
        ({"collector": make_group(1)}, ValueError, r"give weight_update_map, for example \{'policy': 'actor'\}"),
        ({"collector": Recorder(), "update_weights_interval": 0}, ValueError, "at least 1"),
        ({"collector": Recorder(), "interval_unit": "batch"}, ValueError, "did you mean 'batches'"),
        ({"collector": Recorder(), "update_weights_interval": 0.5}, TypeError, "in batches is an int, got 0.5"),
        ({"collector": Recorder(), "interval_unit": "frames"}, ValueError, "Recorder, which is not iterable, has none"),
        ({"sender": Other(), "interval_unit": "frames"}, ValueError, "a sender has none: use 'batches', 'optim_steps'"),
        ({"collector": Recorder(), "blocking": False}, ValueError, "blocking=False needs a CollectorGroup"),
    ],
)
def test_wrong_arguments_of_the_callback_are_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        UpdateWeights(**arguments)


# --- faults ----------------------------------------------------------------------------------------------------------


class Clock(Callback):
    """When the first batch arrived: interpreters have started by then."""

    started = math.inf

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.started = min(self.started, time.monotonic())

    @property
    def seconds(self):
        return time.monotonic() - self.started


def test_an_error_in_a_workers_environment_ends_fit_with_its_traceback(no_leftovers):
    """Worker 1's first environment raises in its 4th step, in the second batch of 3."""
    group = make_group(2, partial(misbehaving_collector, fault=collectors.stumble, at=4, only=1))
    clock = Clock()
    with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) raised in phase 'collect': ArithmeticError") as caught:
        fit(Learner(), group, clock, make_callback(group))
    assert clock.seconds < 5
    assert list(caught.value.failed) == [1]
    assert "the dice rolled off the table" in str(caught.value)
    assert "in stumble" in caught.value.remote_traceback
    assert not no_leftovers()


def test_a_factory_that_raises_in_a_worker_ends_fit_with_its_traceback(no_leftovers):
    group = make_group(2, partial(misbehaving_factory, fault=collectors.stumble, only=1))
    with pytest.raises(WorkerError, match=r"worker 1 .*'build'.*the dice(.|\n)*in stumble") as caught:
        fit(Learner(), group, make_callback(group))
    assert list(caught.value.failed) == [1]
    assert not no_leftovers()


def test_a_worker_that_vanishes_in_the_middle_ends_fit_and_is_named(no_leftovers):
    group = make_group(2, partial(misbehaving_collector, fault=collectors.vanish, at=4, only=1), max_restarts=0)
    clock = Clock()
    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+\) ended: exit code 9") as caught:
        fit(Learner(), group, clock, make_callback(group))
    assert clock.seconds < 3
    assert list(caught.value.failed) == [1]
    assert not no_leftovers()


def test_a_worker_killed_while_the_trainer_learns_ends_fit_and_is_named(no_leftovers):
    """The other worker is in the middle of an endless step: nobody waits for it."""
    group = make_group(2, partial(misbehaving_collector, fault=collectors.doze, at=4, only=0), max_restarts=0)
    killed = []

    class Kills(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            killed.append((group.stats()[1]["pid"], time.monotonic()))
            os.kill(killed[0][0], signal.SIGKILL)

    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+\) ended: killed by SIGKILL"):
        fit(Learner(), group, Kills(), make_callback(group, 100))  # no push: the next batch finds out
    assert time.monotonic() - killed[0][1] < 3
    assert not no_leftovers()


def test_models_that_differ_end_fit_and_are_named(no_leftovers):
    group = make_group(1, partial(gym_collector, policy=partial(Policy, width=5)))
    told = r"body\.weight: sender float32\[4, 3\], receiver float32\[5, 3\]"
    with pytest.raises(LayoutMismatchError, match=told) as caught:
        fit(Learner(), group, make_callback(group))
    assert "body.weight" in caught.value.mismatched and list(caught.value.failed) == [0]
    assert not no_leftovers()


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_batch_end", "on_train_end"])
def test_an_error_in_another_callback_stops_the_workers(hook, no_leftovers):
    group = make_group(1 if hook == "setup" else 0)
    with pytest.raises(ArithmeticError, match=f"another callback's {hook}"):
        fit(Learner(), group, make_callback(group), Raises(hook))
    assert not group.running and not no_leftovers()


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_a_training_step_stops_the_workers(error, no_leftovers):
    def on_batch(batch):
        raise error

    group = make_group(0)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            fit(Learner(on_batch=on_batch), group, make_callback(group))
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning ignores further ones
    assert not group.running


def test_a_failing_shutdown_does_not_hide_what_went_wrong(monkeypatch, caplog):
    group, others = make_group(0), []

    class Later(Callback):
        def on_train_start(self, trainer, pl_module):
            monkeypatch.setattr(group, "shutdown", broken)

        def on_exception(self, trainer, pl_module, exception):
            others.append(exception)

    def broken(*args):
        raise OSError("cannot stop")

    with pytest.raises(ArithmeticError):
        fit(Learner(), group, make_callback(group), Later(), Raises("on_train_batch_start"))
    assert len(others) == 1
    assert "stopping the collectors failed" in caplog.text
    monkeypatch.undo()
    group.shutdown()


def test_a_callback_can_be_pickled_before_its_fit():
    callback = pickle.loads(pickle.dumps(make_callback(make_group(0), 2, "optim_steps")))
    fit(module := ManualLearner(), callback.collector, callback)
    assert callback.num_pushes == 6 and int(module.actor.norm.num_batches_tracked) == 12


def test_after_a_learning_rate_search_the_first_batch_is_made_by_the_restored_weights(shared, tmp_path):
    """Its trial runs without any callback, on a group that somebody has connected before."""

    class Searched(Learner):
        lr = 0.1

    module = Searched(seed=2)
    if not shared.connected:
        shared.update_policy_weights_(module.actor)
    initial = sha256(module.actor)
    audit, callback = audited(shared, module)
    search = LearningRateFinder(num_training_steps=3, early_stop_threshold=None, update_attr=False)
    fit(module, shared, search, audit, callback, default_root_dir=tmp_path)
    assert audit.pushes[0][1] == initial
    assert len(audit.batches) == 4


def test_trainer_is_bound_by_the_hooks_or_early():
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    assert make_callback(Recorder(), trainer=trainer).trainer is trainer


def test_what_the_module_steps_in_its_own_on_train_batch_end_is_pushed_at_the_end():
    class Late(ManualLearner):
        def training_step(self, batch, batch_idx):
            self.batch = batch

        def on_train_batch_end(self, outputs, batch, batch_idx):
            super().training_step(batch, batch_idx)

    group = make_group(0, length=2)
    module = Late()
    callback = make_callback(group, 1, "batches")
    audit = Audit(group, lambda: module.actor)
    make_trainer(audit, callback, max_epochs=1).fit(module, group)
    assert callback.num_pushes == 3  # after each batch, one step late, and once more
    assert audit.pushes[-1][1] == sha256(module.actor)
