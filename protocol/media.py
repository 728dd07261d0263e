"""Header checks of JPEG and WAV files: what they say they are, and whether they can be that.

Only headers and sizes are looked at, in bounded steps, so that a bomb is refused before anything
is allocated for it. Nothing is decoded here: whether a body is sound is found out by a decoder off
the event loop, and comes back as an event. Every refusal is a `FieldError` (`invalid_payload`).

A WAV must not lie about itself: block size, byte rate and chunk sizes have to agree with each other
and with the bytes that are there. What follows its data chunk is not looked at.
"""

from __future__ import annotations

import struct
from typing import Final, NoReturn

import attrs

from .codec import check_pcm, invalid
from .limits import (
    FRAME_JPEG_BYTES_MAX,
    FRAME_PIXELS_MAX,
    FRAME_SIDES_RATIO_MAX,
    REFERENCE_S_MAX,
    REFERENCE_S_MIN,
    WAV_BYTES_MAX,
)
from .messages import ReferenceAudio
from .model import INPUT_RATE_HZ

JPEG_STEPS_MAX: Final = 1_000
"""Segments and fill bytes before the frame header; 255 of a colour profile is the most in use."""
WAV_CHUNKS_MAX: Final = 64
"""Chunks before the data; recorders write five or six."""
WAV_CHANNELS_MAX: Final = 8
WAV_RATE_HZ_MIN: Final = 8_000
WAV_RATE_HZ_MAX: Final = 192_000

# -- JPEG (ITU T.81, Annex B) -------------------------------------------------------------------

_SOI: Final = b"\xff\xd8"
_NOT_FRAME_HEADERS: Final = frozenset({0xC4, 0xC8, 0xCC})
"""DHT, JPG and DAC: they stand among the frame headers SOF0 to SOF15, and are none."""
_FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - _NOT_FRAME_HEADERS
_OUT_OF_PLACE: Final = frozenset({0x00, 0x01, *range(0xD0, 0xDB)})
"""A stuffed byte, TEM, restarts, another SOI, EOI and SOS: not before a frame header."""


def check_jpeg(path: str, data: bytes) -> tuple[int, int]:
    """Check a JPEG's header and its bounds.

    Args:
        path: where it stands in the message, for the error.
        data: the file.

    Returns:
        Width and height in pixels.

    Raises:
        FieldError: it is no JPEG, or a bigger one than a frame may be.
    """
    if len(data) > FRAME_JPEG_BYTES_MAX:
        raise invalid(path, f"{len(data)} bytes, at most {FRAME_JPEG_BYTES_MAX} are allowed")
    if not data.startswith(_SOI):
        raise invalid(path, f"{len(data)} bytes that are not a JPEG")
    width, height = _frame_size(path, data)
    if not width or not height:
        raise invalid(path, f"a JPEG of {width} x {height} pixels")
    if width * height > FRAME_PIXELS_MAX:
        text = f"a JPEG of {width} x {height} pixels, at most {FRAME_PIXELS_MAX} are allowed"
        raise invalid(path, text)
    if max(width, height) > FRAME_SIDES_RATIO_MAX * min(width, height):
        text = (
            f"a JPEG of {width} x {height} pixels, at most {FRAME_SIDES_RATIO_MAX} to 1 is allowed"
        )
        raise invalid(path, text)
    return width, height


def _frame_size(path: str, data: bytes) -> tuple[int, int]:
    """Walk the segments up to the frame header."""
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


# -- WAV ----------------------------------------------------------------------------------------

_PCM: Final = 1
_FLOAT: Final = 3
_EXTENSIBLE: Final = 0xFFFE
_GUID_TAIL: Final = bytes.fromhex("000000001000800000aa00389b71")
"""What follows the format tag in the sub-format of WAVE_FORMAT_EXTENSIBLE."""
_BITS: Final = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}


@attrs.frozen(kw_only=True)
class WavHeader:
    """What a WAV file holds; `samples` counts each channel's."""

    channels: int
    rate_hz: int
    sample_bits: int
    is_float: bool
    samples: int


