"""Encoding records: their JSON headers and blobs, as `recorder.format.records` describes them.

Repeats of a blob come soon (a voice is sent, then prepared), so few recent ones are kept, as whole
bytes: three short probes find them and a full comparison confirms, which is cheaper than any hash
and exact. A client that sends sound in pieces of 20 ms sends fifty a second, and by themselves they
cost ten times what a second in one piece costs: such frames are joined in runs.

Most records hold numbers, words and one blob at most: their fields are written in one call.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias, cast

import attrs
import orjson

from protocol.values.effects import DetectSpeech
from protocol.values.frames import UTF8_BYTES_MAX, Utf8Text
from protocol.values.records import RECORD_NAMES

from . import format as layout
from . import records as rc
from .blobs import RAW, SMALL_BYTES_MAX, Packed, SplitPiece, decode, extract, pack
from .errors import RecordInvalid
from .expansion import RECORD_COST, VALUE_COST, count_values, header_cost

# -- repeated blobs --------------------------------------------------------------------------------


REFERENCE_BYTES_MIN: Final = 64
"""A shorter blob is stored again: a reference costs as much."""
REMEMBERED_BYTES: Final = layout.MIB
"""Kept per log: five seconds of both sides of a session, or one larger blob, such as a voice."""
_PROBE_BYTES: Final = 16
"""Taken at three places, where different PCM and JPEG files differ."""

Place: TypeAlias = tuple[int, int]
"""`(seq, index)` of a blob."""
Find: TypeAlias = Callable[[bytes, Place], Sequence[int] | None]
"""Says where a blob is stored already, of which it may be a part; else it is stored at a place."""
_Key: TypeAlias = tuple[int, bytes, bytes, bytes]


@attrs.define
class BlobMemory:
    """Recent blobs and where they are stored; of blobs with equal probes, the last."""

    bytes_max: int = REMEMBERED_BYTES
    _kept: OrderedDict[_Key, tuple[bytes, Place]] = attrs.field(factory=OrderedDict, init=False)
    _kept_bytes: int = attrs.field(default=0, init=False)

    def find_or_keep(self, blob: bytes, place: Place) -> Place | None:
        """Return where an equal blob is stored, or None and remember it at `place`."""
        if len(blob) < REFERENCE_BYTES_MIN:
            return None
        key = _probe(blob)
        found = self._kept.pop(key, None)
        if found is not None and found[0] == blob:
            self._kept[key] = found
            return found[1]
        self._kept[key] = (blob, place)
        self._kept_bytes += len(blob) if found is None else 0
        while self._kept_bytes > self.bytes_max and len(self._kept) > 1:
            _, (dropped, _) = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)
        return None


def _probe(blob: bytes) -> _Key:
    middle = len(blob) // 2
    return (
        len(blob),
        blob[:_PROBE_BYTES],
        blob[middle : middle + _PROBE_BYTES],
        blob[-_PROBE_BYTES:],
    )


# -- runs of small frames --------------------------------------------------------------------------


FRAME_CHARS_MAX: Final = 16 << 10
"""Longer frames hold more than a tenth of a second."""
RUN_BYTES_MAX: Final = 128 << 10
"""Of a run, which must fit into a block; a second and a half of float32 samples."""
RECORDS_MAX: Final = 128
"""In a run: more than a second of pieces of 20 ms, each with an effect."""
_PLAIN: Final = {"type", "frame"}
"""The fields of a frame's record that has nothing but the frame."""
_BETWEEN: Final = RECORD_NAMES[DetectSpeech]
"""The effect that may follow each small frame, and does not end a run."""


def runs(records: Iterable[rc.Record]) -> Iterator[list[rc.Record]]:
    """Join records of small frames that follow each other; all others stand by themselves."""
    run, run_bytes = list[rc.Record](), 0
    for record in records:
        fields, size, is_small = record.fields, rc.RECORD_OVERHEAD_BYTES, False
        if record.kind == "rx" and isinstance(frame := fields.get("frame"), str):
            is_small = len(frame) <= FRAME_CHARS_MAX and fields.keys() == _PLAIN
            size += len(frame)
        is_between = record.kind == "effect" and fields.get("type") == _BETWEEN
        is_full = run_bytes + size > RUN_BYTES_MAX or len(run) == RECORDS_MAX
        if run and (is_full or not (is_small or is_between)):
            yield run
            run, run_bytes = [], 0
        if is_small or (run and is_between):
            run.append(record)
            run_bytes += size
        else:
            yield [record]
    if run:
        yield run


# -- records ---------------------------------------------------------------------------------------


FRAME_BYTES_KEPT: Final = 64 << 10
"""Bytes kept of a larger frame: enough to recognise it."""
FRAME_CHARS_INLINE: Final = 64 << 10
"""Limit for all inline text of a frame; beyond it short pieces go into blobs too."""

