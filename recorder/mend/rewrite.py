"""Writing a log from the stored records of another, block by block.

Rules: records keep their bytes and version. Blocks are copied whole where possible, rechained;
otherwise their records go into new blocks. The session record, its copy, `fin` and the seek table
are as in any log. The file is new; syncing its directory is left to the caller that renames it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import attrs

from ..format.chain import Chain
from ..format.compression import Compressor, Frame
from ..format.errors import RecordInvalid
from ..format.expansion import header_cost
from ..format.format import FORMAT_VERSION, HEADER_BYTES, PAYLOAD_BYTES_MAX, BlockHeader, Piece
from ..format.records import Fields, Framed, Record, RecordEncoder
from ..read.decoding import StoredRecord
from ..write.disk import LocalDisk

_ROOM: Final = bytes(HEADER_BYTES)
LENGTHS_MAX: Final = 1 << 16
"""Number of blob lengths remembered to cost references, which come soon."""


@attrs.frozen(kw_only=True)
class Entry:
    """An encoded record to be written."""

    kind: str
    seq: int
    at_ns: int
    framed: Framed


class StoredCosts:
    """Costs of reading the stored records of a log in sequence."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, ...], int] = {}

    def of(self, stored: StoredRecord, header: bytes) -> int:
        """Return the cost of the next record without its bytes; `header` is its new JSON."""
        if len(self._lengths) > LENGTHS_MAX:
            self._lengths.clear()
        cost = header_cost(header)
        for index, entry in enumerate(stored.table):
            length = entry[1] if len(entry) == 3 else self._lengths.get(entry, 0)
            self._lengths[stored.record.seq, index] = length
            cost += length
        return cost


def entry_of(record: Record) -> Entry:
    """Encode a new record."""
    framed = RecordEncoder().encode(record)
    return Entry(kind=record.kind, seq=record.seq, at_ns=record.at_ns, framed=framed)


class Rewriter:
    """A log being rewritten; use it as a context manager.

    `next_seq`: `seq` that the next record must have. `at_ns`: of the last record. `version`: format
    version of blocks not copied; at least that of copied blocks.

    `OSError`: the file exists, or the disk refused; also from each writing method.
    """

    def __init__(
        self,
        path: Path,
        *,
        compressor: Compressor,
        block_bytes: int,
        version: int = FORMAT_VERSION,
    ) -> None:
        self.version = version
        self.next_seq = 0
        self.at_ns = 0
        self._compressor: Final = compressor
        self._block_bytes: Final = block_bytes
        self._disk: Final = LocalDisk()
        self._chain: Final = Chain()
        self._counts: Final[Counter[str]] = Counter()
        self._head: list[Piece] = []
        self._head_cost = 0
        self._waiting: list[Entry] = []
        self._waiting_bytes = 0
        self._descriptor: Final = self._disk.create(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disk.close(self._descriptor)

    @property
    def blocks(self) -> int:
        """Number of blocks written."""
        return self._chain.blocks

    @property
    def wants_head_copy(self) -> bool:
        """Whether the next block is the second, which must repeat the session record."""
        return self._chain.blocks + bool(self._waiting) == 1

    def put(self, entry: Entry) -> None:
        """Write a record, with others in a block; `RecordInvalid` if it cannot be stored."""
        assert entry.seq == self.next_seq, "records come in order"
        size = entry.framed.framed_bytes
        if self._waiting and self._waiting_bytes + size > self._block_bytes:
            self._flush()
        self._waiting.append(entry)
        self._waiting_bytes += size
        self._note((entry.kind,), entry.seq + 1, entry.at_ns)
        if entry.kind == "session":
            self._head, self._head_cost = entry.framed.pieces, entry.framed.cost
            self._flush()

    def copy(
        self, header: BlockHeader, compressed: bytes, kinds: Sequence[str], last_ns: int
    ) -> None:
        """Copy a block of records of `kinds`; it has a head copy exactly if `wants_head_copy`.

        `last_ns` is `at_ns` of its last record.
        """
        self._flush()
        self.version = max(self.version, header.version)
        assert header.first_seq == self.next_seq, "records come in order"
        assert header.has_head_copy is (self._chain.blocks == 1), "the head has its place"
        block = bytearray(_ROOM) + compressed
        self._write(header, Frame(block, header.uncompressed_len, header.is_stuffed))
        self._note(kinds, header.next_seq, last_ns)

    def finish(self, fields: Fields, at_ns: int) -> None:
        """Write `fin`, with the recorder's fields, and the seek table; sync all to the device."""
        self._flush()
        said = {**fields, **self._chain.fin_fields(self._counts)}
        fin = Record(kind="fin", seq=self.next_seq, at_ns=at_ns, fields=said)
        self._waiting.append(entry_of(fin))
        self._flush()
        self._write_bytes(self._chain.table())
        self._disk.sync(self._descriptor)

    def _note(self, kinds: Sequence[str], next_seq: int, at_ns: int) -> None:
        self._counts.update(kinds)
        self.next_seq, self.at_ns = next_seq, at_ns

    def _flush(self) -> None:
        entries, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not entries:
            return
        has_copy = self._chain.blocks == 1
        pieces = list(self._head) if has_copy else []
        for entry in entries:
            pieces += entry.framed.pieces
        has_samples = any(entry.framed.has_samples for entry in entries)
        cost = sum(entry.framed.cost for entry in entries) + self._head_cost * has_copy
        frame = self._compressor.compress(pieces, has_samples=has_samples, cost=cost)
        if frame.payload_bytes > PAYLOAD_BYTES_MAX:
            raise RecordInvalid(f"payload of {frame.payload_bytes}, at most {PAYLOAD_BYTES_MAX}")
        header = BlockHeader(
            first_seq=entries[0].seq,
            mono_ns=entries[0].at_ns,
            n_records=len(entries) + has_copy,
            compressed_len=len(frame.data),
            uncompressed_len=frame.payload_bytes,
            payload_crc=zlib.crc32(frame.data),
            has_head_copy=has_copy,
            is_stuffed=frame.is_stuffed,
            version=self.version,
        )
        self._write(header, frame)

    def _write(self, header: BlockHeader, frame: Frame) -> None:
        self._write_bytes(self._chain.link(header, frame))

    def _write_bytes(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(self._descriptor, rest) :]
