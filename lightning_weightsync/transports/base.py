"""What must a way of moving bytes be able to do? A transport gets slots from a sender to its workers.

It knows nothing of models, versions or collectors. It transfers or it raises; it never becomes a no-op. The two ends
are separate protocols, and separate classes where they are implemented: neither uses the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from lightning_weightsync.transports.memory import SlotMemory
    from lightning_weightsync.transports.slots import Slot

Ticket = Mapping[str, Any]
"""What the announcement of a transfer must tell the receiver, besides the slot's size: plain JSON.

``nbytes`` is how many bytes move, where these are not all. ``inline``: the slot's bytes follow in the announcement
itself, after the model's extra state; ``stage`` finds them in its place. Everything else is specific to the transport.
"""


class TransferFailed(ConnectionError):
    """A transfer broke or missed its deadline; the transport cannot be used again."""


@runtime_checkable
class TransportBackend(Protocol):
    """What both ends can do. Deadlines are on the monotonic clock, in seconds."""

    def connect(self, deadline: float) -> None:
        """Meet the other end, which must be doing the same; blocks.

        Raises:
            TransferFailed: The other end did not come in time.
        """
        ...

    def close(self) -> None:
        """Give everything back, transfers under way included. Idempotent, does not block on the other end."""
        ...


@runtime_checkable
class SenderTransport(TransportBackend, Protocol):
    """The sender's end, to one worker or to several.

    Attributes:
        follows: Whether ``send`` takes a slot that is still being written (``slot.filling``).
    """

    follows: bool

    def send(self, worker_idx: int, slot: Slot) -> Ticket:
        """Start the transfer to one worker; does not block. The slot stays as it is until ``settled``.

        Raises:
            TransferFailed: The connection is gone.
        """
        ...

    def settled(self, worker_idx: int, slot: Slot, *, applied: bool) -> None:
        """The worker has answered, so it has read what it was sent.

        Raises:
            TransferFailed: The transfer did not end with it.
        """
        ...


@runtime_checkable
class ReceiverTransport(TransportBackend, Protocol):
    """The worker's end."""

    def stage(self, ticket: Ticket, nbytes: int, deadline: float) -> SlotMemory:
        """The slot (``nbytes`` long) with the transfer that this ticket announced; blocks until it is there.

        Raises:
            TransferFailed: It did not arrive in time, or the connection is gone.
        """
        ...

    def entered(self, slot: SlotMemory, *, held: bool) -> None:
        """The staged slot was applied; ``held``: it is where the weights live, until another one is."""
        ...
