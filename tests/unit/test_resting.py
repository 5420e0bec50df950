"""A gate with a sender outside that writes the weights while nobody is inside; its end is here too."""

import gc
import os
import random
import sys
import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.resting import Resting
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.transports.board import SenderBoard, WorkerBoard
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.memory import SlotMemory, create_memory_file, map_memory
from tests.helpers.threads import Call, eventually, soon

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boards are made on Linux only")


class Pair:
    """A model in a slot, its gate, and the sender who may write that slot."""

    def __init__(self, net, gate):
        self.net, self.gate = net, gate
        self.model = StagedModel("policy", net, WeightStrategy("tensordict"), may_switch=True)
        self.model.bind(WeightLayout.of(self.model.strategy.leaves(net)))
        self.file = create_memory_file("test")
        self.slot = map_memory(self.file, self.model.layout.nbytes)
        self.mapped = SlotMemory(map_memory(self.file, self.model.layout.nbytes, private=True), os.dup(self.file))
        self.sender = SenderBoard(os.getpid())
        board = WorkerBoard(self.sender.descriptor)
        self.resting = Resting(board, gate, lambda: [self.model])
        self.resting.version = gate.version = 0
        self.apply()
        gate.connect(self.resting)
        self.resting.offer()

    def apply(self):
        self.model.apply(self.mapped, {}, keep_backup=False)
        self.model.keep()

    def write(self, version, value=None):
        """What a sender does; whether it could."""
        if not (self.sender.is_open and self.sender.lock()):
            return False
        try:
            if not (self.sender.is_open and self.sender.may_write()):
                return False
            self.sender.begin()
            for view in self.model.layout.views(self.slot).values():
                view.fill_(float(version if value is None else value))
            assert self.sender.pages_are_shared()
            self.sender.end(version)
            return True
        finally:
            self.sender.unlock()

    def close(self):
        self.resting.end()
        self.sender.close()
        os.close(self.file)


