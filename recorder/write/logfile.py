"""One log on disk: records in, blocks out. Synchronous, for one thread.

Rules:
- The session record is a block of its own, repeated at the start of the second block; `fin` is a
  block of its own, naming the previous block's chain, with the seek table. A block is linked once,
  in file order; the fields of `fin` and the seek table come from the chain.
- Payloads become zstd frames, which any zstd tool decompresses. In a payload with PCM, large
  pieces get zstd blocks of their own, since sign and exponent bytes compress to a third, and noise
  or JPEG not at all. A frame never holds the mark that starts a block, and is too long to look like
  a bomb. Its buffer has room for the block header, so writing copies nothing. A large payload is
  compressed in `steps`, between which other logs have a turn.
- A block is handed to write(2) whole, or the log has failed; then the file is only closed.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import zstandard

from ..format import format as layout
from ..format.encoding import Framed, RecordEncoder, runs
from .files import Directories, Disk

T = TypeVar("T")

_framed_bytes: Final = attrgetter("framed_bytes")
_kind: Final = attrgetter("kind")
_ROOM: Final = bytes(layout.HEADER_BYTES)
LEVEL: Final = 3
"""zstd level for text in a live log."""
LEVELS_INSTEAD: Final = (1, 2, 4, 5, 6)
"""Tried in turn if even a stuffed payload's frame at `LEVEL` holds the mark: one case in 2**96."""
LEVEL_KEPT: Final = 19
"""zstd level for compaction: thirty times slower, and saves a few per cent of a log."""
APART_BYTES_MIN: Final = 4 << 10
"""A shorter piece shares a zstd block with its neighbours: a block costs what it would save."""
ZSTD_BLOCK_BYTES_MIN: Final = 4
"""Three bytes of a block header, and one repeated byte."""
STEP_BYTES: Final = layout.MIB
"""Bytes of a large payload compressed per step: 5 ms at most, then other logs have a turn."""
_SAMPLES: Final = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, hash_log=9, min_match=7, write_content_size=True
)
"""zstd parameters for samples, which hardly repeat: half the time of level 3, and a smaller frame
in separate blocks. A table half the size makes tones a tenth larger."""


@attrs.frozen
class Frame:
    """A compressed payload: `block` is room for the header, then the zstd frame."""

    block: bytearray
    payload_bytes: int
    is_stuffed: bool

    @property
    def data(self) -> memoryview:
        """The zstd frame without the header's room."""
        return memoryview(self.block)[layout.HEADER_BYTES :]


class Compressor:
    """Makes zstd frames for any number of logs, in one thread; not live: as small as possible."""

    def __init__(self, *, is_live: bool = True) -> None:
        self._text: Final = _zstd(LEVEL if is_live else LEVEL_KEPT)
        samples = _for_samples()
        # Level 19 may find false repeats in noise, and then its frame is larger.
        self._samples: Final = (samples,) if is_live else (samples, self._text)
        self._is_live: Final = is_live

    def compress(
        self, pieces: Iterable[layout.Piece], *, has_samples: bool, cost: int = 0
    ) -> Frame:
        """Compress a payload in one go; see `steps`."""
        return _at_once(self.steps(pieces, has_samples=has_samples, cost=cost))

    def steps(
        self, pieces: Iterable[layout.Piece], *, has_samples: bool, cost: int = 0
    ) -> Generator[int, None, Frame]:
        """Compress a payload in steps; yield the bytes of each, at most 1 MiB, or none if smaller.

        Args:
            pieces: the payload, split where the kind of bytes changes.
            has_samples: some pieces are PCM, packed or of 16 bits, or a picture.
            cost: of reading its records without their bytes; see `Expansion`.

        `RecordInvalid`: no level of zstd gives a frame without the mark.
        """
        runs = _join_short(pieces) if has_samples else [b"".join(pieces)]
        size = sum(map(len, runs))
        if size > STEP_BYTES and self._is_live:  # a zstd object has one stream at a time
            large = _for_samples() if has_samples else _zstd(LEVEL)
            block = yield from _in_steps(large, runs, size, is_apart=has_samples)
        elif has_samples:
            made = [_in_steps(it, runs, size, is_apart=True) for it in self._samples]
            block = min(map(_at_once, made), key=len)
        else:
            block = _with_room([self._text.compress(runs[0])])
        if len(block) - layout.HEADER_BYTES < layout.frame_bytes_min(size + cost):
            block = _compress_long(self._text, b"".join(runs), cost)
        if not _has_mark(block):
            return Frame(block, size, is_stuffed=False)
        stuffed = layout.stuff(b"".join(runs))
        for level in (LEVEL, *LEVELS_INSTEAD):
            block = yield from _in_steps(_zstd(level), [stuffed], len(stuffed), is_apart=False)
            if len(block) - layout.HEADER_BYTES < layout.frame_bytes_min(len(stuffed) + cost):
                block = _compress_long(_zstd(level), stuffed, cost)
            if not _has_mark(block):
                return Frame(block, len(stuffed), is_stuffed=True)
        raise layout.RecordInvalid("no level of zstd gives a frame without the block mark")


