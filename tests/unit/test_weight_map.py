"""Which source goes where, by which scheme: both forms of the map, and nothing left over."""

import pytest

from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.commands.weight_map import as_mapping, scheme_nodes


def test_both_forms_mean_the_same():
    mapping = {"policy": "actor", "replay_buffer.transforms[0]": "nets['q']"}
    assert as_mapping(mapping, "map") == mapping
    assert as_mapping(["policy=actor", "replay_buffer.transforms[0] = nets['q']"], "map") == mapping
    assert as_mapping(["t['x=y']=critic", """nets["it's"]=a"""], "map") == {
        "t['x=y']": "critic",
        """nets["it's"]""": "a",
    }
    assert as_mapping(None, "map") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["policy"], "map: 'policy' is no line of a map, .*'destination=source'"),
        ("policy=actor", "map: a map is a mapping, .* or a list .*; got the string 'policy=actor'"),
        (["policy=actor", "policy=critic"], "the destination 'policy' is given twice: 'actor' and 'critic'"),
        (["nets[0]=a", "nets.0=b"], "the destination 'nets.0' is given twice: 'a' and 'b'"),
        (["policy=actor["], r"path 'actor\[' is malformed"),
        (["policy="], "path '' is malformed"),
        (["=actor"], "a destination: path '' is malformed"),
        (3, "map: a map is a mapping, .*; got the int 3"),
        ({"policy": 3}, "the source of 'policy': a path is a string, got 3"),
        ({3: "actor"}, "map: a destination: a path is a string, got 3"),
        ({"policy": "???"}, r"map.policy has no value"),
    ],
)
def test_what_is_no_map(given, message):
    with pytest.raises(ConfigError, match=message):
        as_mapping(given, "map")


def test_an_exact_scheme_goes_before_the_default_one():
    assert scheme_nodes(["policy", "critic"], {"critic": "C"}, "D") == {"policy": "D", "critic": "C"}


def test_what_is_left_over_is_shown_on_both_sides():
    with pytest.raises(ConfigError) as caught:
        scheme_nodes(["policy", "critic"], {"polcy": "P", "critic": "C"}, None)
    text = str(caught.value)
    assert (
        "weight_update_map has the destinations ['critic', 'policy'], weight_sync_schemes ['critic', 'polcy']" in text
    )
    assert "without a scheme: ['policy']" in text
    assert "a scheme without a source: 'polcy'; did you mean 'policy'?" in text


def test_a_scheme_that_nothing_is_mapped_to_is_an_error_though_there_is_a_default():
    with pytest.raises(ConfigError, match="a scheme without a source: 'critic'"):
        scheme_nodes(["policy"], {"critic": "C"}, "D")
