"""Reads a session log: records in order, and any damage; from its start, or from a place in it.

Rules:
- One bad bit costs at most its block, plus records elsewhere that reference its blobs, reported
  separately. The session record comes from the first block or its copy in the second; without
  either the log is unreadable.
- A log can be read while it is written: iteration ends with the last complete block, and a new one
  continues there. Memory is one block, some kept for references, and some bytes per block; time and
  memory are bounded by the file's size (`Expansion`).
- A place (`at`) is found without reading the blocks before it: the seek table holds the start of
  each block; without a valid one, 68 bytes per block are read. Every header used must be valid.
  After a jump, earlier damage, chains and seek tables are not judged.
- Decoding is the strict inverse of `recorder.format.encoding`. Valid checksums do not prove a
  correct writer, so anything that `RecordEncoder` would not write raises `FormatError` and nothing
  else. Older records are upcast. Blobs are unpacked on request, within the expansion limit; the
  caller finds referenced records. Messages shorten values.
"""

from __future__ import annotations

import json
import reprlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NoReturn, Self, TypeAlias

import attrs

from ..format import format as layout
from ..format.encoding import restore, unpack
from ..format.format import (
    BLOCK_BYTES,
    RECORD_BYTES_MAX,
    UNPACKED_BYTES_MAX,
    Expansion,
    Fields,
    FormatError,
    LogDamaged,
    Record,
    RecorderError,
    TooNew,
    Unreadable,
    VersionUnknown,
    check_values,
    header_cost,
)
from ..write.logfile import Chain, LogEnd
from . import scan

# -- decoding --------------------------------------------------------------------------------------


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
        table: the blob table; see `recorder.format.format`.
        area: the stored blobs.
        starts: offset in `area` of each blob of the table; 0 for a reference.
    """

    record: layout.Record
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
class SplitBlobCache:
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
    layout.check_version(kind, version)
    if not isinstance(found["fields"], dict):
        raise FormatError("a record's fields are not an object")
    try:
        record = layout.Record(
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
    stored: StoredRecord, resolve: Resolve, expansion: Expansion, last: SplitBlobCache | None = None
) -> layout.Record:
    """Resolve a record's blobs and upcast its fields; `FormatError` if any of them is invalid.

    `last`: kept by a caller that reads many records of a log.
    """
    last = SplitBlobCache() if last is None else last
    unpacker = _Unpacker(stored=stored, resolve=resolve, expansion=expansion, last=last)
    fields = unpacker.unpack_mapping(stored.record.fields, 0)
    fields_now = layout.upcast(stored.record.kind, stored.version, fields)
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
    last: SplitBlobCache
    unpacked_bytes: int = 0
    text_bytes: int = 0

    def unpack_mapping(
        self, value: Mapping[str, layout.Value], depth: int
    ) -> dict[str, layout.Value]:
        unpacked: dict[str, layout.Value] = {}
        for key, item in value.items():
            if key.startswith(layout.RESERVED) and not key.startswith(layout.RESERVED, 1):
                raise FormatError(f"the key {reprlib.repr(key)} is not ours")
            name = key[1:] if key.startswith(layout.RESERVED) else key
            is_nested = type(item) is dict or type(item) is list  # few are; saves a call
            unpacked[name] = self._unpack(item, depth + 1) if is_nested else item
        return unpacked

    def _unpack(self, value: layout.Value, depth: int) -> layout.Value:
        if not isinstance(value, (dict, list)):
            return value
        if isinstance(value, dict) and len(value) == 1:
            ((key, item),) = value.items()
            if key == layout.BLOB:
                return self._blob(item)
            if key == layout.TEXT:
                return self._text(item)
            if key == layout.WTF8:
                return self._utf8(item)
        if depth > layout.NESTING_MAX:
            raise FormatError(f"fields nest deeper than {layout.NESTING_MAX}")
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


# -- places ----------------------------------------------------------------------------------------


BEYOND: Final = 1 << 63
"""Above any unit index and any record's `seq`."""


@attrs.frozen(kw_only=True)
class Place:
    """A block: the offset of its header in the file, and its first record's `seq`."""

    offset: int
    first_seq: int


def unit_index(record: Record) -> int | None:
    """Return the index of the unit whose result a record holds, or None."""
    result = record.fields.get("result") if record.kind == "unit" else None
    index = result.get("index") if isinstance(result, dict) else None
    return index if type(index) is int and 0 <= index < BEYOND else None


def end_of_blocks(source: scan.Source) -> int:
    """Return where a log's seek table starts, or the log's size if it has none."""
    table = _table_of(source)
    return source.size() if table is None else table[-1]


