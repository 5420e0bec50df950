import copy
import io
import json
import os
import threading

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from lightning_weightsync.collectors.rollouts import LENT_SLOTS, NUM_SLOTS, BatchReader, BatchWriter
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.transports.memory import create_memory_file
from tests.helpers.leaves import assert_same_bits

ENVS, STEPS = 2, 3


@pytest.fixture(params=["memfd", "temporary file"])
def ring(request, monkeypatch):
    """A worker's and its parent's end of one ring, each with a descriptor and a mapping of its own."""
    if request.param == "temporary file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this platform has no memfd_create")
    descriptor = create_memory_file("rollouts")
    inherited = os.dup(descriptor)
    yield BatchWriter(inherited), BatchReader(descriptor)
    os.close(descriptor)
    os.close(inherited)


def batch(seed=0, **extra):
    """What a collector makes: nested keys, several dtypes, and a value of any bits in each."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=torch.float32):
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).view(shape)

    def flip(*shape):
        return torch.randint(0, 2, shape, generator=generator).bool()

    return TensorDict(
        {
            "observation": draw(ENVS, STEPS, 4),
            "action": draw(ENVS, STEPS, dtype=torch.int64),
            "next": {
                "observation": draw(ENVS, STEPS, 4),
                "reward": draw(ENVS, STEPS, 1),
                "done": flip(ENVS, STEPS, 1),
                "stats": {"value": draw(ENVS, STEPS, dtype=torch.bfloat16)},
            },
            "policy_version": torch.full((ENVS, STEPS), 7),
            **extra,
        },
        batch_size=[ENVS, STEPS],
    )


def through(ring, given, slot=0):
    """Write a batch, tell the parent's end the schema as it travels, read the batch."""
    writer, reader = ring
    schema = json.loads(json.dumps(writer.write(slot, given)))
    if schema:
        reader.open(schema)
    return reader.read(slot)


def leaves(td):
    keys = td.keys(include_nested=True, leaves_only=True)
    return {"/".join((key,) if isinstance(key, str) else key): td[key] for key in keys}


def test_a_batch_comes_out_bit_for_bit_with_its_keys_and_batch_size(ring):
    given = batch()
    got = through(ring, given)
    assert list(leaves(got)) == list(leaves(given))
    assert_same_bits(leaves(got), leaves(given))
    assert got.batch_size == given.batch_size == torch.Size([ENVS, STEPS])
    assert got["next", "stats", "value"].dtype is torch.bfloat16


def test_the_schema_travels_with_the_first_batch_only(ring):
    writer, reader = ring
    schema = writer.write(0, batch(1))
    assert schema["batch_size"] == [ENVS, STEPS]
    assert [leaf[0] for leaf in schema["layout"]["leaves"]][:3] == ["observation", "action", "next.observation"]
    reader.open(schema)
    for number in range(2, 6):
        slot = number % NUM_SLOTS
        assert writer.write(slot, batch(number)) == {}
        assert_same_bits(leaves(reader.read(slot)), leaves(batch(number)))


def test_slots_are_apart(ring):
    writer, reader = ring
    reader.open(writer.write(0, batch(0)))
    for slot in range(1, NUM_SLOTS):
        writer.write(slot, batch(slot))
    for slot in range(NUM_SLOTS):
        assert_same_bits(leaves(reader.read(slot)), leaves(batch(slot)))
    writer.write(0, batch(9))
    assert_same_bits(leaves(reader.read(1)), leaves(batch(1)))


def test_the_first_batch_may_be_in_any_slot(ring):
    assert_same_bits(leaves(through(ring, batch(), slot=1)), leaves(batch()))


def test_what_is_read_is_the_shared_memory_itself_until_it_is_copied(ring):
    writer, _ = ring
    got = through(ring, batch(1))
    kept = got.clone()
    writer.write(0, batch(2))
    assert_same_bits(leaves(got), leaves(batch(2)))
    assert_same_bits(leaves(kept), leaves(batch(1)))


# --- slots that are lent ---------------------------------------------------------------------------------------------


