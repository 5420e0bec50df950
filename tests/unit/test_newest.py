"""The newest snapshot stays for whoever joins next, and is the first to give way."""

import pytest
import torch

from lightning_weightsync.schemes.newest import NewestWeights
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


def test_it_is_held_until_a_newer_one_is_kept_for_the_same_workers(pool):
    newest = NewestWeights(pool)
    assert newest.of(0) is None
    first, second = take(pool), take(pool)
    newest.keep(range(2), first, b"a")
    assert newest.of(0) == newest.of(1) == (first, b"a")
    newest.keep(range(2), second, b"b")
    for slot in (first, second):
        pool.release(slot, "writer")
    assert newest.of(1) == (second, b"b")
    assert (first.holders, second.holders) == (set(), {newest})


def test_workers_that_get_weights_of_their_own_have_a_newest_of_their_own(pool):
    newest = NewestWeights(pool)
    common, own = take(pool), take(pool)
    newest.keep(range(3), common, b"")
    newest.keep([1], own, b"own")
    assert [newest.of(index)[0] for index in range(3)] == [common, own, common]
    newest.keep([0, 2], own, b"")
    assert common.holders == {"writer"}


def test_keeping_one_again_keeps_it(pool):
    newest = NewestWeights(pool)
    slot = take(pool)
    newest.keep([0], slot, b"a")
    newest.keep([0], slot, b"b")
    pool.release(slot, "writer")
    assert newest.of(0) == (slot, b"b") and slot.holders == {newest}


def test_it_gives_way_where_nobody_else_needs_it(pool):
    newest = NewestWeights(pool)
    slot = take(pool)
    newest.keep(range(2), slot, b"")
    assert not newest.give_way()  # it would help nobody: the writer still has it
    pool.release(slot, "writer")
    assert newest.give_way()
    assert newest.of(0) is newest.of(1) is None
    assert slot.holders == set()
    assert not newest.give_way()


def test_a_retired_one_stays_to_the_last_and_is_disposed_of_then(pool):
    newest = NewestWeights(pool)
    slot, next_one = take(pool, "a worker that dies"), take(pool)
    newest.keep([0], slot, b"")
    pool.retire_all("a worker that dies")
    assert slot.retired and len(pool) == 2
    assert not newest.give_way()  # nobody may write it any more
    assert newest.of(0) == (slot, b"")
    newest.keep([0], next_one, b"")
    assert len(pool) == 1