def check_wav(path: str, data: bytes) -> WavHeader:
    """Check a WAV's header and its bounds: 0.5-30 s, 8-192 kHz, 1-8 channels.

    Args:
        path: where it stands in the message, for the error.
        data: the file.

    Returns:
        What the header says.

    Raises:
        FieldError: it is no such WAV, or it lies about itself.
    """
    if len(data) > WAV_BYTES_MAX:
        raise invalid(path, f"{len(data)} bytes, at most {WAV_BYTES_MAX} are allowed")
    if len(data) < 12 or not data.startswith(b"RIFF") or data[8:12] != b"WAVE":
        raise invalid(path, f"{len(data)} bytes that are not a WAV")
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise invalid(path, f"a WAV that says {end} bytes and has {len(data)}")
    header = _walk_chunks(path, data, end)
    seconds = header.samples / header.rate_hz
    if not REFERENCE_S_MIN <= seconds <= REFERENCE_S_MAX:
        text = f"{seconds:.3f} s of audio, allowed is {REFERENCE_S_MIN:g} to {REFERENCE_S_MAX:g} s"
        raise invalid(path, text)
    return header


def _walk_chunks(path: str, data: bytes, end: int) -> WavHeader:
    """Walk the chunks up to the data, which the format must precede."""
    at = 12
    form: WavHeader | None = None
    for _ in range(WAV_CHUNKS_MAX):
        if at + 8 > end:
            raise invalid(path, "a WAV without a data chunk")
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if at + size > end:
            raise invalid(path, f"a WAV with a chunk of {size} bytes where {end - at} are left")
        if name == b"fmt ":
            form = _read_format(path, data[at : at + size])
        if name == b"data":
            return _count_samples(path, form, size)
        at += size + size % 2  # chunks are padded to an even length
    raise invalid(path, f"a WAV without a data chunk in {WAV_CHUNKS_MAX} chunks")


def _count_samples(path: str, form: WavHeader | None, size: int) -> WavHeader:
    if form is None:
        raise invalid(path, "a WAV without a format before its data")
    block_bytes = form.channels * form.sample_bits // 8
    if size % block_bytes:
        raise invalid(path, f"a WAV with {size} bytes of data in blocks of {block_bytes}")
    return attrs.evolve(form, samples=size // block_bytes)


def _read_format(path: str, body: bytes) -> WavHeader:
    """Read a format chunk; its samples are not known yet."""
    if len(body) < 16:
        raise invalid(path, f"a WAV with a format of {len(body)} bytes")
    tag, channels, rate_hz, byte_rate, block_bytes, bits = struct.unpack_from("<HHIIHH", body)
    if tag == _EXTENSIBLE:
        tag = _read_subformat(path, body, bits)
    if bits not in _BITS.get(tag, ()):
        raise invalid(path, f"a WAV of format {tag} with {bits} bits, PCM or float is needed")
    if not 1 <= channels <= WAV_CHANNELS_MAX:
        raise invalid(path, f"a WAV of {channels} channels, allowed is 1 to {WAV_CHANNELS_MAX}")
    if not WAV_RATE_HZ_MIN <= rate_hz <= WAV_RATE_HZ_MAX:
        text = f"a WAV of {rate_hz} Hz, allowed is {WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX}"
        raise invalid(path, text)
    if block_bytes != channels * bits // 8 or byte_rate != rate_hz * block_bytes:
        raise invalid(path, "a WAV whose block size or byte rate does not fit its format")
    return WavHeader(
        channels=channels, rate_hz=rate_hz, sample_bits=bits, is_float=tag == _FLOAT, samples=0
    )


def _read_subformat(path: str, body: bytes, bits: int) -> int:
    """Read the format tag out of a WAVE_FORMAT_EXTENSIBLE chunk."""
    if len(body) < 40:
        _fail_extensible(path)
    extra_bytes, valid_bits, _, tag = struct.unpack_from("<HHIH", body, 16)
    if extra_bytes < 22 or not 0 < valid_bits <= bits or body[26:40] != _GUID_TAIL:
        _fail_extensible(path)
    return int(tag)


def _fail_extensible(path: str) -> NoReturn:
    raise invalid(path, "a WAV with a broken extensible format")


# -- reference audio ----------------------------------------------------------------------------


def read_reference_audio(path: str, data: bytes) -> ReferenceAudio:
    """Tell a WAV file (000) from raw float32 LE 16 kHz mono (001) by its RIFF head, and check it.

    Args:
        path: where it stands in the message, for the error.
        data: the bytes.

    Returns:
        The audio, not decoded; raw samples are known to be finite.

    Raises:
        FieldError: it is neither, or not 0.5-30 s long.
    """
    # No voice is taken for a WAV: as a sample, "RIFF" would be 12690.
    if data.startswith(b"RIFF"):
        check_wav(path, data)
        return ReferenceAudio(data=data, is_wav=True)
    samples_min = int(REFERENCE_S_MIN * INPUT_RATE_HZ)
    pcm = check_pcm(path, data, samples_min, REFERENCE_S_MAX * INPUT_RATE_HZ)
    return ReferenceAudio(data=pcm, is_wav=False)
