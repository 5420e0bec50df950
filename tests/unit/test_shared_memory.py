"""Both ends of the shared slots in one process: what is written where, and who sees it."""

import os

import pytest
import torch

from lightning_weightsync.transports.base import ReceiverTransport, SenderTransport, TransferFailed
from lightning_weightsync.transports.control import ControlChannel
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.memory import create_memory_file, map_memory
from lightning_weightsync.transports.posting import PostingChannel
from lightning_weightsync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from lightning_weightsync.transports.slots import SlotPool
from lightning_weightsync.transports.window import Window
from tests.helpers.sockets import num_descriptors, socket_pair
from tests.helpers.threads import soon

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 4 * PAGE


class Bench:
    """A sender's transport, and receivers that do what their links would tell them."""

    def __init__(self, num_workers=1, *, size=SIZE, max_slots=4, holds=True):
        self.pool = SlotPool(WeightLayout.of({"w": torch.zeros(size, dtype=torch.uint8)}), max_slots, shared=True)
        self.sender = SharedMemoryTransport("policy", self.pool)
        self.links, self.channels, self.receivers, self.windows = [], [], [], []
        for _ in range(num_workers):
            self.add(holds=holds)

    def add(self, *, index=None, generation=0, holds=True):
        ours, theirs = socket_pair("unix")
        index = len(self.links) if index is None else index
        link = WorkerLink(index, 1, PostingChannel(ours), generation, True)
        self.links.append(link)
        self.channels.append(ControlChannel(theirs, takes_descriptors=True))
        self.receivers.append(SharedMemoryReceiver())
        self.windows.append(Window(self.pool.nbytes) if holds else None)
        self.sender.add(link, holds=holds)
        return len(self.links) - 1

    def write(self, value):
        slot = self.pool.try_acquire("push")
        assert slot is not None
        slot.memory.fill_(value)
        return slot

    def messages(self, worker):
        """What the worker was told meanwhile, and acts on."""
        kinds = []
        while (message := self.channels[worker].poll()) is not None:
            kinds.append((message.kind, message["index"]))
            if message.kind == "slot":
                self.receivers[worker].learn(message["index"], message["nbytes"], message.descriptor)
            else:
                self.receivers[worker].forget(message["index"])
        return kinds

    def stage(self, worker, slot):
        ticket = self.sender.send(self.links[worker].worker_idx, slot)
        self.messages(worker)
        return self.receivers[worker].stage(ticket, self.pool.nbytes, soon())

    def deliver(self, worker, slot, *, applied=True):
        """Stage a slot, and apply it; what the worker's weights are then."""
        staged, window = self.stage(worker, slot), self.windows[worker]
        if applied:
            if window is not None:
                window.show(staged.descriptor)
            self.receivers[worker].entered(staged, held=window is not None)
        self.sender.settled(self.links[worker].worker_idx, slot, applied=applied)
        return staged.memory if window is None else window.memory

    def push(self, value):
        """A whole push to every worker; what the weights of each are then."""
        slot = self.write(value)
        staged = [self.deliver(worker, slot) for worker in range(len(self.links))]
        self.pool.release(slot, "push")
        return staged

    def push_to_the_living(self, value):
        slot = self.write(value)
        for worker, link in enumerate(self.links):
            if link.state is LinkState.OPEN:
                self.deliver(worker, slot)
        self.pool.release(slot, "push")

    def close(self):
        for link in self.links:
            link.end()
        for channel in self.channels:
            channel.close()
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()
        self.pool.close()


@pytest.fixture
def bench():
    made = []

    def make(*args, **kwargs):
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_both_ends_are_transports():
    pool = SlotPool(WeightLayout.of({}), 1, shared=True)
    assert isinstance(SharedMemoryTransport("policy", pool), SenderTransport)
    assert isinstance(SharedMemoryReceiver(), ReceiverTransport)


def test_every_worker_finds_the_senders_bytes_where_it_was_told(bench):
    workers = bench(3)
    for value in (1, 2, 3, 4, 5):
        assert [staged.unique().tolist() for staged in workers.push(value)] == [[value]] * 3


def test_a_slots_descriptor_is_handed_over_once_to_each_worker(bench):
    workers = bench(2)
    slot = workers.write(1)
    tickets = [workers.sender.send(0, slot) for _ in range(3)]
    assert tickets == [{"slot": slot.index}] * 3
    assert (workers.messages(0), workers.messages(1)) == ([("slot", slot.index)], [])
    workers.sender.send(1, slot)
    assert workers.messages(1) == [("slot", slot.index)]


