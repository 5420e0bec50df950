"""How do weights move in a simulation? By real schemes, over real shared slots or over a network that is pretended.

The pretended network is the real pair transport with its process group replaced: a send leaves a reference to the
slot on the wire, and the bytes are read when the worker receives, as late as a real network may read them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_weightsync import DistributedWeightSyncScheme
from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.pair_groups import pair_groups
from lightning_weightsync.transports.process_group import (
    RECEIVER_RANK,
    SENDER_RANK,
    ProcessGroupReceiver,
    ProcessGroupSender,
)

_GLOO = pair_groups("gloo", torch.device("cpu"))


class Wire:
    """What is on its way over one pair; broken as soon as one end is."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.broken = False


class _WireSender(ProcessGroupSender):
    def __init__(self, wire: Wire, **kwargs: Any) -> None:
        super().__init__(_GLOO, SENDER_RANK, None, (b"", b""), "", **kwargs)
        self._wire = wire

    def connect(self, deadline: float) -> None:
        pass

    def start(self, operation: str, memory: Tensor) -> Any:
        assert operation == "send"
        if self._wire.broken:
            raise TransferFailed("the wire is broken")
        self._wire.sent.append(memory)
        return self._wire

    def wait(self, work: Any, deadline: float) -> None:
        if work.sent:
            raise TransferFailed("it was not received")

    def close(self) -> None:
        super().close()
        self._wire.broken = True


class _WireReceiver(ProcessGroupReceiver):
    def __init__(self, wire: Wire, **kwargs: Any) -> None:
        super().__init__(_GLOO, RECEIVER_RANK, None, (b"", b""), "", **kwargs)
        self._wire = wire

    def connect(self, deadline: float) -> None:
        pass

    def start(self, operation: str, memory: Tensor) -> Any:
        assert operation == "recv"
        return self._wire, memory

    def wait(self, work: Any, deadline: float) -> None:
        wire, memory = work
        if wire.broken or not wire.sent:
            raise TransferFailed("the wire is broken")
        memory.copy_(wire.sent.popleft())

    def close(self) -> None:
        super().close()
        self._wire.broken = True


class SimulatedScheme(DistributedWeightSyncScheme):
    """A scheme whose pair groups are wires.

    Args:
        wires: Shared by both sides: the wire of each pair, by the pair's name.
        **kwargs: See ``DistributedWeightSyncScheme``.

    Attributes:
        wire: A receiver's.
    """

    def __init__(self, wires: dict[str, Wire], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wires = wires
        self.wire: Wire | None = None

    def create_transport(self, **kwargs: Any) -> Any:
        offer, sends = kwargs["offer"], kwargs.get("link") is not None
        if offer["shared"]:
            return super().create_transport(**kwargs)
        wire = self.wires.setdefault(offer["pair"], Wire())
        if sends:
            return _WireSender(wire, pool=self._pool if offer["only_changed"] else None)
        self.wire = wire
        return _WireReceiver(wire, only_changed=offer["only_changed"])
