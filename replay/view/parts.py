"""The page's data: parts, in the order in which the log gives them.

A part is a name and a plain JSON value. They are small, and there may be thousands, so that a page
is written while its log is read and neither is ever whole in memory. The page puts them together:

| part | holds |
|---|---|
| `rows` | some records, for the list: `[seq, at_ns, kind, type, fields]` each |
| `sound` | a piece of a voice: where it is heard, its samples as Opus, its peaks |
| `picture` | a picture and when it was shown |
| `story` | all else, once, at the end |

Nothing in a part exceeds the bounds below, for any log; bytes are named by their length; whole
numbers that JavaScript cannot hold are text.

**Pictures** are decoded and encoded again, small enough for a page, so no bytes of a client's file
reach the browser; a repeated picture is named, not repeated; one that does not decode, or exceeds
the bounds, is listed without its image. The log has the originals.

**Sound** is placed by `runtime.measures.talk`; a gap that the jitter of a network made is
silence. A gap begins a new piece; a long stretch is cut into pieces of `PIECE_S`, so that the page
decodes only what it plays. Each begins with `lead` samples of the sound before, decoded and not
played, since a decoder needs that long to settle (RFC 7845, 4.6). The model's pieces are made once
their time has come, as queued sound may still be cut off. Samples are clipped to a loudspeaker's
range: a log may hold any finite value. Memory is bounded by the queued sound, and by `VOICE_S_MAX`
in all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np
import pybase64
import simplejpeg
import soundfile
from numpy.typing import NDArray

from protocol.values.model import SAMPLE_BYTES
from protocol.values.records import digest
from recorder.format.encoding import extract
from recorder.format.format import FRAME_KINDS, Record, Value
from runtime.measures.conversation import RATE_HZ, Voice
from runtime.measures.talk import JITTER_MS, time_of
from runtime.media.image import decode_jpeg
from runtime.media.values import MediaError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

TEXT_CHARS_MAX: Final = 4_000
"""Of one text: a system prompt, whole; the page folds it."""
ITEMS_MAX: Final = 64
"""Of one list or object: the codes of a second of speech, and some more."""
DEPTH_MAX: Final = 12
"""The deepest of our records, a conversation's start, nests seven levels."""
WHOLE_MAX: Final = 2**53
"""Beyond it JavaScript's numbers have gaps; seeds are larger."""
ROWS_A_PART: Final = 400


@attrs.frozen
class Part:
    """A piece of the page's data."""

    name: str
    value: Json


def row_of(record: Record, kept: str = "") -> Json:
    """Write a record for the list; `kept` describes the part kept of a refused message."""
    fields = {name: value for name, value in record.fields.items() if name != "type"}
    kind = record.fields.get("type")
    if record.kind in FRAME_KINDS and isinstance(frame := fields.get("frame"), str):
        pieces = (it if isinstance(it, str) else f"({len(it)} bytes)" for it in extract(frame))
        fields["frame"] = "".join(pieces)
    fields |= {"kept": kept} if kept else {}
    name = kind[:TEXT_CHARS_MAX] if isinstance(kind, str) else ""
    return [record.seq, record.at_ns, record.kind, name, plain(fields)]


def plain(value: Value, depth: int = 0) -> Json:
    """Shorten a value for a reader, as JSON that JavaScript can hold."""
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < WHOLE_MAX else f"{value:#x}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= DEPTH_MAX:
        return f"({len(value)} more inside)"
    if isinstance(value, Mapping):
        shown: dict[str, Json] = {
            _shorten(str(key)): plain(value[key], depth + 1) for key in list(value)[:ITEMS_MAX]
        }
        rest = len(value) - ITEMS_MAX
        return {**shown, "…": f"{rest} more"} if rest > 0 else shown
    items = [plain(item, depth + 1) for item in value[:ITEMS_MAX]]
    rest = len(value) - ITEMS_MAX
    return [*items, f"… {rest} more"] if rest > 0 else items


