"""What does an installed callback cost that does not push? Microseconds per batch, and per optimizer step.

    python -m benchmarks.callback [--rounds 15] [--batches 400] [--json FILE] [--quick]

One sample is one fit of a model of six numbers, with a callback or without; all kinds of fits in turn, round after
round. What is counted is the processor time of the trainer's thread between the first batch and the last one, so that
others who keep the machine busy matter little. Every callback costs something in Lightning itself, which calls six
hooks of each in every batch, whether they do anything or not: that is the row "an empty callback". Figures are logged
as by default, every 50th batch.

A callback's cost per step is that of 16 steps in one batch, less that of one, by 15. Its cost per batch is that of a
batch of one step, less that of the step.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.engines import Sample
from benchmarks.measure import Comparison, interleave
from benchmarks.table import machine, table, verdict
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights

PER_BATCH, PER_STEP = 20.0, 10.0
MANY = 16
NEVER = 10**9
EMPTY = "an empty callback"


class Tiny(pl.LightningModule):
    """Takes so many optimizer steps in each batch, and hardly anything else."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.actor = nn.Linear(2, 2)
        self.x = torch.ones(1, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(self.steps):
            optimizer.zero_grad()
            self.manual_backward(self.actor(self.x).sum())
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches:
    """The same batch again and again, as a group would label it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.batch = TensorDict({"policy_version": torch.zeros(4, 8, dtype=torch.int64)}, [4, 8])

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[TensorDict]:
        return (self.batch for _ in range(self.count))


class Clock(pl.Callback):
    """Processor seconds of this thread between the ends of the first and the last batch."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.seconds = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.started = time.thread_time() if self.started is None else self.started

    def on_train_end(self, *args: Any) -> None:
        assert self.started is not None
        self.seconds = time.thread_time() - self.started


class Foreign:
    """Somebody else's collector."""

    def update_policy_weights_(self, **weights: Tensor) -> None:
        pass


class Stub:
    """A collector of a group, which nobody asks for a batch."""

    def __init__(self, *, worker_idx: int, seed: int) -> None:
        self.policy = nn.Linear(2, 2)

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(())

    def close(self) -> None:
        pass


def with_foreign(unit: str) -> UpdateWeights:
    """A callback that pushes to somebody else's collector, when its time has come: never."""
    return UpdateWeights(Foreign(), NEVER, weight_update_map={"policy": "actor"}, interval_unit=unit)  # type: ignore[arg-type]


def with_group() -> UpdateWeights:
    """The same with a group."""
    group = CollectorGroup(Stub, 0, weight_sync_schemes={"policy": DistributedWeightSyncScheme()})
    return UpdateWeights(group, NEVER, weight_update_map={"policy": "actor"})


KINDS: dict[str, Callable[[], list[pl.Callback]]] = {
    "none": list,
    EMPTY: lambda: [pl.Callback()],
    "batches": lambda: [with_foreign("batches")],
    "optim_steps": lambda: [with_foreign("optim_steps")],
    "batches, a group": lambda: [with_group()],
}


def sample(kind: str, steps: int, batches: int) -> Sample:
    """One fit; milliseconds for a thousand batches, which is microseconds per batch."""
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[clock, *KINDS[kind]()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(steps), Batches(batches))
    return {name(kind, steps): 1e6 * clock.seconds / batches}


def name(kind: str, steps: int) -> str:
    """Of a sample."""
    return f"{kind}, {steps} steps"


def paired(result: Comparison, kind: str, steps: int) -> float:
    """What a batch costs more than without any callback: the median over the rounds."""
    rows = zip(result.samples[name(kind, steps)], result.samples[name("none", steps)], strict=True)
    return statistics.median(own - without for own, without in rows)


def show(result: Comparison) -> list[str]:
    """The table, and how the figures stand to what is asked."""
    rows: list[list[object]] = [["none", result.median(name("none", 1)), None, None, None]]
    lines, dispatch = [], 0.0
    for kind in [kind for kind in KINDS if kind != "none"]:
        one, many = paired(result, kind, 1), paired(result, kind, MANY)
        per_step = (many - one) / (MANY - 1)
        per_batch = one - per_step
        rows.append([kind, result.median(name(kind, 1)), one, per_step, per_batch])
        if kind == EMPTY:
            dispatch = per_batch
            continue
        lines.append(
            f"{kind}: per batch {verdict(per_batch, PER_BATCH)}, {per_batch - dispatch:.1f} more than an empty one; "
            f"per step {verdict(per_step, PER_STEP)}"
        )
    return [table(["callback, µs", "a batch of one step", "more than none", "per step", "per batch"], rows), "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit code."""
    options = _options(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    print(f"{report['machine']}\n", flush=True)
    result = Comparison("callback", "tiny", 0, 2)
    actions = [partial(sample, kind, steps, options.batches) for steps in (1, MANY) for kind in KINDS]
    interleave(result, actions, options.rounds, [], warm_up=1)
    print("\n".join(show(result)))
    report["callback"] = result.as_json()
    report["load_at_end"] = machine()["load"]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callback", description="Measure the callback.")
    parser.add_argument("--rounds", type=int, default=15, help="fits of each kind")
    parser.add_argument("--batches", type=int, default=400, help="in a fit")
    parser.add_argument("--json", type=Path, default=None, help="write all samples to this file")
    parser.add_argument("--quick", action="store_true", help="3 fits of 100 batches")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.batches = 3, 100
    if options.rounds < 1 or options.batches < 1:
        parser.error("--rounds, --batches: at least 1")
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
