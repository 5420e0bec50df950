"""What must a way of moving bytes be able to do? A transport moves flat slots between a sender and one worker.

It knows nothing of models, versions or collectors. It transfers or it raises; it never becomes a no-op.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

Ticket = Mapping[str, int]
"""What the announcement of a transfer must tell the receiver, besides the size: transport-specific integers."""


class TransferFailed(ConnectionError):
    """A transfer broke or missed its deadline; the transport cannot be used again."""


@runtime_checkable
class TransportBackend(Protocol):
    """One end of the way that slots take from a sender to one worker.

    Deadlines are on the monotonic clock, in seconds. Slots are contiguous, 1-dimensional uint8 tensors whose size both
    ends have agreed on before.
    """

    def connect(self, deadline: float) -> None:
        """Meet the other end, which must be doing the same; blocks.

        Raises:
            TransferFailed: The other end did not come in time.
        """
        ...

    def send(self, slot: Tensor) -> Ticket:
        """Start sending; does not block. The slot must stay as it is until ``finish`` has returned.

        Raises:
            TransferFailed: The connection is gone.
        """
        ...

    def finish(self, deadline: float) -> None:
        """Wait until the last ``send`` no longer needs its slot.

        Raises:
            TransferFailed: It did not end in time, or the connection is gone.
        """
        ...

    def receive(self, slot: Tensor, ticket: Ticket, deadline: float) -> None:
        """Fill the slot with the transfer that was announced with this ticket; blocks.

        Raises:
            TransferFailed: It did not arrive in time, or the connection is gone.
        """
        ...

    def close(self) -> None:
        """Give everything back, transfers under way included. Idempotent, does not block on the other end."""
        ...