def _at_once(steps: Generator[int, None, T]) -> T:
    """Take all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            made: T = stop.value
            return made


def _compress_long(compressor: zstandard.ZstdCompressor, payload: bytes, cost: int) -> bytearray:
    """Compress a payload whose frame would be too short, in enough zstd blocks to lengthen it."""
    blocks = -(-layout.frame_bytes_min(len(payload) + cost) // ZSTD_BLOCK_BYTES_MIN)
    step = max(1, len(payload) // blocks)
    runs = (payload[at : at + step] for at in range(0, len(payload), step))
    return _at_once(_in_steps(compressor, runs, len(payload), is_apart=True))


def _in_steps(
    compressor: zstandard.ZstdCompressor, runs: Iterable[layout.Piece], size: int, *, is_apart: bool
) -> Generator[int, None, bytearray]:
    """Compress a payload in steps, a small one at once; if `is_apart`, with a zstd block a run."""
    stream = compressor.compressobj(size=size)
    chunks = []
    for run in runs:
        for start in range(0, len(run), STEP_BYTES):
            step = run[start : start + STEP_BYTES]
            chunks.append(stream.compress(step))
            if size > STEP_BYTES:
                yield len(step)
        if is_apart:
            chunks.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    chunks.append(stream.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return _with_room(chunks)


def _with_room(chunks: list[bytes]) -> bytearray:
    return bytearray().join([_ROOM, *chunks])


def _has_mark(block: bytearray) -> bool:
    return block.rfind(layout.MARK, layout.HEADER_BYTES) >= 0  # half the cost of `in`


def _for_samples() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_SAMPLES)


def _zstd(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)


def _join_short(pieces: Iterable[layout.Piece]) -> list[layout.Piece]:
    """Return the long pieces as they are, and the short ones between them joined."""
    runs, short = list[layout.Piece](), list[layout.Piece]()
    for piece in pieces:
        if len(piece) < APART_BYTES_MIN:
            short.append(piece)
            continue
        if short:
            runs.append(b"".join(short))
            short.clear()
        runs.append(piece)
    if short:
        runs.append(b"".join(short))
    return runs


# -- blocks ----------------------------------------------------------------------------------------


FIN_FIELDS: Final = frozenset({"blocks", "chain", "counts"})
"""The fields of `fin` that the recorder adds to the caller's."""


@attrs.define(kw_only=True)
class Batch:
    """Encoded records that share a block.

    Attributes:
        payload_bytes: of the records, a head copy not counted.
    """

    records: list[layout.Record] = attrs.field(factory=list)
    framed: list[Framed] = attrs.field(factory=list)
    payload_bytes: int = 0
    has_head_copy: bool = False