def find_seq(source: scan.Source, seq: int, offsets: Sequence[int] | None = None) -> Place | None:
    """Find the last block starting at or before `seq`, or None; `offsets`: the known blocks."""
    if offsets is None and (table := _table_of(source)) is not None:
        with suppress(FormatError):  # another log's table, or damage there
            return find_seq(source, seq, table[:-1])
    offsets = array("Q", hop(source)) if offsets is None else offsets
    at = bisect_right(offsets, seq, key=lambda offset: _header(source, offset).first_seq)
    if at == 0:
        return None
    offset = offsets[at - 1]
    return Place(offset=offset, first_seq=_header(source, offset).first_seq)


def next_seq(source: scan.Source) -> int:
    """Return the `seq` that follows the last complete block; 0 if there is no block."""
    place = find_seq(source, BEYOND)
    return 0 if place is None else _header(source, place.offset).next_seq


def _header(source: scan.Source, offset: int) -> layout.BlockHeader:
    return layout.unpack_header(source.read(offset, layout.HEADER_BYTES))


def _table_of(source: scan.Source) -> Sequence[int] | None:
    """Read the block starts, and the last one's end, from a seek table that may be valid."""
    size = source.size()
    length = layout.table_bytes_by_footer(
        source.read(max(0, size - layout.FOOTER_BYTES), layout.FOOTER_BYTES)
    )
    if not 0 < length < size:
        return None
    return layout.offsets_in(source.read(size - length, length), size - length)


def hop(source: scan.Source) -> Iterator[int]:
    """Yield the offsets of blocks with valid headers, in order."""
    at: int | None = 0
    size = source.size()
    while at is not None and at < size:
        try:
            header = _header(source, at)
        except FormatError:
            at = scan.find_mark(source, at + 1)
            continue
        end = at + layout.HEADER_BYTES + header.compressed_len
        if end > size:
            return
        yield at
        at = end


def records_of(block: scan.Block, expansion: Expansion) -> Iterator[Record]:
    """Yield a block's parseable records, blobs unresolved, without the head copy."""
    with suppress(FormatError):
        for parts in block.own_parts():
            with suppress(FormatError):
                expansion.charge(header_cost(parts[0]))
                yield parse(*parts).record


# -- the reader ------------------------------------------------------------------------------------


KEPT_BYTES_MAX: Final = 16 * layout.MIB
"""Cost of the blocks kept for later references, far more than a writer remembers."""

HeadSource = Literal["first", "second"]
OnDamage = Callable[[scan.Damage], object]


def read(path: Path, *, on_damage: OnDamage | None = None) -> Iterator[Record]:
    """Yield the records of a log, the session record first; damage goes to `on_damage`.

    `LogDamaged`: there is damage, and no `on_damage`; `Unreadable`: no session record is left.
    """
    with LogReader(path) as reader:
        for item in reader:
            if isinstance(item, Record):
                yield item
            elif on_damage is not None:
                on_damage(item)
            else:
                raise LogDamaged(f"{path.name} is {item}")


@attrs.frozen
class _Parsed:
    """The records of an accepted block, each with its error if it could not be parsed."""

    records: list[StoredRecord | FormatError]
    head: StoredRecord | FormatError | None
    cost: int


