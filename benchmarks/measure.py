"""How are samples taken? All actions of a comparison in turn, round after round, each when all processes are quiet.

What disturbs this machine for a while then disturbs every action alike. Figures are medians; compare them within one
run only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines import Sample
from benchmarks.receivers import settle
from benchmarks.table import progress

WARM_UP = 3
"""Rounds that are not counted: slots, buffers and connections are touched for the first time."""


@dataclass
class Comparison:
    """The samples of one model and one set of receivers.

    Attributes:
        what: What is compared.
        kind: Name of the model.
        nbytes: Of its leaves.
        tensors: How many leaves it has.
        workers: How many receivers each push went to; 0 where that differs between the actions.
        samples: Milliseconds, by what they are of.
        notes: Why something is missing.
    """

    what: str
    kind: str
    nbytes: int
    tensors: int
    workers: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def median(self, name: str) -> float | None:
        """Of the samples of that name, in milliseconds; ``None`` if there are none."""
        return statistics.median(self.samples[name]) if self.samples.get(name) else None

    def ratio(self, name: str, to: str) -> float | None:
        """Of two medians."""
        above, below = self.median(name), self.median(to)
        return None if above is None or not below else above / below

    def as_json(self) -> dict[str, Any]:
        """Everything, with the quartiles beside the medians."""
        quartiles = {
            name: [round(q, 4) for q in statistics.quantiles(values, n=4)]
            for name, values in self.samples.items()
            if len(values) > 1
        }
        return {
            "what": self.what,
            "kind": self.kind,
            "nbytes": self.nbytes,
            "tensors": self.tensors,
            "workers": self.workers,
            "quartiles_ms": quartiles,
            "samples_ms": {name: [round(value, 4) for value in values] for name, values in self.samples.items()},
            "notes": self.notes,
        }


def interleave(
    comparison: Comparison,
    actions: Sequence[Callable[[], Sample]],
    pairs: int,
    pids: Sequence[int],
    warm_up: int = WARM_UP,
) -> Comparison:
    """Take ``pairs`` samples of each action, in turn; each round starts with the next one.

    Args:
        comparison: Takes the samples.
        actions: Each takes one sample.
        pairs: How many rounds are counted.
        pids: Processes that must be quiet before each sample.
        warm_up: How many rounds are not counted.
    """
    for turn in range(-warm_up, pairs):
        progress(f"{comparison.what}, {comparison.kind}: {max(0, turn)} of {pairs}")
        for position in range(len(actions)):
            settle(pids)
            sample = actions[(turn + position) % len(actions)]()
            if turn >= 0:
                for name, value in sample.items():
                    comparison.samples.setdefault(name, []).append(value)
    progress("")
    return comparison
