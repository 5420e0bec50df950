"""One scheme, one model: its life cycle, its arguments, and that what arrives is what was sent, bit for bit."""

import copy
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError, WorkerDied
from lightning_weightsync.paths import PathError
from lightning_weightsync.schemes.forward_gate import gate_forward
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.receiver import ReceiverLink
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, leaves_of, scramble
from tests.helpers.schemes import altered, both_ways


class Net(nn.Module):
    """Layers, BatchNorm statistics, tied weights, and a leaf of each dtype that is not a plain number of floats."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)
        self.tied = nn.Linear(width, 2, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.brain = nn.Parameter(torch.zeros(3, 7, dtype=torch.bfloat16))
        self.waves = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(6, 4).t())
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def net(seed=0):
    model = Net()
    scramble(model.state_dict().values(), seed)
    return model


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def nested(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = leaf
    return tree


# --- what arrives --------------------------------------------------------------------------------------------------


@both_ways
def test_every_leaf_arrives_bit_for_bit_and_the_source_stays_as_it_is(connect, sync):
    source = net(seed=1)
    identities = {name: id(p) for name, p in source.named_parameters()}
    before = leaves_of(source)
    connected = connect(source, 2, sync=sync)
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), before)

    scramble(source.state_dict().values(), seed=2)
    before = leaves_of(source)
    connected.push()
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), before)
    assert_same_bits(leaves_of(source), before)
    assert {name: id(p) for name, p in source.named_parameters()} == identities
    assert source.tied.weight is source.head.weight
    assert [p.requires_grad for p in source.parameters()] == [p.requires_grad for p in Net().parameters()]
    assert all(p.grad is None for p in source.parameters())


def test_the_receiver_keeps_its_parameters_its_ties_and_what_is_not_carried(connect):
    def remember(box):
        box.before = dict(box.model.named_parameters())
        box.scratch = box.model.scratch.clone()

    def compare(box):
        after = dict(box.model.named_parameters())
        return {
            "same objects": all(after[name] is parameter for name, parameter in box.before.items()),
            "tied": box.model.tied.weight is box.model.head.weight,
            "frozen": not box.model.frozen.requires_grad and box.model.first.weight.requires_grad,
            "scratch untouched": torch.equal(box.model.scratch, box.scratch),
            "leaf tensors": all(parameter.is_leaf for parameter in after.values()),
        }

    source = net()
    connected = connect(source)
    connected.processes[0].call(remember)
    source.scratch.fill_(7)
    connected.push()
    found = connected.processes[0].call(compare)
    assert all(found.values()), found


def test_batch_norm_statistics_give_the_receiver_the_senders_outputs(connect):
    source = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).train()
    connected = connect(source)
    for _ in range(20):
        source(torch.randn(16, 3) + 5)
    connected.push()
    arrived = connected.leaves()
    assert arrived["1.num_batches_tracked"].item() == 20
    assert_same_bits(arrived, leaves_of(source))

    batch = torch.randn(7, 3)
    theirs = connected.processes[0].call(lambda box: box.model.eval()(batch).detach())
    assert torch.equal(theirs, source.eval()(batch).detach())


class Normaliser(nn.Module):
    """Its running statistics are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = {"n": 0, "mean": torch.zeros(2)}

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_extra_state_travels_with_each_push_and_stays_in_the_source(connect, strategy):
    source = nn.Sequential(nn.Linear(2, 2), Normaliser())
    connected = connect(source, 2, sync=False, strategy=strategy, receiver_model=lambda index: altered_twin(source))
    for n in (1, 2, 3):
        source[1].state = {"n": n, "mean": torch.tensor([n, float("nan")])}
        connected.push()
        for process in connected.processes:
            arrived = process.call(lambda box: box.model[1].state)
            assert arrived["n"] == n
            assert_same_bits({"mean": arrived["mean"]}, {"mean": source[1].state["mean"]})
        assert "1._extra_state" in source.state_dict() and source[1].state["n"] == n


def altered_twin(source):
    twin = copy.deepcopy(source)
    scramble(twin.parameters(), seed=999)
    return twin