class LogReader:
    """One log, read from its start; a context manager.

    `head` came from block `head_source`; `is_finished`: `fin` was read.
    """

    head: Final[Record]
    head_source: Final[HeadSource]

    def __init__(self, log: Path | bytes | scan.OpenSource) -> None:
        """Open a log, given as a path, its bytes or a source, and find its session record.

        The reader closes the source, also on failure.

        `Unreadable`: no session record is left, or none was written yet; `OSError`: the file cannot
        be read.
        """
        self._source = _source_of(log)
        self._expansion: Final = Expansion(self._source.size)
        self._scanner: Final = scan.Scanner(self._source, self._expansion)
        self._first_seqs: list[int] = []
        self._offsets: list[int] = []
        self._kept: Final[OrderedDict[int, _Parsed]] = OrderedDict()
        self._kept_bytes = 0
        self._last: Final = SplitBlobCache()
        self._hopped: array[int] | None = None  # block starts before the start of reading
        self.is_finished = False
        self._from_seq = 0
        self.blocks = 0
        try:
            self.head, self.head_source = find_head(self._source, self._expansion)
        except BaseException:
            self._source.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Record | scan.Damage]:
        """Continue reading, up to the last complete block."""
        for item in self._scanner:
            if isinstance(item, scan.Damage):
                yield item
            else:
                yield from self._read_block(item)
                if self._kept_bytes > KEPT_BYTES_MAX:
                    self._forget()
            del item  # else it is held while the next one is read

    def watched(self, watch: Callable[[int], object]) -> Iterator[Record | scan.Damage]:
        """Continue reading, and report the bytes read; unread bytes count at the end."""
        blocks, left_bytes = 0, self.tail_bytes
        try:
            for item in self:
                if self.blocks != blocks:
                    blocks, before = self.blocks, left_bytes
                    left_bytes = self.tail_bytes
                    watch(before - left_bytes)
                yield item
        finally:
            watch(left_bytes)

    def at(self, seq: int) -> Iterator[Record | scan.Damage]:
        """Read on from record `seq`, or from the next if it is lost; it may not be written yet."""
        place = find_seq(self._source, seq) or Place(offset=0, first_seq=0)
        self._scanner.jump(place.offset, place.first_seq)
        self._first_seqs.clear()
        self._offsets.clear()
        self._expansion.restart()
        self.is_finished = False
        self._from_seq = seq
        return iter(self)

    @property
    def has_seek_table(self) -> bool:
        """Whether a seek table was read; it was valid unless damage was reported."""
        return self._scanner.has_table

    @property
    def last_chain(self) -> bytes | None:
        """The chain of the last block read, None where its header was lost."""
        return self._scanner.chain

    @property
    def tail_bytes(self) -> int:
        """Current size of an incomplete block at the end, in bytes."""
        return self._source.size() - self._scanner.offset

    def _read_block(self, block: scan.Block) -> Iterator[Record | scan.Damage]:
        if self.is_finished:
            yield _lose_block(block, "fin", "a block follows the log's end")
            return
        try:
            parsed = _parse_block(block, self._expansion)
        except FormatError as error:
            yield _lose_block(block, "record", str(error))
            return
        self.blocks += 1
        if block.header.has_head_copy:
            yield from self._read_copy(block, parsed)
        self._first_seqs.append(block.header.first_seq)
        self._offsets.append(block.offset)
        self._keep(block.offset, parsed)
        for seq, stored in enumerate(parsed.records, block.header.first_seq):
            if seq >= self._from_seq:
                yield from self._read_record(block, seq, stored)
            elif isinstance(stored, StoredRecord):
                self.is_finished |= stored.record.kind == "fin"

    def _read_copy(self, block: scan.Block, parsed: _Parsed) -> Iterator[Record | scan.Damage]:
        if self.head_source == "second" and not self._first_seqs:
            self._first_seqs.append(0)
            self._offsets.append(block.offset)
            if self._from_seq == 0:
                yield self.head
            return
        try:
            stored = _sound(parsed.head)
            is_same = stored is not None and self._decode(stored) == self.head
        except FormatError:
            is_same = False
        if not is_same:
            detail = "the copy of the session record differs"
            yield scan.Damage(block.offset, 0, "head", detail)

    def _read_record(
        self, block: scan.Block, seq: int, stored: StoredRecord | FormatError
    ) -> Iterator[Record | scan.Damage]:
        if isinstance(stored, FormatError):
            reason: scan.Reason = "version" if isinstance(stored, VersionUnknown) else "record"
            yield scan.Damage(block.offset, 0, reason, str(stored), seq, 1)
            return
        try:
            record = self._decode(stored)
        except FormatError as error:
            yield scan.Damage(block.offset, 0, "blob", str(error), seq, 1)
            return
        self.is_finished = self.is_finished or record.kind == "fin"
        yield record

    def _decode(self, stored: StoredRecord) -> Record:
        return decode(stored, self._resolve, self._expansion, self._last)

    def _keep(self, offset: int, parsed: _Parsed) -> None:
        self._kept[offset] = parsed
        self._kept_bytes += parsed.cost
        while self._kept_bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.cost

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def _resolve(self, seq: int) -> StoredRecord:
        """Return an earlier record whose blob is referenced, read again if it was not kept."""
        offset, first_seq = self._find_block(seq)
        parsed = self._kept.get(offset)
        if parsed is None:
            block = scan.load_block(self._source, offset, self._expansion)
            parsed = _parse_block(block, self._expansion)
            self._keep(offset, parsed)
        self._kept.move_to_end(offset)
        head = _sound(parsed.head)
        if seq == 0 and head is not None:
            return head
        place = seq - first_seq
        stored = _sound(parsed.records[place]) if place < len(parsed.records) else None
        if stored is None:
            raise FormatError(f"record {seq}, which holds a blob, is lost")
        return stored

    def _find_block(self, seq: int) -> tuple[int, int]:
        """Return the offset and first `seq` of the block that holds a record."""
        at = bisect_right(self._first_seqs, seq) - 1
        if at >= 0:
            return self._offsets[at], self._first_seqs[at]
        if self._from_seq and self._hopped is None:
            self._hopped = array("Q", hop(self._source))
        place = None if self._hopped is None else find_seq(self._source, seq, self._hopped)
        if place is None:
            raise FormatError(f"record {seq}, which holds a blob, is lost")
        return place.offset, place.first_seq