def test_a_lent_batch_is_the_slot_and_as_good_as_any_other(ring):
    through(ring, batch(1), slot=1)
    lent = ring[1].lend(1)
    assert_same_bits(leaves(lent), leaves(batch(1)))
    assert list(leaves(lent)) == list(leaves(batch(1))) and lent.batch_size == torch.Size([ENVS, STEPS])
    ring[0].write(1, batch(2))  # what nobody does
    assert_same_bits(leaves(lent), leaves(batch(2)))
    lent["extra"] = lent["observation"].mul_(2)
    ring[0].write(1, batch(3))
    assert_same_bits(leaves(ring[1].read(1)), leaves(batch(3)))
    saved = io.BytesIO()
    torch.save(lent["policy_version"], saved)
    assert len(saved.getvalue()) < 4096 and lent["policy_version"].untyped_storage().nbytes() == 8 * ENVS * STEPS


@pytest.mark.parametrize(
    "part",
    [
        lambda lent: lent,
        lambda lent: lent["next", "done"],
        lambda lent: lent["observation"][1, 1:2],
        lambda lent: lent["next", "stats", "value"].view(torch.int16).numpy(),
        lambda lent: lent[0],
        lambda lent: memoryview(lent["action"].numpy()),
        lambda lent: (lent["next", "reward"] * torch.ones((), requires_grad=True)).sum(),
    ],
    ids=["all", "a column", "a slice", "numpy", "an environment", "a memoryview", "a graph"],
)
def test_a_slot_comes_back_when_nobody_has_any_part_of_its_batch(ring, part):
    through(ring, batch(1))
    reader = ring[1]
    lent = reader.lend(0)
    kept = part(lent)
    del lent
    assert reader.take_back() == [] and reader.free_slot() != 0
    del kept
    assert reader.take_back() == [0]
    assert reader.take_back() == [] and reader.free_slot() == 0


def test_no_more_slots_are_lent_than_can_be_spared(ring):
    reader = ring[1]
    through(ring, batch(1))
    lent = [reader.lend(slot) for slot in range(LENT_SLOTS)]
    assert reader.lend(LENT_SLOTS) is None
    assert reader.free_slot() == LENT_SLOTS
    lent.pop(0)
    assert reader.free_slot() == 0
    assert reader.lend(LENT_SLOTS) is not None


def test_batches_may_be_dropped_by_any_thread(ring):
    reader = ring[1]
    through(ring, batch(1))
    for _ in range(200):
        lent = [reader.lend(0), reader.lend(1)]
        threads = [threading.Thread(target=lent.pop) for _ in lent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(reader.take_back()) == [0, 1]


def test_a_lent_batch_outlives_the_ring(ring):
    through(ring, batch(1))
    lent = ring[1].lend(0)
    ring[1].close()
    assert_same_bits(leaves(lent), leaves(batch(1)))
    with pytest.raises(WeightSyncError, match="stopped"):
        ring[1].read(1)


# --- what is written -------------------------------------------------------------------------------------------------


def test_writing_does_not_change_what_was_given_and_does_not_follow_it(ring):
    given = batch(1)
    got = through(ring, given)
    assert_same_bits(leaves(given), leaves(batch(1)))
    given["observation"].zero_()
    assert_same_bits(leaves(got), leaves(batch(1)))


def test_two_keys_of_one_tensor_stay_two_keys(ring):
    """Unlike weights: the next batch may well have two tensors there."""
    given = batch()
    given["next", "observation"] = given["observation"]
    got = through(ring, given)
    assert_same_bits(leaves(got), leaves(given))
    assert got["observation"].data_ptr() != got["next", "observation"].data_ptr()
    assert_same_bits(leaves(through(ring, batch(3))), leaves(batch(3)))


def test_leaves_that_need_gradients_or_lie_strangely_in_memory_are_copied_by_value(ring):
    given = batch(
        logits=torch.randn(ENVS, STEPS, requires_grad=True) * 2,
        strided=torch.arange(6.0).view(STEPS, ENVS).t(),
        expanded=torch.ones(1, 1, 5).expand(ENVS, STEPS, 5),
        conjugated=torch.randn(ENVS, STEPS, dtype=torch.complex64).conj(),
    )
    got = through(ring, given)
    assert not got["logits"].requires_grad
    for name, leaf in leaves(given).items():
        assert torch.equal(leaves(got)[name].nan_to_num(), leaf.nan_to_num())


def test_empty_leaves_and_batches_without_a_batch_size_go_through(ring):
    given = TensorDict({"empty": torch.zeros(0, 3), "scalar": torch.tensor(3)}, batch_size=[])
    got = through(ring, given)
    assert (got["empty"].shape, got["scalar"].item(), got.batch_size) == ((0, 3), 3, torch.Size([]))


def test_a_lazily_stacked_batch_goes_through(ring):
    given = LazyStackedTensorDict(*(batch(n)[0] for n in range(ENVS)), stack_dim=0)
    assert_same_bits(leaves(through(ring, given)), leaves(given.contiguous()))


def test_the_order_of_keys_does_not_matter(ring):
    through(ring, batch(1))
    given = batch(2)
    turned = TensorDict(dict(reversed(list(given.items()))), given.batch_size)
    assert list(turned.keys()) != list(given.keys())
    assert_same_bits(leaves(through(ring, turned)), leaves(batch(2)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: b[:, :2], r"batch size \[2, 3\] in the first batch, \[2, 2\] now.*action: int64\[2, 3\]"),
        (lambda b: b.flatten(), r"batch size \[2, 3\] in the first batch, \[6\] now"),
        (
            lambda b: b.set("observation", torch.zeros(ENVS, STEPS, 5)),
            r"observation: float32\[2, 3, 4\] in the first batch, float32\[2, 3, 5\] now",
        ),
        (
            lambda b: b.set(("next", "reward"), torch.zeros(ENVS, STEPS, 1).double()),
            r"next\.reward: float32\[2, 3, 1\] in the first batch, float64\[2, 3, 1\] now",
        ),
        (lambda b: b.exclude(("next", "done")), r"next\.done: bool\[2, 3, 1\] in the first batch, absent now"),
        (lambda b: b.set("mask", b["next", "done"]), r"mask: absent in the first batch, bool\[2, 3, 1\] now"),
        (lambda b: b.set("batch_size", torch.zeros(ENVS, STEPS)), "batch_size: absent in the first batch"),
    ],
    ids=["shorter", "flattened", "wider", "dtype", "key gone", "new key", "a key of that name"],
)
def test_a_second_batch_of_another_form_raises_and_says_what_differs(ring, change, told):
    writer, reader = ring
    reader.open(writer.write(0, batch(1)))
    writer.write(1, batch(2))
    with pytest.raises(ValueError, match=told) as caught:
        writer.write(1, change(batch(3)))
    assert "has the shape of its first one" in str(caught.value)
    assert "policy_version" not in str(caught.value) or "2, 2" in str(caught.value) or "[6]" in str(caught.value)
    assert_same_bits(leaves(reader.read(0)), leaves(batch(1)))
    assert_same_bits(leaves(reader.read(1)), leaves(batch(2)))
    assert writer.write(0, batch(4)) == {}  # and the next good one goes through
    assert_same_bits(leaves(reader.read(0)), leaves(batch(4)))


