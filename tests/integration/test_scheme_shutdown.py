"""Shutting down while somebody waits: under a second, on both sides, with ``timeout=3600``; and nothing is left.

The ``receivers`` fixture looks for what is left: threads, listening ports and descriptors, here and over there.
"""

import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError
from lightning_weightsync.transports.process_group import PIECE
from tests.helpers import schemes
from tests.helpers.holdings import holdings
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import altered, both_ways, hold_gate, over_network, over_shared_memory, release_gate


def small():
    return nn.Linear(3, 2)


def timed_shutdown(box):
    started = time.monotonic()
    box.scheme.shutdown()
    return time.monotonic() - started


def shut_down_here(scheme):
    started = time.monotonic()
    scheme.shutdown()
    return time.monotonic() - started


class Waiter:
    """A call in a thread of its own, which is expected to wait until somebody ends it."""

    def __init__(self, function, *args):
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(function, *args), name="waiter")
        self._thread.start()

    def _run(self, function, *args):
        try:
            function(*args)
        except Exception as error:
            self.error = error

    def assert_waiting(self, seconds=0.3):
        self._thread.join(seconds)
        assert self._thread.is_alive(), f"it did not wait: {self.error!r}"

    def outcome(self, seconds):
        """What it raised, once it has ended, for which it has so many seconds."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "it still waits"
        return self.error


@both_ways
def test_it_is_quick_in_either_order(connect, sync):
    for receiver_first in (True, False):
        connected = connect(small(), 1, sync=sync)
        connected.push()
        if receiver_first:
            assert connected.processes[0].call(timed_shutdown) < 1.0
        assert shut_down_here(connected.scheme) < 1.0
        if not receiver_first:
            assert connected.processes[0].call(timed_shutdown) < 1.0


def test_a_send_that_waits_for_a_receiver_that_does_not_receive(connect):
    connected = connect(small(), timeout=3600, heartbeat_timeout=3600)
    send = Waiter(connected.scheme.send)
    send.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    error = send.outcome(1.0)
    assert isinstance(error, WeightSyncError) and list(error.failed) == [0] and "shut down" in str(error)
    with pytest.raises(WeightSyncError, match="ended"):
        connected.processes[0].call(schemes.receive, 5)


@over_network
def test_a_send_of_more_bytes_than_sockets_hold(connect):
    connected = connect(nn.Linear(2000, 2000), timeout=3600)
    send = Waiter(connected.scheme.send)
    send.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    assert list(send.outcome(1.0).failed) == [0]


def test_a_send_that_waits_for_a_gate(connect):
    connected = connect(source := small(), sync=False, timeout=3600)
    process = connected.processes[0]
    before = connected.leaves()
    process.call(hold_gate)
    fill(source, 5.0)
    send = Waiter(connected.scheme.send)
    send.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    assert list(send.outcome(1.0).failed) == [0]
    process.call(release_gate)
    assert process.call(timed_shutdown) < 1.0
    assert_same_bits(connected.leaves(), before)  # it was reported as failed: it must not be applied now
    assert connected.versions == [0]


def test_a_receiver_whose_thread_waits_for_the_gate(connect):
    connected = connect(source := small(), sync=False, timeout=3600)
    process = connected.processes[0]
    before = connected.leaves()
    process.call(hold_gate)
    fill(source, 5.0)
    send = Waiter(connected.scheme.send)
    send.assert_waiting()
    assert process.call(timed_shutdown) < 1.0
    assert list(send.outcome(2.0).failed) == [0]
    names = process.call(lambda box: [t.name for t in threading.enumerate() if t.name.startswith("weight-sync")])
    assert names == []
    process.call(release_gate)
    assert_same_bits(connected.leaves(), before)
    assert connected.versions == [0]


@pytest.mark.parametrize("who", ["receiver", "sender"])
def test_a_receive_that_blocks(connect, who):
    connected = connect(small())
    process = connected.processes[0]
    receive = process.begin(schemes.receive, None)
    time.sleep(0.3)
    assert not receive.done()
    seconds = process.call(timed_shutdown) if who == "receiver" else shut_down_here(connected.scheme)
    assert seconds < 1.0
    with pytest.raises(WeightSyncError, match="ended"):
        receive.result(1.0)


@over_network
@both_ways
def test_a_receiver_in_the_middle_of_a_transfer(connect, monkeypatch, sync):
    connected = connect(small(), sync=sync, timeout=3600)
    process = connected.processes[0]
    monkeypatch.setattr(connected.scheme.sender_transports[0], "send", lambda worker_idx, slot: {"piece": PIECE})
    receive = process.begin(schemes.receive, None) if sync else None
    send = Waiter(connected.scheme.send)
    send.assert_waiting()
    assert process.call(timed_shutdown) < 1.0
    if receive is not None:
        with pytest.raises(WeightSyncError, match="ended"):
            receive.result(1.0)
    assert list(send.outcome(1.0).failed) == [0]


def test_a_sender_whose_workers_do_not_come(connect):
    sender = connect.sender(small(), 2, connect_timeout=60)
    waiting = Waiter(sender.connect)
    waiting.assert_waiting()
    assert shut_down_here(sender) < 1.0
    assert isinstance(waiting.outcome(1.0), WeightSyncError)


def test_a_receiver_whose_sender_does_not_connect(receivers, connect):
    sender = connect.sender(source := small(), connect_timeout=60)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    joining = receivers[0].begin(schemes.connect)
    time.sleep(0.3)
    assert not joining.done()
    assert receivers[0].call(timed_shutdown) < 1.0
    with pytest.raises(WeightSyncError):
        joining.result(1.0)


def test_a_receiver_that_is_connected_but_waits_for_the_others(receivers, connect):
    sender = connect.sender(source := small(), 2, connect_timeout=60)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    waiting = Waiter(sender.connect)
    joining = receivers[0].begin(schemes.connect)
    waiting.assert_waiting()
    assert receivers[0].call(timed_shutdown) < 1.0
    with pytest.raises(WeightSyncError):
        joining.result(1.0)
    assert shut_down_here(sender) < 1.0
    assert isinstance(waiting.outcome(1.0), WeightSyncError)


def init_stuck(box, scheme, model, worker_idx, step):
    """A receiver that takes its time over one step of connecting."""
    schemes.init(box, scheme, model, worker_idx=worker_idx)
    box.release = threading.Event()
    take_step = getattr(scheme, step)

    def take_step_late(offer):
        box.release.wait(30)
        return take_step(offer)

    setattr(scheme, step, take_step_late)


@over_network
def test_a_sender_whose_worker_does_not_meet_it_in_the_pair_group(receivers, connect):
    sender = connect.sender(source := small(), connect_timeout=60)
    receivers[0].call(init_stuck, sender, altered(source), 0, "make_transport")
    joining = receivers[0].begin(schemes.connect)
    waiting = Waiter(sender.connect)
    waiting.assert_waiting()
    assert shut_down_here(sender) < 1.0
    assert isinstance(waiting.outcome(1.0), WeightSyncError)
    receivers[0].call(lambda box: box.release.set())
    with pytest.raises(WeightSyncError):
        joining.result(10.0)


# --- while a replacement connects ----------------------------------------------------------------------------------


def lose(connected, worker_idx):
    connected.processes[worker_idx].kill()
    return Waiter(connected.scheme.connect)


def test_a_sender_that_waits_for_a_replacement(connect):
    connected = connect(small(), 2, sync=False, timeout=3600, connect_timeout=3600)
    waiting = lose(connected, 1)
    waiting.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    assert "shut down" in str(waiting.outcome(1.0))


def shut_down_before_a_replacement_is_there(connect, receivers, stuck_in, connect_timeout):
    connected = connect(
        source := small(), 2, sync=False, timeout=3600, connect_timeout=connect_timeout, heartbeat_timeout=3600
    )
    receivers[2].call(init_stuck, connected.scheme, altered(source), 1, stuck_in)
    joining = receivers[2].begin(schemes.connect)
    waiting = lose(connected, 1)
    waiting.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    assert isinstance(waiting.outcome(1.0), WeightSyncError)
    receivers[2].call(lambda box: box.release.set())
    with pytest.raises(WeightSyncError):
        joining.result(10.0)


@pytest.mark.slow
def test_a_sender_whose_replacement_never_answers(receivers, connect):
    shut_down_before_a_replacement_is_there(connect, receivers, "accept_offer", 3600)


@over_network
def test_a_sender_whose_replacement_does_not_meet_it_in_the_pair_group(receivers, connect):
    shut_down_before_a_replacement_is_there(connect, receivers, "make_transport", 60)


@pytest.mark.slow
def test_a_sender_whose_replacement_does_not_apply_the_weights(receivers, connect):
    connected = connect(source := small(), 2, sync=False, timeout=3600, connect_timeout=3600)
    receivers[2].call(schemes.init, connected.scheme, altered(source), worker_idx=1)
    receivers[2].call(hold_gate)
    joining = receivers[2].begin(schemes.connect)
    waiting = lose(connected, 1)
    waiting.assert_waiting()
    assert shut_down_here(connected.scheme) < 1.0
    assert isinstance(waiting.outcome(1.0), WeightSyncError)
    receivers[2].call(release_gate)
    with pytest.raises(WeightSyncError):
        joining.result(10.0)


# --- what is open meanwhile ----------------------------------------------------------------------------------------


@over_network
def test_everything_listens_on_the_loopback_interface_only_and_nothing_after_shutdown(connect):
    before = set(holdings().ports)
    connected = connect(small(), 2)
    ports = [*(set(holdings().ports) - before), *connected.processes[0].call(lambda box: holdings().ports)]
    assert ports and all(address.startswith("127.0.0.1:") for address in ports)
    connected.scheme.shutdown()
    assert connected.processes[0].call(timed_shutdown) < 1.0
    # That no port is left is for the fixture to see.


def shared_files():
    return set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()


def test_nothing_of_ours_is_ever_named_in_dev_shm(connect):
    connected = connect(small(), 2)
    connected.push()
    assert not [path for path in shared_files() if "weight" in path.name]
    connected.processes[0].kill()
    with pytest.raises(WeightSyncError):
        connected.scheme.send(worker_ids=0)
    assert shut_down_here(connected.scheme) < 1.0
    assert not [path for path in shared_files() if "weight" in path.name]


@over_shared_memory
def test_workers_of_this_host_make_it_listen_on_one_address_only_and_open_no_port_themselves(connect):
    before = set(holdings().ports)
    connected = connect(small(), 2)
    info = connected.scheme.get_store_info()
    assert [address.split(":")[1] for address in set(holdings().ports) - before] == [str(info["port"])]
    assert connected.processes[0].call(lambda box: holdings().ports) == ()
    assert connected.processes[0].call(lambda box: box.scheme._link.local_host) is None


def test_strangers_at_the_port_disturb_nobody(connect):
    sender, joining = connect.begin(source := small(), 2)
    info = sender.get_store_info()
    strangers = [socket.create_connection((info["host"], info["port"])) for _ in range(4)]
    try:
        strangers[0].sendall(torch.randint(0, 256, (5000,), dtype=torch.uint8).numpy().tobytes())
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[2].close()
        started = time.monotonic()
        sender.connect()
        assert time.monotonic() - started < 5.0
        for process, future in zip(connect.receivers, joining, strict=False):
            process.result_of(future)
        strangers.append(socket.create_connection((info["host"], info["port"])))
        strangers[-1].sendall(bytes(64))
        connected = schemes.Connected(sender, list(connect.receivers)[:2])
        connected.push()
        assert_same_bits(connected.leaves(1), leaves_of(source))
    finally:
        for stranger in strangers:
            stranger.close()


def test_many_lives_in_the_same_processes_leave_nothing(receivers, connect):
    """Ten connections, pushes and shutdowns; the fixture compares what is open with what was."""
    for life in range(10):
        scheme = DistributedWeightSyncScheme(sync=False, connect_timeout=20, same_host=connect.same_host)
        scheme.init_on_sender("policy", model=(source := small()), num_workers=2)
        try:
            joining = []
            for index in range(2):
                receivers[index].call(schemes.init, scheme, altered(source), worker_idx=index)
                joining.append(receivers[index].begin(schemes.connect))
            scheme.connect()
            for index, future in enumerate(joining):
                receivers[index].result_of(future)
            scheme.send()
            assert receivers[life % 2].call(schemes.version) == 1
        finally:
            scheme.shutdown()
            for index in range(2):
                receivers[index].call(schemes.shutdown)
