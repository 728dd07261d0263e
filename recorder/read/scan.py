"""The blocks of a log, found and checked in order, and the damage between them.

Rules: a block is accepted only if its header's CRC and limits, its payload's CRC and its
decompressed length hold. After a bad payload, the next block is found by length, unless a mark
inside shows missing bytes; after a bad header, by the next mark. A block that goes back in `seq` is
refused; gaps in `seq` and broken chains are reported. An incomplete block at the end is not damage.
A seek table must match the undamaged blocks. Scanning can continue when the file has grown; memory
is one block, and each byte is read a bounded number of times, whatever headers claim.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, Protocol

import attrs
import zstandard

from ..format import format as layout
from ..format.format import Expansion, FormatError, VersionUnknown

SEARCH_BYTES: Final = layout.MIB
"""Bytes read at a time when searching for a mark, at most."""
SEARCH_BYTES_MIN: Final = 4 << 10
"""And at first: where marks are dense, little is read twice."""

Reason = Literal[
    "header", "payload", "record", "blob", "gap", "order", "chain", "head", "fin", "seek", "version"
]
"""A block's header or payload; a record, or its blob in a lost block; missing records; a repeated
block; a broken chain; the session record's copy; `fin` or data after it; the seek table; or no
damage, but a newer version."""


@attrs.frozen
class Damage:
    """One damage in a log.

    Attributes:
        offset: of the damaged bytes in the file.
        length: in bytes; 0 where bytes are only missing.
        first_seq: the first record lost, None if unknown.
        records: number of records lost, 0 if unknown.
    """

    offset: int
    length: int
    reason: Reason
    detail: str
    first_seq: int | None = None
    records: int = 0

    @property
    def advice(self) -> str:
        """What to do; empty if the log is of a newer version, or was recovered before."""
        is_of_file = self.reason != "version" and bool(self.offset or self.length)
        return "`antiphon recordings recover` keeps what can be read" if is_of_file else ""

    def __str__(self) -> str:
        what = "of a newer version" if self.reason == "version" else "damaged"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{what} at byte {self.offset}: {self.detail}{advice}"


@attrs.frozen(kw_only=True)
class Block:
    """An accepted block; `offset` is its header's in the file, `payload` is decompressed."""

    offset: int
    header: layout.BlockHeader
    payload: bytes

    @property
    def end(self) -> int:
        """Where the next block starts."""
        return self.offset + layout.HEADER_BYTES + self.header.compressed_len

    def parts(self) -> list[tuple[bytes, memoryview]]:
        """Split the payload into records: JSON and blobs; `FormatError` if it is invalid."""
        return list(layout.split_records(self.payload, self.header.n_records))

    def own_parts(self) -> list[tuple[bytes, memoryview]]:
        """The same without a copy of the head."""
        return self.parts()[self.header.has_head_copy :]


