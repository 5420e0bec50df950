"""A replacement connects in the same run, from what was pushed last; the old process is fenced off; others go on."""

import gc
import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync import LayoutMismatchError, WeightSyncError, WeightSyncTimeout, WorkerDied
from lightning_weightsync.transports.link import LinkState
from tests.helpers import schemes
from tests.helpers.holdings import holdings
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.models import WithExtraState
from tests.helpers.schemes import altered, assert_text, both_ways, hold_gate, layers, release_gate
from tests.helpers.threads import Call, eventually


def rejoin(connected, worker_idx, process, model, **kwargs):
    joining = connected.join(worker_idx, process, model)
    connected.scheme.connect(**kwargs)
    process.result_of(joining)


def link_of(connected, worker_idx):
    return connected.scheme._hub.links[worker_idx]


# --- what a replacement holds ---------------------------------------------------------------------------------------


@both_ways
def test_a_replacement_starts_from_what_was_pushed_last_and_gets_what_follows(connect, receivers, sync):
    """Not from what is bound: that has changed since, and the last push was given weights of its own."""
    connected = connect(source := layers(), 2, sync=sync, timeout=20)
    for value in (1.0, 2.0):
        fill(source, value)
        connected.push()
    connected.push(pushed := leaves_of(altered(source)))
    fill(source, 9.0)
    connected.processes[1].kill()

    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.versions == [3, 3] and connected.scheme.version == 3
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), pushed)
    assert [link_of(connected, i).generation for i in range(2)] == [0, 1]
    assert link_of(connected, 1).pid == receivers[2].pid

    for value in (4.0, 5.0, 6.0):
        fill(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert connected.versions == [6, 6]


def test_a_replacement_holds_the_newest_weights_within_a_second_of_its_process_being_ready(connect, receivers):
    connected = connect(source := layers(64, depth=3), 2, sync=False)
    fill(source, 1.0)
    connected.push()
    connected.processes[0].kill()
    receivers[2].wait_ready()
    started = time.monotonic()
    rejoin(connected, 0, receivers[2], altered(source))
    assert time.monotonic() - started < 1.0
    assert connected.versions == [1, 1]
    assert_same_bits(connected.leaves(0), leaves_of(source))


def test_a_replacement_starts_from_what_was_pushed_last_for_its_worker_and_not_for_another(connect, receivers):
    """Each of two workers was pushed weights of its own, one push each; the process in a worker's place is the same."""
    connected = connect(layers(), 2, sync=False)
    own = [leaves_of(altered(layers())), leaves_of(layers())]
    for worker in range(2):
        connected.push(own[worker], worker_ids=worker)
    connected.processes[0].kill()
    rejoin(connected, 0, receivers[2], altered(layers()))
    assert connected.versions == [1, 2] and connected.scheme.version == 2
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), own[worker])
    connected.push(own[1])
    assert connected.versions == [3, 3]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), own[1])


def test_the_newest_weights_outlive_all_workers(five, connect, receivers):
    connected = connect(source := layers(), 2, sync=False)
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        connected.push()
    for process in connected.processes:
        process.kill()
    fill(source, 4.0)
    with pytest.raises(WorkerDied) as caught:
        connected.push()
    assert sorted(caught.value.failed) == [0, 1]
    newest = leaves_of(source)
    joining = [connected.join(i, receivers[2 + i], altered(source)) for i in range(2)]
    connected.scheme.connect()
    for process, future in zip(connected.processes, joining, strict=True):
        process.result_of(future)
    assert connected.versions == [4, 4]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), newest)


@pytest.mark.slow
@pytest.mark.parametrize("max_slots", [1, 2])
def test_with_few_slots_too(connect, receivers, max_slots):
    connected = connect(source := layers(), 2, sync=False, max_slots=max_slots)
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        connected.push()
    pushed = leaves_of(source)
    connected.processes[1].kill()
    fill(source, 9.0)
    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.versions == [3, 3]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), pushed)
    for value in (4.0, 5.0, 6.0):
        fill(source, value)
        connected.push()
    assert connected.versions == [6, 6]
    assert_same_bits(connected.leaves(1), leaves_of(source))


