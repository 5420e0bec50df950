"""What configurations in tests name: a module that writes down what it saw, and collectors that show their weights."""

import json
import threading
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import ConfigKeyError
from tensordict import TensorDict
from torch import nn


class Constants(nn.Module):
    """One number, which is its whole output."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))


class Shown:
    """A collector with three models, at ``policy``, ``nets[0]`` and ``nets[1]``; its batches hold their numbers."""

    def __init__(self, *, worker_idx, seed):
        self.policy = Constants()
        self.nets = nn.ModuleList([Constants(), Constants()])
        self.random = torch.Generator().manual_seed(seed)

    def __iter__(self):
        while True:
            models = (self.policy, *self.nets)
            row = {f"model{i}": model.value.detach().expand(4).clone() for i, model in enumerate(models)}
            yield TensorDict({**row, "observation": torch.rand(4, generator=self.random)}, [4])

    def close(self):
        pass


class Probe(pl.LightningModule):
    """Learns a number per batch, and writes ``probe.json`` with what it was given."""

    def __init__(self, actor=1.0, critic=2.0, other=3.0):
        super().__init__()
        self.actor, self.critic = Constants(actor), Constants(critic)
        self.other = Constants(other)
        self.seen = []

    def training_step(self, batch, batch_idx):
        versions = self.trainer.train_dataloader.version - batch["policy_version"]
        self.seen.append(
            {
                "models": [batch[f"model{i}"].unique().tolist() for i in range(3)],
                "observation": batch["observation"].tolist(),
                "workers": batch["worker_idx"].unique().tolist(),
                "age": int(versions.max()),
                "version": self.trainer.train_dataloader.version,
            }
        )
        unused = self.critic.value.sum() + self.other.value.sum()  # of which DDP asks a gradient
        return self.actor.value.sum() + 0 * unused

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        group = self.trainer.train_dataloader
        facts = {
            "batches": self.seen,
            "pids": [stats["pid"] for stats in group.stats().values()],
            "shared": {name: s.shared_transport is not None for name, s in group.weight_sync_schemes.items()},
        }
        Path(self.trainer.default_root_dir, "probe.json").write_text(json.dumps(facts))


def shown_factory():
    """A node's way to name a class as the factory."""
    return Shown


def unpicklable_factory():
    """A factory that holds a lock."""
    lock = threading.Lock()

    def factory(*, worker_idx, seed):
        with lock:
            return Shown(worker_idx=worker_idx, seed=seed)

    return factory


def broken_factory():
    """A factory whose collector cannot be made."""

    def factory(*, worker_idx, seed):
        raise RuntimeError("no simulator on port 4711")

    return factory


class FailsInTraining(Probe):
    """An error in a run, of a kind that composing raises too."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise ConfigKeyError("my own error")
        return super().training_step(batch, batch_idx)


class Adapted(Probe):
    """What goes to ``policy`` is made by a method, or has another name for its leaf."""

    def __init__(self):
        super().__init__()
        self.wrapped = nn.ModuleDict({"base_layer": Constants(5.0), "adapter": Constants(6.0)})

    def merged(self):
        return {"value": self.actor.value + self.other.value}

    def of_the_run(self):
        return {"value": self.actor.value * self.trainer.world_size}


class BuiltLater(Probe):
    """Has a ``setup`` for reasons of its own."""

    def setup(self, stage):
        self.late = Constants(7.0)


class Misconfigured(Probe):
    """Finds something wrong at the beginning, or when it has learned from a batch."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_start(self):
        self.complain(0)

    def on_train_batch_end(self, *args):
        self.complain(1)

    def complain(self, now):
        if now == self.at:
            raise MisconfigurationException("found late")


class Helpful(pl.LightningModule):
    """Its constructor says what to do about a missing file."""

    def __init__(self, sort="error"):
        super().__init__()
        if sort == "nested":
            raise ValueError("no data: run make data") from FileNotFoundError("data.npz")
        raise ValueError("no traceback of its own") from ArithmeticError()


class Raises(pl.LightningModule):
    """Its constructor has a mistake of its user's."""

    def __init__(self):
        super().__init__()
        self.size = "4" + 1


class RankProbe(Probe):
    """Writes a file for each rank."""

    def on_train_end(self):
        path = Path(self.trainer.default_root_dir, f"probe{self.trainer.global_rank}.json")
        path.write_text(json.dumps(self.seen))