_EXACTLY: Final = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | _EXACTLY
_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"


@attrs.define
class Framed:
    """An encoded record.

    Attributes:
        pieces: its bytes, split where their kind changes; see `recorder.format.blocks`.
        cost: of reading it, without its bytes; see `recorder.format.expansion`.
        has_samples: some pieces are PCM, packed or of 16 bits, or a picture.
    """

    pieces: list[layout.Piece]
    framed_bytes: int
    cost: int
    has_samples: bool


@attrs.define
class RecordEncoder:
    """Encodes the records of one log in order, with references to recent blobs.

    Attributes:
        frame_bytes_max: a longer frame is truncated.
        memory_bytes_max: bytes of recent blobs that are kept to be referenced.
        packs_samples: PCM is rearranged so that zstd compresses it better; False stores it as is.
    """

    frame_bytes_max: int = rc.FRAME_BYTES_MAX
    memory_bytes_max: int = REMEMBERED_BYTES
    packs_samples: bool = True
    _memory: BlobMemory = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all blobs, so that later records stand without earlier ones."""
        self._memory = BlobMemory(self.memory_bytes_max)

    def encode(self, record: rc.Record) -> Framed:
        """Encode a record; `RecordInvalid` if a value is not JSON or bytes, or it is too large."""
        find, frame, split = self._memory.find_or_keep, record.fields.get("frame"), None
        if record.kind in rc.FRAME_KINDS and frame is not None:
            chars_max = min(rc.TEXT_CHARS_INLINE, self.frame_bytes_max // UTF8_BYTES_MAX)
            split = extract(frame) if type(frame) is str and len(frame) <= chars_max else None
            if split is None or len(split) > 1:
                return self._encode(record, find, split)
        blobs: list[bytes] = []

        def blob_of(value: object) -> dict[str, int]:
            if type(value) is not bytes:
                raise TypeError
            blobs.append(value)
            return {rc.BLOB: 0}

        try:  # most hold little but numbers, words and one blob: one call writes them
            fields = orjson.dumps(record.fields, blob_of, _OPTIONS)
        except orjson.JSONEncodeError:
            return self._encode(record, find, split)
        has_more = b"null" in fields or len(fields) > rc.TEXT_CHARS_INLINE  # a NaN, a long text
        depth_max, ours = fields.count(b"{") + fields.count(b"["), fields.count(b'"$')
        if has_more or depth_max > rc.NESTING_MAX or not ours == len(blobs) <= 1:
            return self._encode(record, find, split)
        packer = _Packer(record.seq, find, self.packs_samples)
        for blob in blobs:
            packer.add(blob)
        return _framed(record, packer, fields)

    def encode_run(self, records: Sequence[rc.Record]) -> list[Framed]:
        """Encode a run of small frames (`runs`), raises as `encode`.

        The pieces of sound in them are one blob, of which each record names its part. Most frames
        have the same text around their sound, and so the same fields.
        """
        frames = [cast("str", it.fields["frame"]) for it in records if it.kind == "rx"]
        first, seq = extract(frames[0]), records[0].seq
        like = first if len(frames[0]) <= self.frame_bytes_max else ()
        split = [first, *(_split_as(like, frame) or extract(frame) for frame in frames[1:])]
        alike = _alike(split)
        starts = zip(alike, accumulate(map(len, alike), initial=0), strict=False)
        places = {id(it): (seq, 0, start, len(it)) for it, start in starts}
        find: Find = (lambda blob, _: places.get(id(blob))) if alike else self._memory.find_or_keep
        framed, fields = [self._encode(records[0], find, first, b"".join(alike))], b""
        splits = iter(split[1:])
        for record in records[1:]:
            pieces = next(splits) if record.kind == "rx" else ()
            if not pieces:
                framed.append(self.encode(record))
            elif type(pieces) is not tuple or not alike or len(pieces[1]) != len(alike[0]):
                framed.append(self._encode(record, find, pieces))
            else:
                text = {rc.TEXT: [pieces[0], 0, pieces[2]]}
                fields = fields or to_json(record, {**record.fields, "frame": text})
                header = header_json(record, [places[id(pieces[1])]], fields)
                start, cost = layout.frame_record(header, 0), header_cost(header) + len(pieces[1])
                framed.append(Framed([start], len(start), cost, False))
        return framed

    def _encode(
        self,
        record: rc.Record,
        find: Find,
        split: Sequence[SplitPiece] | None = None,
        whole: bytes = b"",
    ) -> Framed:
        """Encode any record; in a run with its `split` frame, and a blob to store."""
        fields, packer = record.fields, _Packer(record.seq, find, self.packs_samples)
        if whole:
            packer.keep(whole)
            packer.has_samples |= len(whole) > SMALL_BYTES_MAX
        frame = fields.get("frame") if record.kind in rc.FRAME_KINDS else None
        if isinstance(frame, (str, bytes, Utf8Text)):
            rest = {key: value for key, value in fields.items() if key != "frame"}
            kept, cut = _cut_frame(frame, self.frame_bytes_max)
            if cut and rc.FRAME_CUT in rest:
                raise RecordInvalid(f"record {record.seq} sets the field {rc.FRAME_CUT!r} itself")
            packed = packer.pack_mapping({**rest, rc.FRAME_CUT: cut} if cut else rest, 0)
            packed["frame"] = packer.pack_frame(kept, None if cut else split)
        else:
            packed = packer.pack_mapping(fields, 0)
        return _framed(record, packer, to_json(record, packed))


def _framed(record: rc.Record, packer: _Packer, fields: bytes) -> Framed:
    """Frame a record whose fields are JSON; `RecordInvalid` if it is too large."""
    kind, header = record.kind, header_json(record, packer.table, fields)
    values = count_values(header)
    if len(header) > layout.HEADER_BYTES_MAX or values > layout.HEADER_VALUES_MAX:
        found = f"{kind} {record.seq} has a header of {len(header)} bytes and {values} values"
        bytes_max, values_max = layout.HEADER_BYTES_MAX, layout.HEADER_VALUES_MAX
        raise RecordInvalid(f"{found}, at most {bytes_max} and {values_max}")
    packer.area[0] = start = layout.frame_record(header, packer.area_bytes)
    size, unpacked = len(start) + packer.area_bytes, packer.unpacked_bytes
    if size > layout.RECORD_BYTES_MAX:
        raise RecordInvalid(f"{kind} of {size}, at most {layout.RECORD_BYTES_MAX} bytes")
    if unpacked > (bytes_max := layout.UNPACKED_BYTES_MAX):
        raise RecordInvalid(f"{kind} unpacks to {unpacked}, at most {bytes_max} bytes")
    cost = RECORD_COST + VALUE_COST * values + len(header) + unpacked
    return Framed(packer.area, size, cost, packer.has_samples)


def _split_as(first: Sequence[SplitPiece], frame: str) -> tuple[str, bytes, str] | None:
    """Split a frame with the same short text around its sound as the first; else None."""
    if len(first) != 3 or not frame.isascii():
        return None
    head, _, tail = cast("tuple[str, bytes, str]", first)
    is_same = frame.startswith(head) and frame.endswith(tail)
    if not is_same or max(len(head), len(tail)) > rc.TEXT_CHARS_INLINE:
        return None
    sound = decode(memoryview(frame.encode())[len(head) : len(frame) - len(tail)])
    return None if sound is None else (head, sound, tail)


def _alike(split: Sequence[Sequence[SplitPiece]]) -> list[bytes]:
    """Choose the blobs of frames to be joined: those of the first one's length; none if few."""
    blobs = [piece for pieces in split for piece in pieces if isinstance(piece, bytes)]
    alike = [blob for blob in blobs if len(blob) == len(blobs[0])]
    return alike if len(alike) > 1 else []


