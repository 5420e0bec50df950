"""``send_async``: the caller is held for a snapshot, and for nobody's worker."""

import time

import pytest
import torch
from torch import nn

from lightning_weightsync import LayoutMismatchError, WeightSyncTimeout, WorkerDied, WorkerError
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import assert_text, hold_gate, layers, release_gate
from tests.helpers.threads import Call, eventually


def big(megabytes=80):
    return nn.ParameterDict({"weight": nn.Parameter(torch.zeros(megabytes * 1_000_000 // 4))})


def value_of(leaves):
    (value,) = {value for leaf in leaves.values() for value in leaf.unique().tolist()}
    return value


def state_names(handles):
    return [handle.state.value for handle in handles]


def send_async_at_once(connected):
    """``send_async``; back when every worker has been asked, so that no later push can take its place."""
    handle = connected.scheme.send_async()
    eventually(lambda: all(errand.state.value != "queued" for errand in handle.errands))
    return handle


# --- the snapshot ---------------------------------------------------------------------------------------------------


def test_what_is_written_after_the_call_is_not_sent(connect):
    """80 MB, filled with 9 as soon as the call is back: the worker reads what was there before, never a mixture."""
    source = big()
    connected = connect(source, 1, sync=False)

    def found(box):
        return [value.item() for value in box.model["weight"].detach().aminmax()]

    for value in [0.0, *range(100, 119)]:
        fill(source, float(value))
        handle = connected.scheme.send_async()
        fill(source, 9.0)
        handle.wait()
        assert connected.processes[0].call(found) == [value, value]


def test_a_handle_tells_what_has_become_of_its_push(connect):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    handle = connected.scheme.send_async()
    assert (handle.version, connected.scheme.version) == (1, 1)
    assert handle.wait(10).value == "done"
    assert (handle.done, handle.superseded, handle.error, handle.failed) == (True, False, None, {})
    assert connected.versions == [1, 1]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert handle.wait(0).value == "done"


def test_nobody_need_wait_for_a_handle(connect):
    connected = connect(source := layers(), 2, sync=False)
    for value in range(1, 21):
        fill(source, float(value))
        connected.scheme.send_async()
    eventually(lambda: connected.versions == [20, 20])
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_it_works_with_receivers_that_call_receive(connect):
    connected = connect(source := layers(), sync=True)
    fill(source, 2.0)
    handle = connected.scheme.send_async()
    assert connected.processes[0].call(schemes.receive) is not None
    assert handle.wait(5).value == "done"
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_only_the_addressed_workers_change(connect):
    connected = connect(source := layers(), 2, sync=False)
    before = connected.leaves(0)
    fill(source, 2.0)
    connected.scheme.send_async(worker_ids=1).wait(10)
    assert connected.versions == [0, 1]
    assert_same_bits(connected.leaves(0), before)
    with pytest.raises(ValueError, match=r"0 \.\. 1"):
        connected.scheme.send_async(worker_ids=2)


def test_weights_that_are_not_those_of_connect_raise_at_once_and_take_no_version(connect):
    connected = connect(layers(), sync=False)
    with pytest.raises(LayoutMismatchError):
        connected.scheme.send_async({"0.weight": torch.zeros(1)})
    assert connected.scheme.version == 0


# --- workers that are slow, stopped or wrong ------------------------------------------------------------------------


def test_a_stopped_worker_holds_up_neither_the_caller_nor_the_others_and_gets_the_newest_afterwards(connect):
    source = nn.Linear(500, 500)
    connected = connect(source, 2, sync=False)
    stopped = connected.processes[1]
    stopped.stop()
    fill(source, 1.0)
    handles, slowest = [send_async_at_once(connected)], 0.0
    for value in range(2, 31):
        fill(source, float(value))
        started = time.monotonic()
        handles.append(connected.scheme.send_async())
        slowest = max(slowest, time.monotonic() - started)
        eventually(lambda value=value: connected.processes[0].call(schemes.version) == value)
    assert slowest < 1.0
    assert value_of(connected.leaves(0)) == 30.0
    # The first was sent before anybody knew; of those behind it the last is waiting, and the others know their fate.
    assert state_names(handles) == ["pending", *["superseded"] * 28, "pending"]
    assert all(handle.superseded and not handle.done and handle.error is None for handle in handles[1:29])
    assert handles[5].wait(0).value == "superseded"
    with pytest.raises(WeightSyncTimeout, match=r"version 30 of 'policy' is not settled after 0\.2 s: .*\[1\]"):
        handles[-1].wait(0.2)

    stopped.go_on()
    assert handles[-1].wait(10).value == "done"
    assert handles[0].wait(0).value == "done"
    assert connected.versions == [30, 30]
    assert value_of(connected.leaves(1)) == 30.0


def test_a_push_that_was_not_sent_in_time_is_a_timeout_and_the_worker_stays(connect):
    connected = connect(source := layers(), sync=False)
    (process,) = connected.processes
    process.call(hold_gate)
    try:
        fill(source, 1.0)
        first = send_async_at_once(connected)
        connected.scheme.timeout = 0.3
        with pytest.raises(WeightSyncTimeout, match="version 2") as caught:
            connected.scheme.send_async().wait(5)
        late = caught.value.failed[0]
        assert isinstance(late, WeightSyncTimeout)
        assert_text(late, rf"worker 0 \(pid {process.pid}\) is busy: push of version 2 .* not sent within 0\.\d s")
    finally:
        process.call(release_gate)
    assert first.wait(5).value == "done"
    connected.push()
    assert connected.versions == [3]


def test_a_blocking_send_after_asynchronous_ones_comes_last_and_is_itself_not_replaced(connect):
    connected = connect(source := layers(), sync=False)
    process = connected.processes[0]
    process.call(hold_gate)
    fill(source, 1.0)
    handles = [send_async_at_once(connected)]
    for value in (2.0, 3.0):
        fill(source, value)
        handles.append(connected.scheme.send_async())
    release = process.begin(release_soon)
    fill(source, 4.0)
    connected.scheme.send()
    assert connected.versions == [4]
    assert value_of(connected.leaves()) == 4.0
    process.result_of(release)
    assert state_names(handles) == ["done", "superseded", "superseded"]


def release_soon(box):
    time.sleep(0.3)
    release_gate(box)


def test_a_blocking_send_that_waits_is_not_superseded_by_asynchronous_ones(connect):
    connected = connect(source := layers(), sync=False)
    process = connected.processes[0]
    seen = process.call(note_versions)
    assert seen is None
    process.call(hold_gate)
    fill(source, 1.0)
    first = send_async_at_once(connected)
    blocking = Call(connected.scheme.send)
    eventually(lambda: connected.scheme.version == 2)
    fill(source, 3.0)
    last = connected.scheme.send_async()
    process.call(release_gate)
    blocking.result(10)
    assert (first.wait(10).value, last.wait(10).value) == ("done", "done")
    assert process.call(lambda box: box.seen) == [1, 2, 3]


def note_versions(box):
    box.seen = []
    box.scheme.add_applied_hook(lambda model, version: box.seen.append(version))


def test_an_error_of_a_worker_is_reported_by_its_handle_and_the_next_push_is_as_usual(connect):
    def fail_at_second(box):
        def hook(model, version):
            if version == 2:
                raise LookupError("no cache")

        box.scheme.add_applied_hook(hook)

    connected = connect(source := layers(), 2, sync=False)
    connected.processes[1].call(fail_at_second)
    handles = []
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        handles.append(connected.scheme.send_async())
        eventually(lambda: handles[-1].state.value != "pending")
    assert state_names(handles) == ["done", "failed", "done"]
    assert isinstance(handles[1].error, WorkerError) and list(handles[1].failed) == [1]
    with pytest.raises(WorkerError, match="LookupError: no cache"):
        handles[1].wait()
    assert connected.versions == [3, 3]


def test_a_worker_that_is_killed_is_reported_by_the_handle_and_its_memory_is_given_back(connect):
    source = nn.Linear(500, 500)
    connected = connect(source, 2, sync=False, max_slots=3)
    connected.processes[1].stop()
    fill(source, 1.0)
    handle = connected.scheme.send_async()
    connected.processes[1].kill()
    with pytest.raises(WorkerDied, match="worker 1") as caught:
        handle.wait(10)
    assert list(caught.value.failed) == [1]
    for value in range(2, 12):  # with a slot lost for good there would soon be none
        fill(source, float(value))
        with pytest.raises(WorkerDied):
            connected.scheme.send_async().wait(10)
        assert value_of(connected.leaves(0)) == float(value)
    assert len(connected.scheme._pool) <= 3


def test_a_handle_that_is_kept_keeps_no_slot(connect):
    """The fixture finds a memory file that is still open."""
    connected = connect(source := layers(), sync=False)
    handles = []
    for value in range(5):
        fill(source, float(value))
        handles.append(connected.scheme.send_async())
        handles[-1].wait(10)
    connected.scheme.shutdown()
    connect.kept = handles


@pytest.mark.parametrize("num_workers", [1, 3])
def test_no_number_of_stuck_workers_makes_the_caller_wait(connect, num_workers):
    """The worst case: each worker is stuck in a policy call, with another version in force and another one sent."""
    connected = connect(source := layers(), num_workers, sync=False)
    for index, process in enumerate(connected.processes):
        connected.push(worker_ids=index)
        process.call(hold_gate)
        handle = connected.scheme.send_async(worker_ids=index)
        eventually(lambda handle=handle: handle.errands[0].state.value == "sent")
    started = time.monotonic()
    for value in range(20):
        fill(source, float(value))
        connected.scheme.send_async()
    assert time.monotonic() - started < 2.0
    for process in connected.processes:
        process.call(release_gate)
    eventually(lambda: set(connected.versions) == {connected.scheme.version})
    assert value_of(connected.leaves(0)) == 19.0


def test_where_slots_are_limited_the_caller_waits_for_one_at_most_as_long_as_timeout_and_is_told_who_has_them(connect):
    connected = connect(layers(), 1, sync=False, max_slots=1, timeout=1.5)
    connected.processes[0].call(hold_gate)
    handle = send_async_at_once(connected)
    started = time.monotonic()
    outcome = Call(connected.scheme.send_async)
    time.sleep(0.3)
    assert outcome.running
    connected.processes[0].call(release_gate)
    second = outcome.result(2.0)
    assert second.version == 2
    assert time.monotonic() - started < 1.4
    assert (handle.wait(5).value, second.wait(5).value) == ("done", "done")
    connected.scheme.timeout = 20.0
    connected.processes[0].stop()
    connected.scheme.send_async()
    connected.scheme.timeout = 0.5
    with pytest.raises(WeightSyncTimeout, match=r"no slot became free in time; 1 \(max_slots\) are held by version \d"):
        connected.scheme.send_async()


@pytest.mark.parametrize("only_changed", [False, True])
def test_workers_that_have_different_versions_in_force_leave_a_slot_for_the_next_one(connect, only_changed):
    connected = connect(source := layers(), 2, sync=False, max_slots=2, timeout=2.0, only_changed=only_changed)
    fill(source, 1.0)
    connected.scheme.send(worker_ids=[0])
    for value in (2.0, 3.0):
        fill(source, value)
        connected.scheme.send()
    assert [value_of(connected.leaves(index)) for index in (0, 1)] == [3.0, 3.0]


@pytest.mark.parametrize("stuck", ["gate", "stopped"])
def test_shutdown_with_pushes_under_way_takes_less_than_a_second_and_fails_them(connect, stuck):
    connected = connect(source := layers(), 2, sync=False, timeout=3600, heartbeat_timeout=3600)
    process = connected.processes[1]
    process.call(hold_gate)
    if stuck == "stopped":
        process.stop()
    fill(source, 1.0)
    handles = [send_async_at_once(connected)]
    fill(source, 2.0)
    handles.append(connected.scheme.send_async())
    eventually(lambda: connected.processes[0].call(schemes.version) == 2)
    started = time.monotonic()
    connected.scheme.shutdown()
    assert time.monotonic() - started < 1.0
    assert state_names(handles) == ["failed", "failed"]
    assert all(list(handle.failed) == [1] for handle in handles)
    process.go_on()
    process.call(release_gate)
