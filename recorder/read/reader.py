"""Reads a session log: records in order, and any damage; from its start, or from a place in it.

Rules:
- One bad bit costs at most its block, plus records elsewhere that reference its blobs, reported
  separately. The session record comes from the first block or its copy in the second; without
  either the log is unreadable.
- A log can be read while it is written: iteration ends with the last complete block, and a new one
  continues there. Memory is one block, some kept for references, and some bytes per block; time and
  memory are bounded by the file's size (`recorder.format.expansion`).
- A place (`at`) is found without reading the blocks before it: the seek table holds the start of
  each block; without a valid one, 68 bytes per block are read. Every header used must be valid.
  Headers hold `seq` and time; for a unit, a few blocks are decompressed. After a jump, earlier
  damage, chains and seek tables are not judged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Literal, Self

import attrs

from ..format.blocks import Chain, LogEnd
from ..format.errors import FormatError, LogDamaged, TooNew, Unreadable, VersionUnknown
from ..format.expansion import Expansion, header_cost
from ..format.format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    MARK,
    MIB,
    BlockHeader,
    offsets_in,
    split_records,
    table_bytes_by_footer,
    unpack_header,
)
from ..format.records import Fields, Record
from .decoding import LastWhole, StoredRecord, decode, parse
from .scan import (
    Block,
    BytesSource,
    Damage,
    FileSource,
    OpenSource,
    Reason,
    Scanner,
    Source,
    find_mark,
    load_block,
)

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


def end_of_blocks(source: Source) -> int:
    """Return where a log's seek table starts, or the log's size if it has none."""
    table = _table_of(source)
    return source.size() if table is None else table[-1]


def find_seq(source: Source, seq: int, offsets: Sequence[int] | None = None) -> Place | None:
    """Find the last block starting at or before `seq`, or None; `offsets`: the known blocks."""
    if offsets is None:
        return _find(source, lambda header: header.first_seq, seq)
    return _bisect(source, offsets, lambda header: header.first_seq, seq)


def next_seq(source: Source) -> int:
    """Return the `seq` that follows the last complete block; 0 if there is no block."""
    place = find_seq(source, BEYOND)
    return 0 if place is None else _header(source, place.offset).next_seq


def seq_at_time(source: Source, at_ns: int) -> int:
    """Return the first `seq` at or after `at_ns` (monotonic), or the one after the last."""
    # The block before the first such block may still hold such records at its end.
    place = _find(source, lambda header: header.mono_ns, at_ns - 1)
    return 0 if place is None else _first(source, place, lambda record: record.at_ns >= at_ns)


def seq_of_unit(source: Source, index: int) -> int | None:
    """Return the `seq` of the `unit` record of unit `index`, or of the next recorded; else None."""
    offsets = array("Q", hop(source))
    units = _Units(source, offsets, Expansion(source.size))
    if units.next_from(0) == BEYOND:
        return None
    at = bisect_right(range(len(offsets)), index, key=units.next_from)
    for number in range(max(0, at - 1), len(offsets)):
        for found, seq in units.of(number):
            if found >= index:
                return seq
    return None


@attrs.frozen
class _Units:
    """The units of a log's blocks; each block is decompressed once."""

    source: Source
    offsets: Sequence[int]
    expansion: Expansion
    _known: dict[int, tuple[tuple[int, int], ...]] = attrs.field(factory=dict, init=False)

    def of(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the units whose results are in a block, each with its record's `seq`."""
        if number not in self._known:
            found = _records(self.source, self.offsets[number], self.expansion)
            units = ((unit_index(record), record.seq) for record in found)
            self._known[number] = tuple((it, seq) for it, seq in units if it is not None)
        return self._known[number]

    def next_from(self, number: int) -> int:
        """Return the first unit whose result is in a block or after it."""
        for later in range(number, len(self.offsets)):
            if units := self.of(later):
                return units[0][0]
        return BEYOND


def _find(source: Source, key: Callable[[BlockHeader], int], wanted: int) -> Place | None:
    """Find the last block whose key is at most `wanted`; keys rise."""
    table = _table_of(source)
    if table is not None:
        try:
            return _bisect(source, table[:-1], key, wanted)
        except FormatError:
            pass  # another log's table, or damage there
    return _bisect(source, array("Q", hop(source)), key, wanted)


def _bisect(
    source: Source, offsets: Sequence[int], key: Callable[[BlockHeader], int], wanted: int
) -> Place | None:
    at = bisect_right(offsets, wanted, key=lambda offset: key(_header(source, offset)))
    if at == 0:
        return None
    offset = offsets[at - 1]
    return Place(offset=offset, first_seq=_header(source, offset).first_seq)


def _header(source: Source, offset: int) -> BlockHeader:
    return unpack_header(source.read(offset, HEADER_BYTES))


def _table_of(source: Source) -> Sequence[int] | None:
    """Read the block starts, and the last one's end, from a seek table that may be valid."""
    size = source.size()
    length = table_bytes_by_footer(source.read(max(0, size - FOOTER_BYTES), FOOTER_BYTES))
    if not 0 < length < size:
        return None
    return offsets_in(source.read(size - length, length), size - length)


def hop(source: Source) -> Iterator[int]:
    """Yield the offsets of blocks with valid headers, in order."""
    at: int | None = 0
    size = source.size()
    while at is not None and at < size:
        try:
            header = _header(source, at)
        except FormatError:
            at = find_mark(source, at + 1)
            continue
        end = at + HEADER_BYTES + header.compressed_len
        if end > size:
            return
        yield at
        at = end


def _first(source: Source, place: Place, is_wanted: Callable[[Record], bool]) -> int:
    """Find the first wanted record of a block; if none, the `seq` after the block."""
    next_seq = place.first_seq
    for record in _records(source, place.offset, Expansion(source.size)):
        if is_wanted(record):
            return record.seq
        next_seq = record.seq + 1
    return next_seq


def _records(source: Source, offset: int, expansion: Expansion) -> Iterator[Record]:
    try:
        yield from records_of(load_block(source, offset, expansion), expansion)
    except FormatError:
        return


def records_of(block: Block, expansion: Expansion) -> Iterator[Record]:
    """Yield a block's parseable records, blobs unresolved, without the head copy."""
    try:
        framed = list(split_records(block.payload, block.header.n_records))
    except FormatError:
        return
    for parts in framed[block.header.has_head_copy :]:
        try:
            expansion.charge(header_cost(parts[0]))
            yield parse(*parts).record
        except FormatError:
            continue


# -- the reader ------------------------------------------------------------------------------------


KEPT_BYTES_MAX: Final = 16 * MIB
"""Cost of the blocks kept for later references, far more than a writer remembers."""

HeadSource = Literal["first", "second"]


def read(path: Path, *, on_damage: Callable[[Damage], object] | None = None) -> Iterator[Record]:
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
                raise LogDamaged(f"{path.name} at {item.offset}: {item.reason}, {item.detail}")


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

    def __init__(self, log: Path | bytes | OpenSource) -> None:
        """Open a log, given as a path, its bytes or a source, and find its session record.

        The reader closes the source, also on failure.

        `Unreadable`: no session record is left, or none was written yet; `OSError`: the file cannot
        be read.
        """
        self._source = _source_of(log)
        self._expansion: Final = Expansion(self._source.size)
        self._scanner: Final = Scanner(self._source, self._expansion)
        self._first_seqs: list[int] = []
        self._offsets: list[int] = []
        self._kept: Final[OrderedDict[int, _Parsed]] = OrderedDict()
        self._kept_bytes = 0
        self._last: Final = LastWhole()
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

    def __iter__(self) -> Iterator[Record | Damage]:
        """Continue reading, up to the last complete block."""
        for item in self._scanner:
            if isinstance(item, Damage):
                yield item
            else:
                yield from self._read_block(item)
                if self._kept_bytes > KEPT_BYTES_MAX:
                    self._forget()
            del item  # else it is held while the next one is read

    def at(self, seq: int) -> Iterator[Record | Damage]:
        """Read on from record `seq`, or from the next if it is lost; it may not be written yet."""
        place = find_seq(self._source, seq)
        if place is None:
            self._scanner.jump(0, 0)
        else:
            self._scanner.jump(place.offset, place.first_seq)
        self._first_seqs.clear()
        self._offsets.clear()
        self._expansion.restart()
        self.is_finished = False
        self._from_seq = seq
        return iter(self)

    def at_time(self, at_ns: int) -> Iterator[Record | Damage]:
        """Read on from the first record at or after `at_ns`, in monotonic nanoseconds."""
        return self.at(seq_at_time(self._source, at_ns))

    def at_unit(self, index: int) -> Iterator[Record | Damage]:
        """Read on from the record of unit `index` or the next; `LookupError` if there is none."""
        seq = seq_of_unit(self._source, index)
        if seq is None:
            raise LookupError(f"no unit {index} or later in the log")
        return self.at(seq)

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

    def _read_block(self, block: Block) -> Iterator[Record | Damage]:
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

    def _read_copy(self, block: Block, parsed: _Parsed) -> Iterator[Record | Damage]:
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
            yield _damage(block, "head", detail, None, 0)

    def _read_record(
        self, block: Block, seq: int, stored: StoredRecord | FormatError
    ) -> Iterator[Record | Damage]:
        if isinstance(stored, FormatError):
            reason: Reason = "version" if isinstance(stored, VersionUnknown) else "record"
            yield _damage(block, reason, str(stored), seq)
            return
        try:
            record = self._decode(stored)
        except FormatError as error:
            yield _damage(block, "blob", str(error), seq)
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
            block = load_block(self._source, offset, self._expansion)
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


def _source_of(log: Path | bytes | OpenSource) -> OpenSource:
    if isinstance(log, bytes):
        return BytesSource(log)
    return FileSource(log) if isinstance(log, Path) else log


def _sound(stored: StoredRecord | FormatError | None) -> StoredRecord | None:
    return None if isinstance(stored, FormatError) else stored


def _damage(
    block: Block, reason: Reason, detail: str, first_seq: int | None, records: int = 1
) -> Damage:
    return Damage(
        offset=block.offset,
        length=0,
        reason=reason,
        detail=detail,
        first_seq=first_seq,
        records=records,
    )


def _lose_block(block: Block, reason: Reason, detail: str) -> Damage:
    header = block.header
    return _damage(block, reason, detail, header.first_seq, header.next_seq - header.first_seq)


def find_head(
    source: Source, expansion: Expansion, *, tries_max: int | None = None
) -> tuple[Record, HeadSource]:
    """Take the head from the first valid block, past at most `tries_max` damages (None: any).

    `TooNew`: a newer version wrote it; `Unreadable`: neither block holds it, or none was written
    yet.
    """
    block, newer = None, None
    for item in islice(Scanner(source, expansion), tries_max):
        if isinstance(item, Block):
            block = item
            break
        newer = newer or (item.detail if item.reason == "version" else None)
    if block is None:
        if newer is not None:
            raise TooNew(newer)
        start = source.read(0, len(MARK))
        if not MARK.startswith(start):
            raise Unreadable("this is not a recording: it has no block of a log")
        raise Unreadable("no block of the log can be read, or no block is complete yet")
    header = block.header
    if header.first_seq and not header.has_head_copy:
        raise Unreadable("both session records of the log are lost")
    try:
        framed = list(split_records(block.payload, header.n_records))
        stored = _parse_record(*framed[0], 0, expansion)
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


def _parse_block(block: Block, expansion: Expansion) -> _Parsed:
    """Parse a block's records; `FormatError` if their framing contradicts the header."""
    header = block.header
    before = expansion.spent
    framed = list(split_records(block.payload, header.n_records))
    copies = 1 if header.has_head_copy else 0
    copy = _parse_record(*framed[0], 0, expansion) if copies else None
    records = [
        _parse_record(*parts, header.first_seq + index, expansion)
        for index, parts in enumerate(framed[copies:])
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
    source = FileSource(path)
    try:
        for item in Scanner(source):
            if isinstance(item, Damage):
                raise LogDamaged(f"{path.name} at {item.offset}: {item.reason}, {item.detail}")
            records = list(split_records(item.payload, item.header.n_records))
            for parts in records[item.header.has_head_copy :]:
                chain.counts[parse(*parts).record.kind] += 1
            chain.follow(item.header)
            file_bytes, next_seq = item.end, item.header.next_seq
    finally:
        source.close()
    if chain.counts["fin"]:
        raise LogDamaged(f"{path.name} is over")
    if chain.blocks < 2:
        raise LogDamaged(f"{path.name} holds no more than its head")
    return LogEnd(file_bytes=file_bytes, next_seq=next_seq, chain=chain)
