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
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from benchmarks.engines import Sample, milliseconds
from benchmarks.measure import Comparison, interleave
from benchmarks.models import KINDS, change, checksum, leaves, size
from benchmarks.options import add_json, at_least, write
from benchmarks.table import machine, table
from lightning_weightsync.integrations.torchrl import TorchRLWeightSyncScheme


class PatientMultiProcess(MultiProcessWeightSyncScheme):  # type: ignore[misc]
    """As it is, but for the ten seconds that a worker waits for its first weights: 1,000 tensors may take longer."""

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        if self._receiver_transport is not None:
            self._receiver_transport.timeout = 120.0
        super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)


SCHEMES: dict[str, Callable[[], Any]] = {
    "ours": TorchRLWeightSyncScheme,
    "SharedMem": lambda: SharedMemWeightSyncScheme(sync=True),
    "MultiProcess": lambda: PatientMultiProcess(sync=True),
}
SOURCES = ("own", "other")
TITLES = {"mlp": "18 KB MLP", "many": "1,000 tensors of 2 KB", "large": "340 MB encoder"}
MAX_RATIO_SHARED_MEMORY = 1.1
MIN_RATIO_MULTI_PROCESS = 2.0
FRAMES_PER_WORKER = 2
WARM_UP = 5


class Still(EnvBase):  # type: ignore[misc]
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


def _act_small(model: nn.Module, observation: Tensor) -> Any:
    return model(observation)[..., :1]


def _act_many(model: nn.Module, observation: Tensor) -> Any:
    return torch.stack([leaf.sum() for leaf in model.parameters()]).mean().expand(*observation.shape[:-1], 1)


def _act_large(model: nn.Module, observation: Tensor) -> Any:
    tokens = observation.reshape(-1, 1, 4).repeat(1, 1, 192)
    return model(tokens)[:, 0, :1].reshape(*observation.shape[:-1], 1)


ACTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {"mlp": _act_small, "many": _act_many, "large": _act_large}
"""How a model of each kind makes an action, ``[*, 1]``, of an observation, ``[*, 4]``: every leaf is read."""


class Actor(nn.Module):
    """A model of a kind that is pushed, as a policy that can tell what weights it holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = KINDS[kind].build().eval().requires_grad_(False)
        self.act = ACTS[kind]

    def forward(self, observation: Tensor) -> Any:
        return self.act(self.model, observation)

    def checksum(self) -> int:
        return checksum(leaves(self.model))


class Side:
    """One collector with its scheme, its own policy, and another one to push."""

    def __init__(self, scheme: str, kind: str, workers: int) -> None:
        self.scheme = scheme
        own, other = (TensorDictModule(Actor(kind), in_keys=["observation"], out_keys=["action"]) for _ in SOURCES)
        self._policies = dict(zip(SOURCES, (own, other), strict=True))
        self._collector = MultiSyncCollector(
            [Still] * workers,
            own,
            frames_per_batch=FRAMES_PER_WORKER * workers,
            total_frames=-1,
            weight_sync_schemes={"policy": SCHEMES[scheme]()},
        )
        self._batches: Iterator[TensorDictBase] = iter(self._collector)

    def update(self, source: str) -> Sample:
        """Change a source's weights and push them, and take the first batch after that."""
        change(self._policies[source])
        given = () if source == "own" else (self._policies[source],)
        updating = milliseconds(lambda: self._collector.update_policy_weights_(*given))
        collecting = milliseconds(lambda: next(self._batches))
        return {name(self.scheme, source): updating, next_batch(self.scheme, source): collecting}

    def holds(self, source: str) -> bool:
        """Whether every worker's weights are those of a source."""
        expected = self._policies[source].module.checksum()
        return all(told == expected for told in self._collector.map_fn("policy.module.checksum"))

    def close(self) -> None:
        self._collector.shutdown()


class Measured(NamedTuple):
    """All schemes and sources with one model and one number of workers.

    Attributes:
        comparison: Samples of updates, and of the batches after them.
        unequal: (scheme, source) whose weights were not in every worker at the end.
    """

    comparison: Comparison
    unequal: set[tuple[str, str]]

    @property
    def title(self) -> str:
        return TITLES[self.comparison.kind]

    def update_ms(self, scheme: str, source: str) -> float:
        """Median of an update."""
        return self.comparison.median(name(scheme, source)) or 0.0

    def batch_ms(self, scheme: str, source: str) -> float:
        """Median of the batch after it."""
        return self.comparison.median(next_batch(scheme, source)) or 0.0


