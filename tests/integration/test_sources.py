"""What is pushed: sources under other names, methods that make weights, what has been put in a source's place."""

import os
import pickle
import signal

import pytest
import torch
from lightning.pytorch import Callback
from tensordict import TensorDict
from torch import nn

from lightning_weightsync import LayoutMismatchError, Renamed, UpdateWeights
from lightning_weightsync.paths import PathError
from lightning_weightsync.sources import Sources
from tests.helpers.fit import Learner, ManualLearner, Recorder, Rows, fit, make_callback, make_group, make_trainer
from tests.helpers.policies import Policy, sha256
from tests.helpers.processes import wait_until


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank, as LoRA's wrappers have it: the layer itself is frozen."""

    def __init__(self, layer, rank=1):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / 4)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, rows):
        return self.base_layer(rows) + rows @ self.lora_a.T @ self.lora_b.T

    def merged(self):
        """The wrapper's own names; its weights as one layer."""
        weight = self.base_layer.weight + self.lora_b @ self.lora_a
        return {"base_layer.weight": weight.detach(), "base_layer.bias": self.base_layer.bias.detach()}


class AdaptedLearner(ManualLearner):
    """The worker has plain layers; the trainer's head is wrapped."""

    def __init__(self):
        super().__init__(2, seed=6)
        self.actor.head = Adapted(self.actor.head)

    def merged(self):
        rest = {name: leaf for name, leaf in self.actor.state_dict().items() if not name.startswith("head.")}
        return rest | {f"head.{name}": leaf for name, leaf in self.actor.head.merged().items()}


@pytest.fixture(scope="module")
def worker():
    """One worker process, whose policy is a plain one."""
    with make_group(1, seed=3) as group:
        yield group


def actions_of(group, module):
    """Logits that the worker's policy would have: a plain policy with what the worker holds."""
    plain = Policy()
    plain.load_state_dict(Renamed(module.merged(), {"head.base_layer": "head"}).leaves(module.merged()))
    assert group.digest() == {0: sha256(plain)}
    return plain


def test_names_that_no_receiver_knows_are_told_on_both_sides():
    group = make_group(0)
    with pytest.raises(LayoutMismatchError) as caught:
        fit(AdaptedLearner(), group, make_callback(group))
    assert caught.value.missing == ["head.weight", "head.bias"]
    unknown = {"head.base_layer.weight", "head.base_layer.bias", "head.lora_a", "head.lora_b"}
    assert set(caught.value.unexpected) == unknown
    assert all(name in str(caught.value) for name in unknown)


