"""Decoding records: the strict inverse of `recorder.format.encoding`.

Rules: valid checksums do not prove a correct writer, so anything that `RecordEncoder` would not
write raises `FormatError` and nothing else. Older records are upcast. Blobs are unpacked on
request, within the expansion limit; the caller finds referenced records. Messages shorten values.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Final, NoReturn, TypeAlias

import attrs

from ..format import records as rc
from ..format.blobs import restore, unpack
from ..format.errors import FormatError, RecorderError
from ..format.expansion import Expansion, check_values
from ..format.format import BLOCK_BYTES, RECORD_BYTES_MAX, UNPACKED_BYTES_MAX

Resolve: TypeAlias = Callable[[int], "StoredRecord"]
"""Returns an earlier record whose blob is referenced, or raises `FormatError`."""
Charge: TypeAlias = Callable[[int], None]
"""Charges the length of a blob before it is unpacked, or raises `FormatError`."""

PARTED_KIND: Final = "rx"
"""The kind of record that may name a part of a blob."""
PART_VALUES: Final = 4
"""Its entry in the blob table, `[seq, index, start, length]`."""
_KEYS: Final = frozenset({"at_ns", "blobs", "fields", "kind", "seq", "version"})


@attrs.frozen(kw_only=True)
class StoredRecord:
    """A record whose header is parsed and whose blobs are still packed.

    Attributes:
        record: `fields` as in the header, blobs unresolved.
        version: version of the record's kind that it was written in.
        table: the blob table; see `recorder.format.records`.
        area: the stored blobs.
        starts: offset in `area` of each blob of the table; 0 for a reference.
    """

    record: rc.Record
    version: int
    table: tuple[tuple[int, ...], ...]
    area: memoryview
    starts: tuple[int, ...]

    def blob(self, index: int, charge: Charge) -> bytes:
        """Unpack this record's own blob; `FormatError` if absent, refused or invalid."""
        if not 0 <= index < len(self.table) or len(self.table[index]) != 3:
            raise FormatError(f"record {self.record.seq} does not hold blob {index}")
        codec, length, stored_len = self.table[index]
        charge(length)
        start = self.starts[index]
        return unpack(codec, self.area[start : start + stored_len], length)


@attrs.define
class LastWhole:
    """The blob of which a part was read last; the next record names the next part."""

    _place: tuple[int, int] | None = None
    _data: bytes = b""

    def of(self, place: tuple[int, int], unpack_it: Callable[[], bytes]) -> bytes:
        """Return a blob, unpacked if it is not the last one; a large one is not kept."""
        if self._place == place:
            return self._data
        data = unpack_it()
        if len(data) <= BLOCK_BYTES:
            self._place, self._data = place, data
        return data


