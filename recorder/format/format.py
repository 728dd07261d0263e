"""The format of a session log: its bytes, its records, what reading it may cost, and its errors.

    File   := Block+ [SeekTable]
    Block  := Skippable(magic 0x184D2A53){Header} ZstdFrame
    Record := header_len:u32 blob_len:u32 header:JSON blobs
    header := {"at_ns", "blobs", "fields", "kind", "seq", "version"}
    blobs  := table of [codec, length, stored length], or [seq, index] for one stored before, or
              [seq, index, start, length] for a part of one
    Table  := Skippable(magic 0x184D2A5E){Entry* Footer}
    Entry  := compressed_len:u32 uncompressed_len:u32
    Footer := frames:u32 descriptor:u8(0: no checksums) magic:u32(0x8F92EAB1)

Blocks: little-endian. A header is accepted only if its CRC and every limit hold. The mark that
starts a header (`MARK`) never occurs inside a block, whatever a client sent, so a reader that lost
its place can trust the next mark. Where zstd's frame would hold the mark, the payload is stuffed: a
zero byte follows each start of a mark. A log is one file, its recording id plus `SUFFIX`.

Records: fields are JSON values in which any nested value may be `bytes`; decoding gives equal
fields (a tuple becomes a list). An object with one of the keys below is the recorder's; a caller's
key that starts with `$` gets a second one, so the two are never confused:

    {"$blob": i}     bytes: blob i of the table
    {"$text": [...]} split text: a string, i = base64 of blob i, [i] = UTF-8 text in blob i
    {"$wtf8": i}     text with lone surrogates, which JSON in UTF-8 cannot hold

Only `frame` of `rx` and `tx` is split; any long text is a blob, so that headers stay short.

Logs are never rewritten when a kind's version (`RECORD_VERSIONS`) rises: records are upcast on
reading, one version at a time, blobs resolved. Newer versions and unknown kinds are refused. An
added field needs no upcast: it has a default, and is left out while it has it
(`protocol.values.records`). A field that changes its meaning or is removed needs a conversion
in `UPCASTS`. So far all records have version 1.

The seek table is that of zstd's seekable format. Every zstd frame has an entry, including the
skippable ones of block headers, of uncompressed length 0: a block is two entries, the first always
the same. No mark can occur in the table: a header's entry starts with a byte that no mark contains,
and lengths are limited. It is optional, not in the chain, and no proof of anything.

A few kilobytes can expand to gigabytes: zstd packs zeros 10,000 to 1, a short reference repeats a
large blob, and a small JSON object takes 100 bytes of memory; checksums do not stop a forger. So
blocks, headers and blobs are charged to an `Expansion` before they are decompressed, parsed or
unpacked, in proportion to the file. Costs are in bytes: a payload and a blob cost their length, a
blob once per reference; a header costs its length plus a fixed amount per record and JSON value.
Writers make blocks long enough (`frame_bytes_min`); the allowance covers small logs of older
writers.

    RecorderError
     ├── LogMisuse          the caller broke a rule: wrong order, wrong name, closed log
     │    ├── RecordInvalid the caller's record cannot be stored exactly
     │    └── LogFull       the caller exceeded the backlog without waiting for room
     ├── LogFailed          the disk or the recorder failed; the log takes nothing more
     └── LogUnsound         bytes on disk are not valid
          ├── FormatError   one header, payload, record or blob is not valid
          │    └── VersionUnknown  possibly valid: a newer version wrote it
          ├── LogDamaged    a reader was told to stop at the first damage
          └── Unreadable    nothing can be read: both session records are lost
               └── TooNew   a newer version wrote it

Messages name the fact, the value and the limit. They are never shown to a client.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import numpy as np

from protocol.values.frames import Utf8Text

# -- errors ----------------------------------------------------------------------------------------


class RecorderError(Exception):
    """Base of all errors that this package raises deliberately."""


class LogMisuse(RecorderError):  # noqa: N818 - names say what happened
    """The caller broke a rule of the recorder."""


class RecordInvalid(LogMisuse):
    """The record cannot be stored so that reading gives back exactly the same."""


class LogFull(LogMisuse):
    """The record would exceed the hard bound of the backlog and was not taken."""


class LogFailed(RecorderError):  # noqa: N818
    """The log failed and is never written again; everything written before stays readable."""


class LogUnsound(RecorderError):  # noqa: N818
    """Bytes on disk are not valid."""


class FormatError(LogUnsound):
    """One header, payload, record or blob is not valid."""


class VersionUnknown(FormatError):  # noqa: N818
    """An unknown version or kind of record: a newer version wrote it."""


class LogDamaged(LogUnsound):
    """A reader that stops at the first damage found some."""


class Unreadable(LogUnsound):
    """Both session records are lost, or were never written."""


class TooNew(Unreadable):
    """A newer version wrote the log."""


# -- blocks ----------------------------------------------------------------------------------------


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
FRAMING: Final = struct.Struct("<II")

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
    if not 1 <= header.n_records <= min(RECORDS_MAX, header.uncompressed_len // FRAMING.size):
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
    return FRAMING.pack(len(header), blob_bytes) + header


def split_records(payload: Piece, n_records: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield each record's JSON header and blobs; `FormatError` unless they fill the payload."""
    view = memoryview(payload)
    at = 0
    for _ in range(n_records):
        if at + FRAMING.size > len(payload):
            raise FormatError("the payload ends inside a record's framing")
        header_len, blob_len = FRAMING.unpack_from(payload, at)
        at += FRAMING.size
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


