"""Records that stand for themselves, written and read in C: the messages of every unit.

The bytes are those of `recorder.format.encoding`, whose own code does the same value by value. What
is unusual (long or broken text, numbers that JSON does not hold, a reference to another record) is
left to that code: both functions return None.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, Final

import orjson

from recorder.format.blobs import RAW
from recorder.format.format import MIB, Piece, frame_record
from recorder.format.records import BLOB, NESTING_MAX, RECORD_VERSIONS, RESERVED, Fields, Value

HEADER_BYTES_MAX: Final = 64 << 10
"""Of a unit's record, whose longest part is its token ids."""
RECORD_BYTES_MAX: Final = 16 * MIB
"""A unit with its pictures."""
INT_MAX: Final = float(1 << 63)
"""A larger int is read as a float here."""

_FRAMING: Final = struct.Struct("<II")
_KEYS: Final = frozenset({"at_ns", "blobs", "fields", "kind", "seq", "version"})


class _Unusual(Exception):  # noqa: N818 - names say what happened
    """The value is for the recorder's own code."""


def write_record(kind: str, fields: Fields) -> list[Piece] | None:
    """Encode a record with `seq` 0, in parts; no key may start with `$`."""
    blobs: list[bytes] = []

    def blob(value: object) -> dict[str, int]:
        if type(value) is not bytes:
            raise TypeError
        blobs.append(value)
        return {BLOB: len(blobs) - 1}

    if not _is_finite(fields):
        return None
    try:
        body = orjson.dumps(fields, default=blob)
    except orjson.JSONEncodeError:
        return None
    header = orjson.dumps(
        {
            "at_ns": 0,
            "blobs": [(RAW, len(each), len(each)) for each in blobs],
            "fields": orjson.Fragment(body),
            "kind": kind,
            "seq": 0,
            "version": RECORD_VERSIONS[kind],
        }
    )
    blob_bytes = sum(map(len, blobs))
    if len(header) > HEADER_BYTES_MAX or blob_bytes > RECORD_BYTES_MAX:
        return None
    return [frame_record(header, blob_bytes), *blobs]


def _is_finite(fields: Mapping[str, Value]) -> bool:
    """Whether JSON holds all floats; none is in a list."""
    for item in fields.values():
        kind = type(item)
        if kind is float and not math.isfinite(item):  # type: ignore[arg-type]
            return False
        if kind is dict and not _is_finite(item):  # type: ignore[arg-type]
            return False
    return True


def read_record(record: memoryview) -> Fields | None:
    """Decode the fields of one record with `seq` 0, which are checked as any of a peer."""
    if len(record) < _FRAMING.size:
        return None
    header_bytes, blob_bytes = _FRAMING.unpack_from(record)
    start = _FRAMING.size + header_bytes
    if header_bytes > HEADER_BYTES_MAX or start + blob_bytes != len(record):
        return None
    try:
        header = orjson.loads(record[_FRAMING.size : start])
        if type(header) is not dict or header.keys() != _KEYS or type(header["fields"]) is not dict:
            return None
        kind = header["kind"]
        if type(kind) is not str or kind not in RECORD_VERSIONS:
            return None
        numbers = [header["seq"], header["at_ns"], header["version"]]
        if numbers != [0, 0, RECORD_VERSIONS[kind]] or set(map(type, numbers)) != {int}:
            return None
        blobs = _blobs(header["blobs"], record[start:])
        fields: Fields = _filled(header["fields"], blobs, 0)
    except (orjson.JSONDecodeError, _Unusual):
        return None
    return fields


def _blobs(table: object, area: memoryview) -> list[bytes]:
    """Cut the blobs, which must fill the area."""
    if type(table) is not list:
        raise _Unusual
    blobs, at = [], 0
    for entry in table:
        if type(entry) is not list or len(entry) != 3 or set(map(type, entry)) != {int}:
            raise _Unusual
        codec, length, stored_length = entry
        if length < 0 or (codec, stored_length) != (RAW, length):
            raise _Unusual
        blobs.append(bytes(area[at : at + length]))
        at += length
    if at != len(area):
        raise _Unusual
    return blobs


def _filled(value: Any, blobs: list[bytes], depth: int) -> Any:
    """Put the blobs in their places."""
    kind = type(value)
    if kind is dict:
        if depth > NESTING_MAX:
            raise _Unusual
        if BLOB in value:
            return _blob(value, blobs)
        for key, item in value.items():
            if key.startswith(RESERVED):
                raise _Unusual
            if type(item) not in _PLAIN:
                value[key] = _filled(item, blobs, depth + 1)
    elif kind is list:
        if depth > NESTING_MAX:
            raise _Unusual
        if not set(map(type, value)) <= {int}:
            return [_filled(item, blobs, depth + 1) for item in value]
    elif kind is float and abs(value) >= INT_MAX:
        raise _Unusual
    return value


_PLAIN: Final = frozenset({int, str, bool, type(None)})


def _blob(value: dict[str, Any], blobs: list[bytes]) -> bytes:
    index = value[BLOB]
    if len(value) != 1 or type(index) is not int or not 0 <= index < len(blobs):
        raise _Unusual
    return blobs[index]
