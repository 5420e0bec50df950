"""Every leaf lands bit for bit where the layout says, whichever way it is copied."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_weightsync.schemes import gather as module_under_test
from lightning_weightsync.schemes.gather import Gather
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.slots import SlotPool
from tests.helpers.leaves import bits

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip


def copied_in_order(gather, slot):
    """Whatever has been said to be there stays as it is."""
    pieces = [(there, slot.memory[:there].clone()) for there in gather.copy_in_order_to(slot)]
    assert [there for there, _ in pieces] == sorted(there for there, _ in pieces)
    for there, piece in pieces:
        assert torch.equal(piece, slot.memory[:there])


def gathered(tensors, layout=None, *, copy=Gather.copy_to, **options):
    """The leaves of a slot that had other bytes in it before, after one copy; and the slot."""
    layout = WeightLayout.of(tensors) if layout is None else layout
    pool = SlotPool(layout, 1, shared=False)
    slot = pool.try_acquire("test")
    slot.memory.fill_(0xA5)
    copy(Gather(layout, [tensors[leaf.name] for leaf in layout.leaves], **options), slot)
    return dict(zip((leaf.name for leaf in layout.leaves), slot.views, strict=True))


def random_bytes(*shape, dtype):
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


@pytest.mark.parametrize("copy", [Gather.copy_to, copied_in_order])
@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_leaf_lands_bit_for_bit(seed, join, copy):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tensors = {}
    for index in range(int(torch.randint(1, 40, (), generator=generator))):
        dtype = DTYPES[int(torch.randint(len(DTYPES), (), generator=generator))]
        shape = [[], [0], [1], [3], [5, 7], [2, 0, 3], [40000]][int(torch.randint(7, (), generator=generator))]
        tensor = random_bytes(*shape, dtype=dtype) if shape else random_bytes(1, dtype=dtype).reshape(())
        if len(shape) == 2 and index % 2:
            tensor = tensor.t()
        tensors[f"leaf{index}"] = tensor
    found = gathered(tensors, join=join, copy=copy)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert bits(found[name]) == bits(tensor), name


def test_padding_between_small_leaves_is_zero():
    tensors = {"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(1), "c": torch.ones(16)}
    layout = WeightLayout.of(tensors)
    slot = SlotPool(layout, 1, shared=False).try_acquire("test")
    Gather(layout, list(tensors.values())).copy_to(slot)
    assert slot.memory[1:64].tolist() == [0] * 63
    assert slot.memory[68:128].tolist() == [0] * 60


def test_padding_in_a_long_run_of_small_leaves_is_written_as_zero():
    tensors = {str(index): torch.ones(1) for index in range(100)}
    layout = WeightLayout.of(tensors)
    slot = SlotPool(layout, 1, shared=False).try_acquire("test")
    slot.memory.fill_(0xA5)
    Gather(layout, list(tensors.values())).copy_to(slot)
    assert slot.memory[4:64].tolist() == [0] * 60


def test_the_values_of_the_moment_are_copied_and_nothing_else_of_the_source_changes():
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    tensors = dict(module.named_parameters())
    layout = WeightLayout.of(tensors)
    pool = SlotPool(layout, 1, shared=False)
    slot = pool.try_acquire("test")
    gather = Gather(layout, list(tensors.values()))
    versions = [tensor._version for tensor in tensors.values()]
    for value in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.data.fill_(value)
        gather.copy_to(slot)
        assert {float(view.unique()) for view in slot.views} == {value}
    assert [tensor._version for tensor in tensors.values()] == versions
    assert all(tensor.requires_grad and tensor.grad is None for tensor in tensors.values())


def test_leaves_that_are_cast_and_leaves_that_are_not_share_a_slot():
    tensors = {"a": torch.tensor([1.5, 2.5]), "b": torch.tensor([3]), "c": torch.tensor([4]), "d": torch.tensor([5.5])}
    layout = WeightLayout.of(tensors).cast(torch.bfloat16)
    found = gathered(tensors, layout)
    assert found["a"].dtype is torch.bfloat16
    assert {name: view.tolist() for name, view in found.items()} == {n: t.tolist() for n, t in tensors.items()}


def test_lazily_conjugated_and_negated_leaves_are_resolved():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"a": numbers.conj(), "b": torch.imag(numbers.conj()), "c": torch.ones(2), "d": torch.ones(2)}
    found = gathered(tensors)
    assert found["a"].tolist() == [1 - 2j, 3 + 4j]
    assert found["b"].tolist() == [-2, 4]


def test_an_interrupted_copy_leaves_nobody_who_goes_on_with_it(monkeypatch):
    """The target is given to somebody else then."""
    caller, moved = threading.current_thread(), []

    def memmove(target, source, nbytes):
        if threading.current_thread() is caller:
            if moved:
                raise KeyboardInterrupt
            nbytes = 0
        moved.append(nbytes)
        time.sleep(0.01)

    monkeypatch.setattr(module_under_test, "ctypes", SimpleNamespace(memmove=memmove))
    before = threading.active_count()
    monkeypatch.setattr(module_under_test, "_cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        module_under_test.move([(0, 0, 1 << 30)])
    done = len(moved)
    assert done < 100 and threading.active_count() == before
    time.sleep(0.05)
    assert len(moved) == done
