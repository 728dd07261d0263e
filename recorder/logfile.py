"""One log on disk: records in, blocks out. Synchronous, for one thread.

Rules: the session record is a block of its own, and its bytes are repeated at the start of the
second block; `fin` is a block of its own too, so that it can name the chain of the block before; a
block is handed to write(2) whole or the log has failed. After an exception the file is only closed.

It has no queue, no clock and no thread; see `recorder.writer`.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import zstandard

from .disk import Disk
from .errors import LogMisuse, RecordInvalid
from .format import (
    BLOCK_BYTES,
    CHAIN_START,
    HEAD_BYTES_MAX,
    MARK,
    PAYLOAD_BYTES_MAX,
    BlockHeader,
    chain_of,
    pack_header,
    stuff,
)
from .records import Fields, Record, RecordEncoder

LEVEL: Final = 3
"""zstd's level while live: half a millisecond for a second of speech, in and out."""
LEVELS_INSTEAD: Final = (1, 2, 4, 5, 6)
"""Tried in turn where even a stuffed payload's frame at `LEVEL` holds the mark: one in 2**96."""
FIN_FIELDS: Final = frozenset({"blocks", "chain", "counts"})
"""What `fin` says beside the caller's fields."""
_ALONE: Final = frozenset({"session", "fin"})


@attrs.frozen(kw_only=True)
class Written:
    """A block that was handed to write(2).

    Attributes:
        last_seq: of its last record.
        kinds: the kinds of its records.
        file_bytes: what it took in the file.
    """

    last_seq: int
    kinds: frozenset[str]
    file_bytes: int


class Compressor:
    """zstd frames for any number of logs; one thread only."""

    def __init__(self) -> None:
        self._main = _zstd(LEVEL)

    def compress(self, payload: bytes) -> tuple[bytes, bytes, bool]:
        """Return a zstd frame without the block mark in it, what it holds, and if that is stuffed.

        Raises:
            RecordInvalid: no level of zstd gives such a frame.
        """
        frame = self._main.compress(payload)
        if frame.rfind(MARK) < 0:  # half the cost of `in`
            return frame, payload, False
        stuffed = stuff(payload)
        for level in (LEVEL, *LEVELS_INSTEAD):
            frame = _zstd(level).compress(stuffed)
            if frame.rfind(MARK) < 0:
                return frame, stuffed, True
        raise RecordInvalid("no level of zstd gives a frame without the block mark")


def _zstd(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)


@attrs.define(kw_only=True)
class _Batch:
    """The records of a block that is being filled."""

    first: Record
    framed: list[bytes] = attrs.field(factory=list)
    kinds: set[str] = attrs.field(factory=set)
    payload_bytes: int = 0
    last_seq: int = 0

    def add(self, record: Record, framed: bytes) -> None:
        self.framed.append(framed)
        self.kinds.add(record.kind)
        self.payload_bytes += len(framed)
        self.last_seq = record.seq