def _shorten(text: str) -> str:
    more = len(text) - TEXT_CHARS_MAX
    return f"{text[:TEXT_CHARS_MAX]}… {more} more characters" if more > 0 else text


# -- pictures --------------------------------------------------------------------------------------


SIDE_MAX: Final = 320
"""Pixels of the longer side: the size of a panel of the page, on a fine display twice as dense."""
QUALITY: Final = 70
PICTURES_BYTES_MAX: Final = 10 << 20
"""Of the page: some 900 pictures, three a second of a video session's five minutes."""


Pixels = NDArray[np.uint8]
"""RGB; shape (height, width, 3)."""


class Pictures:
    """Takes a session's pictures, in order; `count` were taken, and the page omits `left_out`."""

    def __init__(self) -> None:
        self.count = 0
        self.left_out = 0
        self._numbers: dict[str, int] = {}
        self._bytes = 0

    def take(self, at_ns: int, jpeg: bytes) -> Part:
        """Take a picture that was shown at this time."""
        name, number = digest(jpeg), self.count
        self.count += 1
        shown: dict[str, Json] = {"at_ns": at_ns, "bytes": len(jpeg)}
        if name in self._numbers:
            return Part("picture", {**shown, "same_as": self._numbers[name]})
        small = None if self._bytes > PICTURES_BYTES_MAX else shrink(jpeg)
        if small is None:
            self.left_out += 1
            return Part("picture", shown)
        self._numbers[name] = number
        self._bytes += len(small)
        return Part("picture", {**shown, "jpeg": pybase64.b64encode_as_string(small)})


def shrink(jpeg: bytes) -> bytes | None:
    """Make a small JPEG of a JPEG; None if it is damaged, or a session would not take it."""
    try:
        decode_jpeg(jpeg)
        height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
        scale = min(1.0, SIDE_MAX / max(height, width))
        small = {"height": max(1, round(height * scale)), "width": max(1, round(width * scale))}
        pixels = simplejpeg.decode_jpeg(jpeg, min_height=small["height"], min_width=small["width"])
    except (MediaError, ValueError):
        return None
    made: bytes = simplejpeg.encode_jpeg(_averaged(pixels, **small), quality=QUALITY)
    return made