class Source(Protocol):
    """Bytes with random access that may grow."""

    def size(self) -> int:
        """Return the current size in bytes."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """Read up to `count` bytes; fewer only at the end."""
        ...


class OpenSource(Source, Protocol):
    """A source to be closed after use."""

    def close(self) -> None:
        """Close it."""
        ...


class FileSource:
    """A file, opened for reading; close it."""

    def __init__(self, path: Path) -> None:
        self._file: Final = path.open("rb", buffering=0)

    def size(self) -> int:
        """Return the file's current size in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Read with pread."""
        return os.pread(self._file.fileno(), count, offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@attrs.frozen
class BytesSource:
    """A log held in memory."""

    data: bytes

    def size(self) -> int:
        """Return the size in bytes."""
        return len(self.data)

    def read(self, offset: int, count: int) -> bytes:
        """Slice the bytes."""
        return self.data[offset : offset + count]

    def close(self) -> None:
        """Do nothing."""


def load_block(source: Source, offset: int, expansion: Expansion) -> Block:
    """Read and check one block; `FormatError` if it is invalid or exceeds the expansion limit."""
    header = layout.unpack_header(source.read(offset, layout.HEADER_BYTES))
    compressed = _read_frame(source, offset, header)
    return Block(offset=offset, header=header, payload=_decompress(header, compressed, expansion))


def _read_frame(source: Source, offset: int, header: layout.BlockHeader) -> bytearray:
    """Read a block's zstd frame, or up to a mark in it, so that overlapping claims cost little."""
    start = offset + layout.HEADER_BYTES
    data = bytearray()
    count = SEARCH_BYTES_MIN
    while len(data) < header.compressed_len:
        more = source.read(start + len(data), min(count, header.compressed_len - len(data)))
        if not more:
            break
        seen = max(0, len(data) - len(layout.MARK) + 1)
        data += more
        if data.find(layout.MARK, seen) >= 0:
            break
        count *= 2
    return data


def _decompress(header: layout.BlockHeader, compressed: bytearray, expansion: Expansion) -> bytes:
    if len(compressed) != header.compressed_len or zlib.crc32(compressed) != header.payload_crc:
        raise FormatError("the payload's crc does not hold")
    expansion.charge(header.uncompressed_len)
    try:
        # zstd allocates what the frame claims, so the claim is checked first.
        if zstandard.frame_content_size(compressed) != header.uncompressed_len:
            raise FormatError("the payload's length is not the header's")
        decompressor = zstandard.ZstdDecompressor(max_window_size=layout.PAYLOAD_BYTES_MAX)
        payload = decompressor.decompress(compressed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"the payload is not a zstd frame: {error}") from error
    if len(payload) != header.uncompressed_len:
        raise FormatError("the payload is shorter than its header says")
    return layout.unstuff(payload) if header.is_stuffed else payload


def find_mark(source: Source, start: int, end: int | None = None) -> int | None:
    """Find the next mark of a header, valid or not, up to `end` (None: the file's end)."""
    end = source.size() if end is None else end
    step = SEARCH_BYTES_MIN
    while start < end:
        count = min(step, end - start) + len(layout.MARK) - 1
        found = source.read(start, count).find(layout.MARK)
        if found >= 0:
            return start + found
        start += step
        step = min(2 * step, SEARCH_BYTES)
    return None


class Scanner:
    """Walks over a log once, up to its current end; iterate again when it has grown.

    Attributes:
        offset: where the next block is expected.
        chain: of the last block, None after one whose header was lost.
        next_seq: the `seq` that the next block must start with.
        has_table: a seek table was passed; it was valid unless damage was reported.
    """

    def __init__(self, source: Source, expansion: Expansion | None = None) -> None:
        self.offset = 0
        self.chain: bytes | None = layout.CHAIN_START
        self.next_seq = 0
        self.has_table = False
        self._source: Final = source
        self._expansion: Final = Expansion(source.size) if expansion is None else expansion
        self._sizes: layout.BlockSizes | None = layout.BlockSizes()  # until a block is lost

    def __iter__(self) -> Iterator[Block | Damage]:
        """Yield blocks and damage in file order."""
        for item in self._walk():
            if isinstance(item, Damage):
                self._sizes = None
            elif self._sizes is not None:
                self._sizes.add(item.header.compressed_len, item.header.uncompressed_len)
            yield item
            del item  # else it is held while the next one is read

    def jump(self, offset: int, next_seq: int) -> None:
        """Continue at `offset`, a block's header or the end, where `next_seq` is expected."""
        self.offset = offset
        self.next_seq = next_seq
        self.chain = None
        self._sizes = None

    def _walk(self) -> Iterator[Block | Damage]:
        while not self._at_end():
            if self._source.read(self.offset, len(layout.TABLE_START)) == layout.TABLE_START:
                yield from self._pass_table()
                continue
            try:
                header = layout.unpack_header(self._source.read(self.offset, layout.HEADER_BYTES))
            except FormatError as error:
                yield self._skip_to_mark(error)
                continue
            end = self.offset + layout.HEADER_BYTES + header.compressed_len
            if end > self._source.size() and find_mark(self._source, self.offset + 1) is None:
                return  # the block is incomplete
            yield from self._take(header)

    def _at_end(self) -> bool:
        """Whether only the end follows, or the start of a header or seek table."""
        rest = max(0, self._source.size() - self.offset)  # it may be cut by others meanwhile
        start = self._source.read(self.offset, min(rest, len(layout.MARK)))
        if rest < layout.HEADER_BYTES and layout.MARK.startswith(start):
            return True
        if rest < len(layout.TABLE_START) and layout.TABLE_START.startswith(start):
            return True
        if not start.startswith(layout.TABLE_START):
            return False
        if self._sizes is None:
            return rest < max(layout.table_bytes(start), layout.PREAMBLE_BYTES)
        expected = self._sizes.table()
        return rest < len(expected) and expected.startswith(self._source.read(self.offset, rest))

    def _pass_table(self) -> Iterator[Damage]:
        """Pass a seek table; if all blocks are known, it must match them exactly."""
        start = self.offset
        if self._sizes is None:
            self.offset += layout.table_bytes(self._source.read(start, layout.PREAMBLE_BYTES))
            self.has_table = True
            return
        expected = self._sizes.table()
        if expected and self._source.read(start, len(expected)) == expected:
            self.offset += len(expected)
            self.has_table = True
            return
        found = find_mark(self._source, start + 1)
        self.offset = self._source.size() if found is None else found
        detail = "the seek table is not that of the blocks before it"
        yield Damage(start, self.offset - start, "seek", detail)

    def _skip_to_mark(self, error: FormatError) -> Damage:
        start = self.offset
        found = find_mark(self._source, start + 1)
        self.offset = found if found is not None else self._end_of_garbage(start + 1)
        self.chain = None
        reason: Reason = "version" if isinstance(error, VersionUnknown) else "header"
        return Damage(start, self.offset - start, reason, str(error))

    def _end_of_garbage(self, start: int) -> int:
        """Return the end, or the start of a mark that is being written."""
        size = self._source.size()
        tail = self._source.read(max(start, size - len(layout.MARK) + 1), len(layout.MARK) - 1)
        kept = next((at for at in range(len(tail)) if layout.MARK.startswith(tail[at:])), len(tail))
        return size - len(tail) + kept

    def _take(self, header: layout.BlockHeader) -> Iterator[Block | Damage]:
        start = self.offset
        compressed = _read_frame(self._source, start, header)
        try:
            payload = _decompress(header, compressed, self._expansion)
        except FormatError as error:
            yield from self._skip_payload(header, str(error))
            return
        self.offset = start + layout.HEADER_BYTES + header.compressed_len
        span = self.offset - start
        if header.first_seq < self.next_seq:
            detail = f"records from {header.first_seq}, where {self.next_seq} is the next"
            yield Damage(start, span, "order", detail)
            return
        before, self.chain = self.chain, header.chain
        follows = (
            before is None
            or layout.chain_of(before, header, memoryview(compressed)) == header.chain
        )
        del compressed  # frees it before the block is used
        if not follows:
            detail = "the block does not follow the one before it"
            yield Damage(start, 0, "chain", detail)
        yield from self._note_gap(start, header)
        yield Block(offset=start, header=header, payload=payload)

    def _skip_payload(self, header: layout.BlockHeader, detail: str) -> Iterator[Damage]:
        start = self.offset
        end = start + layout.HEADER_BYTES + header.compressed_len
        found = find_mark(self._source, start + 1, end)
        self.offset = end if found is None else found
        self.chain = header.chain
        if header.first_seq >= self.next_seq:
            yield from self._note_gap(start, header)
        count = header.next_seq - header.first_seq
        yield Damage(start, self.offset - start, "payload", detail, header.first_seq, count)

    def _note_gap(self, offset: int, header: layout.BlockHeader) -> Iterator[Damage]:
        """Report records missing before a block, and expect the block's successor."""
        first_seq, self.next_seq = self.next_seq, header.next_seq
        missing = header.first_seq - first_seq
        if missing == 0 or (header.has_head_copy and header.first_seq == 1):
            return
        yield Damage(offset, 0, "gap", f"{missing} records are missing", first_seq, missing)
