"""Header checks of WAV files.

Block size, byte rate and chunk sizes must agree with each other and with the bytes present; a WAV
that contradicts itself is a `FieldError`, with the `path` of the field. Neither samples nor chunks
after the data are read.
"""

from __future__ import annotations

import struct
from typing import Final, NoReturn

import attrs

from ..values.limits import REFERENCE_S_MAX, REFERENCE_S_MIN, WAV_BYTES_MAX
from .codec import invalid

WAV_CHUNKS_MAX: Final = 64
"""Chunks before the data; recorders write five or six."""
WAV_CHANNELS_MAX: Final = 8
WAV_RATE_HZ_MIN: Final = 8_000
WAV_RATE_HZ_MAX: Final = 192_000

_PCM: Final = 1
_FLOAT: Final = 3
_EXTENSIBLE: Final = 0xFFFE
_GUID_TAIL: Final = bytes.fromhex("000000001000800000aa00389b71")
"""The rest of the sub-format of WAVE_FORMAT_EXTENSIBLE, after the format tag."""
_BITS: Final = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}


@attrs.frozen(kw_only=True)
class WavHeader:
    """The format of a WAV file; `samples` counts each channel's."""

    channels: int
    rate_hz: int
    sample_bits: int
    is_float: bool
    samples: int


def check_wav(
    path: str,
    data: bytes,
    *,
    bytes_max: int = WAV_BYTES_MAX,
    s_min: float = REFERENCE_S_MIN,
    s_max: float = REFERENCE_S_MAX,
) -> WavHeader:
    """Check a WAV's header and its bounds: 8-192 kHz, 1-8 channels, size and duration.

    The default bounds are those of reference audio. `FieldError` if it is no such WAV.
    """
    check_bytes(path, data, bytes_max)
    header = read_wav(path, data)
    seconds = header.samples / header.rate_hz
    if not s_min <= seconds <= s_max:
        raise invalid(path, f"{seconds:.3f} s of audio, allowed is {s_min:g} to {s_max:g} s")
    return header


def read_wav(path: str, data: bytes) -> WavHeader:
    """Read the header of a WAV of any length, and compare it with the bytes present.

    `FieldError` if it is no WAV, or contradicts itself.
    """
    if len(data) < 12 or not data.startswith(b"RIFF") or data[8:12] != b"WAVE":
        raise invalid(path, f"{len(data)} bytes that are not a WAV")
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise invalid(path, f"a WAV that says {end} bytes and has {len(data)}")
    return _walk_chunks(path, data, end)


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
    """Read the format tag of a WAVE_FORMAT_EXTENSIBLE chunk."""
    if len(body) < 40:
        _fail_extensible(path)
    extra_bytes, valid_bits, _, tag = struct.unpack_from("<HHIH", body, 16)
    if extra_bytes < 22 or not 0 < valid_bits <= bits or body[26:40] != _GUID_TAIL:
        _fail_extensible(path)
    return int(tag)


def _fail_extensible(path: str) -> NoReturn:
    raise invalid(path, "a WAV with a broken extensible format")


def check_bytes(path: str, data: bytes, bytes_max: int) -> None:
    """Check a file's size; `FieldError` if it has more than `bytes_max`."""
    if len(data) > bytes_max:
        raise invalid(path, f"{len(data)} bytes, at most {bytes_max} are allowed")
