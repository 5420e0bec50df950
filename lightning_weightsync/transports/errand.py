"""What becomes of one request to one worker? An errand is such a request, and its one answer.

    QUEUED --sent--> SENT --answer--> ANSWERED
      |  |             +--link lost--> FAILED
      |  +--link lost, or deadline---> FAILED
      +--a newer push takes its place-> SUPERSEDED

The ``dispatcher`` runs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from enum import Enum

from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.link import WorkerLink


class ErrandState(Enum):
    """See the module's picture."""

    QUEUED = "queued"
    SENT = "sent"
    ANSWERED = "answered"
    FAILED = "failed"
    SUPERSEDED = "superseded"

    __hash__ = object.__hash__  # Enum's own is a call into Python, for each look into a table


_MOVES = {
    ErrandState.QUEUED: {ErrandState.SENT, ErrandState.FAILED, ErrandState.SUPERSEDED},
    ErrandState.SENT: {ErrandState.ANSWERED, ErrandState.FAILED},
}


class Errand:
    """One request to one worker, and its answer.

    Args:
        link: The worker's link.
        request: Sends it; runs in whichever thread drives.
        expected: Kinds of messages that are an answer.
        phase: What it is about, for errors.
        deadline: On the monotonic clock, in seconds.
        check: Called with the answer before it counts; raises ``ChannelClosed`` if it answers something else.
        settled: Called once, when the state is final, in whichever thread drives; must not block.
        takes_place_of: Whether this errand makes a queued one needless.

    Attributes:
        state: See ``ErrandState``; changed by ``move`` alone.
        reply: The answer, once ``ANSWERED``.
        error: The cause, once ``FAILED``.
        final: Whether the state changes no more.
    """

    def __init__(
        self,
        link: WorkerLink,
        request: Callable[[WorkerLink], None],
        expected: Collection[str],
        *,
        phase: str,
        deadline: float,
        check: Callable[[Message], None] | None = None,
        settled: Callable[[Errand], None] | None = None,
        takes_place_of: Callable[[Errand], bool] | None = None,
    ) -> None:
        self.link = link
        self.request = request
        self.expected = expected
        self.phase = phase
        self.deadline = deadline
        self.check = check
        self.takes_place_of = takes_place_of
        self.state = ErrandState.QUEUED
        self.reply: Message | None = None
        self.error: Exception | None = None
        self.created = time.monotonic()
        self.final = False
        self._settled = settled

    def move(self, state: ErrandState, *, reply: Message | None = None, error: Exception | None = None) -> None:
        """Change the state; tells ``settled`` when it is final."""
        if state not in _MOVES.get(self.state, ()):
            raise RuntimeError(f"an errand cannot go from {self.state.value} to {state.value}")
        self.state = state
        self.reply = reply
        self.error = error
        if state not in _MOVES:
            if self._settled is not None:
                self._settled(self)
            self.final = True  # last: another thread that finds it final must find its consequences too
