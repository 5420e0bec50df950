"""Two ranks train, each with workers of its own: ``python -m tests.helpers.ddp_script FOLDER OPTIONS`` (JSON).

Each rank writes what it saw to ``FOLDER/rank<k>.json``. See ``DEFAULTS``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.distributed import distributed_c10d
from torchmetrics import MeanMetric

from tests.helpers.collectors import Sluggish, stamped_collector
from tests.helpers.fit import ManualLearner, make_callback, make_group, make_trainer
from tests.helpers.holdings import tcp_listeners
from tests.helpers.policies import sha256

DEFAULTS: dict[str, Any] = {
    "strategy": "ddp",
    "num_workers": 1,  # of each rank
    "steps": 4,  # optimizer steps per batch
    "length": 10,
    "interval": 3,
    "unit": "optim_steps",
    "slow_rank": None,  # whose worker takes 3 s to apply version 2
    "running": False,  # whether the group is started by the script, before fit
}


class MeteredLearner(ManualLearner):
    """Logs a metric that is merged over the ranks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.actor = Sluggish(1)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.mean.update(float(self.global_rank + 1))
        self.log("mean", self.mean, on_step=False, on_epoch=True)


class Notes(Callback):
    """What one rank saw; placed before ``UpdateWeights``."""

    def __init__(self, folder: Path, group: Any, update: Any, slow_rank: int | None) -> None:
        self.folder, self.group, self.update, self.slow_rank = folder, group, update, slow_rank
        self.seen: dict[str, Any] = {"versions": [], "marks": [], "push_seconds": []}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.global_rank == self.slow_rank:
            self.group.collector = partial(stamped_collector, policy=partial(Sluggish, seconds=3.0, at=2))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen["groups_before"] = list(distributed_c10d._world.pg_names.values())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        original = self.update._push

        def timed() -> None:
            started = time.monotonic()
            original()
            self.seen["push_seconds"].append(time.monotonic() - started)

        self.update._push = timed

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen["versions"].append(batch["policy_version"].unique().tolist())
        self.seen["marks"] += batch["observation"][..., 2].unique().tolist()
        self.seen["distributed_variables"] = batch["variables"].any().item()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["mean"] = trainer.callback_metrics.get("mean", torch.tensor(-1.0)).item()


class Last(Callback):
    """Placed after ``UpdateWeights``: its last push has been made, and its workers are still there."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        group, seen = self.notes.group, self.notes.seen
        total = torch.tensor(float(trainer.global_rank + 1))
        torch.distributed.all_reduce(total)
        seen |= {
            "sum": total.item(),
            "groups_after": list(distributed_c10d._world.pg_names.values()),
            "world_size": torch.distributed.get_world_size(),
            "backend": torch.distributed.get_backend(),
            "mean": trainer.callback_metrics["mean"].item(),
            "trainer": sha256(pl_module.actor),
            "parameters": [parameter.flatten().tolist() for parameter in pl_module.actor.parameters()],
            "workers": sorted(group.digest().values()),
            "pids": [stat["pid"] for stat in group.stats().values()],
            "seeds": [group._seed_of(index) for index in range(group.num_workers)],
            "ports": sorted({address for address, _ in tcp_listeners(os.getpid())}),
            "num_pushes": self.notes.update.num_pushes,
            "rank": trainer.global_rank,
        }
        (self.notes.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def main(folder: Path, options: dict[str, Any]) -> None:
    group = make_group(options["num_workers"], stamped_collector, length=options["length"], seed=7)
    if options["running"]:
        group.start({"policy": Sluggish(1)})
    module = MeteredLearner(steps=options["steps"])
    update = make_callback(group, options["interval"], options["unit"])
    notes = Notes(folder, group, update, options["slow_rank"])
    trainer = make_trainer(notes, update, Last(notes), devices=2, strategy=options["strategy"])
    trainer.fit(module, group)
    if options["running"]:
        group.shutdown()


if __name__ == "__main__":
    print(os.getpid(), flush=True)
    main(Path(sys.argv[1]), DEFAULTS | json.loads(sys.argv[2]))
