"""The two ends of a push in one process: a source that is read into slots, and a model that is staged from them."""

from __future__ import annotations

import os
from typing import Any

from lightning_weightsync.schemes.extra_state import unpack
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import Weights, WeightStrategy
from lightning_weightsync.schemes.transaction import Staged
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.slots import SlotPool


class Destination(StagedModel):
    """A live model, bound to a sender's layout; ``fill`` is what the sender and the transport do.

    Args:
        target: The live model.
        source: What the sender connected with; left out, the target itself.
        strategy: Of both sides.
        asked: Whether the sender is strict.
    """

    def __init__(
        self,
        target: Weights,
        source: Weights | None = None,
        strategy: WeightStrategy | None = None,
        *,
        model_id: str = "policy",
        strict: bool = True,
        asked: bool | None = None,
        may_switch: bool = False,
    ) -> None:
        strategy = WeightStrategy() if strategy is None else strategy
        super().__init__(model_id, target, strategy, strict=strict, may_switch=may_switch)
        self.source = Source(model_id, target if source is None else source, strategy)
        self.filled: Staged | None = None
        self._pool = SlotPool(self.source.layout, max_slots=3, shared=True)
        self._in_force: Any = None
        self.bind(self.source.layout, extra_keys=self.source.extra_keys, strict=asked)

    def fill(self, weights: Weights | None = None) -> Staged:
        """Put weights into a slot that is not in force."""
        slot = self._pool.try_acquire("filled")
        assert slot is not None
        extra = self.source.read(slot, weights)
        self._slot = slot
        self.filled = Staged(self, SlotMemory(slot.memory, os.dup(slot.descriptor)), unpack(extra))
        return self.filled

    def apply_filled(self, *, keep_backup: bool) -> None:
        """``apply`` what was filled last."""
        assert self.filled is not None
        self.apply(self.filled.slot, self.filled.extra, keep_backup=keep_backup)

    def keep(self) -> None:
        """The slot that was filled last is in force: what was in force before may be written again."""
        super().keep()
        self._pool.hold_only(self._slot, "in force")
        self._pool.hold_only(self._slot, "filled")
        self._pool.release(self._slot, "filled")

    def push(self, weights: Weights | None = None, *, keep_backup: bool = False) -> None:
        """The whole way, with no gate."""
        self.fill(weights)
        self.apply_filled(keep_backup=keep_backup)
        self.keep()
