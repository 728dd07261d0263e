"""Blobs: base64 taken out of text, and codecs: rearrangements that zstd compresses better.

    0 raw          as it is
    1 shuffle-4    float32 samples, first all lowest bytes, then the next, ...
    2 exact-16-bit float32 samples that are exactly s/32768 or s/32767 for 16-bit s:
                   a divisor byte, then the differences of s, low bytes before high bytes
    3 FLAC         the same samples: a divisor byte, then a FLAC file; only in compacted logs

Rules:
- Only the bytes decide the codec. A packed blob is unpacked and compared as BYTES before use, so
  -0.0 and NaN payloads fall back to another codec. Of codec 1, samples are compared.
- What is unpacked is untrusted. A file that is not FLAC with one channel and 16 bits, or claims too
  many samples, is refused before decoding. The library loads on demand: compacted logs need it.
- A media frame is nearly all base64; decoded, its PCM compresses, and repeats are recognised. A
  span is a whole quoted string, or the part after `base64,` near its start, and only if
  re-encoding gives the same characters, so `restore` is exact for ANY text. JSON is not parsed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import pybase64

from protocol.values.frames import UTF8_BYTES_MAX, Utf8Text

from .errors import FormatError
from .format import RECORD_BYTES_MAX, Piece

# -- FLAC ------------------------------------------------------------------------------------------


SAMPLES_MAX: Final = RECORD_BYTES_MAX // 4
"""Samples of float32 before packing. A few bytes of FLAC can expand to thousands."""
RATE_HZ: Final = 16_000
"""FLAC requires a rate. Blobs have none, and no reader uses it."""
LEVEL: Final = 1.0
"""The smallest files; a second of speech takes a third of a millisecond."""

Samples = npt.NDArray[np.int16]


def encode_flac(samples: Samples) -> bytes:
    """Encode samples of one channel; shape (samples,), at least one."""
    import soundfile

    file = BytesIO()
    soundfile.write(
        file, samples, RATE_HZ, format="FLAC", subtype="PCM_16", compression_level=LEVEL
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
    stored: Piece
    cut: int = 0


def pack(data: bytes) -> Packed:
    """Choose a codec and apply it; `unpack` gives exactly `data` again."""
    if len(data) >= PCM_BYTES_MIN and len(data) % 4 == 0:
        probe = _probe(data)
        if _looks_like_pcm(probe):
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


def pack_flac(packed: Piece) -> Packed | None:
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


def unpack(codec: int, stored: Piece, length: int) -> bytes:
    """Undo `pack`, to `length` bytes; `FormatError` if the codec or the lengths are wrong."""
    unpacker = _UNPACKERS.get(codec)
    data = unpacker(stored, length) if unpacker is not None else None
    if data is None or len(data) != length:
        raise FormatError(f"a blob of {length} bytes is not what codec {codec} stored")
    return data


def _probe(data: bytes) -> bytes:
    step = max(_RUN_BYTES, len(data) // _PROBE_RUNS // 4 * 4)
    starts = range(0, len(data) - _RUN_BYTES + 1, step)
    return b"".join([data[start : start + _RUN_BYTES] for start in starts])


def _looks_like_pcm(probe: bytes) -> bool:
    highest = probe[3::4]
    odd = highest.translate(None, _HIGHEST_BYTES)
    return len(highest) - len(odd) >= _PROBE_SHARE_MIN * len(highest)


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


def _shuffle(data: bytes, width: int) -> Piece:
    """Gather the bytes of each significance; narrowing words is twice as fast as a transpose."""
    if len(data) <= SMALL_BYTES_MAX:
        return np.frombuffer(data, _U1).reshape(-1, width).T.tobytes()
    planes, words = np.empty((width, len(data) // width), _U1), _U4 if width == 4 else _U2
    for at, plane in enumerate(planes):
        plane[:-1] = np.frombuffer(data, words, len(plane) - 1, at)  # their lowest bytes
        plane[-1] = data[at - width]
    return planes.reshape(-1).data


def _unpack_raw(stored: Piece, length: int) -> bytes | None:
    return bytes(stored) if len(stored) == length else None


def _unpack_shuffled(stored: Piece, length: int) -> bytes | None:
    if not length or length % 4 or len(stored) != length:
        return None
    quarters = np.frombuffer(stored, np.uint8).reshape(4, -1)
    if length <= SMALL_BYTES_MAX:
        return quarters.T.tobytes()
    words = _join_halves(quarters[2], quarters[3]).astype("<u4")
    words <<= 16
    words |= _join_halves(quarters[0], quarters[1])
    return words.tobytes()


def _unpack_exact(stored: Piece, length: int) -> bytes | None:
    if not length or length % 4 or 2 * (len(stored) - 1) != length or stored[0] >= len(_DIVISORS):
        return None
    halves = np.frombuffer(stored, np.uint8, offset=1).reshape(2, -1)
    if length <= SMALL_BYTES_MAX:
        deltas = np.frombuffer(halves.T.tobytes(), "<i2")
    else:
        deltas = _join_halves(*halves).view("<i2")
    return _as_float(np.cumsum(deltas, dtype="<i2"), _DIVISORS[stored[0]])


def _unpack_flac(stored: Piece, length: int) -> bytes | None:
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


_UNPACKERS: Final[dict[int, Callable[[Piece, int], bytes | None]]] = {
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
    """Split text into text of the same type and decoded base64 spans; `restore` undoes it."""
    if isinstance(text, str):
        return _split(text.encode("utf-8", "surrogatepass"), _to_text)
    return _split(text.data, Utf8Text)


def restore(pieces: Iterable[str | bytes]) -> str:
    """Join the pieces of `extract`."""
    return "".join(
        piece if isinstance(piece, str) else pybase64.b64encode_as_string(piece) for piece in pieces
    )


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _split(data: bytes, text_of: Callable[[bytes], SplitPiece]) -> list[SplitPiece]:
    pieces: list[SplitPiece] = []
    text_start = 0
    for start, end in _find_long_strings(data):
        blob = decode(memoryview(data)[start:end])
        if blob is not None:
            pieces += (text_of(data[text_start:start]), blob)
            text_start = end
            if len(pieces) == 2 * SPANS_MAX:
                break
    if text_start < len(data):
        pieces.append(text_of(data[text_start:]))
    return pieces


def _find_long_strings(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield long stretches between quotes that may be base64, without a data URL's start."""
    start = 0
    for _ in range(QUOTES_MAX):
        near = data.rfind(_QUOTE, start, start + SPAN_CHARS_MIN)
        end = data.find(_QUOTE, start + SPAN_CHARS_MIN) if near < 0 else near  # skips short ones
        if end < 0:
            return
        if near < 0:
            yield _after_label(data, start, end), end
        start = end + 1


def _after_label(data: bytes, start: int, end: int) -> int:
    reach = min(end, start + _DATA_URL_CHARS_MAX * UTF8_BYTES_MAX)
    label = data.find(_DATA_URL, start, reach)
    after = label + len(_DATA_URL)
    is_near = label >= 0 and len(_to_text(data[start:after])) <= _DATA_URL_CHARS_MAX
    return after if is_near else start


def decode(span: memoryview) -> bytes | None:
    """Decode canonical base64, or return None; only the last group can be non-canonical."""
    if len(span) < SPAN_CHARS_MIN or len(span) % _GROUP_CHARS:
        return None
    try:
        blob = pybase64.b64decode(span, validate=True)
    except ValueError:
        return None
    whole = (len(span) // _GROUP_CHARS - 1) * _GROUP_BYTES
    tail = pybase64.b64encode(blob[whole:])  # of 5 characters or more, were whole wrong
    return blob if tail == span[-_GROUP_CHARS:] else None
