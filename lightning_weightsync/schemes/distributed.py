"""How is a destination kept in sync over ``torch.distributed``? One process group of two per worker.

Names and semantics follow TorchRL's class of the same name. The default process group is never created, joined or used.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.options import choose
from lightning_weightsync.schemes.strategy import StrategyName
from lightning_weightsync.transports.base import ReceiverTransport, SenderTransport
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.pair_groups import pair_groups, why_unavailable
from lightning_weightsync.transports.process_group import (
    RECEIVER_RANK,
    SENDER_RANK,
    ProcessGroupReceiver,
    ProcessGroupSender,
)
from lightning_weightsync.transports.rendezvous import check_host, proofs
from lightning_weightsync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport

BACKENDS = ("gloo", "nccl")


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Pushes weights to workers in other processes, each push applied as a whole or not at all.

    Args:
        backend: Of the process groups to workers elsewhere: ``"gloo"`` (memory of the CPU), or ``"nccl"`` (slots lie on
            the sender's GPU and on each worker's, which must be another one; nothing is shared through the CPU, on the
            same host neither).
        sync: For hand-written receivers: ``True``, their loop calls ``receive``; ``False``, a background thread
            applies.
        timeout: Bounds one push as a whole, in seconds.
        connect_timeout: Bounds ``connect``, in seconds; ``None`` means 60 and 2 per worker.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        same_host: How to reach workers of this host: ``"shared_memory"`` (they map the sender's slots: one copy per
            push, whatever their number) or ``"network"`` (as if they were elsewhere).
        apply: ``"auto"`` lets the receiver's parameters live in the slot where that is safe (see ``schemes.staging``);
            ``"copy"`` always copies into the receiver's own tensors.
        max_slots: How many slots the sender may make; ``None``, 2 per worker and 2. With no more than one per worker,
            those of this host copy, or there would be none left once each has another version in force. With 1,
            ``send`` waits.
        host: Address that the sender listens on; workers connect to it.
        strategy: ``"tensordict"`` or ``"state_dict"``, see ``WeightStrategy``.
        strict: Whether the sender must have every leaf of the receiver.
        wire_dtype: Floating-point leaves travel in this dtype, for example ``torch.bfloat16``; the receiver keeps its
            own.
        verify: Whether each worker says what it has applied (SHA-256 over the leaves, some 0.2 s for 300 MB on each
            side), for the sender to compare with what it sent.
        only_changed: Whether leaves whose bytes are in the target already are neither copied nor sent: frozen layers,
            adapters, target nets. Costs a comparison of all leaves per push. What workers hold is the same either way.

    Raises:
        ValueError: A value that is not among those listed.

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
        same_host: Literal["shared_memory", "network"] = "shared_memory",
        apply: Literal["auto", "copy"] = "auto",
        max_slots: int | None = None,
        host: str = "127.0.0.1",
        strategy: StrategyName = "tensordict",
        strict: bool = True,
        wire_dtype: torch.dtype | None = None,
        verify: bool = False,
        only_changed: bool = False,
    ) -> None:
        check_host(host)
        choose("backend", backend, BACKENDS)
        choose("same_host", same_host, ("shared_memory", "network"))
        super().__init__(
            sync=sync,
            timeout=timeout,
            connect_timeout=connect_timeout,
            heartbeat_timeout=heartbeat_timeout,
            host=host,
            strategy=strategy,
            strict=strict,
            apply=apply,
            max_slots=max_slots,
            wire_dtype=wire_dtype,
            verify=verify,
            only_changed=only_changed,
        )
        self.backend = backend
        self.same_host = same_host

    def _reset(self) -> None:
        super()._reset()
        self._shared: SharedMemoryTransport | None = None

    @property
    def backend_name(self) -> str:
        """The process groups' backend."""
        return self.backend

    @property
    def wants_local(self) -> bool:
        """Whether workers of this host may share memory with the sender."""
        return self.same_host == "shared_memory" and self.backend == "gloo"

    @property
    def slot_device(self) -> torch.device:
        """The CPU; with NCCL the device of the model, or the current one."""
        if self.backend != "nccl":
            return torch.device("cpu")
        model = self.model
        leaves = self.strategy.leaves(model).values() if model is not None else ()
        return next((leaf.device for leaf in leaves if leaf.is_cuda), torch.device("cuda", torch.cuda.current_device()))

    def check_backend(self) -> None:
        """See whether this process can form groups over the backend.

        Raises:
            WeightSyncError: It cannot.
        """
        why = why_unavailable(self.backend)
        if why is not None:
            raise WeightSyncError(why)

    @property
    def shared_transport(self) -> SenderTransport | None:
        """The transport of all workers that map the sender's slots, where there are such."""
        return self._shared

    def shares(self, link: WorkerLink) -> bool:
        """Whether this worker maps the sender's slots: it is on this host, and ``same_host`` allows it."""
        # Slots are of one kind: if all those who connected first are elsewhere, they are private memory.
        return self.wants_local and link.local and (self._pool is None or self._pool.shared)

    def create_transport(self, **kwargs: Any) -> SenderTransport | ReceiverTransport:
        """One end of the shared slots, or of a pair group.

        Args:
            **kwargs: ``offer`` (what the sender says about the transport); on the sender ``link``, and ``holds``
                (whether the worker keeps a slot as its current weights).
        """
        offer: Mapping[str, Any] = kwargs["offer"]
        link: WorkerLink | None = kwargs.get("link")
        model_id = self._known_model_id()
        if link is None:
            if offer["shared"]:
                return SharedMemoryReceiver()
            sender = self._receiver_link()
            return ProcessGroupReceiver(
                pair_groups(self.backend, self.slot_device),
                RECEIVER_RANK,
                partial(sender.swap, model_id),
                proofs(sender.info, offer["pair"]),
                sender.local_host or self.host,  # `host` is the sender's
                only_changed=bool(offer["only_changed"]),
            )
        if offer["shared"]:
            if self._shared is None:
                assert self._pool is not None
                self._shared = SharedMemoryTransport(model_id, self._pool)
            self._shared.add(link, holds=kwargs["holds"])
            return self._shared
        hub = self._sender_hub()
        return ProcessGroupSender(
            pair_groups(self.backend, self.slot_device),
            SENDER_RANK,
            partial(hub.swap, link, model_id),
            proofs(hub.info, offer["pair"]),
            hub.host,
            pool=self._pool if offer["only_changed"] else None,
        )

    def _offer(self, link: WorkerLink) -> dict[str, Any]:
        return {
            "shared": self.shares(link),
            "pair": secrets.token_hex(16),
            "only_changed": self.only_changed and self._spares_slots() and self.backend == "gloo",
        }
