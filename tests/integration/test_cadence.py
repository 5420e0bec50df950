"""However a module steps: every real step is counted once, and its very weights are pushed; nothing else changes.

The rows of ``STEPPING`` are those of the table in docs/cadence.md.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from tests.helpers.fit import Learner, ManualLearner, Recorder, Rows, fit, make_callback, make_group
from tests.helpers.policies import Policy, sha256

INTERVALS = (1, 2, 3)


class Pair(nn.Module):
    """Two numbers, each of an optimizer of its own where there are two."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))

    def now(self):
        return self.a.item(), self.b.item()


class Stepping(Learner):
    """Steps of SGD with lr=1 add 1, exactly. Writes down by itself, without any hook, what each step has made.

    Attributes:
        made: The weights after each step that was not skipped.
        ended: The weights at the end of each batch.
    """

    skipped = ()

    def __init__(self):
        super().__init__()
        self.actor = Pair()
        self.made, self.ended = [], []

    def loss(self, batch_idx):
        factor = float("inf") if batch_idx in self.skipped else 1.0
        return -(self.actor.a + self.actor.b) * factor

    def training_step(self, batch, batch_idx):
        return self.loss(batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if batch_idx not in self.skipped:
            self.made.append(self.actor.now())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append(self.actor.now())

    def configure_optimizers(self):
        return torch.optim.SGD(self.actor.parameters(), lr=1.0)


class Nothing(Stepping):
    def training_step(self, batch, batch_idx):
        return None if batch_idx in (1, 4, 5) else self.loss(batch_idx)


class Curved(Stepping):
    def loss(self, batch_idx):
        return (self.actor.a - 1) ** 4 + (self.actor.b - 2) ** 4

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.actor.parameters(), lr=0.1, max_iter=4)


class Scaled(Stepping):
    skipped = (2, 3, 6, 9)


class EverySecond(Stepping):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class CallsSuper(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Double(Stepping):
    def configure_optimizers(self):
        super().configure_optimizers()  # torch patches SGD.step when the first SGD is made
        return CallsSuper(self.actor.parameters(), lr=1.0)


class Manual(Stepping):
    """Two optimizers. ``order(batch_idx)`` says which of them step in that batch, one after the other."""

    def __init__(self, order, skipped=lambda batch_idx, which: False, raw=False):
        super().__init__()
        self.automatic_optimization = False
        self.order, self.skips, self.raw = order, skipped, raw

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for which in self.order(batch_idx):
            optimizer = optimizers[which].optimizer if self.raw else optimizers[which]
            skipped = self.skips(batch_idx, which)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch_idx) * (float("inf") if skipped else 1.0))
            optimizer.step()
            if not skipped:
                self.made.append(self.actor.now())

    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=1.0) for p in (self.actor.a, self.actor.b)]


class ManualOne(Manual):
    configure_optimizers = Stepping.configure_optimizers


class ManualCurved(Curved):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer = self.optimizers()
        optimizer.step(closure)
        self.made.append(self.actor.now())

    optimizer_step = Learner.optimizer_step


def scaler():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


STEPPING = {
    # name: (module, options of the trainer, batches, steps that are counted, batches that change the weights)
    "automatic": (Stepping, dict, 10, 10, 10),
    "automatic, accumulate 4": (Stepping, lambda: {"accumulate_grad_batches": 4}, 10, 3, 3),
    "automatic, returns None three times": (Nothing, dict, 10, 10, 7),
    "automatic, LBFGS": (Curved, dict, 10, 10, 10),
    "automatic, four steps skipped by the scaler": (Scaled, scaler, 10, 6, 6),
    "automatic, optimizer_step steps every second time": (EverySecond, dict, 10, 5, 5),
    "automatic, accumulate 2, max_steps=3": (Stepping, lambda: {"accumulate_grad_batches": 2, "max_steps": 3}, 6, 3, 3),
    "automatic, a subclass that calls super().step()": (Double, dict, 10, 10, 10),
    "manual, two optimizers": (lambda: Manual(lambda i: (0, 1)), dict, 10, 20, 10),
    "manual, three steps per batch": (lambda: ManualOne(lambda i: (0, 0, 0)), dict, 10, 30, 10),
    "manual, one twice, the other every second batch": (
        lambda: Manual(lambda i: (1, 1) if i % 2 else (1, 0, 1)),
        dict,
        10,
        25,
        10,
    ),
    "manual, LBFGS": (ManualCurved, dict, 10, 10, 10),
    "manual, 7 of 20 steps skipped by the scaler": (
        lambda: Manual(lambda i: (0, 1), skipped=lambda i, which: i in (1, 4, 8) or (i == 6 and which == 0)),
        scaler,
        10,
        13,
        7,
    ),
    "manual, raw optimizers": (lambda: Manual(lambda i: (0, 1), raw=True), dict, 10, 20, 10),
}


class Ordered(Recorder):
    """Also tells how many steps the module itself knew of at each push."""

    def __init__(self, module):
        super().__init__(module.actor)
        self.module, self.known = module, []

    def update_policy_weights_(self, *args, **kwargs):
        super().update_policy_weights_(*args, **kwargs)
        self.known.append(len(self.module.made))


def pushes(name, unit, interval):
    make_module, options, *_ = STEPPING[name]
    module = make_module()
    recorder = Ordered(module)
    callback = make_callback(recorder, interval, unit)
    fit(module, Rows(10), callback, **options())
    first, *pushed = [(weights["a"].item(), weights["b"].item()) for weights in recorder.pushed]
    assert first == (0.0, 0.0) and callback.num_pushes == len(pushed) == callback.version
    return module, pushed, recorder.known[1:]


