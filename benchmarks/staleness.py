"""What does a bound on staleness cost? Batches trained on per second with and without it, and how old they were.

    python -m benchmarks.staleness [--batches 500] [--bound 2] [--train-ms 200] [--slow-ms 1000] [--workers 2]

Two asynchronous groups are up at once, one unbounded, and get turns of 50 batches each; so a busy machine slows both. A
batch costs the trainer ``train-ms`` (it sleeps) and is followed by a push that nobody waits for. Worker 0 needs
``slow-ms`` for a batch, all others what CartPole takes. While it is not a group's turn its workers fill their slots and
wait.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from benchmarks.options import at_least, not_negative
from benchmarks.table import machine, table, verdict
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector

FRAMES = 256
TURN = 50


class Actor(nn.Module):
    """Two layers, and a random action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        td["action"] = torch.multinomial(self.net(td["observation"]).softmax(-1), 1).squeeze(-1)
        return td


class Slowed(GymCollector):
    """Worker 0 sleeps in each batch, between its beginning and its end."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = seconds if self.worker_idx == 0 else 0.0

    def __iter__(self) -> Iterator[TensorDictBase]:
        batches = super().__iter__()
        while True:
            with self.gate:
                batch = next(batches)
                time.sleep(self.seconds)
            yield batch


class Run:
    """One group, and what its trainer saw."""

    def __init__(self, bound: int | None, workers: int, slow: float) -> None:
        factory = partial(Slowed, "CartPole-v1", Actor, num_envs=8, frames_per_batch=FRAMES, seconds=slow)
        schemes = {"policy": DistributedWeightSyncScheme()}
        self.group = CollectorGroup(
            factory, workers, weight_sync_schemes=schemes, sync=False, max_staleness=bound, seed=1
        )
        self.policy = Actor()
        self.group.start({"policy": self.policy})
        self.batches = iter(self.group)
        self.ages: list[torch.Tensor] = []
        self.seconds = 0.0
        self.slow = 0

    def learn(self, count: int, train: float) -> None:
        """Train on so many batches."""
        started = time.monotonic()
        for _ in range(count):
            batch = next(self.batches)
            self.ages.append(self.group.version - batch["policy_version"])
            self.slow += int(batch["worker_idx"][0, 0] == 0)
            time.sleep(train)
            self.group.send_async({"policy": self.policy})
        self.seconds += time.monotonic() - started

    @property
    def rate(self) -> float:
        """Frames per second that were trained on."""
        return len(self.ages) * FRAMES / self.seconds

    @property
    def oldest(self) -> int:
        """Versions by which the oldest sample was behind."""
        return int(torch.stack(self.ages).max())

    def row(self, name: str) -> list[object]:
        """Of the table."""
        age = float(torch.stack(self.ages).float().mean())
        dropped = sum(stat["dropped"] for stat in self.group.stats().values())
        return [name, self.rate, age, self.oldest, dropped, self.slow]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=at_least(1), default=500)
    parser.add_argument("--bound", type=at_least(0), default=2)
    parser.add_argument("--train-ms", type=not_negative, default=200.0)
    parser.add_argument("--slow-ms", type=not_negative, default=1000.0)
    parser.add_argument("--workers", type=at_least(1), default=2)
    args = parser.parse_args()
    runs = [Run(bound, args.workers, args.slow_ms / 1e3) for bound in (None, args.bound)]
    try:
        for _ in range(-(-args.batches // TURN)):
            for run in runs:
                run.learn(TURN, args.train_ms / 1e3)
        rows = [run.row(name) for run, name in zip(runs, ("unbounded", f"max_staleness={args.bound}"), strict=True)]
    finally:
        for run in runs:
            run.group.shutdown()
    print(f"{machine()}\n{args}\n")
    print(table(["", "frames/s trained on", "mean age", "max age", "dropped", "of the slow worker"], rows))
    unbounded, bounded = runs
    print(f"\nframes/s against unbounded: {verdict(bounded.rate / unbounded.rate, 0.9, at_least=True)}")
    print(f"oldest sample: {verdict(float(bounded.oldest), args.bound)}")


if __name__ == "__main__":
    main()
