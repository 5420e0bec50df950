"""Workers at rest are switched in their sleep: nothing is sent to them, and all that a push promises holds."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.push import push_models
from lightning_weightsync.transports import at_rest
from lightning_weightsync.transports.board import SenderBoard
from lightning_weightsync.transports.hub import LinkHub
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of, scramble
from tests.helpers.schemes import over_shared_memory
from tests.helpers.threads import Call, eventually

pytestmark = over_shared_memory

SIZE = 64


def layers(depth=6):
    """Several pages, and parameters only."""
    net = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(depth)))
    fill(net, 0.0)
    return net


def push(connected, weights=None, worker_ids=None, timeout=schemes.PUSH_SECONDS):
    """``scheme.send``; returns who was switched in its sleep."""
    scheme = connected.scheme
    hub = scheme._hub
    handle = push_models(hub, {scheme: weights}, hub.check_ids(worker_ids), timeout=timeout)
    handle.wait()
    return handle.at_rest


def lose(connected, worker):
    """Kill it, and have the sender know."""
    connected.processes[worker].kill()
    eventually(lambda: connected.scheme._hub.find_down() == [worker])


def replace(connected, worker, process):
    """Another process joins in its place."""
    joining = connected.join(worker, process, layers())
    connected.scheme.connect(worker_ids=[worker])
    joining.result(10)


# --- run in the receiver's process ----------------------------------------------------------------------------------


def call(box, *, gradients=False):
    """One policy call; returns what it saw, and the version."""
    with torch.set_grad_enabled(gradients), box.scheme.gate as gate:
        return float(box.model(torch.ones(1, SIZE)).mean()), gate.version


def scribble(box, value=-5.0):
    with torch.no_grad():
        box.model[0].weight[0, 0] = value


# --- what is switched in its sleep ----------------------------------------------------------------------------------


def test_workers_at_rest_have_each_version_at_once_and_are_sent_nothing(connect):
    connected = connect(source := layers(), 3, sync=False)
    handed_over = connected.scheme._hub.bytes_pushed
    for number in range(1, 21):
        scramble(source.parameters(), seed=number)
        assert push(connected) == [0, 1, 2]
        assert connected.versions == [number] * 3
        for worker in range(3):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert connected.scheme._hub.bytes_pushed - handed_over == 20 * 3 * connected.scheme._pool.nbytes
    assert len(connected.scheme._pool) == 2


def test_an_asynchronous_push_is_settled_when_it_returns(connect):
    connected = connect(source := layers(), 2, sync=False)
    for number in range(1, 6):
        fill(source, float(number))
        handle = connected.scheme.send_async()
        assert handle.done and handle.at_rest == [0, 1] and handle.error is None
        assert connected.versions == [number] * 2


def test_a_policy_call_sees_the_version_that_the_gate_tells(connect):
    connected = connect(source := layers(1), 2, sync=False)
    for number in range(1, 4):
        fill(source, float(number))
        assert push(connected) == [0, 1]
        for process in connected.processes:
            assert process.call(call) == (float(number * SIZE), number)
        assert [process.call(lambda box: box.scheme.gate.version) for process in connected.processes] == [number] * 2


def test_a_push_whose_answers_nobody_has_read_is_read_first(connect):
    """Until then the sender does not know which slot a worker has mapped."""
    connected = connect(source := layers(), 2, sync=False)
    scheme = connected.scheme
    assert push(connected) == [0, 1]
    for number in range(2, 12):
        hub = scheme._hub
        hub.next_values = {"number": number}  # so that it is a message
        push_models(hub, {scheme: None}, [number % 2], timeout=schemes.PUSH_SECONDS)
        eventually(lambda worker=number % 2: connected.versions[worker] == scheme.version)
        time.sleep(0.02)
        for _ in range(2):
            scramble(source.parameters(), seed=hub.version)
            push(connected)
            for worker in range(2):
                assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_who_waits_for_a_version_is_told(connect):
    connected = connect(source := layers(), sync=False)
    waiting = connected.processes[0].begin(lambda box: box.scheme.gate.wait_for_version(1, 10.0))
    time.sleep(0.1)
    assert not waiting.done()
    assert push(connected, source) == [0]
    assert waiting.result(1.0) is True
    assert connected.processes[0].call(lambda box: box.scheme.gate.wait_for_version(2, 0.05)) is False


def test_parameters_that_are_tied_frozen_or_empty(connect):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.b = nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight
            self.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
            self.empty = nn.Parameter(torch.empty(0, 3))

    connected = connect(source := Net(), 2, sync=False)
    for number in range(3):
        scramble(source.parameters(), seed=number)
        assert push(connected) == [0, 1]
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_a_replacement_starts_from_what_was_written_in_their_sleep(connect):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    assert push(connected) == [0, 1]
    lose(connected, 1)
    fill(source, 9.0)  # not pushed
    replace(connected, 1, connect.receivers[2])
    assert connected.versions == [1, 1]
    assert connected.processes[1].call(lambda box: box.model[0].weight[0, 0].item()) == 1.0
    assert push(connected) == []  # the two have different slots
    assert push(connected) == [0, 1]
    assert connected.versions == [3, 3]


def test_what_only_one_was_sent_stays_its_own(connect):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    assert push(connected, worker_ids=[0]) == []  # the other one has the slot too
    fill(source, 2.0)
    assert push(connected, worker_ids=[0]) == [0]
    assert connected.versions == [2, 0]
    assert [set(connected.leaves(i)["0.weight"].unique().tolist()) for i in range(2)] == [{2.0}, {0.0}]
    assert push(connected) == []
    assert push(connected) == [0, 1]
    assert connected.versions == [4, 4]


def test_what_is_kept_for_a_lost_worker_is_not_written_again(connect):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    assert push(connected) == [0, 1]
    lose(connected, 1)
    fill(source, 2.0)
    push(connected, worker_ids=[0])
    fill(source, 3.0)
    assert push(connected, worker_ids=[0]) == [0]
    replace(connected, 1, connect.receivers[2])
    assert connected.versions == [3, 1]
    assert set(connected.leaves(1)["0.weight"].unique().tolist()) == {1.0}


# --- what takes the usual way ---------------------------------------------------------------------------------------


class WithBuffer(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(4))


class WithState(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.state = torch.zeros(1)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (WithBuffer, {}),
        (WithState, {}),
        (layers, {"apply": "copy"}),
        (layers, {"strategy": "state_dict"}),
        (layers, {"verify": True}),
        (layers, {"only_changed": True}),
        (layers, {"max_slots": 1}),
        (layers, {"wire_dtype": torch.bfloat16}),
        (lambda: nn.Linear(1200, 1200), {}),
    ],
    ids=["buffer", "extra state", "copy", "state_dict", "verify", "only_changed", "one slot", "wire_dtype", "large"],
)
def test_what_a_switch_has_more_to_do_for_is_sent(connect, model, options):
    connected = connect(source := model(), 2, receiver_model=lambda _: model(), sync=False, **options)
    for number in range(1, 4):
        scramble(source.parameters(), seed=number)
        source.to(torch.bfloat16).to(torch.float32)  # so that `wire_dtype` changes nothing
        assert push(connected) == []
        assert connected.versions == [number] * 2
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_a_worker_that_receives_in_its_own_loop_is_sent_all(connect):
    connected = connect(source := layers(), 2, sync=True)
    for number in range(1, 4):
        fill(source, float(number))
        waiting = [process.begin(schemes.receive) for process in connected.processes]
        assert push(connected) == []
        assert all(future.result(5) is not None for future in waiting)


def test_a_hook_is_called_at_each_version_from_when_it_is_added(connect):
    def add(box):
        box.seen = []
        box.scheme.add_applied_hook(lambda model, version: box.seen.append((version, model[0].weight[0, 0].item())))

    connected = connect(source := layers(), 2, sync=False)
    assert push(connected) == [0, 1]
    connected.processes[1].call(add)
    for number in range(2, 5):
        fill(source, float(number))
        assert push(connected) == []
    assert connected.processes[1].call(lambda box: box.seen) == [(number, float(number)) for number in range(2, 5)]


def test_a_worker_that_has_written_its_weights_gets_the_whole_version(connect):
    connected = connect(source := layers(), 2, sync=False)
    assert push(connected) == [0, 1]
    connected.processes[1].call(scribble)
    fill(source, 2.0)
    assert push(connected) == []
    assert_same_bits(connected.leaves(1), leaves_of(source))
    assert_same_bits(connected.leaves(0), leaves_of(source))
    fill(source, 3.0)
    assert push(connected) == []  # it may do so again, at any moment
    assert push(connected, worker_ids=[0]) == []
    assert push(connected, worker_ids=[0]) == [0]
    assert_same_bits(connected.leaves(1), leaves_of(source))


def test_gradients_keep_the_weights_that_they_need(connect):
    """A backward pass that comes too late raises, as after any change in place, instead of being wrong."""

    def forward(box):
        with box.scheme.gate:
            box.loss = box.model(torch.ones(1, SIZE)).sum()

    def backward(box):
        box.loss.backward()

    connected = connect(source := layers(2), 2, sync=False)
    assert push(connected) == [0, 1]
    connected.processes[0].call(forward)
    fill(source, 2.0)
    assert push(connected) == []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        connected.processes[0].call(backward)
    assert push(connected) == []  # it may do so again
    assert_same_bits(connected.leaves(0), leaves_of(source))


def test_calls_without_gradients_do_not_matter(connect):
    connected = connect(source := layers(1), sync=False)
    for number in range(1, 4):
        fill(source, float(number))
        assert push(connected) == [0]
        assert connected.processes[0].call(call) == (float(number * SIZE), number)


def test_frozen_leaves_are_needed_for_the_gradients_of_others(connect):
    connected = connect(source := layers(1).requires_grad_(False), sync=False)
    assert push(connected) == [0]
    connected.processes[0].call(call, gradients=True)
    fill(source, 2.0)
    assert push(connected) == []
    assert connected.processes[0].call(call) == (2.0 * SIZE, 2)


def test_a_module_that_does_not_fit_any_more_is_told_to_the_sender(connect):
    def grow(box):
        box.model.register_parameter("late", nn.Parameter(torch.zeros(3)))

    connected = connect(source := layers(1), sync=False)
    assert push(connected) == [0]
    connected.processes[0].call(grow)
    fill(source, 2.0)
    push(connected)  # that it has grown is found out by the next policy call, which is none the worse for it
    assert connected.processes[0].call(call) == (2.0 * SIZE, 2)
    fill(source, 3.0)
    with pytest.raises(WeightSyncError, match="late"):
        push(connected)
    assert connected.processes[0].call(call) == (2.0 * SIZE, 2)


def test_a_parameter_that_has_been_replaced_follows_from_the_next_policy_call_on(connect):
    def replace(box):
        box.model[0].weight = nn.Parameter(torch.full((SIZE, SIZE), 7.0))

    connected = connect(source := layers(1), sync=False)
    fill(source, 1.0)
    assert push(connected) == [0]
    connected.processes[0].call(replace)
    fill(source, 2.0)
    push(connected)
    assert connected.processes[0].call(call) == (2.0 * SIZE, 2)
    fill(source, 3.0)
    push(connected)
    assert connected.processes[0].call(call) == (3.0 * SIZE, 3)


def test_a_busy_worker_is_waited_for_as_ever(connect):
    connected = connect(source := layers(), 2, sync=False, timeout=0.8)
    assert push(connected) == [0, 1]
    connected.processes[1].call(schemes.hold_gate)
    fill(source, 2.0)
    with pytest.raises(WeightSyncTimeout, match="slow policy call") as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [1]
    assert connected.versions == [2, 1]
    connected.processes[1].call(schemes.release_gate)
    connected.scheme.send()
    assert connected.versions == [3, 3]


def test_values_travel_with_a_push_of_their_own(connect):
    connected = connect(source := layers(), 2, sync=False)
    hub = connected.scheme._hub
    assert push(connected) == [0, 1]
    hub.next_values = {"epsilon": 0.5}
    assert push(connected, worker_ids=[0]) == []
    assert push(connected) == []  # the other one has to be told as well
    assert push(connected) == [0, 1]
    for process in connected.processes:
        assert process.call(lambda box: dict(box.scheme.gate.values)) == {"epsilon": 0.5}
    assert connected.versions == [4, 4]
    del source


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stopped_worker_is_no_worker_at_rest(connect, at_once):
    """One that is being stopped may be, or may even answer: then the push came before the stop, and it has the weights.

    The kernel has one of its threads stop the others, as soon as it has a core for that one.
    """
    connected = connect(source := layers(), 3, sync=False, timeout=1.0)
    assert push(connected) == [0, 1, 2]
    stopped = connected.processes[1]
    for round in range(5):
        if at_once:
            os.kill(stopped.pid, signal.SIGSTOP)
        else:
            stopped.stop()
        fill(source, 2.0 + round)
        failed = []
        try:
            asleep = push(connected, timeout=1.0)
        except WeightSyncError as error:
            failed = list(error.failed)
        stopped.go_on()
        if at_once and not failed:
            assert asleep in ([0, 1, 2], [])  # all or nobody
            assert_same_bits(connected.leaves(1), leaves_of(source))
            continue
        assert failed == [1]
        eventually(lambda: stopped.call(lambda box: box.scheme._link.state.value) == "ended")
        joining = stopped.begin(schemes.connect)
        connected.scheme.connect(worker_ids=[1])
        joining.result(10)
        push(connected)
        assert push(connected) == [0, 1, 2]


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.2])
def test_a_killed_worker_is_no_worker_at_rest(connect, pause):
    connected = connect(source := layers(), 3, sync=False, timeout=20.0)
    assert push(connected) == [0, 1, 2]
    os.kill(connected.processes[1].pid, signal.SIGKILL)
    time.sleep(pause)
    fill(source, 2.0)
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        connected.scheme.send()
    assert time.monotonic() - started < 3.0
    assert list(caught.value.failed) == [1]
    for worker in (0, 2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert push(connected, worker_ids=[0, 2]) == []  # what they have mapped is what a replacement starts from
    assert push(connected, worker_ids=[0, 2]) == [0, 2]


def test_a_receiver_that_was_shut_down_is_found_out(connect):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    assert push(connected) == [0, 1]
    connected.processes[1].call(schemes.shutdown)
    fill(source, 2.0)
    with pytest.raises(WeightSyncError) as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [1]
    assert set(connected.leaves(1)["0.weight"].unique().tolist()) == {1.0}


class _Interrupted(BaseException):
    pass


def _half(target, origin, count):
    ctypes.memmove(target, origin, count // 2)
    raise _Interrupted


def _interrupt(patch, where):
    """Have Ctrl-C come right after a step of the first worker's, or in the middle of the copy."""
    if where == "copy":
        patch.setattr(at_rest, "ctypes", SimpleNamespace(memmove=_half))
        return
    if where == "handle":
        patch.setattr(LinkHub, "push", _stopping_after(LinkHub.push, before=True))
        return
    patch.setattr(SenderBoard, where, _stopping_after(getattr(SenderBoard, where)))


