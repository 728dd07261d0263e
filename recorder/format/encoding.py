"""Encoding records: their JSON headers and blobs, as `recorder.format.format` describes them.

Codecs are rearrangements of a blob that zstd compresses better:

    0 raw          as it is
    1 shuffle-4    float32 samples, first all lowest bytes, then the next, ...
    2 exact-16-bit float32 samples that are exactly s/32768 or s/32767 for 16-bit s:
                   a divisor byte, then the differences of s, low bytes before high bytes
    3 FLAC         the same samples: a divisor byte, then a FLAC file; only in compacted logs

Rules:
- Only the bytes decide the codec. A packed blob is unpacked and compared as BYTES before use, so
  -0.0 and NaN payloads fall back to another codec. Of codec 1, samples are compared.
- What is unpacked is untrusted. A file that is not FLAC with one channel and 16 bits, or claims too
  many samples, is refused before decoding.
- A media frame is nearly all base64; decoded, its PCM compresses, and repeats are recognised. A
  span is a whole quoted string, or the part after `base64,` near its start, and only if
  re-encoding gives the same characters, so `restore` is exact for ANY text. JSON is not parsed.
- Repeats of a blob come soon (a voice is sent, then prepared), so few recent ones are kept, as
  whole bytes: three short probes find them and a full comparison confirms, which is cheaper than
  any hash and exact.
- Pieces of 20 ms are fifty a second, and would cost ten times what a second in one piece costs:
  such frames are joined in runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from typing import Any, Final, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from protocol.values.effects import DetectSpeech
from protocol.values.frames import UTF8_BYTES_MAX, Utf8Text
from protocol.values.records import RECORD_NAMES

from . import format as layout

# -- FLAC ------------------------------------------------------------------------------------------


SAMPLES_MAX: Final = layout.RECORD_BYTES_MAX // 4
"""Samples of float32 before packing. A few bytes of FLAC can expand to thousands."""
RATE_HZ: Final = 16_000
"""FLAC requires a rate. Blobs have none, and no reader uses it."""
FLAC_LEVEL: Final = 1.0
"""The smallest files; a second of speech takes a third of a millisecond."""

Samples = npt.NDArray[np.int16]


def encode_flac(samples: Samples) -> bytes:
    """Encode samples of one channel; shape (samples,), at least one."""
    import soundfile

    file = BytesIO()
    soundfile.write(
        file, samples, RATE_HZ, format="FLAC", subtype="PCM_16", compression_level=FLAC_LEVEL
    )
    return file.getvalue()


def decode_flac(data: bytes, samples: int) -> Samples | None:
    """Decode a file; None unless it claims exactly `samples` (checked first) and is valid."""
    import soundfile

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            kind = (file.format, file.subtype, file.channels)
            if kind != ("FLAC", "PCM_16", 1) or not file.frames == samples <= SAMPLES_MAX:
                return None
            found: Samples = file.read(samples, dtype="int16")
            return found if len(found) == samples > 0 else None
    except (soundfile.SoundFileError, OSError, ValueError):
        return None


# -- codecs ----------------------------------------------------------------------------------------


RAW: Final = 0
SHUFFLE_4: Final = 1
EXACT_16: Final = 2
FLAC: Final = 3

PCM_BYTES_MIN: Final = 256
"""Fewer than 64 samples save nothing, and are too few to recognise."""
_PROBE_RUNS: Final = 16
_RUN_BYTES: Final = 64
"""Of random bytes, one in six looks like PCM, so 256 samples are read, in runs of a cache line."""
_CHECKED_EVERY: Final = 509
"""After shuffling many, one sample of so many is compared: all would take longer than that."""
_PROBE_SHARE_MIN: Final = 0.9
_EXPONENTS: Final = range(90, 132)
"""2**-37 to 2**5: dither and fades stay above it, and clipping PCM overshoots 1.0 by less."""
_HIGHEST_BYTES: Final = bytes(
    sign | exponent >> 1 for sign in (0, 0x80) for exponent in (0, *_EXPONENTS[::2])
)
"""The highest bytes of such samples and zero: sign, and exponent without its last bit."""
_DIVISORS: Final = (32768.0, 32767.0)
"""The two conventions for converting 16-bit samples to float; the divisor byte is the index."""
SMALL_BYTES_MAX: Final = 4 << 10
"""64 ms of samples: here a transpose takes less than numpy's calls for anything faster."""
_FIRSTS: Final = struct.Struct(f"<f{_RUN_BYTES - 4}x")
"""The first sample of each run of a probe."""
_NEAR_WHOLE: Final = 0.5 - 1 / 256
"""As float32, a 16-bit value is off by 2**-9 at most; of other samples, 2 in 256 come as close."""

