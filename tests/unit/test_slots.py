"""Slots are rewritten only when nobody holds them."""

import errno
import os
import threading
import weakref
from functools import partial

import pytest
import torch

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.transports import slots
from lightning_weightsync.transports.filling import Filling
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.slots import SlotPool
from tests.helpers.sockets import num_descriptors

LAYOUT = WeightLayout.of({"a": torch.zeros(3), "b": torch.tensor(0)})


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def make(request):
    pools = []

    def pool(max_slots=3, layout=LAYOUT):
        pools.append(SlotPool(layout, max_slots, shared=request.param))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()


def indices(pool, count):
    """Of as many slots as can be had, up to ``count``; they stay held."""
    slots = [pool.try_acquire(f"taker {number}") for number in range(count)]
    return [slot.index for slot in slots if slot is not None]


def test_a_slot_is_flat_bytes_with_a_view_for_each_leaf(make):
    slot = make().try_acquire("writer")
    assert (slot.memory.dtype, slot.memory.shape) == (torch.uint8, (LAYOUT.nbytes,))
    slot.memory.zero_()
    slot.views[0].fill_(1.5)
    slot.views[1].fill_(-1)
    assert LAYOUT.views(slot.memory)["a"].tolist() == [1.5] * 3
    assert slot.memory[64:72].tolist() == [255] * 8


def test_a_shared_slot_is_a_file_of_its_size_and_a_private_one_has_none(make):
    pool = make()
    slot = pool.try_acquire("writer")
    if not pool.shared:
        assert slot.descriptor == -1
        return
    slot.memory.fill_(7)
    assert os.pread(slot.descriptor, 1000, 0) == bytes([7]) * LAYOUT.nbytes


def test_slots_are_made_when_they_are_needed_and_never_more_than_allowed(make):
    pool = make(max_slots=3)
    assert len(pool) == 0
    assert indices(pool, 5) == [0, 1, 2]
    assert len(pool) == 3
    assert pool.try_acquire("one too many") is None


def test_with_one_slot_it_is_had_by_one_at_a_time(make):
    pool = make(max_slots=1)
    slot = pool.try_acquire("first")
    assert pool.try_acquire("second") is None
    pool.release(slot, "first")
    assert pool.try_acquire("second") is slot


def test_a_slot_that_was_given_back_is_used_again_before_another_is_made(make):
    pool = make()
    first = pool.try_acquire("writer")
    pool.release(first, "writer")
    assert pool.try_acquire("writer") is first
    assert len(pool) == 1


def test_a_slot_is_free_when_the_last_of_its_holders_has_let_go(make):
    pool = make(max_slots=1)
    slot = pool.try_acquire("writer")
    for worker in range(3):
        pool.hold(slot, worker)
    pool.release(slot, "writer")
    for worker in range(3):
        assert pool.try_acquire("other") is None
        pool.release(slot, worker)
    assert pool.try_acquire("other") is slot


def test_holding_and_releasing_twice_is_the_same_as_once(make):
    pool = make(max_slots=1)
    slot = pool.try_acquire("writer")
    pool.hold(slot, "writer")
    pool.release(slot, "writer")
    pool.release(slot, "writer")
    pool.release(slot, "a stranger")
    assert pool.try_acquire("other") is slot


def test_hold_only_gives_back_every_slot_of_a_holder_but_one(make):
    pool = make()
    slots = [pool.try_acquire("worker") for _ in range(3)]
    pool.hold(slots[1], "another")
    pool.hold_only(slots[2], "worker")
    assert [sorted(slot.holders) for slot in slots] == [[], ["another"], ["worker"]]
    assert pool.try_acquire("writer") is slots[0]
    assert pool.try_acquire("writer") is None


def test_holders_are_named_for_messages(make):
    pool = make()
    indices(pool, 2)
    assert pool.holders() == ["taker 0", "taker 1"]


# --- retiring -------------------------------------------------------------------------------------------------------


def test_a_retired_slot_is_never_written_again_and_its_place_is_given_to_a_new_one(make):
    pool = make(max_slots=2)
    told = []
    pool.when_retired.append(told.append)
    lost, kept = pool.try_acquire("lost"), pool.try_acquire("kept")
    pool.retire_all("lost")
    assert (told, lost.retired, kept.retired, len(pool)) == ([0], True, False, 1)
    replacement = pool.try_acquire("writer")
    assert replacement is not lost and replacement.index == 2
    assert lost.descriptor == -1
    assert lost.memory.fill_(3).unique().tolist() == [3]  # whoever has it mapped has it still


