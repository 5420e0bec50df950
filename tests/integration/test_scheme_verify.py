"""What is said of a push's bytes: that they are the ones that were sent, and which of them need not travel."""

import copy

import pytest
import torch
from torch import nn

from lightning_weightsync import WeightSyncError
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.transports.process_group import ProcessGroupReceiver
from lightning_weightsync.transports.shared_memory import SharedMemoryReceiver
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of, randomise
from tests.helpers.models import Mixed, Tied
from tests.helpers.schemes import over_network

# --- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("make", [Mixed, Tied], ids=lambda kind: kind.__name__)
def test_what_arrives_as_it_was_sent_passes(connect, make, strategy):
    connected = connect(source := make(), 2, sync=False, verify=True, strategy=strategy)
    for seed in range(3):
        connected.push(randomise(source, seed))
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert connected.versions == [3, 3]


@pytest.mark.parametrize("options", [{"apply": "copy"}, {"max_slots": 1}, {"wire_dtype": torch.bfloat16}], ids=str)
def test_it_passes_however_the_bytes_are_applied(connect, options):
    connected = connect(source := randomise(Mixed(), 1), 2, sync=False, verify=True, **options)
    connected.push(randomise(source, 2))
    assert connected.versions == [1, 1]


def spoil_arrivals(box):
    """From now on one bit of what arrives is flipped before it is applied."""

    def spoil(kind):
        stage = kind.stage

        def spoiled(self, *args):
            slot = stage(self, *args)
            slot.memory[5] ^= 1
            return slot

        kind.stage = spoiled
        box.undo.append(lambda: setattr(kind, "stage", stage))

    box.undo = []
    for kind in (SharedMemoryReceiver, ProcessGroupReceiver):
        spoil(kind)


def spoil_leaves(box):
    """From now on one element of the live model is changed after it was applied."""
    apply = StagedModel.apply

    def spoiled(self, *args, **kwargs):
        apply(self, *args, **kwargs)
        self.target.weight.data[0, 0] += 1

    StagedModel.apply = spoiled
    box.undo = [lambda: setattr(StagedModel, "apply", apply)]


def mend(box):
    for undo in box.undo:
        undo()


@pytest.mark.parametrize(
    ("spoil", "options"),
    [(spoil_arrivals, {"apply": "copy"}), (spoil_leaves, {}), (spoil_leaves, {"apply": "copy"})],
    ids=["on its way", "in the window", "in the copy"],
)
def test_a_bit_that_was_flipped_is_told_and_the_next_push_is_as_usual(connect, spoil, options):
    connected = connect(source := nn.Linear(40, 40), 2, sync=False, verify=True, **options)
    connected.processes[1].call(spoil)
    fill(source, 1.0)
    with pytest.raises(WeightSyncError, match=r"worker 1 \(pid \d+\) has applied other bytes of 'policy'") as caught:
        connected.push()
    assert list(caught.value.failed) == [1]
    assert_same_bits(connected.leaves(0), leaves_of(source))
    connected.processes[1].call(mend)
    fill(source, 2.0)
    connected.push()
    assert_same_bits(connected.leaves(1), leaves_of(source))


def test_a_cast_leaf_that_does_not_hold_the_value_is_told(connect):
    connected = connect(source := nn.Linear(40, 40), 1, sync=False, verify=True, wire_dtype=torch.bfloat16)
    connected.processes[0].call(spoil_leaves)
    with pytest.raises(WeightSyncError, match=r"'policy': weight does not hold what was pushed"):
        connected.push()
    connected.processes[0].call(mend)
    connected.push()
    assert torch.equal(connected.leaves()["weight"], source.weight.detach().bfloat16().float())


def test_without_it_nobody_looks(connect):
    connected = connect(nn.Linear(40, 40), 1, sync=False)
    connected.processes[0].call(spoil_leaves)
    connected.push()
    connected.processes[0].call(mend)


# --- only_changed ---------------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """A large frozen body with a small head, and a frozen part at the end."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(400, 400).requires_grad_(False)
        self.head = nn.Linear(40, 4)
        self.tail = nn.Linear(300, 300).requires_grad_(False)
        self.register_buffer("count", torch.tensor(0))


FROZEN = 4 * (400 * 401 + 300 * 301)


