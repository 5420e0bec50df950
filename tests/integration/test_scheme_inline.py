"""Over the network a small model travels in the announcement of its push."""

import pytest
import torch
from torch import nn

from lightning_weightsync import WeightSyncTimeout, WorkerError
from lightning_weightsync.transports import process_group
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of, scramble
from tests.helpers.schemes import assert_text, both_ways, hold_gate, layers, over_network, release_gate

pytestmark = over_network


@pytest.fixture
def inline(connect, monkeypatch):
    """Lists what is sent over pair groups all the same."""
    sent = []
    monkeypatch.setattr(process_group, "INLINE", 64 << 10)
    start = process_group.ProcessGroupSender.start

    def counted(self, operation, memory):
        sent.append(memory.numel())
        return start(self, operation, memory)

    monkeypatch.setattr(process_group.ProcessGroupSender, "start", counted)
    return sent


class Counting(nn.Module):
    """Has an extra state, which travels in the same message."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("none", torch.zeros(0))
        self.calls = {"of": [1, 2, 3]}

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


@both_ways
def test_every_byte_arrives(connect, inline, sync):
    connected = connect(source := layers(), 2, sync=sync)
    inline.clear()  # of the proofs
    for seed in range(5):
        scramble(source.state_dict().values(), seed)
        connected.push()
        for index in (0, 1):
            assert_same_bits(connected.leaves(index), leaves_of(source))
    assert connected.versions == [5, 5]
    assert inline == []


@pytest.mark.parametrize("options", [{"verify": True}, {"wire_dtype": torch.bfloat16}, {"apply": "copy"}])
def test_with_options_too(connect, inline, options):
    connected = connect(source := layers(buffer=False), 1, sync=False, **options)
    inline.clear()
    fill(source, 0.5)
    connected.push()
    assert_same_bits(connected.leaves(), leaves_of(source))
    assert inline == []


def test_changes_alone_and_large_models_go_over_the_pair(connect, inline):
    for options, source in (({"only_changed": True}, layers()), ({}, nn.Linear(200, 200))):
        connected = connect(source, 1, sync=False, **options)
        inline.clear()
        scramble(source.state_dict().values(), 1)
        connected.push()
        assert_same_bits(connected.leaves(), leaves_of(source))
        assert inline
        connected.scheme.shutdown()


def test_extra_state_beside_it(connect, inline):
    connected = connect(source := Counting(), 2, receiver_model=Counting(), sync=False)
    source.calls = {"of": list(range(1000))}
    scramble(source.layer.parameters(), 1)
    connected.push()
    for process in connected.processes:
        assert process.call(lambda box: box.model.calls) == source.calls
        assert_same_bits(process.call(lambda box: dict(box.model.layer.named_parameters())), leaves_of(source.layer))


def test_weights_and_extra_state_of_each_worker_are_its_own(connect, inline, monkeypatch):
    """They have the same names and sizes: nothing but their bytes tells them apart."""
    for size in (64 << 10, 0):
        monkeypatch.setattr(process_group, "INLINE", size)
        connected = connect(source := Counting(), 2, receiver_model=Counting(), sync=False)
        given = {}
        for index in (0, 1):
            given[index] = Counting()
            given[index].calls = {"of": [index] * 3}
            fill(given[index].layer, float(index))
        connected.push(given)
        for index, process in enumerate(connected.processes):
            assert process.call(lambda box: box.model.calls) == {"of": [index] * 3}
            assert process.call(lambda box: float(box.model.layer.weight[0, 0])) == index
        connected.scheme.shutdown()
        assert source.calls == {"of": [1, 2, 3]}


def test_a_worker_that_refuses_one_takes_the_next(connect, inline):
    connected = connect(source := layers(), 2, sync=False, timeout=2)
    fill(source, 1.0)

    def refuse(model, version):
        if version == 1:
            raise ArithmeticError("not this one")

    connected.processes[0].call(lambda box: box.scheme.add_applied_hook(refuse))
    with pytest.raises(WorkerError, match="not this one"):
        connected.push()
    assert connected.versions == [0, 1]
    fill(source, 2.0)
    connected.processes[1].call(hold_gate)
    with pytest.raises(WeightSyncTimeout) as caught:
        connected.push()
    assert list(caught.value.failed) == [1]
    connected.processes[1].call(release_gate)
    connected.push()
    assert connected.versions == [3, 3]


def test_an_announcement_that_is_too_short_ends_the_link(connect, inline, monkeypatch):
    connected = connect(layers(), 1, sync=False)
    monkeypatch.setattr("lightning_weightsync.transports.pushing._bytes_of", lambda slot: b"short")
    with pytest.raises(Exception) as caught:
        connected.push()
    assert_text(caught.value, "worker 0", "brought 5 bytes where|connection")
    assert connected.processes[0].call(schemes.version) == 0
