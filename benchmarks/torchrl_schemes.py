"""How long does ``update_policy_weights_()`` of a ``MultiSyncCollector`` take: with our scheme, and with TorchRL's own?

    python -m benchmarks.torchrl_schemes [--models mlp many large] [--workers 2 4] [--rounds 30] [--json FILE]

For each model and number of workers, three collectors run side by side, one for each scheme. A round changes every
weight, as an optimizer does, and updates each collector once, in an order that rotates; so a busy machine slows all
three. Shown are medians, and the ratios of medians. Workers are idle between batches, as they are in a training loop.

Weights come from two sources, in turn:

* ``own``: the policy that the collector was given, ``update_policy_weights_()``. ``SharedMemWeightSyncScheme`` copies
  nothing then: it has put the trainer's own tensors into shared memory, and workers see every optimizer step while it
  happens. What is timed is its walk through the tensors.
* ``other``: another module of the same kind, ``update_policy_weights_(net)``: every scheme has to move the bytes.

The first batch after an update is timed too: mapping a slot costs nothing in the update, and page faults in that batch.
At the end every worker's weights are compared with the source's.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torchrl
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from lightning_weightsync.integrations.torchrl import TorchRLWeightSyncScheme

SCHEMES: dict[str, Callable[[], Any]] = {
    "ours": TorchRLWeightSyncScheme,
    "SharedMem": lambda: SharedMemWeightSyncScheme(sync=True),
    "MultiProcess": lambda: MultiProcessWeightSyncScheme(sync=True),
}
SOURCES = ("own", "other")
MAX_RATIO_SHARED_MEMORY = 1.1
MIN_RATIO_MULTI_PROCESS = 2.0
FRAMES_PER_WORKER = 2


class Still(EnvBase):
    """An environment that costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((4,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(4)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return TensorDict(
            {
                "observation": torch.zeros(4),
                "reward": torch.zeros(1),
                "done": torch.zeros(1, dtype=torch.bool),
                "terminated": torch.zeros(1, dtype=torch.bool),
            },
            [],
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class Mlp(nn.Module):
    """18 KB in 6 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation)


class Many(nn.Module):
    """2 MB in 1,000 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(512) for _ in range(1000))

    def forward(self, observation: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).mean().expand(*observation.shape[:-1], 1)


class Large(nn.Module):
    """340 MB in 144 tensors: a transformer encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, observation: Tensor) -> Tensor:
        tokens = observation.reshape(-1, 1, 4).repeat(1, 1, 192)
        return self.encoder(tokens)[:, 0, :1].reshape(*observation.shape[:-1], 1)


class Policy(TensorDictModule):
    """A model as a policy that can tell what weights it holds."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, in_keys=["observation"], out_keys=["action"])

    def fingerprint(self) -> list[float]:
        return [float(p.detach().double().sum()) for p in self.parameters()]


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "mlp": ("18 KB MLP", Mlp),
    "many": ("1,000 tensors of 2 KB", Many),
    "large": ("340 MB encoder", Large),
}


@dataclass
class Row:
    """One scheme with one model, number of workers and source; milliseconds."""

    model: str
    workers: int
    source: str
    scheme: str
    update_ms: float
    update_ms_p90: float
    next_batch_ms: float
    rounds: int
    equal: bool
    ratio_to_ours: float = 1.0


class Side:
    """One collector with its scheme, its own policy, and another one to push."""

    def __init__(self, scheme: str, model: nn.Module, workers: int) -> None:
        self.scheme = scheme
        own, other = (Policy(copy.deepcopy(model)).requires_grad_(False) for _ in SOURCES)
        self.policies = dict(zip(SOURCES, (own, other), strict=True))
        self.collector = MultiSyncCollector(
            [Still] * workers,
            own,
            frames_per_batch=FRAMES_PER_WORKER * workers,
            total_frames=-1,
            weight_sync_schemes={"policy": SCHEMES[scheme]()},
        )
        self._batches: Iterator[TensorDictBase] = iter(self.collector)
        self.update_ms: dict[str, list[float]] = {source: [] for source in SOURCES}
        self.batch_ms: dict[str, list[float]] = {source: [] for source in SOURCES}
        self.equal = True

    def update(self, source: str) -> None:
        policy = self.policies[source]
        torch._foreach_mul_(list(policy.parameters()), 1.001)
        given = () if source == "own" else (policy,)
        started = time.perf_counter()
        self.collector.update_policy_weights_(*given)
        updated = time.perf_counter()
        next(self._batches)
        self.update_ms[source].append(1e3 * (updated - started))
        self.batch_ms[source].append(1e3 * (time.perf_counter() - updated))

    def compare(self, source: str) -> None:
        """Whether every worker's weights are those that were pushed last."""
        expected = self.policies[source].fingerprint()
        self.equal &= all(told == expected for told in self.collector.map_fn("policy.fingerprint"))

    def row(self, model: str, workers: int, source: str, warm_up: int) -> Row:
        ordered = sorted(self.update_ms[source][warm_up:])
        return Row(
            model=model,
            workers=workers,
            source=source,
            scheme=self.scheme,
            update_ms=statistics.median(ordered),
            update_ms_p90=ordered[int(0.9 * (len(ordered) - 1))],
            next_batch_ms=statistics.median(self.batch_ms[source][warm_up:]),
            rounds=len(ordered),
            equal=self.equal,
        )


def measure(kind: str, workers: int, rounds: int, warm_up: int = 5) -> list[Row]:
    """All schemes and sources with one model and one number of workers, interleaved."""
    title, make = MODELS[kind]
    torch.manual_seed(0)
    model = make()
    sides: list[Side] = []
    try:
        for scheme in SCHEMES:
            sides.append(Side(scheme, model, workers))
        for number in range(warm_up + rounds):
            first = number % len(sides)
            for source in SOURCES:
                for side in sides[first:] + sides[:first]:
                    side.update(source)
                    if number == warm_up + rounds - 1:
                        side.compare(source)
        rows = [side.row(title, workers, source, warm_up) for source in SOURCES for side in sides]
    finally:
        for side in sides:
            side.collector.shutdown()
        sides.clear()
        gc.collect()
    for ours, *theirs in lines_of(rows):
        for row in theirs:
            row.ratio_to_ours = row.update_ms / ours.update_ms
    return rows


def lines_of(rows: list[Row]) -> list[list[Row]]:
    """Rows of the same model, workers and source together: ours, SharedMem, MultiProcess."""
    return [rows[start : start + len(SCHEMES)] for start in range(0, len(rows), len(SCHEMES))]


def table(rows: list[Row]) -> str:
    """The rows in Markdown: one line for each model, number of workers and source."""
    lines = [
        "| model | workers | source | ours, ms | SharedMem, ms | ours / SharedMem | MultiProcess, ms "
        "| MultiProcess / ours | next batch, ms (ours, SharedMem, MultiProcess) | equal |",
        "|---|--:|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for ours, shared, process in lines_of(rows):
        batches = ", ".join(f"{row.next_batch_ms:.1f}" for row in (ours, shared, process))
        equal = "yes" if ours.equal and shared.equal and process.equal else "NO"
        lines.append(
            f"| {ours.model} | {ours.workers} | {ours.source} | {ours.update_ms:.2f} | {shared.update_ms:.2f} "
            f"| {1 / shared.ratio_to_ours:.2f}x | {process.update_ms:.2f} | {process.ratio_to_ours:.1f}x | {batches} "
            f"| {equal} |"
        )
    return "\n".join(lines)


def verdicts(rows: list[Row]) -> list[str]:
    """What misses its target."""
    missed = []
    for ours, shared, process in lines_of(rows):
        where = f"{ours.model}, {ours.workers} workers, {ours.source} policy"
        if 1 / shared.ratio_to_ours > MAX_RATIO_SHARED_MEMORY:
            missed.append(f"{where}: {1 / shared.ratio_to_ours:.2f}x SharedMem, target {MAX_RATIO_SHARED_MEMORY}x")
        if ours.model != MODELS["mlp"][0] and process.ratio_to_ours < MIN_RATIO_MULTI_PROCESS:
            missed.append(
                f"{where}: {process.ratio_to_ours:.1f}x faster than MultiProcess, target {MIN_RATIO_MULTI_PROCESS}x"
            )
        if not ours.equal:
            missed.append(f"{where}: weights differ")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("outputs/torchrl_schemes.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    load = [os.getloadavg()[0]]
    rows: list[Row] = []
    for kind in options.models:
        for workers in options.workers:
            measured = measure(kind, workers, options.rounds)
            rows += measured
            for several in lines_of(measured):
                figures = ", ".join(f"{row.scheme} {row.update_ms:.2f} ms" for row in several)
                print(f"{several[0].model}, {workers} workers, {several[0].source} policy: {figures}", flush=True)
    load.append(os.getloadavg()[0])
    print(f"\n{table(rows)}\n")
    for line in verdicts(rows) or ["every target is met"]:
        print(line)
    conditions = {
        "cores": os.cpu_count(),
        "load_before_and_after": load,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrl": torchrl.__version__,
        "frames_per_worker": FRAMES_PER_WORKER,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"conditions": conditions, "rows": [asdict(row) for row in rows]}, indent=2))
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