def _averaged(pixels: Pixels, *, height: int, width: int) -> Pixels:
    """Scale a picture down; each pixel is the mean of those that it covers."""
    rows, columns = (
        np.arange(small) * size // small
        for small, size in zip((height, width), pixels.shape, strict=False)
    )
    sums = np.add.reduceat(pixels.astype(np.uint32), rows, axis=0)
    sums = np.add.reduceat(sums, columns, axis=1)
    covered = np.outer(np.diff(rows, append=len(pixels)), np.diff(columns, append=pixels.shape[1]))
    return (sums // covered[..., None]).astype(np.uint8)


# -- sound -----------------------------------------------------------------------------------------


PIECE_S: Final = 30
"""Decoded in some hundredths of a second, when playing comes near it."""
LEAD_MS: Final = 80
"""After a seek, by RFC 7845."""
VOICE_S_MAX: Final = 3_600
"""Six times the longest session: beyond it, sound is counted and not kept."""
PEAKS_A_SECOND: Final = 200
"""At 5 ms each a syllable still has a shape; a voice of ten minutes takes 320 KB of the page."""
BITS_A_SECOND: Final = {"user": 24_000, "model": 32_000}
"""Speech that is hard to tell from the source; 24 kHz takes a little more than 16 kHz."""
COMPLEXITY: Final = 5
"""Of 10: two thirds of the time, and no difference that could be heard in speech."""

_Samples = NDArray[np.float32]


class Track:
    """One voice, fed in the order of its sound; `left_out_s` counts after `VOICE_S_MAX`."""

    def __init__(self, voice: Voice) -> None:
        self.left_out_s = 0.0
        self._voice: Final[Voice] = voice
        self._rate_hz: Final = RATE_HZ[voice]
        self._begin = 0
        self._held: list[_Samples] = []
        self._held_samples = 0
        self._lead: _Samples = np.empty(0, np.float32)
        self._kept_samples = 0

    def take(self, begin: int, pcm: bytes) -> list[Part]:
        """Take float32 LE mono at the voice's rate, heard from this sample on.

        Returns the pieces that are complete by then.
        """
        samples = np.frombuffer(pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES], "<f4")
        if self._kept_samples + len(samples) > VOICE_S_MAX * self._rate_hz:
            self.left_out_s += len(samples) / self._rate_hz
            return []
        parts = self.flush(whole=True)
        gap = begin - self._begin - self._held_samples
        goes_on = self._held_samples or len(self._lead)
        if gap > JITTER_MS * self._rate_hz // 1000 or not goes_on:
            parts += self.flush()
            self._begin = begin
        else:
            self._hold(np.zeros(gap, np.float32))
        self._hold(np.clip(np.nan_to_num(samples), -1, 1))
        return parts

    def _hold(self, samples: _Samples) -> None:
        self._held.append(samples)
        self._held_samples += len(samples)
        self._kept_samples += len(samples)

    def flush(self, *, whole: bool = False) -> list[Part]:
        """Give the pieces of all that is held, or only those of full length."""
        size = PIECE_S * self._rate_hz
        if whole and self._held_samples < size:
            return []
        samples = np.concatenate([self._lead[:0], *self._held])
        end = len(samples) - len(samples) % size if whole else len(samples)
        parts = [self._piece(samples[at : min(at + size, end)]) for at in range(0, end, size)]
        self._held, self._held_samples = [samples[end:]], len(samples) - end
        if not whole:
            self._lead = self._lead[:0]
        return parts

    def _piece(self, samples: _Samples) -> Part:
        lead, self._lead = self._lead, samples[-self._rate_hz * LEAD_MS // 1000 :]
        begin, self._begin = self._begin, self._begin + len(samples)
        value = {
            "voice": self._voice,
            "begin_ns": time_of(self._voice, begin),
            "end_ns": time_of(self._voice, self._begin),
            "lead_s": len(lead) / self._rate_hz,
            "file": pybase64.b64encode_as_string(
                encode(np.concatenate([lead, samples]), self._voice)
            ),
            "peaks": pybase64.b64encode_as_string(peaks(samples, self._rate_hz // PEAKS_A_SECOND)),
        }
        return Part("sound", value)


def encode(samples: _Samples, voice: Voice) -> bytes:
    """Compress mono in [-1, 1] at the voice's rate: Opus in Ogg, of the same length.

    Without the extra `media` there is no Opus: then it is FLAC with 16 bits, a multiple in size.
    """
    file = io.BytesIO()
    try:
        import av  # 50 ms and 100 MB
    except ImportError:
        soundfile.write(file, samples, RATE_HZ[voice], format="FLAC", subtype="PCM_16")
        return file.getvalue()
    with av.open(file, "w", format="ogg", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libopus", rate=RATE_HZ[voice], layout="mono")
        stream.bit_rate = BITS_A_SECOND[voice]
        stream.codec_context.options = {"compression_level": str(COMPLEXITY)}
        frame = av.AudioFrame.from_ndarray(samples[None].astype("<f4"), format="flt", layout="mono")
        frame.sample_rate = RATE_HZ[voice]
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return file.getvalue()


def peaks(samples: _Samples, samples_each: int) -> bytes:
    """Find the lowest and highest of each few samples; int8 pairs, the last may cover fewer."""
    padded = np.pad(samples, (0, -len(samples) % samples_each)).reshape(-1, samples_each)
    pairs = np.stack([padded.min(axis=1), padded.max(axis=1)], axis=1)
    found: bytes = np.rint(pairs * 127).astype(np.int8).tobytes()
    return found
