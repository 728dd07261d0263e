"""The seek table of zstd's seekable format: where the frames of a log start.

    Table := Skippable(magic 0x184D2A5E){Entry* Footer}
    Entry  := compressed_len:u32 uncompressed_len:u32
    Footer := frames:u32 descriptor:u8(0: no checksums) magic:u32(0x8F92EAB1)

Rules: every zstd frame has an entry, including the skippable ones of block headers, of uncompressed
length 0. So a block is two entries, the first always the same. No block's mark can occur in the
table: a header's entry starts with a byte that no mark contains, and lengths are limited. A table
is optional: it is not in the chain, and nothing is accepted because of one.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

import attrs
import numpy as np

from .format import HEADER_BYTES, SEEK_TABLE_MAGIC

FOOTER_MAGIC: Final = 0x8F92EAB1
BLOCKS_MAX: Final = 1 << 20
"""Days of a session. A larger log has no table, since readers hold the table in memory."""

_PREAMBLE: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IBI")
PREAMBLE_BYTES: Final = _PREAMBLE.size
FOOTER_BYTES: Final = _FOOTER.size
TABLE_START: Final = SEEK_TABLE_MAGIC.to_bytes(4, "little")


@attrs.define
class BlockSizes:
    """The lengths of a log's blocks from its start, eight bytes each."""

    _lengths: array[int] = attrs.field(factory=lambda: array("I"))

    def add(self, compressed_len: int, uncompressed_len: int) -> None:
        """Note the next block; beyond `BLOCKS_MAX`, nothing is kept."""
        if len(self._lengths) <= 2 * BLOCKS_MAX:
            self._lengths.extend((compressed_len, uncompressed_len))

    def table(self) -> bytes:
        """Make the table; empty if there are too many blocks."""
        blocks = len(self._lengths) // 2
        if blocks > BLOCKS_MAX:
            return b""
        entries = self._entries()
        preamble = _PREAMBLE.pack(SEEK_TABLE_MAGIC, len(entries) + FOOTER_BYTES)
        return preamble + entries + _FOOTER.pack(2 * blocks, 0, FOOTER_MAGIC)

    def _entries(self) -> bytes:
        blocks = np.zeros((len(self._lengths) // 2, 4), "<u4")
        blocks[:, 0] = HEADER_BYTES
        blocks[:, 2:] = np.asarray(self._lengths).reshape(-1, 2)
        return blocks.tobytes()


def table_bytes(start: bytes) -> int:
    """Return a table's length by its first `PREAMBLE_BYTES`; 0 if none starts there."""
    if len(start) < PREAMBLE_BYTES or not start.startswith(TABLE_START):
        return 0
    return PREAMBLE_BYTES + int(_PREAMBLE.unpack_from(start)[1])


def table_bytes_by_footer(footer: bytes) -> int:
    """Return a table's length by its last `FOOTER_BYTES`; 0 if they are not its end."""
    if len(footer) != FOOTER_BYTES:
        return 0
    frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != FOOTER_MAGIC or descriptor or frames % 2 or frames > 2 * BLOCKS_MAX:
        return 0
    return PREAMBLE_BYTES + int(frames) * _ENTRY.size + FOOTER_BYTES


def offsets_in(table: bytes, table_offset: int) -> array[int] | None:
    """Return the block starts and the last block's end by a table at `table_offset`, or None."""
    if table_bytes(table) != len(table) or table_bytes_by_footer(table[-FOOTER_BYTES:]) != len(
        table
    ):
        return None
    blocks = np.frombuffer(table[PREAMBLE_BYTES:-FOOTER_BYTES], "<u4").reshape(-1, 4)
    if (blocks[:, 0] != HEADER_BYTES).any() or blocks[:, 1].any():
        return None
    ends = np.cumsum(blocks[:, 2].astype(np.uint64) + np.uint64(HEADER_BYTES))
    offsets = array("Q", (0,))
    offsets.frombytes(ends.tobytes())
    return offsets if offsets[-1] == table_offset else None