def step(model, value):
    model.head.weight.data.fill_(value)
    model.head.bias.data.fill_(-value)
    model.count.fill_(int(value))


@pytest.mark.parametrize("options", [{}, {"apply": "copy"}, {"verify": True}], ids=str)
def test_what_did_not_change_does_not_travel_and_the_result_is_the_same(connect, options):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True, **options)
    hub = connected.scheme._hub
    for value in range(1, 7):
        step(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
        if value == 3:
            pushed, saved = hub.bytes_pushed, hub.bytes_saved  # by now each slot was written once
    if connect.same_host == "network":
        assert hub.bytes_pushed - pushed < 3 * 2 * 4000
        assert hub.bytes_saved - saved >= 3 * 2 * FROZEN
    else:
        assert hub.bytes_saved - saved >= 3 * FROZEN  # written once for all


def test_a_part_that_changes_again_travels_again(connect):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True)
    generator = torch.Generator().manual_seed(1)
    for round_number in range(25):
        for tensor in source.state_dict().values():
            if torch.rand((), generator=generator) < 0.4:
                tensor.view(-1)[int(torch.randint(tensor.numel(), (), generator=generator))] = round_number
        connected.push(None if round_number % 3 else copy.deepcopy(source))
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_workers_that_hold_different_versions_each_get_what_they_lack(connect):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True)
    for value in range(1, 10):
        step(source, value)
        if value == 4:
            source.tail.weight.data.fill_(3.0)  # worker 1 misses this push
        connected.push(worker_ids=[0] if value in (3, 4, 5) else None)
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))


def raise_once(box):
    def hook(model, version):
        if not box.raised:
            box.raised = True
            raise RuntimeError("not this one")

    box.raised = False
    box.scheme.add_applied_hook(hook)


def test_a_push_that_a_worker_refused_is_not_what_the_next_is_compared_with(connect):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True)
    step(source, 1)
    connected.push()
    connected.processes[1].call(raise_once)
    step(source, 2)
    source.tail.weight.data.fill_(3.0)
    with pytest.raises(WeightSyncError, match="not this one"):
        connected.push()
    for value in (3, 4, 5):
        step(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_a_replacement_gets_everything(connect, receivers):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True)
    for value in (1, 2, 3):
        step(source, value)
        connected.push()
    connected.processes[1].kill()
    joining = connected.join(1, receivers[2], Partly())
    connected.scheme.connect()
    receivers[2].result_of(joining)
    assert_same_bits(connected.leaves(1), leaves_of(source))
    for value in (4, 5, 6):
        step(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def scribble(box):
    for tensor in box.model.state_dict().values():
        tensor.fill_(9)


def test_a_worker_that_writes_its_own_weights_gets_the_senders_all_the_same(connect):
    """Those that live in a window; what is copied is compared with nothing, and written as a whole."""
    connected = connect(source := Partly(), 1, sync=False, only_changed=True)
    for value in range(1, 6):
        connected.processes[0].call(scribble)
        step(source, value)
        connected.push()
        assert_same_bits(connected.leaves(), leaves_of(source))


@over_network
def test_slots_of_what_workers_hold_are_given_back(connect):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True)
    for value in range(1, 5):
        step(source, value)
        connected.push()
    pool = connected.scheme._pool
    assert len(pool) <= 3
    connected.processes[1].kill()
    with pytest.raises(WeightSyncError):
        connected.push()
    connected.push(worker_ids=0)
    held = [holder for slot in pool._slots.values() for holder in slot.holders]
    assert sum("what a worker has" in repr(holder) for holder in held) == 1


def test_one_slot_and_no_comparison_is_right_too(connect):
    connected = connect(source := Partly(), 2, sync=False, only_changed=True, max_slots=1)
    for value in range(1, 5):
        step(source, value)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))


def test_versions_are_counted_though_nothing_has_changed(connect):
    connected = connect(Partly(), 2, sync=False, only_changed=True)
    for _ in range(4):
        connected.push()
    assert connected.versions == [4, 4] == [connected.scheme.version] * 2


def test_the_scheme_takes_it_along_to_its_receivers():
    scheme = copy.deepcopy(schemes.DistributedWeightSyncScheme(verify=True, only_changed=True))
    assert (scheme.verify, scheme.only_changed) == (True, True)
