"""How is a destination kept in sync over ``torch.distributed``? One process group of two per worker.

Names and semantics follow TorchRL's class of the same name. The default process group is never created, joined or used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.strategy import StrategyName
from lightning_weightsync.transports.base import TransportBackend
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.process_group import (
    RECEIVER_RANK,
    SENDER_RANK,
    ProcessGroupTransport,
    RendezvousStore,
    backend_available,
    remote_store,
)
from lightning_weightsync.transports.rendezvous import check_host

BACKENDS = ("gloo", "nccl")


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Pushes weights to workers in other processes, each push applied as a whole or not at all.

    Args:
        backend: ``"gloo"`` (``"nccl"`` is not there yet).
        sync: For hand-written receivers: ``True``, their loop calls ``receive``; ``False``, a background thread
            applies.
        timeout: Bounds one push as a whole, in seconds.
        connect_timeout: Bounds ``connect``, in seconds; ``None`` means 60 and 2 per worker.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        same_host: How to reach workers of this host; ``"network"`` (``"shared_memory"`` is not there yet).
        apply: ``"copy"`` writes into the receiver's own tensors; ``"auto"`` chooses (as yet always to copy).
        max_slots: Bound on the shared-memory slots; not there yet.
        host: Address that the sender listens on; workers connect to it.
        strategy: ``"tensordict"`` or ``"state_dict"``, see ``WeightStrategy``.
        strict: Whether the sender must have every leaf of the receiver.
        wire_dtype: Cast on the way; not there yet.

    Raises:
        ValueError: A value that is not among those listed.
        NotImplementedError: A value that is listed and not there yet.

    Example (sender; the receiver is another process to which the scheme was pickled)::

        scheme = DistributedWeightSyncScheme()
        scheme.init_on_sender("policy", model=net, num_workers=2)
        ...                      # hand pickle.dumps(scheme) to the workers
        scheme.connect()         # every worker holds net's weights
        scheme.send()            # ... and again, after net has changed
        scheme.shutdown()
    """

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float = 3600.0,
        *,
        connect_timeout: float | None = None,
        heartbeat_timeout: float = 30.0,
        same_host: Literal["shared_memory", "network"] = "network",
        apply: Literal["auto", "copy"] = "auto",
        max_slots: int | None = None,
        host: str = "127.0.0.1",
        strategy: StrategyName = "tensordict",
        strict: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        check_host(host)
        super().__init__(
            sync=sync,
            timeout=timeout,
            connect_timeout=connect_timeout,
            heartbeat_timeout=heartbeat_timeout,
            host=host,
            strategy=strategy,
            strict=strict,
        )
        _choose("backend", backend, BACKENDS)
        _choose("same_host", same_host, ("shared_memory", "network"))
        _choose("apply", apply, ("auto", "copy"))
        for name, value, there in (
            ("backend", backend, "gloo"),
            ("same_host", same_host, "network"),
            ("max_slots", max_slots, None),
            ("wire_dtype", wire_dtype, None),
        ):
            if value != there:
                raise NotImplementedError(f"{name}={value!r} is not there yet; use {name}={there!r}")
        if not backend_available(backend):
            raise ValueError(f"backend={backend!r} is not part of this build of torch")
        self.backend = backend
        self.same_host = same_host
        self.apply = apply

    @property
    def backend_name(self) -> str:
        """The process groups' backend."""
        return self.backend

    def create_transport(self, **kwargs: Any) -> TransportBackend:
        """One end of a pair group.

        Args:
            **kwargs: ``offer`` (host, port and prefix of the store; both sides), ``link`` (sender only).
        """
        offer: Mapping[str, Any] = kwargs["offer"]
        link: WorkerLink | None = kwargs.get("link")
        if link is not None:
            store = self._store

            def make_store(seconds: float) -> Any:
                return store.prefixed(offer["prefix"])

            return ProcessGroupTransport(self.backend, SENDER_RANK, make_store, self.host)
        return ProcessGroupTransport(
            self.backend,
            RECEIVER_RANK,
            lambda seconds: remote_store(offer["host"], offer["port"], offer["prefix"], seconds),
            self._receiver_link().local_host,  # `self.host` is the sender's, perhaps another machine's
        )

    @contextmanager
    def _offering(self, deadline: float) -> Iterator[Callable[[WorkerLink], dict[str, Any]]]:
        self._store = store = RendezvousStore(self.host, deadline - time.monotonic())
        try:
            yield lambda link: {
                "host": store.host,
                "port": store.port,
                "prefix": f"{self._sender_hub().run}/{link.worker_idx}/{link.generation}/{self.model_id}",
            }
        finally:
            store.close()
            del self._store


def _choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