def test_an_adapted_layer_is_merged_and_renamed_for_workers_that_have_plain_ones(worker):
    module, checks = AdaptedLearner(), []
    rows = torch.randn(5, 3) * 2**20

    class Compares(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            plain = actions_of(worker, module)
            torch.testing.assert_close(plain.eval().logits(rows), module.actor.eval().logits(rows))
            module.actor.train()
            checks.append(module.actor.head.lora_b.abs().sum().item())

    callback = make_callback(
        worker, 1, "optim_steps", weight_update_map=["policy=merged"], name_map={"policy": {"head.base_layer": "head"}}
    )
    fit(module, worker, callback, Compares())
    assert len(set(checks)) == 4 and callback.num_pushes == 8  # nothing is known to be mapped: every step counts
    assert "renamed ['policy']" in repr(callback)


class Wrapped(nn.Module):
    """Has buffers that do not travel and extra state, beneath a name that the worker does not know."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def logits(self, observation):
        return self.inner.logits(observation)


@pytest.mark.parametrize("names", [{"inner": ""}, lambda name: name.removeprefix("inner.")])
def test_a_wrapped_module_is_renamed_and_read_anew_for_each_push(names, worker):
    module = Learner(seed=8)
    module.actor = Wrapped(module.actor)
    callback = make_callback(worker, name_map={"policy": names})
    fit(module, worker, callback)
    assert worker.digest() == {0: sha256(module.actor.inner)}
    assert callback.num_pushes >= 4


def test_what_is_put_in_the_place_of_a_source_is_what_travels(worker):
    class Replaces(Learner):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.actor = Policy(99)

    module = Replaces(seed=1)
    fit(module, worker, make_callback(worker))
    assert worker.digest() == {0: sha256(module.actor)}
    fresh = Policy(99)
    fresh.load_state_dict(module.actor.state_dict())
    assert torch.equal(fresh.body.weight, Policy(99).body.weight), "nobody optimizes the new one"


def test_a_property_is_read_at_each_push():
    class Averaged(Learner):
        total = None

        @property
        def average(self):
            return {name: leaf.detach() / 2 for name, leaf in self.actor.named_parameters()}

    class Takes(Recorder):
        def update_policy_weights_(self, *, weights_dict):
            self.pushed.append(weights_dict["policy"].clone())

    module, recorder = Averaged(), Takes()
    fit(module, Rows(3), make_callback(recorder, weight_update_map={"policy": "average"}))
    assert len(recorder.pushed) == 4
    assert torch.equal(recorder.pushed[-1]["head", "weight"], module.actor.head.weight / 2)
    assert not torch.equal(recorder.pushed[0]["head", "weight"], recorder.pushed[-1]["head", "weight"])


class Targeted(Learner):
    """``target`` is a frozen copy of the actor, copied by hand every five steps."""

    def __init__(self, on_copy=lambda: None):
        super().__init__(seed=5)
        self.target = Policy(50).requires_grad_(False)
        self.on_copy = on_copy

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.trainer.fit_loop.total_batch_idx + 1) % 5 == 0:
            self.target.load_state_dict(self.actor.state_dict())
            self.on_copy()

    def configure_optimizers(self):
        return torch.optim.SGD(self.actor.parameters(), lr=0.1)


@pytest.mark.parametrize("unit", ["batches", "seconds"])
def test_a_frozen_copy_is_followed(unit, worker):
    module = Targeted()
    held = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            held.append(worker.digest() == {0: sha256(module.target)})

    callback = make_callback(worker, 1 if unit == "batches" else 1e-6, unit, weight_update_map={"policy": "target"})
    fit(module, worker, Looks(), callback, limit_train_batches=4, max_epochs=4)
    # Lightning calls a callback before the module: what is copied at the end of a batch travels with the next push.
    assert held == [batch % 5 != 0 or batch == 0 for batch in range(16)]
    assert worker.digest() == {0: sha256(module.target)}


def test_a_replacement_has_all_leaves_of_a_frozen_copy_before_its_first_batch(worker):
    """Killed in the middle; its replacement gets what was pushed last, frozen leaves too."""
    module, pids, made_by = Targeted(), [], []
    restarts = worker.restarts

    class Kills(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            pids.append(worker.stats()[0]["pid"])
            made_by.append(batch["fingerprint"].unique().tolist())
            if len(pids) == 6:
                os.kill(pids[-1], signal.SIGKILL)
                assert wait_until(lambda: worker.restarts == restarts + 1, 30)

    fit(module, worker, Kills(), make_callback(worker, weight_update_map={"policy": "target"}), max_epochs=2)
    assert pids[5] != pids[6] == pids[7] and all(len(values) == 1 for values in made_by)
    first, later = made_by[0], made_by[7]
    assert made_by == [first] * 6 + [later] * 2 and first != later
    assert worker.digest() == {0: sha256(module.target)}


# --- maps that are wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name_map": {"value": {}}}, ValueError, r"name_map is for 'value', and weight_update_map has \['policy'\]"),
        ({"name_map": {"policy": "head"}}, TypeError, "a mapping or a function from name to name, not str"),
        ({"name_map": {"policy": {"head": 3}}}, TypeError, r"got \('head', 3\)"),
        ({"weight_update_map": "policy=actor"}, TypeError, "a list of 'destination=source' lines"),
        ({"weight_update_map": ["policy"]}, PathError, "write 'destination=source'"),
        ({"weight_update_map": ["policy=actor", "policy=target"]}, PathError, "given twice: 'actor' and 'target'"),
        ({"weight_update_map": {"policy": "actor["}}, PathError, "malformed"),
        ({"weight_update_map": {"policy": 3}}, TypeError, r"a path is a string, got 3 \(int\)"),
    ],
)
def test_a_wrong_map_is_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        make_callback(Recorder(), **arguments)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"hed": ""}, "no leaf begins with 'hed'; did you mean 'head"),
        ({"head.weight": "head.bias"}, "not the only leaf that gets the name 'head.bias'"),
        ({"": None}, "none of the .* leaves is left"),
    ],
)
def test_a_name_map_that_does_not_fit_the_source_ends_fit_before_the_first_batch(names, text):
    group = make_group(0)
    with pytest.raises(ValueError, match=text):
        fit(Learner(), group, make_callback(group, name_map={"policy": names}))
    assert not group.running


def test_a_path_that_stops_to_lead_anywhere_ends_fit():
    class Loses(Learner):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                self.aktor = self.actor
                del self.actor

        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(PathError, match="no attribute 'actor'; did you mean 'aktor'"):
        fit(Loses(), Rows(3), make_callback(Recorder()))


# --- copies of a callback ---------------------------------------------------------------------------------------------


class Pickles(Callback):
    """Pickles a callback in the middle of its fit."""

    def __init__(self, callback):
        self.callback = callback
        self.pickled = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.pickled = pickle.dumps(self.callback)


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pickled_callback_goes_on_after_the_counts_of_the_original(when, num_workers):
    group = make_group(num_workers, seed=7)
    callback = make_callback(group, 2, "optim_steps", name_map={"policy": {"inner": ""}})
    module, pickles = Learner(seed=1), Pickles(callback)
    module.actor = Wrapped(module.actor)
    pickled = pickle.dumps(callback)
    if when != "before":
        fit(module, group, callback, pickles)
        assert callback.num_pushes == 2
        pickled = pickles.pickled if when == "during" else pickle.dumps(callback)
    copied = pickle.loads(pickled)
    count, left = {"before": (0, 0), "during": (1, 1), "after": (2, 0)}[when]
    assert copied.trainer is None and not copied.collector.running and copied.collector is not group
    assert (copied.num_pushes, copied.version, copied._cadence.pending) == (count, count, left)
    assert copied.state_key == callback.state_key and copied.blocking is callback.blocking
    assert repr(copied).replace(f"version={count}", "") == repr(callback).replace(
        f"version={callback.version}", ""
    ).replace("stopped", "new" if when != "after" else "stopped")
    fit(module, copied.collector, copied)
    assert copied.num_pushes == copied.version == count + (4 + left + 1) // 2
    assert copied.collector.run == {"before": 1, "during": 2, "after": 2}[when]
    assert callback.num_pushes == (0 if when == "before" else 2), "the copy counts for the original"


def test_a_callback_that_is_pickled_while_pushes_are_under_way_takes_none_with_it(worker):
    callback = make_callback(worker, 1, "optim_steps", blocking=False)
    pickles = Pickles(callback)
    fit(ManualLearner(2), worker, callback, pickles)
    assert pickle.loads(pickles.pickled).collector.num_workers == 1


def test_repr_tells_the_configuration():
    group = make_group(2)
    text = repr(make_callback(group, 5, "frames", blocking=False))
    parts = "CollectorGroup(num_workers=2", "{'policy': 'actor'}", "every 5 frames", "blocking=False", "version=0"
    assert all(part in text for part in parts), text
    assert repr(UpdateWeights(Recorder(), 2)) == "UpdateWeights(Recorder, its own weights, every 2 batches, version=0)"

    def weights():
        pass

    assert "Recorder, weights(), every" in repr(UpdateWeights(Recorder(), policy_weights_getter=weights))


def test_a_callback_is_registered_under_a_name():
    trainer, callback = make_trainer(), make_callback(Recorder())
    assert callback.state_key == "UpdateWeights[update_weights: policy]"
    callback.register(trainer, "actors")
    assert trainer.callbacks[-1] is callback and callback.trainer is trainer
    assert callback.state_key == "UpdateWeights[actors: policy]" == pickle.loads(pickle.dumps(callback)).state_key


def test_weights_under_other_names_can_be_pushed_without_lightning(worker):
    plain = Policy(31)
    wrapped = Wrapped(plain)
    worker.update_policy_weights_(Renamed(wrapped, {"inner": ""}))
    assert worker.digest() == {0: sha256(plain)}
    td = TensorDict({"inner": {name: leaf.clone() for name, leaf in Policy(32).state_dict().items()}}, [])
    worker.update_policy_weights_(Renamed(td, {"inner": ""}))
    assert worker.digest() == {0: sha256(Policy(32))}


def test_paths_that_cannot_be_followed_yet_say_what_comes_first():
    sources = Sources({"policy": "actor"}, None)
    for read in (sources.resolve, sources.weights, sources.parameters):
        with pytest.raises(RuntimeError, match=r"bind\(\) comes first"):
            read()