@pytest.fixture
def make_pair():
    pairs = []

    def make(net=None, *, gradients=True):
        net = net if net is not None else nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        pairs.append(Pair(net, Gate(gradients=gradients)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def values(pair):
    return {value for leaf in pair.net.parameters() for value in leaf.unique().tolist()}


def test_a_version_that_was_written_is_in_force_for_the_next_to_come_in(make_pair):
    pair = make_pair()
    assert pair.write(3)
    assert (pair.gate.version, pair.resting.version, values(pair)) == (3, 3, {3.0})
    with torch.no_grad(), pair.gate:
        assert (pair.gate.version, values(pair)) == (3, {3.0})
        assert not pair.write(4)
    assert pair.write(4)
    assert pair.gate.version == 4


def test_a_change_by_the_sender_counts_as_a_change_in_place(make_pair):
    pair = make_pair()
    versions = [leaf._version for leaf in pair.net.parameters()]
    pair.write(1)
    with torch.no_grad(), pair.gate:
        pass
    with torch.no_grad(), pair.gate:
        pass
    assert [leaf._version for leaf in pair.net.parameters()] == [version + 1 for version in versions]


def test_everybody_inside_has_to_leave_before_it_writes(make_pair):
    pair = make_pair()
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with torch.no_grad(), pair.gate:
            inside.set()
            assert leave.wait(10)

    call = Call(stay)
    assert inside.wait(5)
    with torch.no_grad(), pair.gate:
        pass
    assert not pair.write(1)
    leave.set()
    call.result()
    assert pair.write(1)


def test_nobody_comes_in_while_it_writes(make_pair):
    pair = make_pair()
    assert pair.sender.lock()

    def enter():
        with torch.no_grad(), pair.gate:
            return pair.gate.version, values(pair)

    calls = [Call(enter) for _ in range(3)]
    time.sleep(0.05)
    assert all(call.running for call in calls)
    with pytest.raises(WeightSyncTimeout), pair.gate.alone(soon(0.1)):
        pass
    pair.sender.unlock()
    eventually(lambda: pair.write(2))  # not while one of them is inside
    assert {call.result()[0] for call in calls} <= {0, 2}


def test_a_mixture_lets_nobody_in_but_the_switch_that_mends_it(make_pair):
    pair = make_pair()
    assert pair.sender.lock()
    pair.sender.begin()
    pair.slot[: pair.slot.numel() // 2] = 77
    pair.sender.unlock()

    def enter():
        with torch.no_grad(), pair.gate:
            return values(pair)

    call = Call(enter)
    time.sleep(0.05)
    assert call.running
    with pair.gate.alone(soon(5)):
        for view in pair.model.layout.views(pair.slot).values():
            view.fill_(5.0)
        pair.apply()
        pair.gate.version = pair.resting.version = 5
    time.sleep(0.02)
    assert call.running  # until it is said that they are whole
    pair.resting.offer()
    assert call.result() == {5.0}
    assert pair.write(6)


def test_a_mixture_that_nobody_will_mend_raises_for_everybody(make_pair):
    pair = make_pair()
    assert pair.sender.lock()
    pair.sender.begin()
    call = Call(pair.gate.__enter__)
    time.sleep(0.02)
    pair.sender.close()
    pair.resting.end()
    with pytest.raises(WeightSyncError, match="mixture"):
        call.result()
    with pytest.raises(WeightSyncError, match="mixture"), pair.gate:
        pass
    with pair.gate.alone(soon(1)):  # to apply what another sender pushes
        pass


def test_any_switch_of_ones_own_has_the_sender_ask_first(make_pair):
    pair = make_pair()
    with pair.gate.alone():
        pass
    assert not pair.write(1)
    pair.resting.offer()
    assert pair.write(1)


def test_a_call_that_may_record_gradients_has_it_ask_from_then_on(make_pair):
    pair = make_pair()
    with pair.gate:
        pass
    assert not pair.write(1)
    pair.resting.offer()
    assert not pair.write(1)


def test_a_frozen_leaf_is_needed_for_the_gradient_of_its_input(make_pair):
    pair = make_pair(nn.Linear(4, 4).requires_grad_(False))
    x = torch.ones(1, 4, requires_grad=True)
    with pair.gate:
        y = pair.net(x).sum()
    assert not pair.write(1)
    y.backward()


def test_a_gate_whose_owner_computes_none_may_be_entered_in_any_mode(make_pair):
    pair = make_pair(gradients=False)
    with pair.gate:
        pass
    assert pair.write(1)


def test_a_hook_keeps_it_from_writing(make_pair):
    pair = make_pair()
    pair.model.applied_hooks.append(print)
    pair.resting.withdraw()
    assert not pair.write(1)
    pair.resting.offer()
    assert not pair.write(1)


def test_a_leaf_in_another_ones_place_takes_the_value_when_somebody_comes_in(make_pair):
    pair = make_pair()
    pair.net[0].weight = nn.Parameter(torch.full((40, 40), -1.0))
    assert pair.write(4)
    assert values(pair) == {4.0, -1.0}
    with torch.no_grad(), pair.gate:
        assert values(pair) == {4.0}
    assert pair.write(5)
    assert values(pair) == {5.0}


def test_a_leaf_in_another_ones_place_that_can_only_be_copied_has_the_sender_ask(make_pair):
    pair = make_pair()
    pair.net[0].weight = nn.Parameter(torch.full((40, 80), -1.0)[:, ::2])
    assert pair.write(4)
    with torch.no_grad(), pair.gate:
        assert values(pair) == {4.0}
    assert not pair.write(5)


def test_a_leaf_that_does_not_fit_raises_for_who_comes_in(make_pair):
    pair = make_pair()
    pair.net[0].weight = nn.Parameter(torch.zeros(3, 3))
    assert pair.write(4)
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"0\.weight"), torch.no_grad(), pair.gate:
            pass
    assert pair.sender.lock()  # nobody is inside
    pair.sender.unlock()
    assert not pair.write(5)  # so that the sender is told
    with pair.gate.alone(soon(1)):  # by this one
        pass


def test_a_leaf_more_is_the_next_pushs_business(make_pair):
    pair = make_pair()
    pair.net.register_buffer("lazy", torch.zeros(3))
    assert pair.write(4)
    with torch.no_grad(), pair.gate:
        assert pair.gate.version == 4
        assert {value for leaf in pair.net[0].parameters() for value in leaf.unique().tolist()} == {4.0}
    assert not pair.write(5)  # so that the sender is told


def test_what_is_moved_in_inference_mode_stays_usable(make_pair):
    pair = make_pair(gradients=False)
    pair.net[0].weight = nn.Parameter(torch.full((40, 40), -1.0))
    assert pair.write(4)
    with torch.inference_mode(), pair.gate:
        pass
    assert not any(leaf.is_inference() for leaf in pair.net.parameters())
    assert values(pair) == {4.0}
    pair.net(torch.ones(1, 40)).sum().backward()


def test_what_one_sender_left_as_a_mixture_is_not_mended_by_another_one_of_other_weights(make_pair):
    pair = make_pair()
    assert pair.sender.lock()
    pair.sender.begin()
    pair.sender.close()
    pair.resting.end()
    other = Pair(nn.Linear(3, 3), pair.gate)
    with pytest.raises(WeightSyncError, match="mixture"), torch.no_grad(), pair.gate:
        pass
    again = Pair(pair.net, pair.gate)
    with torch.no_grad(), pair.gate:
        pass
    other.close()
    again.close()


def test_a_mixture_of_a_model_that_is_gone_is_nobodys_business(make_pair):
    gate = Gate()
    pair = Pair(nn.Linear(3, 3), gate)
    assert pair.sender.lock()
    pair.sender.begin()
    pair.close()
    with pytest.raises(WeightSyncError, match="mixture"), gate:
        pass
    del pair
    gc.collect()
    with gate:
        pass


def test_what_a_forked_child_does_stays_its_own(make_pair):
    pair = make_pair()
    assert pair.write(3)
    pair.resting.withdraw()
    child = os.fork()
    if child == 0:
        try:
            pair.net[0].weight = nn.Parameter(torch.zeros(40, 40))
            with torch.no_grad(), pair.gate:
                pair.resting.offer()
                pair.resting.version = 77
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert not pair.write(4)
    assert pair.gate.version == 3


def test_two_senders_of_one_gate(make_pair):
    one = make_pair()
    two = Pair(nn.Linear(3, 3), one.gate)
    assert one.write(1) and two.write(7)
    with torch.no_grad(), one.gate:
        assert not one.write(2) and not two.write(8)
        assert (values(one), values(two)) == ({1.0}, {7.0})
    assert two.sender.lock()

    def enter():
        with torch.no_grad(), one.gate:
            pass

    call = Call(enter)
    time.sleep(0.02)
    assert call.running
    assert one.sender.lock()  # it is not kept out for as long as the other one writes
    one.sender.unlock()
    two.sender.unlock()
    call.result()
    two.close()
    assert one.write(3)


def test_readers_that_were_inside_before_it_came_are_respected(make_pair):
    gate = Gate()
    with torch.no_grad(), gate:
        pair = Pair(nn.Linear(3, 3), gate)
        assert not pair.write(1)
    assert pair.write(1)
    pair.close()


def test_after_the_end_the_version_stays(make_pair):
    pair = make_pair()
    pair.write(9)
    pair.resting.end()
    assert pair.gate.version == 9
    with torch.no_grad(), pair.gate:
        assert pair.gate.version == 9


@pytest.mark.parametrize("seed", range(3))
def test_a_sender_readers_and_switches_at_random_never_mix(make_pair, seed):
    chance = random.Random(seed)
    pair = make_pair()
    stop, mixed, seen = threading.Event(), [], set()

    def read():
        last = -1
        with torch.no_grad():
            while not stop.is_set():
                with pair.gate:
                    version, found = pair.gate.version, values(pair)
                    if found != {float(version)} or version < last or pair.gate.version != version:
                        mixed.append((version, last, found))
                    last = version
                seen.add(version)
                time.sleep(0.0002)

    readers = [Call(read) for _ in range(2)]
    version = written = 0
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        version += 1
        if pair.write(version):
            written += 1
        else:
            with pair.gate.alone(soon(5)):
                for view in pair.model.layout.views(pair.slot).values():
                    view.fill_(float(version))
                pair.apply()
                pair.gate.version = pair.resting.version = version
            pair.resting.offer()
        time.sleep(chance.random() * 0.0005)
    stop.set()
    for reader in readers:
        reader.result()
    assert mixed == []
    assert written > 20 and len(seen) > 20
    assert values(pair) == {float(version)}
