"""The bytes of a session log: block headers, the chain, record framing, the seek table.

    File   := Block+ [SeekTable]
    Block  := Skippable(magic 0x184D2A53){Header} ZstdFrame
    Table  := Skippable(magic 0x184D2A5E){Entry* Footer}
    Entry  := compressed_len:u32 uncompressed_len:u32
    Footer := frames:u32 descriptor:u8(0: no checksums) magic:u32(0x8F92EAB1)

Rules: little-endian. A header is accepted only if its CRC and every limit hold. The mark that
starts a header (`MARK`) never occurs inside a block, whatever a client sent, so a reader that lost
its place can trust the next mark. Where zstd's frame would hold the mark, the payload is stuffed: a
zero byte follows each start of a mark. A log is one file, its recording id plus `SUFFIX`.

The seek table is that of zstd's seekable format. Every zstd frame has an entry, including the
skippable ones of block headers, of uncompressed length 0: a block is two entries, the first always
the same. No mark can occur in the table: a header's entry starts with a byte that no mark contains,
and lengths are limited. It is optional, not in the chain, and no proof of anything.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from array import array
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import numpy as np

from .errors import FormatError, LogMisuse, VersionUnknown

SUFFIX: Final = ".session.zst"
_RECORDING_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""No dot and no slash: an id is a name, never a path. 64 characters hold any hash or UUID."""

FORMAT_VERSION: Final = 1
"""Version of blocks written live."""
COMPACT_VERSION: Final = 2
"""Version of compacted blocks, whose blobs may be FLAC: a reader of version 1 refuses them."""
FORMAT_VERSIONS: Final = range(FORMAT_VERSION, COMPACT_VERSION + 1)
"""Versions that this reader knows."""
SKIPPABLE_MAGIC: Final = 0x184D2A53
"""One of zstd's sixteen skippable magics; unlike that of a seek table (…5E)."""
SEEK_TABLE_MAGIC: Final = 0x184D2A5E
"""The seek table of zstd's seekable format; may follow the last block, holds no records."""
TAG: Final = b"ANTL"

CHAIN_BYTES: Final = 16
"""128 bits: finding another history with the same chain is infeasible."""
CHAIN_START: Final = bytes(CHAIN_BYTES)

MIB: Final = 1 << 20
BLOCK_BYTES: Final = 384 << 10
"""A block closes at this size before compression: the most that one bad bit can cost. A second of
both sides fits, in each protocol."""
RECORD_BYTES_MAX: Final = 128 * MIB
"""Above the largest frame that any endpoint accepts (chat: 96 MiB), with room for other fields."""
UNPACKED_BYTES_MAX: Final = 2 * RECORD_BYTES_MAX
"""Unpacked bytes of a record's blobs, counted per reference: sound is stored in half its bytes and
a repeated picture in none, but one blob named a thousand times must not fill memory."""
HEAD_BYTES_MAX: Final = 4 * MIB
"""The session record is written twice and held in memory; a resolved config is some kilobytes."""
HEADER_BYTES_MAX: Final = 4 * MIB
"""Bytes of a record's JSON. The largest within a session's limits is under 2 MiB, for a turn of
16384 short texts; longer text in a frame is stored in blobs."""
HEADER_VALUES_MAX: Final = 1 << 19
"""JSON values of a header, twice those of such a turn; each may take 200 bytes of memory."""
RECORDS_MAX: Final = 1 << 14
"""Per block. A record takes 73 bytes at least, so a block of several never holds as many."""
SHARED_BYTES_MAX: Final = 2 * MIB
"""Payload of a block of several records, without a copy of the head: compacted blocks close at 1
MiB, plus a twelfth if stuffed. All their headers are in memory together."""
PAYLOAD_BYTES_MAX: Final = HEAD_BYTES_MAX + RECORD_BYTES_MAX
"""The most that a reader allocates for one block, whatever its header claims."""
COMPRESSED_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + PAYLOAD_BYTES_MAX // 256 + 1024
"""zstd's own bound for data that does not compress."""