def test_extra_state_that_cannot_be_carried_raises_and_names_the_module(connect):
    source = nn.Sequential(nn.Linear(2, 2), Normaliser())
    connected = connect(source, sync=False, receiver_model=lambda index: altered_twin(source))
    source[1].state = {"odd": object}
    with pytest.raises(TypeError, match=r"the extra state of '1' \(Normaliser\) cannot be carried"):
        connected.scheme.send()
    source[1].state = {"n": 5}
    connected.push()
    assert connected.processes[0].call(lambda box: box.model[1].state) == {"n": 5}


@both_ways
@pytest.mark.parametrize(
    "form",
    [
        lambda source: None,
        lambda source: source,
        lambda source: TensorDict.from_module(source).data,
        lambda source: TensorDict(nested(leaves_of(source)), []),
        lambda source: dict(leaves_of(source)),
        lambda source: nested(leaves_of(source)),
        lambda source: source.state_dict(),
    ],
    ids=["None", "module", "TensorDict of the module", "TensorDict", "flat dict", "nested dict", "state_dict"],
)
def test_weights_may_be_given_in_any_form(connect, sync, form):
    source = small(seed=1)
    connected = connect(source, sync=sync)
    scramble(source.state_dict().values(), seed=5)
    connected.push(form(source))
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_the_source_may_be_given_to_connect_or_bound_as_a_tensordict(receivers, connect):
    wanted = small(seed=3)
    for bind, given in (({}, wanted), ({"weights": TensorDict(nested(leaves_of(wanted)), [])}, None)):
        sender = DistributedWeightSyncScheme(connect_timeout=10, same_host=connect.same_host)
        try:
            sender.init_on_sender("policy", num_workers=1, **bind)
            receivers[0].call(schemes.init, sender, altered(wanted), worker_idx=0)
            joining = receivers[0].begin(schemes.connect)
            sender.connect(given)
            receivers[0].result_of(joining)
            assert_same_bits(receivers[0].call(schemes.leaves), leaves_of(wanted))
        finally:
            receivers[0].call(schemes.shutdown)
            sender.shutdown()


def test_the_state_dict_strategy_goes_through_load_state_dict(connect):
    source = net(seed=4)
    connected = connect(source, strategy="state_dict")
    scramble(source.state_dict().values(), seed=6)
    connected.push()
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_sending_two_weights_in_turn_gives_each_in_turn(connect):
    first, second = small(seed=1), small(seed=2)
    connected = connect(small(seed=3))
    for weights in (first, second, first):
        connected.push(weights)
        assert_same_bits(connected.leaves(), leaves_of(weights))


def test_a_transport_that_moves_nothing_is_an_error_and_no_version(connect, monkeypatch):
    source = small()
    connected = connect(source, sync=False, timeout=1.5)
    before = connected.leaves()
    transport = connected.scheme.sender_transports[0]
    monkeypatch.setattr(transport, "send", lambda worker_idx, slot: {})
    scramble(source.state_dict().values(), seed=8)
    with pytest.raises(WeightSyncError, match="worker 0") as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [0]
    assert connected.versions == [0]
    assert_same_bits(connected.leaves(), before)


# --- who is addressed ----------------------------------------------------------------------------------------------


@both_ways
def test_only_the_addressed_workers_change(connect, sync):
    source = small()
    connected = connect(source, 3, sync=sync)
    for worker_ids, versions in ((2, [0, 0, 1]), ([1], [0, 2, 1]), ([0, 2], [3, 2, 3]), (None, [4, 4, 4])):
        held = [connected.leaves(worker) for worker in range(3)]
        scramble(source.state_dict().values(), seed=10 + connected.scheme.version)
        connected.push(worker_ids=worker_ids)
        assert connected.versions == versions
        for worker, version in enumerate(versions):
            newest = version == connected.scheme.version
            assert_same_bits(connected.leaves(worker), leaves_of(source) if newest else held[worker])