def _source_of(log: Path | bytes | scan.OpenSource) -> scan.OpenSource:
    if isinstance(log, bytes):
        return scan.BytesSource(log)
    return scan.FileSource(log) if isinstance(log, Path) else log


def _sound(stored: StoredRecord | FormatError | None) -> StoredRecord | None:
    return None if isinstance(stored, FormatError) else stored


def _lose_block(block: scan.Block, reason: scan.Reason, detail: str) -> scan.Damage:
    header = block.header
    count = header.next_seq - header.first_seq
    return scan.Damage(block.offset, 0, reason, detail, header.first_seq, count)


def find_head(
    source: scan.Source, expansion: Expansion, *, tries_max: int | None = None
) -> tuple[Record, HeadSource]:
    """Take the head from the first valid block, past at most `tries_max` damages (None: any).

    `TooNew`: a newer version wrote it; `Unreadable`: neither block holds it, or none was written
    yet.
    """
    block, newer = None, None
    for item in islice(scan.Scanner(source, expansion), tries_max):
        if isinstance(item, scan.Block):
            block = item
            break
        newer = newer or (item.detail if item.reason == "version" else None)
    if block is None:
        if newer is not None:
            raise TooNew(newer)
        start = source.read(0, len(layout.MARK))
        if not layout.MARK.startswith(start):
            raise Unreadable("this is not a recording: it has no block of a log")
        raise Unreadable("no block of the log can be read, or no block is complete yet")
    header = block.header
    if header.first_seq and not header.has_head_copy:
        raise Unreadable("both session records of the log are lost")
    try:
        stored = _parse_record(*block.parts()[0], 0, expansion)
        if isinstance(stored, VersionUnknown):
            raise TooNew(str(stored))
        if isinstance(stored, FormatError):
            raise Unreadable("both session records of the log are lost")
        head = decode(stored, no_record, expansion)
    except FormatError as error:
        raise Unreadable(f"the log's session record is damaged: {error}") from error
    return head, "second" if header.first_seq else "first"


def no_record(seq: int) -> StoredRecord:
    """Refuse to look up a record, where only its own blobs may be referenced."""
    raise FormatError(f"it names a blob of record {seq}")


def _parse_block(block: scan.Block, expansion: Expansion) -> _Parsed:
    """Parse a block's records; `FormatError` if their framing contradicts the header."""
    header, before, parts = block.header, expansion.spent, block.parts()
    copy = _parse_record(*parts.pop(0), 0, expansion) if header.has_head_copy else None
    records = [
        _parse_record(*each, seq, expansion) for seq, each in enumerate(parts, header.first_seq)
    ]
    cost = len(block.payload) + expansion.spent - before
    return _Parsed(records=records, head=records[0] if header.first_seq == 0 else copy, cost=cost)


def _parse_record(
    header: bytes, area: memoryview, seq: int, expansion: Expansion
) -> StoredRecord | FormatError:
    """Parse one record, or return its error: the block's other records stay valid."""
    try:
        expansion.charge(header_cost(header))
        stored = parse(header, area)
    except FormatError as error:
        return type(error)(str(error))  # without its traceback, which holds memory
    record = stored.record
    if record.seq != seq or (record.kind == "session") != (seq == 0):
        return FormatError(f"{record.kind} {record.seq} stands where record {seq} should")
    return stored


# -- the end ---------------------------------------------------------------------------------------


RESTARTED: Final[Fields] = {"by": "server", "what": "restarted"}
"""The fields of the mark from which another server goes on."""


def end_of(path: Path) -> LogEnd:
    """Read a log to its last whole block.

    Raises:
        LogDamaged: it is damaged, or over; or holds no more than its head, which the next block
            would repeat.
        OSError: it cannot be read.
    """
    chain, file_bytes, next_seq = Chain(), 0, 0
    with closing(scan.FileSource(path)) as source:
        for item in scan.Scanner(source):
            if isinstance(item, scan.Damage):
                raise LogDamaged(f"{path.name} is {item}")
            chain.counts.update(parse(*parts).record.kind for parts in item.own_parts())
            chain.follow(item.header)
            file_bytes, next_seq = item.end, item.header.next_seq
    if chain.counts["fin"]:
        raise LogDamaged(f"{path.name} is over")
    if chain.blocks < 2:
        raise LogDamaged(f"{path.name} holds no more than its head")
    return LogEnd(file_bytes=file_bytes, next_seq=next_seq, chain=chain)