def name(scheme: str, source: str) -> str:
    """Of the samples of an update."""
    return f"{scheme}, {source}"


def next_batch(scheme: str, source: str) -> str:
    """Of the samples of the batch after it."""
    return f"{scheme}, {source}, next batch"


def measure(kind: str, workers: int, rounds: int) -> Measured:
    """All schemes and sources with one model and one number of workers, interleaved."""
    model = KINDS[kind].build()
    comparison = Comparison("TorchRL's collectors", kind, size(model), len(leaves(model)), workers)
    with ExitStack() as stack:
        sides = []
        for scheme in SCHEMES:
            sides.append(Side(scheme, kind, workers))
            stack.callback(sides[-1].close)
        actions = [partial(side.update, source) for source in SOURCES for side in sides]
        interleave(comparison, actions, rounds, [], warm_up=WARM_UP)
        unequal = set()
        for source in SOURCES:
            for side in sides:
                side.update(source)
                if not side.holds(source):
                    unequal.add((side.scheme, source))
    return Measured(comparison, unequal)


def show(results: Sequence[Measured]) -> str:
    """One line for each model, number of workers and source."""
    headers = ["model", "workers", "source", "ours, ms", "SharedMem, ms", "ours / SharedMem", "MultiProcess, ms"]
    headers += ["MultiProcess / ours", "next batch, ms (ours, SharedMem, MultiProcess)", "equal"]
    rows: list[list[object]] = []
    for result in results:
        for source in SOURCES:
            ours, shared, process = (result.update_ms(scheme, source) for scheme in SCHEMES)
            batches = ", ".join(f"{result.batch_ms(scheme, source):.1f}" for scheme in SCHEMES)
            equal = "NO" if any((scheme, source) in result.unequal for scheme in SCHEMES) else "yes"
            row = [result.title, result.comparison.workers, source, f"{ours:.2f}", f"{shared:.2f}"]
            rows.append([*row, f"{ours / shared:.2f}x", f"{process:.2f}", f"{process / ours:.1f}x", batches, equal])
    return table(headers, rows)


def misses(results: Sequence[Measured]) -> list[str]:
    """What misses its target."""
    missed = []
    for result in results:
        for source in SOURCES:
            ours, shared, process = (result.update_ms(scheme, source) for scheme in SCHEMES)
            where = f"{result.title}, {result.comparison.workers} workers, {source} policy"
            if ours / shared > MAX_RATIO_SHARED_MEMORY:
                missed.append(f"{where}: {ours / shared:.2f}x SharedMem, target {MAX_RATIO_SHARED_MEMORY}x")
            if result.comparison.kind != "mlp" and process / ours < MIN_RATIO_MULTI_PROCESS:
                missed.append(
                    f"{where}: {process / ours:.1f}x faster than MultiProcess, target {MIN_RATIO_MULTI_PROCESS}x"
                )
            if ("ours", source) in result.unequal:
                missed.append(f"{where}: weights differ")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write everything; returns the exit code."""
    options = _options(arguments)
    warnings.filterwarnings("ignore")
    report: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    results = []
    for kind in options.models:
        for workers in options.workers:
            gc.collect()  # what is left of the collectors before is in cycles
            result = measure(kind, workers, options.rounds)
            results.append(result)
            for source in SOURCES:
                figures = ", ".join(f"{scheme} {result.update_ms(scheme, source):.2f} ms" for scheme in SCHEMES)
                print(f"{result.title}, {workers} workers, {source} policy: {figures}", flush=True)
    print(f"\n{show(results)}\n")
    for line in misses(results) or ["every target is met"]:
        print(line)
    report["schemes"] = [r.comparison.as_json() | {"unequal": sorted(r.unequal)} for r in results]
    report["load_at_end"] = machine()["load"]
    write(options.json, report)
    print(f"written to {options.json}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--workers", nargs="+", type=at_least(1), default=[2, 4])
    parser.add_argument("--rounds", type=at_least(1), default=30)
    add_json(parser, default=Path("outputs/torchrl_schemes.json"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
