"""How might the protocol be broken? Each function breaks one promise, by changing one place of the real code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_weightsync.schemes import requests
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.newest import Newest, NewestWeights
from lightning_weightsync.schemes.receiver import ReceiverLink
from lightning_weightsync.schemes.requests import Requests
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.transaction import Transaction
from lightning_weightsync.transports.control import ControlChannel
from lightning_weightsync.transports.dispatcher import Dispatcher
from lightning_weightsync.transports.errand import Errand
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.pushing import Delivery
from lightning_weightsync.transports.shared_memory import SharedMemoryTransport
from lightning_weightsync.transports.slots import SlotPool


def slot_is_free_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    """The sender takes what it has sent for received."""
    send = Delivery._send

    def send_and_release(self: Delivery, link: WorkerLink) -> None:
        send(self, link)
        for payload in self._payloads:
            payload.pool.release(payload.slot, self)

    patch.setattr(Delivery, "_send", send_and_release)


def slot_in_force_is_free(patch: pytest.MonkeyPatch) -> None:
    """The sender forgets that a worker goes on viewing what it has applied."""
    patch.setattr(SharedMemoryTransport, "settled", lambda *args, **kwargs: None)


def slot_of_a_lost_worker_is_used_again(patch: pytest.MonkeyPatch) -> None:
    """The sender takes a worker that it has given up for dead."""

    def discard(self: SlotPool, holder: Any) -> None:
        for slot in self._slots.values():
            slot.holders.discard(holder)

    patch.setattr(SlotPool, "retire_all", discard)


def slot_of_a_lost_worker_is_never_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "retire_all", lambda self, holder: None)


def push_is_applied_although_it_was_given_up(patch: pytest.MonkeyPatch) -> None:
    """The receiver does not look whether the sender is still there."""
    patch.setattr(ReceiverLink, "check_wanted", lambda self: None)


def older_version_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requests, "check_newer", lambda *args, **kwargs: None)


class _Mute:
    def __init__(self, channel: ControlChannel) -> None:
        self.close = channel.close

    def send(self, kind: str, **fields: Any) -> None:
        pass


def answer_comes_before_the_switch(patch: pytest.MonkeyPatch) -> None:
    """The receiver says "applied" as soon as it has the bytes."""
    push = Requests._push

    def answer_first(self: Requests, channel: ControlChannel, message: Any) -> None:
        channel.send("applied", run=message["run"], version=message["version"], digests={})
        push(self, _Mute(channel), message)  # type: ignore[arg-type]

    patch.setattr(Requests, "_push", answer_first)


def failed_push_is_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedModel, "roll_back", lambda self: None)


def switch_does_not_wait_for_readers(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def alone(self: Gate, *args: Any) -> Iterator[None]:
        yield

    patch.setattr(Gate, "alone", alone)


def values_come_before_the_weights(patch: pytest.MonkeyPatch) -> None:
    stage = Transaction.stage

    def stage_and_serve(self: Transaction, staged: Any) -> None:
        stage(self, staged)
        self._gate.values = self.values

    patch.setattr(Transaction, "stage", stage_and_serve)


def newer_push_of_another_model_takes_the_place(patch: pytest.MonkeyPatch) -> None:
    def takes_place_of(self: Delivery, older: Errand) -> bool:
        return bool(getattr(older.request, "__self__", self)._replaceable)

    patch.setattr(Delivery, "_takes_place_of", takes_place_of)


def queued_push_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_give_up_queued", lambda self, errand: None)


def replacement_starts_from_what_another_worker_was_pushed(patch: pytest.MonkeyPatch) -> None:
    def newest_of_all(self: NewestWeights, worker_idx: int) -> Newest | None:
        return max(self._kept.values(), key=lambda kept: kept.version, default=None)

    patch.setattr(NewestWeights, "of", newest_of_all)


def silent_worker_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    original = Dispatcher.__init__

    def patient(self: Dispatcher, heartbeat_timeout: float, lose: Any) -> None:
        original(self, 1e9, lose)

    patch.setattr(Dispatcher, "__init__", patient)


MUTANTS = [
    slot_is_free_before_the_answer,
    slot_in_force_is_free,
    slot_of_a_lost_worker_is_used_again,
    slot_of_a_lost_worker_is_never_given_up,
    push_is_applied_although_it_was_given_up,
    older_version_is_taken,
    answer_comes_before_the_switch,
    failed_push_is_not_rolled_back,
    switch_does_not_wait_for_readers,
    values_come_before_the_weights,
    newer_push_of_another_model_takes_the_place,
    queued_push_has_no_deadline,
    replacement_starts_from_what_another_worker_was_pushed,
    silent_worker_is_waited_for,
]