def _stopping_after(step, before=False):
    calls = []

    def interrupted(*args, **kwargs):
        if calls:
            return step(*args, **kwargs)
        calls.append(args)
        if not before:
            step(*args, **kwargs)
        raise _Interrupted

    return interrupted


@pytest.mark.parametrize("where", ["lock", "begin", "copy", "pages_are_shared", "end", "unlock"])
def test_ctrl_c_in_the_middle_leaves_no_mixture_and_no_lock(connect, monkeypatch, where):
    connected = connect(source := layers(), 2, sync=False)
    assert push(connected) == [0, 1]
    fill(source, 2.0)
    with monkeypatch.context() as patch:
        _interrupt(patch, where)
        with pytest.raises(_Interrupted):
            connected.scheme.send()
    for worker in range(2):
        seen, version = connected.processes[worker].call(call)
        assert (seen > 0, version) in ((False, 1), (True, 2))
    eventually(lambda: connected.versions == [2, 2])
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    fill(source, 3.0)
    push(connected)
    assert push(connected) == [0, 1]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    assert len(connected.scheme._pool) <= 4  # none is held for ever


def test_ctrl_c_before_the_handle_leaves_the_right_bytes_for_a_replacement(connect, monkeypatch):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    assert push(connected) == [0, 1]
    fill(source, 2.0)
    with monkeypatch.context() as patch:
        _interrupt(patch, "handle")
        with pytest.raises(_Interrupted):
            connected.scheme.send()
    assert connected.versions == [2, 2]
    lose(connected, 1)
    replace(connected, 1, connect.receivers[2])
    assert connected.versions == [2, 2]
    assert set(connected.leaves(1)["0.weight"].unique().tolist()) == {2.0}


