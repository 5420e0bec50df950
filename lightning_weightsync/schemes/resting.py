"""What does a worker make of a version that came while it slept? The receiver's part of ``transports.at_rest``.

The sender has written the slot that this worker has mapped, and a number on the board. The first policy call after
that finds the number, and makes up for what a switch does besides.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.transports.board import WorkerBoard

_MOMENT = 0.0002
_PATIENCE = 0.1


class Resting:
    """Stands for the sender in the worker's gate; see ``schemes.gate.OutsideWriter``.

    Args:
        board: Shared with the sender.
        gate: Of the worker's context.
        models: Those that the sender pushes, as of now.

    Attributes:
        ended: Whether the sender is gone, or this end was shut down.
        left: Then, the modules whose weights are a mixture.
    """

    def __init__(self, board: WorkerBoard, gate: Gate, models: Callable[[], Iterable[StagedModel]]) -> None:
        self.ended = False
        self.left: Sequence[weakref.ref[nn.Module]] = ()
        self._board = board
        self._gate = gate
        self._models = models
        self._followed = -1
        self._has_gradients = False
        self._offering = threading.Lock()

    @property
    def version(self) -> int:
        """Which version is in force."""
        return self._board.version

    @version.setter
    def version(self, version: int) -> None:
        self._board.version = self._followed = version

    @property
    def is_mixed(self) -> bool:
        """Whether the weights are a mixture of two versions, and wait for a push that makes them whole."""
        return self._board.is_mixed

    def offer(self) -> None:
        """Weights have been applied, and are whole: from now on the sender may write them again where that is all."""
        with self._offering:
            self._board.make_whole()
            ranges = [model.range_at_rest for model in self._models()]
            known = [found for found in ranges if found is not None]
            self._board.offer(known if len(known) == len(ranges) and not self._has_gradients else None)

    def withdraw(self) -> None:
        """Until it has pushed once more, and weights are offered again, the sender may not write here."""
        with self._offering:
            self._board.offer(None)

    def end(self) -> None:
        """The sender is gone, or does not count any more. Weights that are mixed stay closed to policy calls."""
        self.ended = True
        self.withdraw()
        deadline = time.monotonic() + _PATIENCE
        while not self._board.lock() and time.monotonic() < deadline:
            time.sleep(_MOMENT)  # it was about to write when it was withdrawn
        if self._board.is_mixed:
            self.left = [weakref.ref(model.target) for model in self._models() if isinstance(model.target, nn.Module)]
            self._models = tuple
        else:
            newer = self.newer_version()
            if newer is not None:
                self._gate.version = newer
            self._gate.disconnect(self)
        self._board.close()

    def covers(self, other: Resting) -> bool:
        """Whether this sender pushes everything that another one has left as a mixture."""
        left = {id(target) for reference in other.left if (target := reference()) is not None}
        return left <= {id(model.target) for model in self._models()}

    def keep_out(self) -> bool:
        """See ``OutsideWriter``."""
        return self._board.lock()

    def let_in(self) -> None:
        """See ``OutsideWriter``."""
        self._board.unlock()

    def is_whole(self) -> bool:
        """See ``OutsideWriter``."""
        if not self._board.is_mixed:
            return True
        if not self.ended:
            return False
        if any(reference() is not None for reference in self.left):
            raise WeightSyncError("the sender ended while it wrote the weights, which are a mixture: connect again")
        return True

    def catch_up(self) -> None:
        """See ``OutsideWriter``."""
        version = self._board.version
        if version == self._followed or self._board.is_mixed:
            return
        moved = False
        fits = True
        for model in self._models():
            try:
                moved |= model.follow()
            except Exception:
                self.withdraw()  # the next push is a message: its sender is told
                fits = False
                if not model.shows_slot:
                    raise
        self._followed = version
        self._gate.version = version
        if moved and fits:
            self.offer()

    def newer_version(self) -> int | None:
        """See ``OutsideWriter``."""
        version = self._board.version
        return version if version != self._followed else None

    def gradients_recorded(self) -> None:
        """See ``OutsideWriter``."""
        if not self._has_gradients:
            self._has_gradients = True
            self.withdraw()