FLAG_HEAD_COPY: Final = 1
"""The payload starts with a copy of the session record, which `first_seq` does not count."""
FLAG_STUFFED: Final = 2
"""The payload is stuffed; see `stuff`."""
FLAGS_KNOWN: Final = FLAG_HEAD_COPY | FLAG_STUFFED

_PREAMBLE: Final = struct.Struct("<II")
_FIELDS: Final = struct.Struct("<4sBBHQQIIII")
_CRC: Final = struct.Struct("<I")
_FRAMING: Final = struct.Struct("<II")

CONTENT_BYTES: Final = _FIELDS.size + CHAIN_BYTES + _CRC.size
HEADER_BYTES: Final = _PREAMBLE.size + CONTENT_BYTES
"""Preamble and header, 68 bytes."""
MARK: Final = _PREAMBLE.pack(SKIPPABLE_MAGIC, CONTENT_BYTES) + TAG
"""The twelve bytes that start every header; the mark cannot overlap itself."""
_MARK_START: Final = MARK[:-1]
_STUFFING: Final = b"\x00"
"""It neither completes nor starts a mark, and the mark's end does not contain it."""
_SEQ_MAX: Final = (1 << 63) - 1

Piece: TypeAlias = bytes | memoryview
"""Payload bytes of one kind: text, a JPEG, or noise of samples."""


@attrs.frozen
class BlockHeader:
    """A block's header.

    Attributes:
        first_seq: `seq` of the first record, a head copy not counted.
        mono_ns: `at_ns` of that record.
        n_records: records in the payload, a head copy counted.
        compressed_len: bytes of the zstd frame.
        uncompressed_len: bytes of the payload, stuffing included.
        payload_crc: crc32 of the compressed bytes.
        chain: blake2b-128 of the previous chain, these fields and the compressed bytes.
        has_head_copy: the payload starts with a copy of the session record.
    """

    first_seq: int
    mono_ns: int
    n_records: int
    compressed_len: int
    uncompressed_len: int
    payload_crc: int
    chain: bytes = CHAIN_START
    has_head_copy: bool = False
    is_stuffed: bool = False
    version: int = FORMAT_VERSION

    @property
    def next_seq(self) -> int:
        """The `seq` after this block's last record."""
        return self.first_seq + self.n_records - self.has_head_copy


_numbers_of: Final = attrgetter(
    *("first_seq", "mono_ns", "n_records", "compressed_len", "uncompressed_len", "payload_crc")
)


def _pack_fields(header: BlockHeader) -> bytes:
    flags = FLAG_HEAD_COPY * header.has_head_copy | FLAG_STUFFED * header.is_stuffed
    start = _PREAMBLE.pack(SKIPPABLE_MAGIC, CONTENT_BYTES)
    return start + _FIELDS.pack(TAG, header.version, flags, 0, *_numbers_of(header))


def chain_of(previous: bytes, header: BlockHeader, compressed: Piece) -> bytes:
    """Chain a block to the `previous` one, first `CHAIN_START`; ignores `header.chain`."""
    digest = hashlib.blake2b(previous, digest_size=CHAIN_BYTES)
    digest.update(_pack_fields(header))
    digest.update(compressed)
    return digest.digest()


def pack_header(header: BlockHeader, chain: bytes | None = None) -> bytes:
    """Return the skippable frame of a block, `HEADER_BYTES` long; `chain` in place of its own."""
    head = _pack_fields(header) + (chain or header.chain)
    return head + _CRC.pack(zlib.crc32(head))


