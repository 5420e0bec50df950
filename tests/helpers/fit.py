"""Small modules to fit, and what watches them. Imports Lightning: nothing that a worker needs may live here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights
from tests.helpers.collectors import gym_collector
from tests.helpers.policies import Policy, fingerprint, sha256


def make_group(num_workers: int = 1, collector: Any = gym_collector, *, length: int | None = 4, **kwargs: Any):
    kwargs.setdefault("weight_sync_schemes", {"policy": DistributedWeightSyncScheme()})
    return CollectorGroup(collector, num_workers, batches_per_epoch=length, **kwargs)


def make_callback(group: Any, interval: int = 1, unit: str = "batches", **kwargs: Any) -> UpdateWeights:
    kwargs.setdefault("weight_update_map", {"policy": "actor"})
    return UpdateWeights(group, interval, interval_unit=unit, **kwargs)


def make_trainer(*callbacks: pl.Callback, logs_to: Path | None = None, max_epochs: int = 1, **kwargs: Any):
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        logger=CSVLogger(logs_to, name="", version="") if logs_to is not None else False,
        log_every_n_steps=1,
        enable_model_summary=False,
        enable_progress_bar=False,
        **{"enable_checkpointing": False, "devices": 1, **kwargs},
    )


def fit(module: pl.LightningModule, loader: Any, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    """Fit with a new trainer and return it."""
    trainer = make_trainer(*callbacks, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        trainer.fit(module, loader)
    return trainer


class Learner(pl.LightningModule):
    """Trains ``actor`` a little on each batch; automatic optimization.

    Args:
        seed: Of the initial weights.
        on_batch: Called with each batch when it arrives, before anything is learned from it.
    """

    def __init__(self, seed: int = 0, on_batch: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.actor = Policy(seed)
        self.on_batch = on_batch or _nothing

    def loss(self, batch: Any) -> Tensor:
        return (self.actor.logits(batch["observation"]) - 1.0).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.on_batch(batch)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _nothing(batch: Any) -> None:
    pass


class ManualLearner(Learner):
    """Manual optimization, ``steps`` optimizer steps per batch."""

    def __init__(self, steps: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.on_batch(batch)
        for _ in range(self.steps):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class RivalsLearner(ManualLearner):
    """Two optimizers, each stepped once per batch: of the actor's body and of its head."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rival = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.on_batch(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) + self.rival(batch["observation"].reshape(-1, 3) / 2**24).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD([*self.actor.body.parameters(), *self.actor.norm.parameters()], lr=0.1)
        return first, torch.optim.SGD([*self.actor.head.parameters(), *self.rival.parameters()], lr=0.1)


class Audit(pl.Callback):
    """Checks a fit from outside of ``UpdateWeights``; place it before that callback.

    After every push (a group's connecting is one too) each worker's digest must be that of the source, bit for bit. Of
    every batch, each sample must be labelled with the newest push, and made by exactly the weights of that push.

    Attributes:
        pushes: (version, SHA-256 of the source) of every push, in order.
        batches: Those that arrived.
        made_by: version -> fingerprint of its weights.
    """

    def __init__(self, group: CollectorGroup, source: Callable[[], nn.Module], model_id: str = "policy") -> None:
        self.group = group
        self.source = source
        self.model_id = model_id
        self.pushes: list[tuple[int, str]] = []
        self.made_by: dict[int, Tensor] = {}
        self.batches: list[Any] = []
        self._originals = group.connect, group.update_policy_weights_
        group.connect = self._watched(group.connect)
        group.update_policy_weights_ = self._watched(group.update_policy_weights_)

    def _watched(self, original: Callable[..., None]) -> Callable[..., None]:
        def push(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            wanted = sha256(self.source())
            digests = self.group.digest(self.model_id)
            assert digests == dict.fromkeys(range(max(1, self.group.num_workers)), wanted)
            self.pushes.append((self.group.version, wanted))
            self.made_by[self.group.version] = fingerprint(self.source())

        return push

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        newest, _ = self.pushes[-1]
        assert (batch["policy_version"] == newest).all(), (batch["policy_version"], newest)
        assert (batch["fingerprint"] == self.made_by[newest]).all()
        self.batches.append(batch)

    def close(self) -> None:
        self.group.connect, self.group.update_policy_weights_ = self._originals


class Recorder:
    """A foreign collector: keeps a copy of whatever is pushed to it, and what the trainer held at that moment."""

    def __init__(self, source: nn.Module | None = None) -> None:
        self.source = source
        self.pushed: list[dict[str, Tensor]] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        if self.source is not None:
            self.pushed.append({name: leaf.detach().clone() for name, leaf in self.source.state_dict().items()})


class Rows:
    """A sized loader without any collector."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        for k in range(self.count):
            yield {"observation": torch.full((4, 3), float(k + 1)) * 2**20}
