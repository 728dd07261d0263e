"""The seek table of zstd's seekable format: where the frames of a log start, for those who jump.

    Table := Skippable(magic 0x184D2A5E){Entry* Footer}
    Entry  := compressed_len:u32 uncompressed_len:u32
    Footer := frames:u32 descriptor:u8(0: no checksums) magic:u32(0x8F92EAB1)

Rules: every zstd frame of the file before the table has an entry, the skippable ones that hold
block headers too, with nothing uncompressed. So a block is two entries, the first always the same,
and any reader of the seekable format finds every payload. The mark of a block cannot occur in it:
every entry for a header starts with a byte that no mark holds, and lengths have their limits.

A table is a convenience. It is not in the chain, nothing is accepted because of it, and a log
without one is whole.
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
"""Days of a session. A log of more has no table: whoever reads one holds it in memory."""

_PREAMBLE: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<II")
_FOOTER: Final = struct.Struct("<IBI")
PREAMBLE_BYTES: Final = _PREAMBLE.size
FOOTER_BYTES: Final = _FOOTER.size
TABLE_START: Final = SEEK_TABLE_MAGIC.to_bytes(4, "little")


@attrs.define
class BlockSizes:
    """The lengths of the blocks of a log from its start, eight bytes each."""

    _lengths: array[int] = attrs.field(factory=lambda: array("I"))

    def add(self, compressed_len: int, uncompressed_len: int) -> None:
        """Note the next block; those that no table can hold are not kept."""
        if len(self._lengths) <= 2 * BLOCKS_MAX:
            self._lengths.extend((compressed_len, uncompressed_len))

    def table(self) -> bytes:
        """Make the table; empty where there are too many blocks for one."""
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
    """Say how long a table is by its first `PREAMBLE_BYTES`; 0 where none starts there."""
    if len(start) < PREAMBLE_BYTES or not start.startswith(TABLE_START):
        return 0
    return PREAMBLE_BYTES + int(_PREAMBLE.unpack_from(start)[1])


def table_bytes_by_footer(footer: bytes) -> int:
    """Say how long a table is by its last `FOOTER_BYTES`; 0 where they are not its end."""
    if len(footer) != FOOTER_BYTES:
        return 0
    frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != FOOTER_MAGIC or descriptor or frames % 2 or frames > 2 * BLOCKS_MAX:
        return 0
    return PREAMBLE_BYTES + int(frames) * _ENTRY.size + FOOTER_BYTES


def offsets_in(table: bytes, table_offset: int) -> array[int] | None:
    """Say where the blocks of a log start, and where the last one ends, as its table has it.

    Args:
        table: all of it.
        table_offset: where it stands in the file.

    Returns:
        One more than there are blocks; None if it is no table, or cannot be that of this log.
    """
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
