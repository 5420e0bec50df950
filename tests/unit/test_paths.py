import doctest
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_weightsync import paths
from lightning_weightsync.paths import (
    Attribute,
    Index,
    Key,
    PathError,
    format_path,
    parse_path,
    read_map,
    resolve,
    resolve_first,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.nets = nn.ModuleDict({"q": nn.Linear(1, 1), "pi": nn.Linear(1, 1)})
        self.gains = nn.ParameterDict({"low": nn.Parameter(torch.zeros(1))})
        self.chain = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        self.table = {"a": self.chain, 3: self.nets}
        self.empty = nn.ModuleList()
        self._hidden = nn.Linear(1, 1)

    @property
    def first_actor(self):
        return self.blocks[0].actor

    @property
    def broken(self):
        return self.blocks[0].akctor

    @property
    def not_ready(self):
        raise RuntimeError("call setup() first")


@pytest.fixture
def root():
    return SimpleNamespace(net=Net(), value=torch.tensor(1.0))


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("actor", (Attribute("actor"),)),
        ("loss_module.nets[0]['q']", (Attribute("loss_module"), Attribute("nets"), Index(0), Key("q"))),
        ('nets["a.b"].x', (Attribute("nets"), Key("a.b"), Attribute("x"))),
        ("nets.0.q", (Attribute("nets"), Index(0), Attribute("q"))),
        ("nets.0[1]", (Attribute("nets"), Index(0), Index(1))),
        ("0.weight", (Index(0), Attribute("weight"))),
        ("[-1]", (Index(-1),)),
        ("_private.größe", (Attribute("_private"), Attribute("größe"))),
        ("nets['it\"s']", (Attribute("nets"), Key('it"s'))),
        ("nets[ 1 ]", (Attribute("nets"), Index(1))),
    ],
)
def test_a_path_is_read_into_its_parts(text, segments):
    assert parse_path(text) == segments


@pytest.mark.parametrize("text", ["nets[0]['q']", "a.b[-1].c", "['it\"s']", '["it\'s"].x', "[0].weight"])
def test_formatting_a_parsed_path_gives_it_back(text):
    assert format_path(parse_path(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", ".a", "a..b", "a.[0]", "a[0]b", "a[", "a[]", "a[x]", "a['x]", "a[1:2]", "a[1.5]", "a b", "a.-1"]
    + ["a.0b", "f()", "a.b()", "a[0", "a]", "a+b", "a['x'\"]", "a.1e3", " a", "a "],
)
def test_a_malformed_path_is_refused_with_the_text_and_the_grammar(text):
    with pytest.raises(PathError, match=r"malformed.*\[int\]") as caught:
        parse_path(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["__class__", "actor.__init__.__globals__", "a[0].__dict__", "a.__mangled"])
def test_names_that_are_internal_to_python_are_refused(text):
    with pytest.raises(PathError, match="internal to Python"):
        parse_path(text)


def test_a_path_that_is_no_string_is_a_type_error():
    with pytest.raises(TypeError, match=r"got 3 \(int\)"):
        parse_path(3)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("net.blocks[0].actor", lambda net: net.blocks[0].actor),
        ("net.blocks.0.actor", lambda net: net.blocks[0].actor),
        ("net.blocks[-1]", lambda net: net.blocks[1]),
        ("net.nets['q']", lambda net: net.nets["q"]),
        ("net.nets.pi", lambda net: net.nets["pi"]),
        ("net.gains['low']", lambda net: net.gains["low"]),
        ("net.chain[-1]", lambda net: net.chain[1]),
        ("net.chain.0.weight", lambda net: net.chain[0].weight),
        ("net.table['a'][0]", lambda net: net.chain[0]),
        ("net.table[3]['q']", lambda net: net.nets["q"]),
        ("net.first_actor", lambda net: net.blocks[0].actor),
        ("net._hidden", lambda net: net._hidden),
    ],
)
def test_a_path_names_the_object_itself(root, path, expected):
    assert resolve(root, path) is expected(root.net)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("net.bloks", ["'net.bloks'", "fails at 'bloks' on 'net' (Net)", "did you mean 'blocks'?"]),
        ("net.blocks[9]", ["fails at '[9]' on 'net.blocks' (ModuleList)", "length is 2", "-2 to 1"]),
        ("net.blocks.-1x", ["malformed"]),
        ("net.blocks[-3]", ["index -3", "length is 2"]),
        ("net.empty[0]", ["length is 0", "it is empty"]),
        ("net.blocks[0].aktor", ["'net.blocks[0]' (Block)", "did you mean 'actor'?"]),
        ("net.blocks[0].zzz", ["there is 'actor', 'scale'"]),
        ("net.nets['qq']", ["no key 'qq'", "did you mean 'q'?"]),
        ("net.nets[0]", ["no key 0", "'q', 'pi'"]),
        ("net.gains['hi']", ["(ParameterDict)", "'low'"]),
        ("net.table['b']", ["no key 'b'", "'a', '3'"]),
        ("net.table.a", ["no attribute 'a'", "write ['a']"]),
        ("net['blocks']", ["no string keys", "did you mean 'blocks'?"]),
        ("net.blocks['0']", ["no string keys"]),
        ("net[0]", ["cannot be indexed", "'blocks'"]),
        ("value[0]", ["cannot be indexed"]),
        ("nett", ["on the root (SimpleNamespace)", "did you mean 'net'?"]),
    ],
)
def test_a_missing_part_is_told_with_its_place_and_what_exists_there(root, path, told):
    with pytest.raises(PathError) as caught:
        resolve(root, path)
    for text in told:
        assert text in str(caught.value)


