"""The chain of a log being written: how records become blocks, each linked to the last.

Rules: a block is linked once, in file order; the second repeats the session record; the fields of
`fin` and the seek table come from here.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Final

import attrs

from .compression import Frame
from .encoding import Framed
from .errors import RecordInvalid
from .format import (
    CHAIN_START,
    FORMAT_VERSION,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    BlockHeader,
    Piece,
    chain_of,
    pack_header,
)
from .records import Record, Value
from .seektable import BlockSizes

FIN_FIELDS: Final = frozenset({"blocks", "chain", "counts"})
"""The fields of `fin` that the recorder adds to the caller's."""


@attrs.define(kw_only=True)
class Batch:
    """Encoded records that share a block, from `first` to `last_seq`.

    Attributes:
        kinds: the number of records by kind.
        payload_bytes: of the records, a head copy not counted.
        cost: of reading them without their bytes; see `recorder.format.expansion`.
    """

    first: Record
    pieces: list[Piece] = attrs.field(factory=list)
    has_samples: bool = False
    kinds: Counter[str] = attrs.field(factory=Counter)
    payload_bytes: int = 0
    cost: int = 0
    last_seq: int = 0
    has_head_copy: bool = False

    def add(self, record: Record, framed: Framed) -> None:
        """Take the next record."""
        self.pieces += framed.pieces
        self.has_samples |= framed.has_samples
        self.kinds[record.kind] += 1
        self.payload_bytes += framed.framed_bytes
        self.cost += framed.cost
        self.last_seq = record.seq


@attrs.define
class Chain:
    """The blocks of a log so far.

    `last` is the chain of the last block, `counts` the number of records by kind.
    """

    last: bytes = CHAIN_START
    blocks: int = 0
    counts: Counter[str] = attrs.field(factory=Counter)
    _sizes: BlockSizes = attrs.field(factory=BlockSizes, init=False)
    _head: bytes = attrs.field(default=b"", init=False)
    _head_cost: int = attrs.field(default=0, init=False)

    def begin(self, batch: Batch) -> None:
        """Prepare the next block: keep the head, which is the first, and copy it to the second."""
        if self.blocks == 0:
            self._head, self._head_cost = b"".join(batch.pieces), batch.cost
        elif self.blocks == 1:
            batch.pieces.insert(0, self._head)
            batch.cost += self._head_cost
            batch.has_head_copy = True
            self._head = b""

    def block(self, batch: Batch, frame: Frame, version: int = FORMAT_VERSION) -> bytearray:
        """Make the block of a batch from its frame; `RecordInvalid` if the payload is too large."""
        if frame.payload_bytes > PAYLOAD_BYTES_MAX:
            raise RecordInvalid(f"payload of {frame.payload_bytes}, at most {PAYLOAD_BYTES_MAX}")
        self.counts.update(batch.kinds)
        header = BlockHeader(
            first_seq=batch.first.seq,
            mono_ns=batch.first.at_ns,
            n_records=batch.kinds.total() + batch.has_head_copy,
            compressed_len=len(frame.data),
            uncompressed_len=frame.payload_bytes,
            payload_crc=zlib.crc32(frame.data),
            has_head_copy=batch.has_head_copy,
            is_stuffed=frame.is_stuffed,
            version=version,
        )
        return self.link(header, frame)

    def link(self, header: BlockHeader, frame: Frame) -> bytearray:
        """Make a block in the frame's own buffer, linked to the chain; ignores `header.chain`."""
        self.last = chain_of(self.last, header, frame.data)
        block = frame.block
        block[:HEADER_BYTES] = pack_header(attrs.evolve(header, chain=self.last))
        self.blocks += 1
        self._sizes.add(header.compressed_len, header.uncompressed_len)
        return block

    def follow(self, header: BlockHeader) -> None:
        """Take a block that is in the log already."""
        self.last = header.chain
        self.blocks += 1
        self._sizes.add(header.compressed_len, header.uncompressed_len)

    def fin_fields(self) -> dict[str, Value]:
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