def test_where_nobody_has_the_newest_bytes_any_more_the_source_is_read_as_a_new_version(connect, receivers):
    """The only slot was being written when the push failed."""
    connected = connect(source := layers(), 2, sync=False, max_slots=1)
    fill(source, 1.0)
    connected.push()
    with pytest.raises(LayoutMismatchError):
        connected.scheme.send({"other": torch.zeros(1)})
    connected.processes[1].kill()
    fill(source, 2.0)
    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.versions == [1, 2] and connected.scheme.version == 2
    assert_same_bits(connected.leaves(1), leaves_of(source))
    connected.push()
    assert connected.versions == [3, 3]


class Counting(WithExtraState):
    def __init__(self, n):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.n = n

    def get_extra_state(self):
        return {"n": self.n}

    def set_extra_state(self, state):
        self.n = state["n"]


def test_extra_state_comes_along(connect, receivers):
    connected = connect(source := Counting(1), 1, receiver_model=Counting(0), sync=False)
    source.n = 7
    connected.push()
    source.n = 8
    connected.processes[0].kill()
    rejoin(connected, 0, receivers[1], Counting(0))
    assert receivers[1].call(lambda box: box.model.n) == 7


# --- who is waited for ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_nobody_to_wait_for_it_returns_at_once(connect):
    connected = connect(layers(), 2, sync=False, connect_timeout=30)
    started = time.monotonic()
    connected.scheme.connect()
    connected.scheme.connect(worker_ids=[])
    assert time.monotonic() - started < 0.5
    connected.push()
    assert connected.versions == [1, 1]


def test_arguments_that_make_no_sense_are_refused(connect):
    sender = connect.sender(layers(), 2)
    with pytest.raises(ValueError, match="first connect"):
        sender.connect(worker_ids=[0])
    connected = connect(layers(), 2, sync=False)
    with pytest.raises(ValueError, match="replacement starts from what was pushed last"):
        connected.scheme.connect(layers())
    with pytest.raises(ValueError, match="numbered 0 .. 1"):
        connected.scheme.connect(worker_ids=2)
    connected.push()
    assert connected.versions == [1, 1]


