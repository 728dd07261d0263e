"""Header checks of images, sound and videos: the declared format, sizes and bounds.

Only headers and sizes are read, in bounded steps, so that a bomb is refused before anything is
allocated for it. Nothing is decoded here: a decoder off the event loop checks the body, and its
result comes back as an event. Every refusal is a `FieldError` (`invalid_payload`), and `path` is
the place in the message for that error. Of a video only the size and the container's head are read.
WAV files and WebP pictures are in `protocol.wire.wav` and `protocol.wire.webp`.
"""

from __future__ import annotations

import math
import struct
from typing import Final, Literal

from ..values.limits import (
    AUDIO_S_MAX,
    AUDIO_SAMPLES_MIN,
    FRAME_JPEG_BYTES_MAX,
    FRAME_PIXELS_MAX,
    FRAME_SIDES_RATIO_MAX,
    IMAGE_BYTES_MAX,
    REFERENCE_S_MAX,
    REFERENCE_S_MIN,
    VIDEO_BYTES_MAX,
)
from ..values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from ..values.requests import AudioPart, ReferenceAudio
from .codec import check_pcm, invalid
from .wav import WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN, check_bytes, check_wav, read_wav
from .webp import is_webp, read_webp

JPEG_STEPS_MAX: Final = 1_000
"""Segments and fill bytes before the frame header; 255 of a colour profile is the most in use."""
AUDIO_BYTES_MAX: Final = 64 * 1024 * 1024
"""A conversation's sound file: 300 s of 48 kHz stereo 16-bit, headers included."""
AUDIO_S_MIN: Final = AUDIO_SAMPLES_MIN / INPUT_RATE_HZ
"""`AUDIO_SAMPLES_MIN`, at any rate."""
EBML_HEAD_BYTES_MAX: Final = 128
"""Matroska must have named itself by here; files in use have a head of 40 bytes."""

ImageKind = Literal["JPEG", "PNG", "WebP"]
Container = Literal["mp4", "matroska"]
"""Of a video: MP4 and QuickTime (ISO 14496-12) are one family, Matroska and WebM another."""

# -- images -------------------------------------------------------------------------------------


def kind_of(data: bytes) -> ImageKind | None:
    """Return an image's kind by its head; None if it is of another kind."""
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(_SOI):
        return "JPEG"
    return "WebP" if is_webp(data) else None


def check_frame(path: str, data: bytes, kind: ImageKind = "JPEG") -> tuple[int, int]:
    """Check a picture of a live session, of a declared kind; returns width and height in pixels.

    `FieldError` for another kind, or a picture bigger than a frame may be.
    """
    check_bytes(path, data, FRAME_JPEG_BYTES_MAX)
    if kind_of(data) != kind:
        raise invalid(path, f"{len(data)} bytes that are not a {kind}")
    return check_image(path, data)


def check_image(path: str, data: bytes) -> tuple[int, int]:
    """Check a conversation's JPEG, PNG or WebP; returns width and height in pixels.

    `FieldError` for another format, or a bigger image.
    """
    check_bytes(path, data, IMAGE_BYTES_MAX)
    match kind_of(data):
        case "PNG":
            return _check_sides(path, "PNG", *_png_size(path, data))
        case "JPEG":
            return _check_sides(path, "JPEG", *_frame_size(path, data))
        case "WebP":
            header = read_webp(path, data)
            return _check_sides(path, "WebP", header.width, header.height)
    raise invalid(path, f"{len(data)} bytes that are no JPEG, PNG or WebP")


def _check_sides(path: str, kind: ImageKind, width: int, height: int) -> tuple[int, int]:
    """Check a picture's sides against the limits, before anything is allocated by them."""
    size = f"a {kind} of {width} x {height} pixels"
    if not width or not height:
        raise invalid(path, size)
    if width * height > FRAME_PIXELS_MAX:
        raise invalid(path, f"{size}, at most {FRAME_PIXELS_MAX} are allowed")
    if max(width, height) > FRAME_SIDES_RATIO_MAX * min(width, height):
        raise invalid(path, f"{size}, at most {FRAME_SIDES_RATIO_MAX} to 1 is allowed")
    return width, height