class LogFile:
    """One log being written.

    Attributes:
        path: where it is.
        is_dirty: something was written since the last sync.
    """

    def __init__(self, path: Path, *, disk: Disk, compressor: Compressor) -> None:
        self.path: Final = path
        self.is_dirty = False
        self._disk: Final = disk
        self._compressor: Final = compressor
        self._encoder: Final = RecordEncoder()
        self._descriptor: int | None = None
        self._closing: Final = threading.Lock()
        self._directory_synced = False
        self._chain = CHAIN_START
        self._blocks = 0
        self._head = b""
        self._counts: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether the file is created and not yet closed."""
        return self._descriptor is not None

    def create(self) -> None:
        """Create the file.

        Raises:
            OSError: it exists, or the disk refused.
        """
        self._descriptor = self._disk.create(self.path)

    def write(self, records: Sequence[Record]) -> Iterator[Written]:
        """Encode records into blocks and write them, all of them by the end.

        Args:
            records: in order of `seq`; `session` first of all, `fin` last.

        Yields:
            Each block, once write(2) took all of it.

        Raises:
            RecordInvalid: a record cannot be stored.
            OSError: the disk refused.
        """
        batch: _Batch | None = None
        for record in records:
            if batch is not None and record.kind in _ALONE:
                yield self._write_batch(batch)
                batch = None
            framed = self._encode(record)
            if batch is not None and batch.payload_bytes + len(framed) > BLOCK_BYTES:
                yield self._write_batch(batch)
                batch, framed = None, self._encoder.encode(record)  # it may name blobs left behind
            if batch is None:
                batch = _Batch(first=record)
            batch.add(record, framed)
            if record.kind in _ALONE:
                yield self._write_batch(batch)
                batch = None
        if batch is not None:
            yield self._write_batch(batch)

    def sync(self) -> None:
        """Return once everything written is on the device, the file's name included.

        It may run while another thread writes; a file that is closed meanwhile is left alone.

        Raises:
            OSError: the disk refused; what was written may be lost.
        """
        with self._closing:
            if self._descriptor is None:
                return
            self.is_dirty = False
            self._disk.sync(self._descriptor)
            if not self._directory_synced:
                self._disk.sync_directory(self.path.parent)
                self._directory_synced = True

    def close(self) -> None:
        """Close the file; without effect when it is not open.

        Raises:
            OSError: the disk refused; the file is closed all the same.
        """
        with self._closing:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                self._disk.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is None:
            raise LogMisuse(f"{self.path.name} is not open")
        return self._descriptor

    def _encode(self, record: Record) -> bytes:
        if record.kind == "fin":
            record = attrs.evolve(record, fields={**record.fields, **self._fin_fields()})
        framed = self._encoder.encode(record)
        self._counts[record.kind] += 1
        if record.kind == "session":
            if len(framed) > HEAD_BYTES_MAX:
                raise RecordInvalid(f"session of {len(framed)} bytes, at most {HEAD_BYTES_MAX}")
            self._head = framed
        return framed

    def _fin_fields(self) -> Fields:
        return {
            "blocks": self._blocks,
            "chain": self._chain.hex(),
            "counts": dict(self._counts),
        }

    def _write_batch(self, batch: _Batch) -> Written:
        has_copy = self._blocks == 1
        pieces = [self._head, *batch.framed] if has_copy else batch.framed
        file_bytes = self._write_block(batch.first, pieces, has_copy)
        self._encoder.forget()  # so that a lost block costs no record of another
        return Written(last_seq=batch.last_seq, kinds=frozenset(batch.kinds), file_bytes=file_bytes)

    def _write_block(self, first: Record, framed: list[bytes], has_copy: bool) -> int:
        compressed, payload, is_stuffed = self._compressor.compress(b"".join(framed))
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise RecordInvalid(f"payload of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}")
        header = BlockHeader(
            first_seq=first.seq,
            mono_ns=first.at_ns,
            n_records=len(framed),
            compressed_len=len(compressed),
            uncompressed_len=len(payload),
            payload_crc=zlib.crc32(compressed),
            has_head_copy=has_copy,
            is_stuffed=is_stuffed,
        )
        chain = chain_of(self._chain, header, compressed)
        block = pack_header(attrs.evolve(header, chain=chain)) + compressed
        self._write_bytes(block)
        self._chain = chain
        self._blocks += 1
        if has_copy:
            self._head = b""
        return len(block)

    def _write_bytes(self, block: bytes) -> None:
        rest = memoryview(block)
        descriptor = self._opened()
        self.is_dirty = True
        while rest:
            count = self._disk.write(descriptor, rest)
            if not 1 <= count <= len(rest):
                raise OSError(f"write(2) took {count} of {len(rest)} bytes")
            rest = rest[count:]
        self.is_dirty = True  # again: a sync meanwhile knew of a part of it at most