@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", STEPPING)
def test_every_real_step_is_counted_and_its_very_weights_are_pushed(name, interval):
    *_, steps, changed = STEPPING[name]
    module, pushed, known = pushes(name, "optim_steps", interval)
    assert len(module.made) == steps
    left_over = [module.made[-1]] if steps % interval else []
    assert pushed == module.made[interval - 1 :: interval] + left_over
    inside = steps // interval
    assert known[:inside] == [interval * (k + 1) - 1 for k in range(inside)], "a push did not come within its step"
    batches = [(0.0, 0.0), *module.ended]
    assert sum(before != after for before, after in itertools.pairwise(batches)) == changed


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", STEPPING)
def test_every_batch_is_counted_however_often_the_module_steps_in_it(name, interval):
    _, _, batches, _, _ = STEPPING[name]
    module, pushed, _ = pushes(name, "batches", interval)
    assert len(module.ended) == batches
    assert pushed == module.ended[interval - 1 :: interval] + ([module.ended[-1]] if batches % interval else [])


# --- a push changes nothing but the workers ---------------------------------------------------------------------------


class Noisy(Learner):
    """Draws random numbers in each batch, by dropout; keeps its losses."""

    def __init__(self, kind):
        super().__init__(seed=4)
        self.kind, self.losses = kind, []

    def loss(self, batch):
        rows = nn.functional.dropout(batch["observation"], 0.3)
        loss = (self.actor.logits(rows) - 1.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return self.kind(self.actor.parameters(), lr=0.05)


def same(one, other):
    """Bit for bit."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def curve(kind, precision, callbacks):
    """Everything that 50 steps leave behind."""
    torch.manual_seed(11)
    module = Noisy(kind)
    trainer = fit(module, Rows(50), *callbacks, precision=precision)
    leaves = [leaf.clone() for leaf in module.state_dict().values()]
    (optimizer,) = trainer.optimizers
    states = [value for state in optimizer.state.values() for value in state.values()]
    return module, (module.losses, leaves, states, torch.get_rng_state())


@pytest.fixture(scope="module")
def worker():
    """One worker process that is started here, for many fits."""
    with make_group(1, seed=3) as group:
        yield group


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fifty_steps_are_bit_equal_with_and_without_the_callback(kind, precision, worker):
    """Pushed after every step, waited for or not, to a worker process and to a collector in this process."""
    _, wanted = curve(kind, precision, [])
    for group, blocking in ((worker, True), (worker, False), (make_group(0), True)):
        callback = make_callback(group, 1, "optim_steps", blocking=blocking)
        module, seen = curve(kind, precision, [callback])
        assert callback.num_pushes >= 50
        assert same(seen, wanted)
        assert len(seen[0]) == 50 and len(set(seen[0])) > 40
    assert worker.connected and module.actor.body.weight.dtype is torch.float32


class Watched(ManualLearner):
    """Steps Adam three times per batch; draws with every generator that there is."""

    def training_step(self, batch, batch_idx):
        torch.rand(()), np.random.rand(), random.random()
        super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters(), lr=0.05)


def around(module):
    """What a push from a step hook could change in the trainer's process."""
    (optimizer,) = module.trainer.optimizers
    return {
        "gradients": [parameter.grad.clone() for parameter in module.actor.parameters()],
        "weights": [leaf.clone() for leaf in module.state_dict().values()],
        "identities": [id(parameter) for parameter in module.actor.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in module.actor.parameters()],
        "versions": [parameter._version for parameter in module.actor.parameters()],
        "optimizer": [v.clone() for state in optimizer.state.values() for v in state.values()],
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(np.random.get_state()[1].astype(np.int64)),
        "random": hash(random.getstate()),
        "autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "training": [part.training for part in module.modules()],
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_push_out_of_a_step_changes_nothing_in_the_trainer(precision, blocking, worker, monkeypatch):
    module, looks = Watched(seed=2), []
    push = "update_policy_weights_" if blocking else "send_async"
    original = getattr(worker, push)

    def watched(*args, **kwargs):
        if not module.trainer.optimizers[0].state:
            return original(*args, **kwargs)  # the first one, before any step
        before = around(module)
        result = original(*args, **kwargs)
        after = around(module)
        assert [what for what in before if not same(before[what], after[what])] == []
        looks.append(before["autocast"])
        return result

    monkeypatch.setattr(worker, push, watched)
    fit(module, Rows(4), make_callback(worker, 1, "optim_steps", blocking=blocking), precision=precision)
    assert len(looks) == 12
    assert {enabled for enabled, _ in looks} == {precision == "bf16-mixed"}, "pushes came from elsewhere"
    assert worker.digest() == {0: sha256(module.actor)}, "autocast reached the weights that were sent"


# --- every combination of options -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ahead():
    with make_group(2, sync=False, seed=5) as group:
        group.update_policy_weights_(Policy(9))
        yield group


@pytest.mark.filterwarnings("ignore:.*is longer than:UserWarning")
@pytest.mark.parametrize("unit", ["batches", "optim_steps", "frames", "seconds"])
@pytest.mark.parametrize("workers", [2, 1])
def test_after_six_steps_every_worker_has_moved_whatever_the_options(workers, unit, ahead):
    """In groups that collect ahead; those that do not are in test_fit.py."""
    ahead.resize(workers)
    for interval in (1, 2, 100):
        for blocking in (True, False):
            module = ManualLearner(2, seed=interval)
            before = sha256(module.actor)
            callback = make_callback(ahead, interval, unit, blocking=blocking)
            fit(module, ahead, callback, limit_train_batches=3)
            after = sha256(module.actor)
            assert ahead.digest() == dict.fromkeys(range(workers), after) and after != before
            assert callback.num_pushes >= 1
