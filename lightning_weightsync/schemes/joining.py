"""How does a worker come to be served? It joins, agrees on every layout, applies the newest weights, and then counts.

    waiting --hello--> joining --layouts agreed, transports open--> starting --newest version applied--> admitted
                          |                                            |
                          +---------- anything goes wrong -------------+--> turned away

Pushes go to admitted workers only, so that one who is slow to join holds nobody's push up. The first time, all workers
are connected or none; a replacement is connected or turned away on its own.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.push import (
    PerWorker,
    Pushable,
    is_per_worker,
    newest_version,
    push_models,
    push_newest,
)
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.pushing import PushHandle, raise_failures


class Attachable(Pushable, Protocol):
    """The sender's role of a scheme, as far as connecting needs it."""

    def attach(self, weights: Weights | None, links: Mapping[int, WorkerLink], deadline: float) -> None:
        """Agree on the layout with each of these workers, and open the transports."""
        ...


def connect_workers(
    hub: LinkHub, weights: Mapping[Any, Weights | PerWorker | None], worker_ids: Collection[int], deadline: float
) -> None:
    """Connect these workers, all or none, and deliver the current version. Blocks until all have applied it.

    Args:
        hub: Whose workers they are.
        weights: For each scheme (``Attachable``) its weights; ``None`` for what was bound.
        worker_ids: The workers to wait for.
        deadline: For all of it, on the monotonic clock, in seconds.

    Raises:
        LayoutMismatchError: The models differ, in any worker.
        WeightSyncTimeout: Not everybody was there in time.
        WeightSyncError: A worker could not be connected; ``.failed`` names each.
    """
    with hub.connecting(deadline):
        links = hub.accept(worker_ids, deadline)
        try:
            for scheme, given in weights.items():
                like = next(iter(given.values())) if is_per_worker(given) else given
                scheme.attach(like, links, deadline)
            timeout = deadline - time.monotonic()
            first = push_models(hub, weights, list(links), timeout=timeout, initial=True, links=links)
            _admit(hub, list(weights), links, first, deadline)
        except BaseException as error:
            hub.turn_away(links, error)
            raise


def reconnect_workers(
    hub: LinkHub, schemes: Collection[Attachable], worker_ids: Collection[int], deadline: float
) -> None:
    """Connect replacements of these workers, each on its own, and deliver what was pushed last, under its version.

    Blocks until all have applied it. Pushes to the other workers go on meanwhile.

    Args:
        hub: Whose workers they are.
        schemes: All that the workers are connected for.
        worker_ids: The workers to wait for. One that is still connected is fenced off when its replacement joins.
        deadline: For all of it, on the monotonic clock, in seconds.

    Raises:
        WeightSyncTimeout: Not all had joined in time; the link of each missing one is as it was.
        WeightSyncError: Some could not be connected, and are named in ``.failed``. All others are.
    """
    with hub.connecting(deadline):
        failed: dict[int, Exception] = {}
        for index, link in hub.accept(worker_ids, deadline).items():
            links = {index: link}
            try:
                for scheme in schemes:
                    scheme.attach(None, links, deadline)
                with hub.in_order(deadline):
                    newest = push_newest(hub, schemes, link, timeout=deadline - time.monotonic())
                _admit(hub, schemes, links, newest, deadline)
            except WeightSyncError as error:
                hub.turn_away(links, error)
                if len(worker_ids) == 1:
                    raise
                failed[index] = error.failed.get(index, error)
            except BaseException as error:
                hub.turn_away(links, error)
                raise
        raise_failures(failed, "connecting replacements")


def _admit(
    hub: LinkHub,
    schemes: Collection[Pushable],
    links: Mapping[int, WorkerLink],
    delivered: PushHandle,
    deadline: float,
) -> None:
    """Have pushes go to these workers once they have applied this version; blocks until they hold their newest one."""
    delivered.wait()
    with hub.in_order(deadline):
        # Pushes of other threads may have gone on meanwhile: the last one goes first, later ones queue up behind it.
        overtaken = [link for link in links.values() if newest_version(schemes, link.worker_idx) != delivered.version]
        handles = [push_newest(hub, schemes, link, timeout=deadline - time.monotonic()) for link in overtaken]
        hub.admit(links)
    for handle in handles:
        handle.wait()
