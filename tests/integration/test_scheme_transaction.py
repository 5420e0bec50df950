"""A push is all or nothing: no torn read, all models of it or none, and never later than it was said to have failed."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncTimeout, WorkerError
from lightning_weightsync.schemes.joining import connect_workers, reconnect_workers
from lightning_weightsync.schemes.push import push_models
from lightning_weightsync.schemes.transaction import Transaction
from lightning_weightsync.transports.hub import LinkHub
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import Link, altered, assert_text, hold_gate, release_gate


def twin_layers(size=256):
    """Two layers that are always filled with one constant: any mixture of two versions shows."""
    return nn.ModuleDict({name: nn.Linear(size, size, bias=False) for name in ("first", "second")})


class Reader:
    """A thread that makes policy calls under the gate, and notes what each of them saw."""

    def __init__(self, gate, calls, name):
        self.seen = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(gate, calls), name=name)
        self._thread.start()

    def _run(self, gate, calls):
        while not self._stop.is_set():
            with gate:
                self.seen.append(tuple(call() for call in calls))
            time.sleep(0)

    def stop(self):
        self._stop.set()
        self._thread.join(10)
        return self.seen


def start_readers(box, count):
    x = torch.ones(1, 256)

    def forward(layer):
        with torch.inference_mode():
            return layer(x)[0, :].unique().tolist()

    scheme, model = box.scheme, box.model
    calls = [
        lambda: scheme.version,
        lambda: forward(model["first"]),
        lambda: scheme.gate.version,
        lambda: forward(model["second"]),
    ]
    box.readers = [Reader(scheme.gate, calls, f"reader {number}") for number in range(count)]


def stop_readers(box):
    return [reader.stop() for reader in box.readers]


def test_no_policy_call_sees_two_versions(connect):
    source = twin_layers()
    fill(source, 0.0)
    connected = connect(source, sync=False)
    process = connected.processes[0]
    process.call(start_readers, 2)
    for version in range(1, 301):
        fill(source, float(version))
        connected.scheme.send()
    for seen in process.call(stop_readers):
        assert len(seen) > 50
        for version, first, in_gate, second in seen:
            assert first == second == [256.0 * version]
            assert in_gate == version
        versions = [version for version, *_ in seen]
        assert versions == sorted(versions)
    assert connected.versions == [300]
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_whoever_holds_the_gate_finds_the_version_of_the_weights_on_the_scheme_too(connect):
    """An applied hook runs at the first moment of a version, with the gate still held."""

    def note_versions(box):
        box.found = []
        box.scheme.add_applied_hook(
            lambda model, version: box.found.append((version, box.scheme.version, box.scheme.gate.version))
        )

    connected = connect(nn.Linear(3, 2), sync=False)
    connected.processes[0].call(note_versions)
    for _ in range(2):
        connected.push()
    assert connected.processes[0].call(lambda box: box.found) == [(1, 1, 1), (2, 2, 2)]


# --- several models, one link --------------------------------------------------------------------------------------


class Pair:
    """Two models over one hub and one link per worker, as a collector group keeps them."""

    def __init__(self, receivers, num_workers, same_host):
        self.actor, self.critic = twin_layers(64), nn.Linear(3, 2)
        self.hub = LinkHub(num_workers, local=same_host == "shared_memory", connect_timeout=20)
        context = SimpleNamespace(hub=self.hub, num_workers=num_workers)
        self.schemes = {name: DistributedWeightSyncScheme(same_host=same_host) for name in ("actor", "critic")}
        for name, scheme in self.schemes.items():
            scheme.init_on_sender(name, context=context, model=getattr(self, name))
        self.processes = list(receivers)[:num_workers]
        everybody = range(num_workers)
        joining = [self.processes[i].begin(join_with_two, self.schemes, self.hub.info, i) for i in everybody]
        connect_workers(self.hub, dict.fromkeys(self.schemes.values()), everybody, time.monotonic() + 20)
        for process, future in zip(self.processes, joining, strict=True):
            process.result_of(future)

    def replace(self, worker_idx, process):
        """Another process takes the worker's place."""
        joining = process.begin(join_with_two, self.schemes, self.hub.info, worker_idx)
        reconnect_workers(self.hub, list(self.schemes.values()), [worker_idx], time.monotonic() + 20)
        process.result_of(joining)
        self.processes[worker_idx] = process

    def fill(self, value):
        fill(self.actor, value)
        fill(self.critic, value)

    def push(self, *, timeout=20.0):
        weights = dict.fromkeys(self.schemes.values())
        push_models(self.hub, weights, range(self.hub.num_workers), timeout=timeout).wait()

    def held(self, worker_idx=0):
        return self.processes[worker_idx].call(values_of_both)

    def close(self):
        for scheme in self.schemes.values():
            scheme.shutdown()
        self.hub.close()