@pytest.mark.parametrize("wrong", [3, -1, [0, 3], [0, -1], True, "0"])
def test_a_worker_that_does_not_exist_is_refused_before_anything_is_sent(connect, wrong):
    connected = connect(small(), 3, sync=False)
    with pytest.raises(ValueError, match=r"0 \.\. 2"):
        connected.scheme.send(worker_ids=wrong)
    assert (connected.scheme.version, connected.versions) == (0, [0, 0, 0])
    connected.push()
    assert connected.versions == [1, 1, 1]


# --- receiving -----------------------------------------------------------------------------------------------------


def test_receive_polls_waits_or_blocks_and_a_wait_that_timed_out_harms_nothing(connect):
    source = small()
    connected = connect(source)
    process = connected.processes[0]

    def timed(box, timeout):
        started = time.monotonic()
        got = box.scheme.receive(timeout)
        return got, time.monotonic() - started

    got, seconds = process.call(timed, 0)
    assert got is None and seconds < 0.2
    got, seconds = process.call(timed, 0.3)
    assert got is None and 0.3 <= seconds < 1.0

    for version, timeout in enumerate((5.0, None, 0), start=1):
        scramble(source.state_dict().values(), seed=version)
        waiting = process.begin(poll_until_something_came) if timeout == 0 else process.begin(schemes.receive, timeout)
        connected.scheme.send()
        got = process.result_of(waiting)
        assert_same_bits(dict(got.flatten_keys(".").items()), leaves_of(source))
        assert connected.versions == [version]


def poll_until_something_came(box):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        got = box.scheme.receive(timeout=0)
        if got is not None:
            return got
        time.sleep(0.001)
    return None


def test_receive_returns_a_copy(connect):
    source = small()
    connected = connect(source)

    def receive_and_scribble(box):
        first = box.scheme.receive(10)
        box.kept = first.clone()
        first.zero_()
        return type(first).__name__

    waiting = connected.processes[0].begin(receive_and_scribble)
    connected.scheme.send()
    assert connected.processes[0].result_of(waiting) == "TensorDict"
    sent = leaves_of(source)
    assert_same_bits(connected.leaves(), sent)

    scramble(source.state_dict().values(), seed=3)
    connected.push()
    kept = connected.processes[0].call(lambda box: dict(box.kept.flatten_keys(".").items()))
    assert_same_bits(kept, sent)


@pytest.mark.slow
def test_a_sender_waits_for_a_receiver_that_is_slower_than_connecting_may_take(connect):
    """gloo's own timeout is the one of the rendezvous; a push has another, and more bytes than sockets can hold."""
    source = nn.Linear(2000, 1000)
    connected = connect(source, connect_timeout=1.5)

    def receive_late(box):
        time.sleep(2.5)
        return box.scheme.receive(10) is not None

    scramble(source.state_dict().values(), seed=1)
    waiting = connected.processes[0].begin(receive_late)
    connected.scheme.send()
    assert connected.processes[0].result_of(waiting)
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_with_a_background_thread_receive_is_refused_and_says_what_to_use(connect):
    connected = connect(small(), sync=False)
    with pytest.raises(RuntimeError, match="background thread"):
        connected.processes[0].call(schemes.receive, 0)


def test_inside_the_gate_nothing_is_received(connect):
    def receive_inside(box):
        with box.scheme.gate:
            return box.scheme.receive(0)

    connected = connect(small())
    with pytest.raises(RuntimeError, match="inside the gate"):
        connected.processes[0].call(receive_inside)
    connected.push()
    assert connected.versions == [1]


def test_sender_and_receiver_handles_do_what_the_scheme_does(connect):
    source = small()
    connected = connect(source)
    sender = connected.scheme.create_sender()
    scramble(source.state_dict().values(), seed=2)

    def receive_by_handle(box):
        receiver = box.scheme.create_receiver()
        return receiver.receive(10) is not None, receiver.version

    waiting = connected.processes[0].begin(receive_by_handle)
    sender.update_weights()
    assert connected.processes[0].result_of(waiting) == (True, 1)
    assert sender.version == 1
    assert_same_bits(connected.leaves(), leaves_of(source))


# --- life cycle ----------------------------------------------------------------------------------------------------


