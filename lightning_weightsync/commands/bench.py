"""``bench``: what does a push of the user's own model cost on this machine? Measured with the group that is configured.

Workers are started, connected, and idle while they are pushed to, so what is measured is the push itself; then a few
batches are collected, to say which share of the time a push would be. Nothing is trained.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_weightsync.commands.application import Application
from lightning_weightsync.commands.plan import find_routes
from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.wording import size

if TYPE_CHECKING:
    from lightning_weightsync.collectors.group import CollectorGroup

WARM_UP = 3


def parser() -> argparse.ArgumentParser:
    """The options that are not Hydra's."""
    made = argparse.ArgumentParser(
        prog="lightning-weightsync bench",
        usage="%(prog)s FILE.yaml [--pushes N] [--batches N] [key=value ...]",
        description="measure pushes of the configured model to the configured workers; nothing is trained",
        epilog="compare: lightning-weightsync bench my.yaml weight_sync_scheme=network collector.num_workers=8",
        allow_abbrev=False,
    )
    made.add_argument("--pushes", type=int, default=30, help="samples of each kind (30)")
    made.add_argument("--batches", type=int, default=3, help="batches that are collected to compare with (3); 0: none")
    return made


def bench(application: Application, options: argparse.Namespace) -> int:
    """Measure, and print a table.

    Returns:
        0.

    Raises:
        ConfigError: The configuration is wrong, or has nothing that could be measured.
    """
    if options.pushes < 1 or options.batches < 0:
        raise ConfigError(f"--pushes {options.pushes} --batches {options.batches}: at least 1, and at least 0")
    built = application.build()
    group, sources = built.group, built.weights()
    if sources.keys() != group.weight_sync_schemes.keys() or not sources:
        why = "".join(f"; {name!r}: {reason}" for name, reason in built.unknown.items())
        raise ConfigError(f"bench needs a weight_update_map whose sources are there before a run begins{why}")
    routes, _ = find_routes(group, sources)
    total, leaves = sum(route.nbytes for route in routes), sum(route.leaves for route in routes)
    print(f"{', '.join(sources)}: {leaves} leaves, {size(total)} a push; {group.num_workers} worker(s), idle; ms")
    try:
        group.start(sources)
        samples = measure(group, sources, options.pushes)
        batch_ms = _batch_ms(group, options.batches)
    finally:
        group.shutdown()
    for line in table(samples, batch_ms):
        print(line)
    return 0


def measure(group: CollectorGroup, sources: Mapping[str, Any], pushes: int) -> dict[str, list[float]]:
    """Samples in milliseconds, taken in turn, so that what disturbs the machine for a while disturbs all alike."""
    tensors = [leaf.detach() for source in sources.values() for leaf in WeightStrategy().leaves(source).values()]
    room = [torch.empty_like(t) for t in tensors]
    actions: dict[str, Callable[[], object]] = {
        "a plain copy of the same bytes": lambda: torch._foreach_copy_(room, tensors),
        "a push, until all workers have applied it": lambda: group.update_policy_weights_(weights_dict=sources),
    }
    samples: dict[str, list[float]] = {name: [] for name in actions}
    stalled, applied = "blocking=false: the trainer is held", "blocking=false: until all workers have applied it"
    if group.num_workers:
        samples |= {stalled: [], applied: []}
    for turn in range(WARM_UP + pushes):
        _change(tensors)
        taken = {name: _ms(action) for name, action in actions.items()}
        if group.num_workers:
            started = time.perf_counter()
            handle = group.send_async(sources)
            taken[stalled] = 1e3 * (time.perf_counter() - started)
            if handle is not None:
                handle.wait()
            taken[applied] = 1e3 * (time.perf_counter() - started)
        if turn >= WARM_UP:
            for name, value in taken.items():
                samples[name].append(value)
    return samples


def table(samples: Mapping[str, list[float]], batch_ms: float | None) -> list[str]:
    """Medians and the slowest tenth, and what a push after each batch would come to."""
    width = max(map(len, samples))
    lines = [f"{'':{width}}   median      p90"]
    for name, values in samples.items():
        late = sorted(values)[min(len(values) - 1, round(0.9 * len(values)))]
        lines.append(f"{name:{width}} {statistics.median(values):8.3f} {late:8.3f}")
    if batch_ms is not None:
        share = statistics.median(samples["a push, until all workers have applied it"]) / batch_ms
        lines.append(
            f"collecting a batch takes {batch_ms:.1f} ms: a push after each would be {100 * share:.2g} % of that"
        )
    return lines


def _batch_ms(group: CollectorGroup, batches: int) -> float | None:
    if not batches:
        return None
    endless = (batch for _ in count() for batch in group)
    return statistics.median([_ms(lambda: next(endless)) for _ in range(1 + batches)][1:])


def _ms(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - started)


def _change(tensors: list[Tensor]) -> None:
    """As an optimizer would: a push of what has not changed may cost less (``only_changed``)."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.mul_(1.0001)