@attrs.define
class Chain:
    """The blocks of a log so far.

    `last` is the chain of the last block, `counts` the number of records by kind.
    """

    last: bytes = layout.CHAIN_START
    blocks: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    _sizes: layout.BlockSizes = attrs.field(factory=layout.BlockSizes, init=False)
    _head: bytes = attrs.field(default=b"", init=False)
    _head_cost: int = attrs.field(default=0, init=False)

    def begin(self, batch: Batch) -> tuple[list[layout.Piece], bool, int]:
        """Prepare the next block: keep the head, which is the first, and copy it to the second.

        Returns its pieces, whether they have samples, and the cost of reading its records without
        their bytes (`Expansion`).
        """
        pieces, has_samples, cost = list[layout.Piece](), False, 0
        for framed in batch.framed:
            pieces += framed.pieces
            has_samples |= framed.has_samples
            cost += framed.cost
        if self.blocks == 0:
            self._head, self._head_cost = b"".join(pieces), cost
        elif self.blocks == 1:
            pieces.insert(0, self._head)
            cost += self._head_cost
            batch.has_head_copy = True
            self._head = b""
        return pieces, has_samples, cost

    def block(self, batch: Batch, frame: Frame, version: int = layout.FORMAT_VERSION) -> bytearray:
        """Make the block of a batch from its frame; `RecordInvalid` if the payload is too large."""
        if frame.payload_bytes > layout.PAYLOAD_BYTES_MAX:
            bytes_max = layout.PAYLOAD_BYTES_MAX
            raise layout.RecordInvalid(f"payload of {frame.payload_bytes}, at most {bytes_max}")
        records, is_copy, data = batch.records, batch.has_head_copy, frame.data
        self.counts.update(map(_kind, records))
        sizes = (len(records) + is_copy, len(data), frame.payload_bytes, zlib.crc32(data))
        flagged: dict[str, Any] = {"has_head_copy": is_copy, "is_stuffed": frame.is_stuffed}
        first = records[0]
        header = layout.BlockHeader(first.seq, first.at_ns, *sizes, version=version, **flagged)
        return self.link(header, frame)

    def link(self, header: layout.BlockHeader, frame: Frame) -> bytearray:
        """Make a block in the frame's own buffer, linked to the chain; ignores `header.chain`."""
        self.last = layout.chain_of(self.last, header, frame.data)
        block = frame.block
        block[: layout.HEADER_BYTES] = layout.pack_header(header, self.last)
        self.blocks += 1
        self._sizes.add(header.compressed_len, header.uncompressed_len)
        return block

    def follow(self, header: layout.BlockHeader) -> None:
        """Take a block that is in the log already."""
        self.last = header.chain
        self.blocks += 1
        self._sizes.add(header.compressed_len, header.uncompressed_len)

    def fin_fields(self) -> dict[str, layout.Value]:
        """Return the fields that `fin` adds."""
        return {"blocks": self.blocks, "chain": self.last.hex(), "counts": dict(self.counts)}

    def table(self) -> bytes:
        """Make the seek table that follows `fin`; empty if there are too many blocks."""
        return self._sizes.table()


@attrs.frozen(kw_only=True)
class LogEnd:
    """Where a log that has no `fin` ends.

    Attributes:
        file_bytes: up to the end of the last whole block.
        next_seq: `seq` of the next record.
    """

    file_bytes: int
    next_seq: int
    chain: Chain


# -- the file --------------------------------------------------------------------------------------


_ALONE: Final = frozenset({"session", "fin"})
WRITE_BYTES_MAX: Final = layout.BLOCK_BYTES
"""Bytes per write(2): on a slow disk all logs wait for the last write."""


@attrs.frozen(kw_only=True)
class WrittenBlock:
    """A block handed to write(2), and its size in the file."""

    last_seq: int
    kinds: frozenset[str]
    file_bytes: int


