"""One log on disk: records in, blocks out. Synchronous, for one thread.

Rules: the session record is a block of its own, repeated at the start of the second block; `fin` is
a block of its own, naming the previous block's chain, with the seek table. A block is handed to
write(2) whole, or the log has failed; then the file is only closed.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final

import attrs

from ..format.blocks import STEP_BYTES, Batch, Chain, Compressor, LogEnd
from ..format.encoding import Framed, RecordEncoder, runs
from ..format.errors import LogMisuse, RecordInvalid
from ..format.format import BLOCK_BYTES, HEAD_BYTES_MAX
from ..format.records import Record
from .disk import Directories, Disk

_framed_bytes: Final = attrgetter("framed_bytes")
_ALONE: Final = frozenset({"session", "fin"})
WRITE_BYTES_MAX: Final = BLOCK_BYTES
"""Bytes per write(2): on a slow disk all logs wait for the last write."""


@attrs.frozen(kw_only=True)
class Written:
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

    def write(self, records: Iterable[Record]) -> Iterator[Written]:
        """Encode records into blocks and write them; yield each block once it is written.

        `records`: in order of `seq`; `session` first, `fin` last. `RecordInvalid`: a record cannot
        be stored; `OSError`: the disk refused.
        """
        for step in self.steps(records):
            if isinstance(step, Written):
                yield step

    def steps(self, records: Iterable[Record]) -> Iterator[int | Written]:
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
            if batch is not None and batch.payload_bytes + size > BLOCK_BYTES:
                yield from self._write_batch(batch)
                batch, framed = None, self._encode(run)  # it may name its blobs
            if batch is None:
                batch = Batch(first=run[0])
            batch.add(run, framed)
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
            raise LogMisuse(f"{self.path.name} is not open")
        return self._descriptor

    def _encode(self, run: list[Record]) -> list[Framed]:
        if len(run) > 1:
            return self._encoder.encode_run(run)
        (record,) = run
        if record.kind == "fin":
            fields = {**record.fields, **self._chain.fin_fields()}
            record = attrs.evolve(record, fields=fields)
        framed = self._encoder.encode(record)
        if record.kind == "session" and framed.framed_bytes > HEAD_BYTES_MAX:
            raise RecordInvalid(f"session of {framed.framed_bytes} bytes, at most {HEAD_BYTES_MAX}")
        return [framed]

    def _write_batch(self, batch: Batch) -> Iterator[int | Written]:
        self._chain.begin(batch)
        frame = yield from self._compressor.steps(
            batch.pieces, has_samples=batch.has_samples, cost=batch.cost
        )
        block = self._chain.block(batch, frame)
        if "fin" in batch.kinds:
            block = block + self._chain.table()
        yield from self._write_bytes(block)
        self._encoder.forget()  # so a lost block costs no record elsewhere
        yield Written(last_seq=batch.last_seq, kinds=frozenset(batch.kinds), file_bytes=len(block))

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
