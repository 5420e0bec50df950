"""Lightning's WeightAveraging beside UpdateWeights: trained weights are pushed, or averages, as is asked for."""

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging

from tests.helpers.fit import Learner, Rows, fit, make_callback, make_group, make_trainer
from tests.helpers.policies import sha256

AVERAGE = "callbacks[0]._average_model.module.actor"
"""Source path of the averages, where WeightAveraging is the trainer's first callback."""


class Validated(Learner):
    def __init__(self, seen):
        super().__init__(seed=3)
        self.seen = seen

    def validation_step(self, batch, batch_idx):
        self.seen.append(sha256(self.actor))


class Trained(Callback):
    """Remembers what was trained, and its average; placed before UpdateWeights."""

    def __init__(self, average):
        self.average = average
        self.weights, self.averages = [], []

    def _remember(self, trainer, pl_module):
        self.weights.append(sha256(pl_module.actor))
        self.averages.append(sha256(self.average._average_model.module.actor))

    on_sanity_check_start = _remember

    def on_train_batch_end(self, trainer, pl_module, *args):
        self._remember(trainer, pl_module)


def run(source, order, monkeypatch):
    """Fit, validated in the middle of each epoch and at its end; what was pushed, trained, averaged and validated."""
    average = WeightAveraging(avg_fn=lambda average, current, count: (average + current) / 2)
    group, pushed, validated = make_group(0), [], []
    trained, update = Trained(average), make_callback(group, weight_update_map={"policy": source})
    for name in ("connect", "update_policy_weights_"):
        original = getattr(group, name)

        def push(*args, original=original, **kwargs):
            original(*args, **kwargs)
            pushed.append(group.digest()[0])

        monkeypatch.setattr(group, name, push)
    callbacks = {"first": [average, trained, update], "last": [trained, update, average]}[order]
    trainer = make_trainer(*callbacks, max_epochs=2, val_check_interval=2)
    trainer.fit(Validated(validated), group, Rows(1))
    return pushed, trained, validated


@pytest.mark.parametrize("order", ["first", "last"])
def test_weights_that_are_swapped_in_for_validation_are_not_pushed(order, monkeypatch):
    pushed, trained, validated = run("actor", order, monkeypatch)
    assert pushed == trained.weights and len(set(pushed)) == 9
    assert len(validated) == 1 + 4
    assert not set(validated[1:]) & set(pushed), "validation was not on the average"


def test_the_average_is_a_source_like_any_other(monkeypatch):
    pushed, trained, validated = run(AVERAGE, "first", monkeypatch)
    assert pushed == trained.averages and len(set(pushed)) == 9
    assert not set(pushed[2:]) & set(trained.weights)  # the first average is of one
    assert validated[1:] == [pushed[2], pushed[4], pushed[6], pushed[8]]


def test_a_last_push_in_on_train_end_is_of_what_the_module_is_left_with(monkeypatch):
    """Where WeightAveraging comes first it has moved the average into the module by then."""
    average = WeightAveraging(avg_fn=lambda average, current, count: (average + current) / 2)
    group, last = make_group(0, length=3), []

    class Last(Callback):
        def on_train_end(self, trainer, pl_module):
            last.append((group.digest()[0], sha256(pl_module.actor)))

    fit(Learner(seed=3), group, average, make_callback(group, 2), Last())
    assert last[0][0] == last[0][1]
