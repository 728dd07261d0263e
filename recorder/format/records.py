"""Records: the entries of a log, and their encoding as a JSON header and blobs.

    Record := header_len:u32 blob_len:u32 header:JSON blobs
    header := {"at_ns", "blobs", "fields", "kind", "seq", "version"}
    blobs  := table of [codec, length, stored length], or [seq, index] for one stored before, or
              [seq, index, start, length] for a part of one

Rules: fields are JSON values in which any nested value may be `bytes`; decoding gives equal fields
(a tuple becomes a list). An object with one of the keys below is the recorder's; a caller's key
that starts with `$` gets a second one, so the two are never confused:

    {"$blob": i}     bytes: blob i of the table
    {"$text": [...]} split text: a string, i = base64 of blob i, [i] = UTF-8 text in blob i
    {"$wtf8": i}     text with lone surrogates, which JSON in UTF-8 cannot hold

Only `frame` of `rx` and `tx` is split; any long text is a blob, so that headers stay short.

Logs are never rewritten when a kind's version (`RECORD_VERSIONS`) rises: records are upcast on
reading, one version at a time, blobs resolved. Newer versions and unknown kinds are refused. An
added field needs no upcast: it has a default, and is left out while it has it
(`protocol.values.records`). A field that changes its meaning or is removed needs a conversion
in `UPCASTS`. So far all records have version 1.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs

from protocol.values.frames import Utf8Text

from .errors import FormatError, RecordInvalid, VersionUnknown
from .format import MIB

Value: TypeAlias = "bool | int | float | str | bytes | Sequence[Value] | Mapping[str, Value] | None"
"""JSON, with bytes anywhere. `int` of any size; no NaN and no infinities. The `frame` of a record
to be written may also be `Utf8Text`, which is read back as an equal `str`."""
Fields: TypeAlias = Mapping[str, Value]

RECORD_VERSIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("session", "rx", "tx", "event", "effect", "prepare", "unit", "turn"), 1),
    **dict.fromkeys(("chunk", "finalize", "rollback", "state", "mark", "elided", "fin"), 1),
}
"""The kinds of record, and the version of each that this code writes."""

FRAME_KINDS: Final = frozenset({"rx", "tx"})
FRAME_BYTES_MAX: Final = 96 * MIB
"""The largest frame that any endpoint accepts; a larger one was refused, so its start suffices."""
FRAME_CUT: Final = "frame_cut"
"""The field that describes a truncated frame: `{bytes, blake2b, is_text}`."""

NESTING_MAX: Final = 64
"""Deeper values are refused: reading them back must not exhaust the stack."""
TEXT_CHARS_INLINE: Final = 4096
"""Longer text goes into a blob, where JSON's escapes cannot make it six times longer."""
RECORD_OVERHEAD_BYTES: Final = 200
"""Memory of a small record besides its fields, counted in the backlog."""

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""Types that take about eight bytes."""
BLOB: Final = "$blob"
TEXT: Final = "$text"
WTF8: Final = "$wtf8"
RESERVED: Final = "$"


@attrs.frozen(kw_only=True)
class Record:
    """One entry of a log; `fields` must not change afterwards.

    `kind`: a key of `RECORD_VERSIONS`. `seq`: 0, 1, 2... in the log, without gaps; 0 is the
    `session` record. `at_ns`: monotonic nanoseconds.
    """

    kind: str
    seq: int
    at_ns: int
    fields: Fields

    def __attrs_post_init__(self) -> None:
        if self.kind not in RECORD_VERSIONS:
            raise RecordInvalid(f"{self.kind!r} is not a kind of record")
        is_count = type(self.seq) is type(self.at_ns) is int
        if not (is_count and 0 <= self.seq < 1 << 63 and 0 <= self.at_ns < 1 << 63):
            shown = f"{reprlib.repr(self.seq)} and at_ns {reprlib.repr(self.at_ns)}"
            raise RecordInvalid(f"seq {shown} are not counts of up to 63 bits")


def size_bytes(value: Value) -> int:
    """Estimate the memory of a value in bytes, without iterating over lists of numbers."""
    size, left = 0, list[Any]((value,))
    for each in left:
        kind = type(each)
        if kind in _NUMBERS:
            size += 8
        elif isinstance(each, (str, bytes, Utf8Text)):
            size += len(each)
        elif kind is dict or isinstance(each, Mapping):  # checking only the ABC is slow
            size += sum(map(len, each))
            left += each.values()
        elif not isinstance(each, (list, tuple, Sequence)):
            size += 8
        elif each and isinstance(each[0], (int, float)):
            size += 8 * len(each)
        else:
            left += each
    return size


# -- older versions --------------------------------------------------------------------------------


Upcast: TypeAlias = Callable[[Fields], Fields]
"""Converts fields to the next version; may raise `FormatError`."""

UPCASTS: Final[Mapping[str, Mapping[int, Upcast]]] = {}
"""The conversion to the next version, by kind and version."""


def check_version(kind: str, version: int) -> None:
    """Check that records of a kind and version can be read.

    `VersionUnknown`: a newer version wrote it; `FormatError`: there was never such a version.
    """
    newest = RECORD_VERSIONS.get(kind)
    if newest is None:
        raise VersionUnknown(f"a record of kind {reprlib.repr(kind)} is not known to this reader")
    if version > newest:
        raise VersionUnknown(
            f"{kind} record of version {version}: this reader knows versions 1 to {newest}"
        )
    if version < 1:
        raise FormatError(f"{kind} record of version {version}: the first version is 1")


def upcast(kind: str, version: int, fields: Fields) -> Fields:
    """Upcast a record's fields, blobs resolved; `FormatError` if invalid for that version."""
    for old in range(version, RECORD_VERSIONS[kind]):
        fields = UPCASTS[kind][old](fields)
    return fields