def test_a_replacement_that_does_not_come_is_named_and_everything_else_goes_on(connect, receivers):
    connected = connect(source := layers(), 3, sync=False, connect_timeout=20)
    connected.processes[1].kill()
    connected.scheme._hub.connect_timeout = 0.5
    started = time.monotonic()
    with pytest.raises(
        WeightSyncTimeout, match=r"\[1\] of \[1\] still missing after 0\.[5-9] s .phase: rend"
    ) as caught:
        connected.scheme.connect()
    assert time.monotonic() - started < 1.5
    assert list(caught.value.failed) == [1]
    fill(source, 1.0)
    with pytest.raises(WorkerDied, match="worker 1") as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [1]
    for worker in (0, 2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_a_replacement_whose_model_differs_is_refused_and_another_one_is_taken(connect, receivers):
    connected = connect(source := layers(), 2, sync=False)
    fill(source, 1.0)
    connected.push()
    connected.processes[1].kill()
    joining = connected.join(1, receivers[2], layers(5))
    with pytest.raises(LayoutMismatchError, match="worker 1") as here:
        connected.scheme.connect()
    assert list(here.value.failed) == [1] and "0.weight" in here.value.mismatched
    with pytest.raises(LayoutMismatchError):
        joining.result(2.0)
    fill(source, 2.0)
    with pytest.raises(WorkerDied, match="worker 1"):
        connected.scheme.send()
    assert_same_bits(connected.leaves(0), leaves_of(source))

    receivers[2].call(schemes.shutdown)
    rejoin(connected, 1, receivers[2], altered(source))
    assert connected.versions == [2, 2]
    assert_same_bits(connected.leaves(1), leaves_of(source))
    assert link_of(connected, 1).generation == 2


@pytest.mark.slow
def test_each_replacement_is_taken_or_refused_on_its_own(five, connect, receivers):
    connected = connect(source := layers(), 3, sync=False)
    fill(source, 1.0)
    connected.push()
    for worker in (0, 2):
        connected.processes[worker].kill()
    differing = connected.join(0, receivers[3], layers(5))
    fitting = connected.join(2, receivers[4], altered(source))
    with pytest.raises(WeightSyncError, match="worker 0") as caught:
        connected.scheme.connect()
    assert list(caught.value.failed) == [0]
    assert isinstance(caught.value.failed[0], LayoutMismatchError)
    with pytest.raises(LayoutMismatchError):
        differing.result(2.0)
    receivers[4].result_of(fitting)
    connected.push(worker_ids=[1, 2])
    assert connected.versions[1:] == [2, 2]
    assert_same_bits(connected.leaves(2), leaves_of(source))


# --- fencing --------------------------------------------------------------------------------------------------------


def link_cause(box):
    """Why the worker's own link has ended, once it has."""
    deadline = time.monotonic() + 10
    while box.scheme._link.state.value != "ended":
        assert time.monotonic() < deadline, "the link is still there"
        time.sleep(0.01)
    return str(box.scheme._link.cause)


def change_every_weight(box):
    with torch.no_grad():
        for leaf in box.model.parameters():
            leaf.add_(1.0)


def test_a_stopped_worker_that_goes_on_after_its_replacement_joined_changes_nothing(connect, receivers):
    connected = connect(source := layers(), 2, sync=False, timeout=120, heartbeat_timeout=1.0)
    old = connected.processes[1]
    fill(source, 1.0)
    connected.push()
    held = connected.leaves(1)
    old.stop()
    fill(source, 2.0)
    with pytest.raises(WeightSyncTimeout, match="worker 1"):
        connected.scheme.send()
    rejoin(connected, 1, receivers[2], altered(source))
    newest = leaves_of(source)
    link = link_of(connected, 1)

    old.go_on()
    assert "given this worker up: silent for 1" in old.call(link_cause)
    assert old.call(schemes.version) == 1
    assert_same_bits(old.call(schemes.leaves), held)
    old.call(change_every_weight)
    assert link_of(connected, 1) is link and link.state is LinkState.OPEN
    assert connected.versions == [2, 2]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), newest)
    for value in (3.0, 4.0, 5.0):
        fill(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert_same_bits(old.call(schemes.leaves), {k: v + (k != "scale") for k, v in held.items()})
    with pytest.raises(WeightSyncError):
        old.call(lambda box: box.scheme._link.serve_once(0))


@both_ways
def test_a_worker_that_is_up_is_fenced_off_when_it_is_named_and_its_replacement_joins(connect, receivers, sync):
    connected = connect(source := layers(), 2, sync=sync)
    old = connected.processes[0]
    fill(source, 1.0)
    connected.push()
    held = leaves_of(source)
    rejoin(connected, 0, receivers[2], altered(source), worker_ids=0)
    if sync:
        with pytest.raises(WeightSyncError, match=rf"pid {receivers[2].pid}\) has taken its place"):
            old.call(schemes.receive)
    else:
        assert f"another process (pid {receivers[2].pid}) has taken its place" in old.call(link_cause)
    for value in (2.0, 3.0, 4.0):
        fill(source, value)
        connected.push()
    assert connected.versions == [4, 4]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    assert old.call(schemes.version) == 1
    assert_same_bits(old.call(schemes.leaves), held)


def test_a_push_on_its_way_to_a_worker_that_is_replaced_fails_at_once_and_is_never_applied_there(connect, receivers):
    connected = connect(source := layers(), 2, sync=False, timeout=60)
    old = connected.processes[0]
    before = old.call(schemes.leaves)
    old.call(hold_gate)
    fill(source, 1.0)
    sending = Call(connected.scheme.send)
    eventually(lambda: link_of(connected, 1).version == 1)
    rejoin(connected, 0, receivers[2], altered(source), worker_ids=[0])
    with pytest.raises(WorkerDied, match="has taken its place") as caught:
        sending.result(1.0)
    assert list(caught.value.failed) == [0]
    assert connected.versions == [1, 1]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    old.call(release_gate)
    old.call(link_cause)
    assert old.call(schemes.version) == 0
    assert_same_bits(old.call(schemes.leaves), before)


def connect_again(box):
    box.scheme.connect()


@pytest.mark.slow
@both_ways
def test_a_process_that_was_given_up_joins_again_as_its_own_replacement(connect, sync):
    connected = connect(source := layers(), 2, sync=sync, timeout=60, heartbeat_timeout=1.0)
    process = connected.processes[1]
    waiting = [p.begin(schemes.receive) for p in connected.processes] if sync else []
    time.sleep(0.1)
    process.stop()
    fill(source, 1.0)
    with pytest.raises(WeightSyncTimeout):
        connected.scheme.send()
    process.go_on()
    if sync:
        assert waiting[0].result(5.0) is not None
        with pytest.raises(WeightSyncError):
            waiting[1].result(5.0)
    else:
        process.call(link_cause)
    before = process.call(lambda box: [id(parameter) for parameter in box.model.parameters()])
    joining = process.begin(connect_again)
    connected.scheme.connect()
    process.result_of(joining)
    assert connected.versions == [1, 1]
    assert_same_bits(connected.leaves(1), leaves_of(source))
    fill(source, 2.0)
    connected.push()
    assert connected.versions == [2, 2]
    assert_same_bits(connected.leaves(1), leaves_of(source))
    assert process.call(lambda box: [id(parameter) for parameter in box.model.parameters()]) == before
    if connect.same_host == "shared_memory":  # it maps the sender's slots again
        assert process.call(lambda box: box.scheme.staged_model.holds_slot)


# --- the others go on -----------------------------------------------------------------------------------------------


def init_slow(box, scheme, model, worker_idx):
    """A receiver that thinks long about the sender's offer."""
    schemes.init(box, scheme, model, worker_idx=worker_idx)
    box.asked, box.go = threading.Event(), threading.Event()
    accept_offer = scheme.accept_offer

    def accept_late(offer):
        box.asked.set()
        box.go.wait(30)
        accept_offer(offer)

    scheme.accept_offer = accept_late


def test_a_slow_replacement_holds_up_no_push_and_holds_the_newest_in_the_end(connect, receivers):
    connected = connect(source := layers(), 2, sync=False, connect_timeout=30)
    connected.processes[1].kill()
    slow = receivers[2]
    slow.call(init_slow, connected.scheme, altered(source), 1)
    joining = slow.begin(schemes.connect)
    connecting = Call(connected.scheme.connect)
    slow.call(lambda box: box.asked.wait(5))
    for value in range(1, 6):
        fill(source, float(value))
        started = time.monotonic()
        connected.push(worker_ids=0)
        assert time.monotonic() - started < 0.5
        with pytest.raises(WorkerDied, match="worker 1"):
            connected.scheme.send(worker_ids=1)
    assert connecting.running
    slow.call(lambda box: box.go.set())
    connecting.result(5.0)
    slow.result_of(joining)
    connected.processes[1] = slow
    assert slow.call(schemes.version) == connected.scheme.version == 10
    assert_same_bits(connected.leaves(1), leaves_of(source))
    connected.push()
    assert connected.versions == [11, 11]


def test_pushes_that_go_on_all_the_time_reach_a_replacement_in_order(connect, receivers):
    """One thread pushes without a pause, one worker is replaced again and again."""
    connected = connect(source := layers(), 2, sync=False)
    stop, pushed = threading.Event(), {0: leaves_of(source)}

    def push_on():
        version = 0
        while not stop.is_set():
            version += 1
            weights = {name: torch.full_like(leaf, version) for name, leaf in leaves_of(source).items()}
            pushed[version] = weights
            handle = connected.scheme.send_async(weights)
            if version % 5 == 0:
                try:
                    handle.wait(10)
                except WorkerDied as error:
                    assert list(error.failed) == [1]

    def record(box):
        box.seen = []
        box.scheme.add_applied_hook(
            lambda model, version: box.seen.append((version, {n: t.clone() for n, t in model.state_dict().items()}))
        )

    connected.processes[0].call(record)
    pushing = Call(push_on)
    processes = [receivers[1], receivers[2]]
    for turn in range(6):
        old, new = connected.processes[1], processes[(turn + 1) % 2]
        new.call(schemes.init, connected.scheme, altered(source), worker_idx=1)
        new.call(record)
        joining = new.begin(schemes.connect)
        connected.scheme.connect(worker_ids=[1])
        new.result_of(joining)
        connected.processes[1] = new
        time.sleep(0.1)
        seen = old.call(lambda box: (box.scheme.shutdown(), getattr(box, "seen", []))[1])
        assert [version for version, _ in seen] == sorted({version for version, _ in seen})
        for version, held in seen:
            assert_same_bits(held, pushed[version])
    stop.set()
    pushing.result(20.0)
    connected.push()
    for process in connected.processes:
        seen = process.call(lambda box: box.seen)
        versions = [version for version, _ in seen]
        assert versions == sorted(set(versions))
        assert versions[-1] == connected.scheme.version
        for version, held in seen[:-1]:
            assert_same_bits(held, pushed[version])
        assert_same_bits(seen[-1][1], leaves_of(source))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["accept_offer", "make_transport", "meet", "apply"])
