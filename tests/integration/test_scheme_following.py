"""Over the network a large slot leaves while it is still being written; nobody can tell, whatever happens meanwhile."""

import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync import WeightSyncError, WorkerDied
from lightning_weightsync.schemes import sender_side
from lightning_weightsync.schemes.gather import Gather
from lightning_weightsync.transports import process_group
from lightning_weightsync.transports.filling import Filling
from tests.helpers.leaves import assert_same_bits, leaves_of, scramble
from tests.helpers.schemes import altered, hold_gate, over_network, release_gate, version
from tests.helpers.threads import eventually


class Mixed(nn.Module):
    """Leaves of every kind that is copied in its own way: large, small, of few bytes, strided, and none."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(300, 300)
        self.small = nn.ModuleList(nn.Linear(7, 5) for _ in range(20))
        self.strided = nn.Parameter(torch.zeros(200, 300).t())
        self.register_buffer("few", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("none", torch.zeros(0, 4))
        self.last = nn.Linear(100, 500, dtype=torch.float64)


@pytest.fixture
def followed(monkeypatch):
    """Every size is worth it, in pieces of 64 KiB; lists the slots that were followed."""
    runs = []

    def run(self):
        runs.append(self)
        original(self)

    original = Filling.run
    monkeypatch.setattr(Filling, "run", run)
    monkeypatch.setattr(sender_side, "_WORTH_FOLLOWING", 0)
    monkeypatch.setattr(process_group, "PIECE", 64 << 10)
    return runs


@pytest.fixture
def halfway(monkeypatch):
    """A function to be called once, when half of the next slot is written."""
    todo = []
    copy = Gather.copy_in_order_to

    def copying(self, slot):
        for there in copy(self, slot):
            yield there
            if there >= slot.memory.numel() // 2 and todo:
                todo.pop()()

    monkeypatch.setattr(Gather, "copy_in_order_to", copying)
    return todo.append


def fail():
    raise RuntimeError("the device is gone")


def interrupt():
    raise KeyboardInterrupt


def same_everywhere(connected, source):
    assert connected.versions == [connected.scheme.version] * len(connected.processes)
    for index in range(len(connected.processes)):
        assert_same_bits(connected.leaves(index), leaves_of(source))


@over_network
def test_every_byte_arrives(connect, followed):
    connected = connect(source := Mixed(), 2, sync=False)
    for seed in range(5):
        scramble(source.state_dict().values(), seed)
        connected.push()
        same_everywhere(connected, source)
    assert len(followed) == 5
    connected.push(altered(source), worker_ids=1)  # weights that were not planned for
    assert_same_bits(connected.leaves(1), leaves_of(altered(source)))
    assert len(followed) == 6


@pytest.mark.parametrize("options", [{"verify": True}, {"only_changed": True}])
def test_what_needs_the_whole_slot_first_waits_for_it(connect, followed, options):
    connected = connect(source := Mixed(), 1, sync=False, **options)
    scramble(source.state_dict().values(), 1)
    connected.push()
    connected.scheme.send_async().wait(10.0)
    same_everywhere(connected, source)
    assert followed == []


def test_only_a_blocking_push_over_the_network_is_followed(connect, followed):
    connected = connect(source := Mixed(), 1, sync=False)
    connected.scheme.send_async().wait(10.0)
    assert followed == []
    connected.push()
    same_everywhere(connected, source)
    assert len(followed) == (connect.same_host == "network")


@over_network
def test_a_worker_that_is_still_busy_with_the_push_before_gets_it_afterwards(connect, followed):
    connected = connect(source := Mixed(), 2, sync=False)
    connected.processes[1].call(hold_gate)
    scramble(source.state_dict().values(), 1)
    first = connected.scheme.send_async()
    scramble(source.state_dict().values(), 2)
    freeing = threading.Timer(0.5, connected.processes[1].call, args=(release_gate,))
    freeing.start()
    connected.push()
    freeing.join()
    assert first.wait(1.0)
    same_everywhere(connected, source)
    assert len(followed) == 1


@over_network
def test_a_worker_that_dies_halfway_is_named_and_the_other_one_gets_all(connect, followed, halfway):
    connected = connect(source := Mixed(), 2, sync=False, timeout=60)
    scramble(source.state_dict().values(), 1)
    halfway(lambda: (connected.processes[1].kill(), time.sleep(0.3)))
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="worker 1") as caught:
        connected.push()
    assert time.monotonic() - started < 5.0
    assert list(caught.value.failed) == [1]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    scramble(source.state_dict().values(), 2)
    connected.push(worker_ids=0)
    assert_same_bits(connected.leaves(0), leaves_of(source))


@over_network
def test_weights_that_cannot_be_read_to_the_end_are_applied_by_nobody(connect, receivers, followed, halfway):
    connected = connect(source := Mixed(), 2, sync=False, timeout=60)
    before = leaves_of(source)
    scramble(source.state_dict().values(), 1)

    halfway(fail)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the device is gone"):
        connected.push()
    assert time.monotonic() - started < 5.0
    assert connected.versions == [0, 0]
    for index in (0, 1):
        assert_same_bits(connected.leaves(index), before)
    with pytest.raises(WeightSyncError) as caught:  # half a version cannot be called back
        connected.push()
    assert sorted(caught.value.failed) == [0, 1]
    assert "could not be read: the device is gone" in str(caught.value)
    joining = connected.join(1, receivers[2], altered(source))
    connected.scheme.connect(worker_ids=[1])
    connected.processes[1].result_of(joining)
    connected.push(worker_ids=1)
    assert_same_bits(connected.leaves(1), leaves_of(source))


@over_network
def test_ctrl_c_halfway_leaves_links_that_work(connect, followed, halfway):
    connected = connect(source := Mixed(), 2, sync=False)
    scramble(source.state_dict().values(), 1)

    halfway(interrupt)
    with pytest.raises(KeyboardInterrupt):
        connected.push()
    scramble(source.state_dict().values(), 2)
    connected.push()
    same_everywhere(connected, source)


def rejoin(connected, worker_idx, process, model):
    joining = connected.join(worker_idx, process, model)
    connected.scheme.connect(worker_ids=[worker_idx])
    process.result_of(joining)


@over_network
def test_after_ctrl_c_halfway_a_replacement_starts_from_what_the_others_hold(connect, receivers, followed, halfway):
    connected = connect(source := Mixed(), 2, sync=False)
    scramble(source.state_dict().values(), 1)
    halfway(interrupt)
    with pytest.raises(KeyboardInterrupt):
        connected.push()
    pushed = leaves_of(source)
    scramble(source.state_dict().values(), 2)
    connected.processes[1].kill()
    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.versions == [1, 1]
    for index in (0, 1):
        assert_same_bits(connected.leaves(index), pushed)


@over_network
def test_after_weights_that_could_not_be_read_a_replacement_starts_from_another_reading(
    connect, receivers, followed, halfway
):
    connected = connect(source := Mixed(), 2, sync=False)
    scramble(source.state_dict().values(), 1)
    halfway(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        connected.push()
    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.processes[1].call(version) == connected.scheme.version == 2
    assert_same_bits(connected.leaves(1), leaves_of(source))


@over_network
def test_ctrl_c_twice_halfway_leaves_nobody_waiting(connect, followed, halfway):
    connected = connect(source := Mixed(), 2, sync=False, timeout=60)
    scramble(source.state_dict().values(), 1)
    halfway(interrupt)
    halfway(interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        connected.push()
    assert time.monotonic() - started < 2.0
    with pytest.raises(WeightSyncError, match="could not be read: KeyboardInterrupt"):
        connected.push()
    assert connected.versions == [0, 0]


@over_network
def test_weights_that_cannot_be_read_cost_only_those_their_link_who_got_a_part(connect, followed, halfway):
    connected = connect(source := Mixed(), 3, sync=False, timeout=60)
    connected.processes[2].call(hold_gate)
    scramble(source.state_dict().values(), 1)
    first, held = connected.scheme.send_async(), leaves_of(source)
    links = connected.scheme._hub.links
    eventually(lambda: [links[index].version for index in (0, 1)] == [1, 1])
    scramble(source.state_dict().values(), 2)
    queues = [connected.scheme._hub.dispatcher._queues[id(links[index])] for index in (0, 1)]

    def fail_when_two_have_a_part():
        eventually(lambda: all(queue[0].state.value == "sent" for queue in queues))
        fail()

    halfway(fail_when_two_have_a_part)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the device is gone"):
        connected.push()
    assert time.monotonic() - started < 0.9  # nobody looks whether these workers have died
    causes = [links[index].cause for index in range(3)]
    assert [type(cause) for cause in causes] == [WeightSyncError, WeightSyncError, type(None)]
    assert "gone: " not in str(causes[0]) and "could not be read: the device is gone" in str(causes[0])
    connected.processes[2].call(release_gate)
    assert first.wait(10).value == "done"
    assert_same_bits(connected.leaves(2), held)
    connected.push(worker_ids=2)
    assert connected.versions[2] == 3
    assert_same_bits(connected.leaves(2), leaves_of(source))
