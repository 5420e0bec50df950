"""Keep the policies of worker processes in sync with a Lightning trainer.

Public names are imported when they are first used (PEP 562): a worker process imports this package too, and must not
pay for `lightning` or `hydra`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_weightsync.callback import UpdateWeights
    from lightning_weightsync.collectors.base import Collector
    from lightning_weightsync.collectors.early import start_workers_early
    from lightning_weightsync.collectors.group import CollectorGroup
    from lightning_weightsync.collectors.gym import GymCollector
    from lightning_weightsync.collectors.values import values
    from lightning_weightsync.errors import (
        LayoutMismatchError,
        StaleVersionError,
        WeightSyncError,
        WeightSyncTimeout,
        WorkerDied,
        WorkerError,
    )
    from lightning_weightsync.schemes.base import WeightSyncScheme
    from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme
    from lightning_weightsync.schemes.gate import Gate
    from lightning_weightsync.schemes.renamed import Renamed
    from lightning_weightsync.schemes.strategy import WeightStrategy
    from lightning_weightsync.transports.layout import WeightLayout

__version__ = "0.1.0"

__all__ = [
    "Collector",
    "CollectorGroup",
    "DistributedWeightSyncScheme",
    "Gate",
    "GymCollector",
    "LayoutMismatchError",
    "Renamed",
    "StaleVersionError",
    "UpdateWeights",
    "WeightLayout",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WeightSyncTimeout",
    "WorkerDied",
    "WorkerError",
    "__version__",
    "start_workers_early",
    "values",
]

_MODULE_OF = {
    "Collector": "collectors.base",
    "CollectorGroup": "collectors.group",
    "DistributedWeightSyncScheme": "schemes.distributed",
    "Gate": "schemes.gate",
    "GymCollector": "collectors.gym",
    "LayoutMismatchError": "errors",
    "Renamed": "schemes.renamed",
    "StaleVersionError": "errors",
    "UpdateWeights": "callback",
    "WeightLayout": "transports.layout",
    "WeightStrategy": "schemes.strategy",
    "WeightSyncError": "errors",
    "WeightSyncScheme": "schemes.base",
    "WeightSyncTimeout": "errors",
    "WorkerDied": "errors",
    "WorkerError": "errors",
    "start_workers_early": "collectors.early",
    "values": "collectors.values",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