_Bytes = npt.NDArray[np.uint8]
_U1, _U2, _U4 = np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4")


@attrs.frozen
class Packed:
    """A blob as it is stored.

    Attributes:
        cut: where in `stored` the samples' highest bytes start, which compress unlike the rest; 0
            if there are none.
    """

    codec: int
    stored: layout.Piece
    cut: int = 0


def pack(data: bytes) -> Packed:
    """Choose a codec and apply it; `unpack` gives exactly `data` again."""
    if len(data) >= PCM_BYTES_MIN and len(data) % 4 == 0:
        probe = _probe(data)
        if probe:
            cut = cut_of(SHUFFLE_4, len(data))
            packed = _pack_exact(data, probe) or Packed(SHUFFLE_4, _shuffle(data, 4), cut)
            stored, known = packed.stored, data
            if packed.codec == SHUFFLE_4:  # it only moves bytes, so some samples tell
                every = 1 if len(data) <= SMALL_BYTES_MAX else _CHECKED_EVERY
                stored = np.frombuffer(stored, _U1).reshape(4, -1)[:, ::every].tobytes()
                known = np.frombuffer(data, _U4)[::every].tobytes()
            if unpack(packed.codec, stored, len(known)) == known:
                return packed
    return Packed(RAW, data)


def pack_flac(packed: layout.Piece) -> Packed | None:
    """Repack `packed`, a blob of codec 2, as FLAC; None where the samples would not be the same."""
    data = _unpack_exact(packed, 2 * (len(packed) - 1))
    values = None if data is None else _as_sixteen_bit(data, _DIVISORS[packed[0]])
    if values is None:
        return None
    stored = bytes([packed[0]]) + encode_flac(values)
    return Packed(FLAC, stored) if _unpack_flac(stored, 4 * len(values)) == data else None


def cut_of(codec: int, stored_len: int) -> int:
    """Return where a stored blob's highest sample bytes start; 0 if it has none."""
    if codec == SHUFFLE_4:
        return stored_len // 4 * 3
    return 1 + (stored_len - 1) // 2 if codec == EXACT_16 else 0


def unpack(codec: int, stored: layout.Piece, length: int) -> bytes:
    """Undo `pack`, to `length` bytes; `FormatError` if the codec or the lengths are wrong."""
    unpacker = _UNPACKERS.get(codec)
    data = unpacker(stored, length) if unpacker is not None else None
    if data is None or len(data) != length:
        raise layout.FormatError(f"a blob of {length} bytes is not what codec {codec} stored")
    return data


