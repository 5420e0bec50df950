"""A worker dies or stops, wherever it is: the living are served, it is named soon, and the next push is quick."""

import errno
import os
import statistics
import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError, WeightSyncTimeout, WorkerDied
from lightning_weightsync.transports import slots
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import altered, assert_text, hold_gate, layers, over_shared_memory, release_gate
from tests.helpers.threads import Call, eventually

WHO = r"worker \d \(pid \d+\)"
WHAT_AND_WHEN = r"it holds version \d+ \(phase: push of version \d+ of 'policy', after \d\.\d s\)"


def failing_push(connected, kind, worker_ids=(1,)):
    """A push that these workers do not survive; returns what it raised and how long it took."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        connected.scheme.send()
    seconds = time.monotonic() - started
    assert sorted(caught.value.failed) == sorted(worker_ids)
    for index in worker_ids:
        assert_text(caught.value.failed[index], WHO, WHAT_AND_WHEN)
        assert f"worker {index} " in str(caught.value.failed[index])
    return caught.value, seconds


# --- death ----------------------------------------------------------------------------------------------------------


def wait_in_a_hook(box):
    box.entered = threading.Event()
    box.scheme.add_applied_hook(lambda model, version: (box.entered.set(), time.sleep(30)))


def entered(box):
    return box.entered.wait(5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["idle", "waiting for the gate", "in an applied hook"])
def test_a_worker_that_is_killed_is_named_at_once_wherever_it_is(connect, where):
    connected = connect(source := layers(), 3, sync=False, timeout=120)
    victim = connected.processes[1]
    fill(source, 1.0)
    connected.push()
    if where == "waiting for the gate":
        victim.call(hold_gate)
    elif where == "in an applied hook":
        victim.call(wait_in_a_hook)
    fill(source, 2.0)
    if where == "idle":
        victim.kill()
        sending = Call(failing_push, connected, WorkerDied)
    else:
        sending = Call(failing_push, connected, WorkerDied)
        links = connected.scheme._hub.links
        eventually(lambda: [links[i].version for i in (0, 2)] == [2, 2])
        if where == "in an applied hook":
            assert victim.call(entered)
        assert sending.running
        victim.kill()
    died = time.monotonic()
    sending.result(5.0)
    assert time.monotonic() - died < 1.0
    for worker in (0, 2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    fill(source, 3.0)
    started = time.monotonic()
    connected.push(worker_ids=[0, 2])
    assert time.monotonic() - started < 0.5
    for worker in (0, 2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def median_push(connected, worker_ids, count=15):
    seconds = []
    for _ in range(count):
        started = time.monotonic()
        connected.scheme.send(worker_ids=worker_ids)
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds)


def kill_one_of_four_again_and_again(connect, receivers, times):
    """Seconds from the death to the error, of each; a replacement joins each time."""
    connected = connect(source := layers(64, depth=4), 4, sync=False, timeout=120)
    usual = median_push(connected, [0, 1, 2])
    after_death, joining_took = [], []
    for turn in range(times):
        victim = turn % 4
        spare = next(process for process in receivers if process not in connected.processes and process.alive)
        others = [i for i in range(4) if i != victim]
        spare.wait_ready()
        gate_held = turn % 2 == 1  # the push is under way when the worker dies, or it meets a dead one
        if gate_held:
            connected.processes[victim].call(hold_gate)
        fill(source, float(turn + 1))
        sending = Call(failing_push, connected, WorkerDied, [victim]) if gate_held else None
        if gate_held:
            links = connected.scheme._hub.links
            eventually(lambda: all(links[i].version == connected.scheme.version for i in others))  # noqa: B023
        killed = time.monotonic()
        connected.processes[victim].kill()
        (sending or Call(failing_push, connected, WorkerDied, [victim])).result(5.0)
        after_death.append(time.monotonic() - killed)
        missed = connected.scheme.version
        for i in others:
            assert_same_bits(connected.leaves(i), leaves_of(source))
        assert median_push(connected, others) < 3 * usual + 0.02
        started = time.monotonic()
        joining = connected.join(victim, spare, altered(source))
        connected.scheme.connect()
        spare.result_of(joining)
        joining_took.append(time.monotonic() - started)
        # It starts from what it missed; later pushes were meant for the others.
        assert connected.versions == [missed if i == victim else connected.scheme.version for i in range(4)]
        assert_same_bits(connected.leaves(victim), leaves_of(source))
        receivers.renew()
    print(f"death to error, ms: {[round(1e3 * s, 1) for s in after_death]}")
    print(f"replacement ready to connected, ms: {[round(1e3 * s, 1) for s in joining_took]}")
    assert max(joining_took) < 1.0
    return after_death


def test_killing_one_of_four_workers_serves_the_others_and_raises_within_a_moment(five, connect, receivers):
    seconds = kill_one_of_four_again_and_again(connect, receivers, 2)
    assert max(seconds) < 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killing_one_of_four_workers_twenty_times(five, connect, receivers):
    seconds = kill_one_of_four_again_and_again(connect, receivers, 20)
    assert statistics.median(seconds) < 0.1
    assert max(seconds) < 1.0


# --- silence --------------------------------------------------------------------------------------------------------


class Bulky(nn.Module):
    """An extra state that no socket holds."""

    def __init__(self, size=6_000_000):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.blob = torch.zeros(size, dtype=torch.uint8)

    def get_extra_state(self):
        return {"blob": self.blob}

    def set_extra_state(self, state):
        self.blob = state["blob"]


def test_a_stopped_worker_keeps_nobody_waiting_even_with_messages_that_no_socket_holds(connect):
    connected = connect(source := Bulky(), 3, receiver_model=Bulky(), sync=False, timeout=120, heartbeat_timeout=1.0)
    connected.push()
    connected.processes[0].stop()
    source.blob += 1
    fill(source.layer, 2.0)
    sending = Call(failing_push, connected, WeightSyncTimeout, [0])
    links = connected.scheme._hub.links
    eventually(lambda: [links[i].version for i in (1, 2)] == [2, 2], timeout=0.9)
    error, seconds = sending.result(5.0)
    assert seconds < 2.0
    assert_text(error, r"silent for 1\.\d s \(heartbeat_timeout\)")
    for worker in (1, 2):
        assert_same_bits(
            connected.processes[worker].call(lambda box: leaves_of(box.model.layer)), leaves_of(source.layer)
        )
        assert connected.processes[worker].call(lambda box: int(box.model.blob.sum())) == 6_000_000


def test_shutting_down_while_a_message_is_half_sent_to_a_stopped_worker(connect):
    connected = connect(Bulky(), 1, receiver_model=Bulky(), sync=False, timeout=3600, heartbeat_timeout=3600)
    connected.processes[0].stop()
    sending = Call(connected.scheme.send)
    time.sleep(0.2)
    assert sending.running
    started = time.monotonic()
    connected.scheme.shutdown()
    assert time.monotonic() - started < 1.0
    with pytest.raises(WeightSyncError, match="shut down"):
        sending.result(1.0)


# --- broken channels ------------------------------------------------------------------------------------------------


def break_channel(box):
    box.scheme._link._channel._sock.shutdown(2)  # socket.SHUT_RDWR: the process is well, its connection is not


def send_garbage(box):
    box.scheme._link._channel._sock.send(b"\xff" * 64)


@pytest.mark.parametrize("spoil", [break_channel, send_garbage])
def test_a_control_channel_that_breaks_costs_one_worker_its_link(connect, receivers, spoil):
    connected = connect(source := layers(), 2, sync=False, timeout=120)
    fill(source, 1.0)
    connected.push()
    held = {1: leaves_of(source)}
    connected.processes[1].call(spoil)
    fill(source, 2.0)
    held[2] = leaves_of(source)  # one that talks nonsense may hear of it before the sender hears the nonsense
    _, seconds = failing_push(connected, WorkerDied)
    assert seconds < 1.0
    assert_same_bits(connected.leaves(0), held[2])
    broken = connected.processes[1]
    joining = connected.join(1, receivers[2], altered(source))
    connected.scheme.connect()
    receivers[2].result_of(joining)
    connected.push()
    assert connected.versions == [3, 3]
    assert_same_bits(broken.call(schemes.leaves), held[broken.call(schemes.version)])


def acknowledge_an_older_version(box):
    channel = box.scheme._link._channel
    send = channel.send

    def late(kind, *args, **fields):
        if kind == "applied" and fields["version"] == 2:
            fields["version"] = 1
        send(kind, *args, **fields)

    channel.send = late


def test_an_acknowledgement_of_an_older_version_is_not_taken_for_one_of_this(connect):
    connected = connect(source := layers(), 2, sync=False, timeout=120)
    connected.processes[1].call(acknowledge_an_older_version)
    connected.push()
    fill(source, 2.0)
    error, _ = failing_push(connected, WorkerDied)
    assert_text(error, r"acknowledged \(run, version\) = \(1, 1\) where \(1, 2\) was due", "it holds version 1")
    assert_same_bits(connected.leaves(0), leaves_of(source))
    assert connected.scheme._hub.links[1].version == 1


# --- no memory ------------------------------------------------------------------------------------------------------


@over_shared_memory
def test_no_memory_for_a_slot_fails_the_push_before_anything_is_sent(connect, monkeypatch):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    connected.push()
    held = leaves_of(source)
    connected.processes[1].call(hold_gate)  # keeps the first two slots in use
    fill(source, 2.0)
    handle = connected.scheme.send_async(worker_ids=[1])
    map_memory = slots.map_memory
    open_files = len(os.listdir("/proc/self/fd"))

    def full(descriptor, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(slots, "map_memory", full)
    fill(source, 3.0)
    nbytes = connected.scheme._pool.nbytes
    for _ in range(3):
        with pytest.raises(WeightSyncError, match=rf"no memory for one more slot of {nbytes} bytes.*No space left"):
            connected.scheme.send(worker_ids=0)
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert connected.scheme.version == 2
    assert_same_bits(connected.leaves(0), held)

    monkeypatch.setattr(slots, "map_memory", map_memory)
    connected.scheme.send(worker_ids=0)
    assert connected.scheme.version == connected.processes[0].call(schemes.version) == 3
    assert_same_bits(connected.leaves(0), leaves_of(source))
    connected.processes[1].call(release_gate)
    handle.wait(5)


def limit_file_size(box, size):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def be_sender(box, size, same_host):
    box.source = nn.Linear(size, size)
    box.scheme = DistributedWeightSyncScheme(connect_timeout=20, same_host=same_host, sync=False)
    box.scheme.init_on_sender("policy", model=box.source, num_workers=1)
    return box.scheme.get_store_info()


def test_no_room_for_slots_fails_connect_on_both_sides(receivers):
    sender, receiver = receivers[0], receivers[1]
    info = sender.call(be_sender, 600, "shared_memory")
    sender.call(limit_file_size, 100_000)
    scheme = DistributedWeightSyncScheme(sync=False, connect_timeout=20)
    receiver.call(schemes.init, scheme, nn.Linear(600, 600), worker_idx=0, store_info=info)
    joining = [sender.begin(schemes.connect), receiver.begin(schemes.connect)]
    with pytest.raises(WeightSyncError, match="no memory for one more slot of 1442.* bytes"):
        joining[0].result(5.0)
    with pytest.raises(WeightSyncError, match="gave up connecting|given this worker up"):
        joining[1].result(5.0)
    sender.kill()


def begin_to_push(box):
    box.scheme.send_async({name: leaf + 1 for name, leaf in box.source.state_dict().items()})


# --- the sender dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_host", ["shared_memory", "network"])
def test_a_receiver_whose_sender_is_killed_in_the_middle_of_a_push_keeps_what_it_has(receivers, same_host):
    info = receivers[0].call(be_sender, 4, same_host)
    scheme = DistributedWeightSyncScheme(sync=False, connect_timeout=20, same_host=same_host)
    receivers[1].call(schemes.init, scheme, nn.Linear(4, 4), worker_idx=0, store_info=info)
    joining = [receivers[0].begin(schemes.connect), receivers[1].begin(schemes.connect)]
    for future in joining:
        future.result(10)
    before = receivers[1].call(schemes.leaves)
    receivers[1].call(hold_gate)
    receivers[0].call(begin_to_push)
    time.sleep(0.2)
    receivers[0].kill()
    started = time.monotonic()
    receivers[1].call(release_gate)
    cause = receivers[1].call(link_cause)
    assert time.monotonic() - started < 1.0 and "closed" in cause
    assert receivers[1].call(schemes.version) == 0
    assert_same_bits(receivers[1].call(schemes.leaves), before)


def link_cause(box):
    deadline = time.monotonic() + 5
    while box.scheme._link.state.value != "ended":
        assert time.monotonic() < deadline, "the link is still there"
        time.sleep(0.01)
    return str(box.scheme._link.cause)
