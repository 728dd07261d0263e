"""The chain of a log being written: how each block links to the last, and how the log ends.

Rules: a block is linked once, in file order; the fields of `fin` and the seek table come from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from .compression import Frame
from .format import CHAIN_START, HEADER_BYTES, BlockHeader, chain_of, pack_header
from .records import Value
from .seektable import BlockSizes

FIN_FIELDS: Final = frozenset({"blocks", "chain", "counts"})
"""The fields of `fin` that the recorder adds to the caller's."""


@attrs.define
class Chain:
    """The blocks of a log so far; `last` is the chain of the last block."""

    last: bytes = CHAIN_START
    blocks: int = 0
    _sizes: BlockSizes = attrs.field(factory=BlockSizes, init=False)

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

    def fin_fields(self, counts: Mapping[str, int]) -> dict[str, Value]:
        """Return the fields that `fin` adds; `counts` is the number of records by kind."""
        return {"blocks": self.blocks, "chain": self.last.hex(), "counts": dict(counts)}

    def table(self) -> bytes:
        """Make the seek table that follows `fin`; empty if there are too many blocks."""
        return self._sizes.table()


@attrs.frozen(kw_only=True)
class LogEnd:
    """Where a log that has no `fin` ends.

    Attributes:
        file_bytes: up to the end of the last whole block.
        next_seq: `seq` of the next record.
        counts: the number of records by kind.
    """

    file_bytes: int
    next_seq: int
    chain: Chain
    counts: Mapping[str, int]