def test_an_attribute_error_inside_a_property_is_not_reported_as_a_missing_attribute(root):
    with pytest.raises(PathError, match=r"'broken' raised AttributeError: .*akctor") as caught:
        resolve(root, "net.broken")
    assert "no attribute 'broken'" not in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_any_error_of_a_property_is_the_cause(root):
    with pytest.raises(PathError, match=r"raised RuntimeError: call setup\(\) first") as caught:
        resolve(root, "net.not_ready")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_first_root_that_has_the_path_wins():
    module, trainer = SimpleNamespace(actor=1), SimpleNamespace(actor=2, extra=SimpleNamespace(net=3))
    roots = [("LightningModule", module), ("Trainer", trainer)]
    assert resolve_first(roots, "actor") == 1
    assert resolve_first(roots, "extra.net") == 3


def test_a_path_that_no_root_has_is_told_for_each_root():
    roots = [("LightningModule", SimpleNamespace(actor=1)), ("Trainer", SimpleNamespace(callbacks=[]))]
    with pytest.raises(PathError) as caught:
        resolve_first(roots, "aktor")
    assert "on the LightningModule (SimpleNamespace): no attribute 'aktor'; did you mean 'actor'?" in str(caught.value)
    assert "on the Trainer" in str(caught.value)


def test_only_the_root_on_which_the_path_came_furthest_is_told(root):
    with pytest.raises(PathError) as caught:
        resolve_first([("LightningModule", root), ("Trainer", SimpleNamespace())], "net.bloks")
    assert "did you mean 'blocks'" in str(caught.value)
    assert "Trainer" not in str(caught.value)


def test_a_property_that_raises_is_not_hidden_by_the_next_root():
    roots = [("LightningModule", Net()), ("Trainer", SimpleNamespace(not_ready=1))]
    with pytest.raises(PathError, match="call setup"):
        resolve_first(roots, "not_ready")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": "net.blocks[0]"}, {"policy": "net.blocks[0]"}),
        (["policy=net.blocks[0]"], {"policy": "net.blocks[0]"}),
        (
            ["replay_buffer.transforms[0] = norm", "policy=actor"],
            {"replay_buffer.transforms[0]": "norm", "policy": "actor"},
        ),
        (["nets['a=b']=nets['c=d']"], {"nets['a=b']": "nets['c=d']"}),
        (["""nets["it's"]=critic"""], {"""nets["it's"]""": "critic"}),
        ([" t.0 = b", "t[1]=c", "0=d"], {"t.0": "b", "t[1]": "c", "0": "d"}),
        ([], {}),
    ],
)
def test_a_map_is_read_from_a_mapping_or_from_lines(given, expected):
    assert read_map(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("policy=actor", TypeError, "got the string 'policy=actor'"),
        (["policy"], PathError, "'policy' is no line of a map"),
        (["nets['a=b']"], PathError, "is no line of a map"),
        (["policy=actor", "policy=critic"], PathError, "'policy' is given twice: 'actor' and 'critic'"),
        (["policy=actor["], PathError, "malformed"),
        (["policy="], PathError, "malformed"),
        ([("policy", "actor")], TypeError, r"got \('policy', 'actor'\) \(tuple\)"),
        ({"policy": None}, TypeError, "the source of 'policy': .*got None"),
        ({3: "actor"}, TypeError, r"a destination: .*got 3 \(int\)"),
        ({"polcy[": "actor"}, PathError, r"a destination: path 'polcy\[' is malformed"),
        (["t[0]=a", "t.0=b"], PathError, "'t.0' is given twice: 'a' and 'b'"),
        ({"t[0]": "a", "t.0": "b"}, PathError, "'t.0' is given twice: 'a' and 'b'"),
        (["nets[=actor"], PathError, r"where a = is expected, there is '\[=actor': write"),
        (["=actor"], PathError, "a destination: path '' is malformed"),
        (3, TypeError, "got the int 3"),
    ],
)
def test_a_map_that_cannot_be_read_says_why(given, error, text):
    with pytest.raises(error, match=text):
        read_map(given)


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(paths).failed == 0
