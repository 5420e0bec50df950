"""How do the two ends of a process group find each other without a store? Over a channel of theirs.

``torch.distributed`` builds a group around a key-value store. Its own one is a server that anybody who reaches its port
may read, fill and overwrite, for as long as the group lives. The two ends of a pair have an authenticated channel
already, and need to tell each other one address each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from lightning_weightsync.transports.base import TransferFailed

_NCCL_IDENTIFIER = 128  # bytes of an ncclUniqueId

Addresses = Mapping[str, bytes]
"""What one end has set, by key: where it listens, or the identifier of an NCCL group."""

Exchange = Callable[[Addresses, float], Addresses]
"""``exchange(ours, deadline)`` gives our addresses to the other end and returns its own; blocks on it.

Raises ``TransferFailed`` or a ``TimeoutError`` if the other end is gone or late (monotonic clock, seconds).
"""


def to_text(addresses: Addresses) -> dict[str, str]:
    """Addresses as the control channel carries them."""
    return {key: value.hex() for key, value in addresses.items()}


def from_text(addresses: Mapping[str, object]) -> Addresses:
    """Addresses that came over the control channel.

    Raises:
        TransferFailed: They are none.
    """
    try:
        return {key: bytes.fromhex(value) for key, value in addresses.items()}  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TransferFailed(f"the other end told something that is no address: {error}") from error


class Meeting(Store):
    """One end's view of what both have set. The other end's addresses are fetched at the first look at one of them.

    Args:
        exchange: Swaps the two ends' addresses; called once.
        deadline: On the monotonic clock, in seconds.
    """

    def __init__(self, exchange: Exchange, deadline: float) -> None:
        super().__init__()
        self._exchange = exchange
        self._deadline = deadline
        self._ours: dict[str, bytes] = {}
        self._theirs: Addresses | None = None

    @property
    def published(self) -> bytes:
        """Everything that this end has set."""
        return b"".join(self._ours.values())

    def set(self, key: str, value: str | bytes) -> None:
        """Called by the group, before it looks at anything of the other end."""
        self._ours[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Called by the group; blocks until the other end has told its addresses."""
        if key in self._ours:
            return self._ours[key]
        if self._theirs is None:
            self._theirs = self._exchange(dict(self._ours), self._deadline)
        if key not in self._theirs:
            raise TransferFailed(f"the other end did not tell {key!r}, but {sorted(self._theirs)}")
        return self._theirs[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these are known; asks nobody."""
        return all(key in self._ours or key in (self._theirs or ()) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Called by the group, before each ``get``."""
        for key in keys:
            self.get(key)


class LateMeeting(Meeting):
    """The ends of an NCCL group: one makes an identifier with its first transfer, the other asks for it.

    So the addresses are swapped when the identifier is set, or asked for.
    """

    def set(self, key: str, value: str | bytes) -> None:
        """Called by the group; blocks until the other end has asked, if it is the identifier."""
        super().set(key, value)
        if self._theirs is None and len(self._ours[key]) == _NCCL_IDENTIFIER:
            self._theirs = self._exchange(dict(self._ours), self._deadline)