def test_a_sender_that_is_shut_down_by_another_thread_lets_the_switch_end_first(connect, monkeypatch):
    connected = connect(source := layers(), 2, sync=False)
    assert push(connected) == [0, 1]

    def copy(target, origin, count):
        ctypes.memmove(target, origin, count // 2)
        closing.append(Call(connected.scheme.shutdown))
        time.sleep(0.1)
        assert closing[0].running
        assert connected.scheme._hub.links[0].board is not None
        ctypes.memmove(target, origin, count)

    closing = []
    fill(source, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(at_rest, "ctypes", SimpleNamespace(memmove=copy))
        with contextlib.suppress(WeightSyncError):
            connected.scheme.send()
    closing[0].result(5)
    for process in connected.processes:
        assert process.call(call)[1] == 2
        assert process.call(lambda box: {v for leaf in box.model.parameters() for v in leaf.unique().tolist()}) == {2.0}


def test_a_worker_that_writes_at_that_very_moment_is_mended_by_the_usual_push(connect, monkeypatch):
    """It asks no gate, so the lock does not keep it from writing."""
    connected = connect(source := layers(), 3, sync=False)
    assert push(connected) == [0, 1, 2]

    def copy(target, origin, count):
        ctypes.memmove(target, origin, count // 2)
        connected.processes[1].call(scribble)
        ctypes.memmove(target, origin, count)

    fill(source, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(at_rest, "ctypes", SimpleNamespace(memmove=copy))
        assert push(connected) == [0, 2]
    assert connected.versions == [2, 2, 2]
    for worker in range(3):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    push(connected)
    assert push(connected) == []


def test_weights_that_the_sender_left_half_written_are_never_used(connect):
    """As if it had been killed in the middle."""
    connected = connect(source := layers(), 2, sync=False)
    assert push(connected) == [0, 1]
    board = connected.scheme._hub.links[0].board
    assert board.lock()
    board.begin()
    calling = connected.processes[0].begin(call)
    time.sleep(0.2)
    assert not calling.done()
    connected.scheme.shutdown()
    with pytest.raises(WeightSyncError, match="mixture"):
        calling.result(5)
    with pytest.raises(WeightSyncError, match="mixture"):
        connected.processes[0].call(call)
    assert connected.processes[1].call(call)[1] == 1
    fresh = DistributedWeightSyncScheme(sync=False)
    fill(source, 4.0)
    try:
        fresh.init_on_sender("policy", model=source, num_workers=1)
        fresh.run = 2
        connected.processes[0].call(schemes.shutdown)
        connected.processes[0].call(lambda box, scheme: schemes.init(box, scheme, box.model, worker_idx=0), fresh)
        joining = connected.processes[0].begin(schemes.connect)
        fresh.connect()
        joining.result(10)
        connected.processes[0].call(call)
    finally:
        fresh.shutdown()


# --- nobody sees two versions ---------------------------------------------------------------------------------------


def start_callers(box, *, count, scribbles):
    """Threads that call the policy without gradients, now and then; ``scribbles``: they write, too, when told so."""
    box.stop, box.mixed, box.calls, box.versions = threading.Event(), [], 0, set()
    box.scribbling = threading.Event()

    def calls(number):
        x = torch.ones(1, SIZE)
        last = -1
        with torch.no_grad():
            while not box.stop.is_set():
                with box.scheme.gate as gate:
                    version = gate.version
                    found = {layer(x)[0, 0].item() / SIZE for layer in box.model}
                    found.update(v for p in box.model.parameters() for v in (p[0, 0].item(), p[-1, -1].item()))
                    if (
                        version > 0 and not found <= {float(version), *([-5.0] if scribbles else [])}
                    ) or version < last:
                        box.mixed.append((version, last, found))
                    if gate.version != version:
                        box.mixed.append(("the version changed inside", version, gate.version))
                    last = version
                    box.versions.add(version)
                    if scribbles and box.scribbling.is_set() and box.calls % 7 == 0:
                        box.model[1].weight[3:5].fill_(-5.0)
                box.calls += 1
                time.sleep(0.0005)

    box.threads = [
        threading.Thread(target=calls, args=(number,), name=f"inference {number}") for number in range(count)
    ]
    for thread in box.threads:
        thread.start()


def stop_callers(box):
    box.stop.set()
    for thread in box.threads:
        thread.join(10)
    return box.mixed[:5], box.calls, len(box.versions)


@pytest.mark.parametrize("length", [(500, 300), pytest.param((20_000, 3_000), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("scribbles", [False, True], ids=["reads only", "writes its weights"])
def test_no_call_sees_two_versions(connect, length, blocking, scribbles):
    calls, pushes = length
    connected = connect(source := layers(), 2, sync=False)
    for process in connected.processes:
        process.call(start_callers, count=2, scribbles=scribbles)
    version = slept = 0
    scribbled_from = None
    deadline = time.monotonic() + 110
    while (
        scribbled_from is None
        or version < scribbled_from + pushes - 60
        or min(process.call(lambda box: box.calls) for process in connected.processes) < calls / 2
    ):
        assert time.monotonic() < deadline
        if scribbled_from is None and slept and version >= 60:  # some have been switched asleep, or it is no test of it
            scribbled_from = version
            for process in connected.processes:
                process.call(lambda box: box.scribbling.set())
        for _ in range(20):
            version += 1
            fill(source, float(version))
            if blocking:
                slept += len(push(connected))
            else:
                slept += len(connected.scheme.send_async().at_rest)
            time.sleep(0.0003)
    fill(source, float(version + 1))
    connected.push()
    for process in connected.processes:
        mixed, _, versions = process.call(stop_callers)
        assert mixed == []
        assert versions > 10
    assert slept > 0
    connected.push()  # after the last of their writes
    assert connected.versions == [version + 2] * 2
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_a_board_is_a_process_own_business(connect):
    """A worker that forks keeps its lock, whatever its child does."""

    def fork_inside(box):
        with torch.no_grad(), box.scheme.gate:
            child = os.fork()
            if child == 0:
                with box.scheme.gate:
                    pass
                os._exit(0)
            os.waitpid(child, 0)
            box.release = threading.Event()
            box.inside = True
            return box.release.wait(3)

    connected = connect(source := layers(), sync=False)
    assert push(connected) == [0]
    inside = connected.processes[0].begin(fork_inside)
    eventually(lambda: connected.processes[0].call(lambda box: getattr(box, "inside", False)))
    board = connected.scheme._hub.links[0].board
    assert isinstance(board, SenderBoard) and not board.lock()
    connected.processes[0].call(lambda box: box.release.set())
    assert inside.result(5) is True
    assert push(connected) == [0]
    del source
