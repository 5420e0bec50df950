"""When does a push count? All of its models are switched under one gate, or none is.

    ANNOUNCED --staged()--> STAGED --commit()--> APPLIED
        |                      |
        +------ abort() -------+----------------> ABORTED

``APPLIED`` and ``ABORTED`` are final: a push that was reported as failed is never applied later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from lightning_weightsync.errors import StaleVersionError, WeightSyncTimeout
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.transports.memory import SlotMemory


class TransactionState(Enum):
    """See the module's picture."""

    ANNOUNCED = "announced"
    STAGED = "staged"
    APPLIED = "applied"
    ABORTED = "aborted"

    __hash__ = object.__hash__  # see ErrandState


_MOVES: Mapping[TransactionState, frozenset[TransactionState]] = {
    TransactionState.ANNOUNCED: frozenset({TransactionState.STAGED, TransactionState.ABORTED}),
    TransactionState.STAGED: frozenset({TransactionState.APPLIED, TransactionState.ABORTED}),
    TransactionState.APPLIED: frozenset(),
    TransactionState.ABORTED: frozenset(),
}


@dataclass(slots=True)
class Staged:
    """One model of a push: where its bytes are, its extra state, and whether to say what was applied."""

    model: StagedModel
    slot: SlotMemory
    extra: dict[str, Any]
    verify: bool = False


class Origin(Protocol):
    """Where a push comes from: it is given the version together with the gate, and may call the push off."""

    run: int
    version: int

    def check_wanted(self) -> None:
        """Raise if nobody waits for the push any more: it has been reported as failed."""
        ...

    def offer_rest(self) -> None:
        """The push is in force, and the gate was left."""
        ...

    @property
    def is_mixed(self) -> bool:
        """Whether the weights are a mixture of two versions, which an interrupted push has left."""
        ...

    def take_board(self, descriptor: int) -> None:
        """The sender shares a page of memory; the descriptor is closed afterwards."""
        ...


class Transaction:
    """One version of one or several models, on its way into one receiver.

    Args:
        gate: Of the receiver's context.
        run: Run of the sender.
        version: Version of the push.
        deadline: On the monotonic clock, in seconds; nothing is applied after it.
        origin: The link that the push came over; ``None`` where it comes from this process.
        values: The schedule values that come into force with it.
    """

    def __init__(
        self,
        gate: Gate,
        run: int,
        version: int,
        deadline: float,
        origin: Origin | None = None,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.staged: Sequence[Staged] = ()
        self.run = run
        self.version = version
        self.deadline = deadline
        self.values = values
        self.state = TransactionState.ANNOUNCED
        self.error: BaseException | None = None
        self.digests: dict[str, str] = {}
        self._gate = gate
        self._check_wanted = origin.check_wanted if origin is not None else _always_wanted
        self._holders: list[Gate | Origin] = [gate] if origin is None else [gate, origin]
        self._committing = threading.Lock()

    def stage(self, staged: Sequence[Staged]) -> None:
        """Every byte of every model is in its slot."""
        self.staged = staged
        self._move(TransactionState.STAGED)

    def abort(self, error: BaseException) -> None:
        """Give the push up; it is never applied."""
        self._move(TransactionState.ABORTED)
        self.error = error

    def commit(self) -> bool:
        """Switch all models, in the calling thread, alone in the gate; may be called by several threads at once.

        Returns:
            Whether this call is the one that switched; ``False`` if another thread has, or the push was aborted.

        Raises:
            RuntimeError: The calling thread is inside the gate.
            WeightSyncTimeout: The deadline passed before the gate was free; the push is aborted.
            ChannelClosed: The sender has given the push up, or has gone; the push is aborted.
            Exception: What applying or an applied hook raised; every model was rolled back, the push is aborted.
        """
        if self._gate.inside:
            raise RuntimeError("weights cannot be switched from inside the gate: leave `with gate:` first")
        with self._committing:
            if self.state is not TransactionState.STAGED:
                return False
            try:
                with self._gate.alone(self.deadline, self._check_wanted):
                    self._check_in_time()
                    if self.state is not TransactionState.STAGED:  # aborted while it waited for the gate
                        return False
                    self._switch()
                    self._move(TransactionState.APPLIED)
            except BaseException as error:
                if self.state is TransactionState.STAGED:
                    self.abort(error)
                raise
            return True

    def _check_in_time(self) -> None:
        self._check_wanted()
        if time.monotonic() >= self.deadline:
            raise WeightSyncTimeout("the deadline passed before the staged weights were applied")

    def _switch(self) -> None:
        before = [(holder.run, holder.version) for holder in self._holders]
        values_before = self._gate.values
        touched: list[StagedModel] = []
        try:
            for one in self.staged:
                touched.append(one.model)
                one.model.apply(one.slot, one.extra, keep_backup=len(self.staged) > 1 or one.verify)
                if one.verify:
                    self.digests[one.model.model_id] = one.model.digest_of_applied(one.slot)
            for holder in self._holders:
                holder.run, holder.version = self.run, self.version
            self._gate.values = self.values
            for model in touched:
                for hook in model.applied_hooks:
                    hook(model.target, self.version)
            if any(model.applied_hooks for model in touched):  # they may have taken longer than anybody has waited
                self._check_in_time()
        except BaseException:
            for model in reversed(touched):
                model.roll_back()
            for holder, (run, version) in zip(self._holders, before, strict=True):
                holder.run, holder.version = run, version
            self._gate.values = values_before
            raise
        for model in touched:
            model.keep()

    def _move(self, state: TransactionState) -> None:
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"a push cannot go from {self.state.value} to {state.value}")
        self.state = state


def _always_wanted() -> None:
    pass


def check_newer(applied: tuple[int, int], offered: tuple[int, int], *, initial: bool) -> None:
    """Refuse a (run, version) that is not newer than what is in force; the first one after connecting may be equal.

    Raises:
        StaleVersionError: It is older (or, unless ``initial``, equal).
    """
    if offered < applied or (offered == applied and not initial):
        raise StaleVersionError(
            f"(run, version) = {offered} was offered, and {applied} is in force: weights never go backwards"
        )