def parse(header: bytes, area: memoryview) -> StoredRecord:
    """Parse one framed record; `VersionUnknown` if it is newer, `FormatError` if it is invalid."""
    check_values(header)
    try:
        found = json.loads(header.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a record's header is not JSON: {error}") from error
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise FormatError("a record's header has other keys")
    kind, version = found["kind"], found["version"]
    if not isinstance(kind, str) or not _is_count(version):
        shown = f"{reprlib.repr(kind)} of version {reprlib.repr(version)}"
        raise FormatError(f"record {shown} is invalid")
    rc.check_version(kind, version)
    if not isinstance(found["fields"], dict):
        raise FormatError("a record's fields are not an object")
    try:
        record = rc.Record(
            kind=kind, seq=found["seq"], at_ns=found["at_ns"], fields=found["fields"]
        )
    except RecorderError as error:
        raise FormatError(str(error)) from error
    table = _check_table(found["blobs"])
    if kind != PARTED_KIND and any(len(entry) == PART_VALUES for entry in table):
        raise FormatError(f"{kind} record names a part of a blob")
    starts = _find_blobs(table, area)
    return StoredRecord(record=record, version=version, table=table, area=area, starts=starts)


def decode(
    stored: StoredRecord, resolve: Resolve, expansion: Expansion, last: LastWhole | None = None
) -> rc.Record:
    """Resolve a record's blobs and upcast its fields; `FormatError` if any of them is invalid.

    `last`: kept by a caller that reads many records of a log.
    """
    last = LastWhole() if last is None else last
    unpacker = _Unpacker(stored=stored, resolve=resolve, expansion=expansion, last=last)
    fields = unpacker.unpack_mapping(stored.record.fields, 0)
    fields_now = rc.upcast(stored.record.kind, stored.version, fields)
    return attrs.evolve(stored.record, fields=fields_now)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_table(found: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(found, list):
        raise FormatError("a record's blob table is not a list")
    for entry in found:
        if (
            not isinstance(entry, list)
            or len(entry) not in (2, 3, PART_VALUES)
            or not all(map(_is_count, entry))
        ):
            raise FormatError("a record's blob table has an entry of another shape")
    return tuple(map(tuple, found))


def _find_blobs(table: tuple[tuple[int, ...], ...], area: memoryview) -> tuple[int, ...]:
    starts = []
    at = 0
    for entry in table:
        if len(entry) != 3:
            starts.append(0)
            continue
        starts.append(at)
        at += entry[2]
    if at != len(area):
        raise FormatError("a record's blobs are not as long as its table says")
    return tuple(starts)


@attrs.define(kw_only=True)
class _Unpacker:
    stored: StoredRecord
    resolve: Resolve
    expansion: Expansion
    last: LastWhole
    unpacked_bytes: int = 0
    text_bytes: int = 0

    def unpack_mapping(self, value: Mapping[str, rc.Value], depth: int) -> dict[str, rc.Value]:
        unpacked: dict[str, rc.Value] = {}
        for key, item in value.items():
            if key.startswith(rc.RESERVED) and not key.startswith(rc.RESERVED, 1):
                raise FormatError(f"the key {reprlib.repr(key)} is not ours")
            name = key[1:] if key.startswith(rc.RESERVED) else key
            is_nested = type(item) is dict or type(item) is list  # few are; saves a call
            unpacked[name] = self._unpack(item, depth + 1) if is_nested else item
        return unpacked

    def _unpack(self, value: rc.Value, depth: int) -> rc.Value:
        if not isinstance(value, (dict, list)):
            return value
        if isinstance(value, dict) and len(value) == 1:
            ((key, item),) = value.items()
            if key == rc.BLOB:
                return self._blob(item)
            if key == rc.TEXT:
                return self._text(item)
            if key == rc.WTF8:
                return self._utf8(item)
        if depth > rc.NESTING_MAX:
            raise FormatError(f"fields nest deeper than {rc.NESTING_MAX}")
        if isinstance(value, dict):
            return self.unpack_mapping(value, depth)
        if set(map(type, value)) <= {int}:  # token ids: many, and nothing to unpack
            return value
        return [self._unpack(item, depth + 1) for item in value]

    def _text(self, pieces: object) -> str:
        if not isinstance(pieces, list):
            raise FormatError("a split text is not a list")
        return restore(map(self._piece, pieces))

    def _piece(self, piece: object) -> str | bytes:
        if isinstance(piece, str):
            return piece
        if isinstance(piece, list) and len(piece) == 1:
            return self._utf8(piece[0])
        return self._blob(piece)

    def _utf8(self, index: object) -> str:
        data = self._blob(index)
        self.text_bytes += len(data)
        if self.text_bytes > RECORD_BYTES_MAX:
            own = self.stored.record.seq
            raise FormatError(f"record {own} has text of more than {RECORD_BYTES_MAX} bytes")
        return _to_text(data)

    def _charge(self, length: int) -> None:
        self.unpacked_bytes += length
        if self.unpacked_bytes > UNPACKED_BYTES_MAX:
            own = self.stored.record.seq
            raise FormatError(f"record {own} unpacks to more than {UNPACKED_BYTES_MAX} bytes")
        self.expansion.charge(length)

    def _blob(self, index: object) -> bytes:
        table = self.stored.table
        if type(index) is not int or not 0 <= index < len(table):
            raise FormatError(f"blob {reprlib.repr(index)} is not in the record's table")
        if len(table[index]) == 3:
            return self.stored.blob(index, self._charge)
        seq, other, *part = table[index]
        own = self.stored.record.seq
        if seq > own or (seq == own and other >= index):
            raise FormatError(f"blob {index} of record {own} names a later one")

        def unpack_it() -> bytes:
            holder = self.stored if seq == own else self.resolve(seq)
            if part and holder.record.kind != self.stored.record.kind:
                raise FormatError(f"blob {index} of record {own} is a part of another kind's")
            return holder.blob(other, self._charge)

        if not part:
            return unpack_it()
        start, length = part
        whole = self.last.of((seq, other), unpack_it)
        if start + length > len(whole):
            raise FormatError(f"blob {index} of record {own} is not part of another")
        self._charge(length)
        return whole[start : start + length]


def _to_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(f"a text's blob is not UTF-8: {error}") from error