def test_a_batch_that_only_loses_its_batch_size_is_told(ring):
    through(ring, batch(1))
    given = batch(2)
    given.batch_size = [ENVS]
    with pytest.raises(ValueError, match=r"batch size \[2, 3\] in the first batch, \[2\] now$"):
        ring[0].write(0, given)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", "hello"),
        (("next", "info"), NonTensorData({"a": 1})),
        ("names", NonTensorStack.from_list([["a"] * STEPS] * ENVS)),
    ],
    ids=["text", "nested", "list"],
)
def test_a_leaf_that_is_no_tensor_is_named_and_not_dropped(ring, path, value):
    given = batch()
    given[path] = value
    writer, _ = ring
    name = path if isinstance(path, str) else ".".join(path)
    with pytest.raises(TypeError, match=f"'{name}' is "):
        writer.write(0, given)
    assert writer.write(0, batch()) != {}  # it was not taken for the first batch


@pytest.mark.parametrize("make", [lambda: torch.eye(ENVS, STEPS).to_sparse()], ids=["sparse"])
def test_a_leaf_without_dense_bytes_is_named(ring, make):
    with pytest.raises(TypeError, match="'odd' cannot be laid out"):
        ring[0].write(0, batch(odd=make()))


@pytest.mark.parametrize("key", ["a.b", ".", ("next", "x.y"), ("a.b", "c")], ids=str)
def test_a_key_with_a_dot_is_refused(ring, key):
    given = batch()
    given[key] = torch.zeros(ENVS, STEPS)
    with pytest.raises(ValueError, match=r"keys have no dots"):
        ring[0].write(0, given)


def test_a_schema_that_is_none_is_a_value_error_at_the_reader(ring):
    writer, reader = ring
    schema = writer.write(0, batch())
    broken = copy.deepcopy(schema)
    broken["layout"]["leaves"][0][2] = "float33"
    with pytest.raises(ValueError, match="not a layout"):
        reader.open(broken)
    reader.open(schema)
    assert_same_bits(leaves(reader.read(0)), leaves(batch()))