def test_a_replacement_that_is_stopped_while_it_joins_is_given_up_soon_and_holds_nobody_up(connect, receivers, step):
    connected = connect(source := layers(), 2, sync=False, timeout=60, connect_timeout=60, heartbeat_timeout=1.0)
    connected.processes[1].kill()
    new = receivers[2]
    new.call(init_that_stops, connected.scheme, altered(source), 1, step)
    new.begin(schemes.connect)
    started = time.monotonic()
    connecting = Call(connected.scheme.connect)
    while connecting.running:
        before = time.monotonic()
        connected.push(worker_ids=0)
        assert time.monotonic() - before < 0.5
        time.sleep(0.02)
    if step == "meet" and connect.same_host == "shared_memory":
        connecting.result()  # there is nobody to meet
        return
    with pytest.raises(WeightSyncError, match="worker 1") as caught:
        connecting.result()
    assert list(caught.value.failed) == [1]
    assert_text(caught.value, r"worker 1 \(pid \d+\)", r"phase: .*'policy'", r"\d\.\d s\)")
    assert time.monotonic() - started < 3.5  # of which one second is silence
    new.go_on()
    assert "given this worker up" in new.call(link_cause)
    new.call(schemes.shutdown)
    rejoin(connected, 1, new, altered(source))
    connected.push()
    assert connected.versions == [connected.scheme.version] * 2
    assert_same_bits(connected.leaves(1), leaves_of(source))


