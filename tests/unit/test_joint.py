import contextlib
import os
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from lightning_weightsync.collectors.joint import JointSlots, is_joint, look_alike
from lightning_weightsync.collectors.process import JOB_MESSAGES
from lightning_weightsync.collectors.rollouts import LENT_SLOTS, OWN_SLOTS, BatchReader, BatchWriter
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel
from lightning_weightsync.transports.memory import create_memory_file
from tests.helpers.leaves import assert_same_bits


class Worker:
    """A worker's end and the parent's, in one process."""

    def __init__(self):
        self.descriptor = create_memory_file("own")
        ours, theirs = socket.socketpair()
        self.jobs = ControlChannel(theirs, JOB_MESSAGES, takes_descriptors=True)
        self.writer = BatchWriter(self.descriptor)
        process = SimpleNamespace(jobs=ControlChannel(ours, JOB_MESSAGES))
        self.member = SimpleNamespace(process=process, reader=BatchReader(self.descriptor))

    def first(self, batch):
        self.member.reader.open(self.writer.write(0, batch))

    def hear(self):
        message = self.jobs.receive(time.monotonic() + 5)
        assert message.kind == "joint"
        self.writer.join(message.descriptor, message["parts"], message["part"])
        os.close(message.descriptor)

    def close(self):
        self.jobs.close()
        self.member.process.jobs.close()
        os.close(self.descriptor)


@pytest.fixture
def workers():
    made = [Worker() for _ in range(3)]
    yield made
    for worker in made:
        worker.close()


def batch(seed, envs=2, steps=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "observation": torch.randint(0, 256, (envs, steps, 5), generator=generator, dtype=torch.uint8),
            "next": {"reward": torch.rand(envs, steps, 1, generator=generator).to(dtype)},
            "policy_version": torch.full((envs, steps), seed),
        },
        [envs, steps],
    )


def leaves(td):
    return {str(key): leaf for key, leaf in td.items(include_nested=True, leaves_only=True)}


def tell(index, member, kind, **fields):
    """As a pool does: whoever is gone is found later."""
    with contextlib.suppress(ChannelClosed):
        member.process.jobs.send(kind, **fields)


def joined(workers):
    for k, worker in enumerate(workers):
        worker.first(batch(k))
    members = [worker.member for worker in workers]
    assert look_alike(members)
    slots = JointSlots(members, tell)
    for worker in workers:
        worker.hear()
    return slots


def test_the_parts_lie_in_one_piece_in_the_order_of_the_workers(workers):
    slots = joined(workers)
    for slot in range(OWN_SLOTS):
        parts = [batch(10 * slot + k) for k in range(3)]
        for k in (2, 0, 1):
            assert workers[k].writer.write(OWN_SLOTS + slot, parts[k]) == {}
        whole = slots.reader.read(slot)
        assert whole.batch_size == (6, 3)
        assert_same_bits(leaves(whole), leaves(torch.cat(parts)))
        assert all(leaf.is_contiguous() for leaf in leaves(whole).values())
        for worker, part in zip(workers, parts, strict=True):
            assert_same_bits(leaves(slots.part(slot, worker.member)), leaves(part))


def test_slots_of_a_worker_s_own_stay_as_they_were(workers):
    joined(workers)
    workers[1].writer.write(1, batch(7))
    workers[1].writer.write(OWN_SLOTS + 1, batch(8))
    assert_same_bits(leaves(workers[1].member.reader.read(1)), leaves(batch(7)))
    assert [is_joint(slot) for slot in (0, OWN_SLOTS - 1, OWN_SLOTS)] == [False, False, True]


def test_a_lent_whole_stays_until_its_last_view_is_gone(workers):
    slots = joined(workers)
    for worker in workers:
        worker.writer.write(OWN_SLOTS, batch(1))
    lent = slots.reader.lend(0)
    kept = lent["next", "reward"][2:3]
    expected = kept.clone()
    del lent
    assert slots.reader.free_slot() == 1
    for worker in workers:
        worker.writer.write(OWN_SLOTS + 1, batch(2))
    assert kept.equal(expected)
    del kept
    assert slots.reader.free_slot() == 0
    held = [slots.reader.lend(slot) for slot in range(LENT_SLOTS)]
    assert None not in held and slots.reader.lend(LENT_SLOTS) is None


@pytest.mark.parametrize("other", [batch(0, envs=3), batch(0, steps=2), batch(0, dtype=torch.float64), None])
def test_workers_whose_batches_differ_or_have_not_come_have_no_joint_slots(workers, other):
    for k in (0, 1):
        workers[k].first(batch(k))
    if other is not None:
        workers[2].first(other)
    assert not look_alike([worker.member for worker in workers])
    assert look_alike([worker.member for worker in workers[:2]])


def test_batches_without_a_batch_size_are_no_parts(workers):
    for worker in workers:
        worker.first(TensorDict({"a": torch.zeros(3)}, []))
    assert not look_alike([worker.member for worker in workers])


def test_a_worker_that_is_gone_stops_nobody(workers):
    for k, worker in enumerate(workers):
        worker.first(batch(k))
    workers[1].jobs.close()
    slots = JointSlots([worker.member for worker in workers], tell)
    for k in (0, 2):
        workers[k].hear()
        workers[k].writer.write(OWN_SLOTS, batch(k))
        assert_same_bits(leaves(slots.part(0, workers[k].member)), leaves(batch(k)))


def test_new_joint_slots_take_the_place_of_the_old_ones(workers):
    old = joined(workers)
    for worker in workers:
        worker.writer.write(OWN_SLOTS, batch(1))
    before = old.reader.lend(0)
    new = JointSlots([workers[2].member, workers[0].member], tell)
    for k in (0, 2):
        workers[k].hear()
        workers[k].writer.write(OWN_SLOTS, batch(k))
    assert_same_bits(leaves(new.reader.read(0)), leaves(torch.cat([batch(2), batch(0)])))
    assert_same_bits(leaves(before), leaves(torch.cat([batch(1)] * 3)))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed in /proc")
def test_slots_that_are_made_anew_leave_no_descriptors(workers):
    members, counts = joined(workers).members, []
    for _ in range(3):
        JointSlots(members, tell)
        for worker in workers:
            worker.hear()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1
