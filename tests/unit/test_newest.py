"""The newest snapshot stays for whoever joins next, and is the first to give way."""

import pytest
import torch

from lightning_weightsync.schemes.newest import NEWCOMERS, Newest, NewestWeights
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.slots import SlotPool

LAYOUT = WeightLayout.of({"w": torch.zeros(8)})


@pytest.fixture
def pool():
    pool = SlotPool(LAYOUT, 3, shared=False)
    yield pool
    pool.close()


def take(pool, holder="writer"):
    slot = pool.try_acquire(holder)
    assert slot is not None
    return slot


def pushed(slot, extra=b"", version=1):
    return Newest(slot, extra, version)


def test_it_is_held_until_a_newer_one_is_kept_for_the_same_workers(pool):
    newest = NewestWeights(pool)
    assert newest.of(0) is None
    first, second = take(pool), take(pool)
    newest.keep(range(2), pushed(first, b"a", 1))
    assert newest.of(0) == newest.of(1) == (first, b"a", 1)
    newest.keep(range(2), pushed(second, b"b", 2))
    for slot in (first, second):
        pool.release(slot, "writer")
    assert newest.of(1) == (second, b"b", 2)
    assert (first.holders, second.holders) == (set(), {newest})


def test_workers_that_get_weights_of_their_own_have_a_newest_of_their_own(pool):
    newest = NewestWeights(pool)
    common, own = take(pool), take(pool)
    newest.keep(range(3), pushed(common, version=1))
    newest.keep([1], pushed(own, b"own", 2))
    assert [newest.of(index)[0] for index in range(3)] == [common, own, common]
    assert [newest.of(index)[2] for index in range(3)] == [1, 2, 1]
    newest.keep([0, 2], pushed(own))
    assert common.holders == {"writer"}


def test_keeping_one_again_keeps_it(pool):
    newest = NewestWeights(pool)
    slot = take(pool)
    newest.keep([0], pushed(slot, b"a"))
    newest.keep([0], pushed(slot, b"b"))
    pool.release(slot, "writer")
    assert newest.of(0) == (slot, b"b", 1) and slot.holders == {newest}


def test_workers_that_are_added_start_from_what_was_meant_for_all(pool):
    newest = NewestWeights(pool)
    newest.add([1])
    assert newest.of(1) is None  # nothing was
    common, own = take(pool), take(pool)
    newest.keep([0, NEWCOMERS], pushed(common, version=1))
    newest.keep([0], pushed(own, version=2))
    newest.add([1, 2])
    assert [newest.of(index)[0] for index in range(3)] == [own, common, common]
    pool.release(common, "writer")
    assert common.holders == {newest}
    newest.drop([1, 2])
    assert newest.of(2) is None and common.holders == {newest}  # more may come


def test_one_that_nobody_can_start_from_is_let_go(pool):
    newest = NewestWeights(pool)
    whole, broken = take(pool), take(pool)
    newest.keep([0, 1, NEWCOMERS], pushed(whole, version=1))
    newest.keep([1, NEWCOMERS], pushed(broken, version=2))
    newest.discard(broken)
    assert newest.of(0) == (whole, b"", 1) and newest.of(1) is None
    newest.add([2])
    assert newest.of(2) is None
    assert broken.holders == {"writer"}


def test_it_gives_way_where_nobody_else_needs_it(pool):
    newest = NewestWeights(pool)
    slot = take(pool)
    newest.keep(range(2), pushed(slot))
    assert not newest.give_way()  # it would help nobody: the writer still has it
    pool.release(slot, "writer")
    assert newest.give_way()
    assert newest.of(0) is newest.of(1) is None
    assert slot.holders == set()
    assert not newest.give_way()


def test_the_oldest_one_gives_way_first(pool):
    newest = NewestWeights(pool)
    old, new = take(pool), take(pool)
    newest.keep([0], pushed(new, version=2))
    newest.keep([1], pushed(old, version=1))
    for slot in (old, new):
        pool.release(slot, "writer")
    assert newest.give_way()
    assert newest.of(1) is None and newest.of(0) == (new, b"", 2)


def test_a_retired_one_stays_to_the_last_and_is_disposed_of_then(pool):
    newest = NewestWeights(pool)
    slot, next_one = take(pool, "a worker that dies"), take(pool)
    newest.keep([0], pushed(slot))
    pool.retire_all("a worker that dies")
    assert slot.retired and len(pool) == 2
    assert not newest.give_way()  # nobody may write it any more
    assert newest.of(0) == (slot, b"", 1)
    newest.keep([0], pushed(next_one))
    assert len(pool) == 1
