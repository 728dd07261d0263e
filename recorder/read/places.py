"""Finding a place in a log without reading the blocks before it.

Rules: the seek table holds the start of each block; without a valid one, 68 bytes per block are
read. Every header used must be valid. The result is a place to start reading: the reader skips the
rest. Headers hold `seq` and time; for a unit, a few blocks are decompressed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs

from ..format.errors import FormatError
from ..format.expansion import Expansion, header_cost
from ..format.format import HEADER_BYTES, BlockHeader, split_records, unpack_header
from ..format.records import Record
from ..format.seektable import FOOTER_BYTES, offsets_in, table_bytes_by_footer
from .decoding import parse
from .scan import Block, Source, find_mark, load_block

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
    size = source.size()
    footer = source.read(max(0, size - FOOTER_BYTES), FOOTER_BYTES)
    length = table_bytes_by_footer(footer)
    start = size - length
    if length and start > 0 and offsets_in(source.read(start, length), start) is not None:
        return start
    return size


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
            return _bisect(source, table, key, wanted)
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
    """Read the block starts from a seek table at the log's end, if it may be valid."""
    size = source.size()
    length = table_bytes_by_footer(source.read(max(0, size - FOOTER_BYTES), FOOTER_BYTES))
    if not 0 < length < size:
        return None
    offsets = offsets_in(source.read(size - length, length), size - length)
    return None if offsets is None else offsets[:-1]


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