def unpack_header(data: bytes) -> BlockHeader:
    """Read the skippable frame of a block, exactly `HEADER_BYTES`.

    `VersionUnknown`: it is valid, and of a newer version; `FormatError`: it is not a valid header,
    or a size in it exceeds a limit.
    """
    if len(data) != HEADER_BYTES or not data.startswith(MARK):
        raise FormatError("no block starts here")
    head = data[: -_CRC.size]
    if _CRC.unpack_from(data, len(head))[0] != zlib.crc32(head):
        raise FormatError("the block header's crc does not hold")
    fields = _FIELDS.unpack_from(data, _PREAMBLE.size)
    _, version, flags, reserved, first_seq, mono_ns, count, compressed, uncompressed, crc = fields
    if version not in FORMAT_VERSIONS or flags & ~FLAGS_KNOWN or reserved:
        known = f"this reader knows versions {FORMAT_VERSIONS[0]} to {FORMAT_VERSIONS[-1]}"
        raise VersionUnknown(f"block of format version {version}, flags {flags}: {known}")
    header = BlockHeader(
        first_seq=first_seq,
        mono_ns=mono_ns,
        n_records=count,
        compressed_len=compressed,
        uncompressed_len=uncompressed,
        payload_crc=crc,
        chain=head[-CHAIN_BYTES:],
        has_head_copy=bool(flags & FLAG_HEAD_COPY),
        is_stuffed=bool(flags & FLAG_STUFFED),
        version=version,
    )
    _check_limits(header)
    return header


def _check_limits(header: BlockHeader) -> None:
    if not 1 <= header.compressed_len <= COMPRESSED_BYTES_MAX:
        raise FormatError(f"compressed length {header.compressed_len} is out of range")
    if header.uncompressed_len > PAYLOAD_BYTES_MAX:
        raise FormatError(f"payload length {header.uncompressed_len} is out of range")
    if not 1 <= header.n_records <= min(RECORDS_MAX, header.uncompressed_len // _FRAMING.size):
        raise FormatError(f"{header.n_records} records cannot fit the payload")
    shared_bytes = header.uncompressed_len - HEAD_BYTES_MAX * header.has_head_copy
    if shared_bytes > SHARED_BYTES_MAX and header.n_records - header.has_head_copy > 1:
        raise FormatError(f"{header.n_records} records share {header.uncompressed_len} bytes")
    if header.next_seq > _SEQ_MAX or header.next_seq == header.first_seq:
        raise FormatError(f"seq {header.first_seq} with {header.n_records} records is out of range")


def stuff(payload: bytes) -> bytes:
    """Return the payload without marks: a zero byte follows each start of one."""
    return payload.replace(_MARK_START, _MARK_START + _STUFFING)


def unstuff(payload: bytes) -> bytes:
    """Undo `stuff`."""
    return payload.replace(_MARK_START + _STUFFING, _MARK_START)


def frame_record(header: bytes, blob_bytes: int) -> bytes:
    """Start one record: two lengths and its JSON header; `blob_bytes` of blobs must follow."""
    return _FRAMING.pack(len(header), blob_bytes) + header


def split_records(payload: Piece, n_records: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield each record's JSON header and blobs; `FormatError` unless they fill the payload."""
    view = memoryview(payload)
    at = 0
    for _ in range(n_records):
        if at + _FRAMING.size > len(payload):
            raise FormatError("the payload ends inside a record's framing")
        header_len, blob_len = _FRAMING.unpack_from(payload, at)
        at += _FRAMING.size
        if header_len > HEADER_BYTES_MAX:
            raise FormatError(f"a header of {header_len} bytes, at most {HEADER_BYTES_MAX}")
        end = at + header_len + blob_len
        if end > len(payload):
            raise FormatError("a record runs past the payload")
        yield bytes(view[at : at + header_len]), view[at + header_len : end]
        at = end
    if at != len(payload):
        raise FormatError(f"{len(payload) - at} bytes follow the last record of the payload")


def is_recording_id(text: str) -> bool:
    """Whether a text is a valid recording id."""
    return _RECORDING_ID.fullmatch(text) is not None


def recording_id_of(path: Path) -> str:
    """Return the recording id in a log's name; `LogMisuse` if it is not that of a log."""
    recording_id = path.name.removesuffix(SUFFIX)
    if not path.name.endswith(SUFFIX) or not is_recording_id(recording_id):
        raise LogMisuse(f"{path.name!r} is not the name of a session log")
    return recording_id


# -- the seek table --------------------------------------------------------------------------------


FOOTER_MAGIC: Final = 0x8F92EAB1
BLOCKS_MAX: Final = 1 << 20
"""Days of a session. A larger log has no table, since readers hold the table in memory."""

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