@pytest.fixture(params=["shared_memory", "network"])
def pair(receivers, request):
    made = []

    def make(num_workers=1):
        made.append(Pair(receivers, num_workers, request.param))
        return made[-1]

    yield make
    for each in made:
        each.close()


def join_with_two(box, schemes_by_name, info, worker_idx):
    torch.manual_seed(worker_idx)
    box.context = Link(info, worker_idx, actor=twin_layers(64), critic=nn.Linear(3, 2))
    box.schemes = schemes_by_name
    for name, scheme in schemes_by_name.items():
        scheme.init_on_receiver(name, context=box.context, worker_idx=worker_idx)
    box.context.receiver_link.connect(time.monotonic() + 20)
    box.context.receiver_link.start_service()


def values_of_both(box):
    """(version, every value in the actor, every value in the critic), read in the gate."""
    with box.context.gate as gate:
        leaves = {
            name: sorted({value for leaf in model.parameters() for value in leaf.detach().unique().tolist()})
            for name, model in (("actor", box.context.actor), ("critic", box.context.critic))
        }
        return gate.version, leaves["actor"], leaves["critic"]


def watch_both(box):
    box.reader = Reader(box.context.gate, [lambda: values_of_both(box)], "reader")


def test_two_models_are_pushed_as_one_version(pair):
    both = pair(2)
    both.fill(0.0)
    both.push()
    assert both.hub.version == 1
    both.processes[1].call(watch_both)
    for version in range(2, 101):
        both.fill(float(version))
        both.push()
    seen = both.processes[1].call(lambda box: box.reader.stop())
    assert len(seen) > 10
    for ((version, actor, critic),) in seen:
        assert actor == critic == [0.0 if version == 1 else float(version)]
    assert both.hub.version == 100
    assert both.held(0) == both.held(1) == (100, [100.0], [100.0])


def test_a_replacement_gets_the_newest_of_both_models_as_one_version(pair, receivers):
    both = pair(2)
    both.fill(1.0)
    both.push()
    fill(both.actor, 2.0)
    push_models(both.hub, {both.schemes["actor"]: None}, [0, 1], timeout=20).wait()
    both.fill(9.0)  # is not pushed
    both.replace(1, receivers[2])
    assert both.held(0) == both.held(1) == (2, [2.0], [1.0])
    assert both.hub.version == 2
    both.push()
    assert both.held(0) == both.held(1) == (3, [9.0], [9.0])


def break_second_once(box):
    """The second model's hook raises once; each hook notes what it finds when it is called."""
    context, found = box.context, []
    box.found = found

    def first(model, version):
        with context.gate:  # a hook may call the policy
            found.append(("actor", version, model is context.actor, context.gate.version))

    def second(model, version):
        found.append(("critic", version, model is context.critic, context.actor["first"].weight[0, 0].item()))
        if len(found) == 2:
            raise ZeroDivisionError("the critic's cache is broken")

    box.schemes["actor"].add_applied_hook(first)
    box.schemes["critic"].add_applied_hook(second)


