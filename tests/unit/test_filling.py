"""Whoever follows a slot that is being written gets every byte of it, in order, and none before it is there."""

import threading
import weakref

import pytest

from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.filling import Filling
from tests.helpers.threads import Call, eventually

SIZE = 1000


class Slot:
    """Bytes that are written in steps, and what is done at certain of them."""

    def __init__(self, step=100, **at):
        self.memory = bytearray(SIZE)
        self.step = step
        self.at = {int(place.removeprefix("at_")): act for place, act in at.items()}
        self.filling = Filling(SIZE, self.copy)

    def copy(self):
        for start in range(0, SIZE, self.step):
            if (act := self.at.pop(start, None)) is not None:
                act()
            self.memory[start : start + self.step] = b"x" * self.step
            yield start + self.step


class Follower:
    """Looks at what it is told of at the moment when it is told."""

    def __init__(self, slot, fails_at=None):
        self.slot = slot
        self.told = []
        self.fails_at = fails_at

    def take(self, there):
        self.told.append(there)
        assert self.slot.memory[:there] == b"x" * there
        if self.fails_at is not None and there >= self.fails_at:
            raise TransferFailed("gone")


def raises(error):
    def act():
        raise error

    return act


def test_one_that_was_there_first_is_told_all_along():
    slot = Slot()
    follower = Follower(slot)
    slot.filling.follow(follower.take)
    slot.filling.run()
    assert follower.told[0] == 0 and follower.told[-1] == SIZE
    assert follower.told == sorted(set(follower.told))


def test_one_that_comes_in_the_middle_and_one_that_comes_afterwards_get_what_is_there():
    waiting, going_on = threading.Event(), threading.Event()
    slot = Slot(at_500=lambda: (waiting.set(), going_on.wait(5.0)))
    writing = Call(slot.filling.run)
    assert waiting.wait(5.0)
    early = Follower(slot)
    slot.filling.follow(early.take)
    eventually(lambda: early.told[-1] == 500)
    assert writing.running
    going_on.set()
    writing.result(5.0)
    assert early.told[-1] == SIZE
    late = Follower(slot)
    slot.filling.follow(late.take)
    assert late.told == [SIZE]


def test_what_the_copy_raises_is_raised_and_nobody_is_told_of_more_than_there_is():
    slot = Slot(at_500=raises(ValueError("no such leaf")))
    follower = Follower(slot)
    slot.filling.follow(follower.take)
    with pytest.raises(ValueError, match="no such leaf"):
        slot.filling.run()
    assert follower.told[-1] <= 500


def test_a_writing_that_was_interrupted_can_be_made_up_for():
    slot = Slot(at_500=raises(KeyboardInterrupt()))
    follower = Follower(slot)
    slot.filling.follow(follower.take)
    with pytest.raises(KeyboardInterrupt):
        slot.filling.run()
    slot.filling.run()
    assert follower.told[-1] == SIZE
    assert follower.told == sorted(set(follower.told))


def test_one_whose_connection_breaks_is_told_no_more_and_the_others_are():
    slot = Slot()
    broken, other = Follower(slot, fails_at=1), Follower(slot)
    for follower in (broken, other):
        slot.filling.follow(follower.take)
    slot.filling.run()
    assert len(broken.told) == 2
    assert other.told[-1] == SIZE
    with pytest.raises(TransferFailed):
        slot.filling.follow(broken.take)


def test_nothing_is_left_running():
    before = threading.active_count()
    Slot().filling.run()
    assert threading.active_count() == before


def test_many_who_come_at_any_time():
    slot = Slot(step=1)
    followers = [Follower(slot) for _ in range(50)]
    calls = [Call(slot.filling.follow, follower.take) for follower in followers[:25]]
    writing = Call(slot.filling.run)
    calls += [Call(slot.filling.follow, follower.take) for follower in followers[25:]]
    for call in [*calls, writing]:
        call.result(5.0)
    for follower in followers:
        assert follower.told[-1] == SIZE
        assert follower.told == sorted(set(follower.told))


def test_what_was_copied_and_who_has_followed_are_let_go_with_the_last_byte():
    slot = Slot()
    weights, follower = weakref.ref(slot), Follower(slot)
    slot.filling.follow(follower.take)
    slot.filling.run()
    filling, slot.filling = slot.filling, None
    del slot, follower
    assert weights() is None  # without a collection of cycles
    filling.run()
    late = []
    filling.follow(late.append)
    assert late == [SIZE]