@both_ways
def test_what_a_scheme_says_of_itself_through_its_life(connect, sync):
    source = small()
    sender, joining = connect.begin(source, 2, sync=sync)
    assert (sender.version, sender.model_id, sender.model, sender.worker_idx) == (0, "policy", source, None)
    assert sender.sender_transports == {}
    with pytest.raises(RuntimeError, match="receiver"):
        _ = sender.gate
    with pytest.raises(RuntimeError, match="connect"):
        sender.send()
    sender.connect()
    for process, future in zip(connect.receivers, joining, strict=False):
        process.result_of(future)
    assert (sender.version, sorted(sender.sender_transports)) == (0, [0, 1])
    shared = [transport is sender.shared_transport for transport in sender.sender_transports.values()]
    assert shared == [connect.same_host == "shared_memory"] * 2
    assert (sender.shared_transport is None) == (connect.same_host == "network")
    assert_same_bits(dict(sender.weights.flatten_keys(".").items()), leaves_of(source))

    def told(box):
        scheme = box.scheme
        return {
            "version": scheme.version,
            "model_id": scheme.model_id,
            "model": scheme.model is box.model,
            "worker_idx": scheme.worker_idx,
            "transport": scheme.receiver_transport is not None,
            "sender_transports": scheme.sender_transports,
            "weights": dict(scheme.weights.flatten_keys(".").items()),
        }

    for worker in range(2):
        found = connect.receivers[worker].call(told)
        assert_same_bits(found.pop("weights"), leaves_of(source))
        assert found == {
            "version": 0, "model_id": "policy", "model": True, "worker_idx": worker, "transport": True,
            "sender_transports": {},
        }  # fmt: skip


def test_a_scheme_has_one_role_and_says_so(connect):
    scheme = connect.sender(small())
    with pytest.raises(RuntimeError, match="the sender of 'policy' already"):
        scheme.init_on_receiver("policy", model=small(), worker_idx=0)
    with pytest.raises(RuntimeError, match="connected receiver"):
        scheme.receive(0)
    fresh = DistributedWeightSyncScheme()
    for call in (fresh.connect, fresh.send, fresh.receive):
        with pytest.raises(RuntimeError, match="init_on_"):
            call()
    with pytest.raises(ValueError, match="num_workers"):
        fresh.init_on_sender("policy", model=small())


def test_a_scheme_pickles_before_and_after_it_is_initialised():
    fresh = DistributedWeightSyncScheme(sync=False, timeout=12.0, heartbeat_timeout=3.0)
    twin = pickle.loads(pickle.dumps(fresh))
    assert (twin.sync, twin.timeout, twin.heartbeat_timeout, twin.model_id) == (False, 12.0, 3.0, None)
    with pytest.raises(RuntimeError, match="init_on_sender"):
        twin.get_store_info()

    source = nn.Linear(300, 300)
    fresh.init_on_sender("policy", model=source, num_workers=1)
    try:
        blob = pickle.dumps(fresh)
        assert len(blob) < 2000  # its configuration and an address: no weights
        twin = pickle.loads(blob)
        assert twin.get_store_info() == fresh.get_store_info()
        assert (twin.model_id, twin.model, twin.version) == ("policy", None, -1)
    finally:
        fresh.shutdown()


def test_a_receiver_of_its_own_making_is_told_where_its_sender_is(receivers, connect):
    sender = connect.sender(source := small(), num_workers=1)
    info = sender.get_store_info()
    assert info.keys() == {"host", "port", "authkey", "local", "connect_timeout"} and info["host"] == "127.0.0.1"
    assert bool(info["local"]) == (connect.same_host == "shared_memory")

    theirs = DistributedWeightSyncScheme(sync=True, connect_timeout=10, same_host=connect.same_host)
    receivers[0].call(schemes.init, theirs, altered(source), store_info=info)
    with pytest.raises(ValueError, match="worker_idx"):
        receivers[0].call(schemes.connect)
    joining = receivers[0].begin(schemes.connect, worker_idx=0)
    sender.connect()
    receivers[0].result_of(joining)
    assert_same_bits(receivers[0].call(schemes.leaves), leaves_of(source))


