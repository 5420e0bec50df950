import json

import pytest

from lightning_weightsync.transports.bodies import Codec, codec_of

SCHEMA = {
    "push": {"run": int, "version": int, "values": dict},
    "note": {"value": (int, str)},
    "beat": {},
}


@pytest.fixture
def codec():
    return Codec(SCHEMA)


def there_and_back(codec, kind, fields, blob=b""):
    body, front = codec.write(kind, fields)
    return codec.read(body, front + blob)


@pytest.mark.parametrize("version", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_version_travels_in_front_of_the_blob(codec, version):
    fields = {"run": 1, "version": version, "values": {}}
    body, front = codec.write("push", fields)
    assert len(front) == 8
    assert json.loads(body)["version"] == 0
    assert codec.read(body, front + b"blob") == ("push", fields, b"blob")


def test_pushes_that_differ_in_their_version_alone_have_one_text(codec):
    first, _ = codec.write("push", {"run": 1, "version": 7, "values": {}})
    second, _ = codec.write("push", {"run": 1, "version": 8, "values": {}})
    assert first is second
    assert there_and_back(codec, "push", {"run": 1, "version": 7, "values": {}})[1]["version"] == 7
    assert there_and_back(codec, "push", {"run": 1, "version": 8, "values": {}})[1]["version"] == 8


def test_a_push_without_its_version_is_refused(codec):
    body, _ = codec.write("push", {"run": 1, "version": 7, "values": {}})
    with pytest.raises(ValueError, match="without its version"):
        codec.read(body, b"1234567")


@pytest.mark.parametrize("version", [2**63, -(2**63) - 1])
def test_a_version_of_more_than_64_bits_is_refused(codec, version):
    with pytest.raises(ValueError, match="64 bits"):
        codec.write("push", {"run": 1, "version": version, "values": {}})


@pytest.mark.parametrize("version", ["1", 1.0, True, None])
def test_a_version_that_is_no_int_is_refused(codec, version):
    with pytest.raises(ValueError, match="version"):
        codec.write("push", {"run": 1, "version": version, "values": {}})


def test_equal_values_of_different_types_stay_what_they_are(codec):
    for value in (1, 1.0, True, "1", 1, True, 1.0):
        _, fields, _ = there_and_back(codec, "push", {"run": 1, "version": 1, "values": {"value": value}})
        assert fields["values"]["value"] == value
        assert type(fields["values"]["value"]) is type(value)


def test_what_was_changed_in_place_is_written_anew(codec):
    values = {"levels": [1]}
    there_and_back(codec, "push", {"run": 1, "version": 1, "values": values})
    values["levels"].append(2)
    _, fields, _ = there_and_back(codec, "push", {"run": 1, "version": 2, "values": values})
    assert fields["values"] == {"levels": [1, 2]}


def test_what_is_remembered_has_an_end(codec):
    for number in range(2000):
        assert there_and_back(codec, "note", {"value": number})[1]["value"] == number
    assert len(codec._written) <= 256
    assert len(codec._read) <= 256
    there_and_back(codec, "note", {"value": "x" * 5000})
    assert max(map(len, codec._read)) < 1024


def test_a_schema_has_one_codec_and_another_schema_another_one():
    other = {"beat": {}}
    assert codec_of(SCHEMA) is codec_of(SCHEMA)
    assert codec_of(other) is not codec_of(SCHEMA)
