"""Configuration that travels to a worker is what it was in the trainer."""

import pickle
from dataclasses import dataclass
from functools import partial

import pytest
from omegaconf import OmegaConf

from lightning_weightsync.collectors.pickling import dumps


def travel(value):
    return pickle.loads(dumps(value))


@pytest.fixture
def count():
    """A resolver that gives another value each time, as ``now`` does in another process."""
    values = iter(range(100))
    OmegaConf.register_new_resolver("count", lambda: next(values), use_cache=True)
    yield
    OmegaConf.clear_resolver("count")


def test_interpolations_are_resolved_where_they_are_pickled(count):
    config = OmegaConf.create({"x": 3, "env": {"x": "${x}", "at": "${count:}", "sizes": ["${.[1]}", 5], "todo": "???"}})
    here = config.env.at
    there = travel(partial(dict, env=config.env)).keywords["env"]
    OmegaConf.clear_resolver("count")
    assert (there.x, there.at, list(there.sizes)) == (3, here, [5, 5])
    assert OmegaConf.is_missing(there, "todo")
    assert there._get_parent() is None and there.sizes._get_parent() is there
    assert OmegaConf.to_container(config.env)["x"] == "${x}", "the trainer's own was changed"


def test_a_node_that_is_given_twice_is_one_node_and_read_only_ones_stay_so():
    config = OmegaConf.create({"a": {"b": [1, 2]}})
    OmegaConf.set_readonly(config, True)
    one, other, inner = travel([config.a, config.a, config.a.b])
    assert one is other and one.b == inner == [1, 2]
    assert OmegaConf.is_readonly(travel(config))


@dataclass
class Typed:
    size: int = 3
    twice: int = "${.size}"  # type: ignore[assignment]


def test_a_structured_node_keeps_its_type():
    there = travel(OmegaConf.create({"env": OmegaConf.structured(Typed)}).env)
    assert OmegaConf.get_type(there) is Typed and there.twice == 3


def test_what_cannot_be_resolved_is_an_error():
    config = OmegaConf.create({"a": "${nothing}"})
    with pytest.raises(Exception, match="Interpolation key 'nothing' not found"):
        dumps(config)


def test_anything_else_travels_as_before():
    assert travel(lambda: 3)() == 3