# --- private mappings -----------------------------------------------------------------------------------------------


def test_what_a_receiver_writes_is_seen_by_nobody_else(bench):
    workers = bench(2)
    slot = workers.write(1)
    first, second = (workers.deliver(worker, slot) for worker in range(2))
    first.fill_(9)
    assert (slot.memory.unique().tolist(), second.unique().tolist()) == ([1], [1])
    second[:PAGE].fill_(8)
    assert (slot.memory.unique().tolist(), first.unique().tolist()) == ([1], [9])


def test_a_receiver_that_wrote_into_its_weights_sees_the_new_ones_when_their_slot_is_written_again(bench):
    """A page that was written is a private copy from then on: it must be dropped, or it hides the next version."""
    workers = bench(1, max_slots=2)
    seen = []
    for value in range(1, 41):
        (staged,) = workers.push(value)
        assert staged.unique().tolist() == [value]
        staged[5] = 200  # one byte of the first page
        staged[2 * PAGE : 3 * PAGE].fill_(201)  # a whole page
        seen += [index for index, slot in workers.pool._slots.items() if ("worker", 0, 0) in slot.holders]
    assert seen == [0, 1] * 20


def test_a_version_that_is_delivered_once_more_is_that_version_whatever_was_written_meanwhile(bench):
    workers = bench()
    slot = workers.write(1)
    workers.deliver(0, slot)[0] = 9
    assert workers.deliver(0, slot).unique().tolist() == [1]


def test_a_push_that_was_not_applied_leaves_the_slot_before_in_force(bench):
    workers = bench(1, max_slots=3)
    (in_force,) = workers.push(1)
    in_force[0] = 9
    refused = workers.write(2)
    workers.deliver(0, refused, applied=False)
    workers.pool.release(refused, "push")
    assert in_force[0] == 9 and in_force[1] == 1
    for value in (3, 4, 5, 6):
        (staged,) = workers.push(value)
        assert staged.unique().tolist() == [value]


# --- who holds what -------------------------------------------------------------------------------------------------


def test_a_worker_holds_the_slot_that_it_applied_and_no_other(bench):
    workers = bench(2, max_slots=3)
    first = workers.write(1)
    for worker in range(2):
        workers.deliver(worker, first)
    workers.pool.release(first, "push")
    assert first.holders == {("worker", 0, 0), ("worker", 1, 0)}
    second = workers.write(2)
    assert second is not first
    workers.deliver(0, second)
    workers.pool.release(second, "push")
    assert (first.holders, second.holders) == ({("worker", 1, 0)}, {("worker", 0, 0)})


def test_a_worker_that_copies_holds_nothing(bench):
    workers = bench(1, max_slots=1, holds=False)
    pointers = {workers.push(value)[0].data_ptr() for value in range(5)}
    assert len(pointers) == 1


def test_a_worker_that_did_not_apply_holds_what_it_held(bench):
    workers = bench()
    workers.push(1)
    (held,) = [slot for slot in workers.pool._slots.values() if slot.holders]
    slot = workers.write(2)
    workers.deliver(0, slot, applied=False)
    workers.pool.release(slot, "push")
    assert (held.holders, slot.holders) == ({("worker", 0, 0)}, set())


def test_the_slot_of_a_lost_worker_retires_and_the_others_forget_it_when_they_have_left_it(bench):
    workers = bench(2, max_slots=3)
    workers.push(1)
    (held,) = [slot for slot in workers.pool._slots.values() if slot.holders]
    workers.links[0].end(ConnectionError("killed"))
    assert held.retired and held.holders == {("worker", 1, 0)}
    slot = workers.write(2)
    assert slot is not held
    workers.deliver(1, slot)
    workers.pool.release(slot, "push")
    assert workers.messages(1) == [("retire", held.index)]
    with pytest.raises(TransferFailed, match=f"slot {held.index} is not known here"):
        workers.receivers[1].stage({"slot": held.index}, SIZE, soon())
    assert held.memory[0] == 1  # nobody wrote it


def retiring(workers):
    """A slot that the workers know, and that nobody but ``"newest"`` holds: it retires when that lets go."""
    slot = workers.write(1)
    for worker in range(len(workers.links)):
        workers.deliver(worker, slot)
    workers.pool.hold(slot, "newest")
    workers.pool.release(slot, "push")
    workers.links[-1].end(ConnectionError("killed"))
    assert slot.retired
    workers.push_to_the_living(2)
    assert slot.holders == {"newest"}
    return slot


