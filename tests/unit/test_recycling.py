"""Memory of batches: used again, and never while anybody has a part of it."""

import gc
import pickle

import pytest
import torch
from tensordict import TensorDict

from lightning_weightsync.collectors.recycling import KEPT, SMALL, BatchMemory

ROWS, T = 4, 8


def batch(value, rows=ROWS, large=True):
    width = SMALL // (ROWS * T) if large else 3
    frames = torch.full((rows, T, width), value % 256, dtype=torch.uint8)
    nested = {"observation": frames + 1, "reward": torch.full((rows, T, 1), float(value))}
    return TensorDict({"observation": frames, "next": nested, "flag": torch.full((rows, T), value % 2 == 1)}, [rows, T])


def frames_of(made):
    return made["observation"].data_ptr()


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("values", [[3], [3, 4, 250]])
def test_it_is_a_copy_of_all_batches_in_their_order(values, large):
    memory = BatchMemory()
    parts = [batch(value, rows=ROWS + k, large=large) for k, value in enumerate(values)]
    for _ in range(3):
        made = memory.concatenated(parts)
        expected = torch.cat([part.clone() for part in parts], dim=0)
        assert made.batch_size == expected.batch_size
        for key, leaf in expected.items(include_nested=True, leaves_only=True):
            assert torch.equal(made[key], leaf) and made[key].dtype == leaf.dtype and made[key].is_contiguous()
        for part in parts:
            assert frames_of(made) != frames_of(part)


def test_a_batch_that_lies_in_several_pieces_is_copied_right():
    part = batch(5)
    pixels = torch.arange(part["observation"].numel()).remainder(251).to(torch.uint8)
    part["observation"] = pixels.view(T, ROWS, -1).transpose(0, 1)
    made = BatchMemory().concatenated([part, part])
    assert torch.equal(made["observation"], torch.cat([part["observation"]] * 2))


def test_memory_is_used_again_when_the_batch_is_dropped():
    memory, places = BatchMemory(), set()
    for value in range(10):
        made = memory.concatenated([batch(value)])
        places.add(frames_of(made))
        del made
    assert len(places) <= KEPT


@pytest.mark.parametrize(
    "part",
    [
        lambda made: made["observation"],
        lambda made: made["observation"][2, 1:3],
        lambda made: made["observation"].numpy(),
        lambda made: made["observation"].view(torch.int8).permute(2, 0, 1),
        lambda made: made[0],
        lambda made: list(made["observation"].unbind(0)),
        lambda made: memoryview(made["observation"].numpy()),
    ],
)
def test_what_is_kept_of_a_batch_stays_as_it_is(part):
    memory = BatchMemory()
    made = memory.concatenated([batch(7)])
    kept, place = part(made), frames_of(made)
    del made
    gc.collect()
    later = [memory.concatenated([batch(value)]) for value in range(8, 12)]
    assert place not in map(frames_of, later)
    del kept
    gc.collect()
    made = memory.concatenated([batch(12)])
    assert place in (frames_of(made), frames_of(made["next"]))


def test_a_graph_that_needs_a_batch_keeps_it():
    memory, weight = BatchMemory(), torch.ones((), requires_grad=True)
    made = memory.concatenated([batch(7)])
    loss = (made["observation"].float() * weight).sum()
    expected = float(made["observation"].float().sum())
    del made
    memory.concatenated([batch(9)])
    loss.backward()
    assert weight.grad.item() == expected


def test_little_is_kept_after_many_batches_were_held_at_once():
    memory = BatchMemory()
    held = [memory.concatenated([batch(value)]) for value in range(20)]
    assert [int(made["observation"][0, 0, 0]) for made in held] == list(range(20))
    del held
    assert all(len(unused) <= KEPT for unused in memory._unused.values())


def test_nothing_is_kept_after_it_was_cleared():
    memory = BatchMemory()
    held = memory.concatenated([batch(1)])
    memory.clear()
    del held
    gc.collect()
    assert not any(memory._unused.values())


def test_batches_that_differ_in_more_than_rows_are_refused():
    other = batch(1).set("extra", torch.zeros(ROWS, T))
    for parts in ([batch(1), other], [other, batch(1)], [batch(1), batch(1, large=False)]):
        with pytest.raises(RuntimeError, match="different columns"):
            BatchMemory().concatenated(parts)


def test_it_is_pickled_empty():
    memory = BatchMemory()
    memory.concatenated([batch(1)])
    assert pickle.loads(pickle.dumps(memory))._unused == {}
