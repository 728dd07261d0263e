"""The chain of a log that is being written: what its next block hangs on, and how it ends.

Rules: a block is linked once, in the order of the file. What `fin` says of the log and the seek
table behind it come from here, so that all that write logs end them in one way.

It compresses nothing and writes nothing.
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
"""What `fin` says beside the caller's fields."""


@attrs.define
class Chain:
    """The blocks of a log so far.

    Attributes:
        last: chain of the last one.
        blocks: how many there are.
    """

    last: bytes = CHAIN_START
    blocks: int = 0
    _sizes: BlockSizes = attrs.field(factory=BlockSizes, init=False)

    def link(self, header: BlockHeader, frame: Frame) -> bytearray:
        """Make a block of a frame, and hang it on the chain.

        Args:
            header: all it is to say; its `chain` does not matter.
            frame: the payload.

        Returns:
            The block, in the frame's own bytes.
        """
        self.last = chain_of(self.last, header, frame.data)
        block = frame.block
        block[:HEADER_BYTES] = pack_header(attrs.evolve(header, chain=self.last))
        self.blocks += 1
        self._sizes.add(header.compressed_len, header.uncompressed_len)
        return block

    def fin_fields(self, counts: Mapping[str, int]) -> dict[str, Value]:
        """Say what `fin` must say of the log before it.

        Args:
            counts: its records by kind.
        """
        return {"blocks": self.blocks, "chain": self.last.hex(), "counts": dict(counts)}

    def table(self) -> bytes:
        """Make the seek table that follows `fin`; empty where there are too many blocks."""
        return self._sizes.table()