def test_if_the_second_model_fails_neither_is_changed_and_the_next_push_brings_both(pair):
    both = pair(2)
    both.fill(5.0)
    both.push()
    both.processes[1].call(break_second_once)
    both.fill(6.0)
    with pytest.raises(WorkerError, match="worker 1") as caught:
        both.push()
    assert list(caught.value.failed) == [1]
    cause = caught.value.failed[1]
    assert "ZeroDivisionError: the critic's cache is broken" in str(cause)
    assert "in second" in cause.remote_traceback
    assert both.held(0) == (2, [6.0], [6.0])
    assert both.held(1) == (1, [5.0], [5.0])
    assert [both.hub.links[i].version for i in range(2)] == [2, 1]

    both.fill(7.0)
    both.push()
    assert both.held(0) == both.held(1) == (3, [7.0], [7.0])
    # Hooks are called when every model has been switched: the critic's found the actor's new values, both times.
    assert both.processes[1].call(lambda box: box.found) == [
        ("actor", 2, True, 2), ("critic", 2, True, 6.0), ("actor", 3, True, 3), ("critic", 3, True, 7.0),
    ]  # fmt: skip


# --- the gate and the deadline -------------------------------------------------------------------------------------


def test_a_version_that_missed_its_deadline_at_the_gate_is_never_applied_later(connect):
    source = nn.Linear(3, 2)
    fill(source, 1.0)
    connected = connect(source, 2, sync=False, timeout=1.5)
    process = connected.processes[0]
    process.call(hold_gate)
    fill(source, 2.0)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match="worker 0") as caught:
        connected.scheme.send()
    assert 1.0 < time.monotonic() - started < 2.5
    assert list(caught.value.failed) == [0]
    assert_text(
        caught.value.failed[0], r"worker 0 \(pid \d+\)", r"kept version 0", r"push of version 1 of 'policy'",
        r"thread 'slow policy call' has been inside for 1\.\d s",
    )  # fmt: skip

    process.call(release_gate)
    time.sleep(0.3)  # if it were applied later, it would be by now
    assert set(connected.leaves(0)["weight"].unique().tolist()) == {1.0}
    assert set(connected.leaves(1)["weight"].unique().tolist()) == {2.0}
    assert connected.versions == [0, 1]

    fill(source, 3.0)
    connected.push()
    assert connected.versions == [2, 2]
    assert set(connected.leaves(0)["weight"].unique().tolist()) == {3.0}


def test_a_push_waits_for_the_gate_as_long_as_its_deadline_allows(connect):
    connected = connect(source := nn.Linear(3, 2), sync=False, timeout=20)
    process = connected.processes[0]
    process.call(hold_gate)
    threading.Timer(0.5, lambda: process.call(release_gate)).start()
    fill(source, 4.0)
    started = time.monotonic()
    connected.scheme.send()
    assert 0.4 < time.monotonic() - started < 5.0
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_safe_point_switches_in_the_calling_thread(connect):
    source = nn.Linear(3, 2)
    connected = connect(source)
    process = connected.processes[0]

    def switch_at_safe_point(box):
        threads = []
        box.scheme.add_applied_hook(lambda model, version: threads.append(threading.current_thread()))
        deadline = time.monotonic() + 10
        while not box.scheme.safe_point():
            assert time.monotonic() < deadline
        return threads == [threading.current_thread()], box.scheme.safe_point()

    fill(source, 8.0)
    waiting = process.begin(switch_at_safe_point)
    connected.scheme.send()
    assert process.result_of(waiting) == (True, False)
    assert_same_bits(connected.leaves(), leaves_of(source))