def test_a_worker_that_is_lost_while_others_are_told_that_a_slot_retires_breaks_nothing(bench):
    """Who lets go of a slot is the trainer's thread; who loses a worker is the one that drives."""
    workers = bench(3, max_slots=3)
    slot = retiring(workers)
    workers.messages(0)
    encode = workers.links[0].channel.encode

    def lose_the_next_one(kind, *args, **fields):
        workers.links[1].end(ConnectionError("killed meanwhile"))
        return encode(kind, *args, **fields)

    workers.links[0].channel.encode = lose_the_next_one
    workers.pool.release(slot, "newest")
    assert workers.messages(0) == [("retire", slot.index)]


def test_a_worker_with_no_room_for_it_hears_later_that_a_slot_has_retired(bench):
    """Or it would keep the memory, and its descriptor, for as long as it lives."""
    workers = bench(2, max_slots=3)
    slot = retiring(workers)
    workers.messages(0)
    channel = workers.links[0].channel
    while not channel.has_mail:
        channel.send("digest", model_id="x" * 10_000)
    workers.pool.release(slot, "newest")
    while workers.channels[0].poll() is not None:
        pass
    workers.sender.send(0, workers.write(3))
    kinds = []
    while (message := workers.channels[0].poll()) is not None or channel.has_mail:
        kinds += [(message.kind, message["index"])] if message is not None and message.kind != "digest" else []
        channel.post()
    assert kinds[0] == ("retire", slot.index)


def test_what_is_sent_to_a_lost_worker_is_a_failed_transfer(bench):
    workers = bench(1)
    slot = workers.write(1)
    workers.links[0].end(ConnectionError("killed"))
    with pytest.raises(TransferFailed, match="worker 0 is lost"):
        workers.sender.send(0, slot)
    workers.sender.settled(0, slot, applied=True)
    assert slot.holders == {"push"}


def test_a_replacement_is_told_of_every_slot_anew_and_its_predecessors_end_does_not_concern_it(bench):
    workers = bench(1)
    workers.push(1)
    workers.links[0].end(ConnectionError("killed"))
    newcomer = workers.add(index=0, generation=1)
    slot = workers.write(2)
    staged = workers.deliver(newcomer, slot)
    assert staged.unique().tolist() == [2]
    assert slot.holders == {"push", ("worker", 0, 1)}


def test_what_is_retired_while_a_window_shows_it_stays_readable(bench):
    workers = bench()
    (weights,) = workers.push(5)
    (held,) = [slot for slot in workers.pool._slots.values() if slot.holders]
    forgotten = workers.receivers[0].forget(held.index)
    assert forgotten.memory.unique().tolist() == [5]
    workers.close()
    assert weights.unique().tolist() == [5]


# --- bad news -------------------------------------------------------------------------------------------------------


def test_a_slot_that_was_never_told_of_or_is_of_another_size_is_refused():
    receiver = SharedMemoryReceiver()
    for ticket in ({"slot": 3}, {}):
        with pytest.raises(TransferFailed, match="is not known here"):
            receiver.stage(ticket, 10, soon())
    descriptor = create_memory_file("test")
    map_memory(descriptor, 100)
    receiver.learn(3, 100, descriptor)
    with pytest.raises(TransferFailed):
        receiver.stage({"slot": 3}, 99, soon())
    assert receiver.stage({"slot": 3}, 100, soon()).memory.numel() == 100


def test_a_file_that_is_too_small_or_none_is_refused_and_its_descriptor_closed():
    receiver = SharedMemoryReceiver()
    before = num_descriptors()
    small = create_memory_file("test")
    map_memory(small, 100)
    with pytest.raises(TransferFailed, match="smaller than the 101 bytes"):
        receiver.learn(0, 101, small)
    reading, writing = os.pipe()
    with pytest.raises(TransferFailed):
        receiver.learn(0, 10, reading)
    os.close(writing)
    assert num_descriptors() == before
    with pytest.raises(TransferFailed, match="known are \\[\\]"):
        receiver.stage({"slot": 0}, 10, soon())


def test_a_model_without_bytes_is_mapped_too(bench):
    workers = bench(size=0)
    for _ in range(3):
        (staged,) = workers.push(1)
        assert staged.numel() == 0


def test_nothing_is_left_open(bench):
    before = num_descriptors()
    workers = bench(2)
    for value in range(6):
        workers.push(value)
    workers.links[0].end(ConnectionError("killed"))
    workers.close()
    del workers
    bench.__closure__[0].cell_contents.clear()
    assert num_descriptors() == before
