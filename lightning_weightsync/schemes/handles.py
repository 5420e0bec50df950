"""How does code that knows no schemes push and receive? Two small handles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict import TensorDict

from lightning_weightsync.schemes.strategy import Weights

if TYPE_CHECKING:
    from lightning_weightsync.schemes.base import WeightSyncScheme


class WeightSender:
    """What ``create_sender`` returns: something that can be told to update, and knows its version."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    @property
    def version(self) -> int:
        """Of the newest push."""
        return self._scheme.version

    def update_weights(self, weights: Weights | None = None) -> None:
        """Push to every worker; see ``WeightSyncScheme.send``."""
        self._scheme.send(weights)


class WeightReceiver:
    """What ``create_receiver`` returns: something that takes what was pushed, and knows its version."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    @property
    def version(self) -> int:
        """Of the weights in force."""
        return self._scheme.version

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Take a push; see ``WeightSyncScheme.receive``."""
        return self._scheme.receive(timeout)