# -- records ---------------------------------------------------------------------------------------


Value: TypeAlias = "bool | int | float | str | bytes | Sequence[Value] | Mapping[str, Value] | None"
"""JSON, with bytes anywhere. `int` of any size; no NaN and no infinities. The `frame` of a record
to be written may also be `Utf8Text`, which is read back as an equal `str`."""
Fields: TypeAlias = Mapping[str, Value]

RECORD_VERSIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("session", "rx", "tx", "event", "effect", "prepare", "unit", "turn"), 1),
    **dict.fromkeys(("chunk", "finalize", "rollback", "state", "mark", "elided", "fin"), 1),
}
"""The kinds of record, and the version of each that this code writes."""

FRAME_KINDS: Final = frozenset({"rx", "tx"})
FRAME_BYTES_MAX: Final = 96 * MIB
"""The largest frame that any endpoint accepts; a larger one was refused, so its start suffices."""
FRAME_CUT: Final = "frame_cut"
"""The field that describes a truncated frame: `{bytes, blake2b, is_text}`."""

NESTING_MAX: Final = 64
"""Deeper values are refused: reading them back must not exhaust the stack."""
TEXT_CHARS_INLINE: Final = 4096
"""Longer text goes into a blob, where JSON's escapes cannot make it six times longer."""
RECORD_OVERHEAD_BYTES: Final = 200
"""Memory of a small record besides its fields, counted in the backlog."""

_NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""Types that take about eight bytes."""
BLOB: Final = "$blob"
TEXT: Final = "$text"
WTF8: Final = "$wtf8"
RESERVED: Final = "$"


@attrs.frozen(kw_only=True)
class Record:
    """One entry of a log; `fields` must not change afterwards.

    `kind`: a key of `RECORD_VERSIONS`. `seq`: 0, 1, 2... in the log, without gaps; 0 is the
    `session` record. `at_ns`: monotonic nanoseconds.
    """

    kind: str
    seq: int
    at_ns: int
    fields: Fields

    def __attrs_post_init__(self) -> None:
        if self.kind not in RECORD_VERSIONS:
            raise RecordInvalid(f"{self.kind!r} is not a kind of record")
        is_count = type(self.seq) is type(self.at_ns) is int
        if not (is_count and 0 <= self.seq < 1 << 63 and 0 <= self.at_ns < 1 << 63):
            shown = f"{reprlib.repr(self.seq)} and at_ns {reprlib.repr(self.at_ns)}"
            raise RecordInvalid(f"seq {shown} are not counts of up to 63 bits")


def size_bytes(value: Value) -> int:
    """Estimate the memory of a value in bytes, without iterating over lists of numbers."""
    size, left = 0, list[Any]((value,))
    for each in left:
        kind = type(each)
        if kind is str:
            size += len(each)
        elif kind in _NUMBERS:
            size += 8
        elif isinstance(each, (str, bytes, Utf8Text)):
            size += len(each)
        elif kind is dict or isinstance(each, Mapping):  # checking only the ABC is slow
            size += sum(map(len, each))
            left += each.values()
        elif not isinstance(each, (list, tuple, Sequence)):
            size += 8
        elif each and isinstance(each[0], (int, float)):
            size += 8 * len(each)
        else:
            left += each
    return size


# -- older versions --------------------------------------------------------------------------------


Upcast: TypeAlias = Callable[[Fields], Fields]
"""Converts fields to the next version; may raise `FormatError`."""

UPCASTS: Final[Mapping[str, Mapping[int, Upcast]]] = {}
"""The conversion to the next version, by kind and version."""


def check_version(kind: str, version: int) -> None:
    """Check that records of a kind and version can be read.

    `VersionUnknown`: a newer version wrote it; `FormatError`: there was never such a version.
    """
    newest = RECORD_VERSIONS.get(kind)
    if newest is None:
        raise VersionUnknown(f"a record of kind {reprlib.repr(kind)} is not known to this reader")
    if version > newest:
        raise VersionUnknown(
            f"{kind} record of version {version}: this reader knows versions 1 to {newest}"
        )
    if version < 1:
        raise FormatError(f"{kind} record of version {version}: the first version is 1")


def upcast(kind: str, version: int, fields: Fields) -> Fields:
    """Upcast a record's fields, blobs resolved; `FormatError` if invalid for that version."""
    for old in range(version, RECORD_VERSIONS[kind]):
        fields = UPCASTS[kind][old](fields)
    return fields


# -- what reading may cost -------------------------------------------------------------------------


RATIO_MAX: Final = 4096
"""Cost per byte of the file. A muted microphone costs 150 to 310, compacted 1400; speech 10."""
ALLOWANCE: Final = 64 * MIB
"""The allowance of every log of any size: five minutes of silence in one chat frame, decoded."""
RECORD_COST: Final = 8 << 10
"""Parsing a record without fields takes as long as handling this many bytes of a blob."""
VALUE_COST: Final = 64
"""The same for a JSON value; also about its size in memory."""
VALUE_MARKS: Final = b",:[{"
"""What stands before each JSON value."""


class Expansion:
    """The cost of everything read from a log so far, `spent`, in bytes.

    Args:
        size: returns the current size of the file in bytes.
        allowance: cost allowed for an empty file.
        ratio: further cost allowed per byte.
    """

    def __init__(
        self, size: Callable[[], int], *, allowance: int = ALLOWANCE, ratio: int = RATIO_MAX
    ) -> None:
        self._size: Final = size
        self._allowance: Final = allowance
        self._ratio: Final = ratio
        self._limit = allowance
        self.spent = 0

    def restart(self) -> None:
        """Count from zero, because the log is read again."""
        self.spent = 0

    def charge(self, cost: int) -> None:
        """Charge a cost in advance; `FormatError`, uncharged, if it is too much for the file."""
        if self.spent + cost > self._limit:
            self._limit = self._allowance + self._ratio * self._size()
            if self.spent + cost > self._limit:
                raise FormatError(f"the log expands to more than {self._limit} bytes")
        self.spent += cost


def header_cost(header: bytes) -> int:
    """Return the cost of parsing a record's JSON header."""
    return RECORD_COST + len(header) + VALUE_COST * count_values(header)


def count_values(header: bytes) -> int:
    """Count separators of JSON values, those in strings too: an upper bound of the values."""
    return len(header) - len(header.translate(None, VALUE_MARKS))


def check_values(header: bytes) -> None:
    """Check the number of JSON values in a header; `FormatError` if there are too many."""
    if len(header) > HEADER_VALUES_MAX and (values := count_values(header)) > HEADER_VALUES_MAX:
        raise FormatError(f"a record's header has {values} values, at most {HEADER_VALUES_MAX}")


def frame_bytes_min(cost: int) -> int:
    """Return the minimum bytes of a block's zstd frame for the block's cost."""
    return max(0, -(-cost // RATIO_MAX) - HEADER_BYTES)
