"""A push that goes wrong names who and why, soon; whoever is alive is served."""

import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync import (
    DistributedWeightSyncScheme,
    LayoutMismatchError,
    StaleVersionError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.transports import pushing
from tests.helpers import schemes
from tests.helpers.holdings import holdings
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.models import WithExtraState
from tests.helpers.receivers import ProcessEnded
from tests.helpers.schemes import assert_text, both_ways, hold_gate, layers, over_network, release_gate

# --- workers that die or fall silent -------------------------------------------------------------------------------


def test_a_worker_killed_while_idle_is_named_at_once_and_the_others_are_served(connect):
    connected = connect(source := layers(), 3, sync=False, timeout=120)
    connected.processes[1].kill()
    for value in (1.0, 2.0):
        fill(source, value)
        started = time.monotonic()
        with pytest.raises(WorkerDied, match="worker 1") as caught:
            connected.scheme.send()
        assert time.monotonic() - started < 2.0
        assert list(caught.value.failed) == [1]
        for worker in (0, 2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert [connected.processes[i].call(schemes.version) for i in (0, 2)] == [2, 2]


def memory_files(box=None):
    """How many memory files this process has open: each slot is one descriptor, and one of its mapping."""
    return sum(kind.startswith("/memfd") for kind in holdings().descriptors)


def test_the_memory_of_a_worker_killed_while_it_holds_weights_is_given_back(connect):
    gc.collect()
    before = memory_files()
    connected = connect(source := nn.Linear(300, 300), 2, sync=False, max_slots=3)
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        connected.push()
    connected.processes[1].kill()
    with pytest.raises(WorkerDied):
        connected.push()
    for value in range(10):
        fill(source, float(value))
        with pytest.raises(WorkerDied):
            connected.scheme.send()
        assert_same_bits(connected.leaves(0), leaves_of(source))
    gc.collect()
    # Of each slot the descriptor and a mapping; a receiver also has a window. Over the network it has slots of its own.
    assert memory_files() - before <= (2 * 3 if connect.same_host == "shared_memory" else 0)
    assert connected.processes[0].call(memory_files) <= 1 + 2 * (3 if connect.same_host == "shared_memory" else 2)


@over_network
def test_a_worker_killed_in_the_middle_of_a_transfer(connect):
    """More bytes than sockets hold: the transfer stands still until the worker receives, which it never does."""
    connected = connect(source := nn.Linear(2000, 2000), 2, timeout=120)
    fill(source, 1.0)
    waiting = connected.processes[0].begin(schemes.receive)
    killer = threading.Timer(0.5, connected.processes[1].kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="worker 1") as caught:
        connected.scheme.send()
    assert 0.4 < time.monotonic() - started < 3.0
    assert list(caught.value.failed) == [1]
    assert waiting.result(5.0) is not None
    assert_same_bits(connected.leaves(0), leaves_of(source))


def test_a_worker_that_dies_between_receiving_and_acknowledging(connect):
    connected = connect(source := layers(), 2, timeout=120)
    connected.processes[1].call(
        lambda box: box.scheme.add_applied_hook(lambda model, version: os.kill(os.getpid(), signal.SIGKILL))
    )
    fill(source, 1.0)
    waiting = [process.begin(schemes.receive) for process in connected.processes]
    started = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        connected.scheme.send()
    assert time.monotonic() - started < 3.0
    assert list(caught.value.failed) == [1]
    assert_text(caught.value, r"worker 1 \(pid \d+\)", "it holds version 0", "push of version 1 of 'policy'", r"\d s\)")
    assert waiting[0].result(5.0) is not None
    with pytest.raises(ProcessEnded):
        waiting[1].result(5.0)
    assert connected.processes[1].wait() == -signal.SIGKILL
    assert_same_bits(connected.leaves(0), leaves_of(source))


@both_ways
@pytest.mark.parametrize(
    "options, seconds, text",
    [
        ({"timeout": 120, "heartbeat_timeout": 1.0}, 1.0, r"silent for 1\.\d s \(heartbeat_timeout\)"),
        ({"timeout": 1.0, "heartbeat_timeout": 120}, 1.0, r"no answer before the deadline"),
    ],
    ids=["heartbeat_timeout", "timeout"],
)
def test_a_stopped_worker_is_given_up_in_time_and_never_applies_it_later(connect, sync, options, seconds, text):
    connected = connect(source := layers(), 2, sync=sync, **options)
    process = connected.processes[0]
    before = connected.leaves(0)
    waiting = [process.begin(schemes.receive) for process in connected.processes] if sync else []
    time.sleep(0.1)
    process.stop()
    fill(source, 1.0)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match="worker 0") as caught:
        connected.scheme.send()
    assert seconds - 0.1 < time.monotonic() - started < seconds + 1.0
    assert list(caught.value.failed) == [0]
    assert_text(
        caught.value, r"worker 0 \(pid \d+\)", text, "it holds version 0", "push of version 1", r"after 1\.\d s"
    )
    if sync:
        assert waiting[1].result(5.0) is not None
    assert_same_bits(connected.leaves(1), leaves_of(source))

    process.go_on()
    if sync:
        with pytest.raises(WeightSyncError, match="ended"):
            waiting[0].result(5.0)
    else:
        process.call(wait_until_link_ended)
    assert process.call(schemes.version) == 0
    assert_same_bits(connected.leaves(0), before)
    fill(source, 2.0)
    with pytest.raises(WorkerDied, match=r"worker 0 .*broken"):
        connected.push()


def wait_until_link_ended(box):
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("weight-sync") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@both_ways
def test_a_hook_that_leaves_the_program_is_told_to_the_sender_and_ends_the_link(connect, sync):
    """What is no ``Exception`` passes through the receiver's thread; its heartbeats would go on for ever."""
    connected = connect(source := layers(), sync=sync, timeout=120)
    process, before = connected.processes[0], connected.leaves()

    def leave_at_next_switch(box):
        def hook(model, version):
            raise SystemExit("enough")

        box.scheme.add_applied_hook(hook)

    process.call(leave_at_next_switch)
    fill(source, 1.0)
    waiting = process.begin(schemes.receive) if sync else None
    started = time.monotonic()
    with pytest.raises(WorkerError, match="SystemExit: enough"):
        connected.scheme.send()
    if waiting is not None:
        with pytest.raises(SystemExit, match="enough"):
            process.result_of(waiting)
    process.call(wait_until_link_ended)
    with pytest.raises(WorkerDied, match="worker 0"):
        connected.scheme.send()
    assert time.monotonic() - started < 5.0
    assert_same_bits(connected.leaves(), before)
    why = process.call(lambda box: str(box.scheme._link.cause))
    assert why == "SystemExit was raised while the sender was served"


@pytest.mark.slow
def test_a_long_policy_call_is_no_silence(connect):
    """A worker that is busy (without the interpreter's lock) for longer than ``heartbeat_timeout`` is alive."""
    connected = connect(source := layers(), heartbeat_timeout=0.5, timeout=20)

    def receive_after_work(box):
        time.sleep(1.5)
        return box.scheme.receive(10) is not None

    waiting = connected.processes[0].begin(receive_after_work)
    connected.scheme.send()
    assert connected.processes[0].result_of(waiting)
    assert_same_bits(connected.leaves(), leaves_of(source))


@pytest.mark.slow
def test_a_worker_that_was_stopped_at_its_gate_does_not_apply_what_was_given_up(connect):
    """Its own deadline is far away and every byte is there: only the end of the link tells it."""
    connected = connect(source := layers(), sync=False, timeout=120, heartbeat_timeout=1.0)
    process = connected.processes[0]
    before = connected.leaves()
    process.call(hold_gate)
    fill(source, 1.0)
    stopping = threading.Timer(0.5, process.stop)
    stopping.start()
    with pytest.raises(WeightSyncTimeout, match="heartbeat_timeout"):
        connected.scheme.send()
    process.go_on()
    process.call(release_gate)
    process.call(wait_until_link_ended)
    assert process.call(schemes.version) == 0
    assert_same_bits(connected.leaves(), before)


def be_sender(box, process_count):
    box.scheme = DistributedWeightSyncScheme(connect_timeout=20)
    box.scheme.init_on_sender("policy", model=layers(), num_workers=process_count)
    return box.scheme.get_store_info()


@both_ways
def test_a_receiver_learns_that_its_sender_was_killed(receivers, sync):
    info = receivers[0].call(be_sender, 1)
    theirs = DistributedWeightSyncScheme(sync=sync, connect_timeout=20)
    receivers[1].call(schemes.init, theirs, layers(), worker_idx=0, store_info=info)
    joining = [receivers[0].begin(schemes.connect), receivers[1].begin(schemes.connect)]
    for future in joining:
        future.result(10)
    waiting = receivers[1].begin(schemes.receive, None) if sync else receivers[1].begin(wait_until_link_ended)
    time.sleep(0.1)
    receivers[0].kill()
    if sync:
        with pytest.raises(WeightSyncError, match=r"worker 0: .*ended"):
            waiting.result(2.0)
    else:
        waiting.result(2.0)
    assert receivers[1].call(schemes.version) == 0


# --- what a worker reports itself ----------------------------------------------------------------------------------


@both_ways
def test_an_error_while_applying_leaves_the_link_up_and_the_version_where_it_was(connect, sync):
    connected = connect(source := layers(), 2, sync=sync)

    def fail_at_third(box):
        def hook(model, version):
            if version == 3:
                raise LookupError("no cache for version 3")

        box.scheme.add_applied_hook(hook)

    connected.processes[1].call(fail_at_third)
    for value in (1.0, 2.0):
        fill(source, value)
        connected.push()
    held = connected.leaves(1)

    fill(source, 3.0)
    waiting = [connected.processes[i].begin(schemes.receive, 1.0) for i in range(2)] if sync else []
    with pytest.raises(WorkerError) as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [1]
    assert_text(caught.value, r"worker 1 \(pid \d+\) kept version 2", "LookupError: no cache for version 3")
    assert re.search(r"Traceback .*in hook\nLookupError", caught.value.remote_traceback, re.DOTALL)
    assert [future.result(5.0) is not None for future in waiting] == ([True, False] if sync else [])
    assert connected.versions == [3, 2]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    assert_same_bits(connected.leaves(1), held)

    fill(source, 4.0)
    connected.push()
    assert connected.versions == [4, 4]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_an_error_of_the_sender_itself_is_not_blamed_on_the_worker(connect, monkeypatch):
    connected = connect(source := layers(), 2, sync=False)
    transport = connected.scheme.sender_transports[0]
    send = transport.send

    def sending(worker_idx, slot):
        if worker_idx == 0:
            raise KeyError("no such thing")
        return send(worker_idx, slot)

    monkeypatch.setattr(transport, "send", sending)
    fill(source, 1.0)
    with pytest.raises(WeightSyncError) as caught:
        connected.push()
    assert type(caught.value) is type(caught.value.failed[0]) is WeightSyncError
    assert list(caught.value.failed) == [0]
    assert_text(caught.value, r"worker 0 \(pid \d+\)", "KeyError: 'no such thing'", r"phase: push of version 1")
    assert "gone" not in str(caught.value)
    assert_same_bits(connected.leaves(1), leaves_of(source))


def test_extra_states_that_are_too_large_together_are_refused_before_anything_is_sent(connect, monkeypatch):
    source, theirs = (nn.Sequential(nn.Linear(3, 4), WithExtraState()) for _ in range(2))
    connected = connect(source, receiver_model=theirs, sync=False)
    fill(source[0], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(pushing, "MAX_BLOB", (128 << 10) + 100)  # of which one model's weights may take 128 KiB
        with pytest.raises(TypeError, match=r"extra states of 'policy' take \d+ bytes together; at most 131172 are"):
            connected.push()
    assert connected.scheme.version == 0
    connected.push()
    assert connected.versions == [1]


def test_a_version_that_is_not_newer_is_refused(connect):
    connected = connect(source := layers(), sync=False)
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        connected.push()
    newest = leaves_of(source)
    hub = connected.scheme._hub  # no public call makes a version go backwards
    for run, version in ((hub.run, 0), (hub.run, 2), (hub.run - 1, 100)):
        fill(source, 9.0)
        (hub.run, kept), hub.version = (run, hub.run), version
        with pytest.raises(StaleVersionError, match="worker 0") as caught:
            connected.scheme.send()
        hub.run = kept
        assert list(caught.value.failed) == [0]
        assert connected.versions == [3]
        assert_same_bits(connected.leaves(), newest)
    hub.version = 3
    connected.push()
    assert connected.versions == [4]
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_weights_that_are_not_those_of_connect_are_refused_before_anything_is_sent(connect):
    connected = connect(source := layers(), sync=False)
    before = connected.leaves()
    wrong = leaves_of(source)
    for weights, name in (
        (wrong | {"0.bias": torch.zeros(5)}, "0.bias"),
        (wrong | {"0.bias": wrong["0.bias"].double()}, "0.bias"),
        ({k: v for k, v in wrong.items() if k != "scale"}, "scale"),
        (wrong | {"more": torch.zeros(1)}, "more"),
    ):
        with pytest.raises(LayoutMismatchError, match=name):
            connected.scheme.send(weights)
    assert connected.versions == [0]
    assert_same_bits(connected.leaves(), before)
    fill(source, 2.0)
    connected.push()
    assert_same_bits(connected.leaves(), leaves_of(source))
    assert connected.versions == [connected.scheme.version] == [1]
