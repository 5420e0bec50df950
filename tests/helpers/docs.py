"""What the pages' fragments of code take for granted: a module, a factory, a trainer, as little as possible of each.

A page imports it in a comment that readers do not see (see ``tests/integration/test_docs.py``).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import torch
from tensordict import TensorDictBase

from examples.cartpole_nets import Actor
from lightning_weightsync import CollectorGroup as WholeGroup
from lightning_weightsync import DistributedWeightSyncScheme, GymCollector
from tests.helpers.evaluated_ppo import EvaluatedPPO

_LITTLE = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "limit_train_batches": 1,
    "limit_val_batches": 2,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer_of_little(**options: Any) -> lightning.Trainer:
    """A trainer that is given what the page gives it, and does the least: one rank, one batch."""
    for of_many in ("devices", "strategy"):
        options.pop(of_many, None)
    return lightning.Trainer(**(options | _LITTLE))


def group_of_little(factory: Any, num_workers: int, **options: Any) -> WholeGroup:
    """A group whose collector is in this process."""
    return WholeGroup(factory, 0, **options)


class PPO(EvaluatedPPO):
    """The example's module, with the ``validation_step`` that the pages tell of."""

    def __init__(self) -> None:
        super().__init__(epochs=1)


pl = SimpleNamespace(
    Trainer=trainer_of_little,
    LightningModule=PPO,
    Callback=lightning.Callback,
    seed_everything=lightning.seed_everything,
)
CollectorGroup = group_of_little
factory = partial(GymCollector, "CartPole-v1", Actor, num_envs=8, frames_per_batch=64)


def new_schemes() -> dict[str, DistributedWeightSyncScheme]:
    """One scheme for the policy; a scheme serves one group."""
    return {"policy": DistributedWeightSyncScheme()}


def learn(actor: torch.nn.Module, batch: TensorDictBase) -> None:
    """Do nothing."""
