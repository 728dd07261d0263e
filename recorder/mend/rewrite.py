"""Writing a log from the stored records of another, block by block.

Rules: records keep their bytes and version. Blocks are copied whole where possible, rechained;
otherwise their records go into new blocks. The session record, its copy, `fin` and the seek table
are as in any log. The file is new; syncing its directory is left to the caller that renames it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from ..format.chain import Batch, Chain
from ..format.compression import Compressor, Frame
from ..format.encoding import Framed, RecordEncoder
from ..format.expansion import header_cost
from ..format.format import FORMAT_VERSION, HEADER_BYTES, BlockHeader
from ..format.records import Fields, Record
from ..read.decoding import PART_VALUES, StoredRecord
from ..write.disk import LocalDisk

_ROOM: Final = bytes(HEADER_BYTES)
_LENGTH_AT: Final = {3: 1, PART_VALUES: 3}
"""Where an entry of a blob table says the length, by its number of values."""
LENGTHS_MAX: Final = 1 << 16
"""Number of blob lengths remembered to cost references, which come soon."""


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
            at = _LENGTH_AT.get(len(entry))
            length = self._lengths.get(entry, 0) if at is None else entry[at]
            self._lengths[stored.record.seq, index] = length
            cost += length
        return cost


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
        self._batch: Batch | None = None
        self._descriptor: Final = self._disk.create(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._descriptor)

    @property
    def blocks(self) -> int:
        """Number of blocks written."""
        return self._chain.blocks

    @property
    def wants_head_copy(self) -> bool:
        """Whether the next block is the second, which must repeat the session record."""
        return self._chain.blocks + (self._batch is not None) == 1

    def put(self, record: Record, framed: Framed | None = None) -> None:
        """Write a record, with others in a block; `RecordInvalid` if it cannot be stored.

        `framed`: its bytes, if it is encoded already.
        """
        assert record.seq == self.next_seq, "records come in order"
        framed = RecordEncoder().encode(record) if framed is None else framed
        batch = self._batch
        if batch is not None and batch.payload_bytes + framed.framed_bytes > self._block_bytes:
            self._flush()
        self._batch = self._batch or Batch(first=record)
        self._batch.add(record, framed)
        self.next_seq, self.at_ns = record.seq + 1, record.at_ns
        if record.kind == "session":
            self._flush()

    def make_room(self, size_bytes: int) -> None:
        """Begin a block for records that name each other's blobs, if this one has no room."""
        batch = self._batch
        if batch is not None and batch.payload_bytes + size_bytes > self._block_bytes:
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
        frame = Frame(block, header.uncompressed_len, header.is_stuffed)
        self._write_bytes(self._chain.link(header, frame))
        self._chain.counts.update(kinds)
        self.next_seq, self.at_ns = header.next_seq, last_ns

    def finish(self, fields: Fields, at_ns: int) -> None:
        """Write `fin`, with the recorder's fields, and the seek table; sync all to the device."""
        self._flush()
        said = {**fields, **self._chain.fin_fields()}
        self.put(Record(kind="fin", seq=self.next_seq, at_ns=at_ns, fields=said))
        self._flush()
        self._write_bytes(self._chain.table())
        self._disk.sync(self._descriptor)

    def _flush(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._chain.begin(batch)
        frame = self._compressor.compress(
            batch.pieces, has_samples=batch.has_samples, cost=batch.cost
        )
        self._write_bytes(self._chain.block(batch, frame, self.version))

    def _write_bytes(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._disk.write(self._descriptor, rest) :]