class LogFile:
    """One log being written; `is_dirty` means written since the last sync."""

    def __init__(
        self,
        path: Path,
        *,
        disk: Disk,
        compressor: Compressor,
        directories: Directories | None = None,
    ) -> None:
        self.path: Final = path
        self.is_dirty = False
        self._disk: Final = disk
        self._compressor = compressor
        self._encoder: Final = RecordEncoder()
        self._descriptor: int | None = None
        self._is_created = False
        self._closing: Final = threading.Lock()
        self._directories: Final = directories or Directories(disk)
        self._number = 0
        self._chain = Chain()
        self._file_bytes = 0

    def hand_over(self, compressor: Compressor) -> None:
        """Have another thread write from now on, which has its own compressor."""
        self._compressor = compressor

    def create(self) -> None:
        """Create the file; `OSError` if it exists."""
        self._open(self._disk.create)

    def reopen(self) -> None:
        """Open a log that lost its writer, and hold its lock.

        `BlockingIOError`: it has a writer; `OSError`: it cannot be opened.
        """
        self._open(self._disk.reopen)

    def _open(self, opener: Callable[[Path], int]) -> None:
        self._descriptor = opener(self.path)
        self._is_created = True
        self._number = self._directories.add(self.path)

    def go_on(self, end: LogEnd) -> None:
        """Write after this end; what is behind it is cut off. `OSError`: the disk refused."""
        self._disk.truncate(self._opened(), end.file_bytes)
        self._chain, self._file_bytes = end.chain, end.file_bytes

    def write(self, records: Iterable[layout.Record]) -> Iterator[WrittenBlock]:
        """Encode records into blocks and write them; yield each block once it is written.

        `records`: in order of `seq`; `session` first, `fin` last. `RecordInvalid`: a record cannot
        be stored; `OSError`: the disk refused.
        """
        for step in self.steps(records):
            if isinstance(step, WrittenBlock):
                yield step

    def steps(self, records: Iterable[layout.Record]) -> Iterator[int | WrittenBlock]:
        """Write records as `write` does, in steps of bounded duration.

        Yields each block, and before a large one the bytes of each step, at least a record.
        `RecordInvalid`: a record cannot be stored; `OSError`: the disk refused.
        """
        batch: Batch | None = None
        for run in runs(records):
            kind = run[0].kind
            if batch is not None and kind in _ALONE:
                yield from self._write_batch(batch)
                batch = None
            is_plain = len(run) == 1 and kind not in _ALONE
            framed = [self._encoder.encode(run[0])] if is_plain else self._encode(run)
            size = sum(map(_framed_bytes, framed))
            if size > STEP_BYTES:
                yield size
            if batch is not None and batch.payload_bytes + size > layout.BLOCK_BYTES:
                yield from self._write_batch(batch)
                batch, framed = None, self._encode(run)  # it may name its blobs
            if batch is None:
                batch = Batch()
            batch.records += run
            batch.framed += framed
            batch.payload_bytes += size
            if kind in _ALONE:
                yield from self._write_batch(batch)
                batch = None
        if batch is not None:
            yield from self._write_batch(batch)

    def sync(self) -> None:
        """Return once everything written is on the device, the file's name included.

        Another thread may write meanwhile; if the file is closed meanwhile, nothing is done.
        `OSError`: the disk refused; written data may be lost. `FileNotFoundError`: the file was
        removed or cut, or its folder moved: written data is lost.
        """
        with self._closing:
            if self._descriptor is None:
                return
            self.is_dirty, written_bytes = False, self._file_bytes
            self._disk.sync(self._descriptor)
            if not self._disk.is_there(self.path, self._descriptor, written_bytes):
                raise FileNotFoundError(
                    errno.ENOENT, "the log was removed, moved or cut", str(self.path)
                )
            self._directories.sync(self.path, self._number)

    def mark_failed(self) -> None:
        """Mark the file as that of a failed log, if it is open; `OSError`: the disk refused."""
        with self._closing:
            if self._descriptor is not None:
                self._disk.mark_failed(self._descriptor)

    def close(self) -> None:
        """Close the file, if open, even where the disk raises `OSError`."""
        with self._closing:
            self._close()

    def remove(self) -> None:
        """Remove the file durably, if it was created; an `OSError` is raised after closing it."""
        with self._closing:
            if not self._is_created:
                return
            try:
                self._disk.remove(self.path, self._descriptor)
                if self._descriptor is not None:
                    self._disk.sync(self._descriptor)
                self._disk.sync_directory(self.path.parent)
            finally:
                self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is None:
            raise layout.LogMisuse(f"{self.path.name} is not open")
        return self._descriptor

    def _encode(self, run: list[layout.Record]) -> list[Framed]:
        if len(run) > 1:
            return self._encoder.encode_run(run)
        (record,) = run
        if record.kind == "fin":
            fields = {**record.fields, **self._chain.fin_fields()}
            record = attrs.evolve(record, fields=fields)
        framed = self._encoder.encode(record)
        if record.kind == "session" and framed.framed_bytes > layout.HEAD_BYTES_MAX:
            raise layout.RecordInvalid(
                f"session of {framed.framed_bytes} bytes, at most {layout.HEAD_BYTES_MAX}"
            )
        return [framed]

    def _write_batch(self, batch: Batch) -> Iterator[int | WrittenBlock]:
        pieces, has_samples, cost = self._chain.begin(batch)
        frame = yield from self._compressor.steps(pieces, has_samples=has_samples, cost=cost)
        block, kinds = self._chain.block(batch, frame), frozenset(map(_kind, batch.records))
        if "fin" in kinds:
            block = block + self._chain.table()
        yield from self._write_bytes(block)
        self._encoder.forget()  # so a lost block costs no record elsewhere
        last_seq = batch.records[-1].seq
        yield WrittenBlock(last_seq=last_seq, kinds=kinds, file_bytes=len(block))

    def _write_bytes(self, block: bytearray) -> Iterator[int]:
        rest = memoryview(block)
        descriptor = self._opened()
        self.is_dirty = True
        while rest:
            given = rest[:WRITE_BYTES_MAX]
            count = self._disk.write(descriptor, given)
            if not 1 <= count <= len(given):
                raise OSError(f"write(2) took {count} of {len(given)} bytes")
            self._file_bytes += count
            rest = rest[count:]
            if rest:
                yield count
        self.is_dirty = True  # again: a concurrent sync covered only a part
