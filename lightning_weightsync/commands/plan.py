"""Who would send what to whom? Each destination's source and target, and whether their leaves agree.

What a worker and the sender find out when they connect is found out here in one process: the factory is pickled and
unpickled, its collector is built, destinations are resolved on it, and layouts are compared by the code that does it
then. No process is started, and no socket opened.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from lightning_weightsync.collectors.context import WorkerContext
from lightning_weightsync.collectors.group import CollectorGroup
from lightning_weightsync.collectors.pickling import dumps
from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.paths import PathError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.transports.layout import WeightLayout


@dataclass(frozen=True)
class Route:
    """One destination, and what would go there.

    Attributes:
        destination: On the collector.
        model: What is there.
        layout: What travels.
        scheme: How.
    """

    destination: str
    model: Any
    layout: WeightLayout
    scheme: WeightSyncScheme

    @property
    def leaves(self) -> int:
        """How many tensors travel."""
        return len(self.layout.leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of one push."""
        return self.layout.nbytes

    def transport(self, num_workers: int) -> str:
        """How the bytes get there."""
        if not num_workers:
            return "copied within this process"
        if self.scheme.wants_local:
            return "shared memory to workers on this host"
        return f"{self.scheme.backend_name}, a process group for each worker"


def find_routes(group: CollectorGroup, sources: Mapping[str, Any]) -> tuple[list[Route], Any]:
    """Compare each source with its target.

    Args:
        group: Which is not launched.
        sources: Destination -> weights; destinations that are not among them are left out.

    Returns:
        The routes, and the type of the collector.

    Raises:
        ConfigError: The factory raises, a destination names nothing, or layouts differ; all problems. Its cause is the
            last ``LayoutMismatchError``, if there is one.
    """
    routes: list[Route] = []
    problems: list[str] = []
    cause: Exception | None = None
    with dry_collector(group) as context:
        for destination, scheme in group.weight_sync_schemes.items():
            try:
                target = context.get_model(destination)
            except PathError as error:
                problems.append(f"weight_update_map: destination {destination!r} on the collector: {error}")
                continue
            if destination not in sources:
                continue
            try:
                routes.append(_compare(destination, sources[destination], target, scheme))
            except (LayoutMismatchError, TypeError, ValueError) as error:
                cause = error
                problems.append(f"weight_update_map: {destination!r}: {error}")
        kind = type(context.collector)
    if problems:
        raise ConfigError(problems) from cause
    return routes, kind


def _compare(destination: str, weights: Any, target: Any, scheme: WeightSyncScheme) -> Route:
    source = Source(destination, weights, scheme.strategy, scheme.wire_dtype)
    if not source.layout.leaves:
        raise ValueError(f"the source of {destination!r} has neither parameters nor buffers")
    model = StagedModel(destination, target, scheme.strategy, strict=scheme.strict)
    casts = scheme.wire_dtype is not None
    model.bind(source.layout, extra_keys=source.extra_keys, casts=casts, strict=scheme.strict)
    return Route(destination, target, source.layout, scheme)


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


@contextmanager
def dry_collector(group: CollectorGroup) -> Iterator[WorkerContext]:
    """What worker 0 would build, in this process, for as long as the context lasts.

    It is seeded as the worker is (torch, numpy, random), and the state of those is left as it was.

    Raises:
        ConfigError: The factory raises, does not pickle, or makes no collector.
    """
    seed = group.base_seed
    with _own_random_state(seed):
        try:
            pickled = dumps(group.collector)
            factory = cloudpickle.loads(pickled) if group.num_workers else group.collector
            collector = factory(worker_idx=0, seed=seed)
        except Exception as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise ConfigError(
                f"collector.collector: making it, as each worker does, raised {type(error).__name__}: {error}{notes}"
            ) from error
        try:
            try:
                context = WorkerContext(collector, 0, None, {})
            except TypeError as error:
                raise ConfigError(f"collector.collector: {error}") from error
            yield context
        finally:
            getattr(collector, "close", lambda: None)()
