"""What does a scheme know of itself? Its configuration, its one role, and what of it travels to a worker.

The two roles are in ``sender_side`` and ``receiver_side``; the class that users see puts them together, in ``base``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch

from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.newest import NewestWeights
from lightning_weightsync.schemes.options import choose, seconds
from lightning_weightsync.schemes.receiver import ReceiverLink
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import StrategyName, Weights, WeightStrategy
from lightning_weightsync.transports.base import ReceiverTransport, SenderTransport
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.rendezvous import StoreInfo
from lightning_weightsync.transports.slots import SlotPool

Role = Literal["sender", "receiver"]

process_gate = Gate()
"""The gate of receivers that have no context, or one without a gate."""


class SchemeCore(ABC):
    """Configuration and state that both roles share; see ``WeightSyncScheme`` for the arguments."""

    def __init__(
        self,
        *,
        sync: bool = True,
        timeout: float = 3600.0,
        connect_timeout: float | None = None,
        heartbeat_timeout: float = 30.0,
        host: str = "127.0.0.1",
        strategy: StrategyName = "tensordict",
        strict: bool = True,
        apply: Literal["auto", "copy"] = "auto",
        max_slots: int | None = None,
        wire_dtype: torch.dtype | None = None,
        verify: bool = False,
        only_changed: bool = False,
    ) -> None:
        choose("apply", apply, ("auto", "copy"))
        if max_slots is not None and max_slots < 1:
            raise ValueError(f"max_slots={max_slots}: at least 1")
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise ValueError(f"wire_dtype={wire_dtype!r}: give a floating-point dtype, for example torch.bfloat16")
        self.sync = sync
        self.timeout = seconds("timeout", timeout)
        self.connect_timeout = None if connect_timeout is None else seconds("connect_timeout", connect_timeout)
        self.heartbeat_timeout = seconds("heartbeat_timeout", heartbeat_timeout)
        self.host = host
        self.strategy = WeightStrategy(strategy)
        self.strict = strict
        self.apply = apply
        self.max_slots = max_slots
        self.wire_dtype = wire_dtype
        self.verify = bool(verify)
        self.only_changed = bool(only_changed)
        self._reset()

    def _reset(self) -> None:
        self._role: Role | None = None
        self._model_id: str | None = None
        self._context: Any = None
        self._source: Weights | None = None
        self._hub: LinkHub | None = None
        self._owns_hub = False
        self._reader: Source | None = None
        self._pool: SlotPool | None = None
        self._newest: NewestWeights | None = None
        self._transports: dict[int, SenderTransport] = {}
        self._store_info: StoreInfo | None = None
        self._staged: StagedModel | None = None
        self._gate: Gate | None = None
        self._link: ReceiverLink | None = None
        self._owns_link = False
        self._receiver_transport: ReceiverTransport | None = None
        self._worker_idx: int | None = None
        self._open_forward: Callable[[], None] | None = None
        self._hooks: list[Callable[[Any, int], None]] = []
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        runtime = SchemeCore.__new__(type(self))
        runtime._reset()
        state = {name: value for name, value in self.__dict__.items() if name not in runtime.__dict__}
        return state | {"_model_id": self._model_id, "_store_info": self._store_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    @property
    def wants_local(self) -> bool:
        """Whether the hub is to listen on a Unix socket for workers of this host."""
        return False

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """What both sides must agree on to move bytes."""

    @property
    @abstractmethod
    def slot_device(self) -> torch.device:
        """Where slots lie that are not shared with workers of this host."""

    @abstractmethod
    def check_backend(self) -> None:
        """See whether this process can move bytes in the scheme's way.

        Raises:
            WeightSyncError: It cannot.
        """

    @property
    def shared_transport(self) -> SenderTransport | None:
        """The transport that all workers of this host share, where there is one."""
        return None

    @abstractmethod
    def create_transport(self, **kwargs: Any) -> Any:
        """A ``SenderTransport`` (from ``link``, ``offer``, ``holds``) or a ``ReceiverTransport`` (from ``offer``)."""

    @abstractmethod
    def shares(self, link: WorkerLink) -> bool:
        """Whether this worker maps the sender's slots."""

    @abstractmethod
    def _offer(self, link: WorkerLink) -> dict[str, Any]:
        """What the ``transport`` field of a worker's offer holds."""

    def _check_free(self, model_id: str) -> None:
        """Comes first in ``init_*``, and ``_take_role`` when nothing can fail any more: it may be repeated then."""
        if self._ended:
            self._reset()
        if self._role is not None:
            raise RuntimeError(
                f"this scheme is the {self._role} of {self._model_id!r} already: use one scheme per model"
            )
        if not model_id or not isinstance(model_id, str):
            raise ValueError(f"model_id={model_id!r}: give the destination, for example 'policy'")

    def _take_role(self, role: Role, model_id: str) -> None:
        self._role = role
        self._model_id = model_id

    def _known_model_id(self) -> str:
        if self._model_id is None:
            raise RuntimeError("call init_on_sender() or init_on_receiver() first")
        return self._model_id

    def shutdown(self) -> None:
        """End this side. Idempotent, unblocks any waiter; what a context lent is left to it.

        Waits for nobody elsewhere. Its own threads leave at once; one that is in code that nothing interrupts (an
        applied hook, gloo) is waited for, up to 0.9 s each, and a policy call that holds the gate up to 0.3 s.

        A scheme that was shut down may be initialised again.
        """
        if self._owns_hub and self._hub is not None:
            self._hub.close()
        if self._owns_link and self._link is not None:
            self._link.end()
        if self._open_forward is not None:
            self._open_forward()
        for transport in list(self._transports.values()):  # another thread may be connecting more
            transport.close()
        self._transports.clear()
        self._newest = None
        if self._pool is not None:
            self._pool.close()
        self._ended = True

    @property
    def model_id(self) -> str | None:
        """The destination."""
        return self._model_id