def _probe(data: bytes) -> bytes:
    """Take runs of a blob that looks like PCM; empty for another."""
    step = max(_RUN_BYTES, len(data) // _PROBE_RUNS // 4 * 4)
    starts = range(0, len(data) - _RUN_BYTES + 1, step)
    probe = b"".join([data[start : start + _RUN_BYTES] for start in starts])
    highest = probe[3::4]
    odd = highest.translate(None, _HIGHEST_BYTES)
    return probe if len(highest) - len(odd) >= _PROBE_SHARE_MIN * len(highest) else b""


def _pack_exact(data: bytes, probe: bytes) -> Packed | None:
    for index, divisor in enumerate(_DIVISORS):
        values = _as_sixteen_bit(data, divisor) if _is_near_whole(probe, divisor) else None
        if values is not None:
            deltas = values.copy()
            deltas[1:] -= values[:-1]
            stored = bytes([index]) + _shuffle(deltas.tobytes(), 2)
            return Packed(EXACT_16, stored, cut=cut_of(EXACT_16, len(stored)))
    return None


def _is_near_whole(probe: bytes, divisor: float) -> bool:
    """Whether the first sample of each run may be 16-bit; most others fail within microseconds."""
    # A generator in `all` would take twice as long.
    for (sample,) in _FIRSTS.iter_unpack(probe):
        if not abs(sample * divisor % 1 - 0.5) > _NEAR_WHOLE:  # NaN too
            return False
    return True


def _as_sixteen_bit(data: bytes, divisor: float) -> npt.NDArray[np.int16] | None:
    samples = np.frombuffer(data, "<f4")
    with np.errstate(all="ignore"):  # NaN and huge values cast to anything; the comparison judges
        values: npt.NDArray[np.int16] = np.rint(samples * np.float32(divisor)).astype("<i2")
    if _as_float(values, divisor) != data:
        return None
    return values


def _as_float(values: npt.NDArray[np.int16], divisor: float) -> bytes:
    return (values.astype("<f4") / np.float32(divisor)).tobytes()


def _shuffle(data: bytes, width: int) -> layout.Piece:
    """Gather the bytes of each significance; narrowing words is twice as fast as a transpose."""
    if len(data) <= SMALL_BYTES_MAX:
        return np.frombuffer(data, _U1).reshape(-1, width).T.tobytes()
    planes, words = np.empty((width, len(data) // width), _U1), _U4 if width == 4 else _U2
    for at, plane in enumerate(planes):
        plane[:-1] = np.frombuffer(data, words, len(plane) - 1, at)  # their lowest bytes
        plane[-1] = data[at - width]
    return planes.reshape(-1).data


def _unpack_raw(stored: layout.Piece, length: int) -> bytes | None:
    return bytes(stored) if len(stored) == length else None


def _unpack_shuffled(stored: layout.Piece, length: int) -> bytes | None:
    if not length or length % 4 or len(stored) != length:
        return None
    quarters = np.frombuffer(stored, np.uint8).reshape(4, -1)
    if length <= SMALL_BYTES_MAX:
        return quarters.T.tobytes()
    words = _join_halves(quarters[2], quarters[3]).astype("<u4")
    words <<= 16
    words |= _join_halves(quarters[0], quarters[1])
    return words.tobytes()


def _unpack_exact(stored: layout.Piece, length: int) -> bytes | None:
    if not length or length % 4 or 2 * (len(stored) - 1) != length or stored[0] >= len(_DIVISORS):
        return None
    halves = np.frombuffer(stored, np.uint8, offset=1).reshape(2, -1)
    if length <= SMALL_BYTES_MAX:
        deltas = np.frombuffer(halves.T.tobytes(), "<i2")
    else:
        deltas = _join_halves(*halves).view("<i2")
    return _as_float(np.cumsum(deltas, dtype="<i2"), _DIVISORS[stored[0]])


def _unpack_flac(stored: layout.Piece, length: int) -> bytes | None:
    if length % 4 or len(stored) < 2 or stored[0] >= len(_DIVISORS):
        return None
    values = decode_flac(bytes(stored[1:]), length // 4)
    return None if values is None else _as_float(values, _DIVISORS[stored[0]])


def _join_halves(low: _Bytes, high: _Bytes) -> npt.NDArray[np.uint16]:
    """Make words from byte halves; shifting takes two thirds of the time of strided stores."""
    words: npt.NDArray[np.uint16] = high.astype("<u2")
    words <<= 8
    words |= low
    return words


_UNPACKERS: Final[dict[int, Callable[[layout.Piece, int], bytes | None]]] = {
    RAW: _unpack_raw,
    SHUFFLE_4: _unpack_shuffled,
    EXACT_16: _unpack_exact,
    FLAC: _unpack_flac,
}


# -- base64 in text --------------------------------------------------------------------------------


SPAN_CHARS_MIN: Final = 64
"""Shorter strings are ids and words; a reference would cost what it saves."""
QUOTES_MAX: Final = 1 << 16
"""Steps of the search for them per frame: a frame of only quotes must not hold up the recorder."""
SPANS_MAX: Final = 4096
"""Spans per frame, more than a conversation's media; each lengthens the record's header."""
_GROUP_CHARS: Final = 4
_GROUP_BYTES: Final = 3
"""Base64 groups: all but the last decode to exactly three bytes."""
_QUOTE: Final = b'"'
_DATA_URL: Final = b"base64,"
_DATA_URL_CHARS_MAX: Final = 128
"""Where `base64,` must end: the media type before it is short."""

SplitPiece = str | Utf8Text | bytes
"""Text as it is, or the decoded bytes of a base64 span."""


def extract(text: str | Utf8Text) -> list[SplitPiece]:
    """Split text into text of the same type and decoded base64 spans; `restore` undoes it.

    A span is a long stretch between quotes, without a data URL's start.
    """
    is_text = isinstance(text, str)
    data = _utf8_of(text)
    pieces: list[SplitPiece] = []
    text_start = start = 0
    for _ in range(QUOTES_MAX):
        near = data.rfind(_QUOTE, start, start + SPAN_CHARS_MIN)
        if near >= 0:  # skips short ones
            start = near + 1
            continue
        end = data.find(_QUOTE, start + SPAN_CHARS_MIN)
        if end < 0:
            break
        span_start = _after_label(data, start, end)
        blob = decode_base64(memoryview(data)[span_start:end])
        if blob is not None:
            rest = data[text_start:span_start]
            pieces += (rest.decode("utf-8", "surrogatepass") if is_text else Utf8Text(rest), blob)
            text_start = end
            if len(pieces) == 2 * SPANS_MAX:
                break
        start = end + 1
    if text_start < len(data):
        rest = data[text_start:]
        pieces.append(rest.decode("utf-8", "surrogatepass") if is_text else Utf8Text(rest))
    return pieces


def restore(pieces: Iterable[str | bytes]) -> str:
    """Join the pieces of `extract`."""
    return "".join(
        piece if isinstance(piece, str) else pybase64.b64encode_as_string(piece) for piece in pieces
    )


def _after_label(data: bytes, start: int, end: int) -> int:
    reach = min(end, start + _DATA_URL_CHARS_MAX * UTF8_BYTES_MAX)
    label = data.find(_DATA_URL, start, reach)
    after = label + len(_DATA_URL)
    chars = len(data[start:after].decode("utf-8", "surrogatepass")) if label >= 0 else 0
    return after if 0 < chars <= _DATA_URL_CHARS_MAX else start


def decode_base64(span: bytes | memoryview) -> bytes | None:
    """Decode canonical base64, or return None; only the last group can be non-canonical."""
    if len(span) < SPAN_CHARS_MIN or len(span) % _GROUP_CHARS:
        return None
    try:
        blob = pybase64.b64decode(span, validate=True)
    except ValueError:
        return None
    whole = (len(span) // _GROUP_CHARS - 1) * _GROUP_BYTES
    if len(blob) == whole + _GROUP_BYTES:
        return blob
    tail = pybase64.b64encode(blob[whole:])  # of 5 characters or more, were whole wrong
    return blob if tail == span[-_GROUP_CHARS:] else None


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


@attrs.define
class BlobMemory:
    """Recent blobs and where they are stored; of blobs with equal probes, the last."""

    bytes_max: int = REMEMBERED_BYTES
    _kept: OrderedDict[object, tuple[bytes, Place]] = attrs.field(factory=OrderedDict, init=False)
    _kept_bytes: int = attrs.field(default=0, init=False)

    def find_or_keep(self, blob: bytes, place: Place) -> Place | None:
        """Return where an equal blob is stored, or None and remember it at `place`."""
        if len(blob) < REFERENCE_BYTES_MIN:
            return None
        size, middle = _PROBE_BYTES, len(blob) // 2
        key = len(blob), blob[:size], blob[middle : middle + size], blob[-size:]
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


def runs(records: Iterable[layout.Record]) -> Iterator[list[layout.Record]]:
    """Join records of small frames that follow each other; all others stand by themselves."""
    run, run_bytes = list[layout.Record](), 0
    for record in records:
        kind, fields, is_small = record.kind, record.fields, False
        size = layout.RECORD_OVERHEAD_BYTES
        if kind == "rx" and isinstance(frame := fields.get("frame"), str):
            is_small = len(frame) <= FRAME_CHARS_MAX and fields.keys() == _PLAIN
            size += len(frame)
        is_between = kind == "effect" and fields.get("type") == _BETWEEN
        is_full = run_bytes + size > RUN_BYTES_MAX or len(run) == RECORDS_MAX
        if run and (is_full or not (is_small or is_between)):
            yield run
            run, run_bytes = [], 0
        if run or is_small:
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
        pieces: its bytes, split where their kind changes; see `recorder.write.logfile`.
        cost: of reading it, without its bytes; see `Expansion`.
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

    frame_bytes_max: int = layout.FRAME_BYTES_MAX
    memory_bytes_max: int = REMEMBERED_BYTES
    packs_samples: bool = True
    _memory: BlobMemory = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all blobs, so that later records stand without earlier ones."""
        self._memory = BlobMemory(self.memory_bytes_max)

    def encode(
        self,
        record: layout.Record,
        find: Find | None = None,
        split: Sequence[SplitPiece] = (),
        whole: bytes = b"",
    ) -> Framed:
        """Encode a record; `RecordInvalid` if a value is not JSON or bytes, or it is too large.

        Of a record in a run: `find` knows its blobs, `split` is its frame, `whole` a blob to store.
        """
        find, fields, parts = find or self._memory.find_or_keep, record.fields, list[bytes]()
        frame = fields.get("frame") if record.kind in layout.FRAME_KINDS else None
        if frame is not None:
            if type(frame) is not str or len(frame) > self.frame_bytes_max // UTF8_BYTES_MAX:
                return self._encode(record, find, split, whole)
            split = split or extract(frame)
            if len(split) > 1:
                texts = list[layout.Value]()
                for piece in split:
                    if isinstance(piece, bytes):
                        texts.append(len(parts) + bool(whole))
                        parts.append(piece)
                    else:
                        texts.append(cast("str", piece))
                fields = {**fields, "frame": {layout.TEXT: texts}}
        blobs: list[bytes] = []

        def blob_of(value: object) -> dict[str, int]:
            if type(value) is not bytes:
                raise TypeError
            blobs.append(value)
            return {layout.BLOB: int(bool(whole))}

        try:  # most hold little but numbers, words and one blob: one call writes them
            text = orjson.dumps(fields, blob_of, _OPTIONS)
        except orjson.JSONEncodeError:
            return self._encode(record, find, split, whole)
        has_more = b"null" in text or len(text) > layout.TEXT_CHARS_INLINE  # a NaN, a long text
        depth_max, ours = text.count(b"{") + text.count(b"["), text.count(b'"$')
        is_simple = ours == len(blobs) + bool(parts) <= 1
        if has_more or depth_max > layout.NESTING_MAX or not is_simple:
            return self._encode(record, find, split, whole)
        if not (parts or blobs or whole):
            return _framed(record, text)
        packer = _Packer(record.seq, find, self.packs_samples, whole)
        for blob in parts or blobs:
            packer.add(blob)
        packer.has_samples |= any(len(blob) > SMALL_BYTES_MAX for blob in parts)
        return _framed(record, text, packer)

    def encode_run(self, records: Sequence[layout.Record]) -> list[Framed]:
        """Encode a run of small frames (`runs`), raises as `encode`.

        The pieces of sound in them are one blob, of which each record names its part. Most frames
        have the same text around their sound, and so the same fields.
        """
        frames = [cast("str", it.fields["frame"]) for it in records if it.kind == "rx"]
        first, seq = extract(frames[0]), records[0].seq
        like = first if len(frames[0]) <= self.frame_bytes_max else ()
        split = [first, *[_split_as(like, frame) or extract(frame) for frame in frames[1:]]]
        alike = _alike(split)
        starts = zip(alike, accumulate(map(len, alike), initial=0), strict=False)
        places = {id(it): (seq, 0, start, len(it)) for it, start in starts}
        find: Find = (lambda blob, _: places.get(id(blob))) if alike else self._memory.find_or_keep
        framed = [self.encode(records[0], find=find, split=first, whole=b"".join(alike))]
        splits, header_of, cost = iter(split[1:]), b"", 0
        for record in records[1:]:
            pieces = next(splits) if record.kind == "rx" else ()
            if not pieces:
                framed.append(self.encode(record))
            elif type(pieces) is not tuple or not alike or len(pieces[1]) != len(alike[0]):
                framed.append(self.encode(record, find=find, split=pieces))
            else:
                place = places[id(pieces[1])]
                if not header_of:
                    text = {layout.TEXT: [pieces[0], 0, pieces[2]]}
                    fields = to_json(record, {**record.fields, "frame": text})
                    header_of = _PART_HEADER % (seq, place[3], fields.replace(b"%", b"%%"))
                    cost = layout.header_cost(header_of) - len(header_of) + len(pieces[1])
                header = header_of % (record.at_ns, place[2], record.seq)
                start = layout.FRAMING.pack(len(header), 0) + header
                framed.append(Framed([start], len(start), cost + len(header), False))
        return framed

    def _encode(
        self, record: layout.Record, find: Find, split: Sequence[SplitPiece], whole: bytes
    ) -> Framed:
        """Encode any record, value by value; the arguments are those of `encode`."""
        fields, packer = record.fields, _Packer(record.seq, find, self.packs_samples, whole)
        frame = fields.get("frame") if record.kind in layout.FRAME_KINDS else None
        if isinstance(frame, (str, bytes, Utf8Text)):
            rest = {key: value for key, value in fields.items() if key != "frame"}
            kept, cut = _cut_frame(frame, self.frame_bytes_max)
            if cut and layout.FRAME_CUT in rest:
                name = layout.FRAME_CUT
                raise layout.RecordInvalid(f"record {record.seq} sets the field {name!r} itself")
            packed = packer.pack_mapping({**rest, layout.FRAME_CUT: cut} if cut else rest, 0)
            packed["frame"] = packer.pack_frame(kept, () if cut else split)
        else:
            packed = packer.pack_mapping(fields, 0)
        return _framed(record, to_json(record, packed), packer)


HEADER: Final = b'{"at_ns":%d,"blobs":%b,"fields":%b,"kind":"%b","seq":%d,"version":%d}'
"""A record's header around its fields, which are JSON already."""
_PART_HEADER: Final = (
    b'{"at_ns":%%%%d,"blobs":[[%%d,0,%%%%d,%%d]],"fields":%%b,"kind":"rx","seq":%%%%d,"version":%d}'
    % layout.RECORD_VERSIONS["rx"]
)
"""That of a frame in a run, whose time, start in the blob and `seq` are still to be filled in."""


def _framed(record: layout.Record, fields: bytes, packer: _Packer | None = None) -> Framed:
    """Frame a record whose fields are JSON; `RecordInvalid` if it is too large."""
    kind, table, area_bytes, unpacked = record.kind, b"[]", 0, 0
    if packer is not None:
        table, area_bytes = orjson.dumps(packer.table), packer.area_bytes
        unpacked = packer.unpacked_bytes
    version = layout.RECORD_VERSIONS[kind]
    header = HEADER % (record.at_ns, table, fields, kind.encode(), record.seq, version)
    header_bytes = len(header)
    values = header_bytes - len(header.translate(None, layout.VALUE_MARKS))
    if header_bytes > layout.HEADER_BYTES_MAX or values > layout.HEADER_VALUES_MAX:
        found = f"{kind} {record.seq} has a header of {header_bytes} bytes and {values} values"
        bytes_max, values_max = layout.HEADER_BYTES_MAX, layout.HEADER_VALUES_MAX
        raise layout.RecordInvalid(f"{found}, at most {bytes_max} and {values_max}")
    start = layout.FRAMING.pack(header_bytes, area_bytes) + header
    cost = layout.RECORD_COST + layout.VALUE_COST * values + header_bytes + unpacked
    if packer is None:
        return Framed([start], len(start), cost, False)
    size, packer.area[0] = len(start) + area_bytes, start
    if size > layout.RECORD_BYTES_MAX:
        raise layout.RecordInvalid(f"{kind} of {size}, at most {layout.RECORD_BYTES_MAX} bytes")
    if unpacked > (bytes_max := layout.UNPACKED_BYTES_MAX):
        raise layout.RecordInvalid(f"{kind} unpacks to {unpacked}, at most {bytes_max} bytes")
    return Framed(packer.area, size, cost, packer.has_samples)


def _split_as(first: Sequence[SplitPiece], frame: str) -> tuple[str, bytes, str] | None:
    """Split a frame with the same short text around its sound as the first; else None."""
    if len(first) != 3 or not frame.isascii():
        return None
    head, _, tail = cast("tuple[str, bytes, str]", first)
    is_same = frame.startswith(head) and frame.endswith(tail)
    if not is_same or max(len(head), len(tail)) > layout.TEXT_CHARS_INLINE:
        return None
    sound = decode_base64(frame[len(head) : len(frame) - len(tail)].encode())
    return None if sound is None else (head, sound, tail)


def _alike(split: Sequence[Sequence[SplitPiece]]) -> list[bytes]:
    """Choose the blobs of frames to be joined: those of the first one's length; none if few."""
    blobs = [piece for pieces in split for piece in pieces if isinstance(piece, bytes)]
    alike = [blob for blob in blobs if len(blob) == len(blobs[0])]
    return alike if len(alike) > 1 else []


def to_json(record: layout.Record, fields: object) -> bytes:
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
        raise layout.RecordInvalid(f"{record.kind} {record.seq} is not JSON: {error}") from error


def _cut_frame(
    frame: str | bytes | Utf8Text, bytes_max: int
) -> tuple[str | bytes | Utf8Text, layout.Fields | None]:
    """Truncate an oversized frame; text is measured and hashed as UTF-8."""
    is_wide = isinstance(frame, str) and not frame.isascii()
    if len(frame) * (UTF8_BYTES_MAX if is_wide else 1) <= bytes_max:
        return frame, None
    whole = frame if isinstance(frame, bytes) else _utf8_of(frame)
    if len(whole) <= bytes_max:
        return frame, None
    digest = hashlib.blake2b(whole, digest_size=16).hexdigest()
    kept = min(FRAME_BYTES_KEPT, bytes_max)
    if isinstance(frame, Utf8Text):
        start: str | bytes = frame.data[: kept * UTF8_BYTES_MAX].decode(errors="ignore")[:kept]
    else:
        start = frame[:kept]
    is_text = not isinstance(frame, bytes)
    return start, {"bytes": len(whole), "blake2b": digest, "is_text": is_text}


class _Packer:
    """Converts one record's values to JSON, and collects its blobs, behind room for its header."""

    def __init__(self, seq: int, find: Find, packs_samples: bool, whole: bytes) -> None:
        self.seq, self.find, self.packs_samples = seq, find, packs_samples
        self.table: list[list[int]] = []
        self.area: list[layout.Piece] = [b""]
        self.area_bytes = self.unpacked_bytes = 0
        self.has_samples = False
        self._inline_left = FRAME_CHARS_INLINE
        if whole:
            self.keep(whole)
            self.has_samples |= len(whole) > SMALL_BYTES_MAX

    def pack_frame(self, frame: str | bytes | Utf8Text, split: Sequence[SplitPiece]) -> _Json:
        if isinstance(frame, bytes) or (isinstance(frame, str) and not _is_utf8(frame)):
            return self._pack(frame, 0)
        pieces = split or extract(frame)
        if len(pieces) < 2 and (short := _short_text(frame)) is not None:
            return short
        return {layout.TEXT: [self._pack_piece(piece) for piece in pieces]}

    def _pack_piece(self, piece: str | bytes | Utf8Text) -> _Json:
        if isinstance(piece, bytes):
            self.has_samples |= len(piece) > SMALL_BYTES_MAX
            return self.add(piece)
        short = _short_text(piece)
        if short is None or len(short) > self._inline_left:
            return [self.add(_utf8_of(piece))]
        self._inline_left -= len(short)
        return short

    def pack_mapping(self, value: Mapping[str, layout.Value], depth: int) -> dict[str, _Json]:
        packed: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise layout.RecordInvalid(f"record {self.seq} has the key {key!r}, not text")
            name = layout.RESERVED + key if key[:1] == layout.RESERVED else key
            packed[name] = self._pack(item, depth + 1)
        return packed

    def _pack(self, value: layout.Value, depth: int) -> _Json:
        if isinstance(value, str):
            if len(value) > layout.TEXT_CHARS_INLINE:
                return {layout.TEXT: [[self.add(_utf8_of(value))]]}
            return value if _is_utf8(value) else {layout.WTF8: self.add(_utf8_of(value))}
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, float):
            if not math.isfinite(value):
                raise layout.RecordInvalid(f"record {self.seq} holds {value}, which JSON does not")
            return value
        if isinstance(value, bytes):
            return {layout.BLOB: self.add(value)}
        if depth > layout.NESTING_MAX:
            raise layout.RecordInvalid(f"record {self.seq} nests deeper than {layout.NESTING_MAX}")
        if isinstance(value, (list, tuple)):
            return [self._pack(item, depth + 1) for item in value]
        if isinstance(value, (dict, Mapping)):  # checking only the ABC is slow
            return self.pack_mapping(value, depth)
        raise layout.RecordInvalid(f"record {self.seq} holds a {type(value).__name__}")

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


def _short_text(text: str | Utf8Text) -> str | None:
    """Return a text short enough for the header, or None."""
    if isinstance(text, Utf8Text):
        if len(text) > layout.TEXT_CHARS_INLINE * UTF8_BYTES_MAX:
            return None
        text = text.data.decode()
    return text if len(text) <= layout.TEXT_CHARS_INLINE else None


def _utf8_of(text: str | Utf8Text) -> bytes:
    return text.data if isinstance(text, Utf8Text) else text.encode("utf-8", "surrogatepass")