@both_ways
def test_after_shutdown_each_side_says_that_it_has_ended(connect, sync):
    connected = connect(small(), 2, sync=sync)
    connected.push()
    process = connected.processes[0]
    for _ in range(2):
        connected.scheme.shutdown()
    with pytest.raises(WeightSyncError, match="shut down"):
        connected.scheme.send()
    assert connected.scheme.version == 1
    with pytest.raises((RuntimeError, WeightSyncError), match="shut down"):
        connected.scheme.connect()

    # The receiver learns of it at its next wait, keeps what it has, and may be shut down as often as anybody likes.
    if sync:
        with pytest.raises(WeightSyncError, match="ended"):
            process.call(schemes.receive, 5)
    assert connected.versions == [1, 1]
    for _ in range(2):
        process.call(schemes.shutdown)
    with pytest.raises(WeightSyncError if sync else RuntimeError):
        process.call(schemes.receive, 0)


@both_ways
def test_a_receiver_that_leaves_is_named_and_the_other_is_served(connect, sync):
    connected = connect(source := small(), 2, sync=sync)
    connected.processes[0].call(schemes.shutdown)
    scramble(source.state_dict().values(), seed=5)
    waiting = connected.processes[1].begin(schemes.receive) if sync else None
    with pytest.raises(WorkerDied, match="worker 0") as caught:
        connected.scheme.send()
    assert list(caught.value.failed) == [0]
    if waiting is not None:
        connected.processes[1].result_of(waiting)
    assert_same_bits(connected.leaves(1), leaves_of(source))
    assert connected.versions == [0, 1]


@pytest.mark.parametrize(("ours", "theirs", "seconds"), [(None, None, 92.0), (7.0, None, 7.0), (7.0, 5.0, 5.0)])
def test_a_receiver_waits_as_long_as_its_sender_unless_it_was_told_otherwise(monkeypatch, ours, theirs, seconds):
    sender = DistributedWeightSyncScheme(connect_timeout=ours)
    sender.init_on_sender("policy", model=small(), num_workers=16)
    receiver = DistributedWeightSyncScheme(connect_timeout=theirs)
    receiver.init_on_receiver("policy", model=small(), worker_idx=0, store_info=sender.get_store_info())
    deadlines = []
    monkeypatch.setattr(ReceiverLink, "connect", lambda self, deadline: deadlines.append(deadline - time.monotonic()))
    receiver.connect()
    assert deadlines == [pytest.approx(seconds, abs=0.5)]
    for scheme in (sender, receiver):
        scheme.shutdown()


def test_an_init_that_failed_can_be_repeated():
    scheme = DistributedWeightSyncScheme(host="203.0.113.7")  # of the documentation's network, and of nobody's machine
    with pytest.raises(OSError, match="assign"):
        scheme.init_on_sender("policy", model=small(), num_workers=1)
    scheme.host = "127.0.0.1"
    scheme.init_on_sender("policy", model=small(), num_workers=1)
    scheme.shutdown()

    model = small()
    undo = gate_forward(model, Gate())
    with pytest.raises(PathError):
        scheme.init_on_receiver("policy", context=SimpleNamespace(critic=model))
    with pytest.raises(ValueError, match="another gate"):
        scheme.init_on_receiver("policy", model=model, safe_point="forward")
    undo()
    scheme.init_on_receiver("policy", model=model, safe_point="forward")
    scheme.shutdown()


def test_one_object_can_be_initialised_again_after_shutdown(receivers, connect):
    """Two lives of one sender object, in the same processes: another key, the version from the beginning."""
    source = small()
    sender = connect.sender(source)
    infos = []
    for seed in range(2):
        scramble(source.state_dict().values(), seed)
        if seed:
            sender.init_on_sender("policy", model=source, num_workers=1)
        infos.append(sender.get_store_info())
        receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
        joining = receivers[0].begin(schemes.connect)
        sender.connect()
        receivers[0].result_of(joining)
        assert sender.version == 0
        assert_same_bits(receivers[0].call(schemes.leaves), leaves_of(source))
        receivers[0].call(schemes.shutdown)
        sender.shutdown()
    assert infos[0]["authkey"] != infos[1]["authkey"]