def test_a_slot_that_retires_while_others_hold_it_stays_until_the_last_has_let_go(make):
    pool = make(max_slots=2)
    told = []
    pool.when_retired.append(told.append)
    slot = pool.try_acquire("writer")
    for worker in ("lost", "second", "third"):
        pool.hold(slot, worker)
    pool.retire_all("lost")
    assert (told, len(pool), slot.holders) == ([], 1, {"writer", "second", "third"})
    assert indices(pool, 3) == [1, 2]  # a retired slot does not count
    pool.release(slot, "writer")
    pool.hold_only(slot, "second")
    assert told == []
    pool.release(slot, "second")
    assert told == []
    pool.release(slot, "third")
    assert told == [0]
    assert pool.try_acquire("writer") is None


def test_a_second_holder_that_is_lost_too_ends_the_slot(make):
    pool = make()
    told = []
    pool.when_retired.append(told.append)
    slot = pool.try_acquire("first")
    pool.hold(slot, "second")
    pool.retire_all("first")
    pool.retire_all("second")
    pool.retire_all("second")
    assert (told, len(pool)) == ([0], 0)


def test_losing_a_holder_of_nothing_changes_nothing(make):
    pool = make()
    slot = pool.try_acquire("writer")
    pool.retire_all("a stranger")
    assert not slot.retired and len(pool) == 1


def test_whoever_is_told_of_a_disposal_may_use_the_pool(make):
    pool = make(max_slots=1)
    taken = []
    pool.when_retired.append(lambda index: taken.append(pool.try_acquire("told")))
    pool.try_acquire("lost")
    pool.retire_all("lost")
    assert taken[0].index == 1


# --- what it costs --------------------------------------------------------------------------------------------------


def test_prefaulting_makes_slots_in_advance_within_the_limit(make):
    pool = make(max_slots=2)
    pool.prefault(5, 3.0)
    assert len(pool) == 2
    assert indices(pool, 3) == [0, 1]
    assert all(slot.memory.sum() == 0 for slot in pool._slots.values())


def test_closing_gives_every_descriptor_back_and_twice_is_fine(make):
    before = num_descriptors()
    pool = make()
    slots = [pool.try_acquire("writer") for _ in range(3)]
    pool.retire_all("writer")
    pool.prefault(2, 3.0)
    del slots
    for _ in range(2):
        pool.close()
        assert len(pool) == 0
    assert num_descriptors() == before


def test_a_model_without_bytes_has_slots_too(make):
    pool = make(layout=WeightLayout.of({"empty": torch.empty(0, 3)}))
    slot = pool.try_acquire("writer")
    assert (slot.memory.numel(), slot.views[0].shape) == (0, (0, 3))


def test_many_threads_never_get_one_slot_at_once(make):
    pool = make(max_slots=3)
    owners, clashes = {}, []

    def take(name):
        for _ in range(300):
            slot = pool.try_acquire(name)
            if slot is None:
                continue
            if owners.setdefault(slot.index, name) != name:
                clashes.append((slot.index, name))
            del owners[slot.index]
            pool.release(slot, name)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert clashes == []
    assert len(pool) <= 3


def test_no_memory_for_one_more_slot_is_an_error_that_says_so_and_leaves_nothing(make, monkeypatch):
    pool = make(max_slots=2)
    taken = pool.try_acquire("first")
    before = num_descriptors()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(slots, "map_memory", full)
        patched.setattr(slots.torch, "zeros", full)
        with pytest.raises(
            WeightSyncError, match=rf"slot of {LAYOUT.nbytes} bytes, beside 1 \(of at most 2\).*No space"
        ):
            pool.try_acquire("second")
    assert num_descriptors() == before and len(pool) == 1
    assert pool.try_acquire("second") not in (None, taken)


def test_a_pool_that_was_closed_makes_no_more_slots(make):
    """Whoever shuts down does not wait for a push that is about to take a slot."""
    pool = make()
    pool.try_acquire("push")
    pool.close()
    before = num_descriptors()
    for call in (lambda: pool.try_acquire("push"), lambda: pool.prefault(2, 3.0)):
        with pytest.raises(WeightSyncError, match="shut down"):
            call()
    assert (len(pool), num_descriptors()) == (0, before)


def test_a_slot_that_was_not_filled_to_its_end_is_given_back_at_once(make):
    pool = make()
    slot = pool.try_acquire("push")
    weights = torch.zeros(3)
    slot.filling = Filling(LAYOUT.nbytes, partial(iter, (slot, weights)))
    memory = weakref.ref(slot)
    pool.close()
    del slot
    assert memory() is None  # without a collection of cycles