def init_that_stops(box, scheme, model, worker_idx, step):
    """A receiver whose process is stopped at one step of joining."""
    import signal
    import threading

    from lightning_weightsync.transports.process_group import ProcessGroupReceiver

    schemes.init(box, scheme, model, worker_idx=worker_idx)

    def stop():
        # Sent to this very thread, which therefore does not run on until another one has taken the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    if step == "apply":
        scheme.staged_model.applied_hooks.append(lambda model, version: stop())
        return
    owner, name = (ProcessGroupReceiver, "connect") if step == "meet" else (scheme, step)
    original = getattr(owner, name)

    def stopping(*args):
        setattr(owner, name, original)
        stop()
        return original(*args)

    setattr(owner, name, stopping)


# --- nothing is left ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_many_replacements_leave_nothing_behind(connect, receivers):
    connected = connect(source := nn.Linear(200, 200), 2, sync=False)
    processes = [receivers[1], receivers[2]]

    def once(turn):
        old, new = connected.processes[1], processes[(turn + 1) % 2]
        rejoin(connected, 1, new, altered(source), worker_ids=[1])
        old.call(schemes.shutdown)
        for _ in range(2):
            fill(source, float(turn))
            connected.push()
        assert_same_bits(connected.leaves(1), leaves_of(source))

    def held(box=None):
        gc.collect()
        return {kind: len(items) for kind, items in holdings()._asdict().items()}

    for turn in range(4):
        once(turn)
    here, there = held(), receivers[0].call(held)
    pool = connected.scheme._pool
    slots = len(pool)
    for turn in range(4, 12):
        once(turn)
    eventually(lambda: held() == here)
    eventually(lambda: receivers[0].call(held) == there)
    assert len(pool) == slots <= 4
    assert set(pool.holders()) <= {"('worker', 0, 0)", "('worker', 1, 12)", "what a replacement starts from"}
