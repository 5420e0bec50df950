"""How does a message become bytes, and bytes a message? JSON of a fixed schema, each text written and read once.

The messages of a push are the same from push to push, but for its version. Its ``number`` travels beside the JSON, in
the first eight bytes of the blob, and what has been written or read before is not written or read again: a process that
was asleep pays for every step (docs/performance.md).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Schema = Mapping[str, Mapping[str, type | tuple[type, ...]]]

NUMBERS: Mapping[str, str] = MappingProxyType({"push": "version", "applied": "version"})
"""The field of a kind of message that changes each time: an int of 64 bits."""

_NUMBER = struct.Struct("!q")
_SHORT = 1024
_MOST = 256


class Codec:
    """Writes and reads the messages of one schema.

    Args:
        schema: Field names and types for each kind of message.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._written: dict[tuple[str, str], bytes] = {}
        self._read: dict[bytes, tuple[str, Mapping[str, Any]]] = {}

    def write(self, kind: str, fields: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """The JSON of a message, and what goes in front of its blob.

        Raises:
            ValueError: It is not one of the schema.
        """
        number, name = b"", NUMBERS.get(kind)
        if name is not None and type(value := fields.get(name)) is int:
            try:
                number = _NUMBER.pack(value)
            except struct.error:
                raise ValueError(f"message {kind!r}: field {name!r} is {value}, which is no int of 64 bits") from None
            fields = {**fields, name: 0}
        key = kind, repr(fields)  # not the fields: 1, 1.0 and True are equal, and different JSON
        body = self._written.get(key)
        if body is None:
            self._check(kind, fields)
            body = json.dumps({"kind": kind, **fields}).encode()
            if len(body) < _SHORT:
                _remember(self._written, key, body)
        return body, number

    def read(self, body: bytes, blob: bytes) -> tuple[str, Mapping[str, Any], bytes]:
        """Kind, checked fields and blob of a message. What is in the fields is not to be changed: others have it too.

        Raises:
            ValueError, KeyError, AttributeError, TypeError, RecursionError: It is not one of the schema.
        """
        known = self._read.get(body)
        if known is None:
            fields = json.loads(body)
            kind = fields.pop("kind")
            self._check(kind, fields)
            known = kind, MappingProxyType(fields)
            if len(body) < _SHORT:
                _remember(self._read, body, known)
        kind, checked = known
        name = NUMBERS.get(kind)
        if name is None:
            return kind, checked, blob
        if len(blob) < _NUMBER.size:
            raise ValueError(f"message {kind!r} came without its {name}")
        return kind, {**checked, name: _NUMBER.unpack_from(blob)[0]}, blob[_NUMBER.size :]

    def _check(self, kind: str, fields: Mapping[str, Any]) -> None:
        expected = self._schema.get(kind)
        if expected is None:
            raise ValueError(f"unknown message {kind!r}")
        if fields.keys() != expected.keys():
            raise ValueError(f"message {kind!r} has the fields {sorted(fields)}, not {sorted(expected)}")
        for name, kind_of in expected.items():
            value = fields[name]
            if not isinstance(value, kind_of) or (isinstance(value, bool) and kind_of is not bool):
                raise ValueError(f"message {kind!r}: field {name!r} is {type(value).__name__}")
            if isinstance(value, float) and math.isnan(value):  # a deadline that is no number never passes
                raise ValueError(f"message {kind!r}: field {name!r} is not a number")


_codecs: dict[int, Codec] = {}


def codec_of(schema: Schema) -> Codec:
    """The one codec of a schema: what one channel has read, no other channel of the process has to read again."""
    codec = _codecs.get(id(schema))
    if codec is None:
        codec = _codecs[id(schema)] = Codec(schema)  # which keeps the schema, so that no other one gets its id
    return codec


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
