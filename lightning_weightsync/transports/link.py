"""What does the sender know about one worker? Its link: channel, generation, and the (run, version) it has applied.

A link is made by the rendezvous, and ends once; a worker that comes back gets another one.

    OPEN --channel ends, silence, deadline, torn transfer, replaced--> BROKEN
      +--the sender ends it in good order----------------------------> CLOSED
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_weightsync.transports.board import SenderBoard
from lightning_weightsync.transports.posting import PostingChannel


class LinkState(Enum):
    """See the module's picture."""

    OPEN = "open"
    BROKEN = "broken"
    CLOSED = "closed"


_MOVES: Mapping[LinkState, frozenset[LinkState]] = {
    LinkState.OPEN: frozenset({LinkState.BROKEN, LinkState.CLOSED}),
    LinkState.BROKEN: frozenset(),
    LinkState.CLOSED: frozenset(),
}


@dataclass
class WorkerLink:
    """The sender's end of the connection to one worker.

    Attributes:
        worker_idx: 0-based.
        pid: The worker's process id, as it said itself.
        channel: Announcements, acknowledgements, errors, heartbeats.
        local: Whether descriptors can be handed to it: it runs on this host, as this user.
        generation: Which replacement of this index it is, from 0.
        board: Shared with it, where it can be switched in its sleep (``at_rest``).
        run: Run of the weights that the worker has applied.
        version: Version of the weights that the worker has applied.
        values: The schedule values that came with them: the hub's own mapping, which is never changed.
        state: See ``LinkState``; changed by ``end`` alone.
        cause: Why it is ``BROKEN``.
    """

    worker_idx: int
    pid: int
    channel: PostingChannel
    generation: int
    local: bool = False
    board: SenderBoard | None = None
    run: int = -1
    version: int = -1
    values: Mapping[str, Any] | None = None
    state: LinkState = LinkState.OPEN
    cause: Exception | None = None
    _on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What errors call the worker."""
        return f"worker {self.worker_idx} (pid {self.pid})"

    def when_ended(self, release: Callable[[], None]) -> None:
        """Have ``release`` called once when the link ends: what a scheme holds for this worker goes with it."""
        if self.state is LinkState.OPEN:
            self._on_end.append(release)
        else:
            release()

    def end(self, cause: Exception | None = None) -> None:
        """Close the channel and release what hangs on it: ``BROKEN`` with a cause, ``CLOSED`` without. Idempotent."""
        state = LinkState.CLOSED if cause is None else LinkState.BROKEN
        if state not in _MOVES[self.state]:  # it has ended already
            return
        self.state = state
        self.cause = cause
        self.channel.close()
        board, self.board = self.board, None
        if board is not None:
            board.close()
        for release in self._on_end:
            release()
        self._on_end.clear()


def silent_for(seconds: float) -> TimeoutError:
    """Why a link is given up whose worker has not been heard for longer than ``heartbeat_timeout``."""
    return TimeoutError(f"silent for {seconds:.1f} s (heartbeat_timeout)")
