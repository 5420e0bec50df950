"""The table of docs/cadence.md: what a push does, and what a sample's version is, for each kind of group."""

import statistics
import time
from functools import partial

import pytest
from lightning.pytorch import Callback

from tests.helpers.collectors import NUM_ENVS, STEPS, paced_collector
from tests.helpers.fit import Learner, fit, make_callback, make_group
from tests.helpers.policies import sha256

STEP = 0.04
"""Seconds: of a step of all environments of the worker."""
BATCH = STEP * STEPS
LEARNING = 1.4 * STEP
"""Seconds that the trainer needs for a batch: a worker that collects ahead is in the middle of its next one then."""
MODES = {
    "sync": {"sync": True},
    "ahead, batch": {"sync": False, "update_at": "batch"},
    "ahead, step": {"sync": False, "update_at": "step"},
}


@pytest.fixture(scope="module")
def groups():
    """One worker each; all of them start at once."""
    made = {}
    for name, options in MODES.items():
        update_at = options.get("update_at", "batch")
        factory = partial(paced_collector, seconds=(STEP / NUM_ENVS,), update_at=update_at)
        made[name] = make_group(1, factory, length=8, sync=options["sync"], seed=3)
        made[name].launch()
    yield made
    for group in made.values():
        group.shutdown()


class Looks(Callback):
    """Placed behind ``UpdateWeights``: what its push at the end of the batch has done by then."""

    def __init__(self, group):
        self.group = group
        self.stalls, self.applied, self.batches, self.lags = [], [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["policy_version"].clone())
        self.lags.append(self.group.version - int(batch["policy_version"].max()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.stalls.append(float(trainer.callback_metrics["weight_sync/stall_ms"]) / 1e3)
        self.applied.append(self.group.stats()[0]["version"] == self.group.version)


TABLE = {
    # row: (group, blocking, whether a push is applied when it returns, whether it waits for a safe point)
    "sync=True": ("sync", None, True, False),
    "sync=True, blocking=False": ("sync", False, False, False),
    "sync=False, update_at='batch'": ("ahead, batch", None, False, False),
    "sync=False, update_at='step'": ("ahead, step", None, False, False),
    "sync=False, update_at='batch', blocking=True": ("ahead, batch", True, True, True),
}


@pytest.mark.parametrize("row", TABLE)
def test_the_sync_table(row, groups):
    name, blocking, at_once, waits = TABLE[row]
    group = groups[name]
    looks, module = Looks(group), Learner(seed=2, on_batch=lambda batch: time.sleep(LEARNING))
    callback = make_callback(group, blocking=blocking)
    fit(module, group, callback, looks)
    assert callback.num_pushes >= 8 and group.digest() == {0: sha256(module.actor)}

    if waits:  # for what is left of the worker's batch: less where the trainer itself is slow, on a busy machine
        assert 0.2 * BATCH < max(looks.stalls) < 2 * BATCH, "a push waits for the end of the worker's batch"
    else:
        assert statistics.median(looks.stalls) < 0.2 * BATCH
    assert all(looks.applied) or not at_once

    newest = [int(versions.max()) for versions in looks.batches]
    assert newest == sorted(newest)
    kinds = [len(versions.unique()) for versions in looks.batches]
    if name == "sync":
        # The newest push before the batch, exactly; without blocking, the newest that had arrived by then.
        assert set(looks.lags) <= ({0} if blocking is None else {0, 1}) and kinds == [1] * 8
    elif name == "ahead, batch":
        assert kinds == [1] * 8 and max(looks.lags) >= 1
    else:
        assert max(kinds) >= 2, "no worker switched within a batch"  # twice, where the trainer is quick
        for versions in looks.batches:
            assert bool((versions[:, 1:] >= versions[:, :-1]).all()) and bool((versions == versions[:1]).all())