@pytest.mark.parametrize("sync", [True, False])
def test_what_goes_wrong_at_a_safe_point_is_told_to_the_sender_and_not_to_the_policy_loop(connect, sync):
    """The background thread waits for its turn to commit when the loop's safe point comes first."""
    connected = connect(source := nn.Linear(3, 2), sync=sync)
    process, before = connected.processes[0], connected.leaves()

    def prepare(box):
        """Before anything is pushed: the background thread must not be the first."""

        def hook(model, version):
            box.threads.append(threading.current_thread())
            raise LookupError("not this one")

        def stage_and_let_the_loop_commit(push, staged):
            stage(push, staged)
            box.scheme._link._requests.pending = push
            box.turn.set()
            box.committed.wait(10)

        box.threads, box.turn, box.committed, stage = [], threading.Event(), threading.Event(), Transaction.stage
        box.scheme.add_applied_hook(hook)
        box.restore = lambda: setattr(Transaction, "stage", stage)
        if not box.scheme.sync:
            Transaction.stage = stage_and_let_the_loop_commit

    def switch_at_safe_point(box):
        deadline = time.monotonic() + 10
        try:
            while not box.threads:
                assert time.monotonic() < deadline
                assert box.scheme.sync or box.turn.wait(10)
                assert not box.scheme.safe_point()
        finally:
            box.restore()
            box.committed.set()
        return box.threads == [threading.current_thread()]

    process.call(prepare)
    fill(source, 8.0)
    waiting = process.begin(switch_at_safe_point)
    with pytest.raises(WorkerError, match="LookupError: not this one"):
        connected.scheme.send()
    assert process.result_of(waiting)
    assert_same_bits(connected.leaves(), before)


@pytest.mark.parametrize("sync", [True, False])
def test_to_connect_again_while_connected_changes_nothing(connect, sync):
    """Two threads that read one channel would take each other's messages."""
    connected = connect(source := nn.Linear(3, 2), sync=sync)
    process = connected.processes[0]
    process.call(schemes.connect)
    services = process.call(lambda box: sum("weight-sync-receiver" in t.name for t in threading.enumerate()))
    assert services == (0 if sync else 1)
    for value in (1.0, 2.0):
        fill(source, value)
        connected.push()
        assert_same_bits(connected.leaves(), leaves_of(source))


@pytest.mark.parametrize("sync", [True, False])
def test_inside_the_gate_there_is_no_safe_point(connect, sync):
    def safe_point_inside(box):
        with box.scheme.gate:
            box.scheme.safe_point()

    connected = connect(nn.Linear(3, 2), sync=sync)
    with pytest.raises(RuntimeError, match="inside the gate"):
        connected.processes[0].call(safe_point_inside)
    assert connected.processes[0].call(lambda box: box.scheme.safe_point()) is False
    connected.push()
    assert connected.versions == [1]


def test_the_gate_does_not_pickle_and_receivers_of_one_process_share_theirs(receivers, connect):
    def gates(box):
        import pickle

        try:
            pickle.dumps(box.scheme.gate)
        except TypeError as error:
            text = str(error)
        other = type(box.scheme)()
        other.init_on_receiver("other", model=box.model, worker_idx=0)
        return text, other.gate is box.scheme.gate

    connected = connect(nn.Linear(3, 2))
    text, shared = connected.processes[0].call(gates)
    assert "never pickled" in text and shared


def test_an_applied_push_is_handed_on_to_a_context_that_can_take_it(receivers, connect):
    class Outer:
        def __init__(self, policy):
            self.policy = policy
            self.handed_on = []

        def update_policy_weights_(self, *, weights, model_id):
            self.handed_on.append((model_id, dict(weights.flatten_keys(".").items())))

    def init_outer(box, scheme, policy):
        box.context, box.scheme = Outer(policy), scheme
        scheme.init_on_receiver("policy", context=box.context, worker_idx=0)

    source = nn.Linear(3, 2)
    sender = connect.sender(source, sync=False)
    receivers[0].call(init_outer, sender, altered(source))
    joining = receivers[0].begin(schemes.connect)
    sender.connect()
    receivers[0].result_of(joining)
    sent = [leaves_of(source)]
    fill(source, 3.0)
    sender.send()
    sent.append(leaves_of(source))
    handed_on = receivers[0].call(lambda box: box.context.handed_on)
    assert [model_id for model_id, _ in handed_on] == ["policy", "policy"]
    for (_, got), expected in zip(handed_on, sent, strict=True):
        assert_same_bits(got, expected)
