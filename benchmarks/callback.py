"""What does an installed callback cost that does not push? Microseconds per batch, and per optimizer step.

    python -m benchmarks.callback [--rounds 60] [--batches 20] [--json FILE] [--quick]

One fit of a model of six numbers, in which the trainer has none of the callbacks or one of them, in turn, for some
batches each. What is counted is the processor time of the trainer's thread, so that others who keep the machine busy
matter little. Every callback costs something in Lightning itself, which calls six hooks of each in every batch, whether
they do anything or not: that is the row "an empty callback". Figures are logged as by default, every 50th batch.

A callback's cost per step is that of 16 steps in one batch, less that of one, by 15. Its cost per batch is that of a
batch of one step, less that of the step.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.measure import Comparison
from benchmarks.options import add_json, add_quick, at_least, fill_in, write
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


class Turns(pl.Callback):
    """A loader, which gives the callbacks their turns between two batches, and takes the time of each turn.

    Args:
        kinds: The callbacks; all of them are set up for the fit.
        rounds: Turns of each; the first one does not count.
        batches: In a turn. Always the same batch, labelled as a group would do it.
    """

    def __init__(self, kinds: dict[str, list[pl.Callback]], rounds: int, batches: int) -> None:
        self.kinds, self.rounds, self.batches = kinds, rounds, batches
        self.batch = TensorDict({"policy_version": torch.zeros(4, 8, dtype=torch.int64)}, [4, 8])
        self.micros: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.trainer: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return (self.rounds + 1) * len(self.kinds) * self.batches + 1  # one more: nothing is pulled after the last

    def __iter__(self) -> Iterator[TensorDict]:
        (optimizer,) = self.trainer.optimizers
        hooks = optimizer._optimizer_step_post_hooks
        everyone, all_hooks = list(self.trainer.callbacks), dict(hooks)
        others = [c for c in everyone if not any(c in mine for mine in self.kinds.values())]
        for turn in range(self.rounds + 1):
            for kind, mine in self.kinds.items():
                self.trainer.callbacks[:] = others + mine
                hooks.clear()
                for callback in mine:
                    handles = getattr(getattr(callback, "_steps", None), "_handles", ())
                    hooks.update({handle.id: all_hooks[handle.id] for handle in handles})
                started = time.thread_time()
                for _ in range(self.batches):
                    yield self.batch
                if turn:
                    self.micros[kind].append(1e6 * (time.thread_time() - started) / self.batches)
        self.trainer.callbacks[:] = everyone
        hooks.update(all_hooks)
        yield self.batch


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


def measure(result: Comparison, steps: int, rounds: int, batches: int) -> None:
    """One fit; the samples are microseconds per batch."""
    turns = Turns({kind: make() for kind, make in KINDS.items()}, rounds, batches)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for kind, mine in turns.kinds.items():
        for callback in mine:
            if isinstance(callback, UpdateWeights):
                callback.register(trainer, kind)
            else:
                trainer.callbacks.append(callback)  # type: ignore[attr-defined]
    trainer.fit(Tiny(steps), turns)
    result.samples |= {name(kind, steps): micros for kind, micros in turns.micros.items()}


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
    lines, empty, empty_step = [], 0.0, 0.0
    for kind in [kind for kind in KINDS if kind != "none"]:
        one, many = paired(result, kind, 1), paired(result, kind, MANY)
        per_step = (many - one) / (MANY - 1)
        per_batch = one - per_step
        rows.append([kind, result.median(name(kind, 1)), one, per_step, per_batch])
        if kind == EMPTY:
            empty, empty_step = per_batch, per_step
            continue
        lines.append(
            f"{kind}: per batch {verdict(per_batch, PER_BATCH)}, {per_batch - empty:.1f} more than an empty one; "
            f"per step {verdict(per_step, PER_STEP)}, {per_step - empty_step:.1f} more than an empty one"
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
    for steps in (1, MANY):
        measure(result, steps, options.rounds, options.batches)
    print("\n".join(show(result)))
    report["callback"] = result.as_json()
    report["load_at_end"] = machine()["load"]
    write(options.json, report)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callback", description="Measure the callback.")
    parser.add_argument("--rounds", type=at_least(1), help="turns of each callback (60)")
    parser.add_argument("--batches", type=at_least(1), help="in a turn (20)")
    add_json(parser)
    add_quick(parser, "10 turns of 10 batches")
    options = parser.parse_args(arguments)
    fill_in(options, quick={"rounds": 10, "batches": 10}, otherwise={"rounds": 60, "batches": 20})
    return options


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
