"""Does anything grow? Memory, descriptors and threads of trainer and workers over 10,000 batches, with a push for each.

    python -m benchmarks.soak [--batches 10000] [--workers 2] [--modes sync async fit] [--json FILE]

Batches are as cheap as they get (8 transitions of a toy environment), and all that can be is on: values with every
push, sums with every batch, a watch on the environments. ``sync``: each push is waited for. ``async``: workers collect
ahead, and nobody waits for a push. ``fit``: the same in a Lightning Trainer with the callback.

Forty times in a run it is looked at ``/proc``. What counts is the last quarter against the second one, medians; the
first quarter is for warming up. Memory files are slots, which are made when they are first needed: of those there may
be as many as there are slots at most. Exits with 1 if anything has grown.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import gymnasium
import lightning.pytorch as pl
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDictBase
from torch import Tensor, nn

from benchmarks.holdings import Holdings
from benchmarks.options import add_json, at_least, write
from benchmarks.table import machine, progress, table
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector, UpdateWeights, values

LOOKS = 40
MEMORY_LIMIT = 4.0
"""MiB that a process may seem to grow by: allocators keep what they may need again."""


class Toy(gymnasium.Env[Any, Any]):
    """A step costs next to nothing; an episode has ten."""

    observation_space = Box(-1.0, 1.0, (4,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 10
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.full(4, 0.1 * self.left, np.float32), float(action), self.left == 0, False, {}


class Actor(nn.Module):
    """Explores as it is told, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
        self.calls = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        temperature = values.get("temperature", 1.0)
        td["action"] = torch.multinomial((self.net(td["observation"]) / temperature).softmax(-1), 1).squeeze(-1)
        return td

    def take_sums(self) -> dict[str, Tensor]:
        """How often it was called since the last time."""
        taken, self.calls = self.calls, 0
        return {"calls": torch.tensor(taken)}


Look: TypeAlias = Mapping[str, Holdings]
"""Of each process, by name."""


def growth(looks: Sequence[Look]) -> dict[str, tuple[Holdings, Holdings]]:
    """(before, after) of each process: medians of the second and of the last quarter of the looks."""
    quarter = max(1, len(looks) // 4)
    found = {}
    for name in looks[0]:
        before, after = (
            Holdings(
                statistics.median(look[name].resident for look in part),
                statistics.median(look[name].private for look in part),
                max(look[name].memory_files for look in part),
                statistics.median_low([look[name].descriptors for look in part]),
                statistics.median_low([look[name].threads for look in part]),
            )
            for part in (looks[quarter : 2 * quarter], looks[-quarter:])
        )
        found[name] = (before, after)
    return found


def has_grown(before: Holdings, after: Holdings, workers: int) -> bool:
    """Whether this is more than noise, with so many workers.

    Each of them has a ring of batches, and there may be two slots of weights for each, and two; a mapped file counts
    twice, because Python's ``mmap`` keeps a descriptor of its own.
    """
    return (
        after.resident - before.resident > MEMORY_LIMIT
        or after.memory_files > 2 * (3 * workers + 2)
        or after.descriptors > before.descriptors
        or after.threads > before.threads
    )


class Soak:
    """One mode: its group, and what was seen of it.

    Args:
        batches: How many will be trained on.
        workers: How many processes collect.
        sync: Of the group.
    """

    def __init__(self, batches: int, workers: int, sync: bool) -> None:
        factory = partial(GymCollector, Toy, Actor, num_envs=2, frames_per_batch=8)
        self.group = CollectorGroup(
            factory,
            workers,
            weight_sync_schemes={"policy": DistributedWeightSyncScheme()},
            sync=sync,
            max_staleness=None if sync else 4,
            batches_per_epoch=batches,
            env_timeout=60.0,
            seed=1,
        )
        self.batches = batches
        self.looks: list[Look] = []
        self.calls = 0.0

    def trained_on(self, count: int) -> None:
        """So many batches so far: broadcast, merge, and look around if it is time to."""
        self.group.broadcast(temperature=1.0 + count / self.batches)
        self.calls += float(self.group.reduce().get("calls", 0.0))
        if count * LOOKS // self.batches > len(self.looks):
            pids = {"trainer": os.getpid()} | {f"worker {i}": s["pid"] for i, s in self.group.stats().items()}
            self.looks.append({name: Holdings.of(pid) for name, pid in pids.items()})
            progress(f"{count} of {self.batches}")


class Learner(pl.LightningModule):
    """Learns next to nothing."""

    def __init__(self, soak: Soak) -> None:
        super().__init__()
        self.actor = Actor()
        self.soak = soak

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> Tensor:
        loss: Tensor = self.actor.net(batch["observation"]).square().mean()
        self.soak.trained_on(batch_idx + 1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run_sync(soak: Soak) -> None:
    """Wait for each push."""
    actor = Actor()
    with soak.group as group:
        group.update_policy_weights_(actor)
        for count, _ in enumerate(group, 1):
            group.update_policy_weights_(actor)
            soak.trained_on(count)


def run_async(soak: Soak) -> None:
    """Wait for no push."""
    actor = Actor()
    with soak.group as group:
        group.update_policy_weights_(actor)
        for count, _ in enumerate(islice(group, soak.batches), 1):
            group.send_async({"policy": actor})
            soak.trained_on(count)


def run_fit(soak: Soak) -> None:
    """In a Trainer."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[UpdateWeights(soak.group, weight_update_map={"policy": "actor"})],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(soak), soak.group)


MODES: Mapping[str, tuple[Callable[[Soak], None], bool]] = {
    "sync": (run_sync, True),
    "async": (run_async, False),
    "fit": (run_fit, False),
}


def soak_in(mode: str, batches: int, workers: int) -> tuple[list[Look], dict[str, Any]]:
    """Run one mode; returns what was seen, and the same with some figures as JSON."""
    run, sync = MODES[mode]
    soak = Soak(batches, workers, sync)
    started = time.monotonic()
    run(soak)
    return soak.looks, {
        "seconds": round(time.monotonic() - started, 1),
        "restarts": soak.group.restarts,
        "versions": soak.group.version,
        "calls": soak.calls,
        "looks": [{name: vars(holdings) for name, holdings in look.items()} for look in soak.looks],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all modes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=at_least(LOOKS), default=10_000)
    parser.add_argument("--workers", type=at_least(1), default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    add_json(parser, "what was seen")
    args = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error("it is looked at /proc, which only Linux has")
    rows, seen, grown = [], {}, []
    for mode in args.modes:
        gc.collect()  # what is left of the group before is in cycles
        looks, seen[mode] = soak_in(mode, args.batches, args.workers)
        for name, (before, after) in growth(looks).items():
            bad = has_grown(before, after, args.workers)
            grown += [f"{mode}: {name}"] * bad
            rows.append([f"{mode}: {name}", *_columns(before, after), "GROWN" if bad else "no"])
    progress("")
    print(f"{machine()}\n{args.batches} batches, {args.workers} workers\n")
    columns = ["MiB before", "after", "memory files", "after", "descriptors", "after", "threads", "after", "grown"]
    print(table(["", *columns], rows))
    print("\n" + "; ".join(f"{mode}: {run['seconds']} s, {run['versions']} versions" for mode, run in seen.items()))
    write(args.json, {"machine": machine(), "grown": grown, "modes": seen})
    return 1 if grown else 0


def _columns(before: Holdings, after: Holdings) -> list[object]:
    names = ("resident", "memory_files", "descriptors", "threads")
    return [getattr(holdings, name) for name in names for holdings in (before, after)]


if __name__ == "__main__":
    sys.exit(main())