# -- PNG (ISO 15948) ----------------------------------------------------------------------------

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_IHDR: Final = b"\0\0\0\x0dIHDR"
_PNG_BITS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""Bits a sample by colour type: grey, RGB, palette, grey and alpha, RGB and alpha (11.2.2)."""


def _png_size(path: str, data: bytes) -> tuple[int, int]:
    """Read the header, which must be the first chunk."""
    body = data[len(PNG_SIGNATURE) : len(PNG_SIGNATURE) + len(_IHDR) + 13]
    if len(body) < len(_IHDR) + 13 or not body.startswith(_IHDR):
        raise invalid(path, "a PNG without a whole header")
    width, height, *form = struct.unpack_from(">IIBBBBB", body, len(_IHDR))
    bits, colour, compression, filtering, interlace = form
    if bits not in _PNG_BITS.get(colour, ()) or compression or filtering or interlace > 1:
        raise invalid(path, "a PNG with a broken header")
    return int(width), int(height)


# -- JPEG (ITU T.81, Annex B) -------------------------------------------------------------------

_SOI: Final = b"\xff\xd8"
_NOT_FRAME_HEADERS: Final = frozenset({0xC4, 0xC8, 0xCC})
"""DHT, JPG and DAC: they stand among SOF0 to SOF15, but are not frame headers."""
_FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - _NOT_FRAME_HEADERS
_OUT_OF_PLACE: Final = frozenset({0x00, 0x01, *range(0xD0, 0xDB)})
"""A stuffed byte, TEM, restarts, another SOI, EOI and SOS: not before a frame header."""


def _frame_size(path: str, data: bytes) -> tuple[int, int]:
    at = len(_SOI)
    for _ in range(JPEG_STEPS_MAX):
        if at + 4 > len(data):
            raise invalid(path, "a JPEG that is truncated before its frame header")
        if data[at] != 0xFF:
            raise invalid(path, f"a JPEG without a marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte: markers may have any number of them before
            at += 1
            continue
        if marker in _OUT_OF_PLACE:
            raise invalid(path, f"a JPEG without a frame header before byte {at}")
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker in _FRAME_HEADERS:
            return _read_frame_header(path, data[at + 4 : at + 2 + length], length)
        if length < 2:
            raise invalid(path, f"a JPEG with a broken segment at byte {at}")
        at += 2 + length
    raise invalid(path, f"a JPEG without a frame header in {JPEG_STEPS_MAX} segments")


def _read_frame_header(path: str, body: bytes, length: int) -> tuple[int, int]:
    """Read precision, height, width and the count of components, 3 bytes each."""
    if len(body) < 6 or len(body) != length - 2:
        raise invalid(path, "a JPEG that is truncated in its frame header")
    _, height, width, components = struct.unpack_from(">BHHB", body)
    if not components or len(body) != 6 + 3 * components:
        raise invalid(path, "a JPEG with a broken frame header")
    return width, height


# -- audio --------------------------------------------------------------------------------------


def read_reference_audio(path: str, data: bytes) -> ReferenceAudio:
    """Read a WAV file (000) or raw float32 LE 16 kHz mono (001), told apart by the RIFF head.

    It is not decoded; raw samples are finite. `FieldError` if it is neither, or not 0.5-30 s long.
    """
    # No voice is taken for a WAV: as a sample, "RIFF" would be 12690.
    if data.startswith(b"RIFF"):
        check_wav(path, data)
        return ReferenceAudio(data=data, is_wav=True)
    samples_min = int(REFERENCE_S_MIN * INPUT_RATE_HZ)
    pcm = check_pcm(path, data, samples_min, REFERENCE_S_MAX * INPUT_RATE_HZ)
    return ReferenceAudio(data=pcm, is_wav=False)


def read_audio(path: str, data: bytes, rate_hz: int = INPUT_RATE_HZ) -> AudioPart:
    """Read a conversation's WAV file or raw float32 LE mono, told apart by the RIFF head.

    `rate_hz` is of raw samples, 8-192 kHz, and without meaning in the result for a WAV. It is not
    decoded; raw samples are finite. `FieldError` if it is neither, not 0.1-300 s long, or of
    another rate.
    """
    check_bytes(path, data, AUDIO_BYTES_MAX)
    if data.startswith(b"RIFF"):  # see `read_reference_audio`
        check_wav(path, data, bytes_max=AUDIO_BYTES_MAX, s_min=AUDIO_S_MIN, s_max=AUDIO_S_MAX)
        return AudioPart(data=data, is_wav=True)
    if not WAV_RATE_HZ_MIN <= rate_hz <= WAV_RATE_HZ_MAX:
        text = f"samples of {rate_hz} Hz, allowed is {WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX}"
        raise invalid(path, text)
    samples_min = math.ceil(AUDIO_SAMPLES_MIN * rate_hz / INPUT_RATE_HZ)
    pcm = check_pcm(path, data, samples_min, AUDIO_S_MAX * rate_hz)
    return AudioPart(data=pcm, is_wav=False, rate_hz=rate_hz)


def audio_s(part: AudioPart) -> float:
    """Return the seconds of a conversation's sound, by its header."""
    if part.is_wav:
        header = read_wav("audio", part.data)
        return header.samples / header.rate_hz
    return len(part.data) / (SAMPLE_BYTES * part.rate_hz)


# -- video --------------------------------------------------------------------------------------

_MP4_BOXES: Final = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
"""The first boxes of such files; QuickTime had no `ftyp` at first."""
_EBML: Final = b"\x1a\x45\xdf\xa3"
_DOC_TYPES: Final = (b"matroska", b"webm")


def check_video(path: str, data: bytes) -> Container:
    """Check a video's size, and return its container by its head; the content is not checked.

    `FieldError` if it is too big, or in no accepted container.
    """
    check_bytes(path, data, VIDEO_BYTES_MAX)
    container = container_of(data)
    if container is None:
        text = f"{len(data)} bytes that are no video of MP4, QuickTime, Matroska or WebM"
        raise invalid(path, text)
    return container


def container_of(data: bytes) -> Container | None:
    """Return a video's container by its head, at any size; None if it is not accepted."""
    if data[4:8] in _MP4_BOXES:
        return "mp4"
    if data.startswith(_EBML):
        head = data[:EBML_HEAD_BYTES_MAX]
        if any(name in head for name in _DOC_TYPES):
            return "matroska"
    return None