_HEADER: Final = b'{"at_ns":%d,"blobs":%b,"fields":%b,"kind":"%b","seq":%d,"version":%d}'


def header_json(
    record: rc.Record, blobs: Sequence[Sequence[int]], fields: bytes, version: int = 0
) -> bytes:
    """Write a record's header around its fields, which are JSON already; of our version if 0."""
    kind, version = record.kind, version or rc.RECORD_VERSIONS[record.kind]
    table = orjson.dumps(blobs) if blobs else b"[]"
    return _HEADER % (record.at_ns, table, fields, kind.encode(), record.seq, version)


def to_json(record: rc.Record, fields: object) -> bytes:
    """Write packed fields in the order of their keys; `RecordInvalid` if they are not JSON."""
    try:
        return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)  # ten times faster
    except orjson.JSONEncodeError:  # an int of more than 64 bits, or invalid for `json` too
        pass
    try:
        text = json.dumps(
            fields, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        return text.encode()
    except ValueError as error:  # an int of thousands of digits, a surrogate in a key
        raise RecordInvalid(f"{record.kind} {record.seq} is not JSON: {error}") from error


def _cut_frame(
    frame: str | bytes | Utf8Text, bytes_max: int
) -> tuple[str | bytes | Utf8Text, rc.Fields | None]:
    """Truncate an oversized frame; text is measured and hashed as UTF-8."""
    is_wide = isinstance(frame, str) and not frame.isascii()
    if len(frame) * (UTF8_BYTES_MAX if is_wide else 1) <= bytes_max:
        return frame, None
    whole = frame if isinstance(frame, bytes) else _utf8_of(frame)
    if len(whole) <= bytes_max:
        return frame, None
    digest = hashlib.blake2b(whole, digest_size=16).hexdigest()
    kept = min(FRAME_BYTES_KEPT, bytes_max)
    start = _start_of(frame, kept) if isinstance(frame, Utf8Text) else frame[:kept]
    is_text = not isinstance(frame, bytes)
    return start, {"bytes": len(whole), "blake2b": digest, "is_text": is_text}


class _Packer:
    """Converts one record's values to JSON, and collects its blobs, behind room for its header."""

    def __init__(self, seq: int, find: Find, packs_samples: bool) -> None:
        self.seq, self.find, self.packs_samples = seq, find, packs_samples
        self.table: list[list[int]] = []
        self.area: list[layout.Piece] = [b""]
        self.area_bytes = self.unpacked_bytes = 0
        self.has_samples = False
        self._inline_left = FRAME_CHARS_INLINE

    def pack_frame(
        self, frame: str | bytes | Utf8Text, split: Sequence[SplitPiece] | None
    ) -> _Json:
        if isinstance(frame, bytes) or (isinstance(frame, str) and not _is_utf8(frame)):
            return self._pack(frame, 0)
        pieces = extract(frame) if split is None else split
        if len(pieces) < 2 and (short := _short_text(frame)) is not None:
            return short
        return {rc.TEXT: [self._pack_piece(piece) for piece in pieces]}

    def _pack_piece(self, piece: str | bytes | Utf8Text) -> _Json:
        if isinstance(piece, bytes):
            self.has_samples |= len(piece) > SMALL_BYTES_MAX
            return self.add(piece)
        short = _short_text(piece)
        if short is None or len(short) > self._inline_left:
            return [self.add(_utf8_of(piece))]
        self._inline_left -= len(short)
        return short

    def pack_mapping(self, value: Mapping[str, rc.Value], depth: int) -> dict[str, _Json]:
        packed: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecordInvalid(f"record {self.seq} has the key {key!r}, not text")
            name = rc.RESERVED + key if key[:1] == rc.RESERVED else key
            packed[name] = self._pack(item, depth + 1)
        return packed

    def _pack(self, value: rc.Value, depth: int) -> _Json:
        if isinstance(value, str):
            if len(value) > rc.TEXT_CHARS_INLINE:
                return {rc.TEXT: [[self.add(_utf8_of(value))]]}
            return value if _is_utf8(value) else {rc.WTF8: self.add(_utf8_of(value))}
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise RecordInvalid(f"record {self.seq} holds {value}, which JSON does not")
            return value
        if isinstance(value, bytes):
            return {rc.BLOB: self.add(value)}
        if depth > rc.NESTING_MAX:
            raise RecordInvalid(f"record {self.seq} nests deeper than {rc.NESTING_MAX}")
        if isinstance(value, (list, tuple)):
            return [self._pack(item, depth + 1) for item in value]
        if isinstance(value, (dict, Mapping)):  # checking only the ABC is slow
            return self.pack_mapping(value, depth)
        raise RecordInvalid(f"record {self.seq} holds a {type(value).__name__}")

    def add(self, blob: bytes) -> int:
        """Store a blob or a reference to it; return its index in the table."""
        index = len(self.table)
        found = self.find(blob, (self.seq, index))
        if found is not None:
            self.unpacked_bytes += len(blob)
            self.table.append(list(found))
        else:
            self.keep(blob)
        return index

    def keep(self, blob: bytes) -> None:
        """Store a blob."""
        self.unpacked_bytes += len(blob)
        packed = pack(blob) if self.packs_samples else Packed(RAW, blob)
        self.table.append([packed.codec, len(blob), len(packed.stored)])
        self.area_bytes += len(packed.stored)
        self.has_samples |= packed.codec != RAW
        if packed.cut:
            stored = memoryview(packed.stored)
            self.area += (stored[: packed.cut], stored[packed.cut :])
        else:
            self.area.append(packed.stored)


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or text.encode() != b""
    except UnicodeEncodeError:
        return False


def _start_of(text: Utf8Text, chars: int) -> str:
    return text.data[: chars * UTF8_BYTES_MAX].decode(errors="ignore")[:chars]


def _short_text(text: str | Utf8Text) -> str | None:
    """Return a text short enough for the header, or None."""
    if isinstance(text, Utf8Text):
        if len(text) > rc.TEXT_CHARS_INLINE * UTF8_BYTES_MAX:
            return None
        text = text.data.decode()
    return text if len(text) <= rc.TEXT_CHARS_INLINE else None


def _utf8_of(text: str | Utf8Text) -> bytes:
    return text.data if isinstance(text, Utf8Text) else text.encode("utf-8", "surrogatepass")
