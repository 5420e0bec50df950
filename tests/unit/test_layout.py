import doctest
import hashlib
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_weightsync.transports import layout as module_under_test
from lightning_weightsync.transports.layout import ALIGNMENT, Leaf, WeightLayout, digest_of

DENSE = {
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
EVERY_DTYPE = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def by_name(dtypes):
    return pytest.mark.parametrize("dtype", sorted(dtypes, key=str), ids=lambda dtype: str(dtype)[len("torch.") :])


def random_bytes(dtype, shape, seed=0):
    """A tensor of this dtype that holds any bits at all, NaNs and subnormals too (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def empty_slot(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def offsets(layout):
    return {leaf.name: leaf.offset for leaf in layout.leaves}


def layout_json(*leaves, aliases=None):
    return {"leaves": list(leaves), "aliases": {} if aliases is None else aliases}


def test_leaves_keep_the_order_of_their_source():
    names = ["z", "a", "m.b", "m.a"]
    layout = WeightLayout.of({name: torch.zeros(1) for name in names})
    assert [leaf.name for leaf in layout.leaves] == names


def test_each_leaf_starts_at_the_next_multiple_of_64_bytes():
    tensors = {
        "one": torch.zeros(1, dtype=torch.uint8),
        "exact": torch.zeros(16),
        "over": torch.zeros(17),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(1, dtype=torch.int64),
    }
    layout = WeightLayout.of(tensors)
    assert ALIGNMENT == 64
    assert offsets(layout) == {"one": 0, "exact": 64, "over": 128, "empty": 256, "scalar": 256}
    assert layout.nbytes == 320


def test_a_layout_without_leaves_has_a_slot_of_no_bytes():
    layout = WeightLayout.of({})
    assert (layout.leaves, layout.nbytes, layout.by_name) == ((), 0, {})
    assert layout.views(empty_slot(0)) == {}
    assert WeightLayout.from_json(layout.to_json()) == layout


@by_name(DENSE)
def test_a_leaf_of_any_dense_dtype_comes_out_of_its_slot_bit_for_bit(dtype):
    tensors = {
        "matrix": random_bytes(dtype, (3, 5), seed=1),
        "scalar": random_bytes(dtype, (), seed=2),
        "empty": random_bytes(dtype, (0, 4)),
        "last": random_bytes(dtype, (7,), seed=3),
    }
    layout = WeightLayout.of(tensors)
    slot = empty_slot(layout.nbytes).fill_(0xA5)
    views = layout.views(slot)
    torch._foreach_copy_(list(views.values()), list(tensors.values()))
    assert list(views) == list(tensors)
    for name, tensor in tensors.items():
        assert (views[name].dtype, views[name].shape) == (dtype, tensor.shape)
        assert bits(views[name]) == bits(tensor)
        assert layout.by_name[name].nbytes == tensor.numel() * dtype.itemsize
    again = layout.views(slot.clone())
    assert {name: bits(view) for name, view in again.items()} == {name: bits(t) for name, t in tensors.items()}


def test_views_share_the_slots_memory():
    layout = WeightLayout.of({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int16)})
    slot = empty_slot(layout.nbytes).zero_()
    views = layout.views(slot)
    views["b"].fill_(-1)
    assert slot.nonzero().flatten().tolist() == [64, 65, 66, 67]
    slot.fill_(0)
    assert views["b"].tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_dtypes_that_cannot_be_moved_byte_for_byte_are_refused_by_name():
    refused = set()
    for dtype in EVERY_DTYPE - DENSE:
        try:
            tensor = torch._empty_affine_quantized((2,), scale=1.0, zero_point=0, dtype=dtype)
        except RuntimeError:
            tensor = torch.empty(2, dtype=dtype)
        try:
            WeightLayout.of({"net.odd": tensor})
        except TypeError as error:
            assert "'net.odd'" in str(error) and str(dtype) in str(error)
            refused.add(dtype)
        else:  # then it has to survive the way through a slot
            view = WeightLayout.of({"net.odd": tensor}).views(empty_slot(64))["net.odd"]
            assert bits(view.copy_(tensor)) == bits(tensor)
    assert {torch.qint8, torch.quint8, torch.qint32, torch.uint1, torch.int7} <= refused


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.empty(2, 2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    ],
    ids=["sparse", "csr", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_a_leaf_without_dense_bytes_is_refused_by_name(make):
    with pytest.raises(TypeError, match=r"'net\.odd'"):
        WeightLayout.of({"fine": torch.zeros(1), "net.odd": make()})


def test_the_layout_of_a_tensor_ignores_how_it_lies_in_memory():
    base = torch.arange(12.0).view(3, 4)
    plain = WeightLayout.of({"w": base.clone()})
    assert WeightLayout.of({"w": base.t().contiguous().t()}) == plain
    assert WeightLayout.of({"w": nn.Parameter(base)}) == plain
    assert WeightLayout.of({"w": torch.zeros(1).expand(3, 4)}) == plain


def test_tied_leaves_are_stored_once_and_named_twice():
    shared = torch.arange(4.0)
    layout = WeightLayout.of({"encoder": shared, "bias": torch.zeros(1), "decoder": shared, "third": shared.view(4)})
    assert [leaf.name for leaf in layout.leaves] == ["encoder", "bias"]
    assert dict(layout.aliases) == {"decoder": "encoder", "third": "encoder"}
    assert layout.by_name["decoder"] is layout.by_name["encoder"]
    assert sorted(layout.by_name) == ["bias", "decoder", "encoder", "third"]
    assert layout.nbytes == 128


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.clone(),
        lambda t: t[:3],
        lambda t: t[1:],
        lambda t: t.view(2, 2),
        lambda t: t.view(torch.int32),
        lambda t: t.view(2, 2).t(),
        lambda t: t[::2],
    ],
    ids=["copy", "prefix", "suffix", "reshaped", "retyped", "transposed", "strided"],
)
def test_leaves_that_share_memory_only_in_part_or_read_it_differently_are_stored_apart(other):
    tensor = torch.arange(4.0)
    layout = WeightLayout.of({"a": tensor, "b": other(tensor)})
    assert ([leaf.name for leaf in layout.leaves], dict(layout.aliases)) == (["a", "b"], {})


@pytest.mark.parametrize("lazy", [torch.conj, lambda t: torch.conj(t).imag], ids=["conjugated", "negated"])
def test_a_lazily_negated_view_is_not_taken_for_the_tensor_whose_memory_it_reads(lazy):
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    view = lazy(tensor)
    base = tensor if view.is_complex() else tensor.imag
    assert view.data_ptr() == base.data_ptr()
    layout = WeightLayout.of({"a": base, "b": view})
    assert dict(layout.aliases) == {}
    views = layout.views(empty_slot(layout.nbytes))
    torch._foreach_copy_(list(views.values()), [base, view])
    assert views["b"].tolist() == view.tolist() != base.tolist()


def test_empty_leaves_are_never_aliases_although_their_addresses_are_equal():
    assert dict(WeightLayout.of({"a": torch.empty(0), "b": torch.empty(0)}).aliases) == {}


def test_data_have_no_aliases():
    shared = torch.arange(4.0)
    layout = WeightLayout.of({"a": shared, "b": shared}, find_aliases=False)
    assert (offsets(layout), dict(layout.aliases)) == ({"a": 0, "b": 64}, {})


def test_a_leaf_describes_its_dtype_and_shape():
    described = [leaf.describe() for leaf in WeightLayout.of({"a": torch.zeros(2, 3), "b": torch.tensor(True)}).leaves]
    assert described == ["float32[2, 3]", "bool[]"]


@by_name(DENSE)
def test_a_layout_survives_json(dtype):
    shared = random_bytes(dtype, (2, 3))
    layout = WeightLayout.of({"a": shared, "größe.0": random_bytes(dtype, ()), "b": shared, "e": shared[:0]})
    again = WeightLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert (again.nbytes, offsets(again)) == (layout.nbytes, offsets(layout))


NAMES = st.text(min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(sorted(DENSE, key=str))), max_size=6))
def test_leaves_never_overlap_and_any_layout_survives_json(described):
    layout = WeightLayout.of({n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in described.items()})
    end = 0
    for leaf in layout.leaves:
        assert leaf.offset >= end and leaf.offset % 64 == 0
        assert leaf.offset - end < 64
        end = leaf.offset + leaf.nbytes
    assert end <= layout.nbytes < end + 64
    assert WeightLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "leaves",
        [],
        {},
        {"leaves": []},
        {"aliases": {}},
        {"leaves": None, "aliases": {}},
        {"leaves": 3, "aliases": {}},
        {"leaves": "abc", "aliases": {}},
        {"leaves": {}, "aliases": []},
        layout_json(aliases=[["a", "b"]]),
        layout_json(aliases="ab"),
        layout_json(3),
        layout_json("abc"),
        layout_json(["a", [1]]),
        layout_json(["a", [1], "float32", 0]),
        layout_json([None, [1], "float32"]),
        layout_json([3, [1], "float32"]),
        layout_json(["a", None, "float32"]),
        layout_json(["a", 3, "float32"]),
        layout_json(["a", "23", "float32"]),
        layout_json(["a", {"2": 3}, "float32"]),
        layout_json(["a", [-1], "float32"]),
        layout_json(["a", [2, -3, -1], "float32"]),
        layout_json(["a", [1.5], "float32"]),
        layout_json(["a", [2.0], "float32"]),
        layout_json(["a", [True], "float32"]),
        layout_json(["a", ["2"], "float32"]),
        layout_json(["a", [[2]], "float32"]),
        layout_json(["a", [None], "float32"]),
        layout_json(["a", [math.inf], "float32"]),
        layout_json(["a", [math.nan], "float32"]),
        layout_json(["a", [1], "float33"]),
        layout_json(["a", [1], "torch.float32"]),
        layout_json(["a", [1], "Tensor"]),
        layout_json(["a", [1], "qint8"]),
        layout_json(["a", [1], "uint1"]),
        layout_json(["a", [1], None]),
        layout_json(["a", [1], []]),
        layout_json(["a", [1], "float32"], ["a", [1], "float32"]),
        layout_json(["a", [1], "float32"], aliases={"b": "c"}),
        layout_json(["a", [1], "float32"], aliases={"b": None}),
        layout_json(["a", [1], "float32"], aliases={"b": "a", "c": "b"}),
        layout_json(["a", [1], "float32"], aliases={"a": "a"}),
        layout_json(["a", [1], "float32"], ["b", [1], "float32"], aliases={"b": "a"}),
    ],
    ids=repr,
)
def test_anything_else_than_a_layout_is_a_value_error(data):
    with pytest.raises(ValueError):
        WeightLayout.from_json(data)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["a", "float32", "leaves"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["leaves", "aliases", "a"]), inner),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(JUNK | st.fixed_dictionaries({"leaves": st.lists(JUNK, max_size=3), "aliases": JUNK}))
def test_junk_is_refused_with_a_value_error_or_means_exactly_what_it_says(data):
    try:
        layout = WeightLayout.from_json(data)
    except ValueError:
        return
    assert json.dumps(layout.to_json()) == json.dumps({"leaves": data["leaves"], "aliases": data["aliases"]})


def test_offsets_in_json_are_not_believed():
    layout = WeightLayout.from_json(layout_json(["a", [17], "float32"], ["b", [], "int64"]))
    assert layout.leaves == (Leaf("a", (17,), "float32", 0), Leaf("b", (), "int64", 128))


def test_layouts_are_equal_only_where_names_shapes_dtypes_order_and_aliases_are():
    a, b = torch.zeros(2, 3), torch.zeros(4)
    layouts = [
        WeightLayout.of(tensors)
        for tensors in (
            {"a": a, "b": b},
            {"b": b, "a": a},
            {"a": a, "c": b},
            {"a": a.view(3, 2), "b": b},
            {"a": a.view(6), "b": b},
            {"a": a.int(), "b": b},
            {"a": a},
            {"a": a, "b": b, "c": b},
            {"a": a, "b": b, "c": a},
            {"a": a, "b": b, "c": b.clone()},
            {},
        )
    ]
    for number, layout in enumerate(layouts):
        assert [layout == other for other in layouts] == [other == number for other in range(len(layouts))]
    assert WeightLayout.of({"a": a.clone().t().contiguous().t(), "b": b + 1}) == layouts[0]


def test_that_they_are_does_not_depend_on_the_order_in_which_aliases_are_listed():
    leaf = ["a", [1], "float32"]
    one = WeightLayout.from_json(layout_json(leaf, aliases={"b": "a", "c": "a"}))
    other = WeightLayout.from_json(layout_json(leaf, aliases={"c": "a", "b": "a"}))
    assert one == other


def test_the_digest_is_the_sha256_of_the_leaves_bytes_in_order():
    a, b = torch.tensor([1, 258], dtype=torch.int16), torch.tensor(True)
    assert digest_of([a, torch.empty(0), b]) == hashlib.sha256(b"\x01\x00\x02\x01\x01").hexdigest()
    assert digest_of([b, a]) == hashlib.sha256(b"\x01\x01\x00\x02\x01").hexdigest()
    assert digest_of([]) == hashlib.sha256(b"").hexdigest()


@by_name(DENSE)
def test_the_digest_reads_values_of_any_dtype_in_logical_order(dtype):
    tensor = random_bytes(dtype, (3, 4))
    lying = tensor.t().contiguous().t()
    assert digest_of([lying]) == digest_of([tensor]) == hashlib.sha256(bytes(bits(tensor))).hexdigest()
    assert digest_of([tensor[:2]]) != digest_of([tensor])


def test_the_digest_of_a_parameter_does_not_touch_it():
    parameter = nn.Parameter(torch.ones(2))
    version = parameter._version
    assert digest_of([parameter]) == digest_of([torch.ones(2)])
    assert (parameter._version, parameter.requires_grad, parameter.grad) == (version, True, None)


def test_the_digest_of_a_lazily_conjugated_tensor_is_that_of_its_values():
    tensor = torch.tensor([1 + 2j])
    assert digest_of([tensor.conj()]) == digest_of([torch.tensor([1 - 2j])])


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(module_under_test)
    assert (results.attempted > 0, results.failed) == (True, 0)
