"""The sound and the pictures that stand short in a transcript: a marker in, base64 out."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import simplejpeg
import soundfile

from tests.sessions.in_memory import pcm

VIDEO_FPS = 10
SOUND_RATE_HZ = 16_000
EXTRAS = {
    "$pcm": {"$nan_at"},
    **{name: {"$before"} for name in ("$jpeg", "$png", "$broken")},
    "$wav": {"$rate_hz", "$channels", "$format", "$before"},
}
"""What may stand beside a marker."""


def make_media(marker: dict[str, Any]) -> str:
    """Make what a marker of README.md stands for.

    Args:
        marker: an object of `$` keys.

    Returns:
        base64 of the media; for `$text` the text itself.
    """
    if "$text" in marker:
        return "a" * int(marker["$text"])
    return marker.get("$before", "") + pybase64.b64encode(_bytes_of(marker)).decode()


def _bytes_of(marker: dict[str, Any]) -> bytes:
    (kind, value), *rest = marker.items()
    assert {key for key, _ in rest} <= EXTRAS.get(kind, set()), f"{list(marker)} is no marker"
    match kind:
        case "$pcm":
            return _sound(int(value), marker.get("$nan_at"))
        case "$pcm16":
            at = np.arange(int(value), dtype=np.int64)  # in integers: the same on every machine
            return (at * 300 % SOUND_RATE_HZ - SOUND_RATE_HZ // 2).astype("<i2").tobytes()
        case "$bytes":
            return bytes(int(value))
        case "$jpeg":
            return jpeg(*_size(value))
        case "$png":
            return png(*_size(value))
        case "$wav":
            rate_hz, channels = marker.get("$rate_hz", SOUND_RATE_HZ), marker.get("$channels", 1)
            return wav(float(value), rate_hz, channels, marker.get("$format", "WAV"))
        case "$video":
            return video(int(value))
        case "$broken":
            whole = _bytes_of(value)
            return whole[: len(whole) * 3 // 4]
    raise AssertionError(f"{kind} is no marker of what is sent")


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def _sound(samples: int, nan_at: int | None) -> bytes:
    data = bytearray(pcm(samples / SOUND_RATE_HZ))
    if nan_at is not None:
        struct.pack_into("<f", data, 4 * nan_at, float("nan"))
    return bytes(data)


def _picture(width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw a slope of grey, which every codec keeps."""
    rows = np.linspace(0, 255, height, dtype=np.uint8)
    return np.ascontiguousarray(np.broadcast_to(rows[:, None, None], (height, width, 3)))


@cache
def jpeg(width: int, height: int) -> bytes:
    """Make a JPEG."""
    return bytes(simplejpeg.encode_jpeg(_picture(width, height)))


@cache
def png(width: int, height: int) -> bytes:
    """Make a PNG of 8 bits RGB."""
    rows = b"".join(b"\0" + row.tobytes() for row in _picture(width, height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


@cache
def wav(
    seconds: float, rate_hz: int = SOUND_RATE_HZ, channels: int = 1, form: str = "WAV"
) -> bytes:
    """Make a WAV of 16 bits, or a sound file of another kind."""
    file = io.BytesIO()
    samples = np.resize(np.frombuffer(pcm(1.0), "<f4"), (int(seconds * rate_hz), channels))
    subtype = {"OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}.get(form, "PCM_16")
    soundfile.write(file, samples, rate_hz, format=form, subtype=subtype)
    return file.getvalue()


@cache
def video(seconds: int) -> bytes:
    """Make an MP4 of 64x48 with sound."""
    import av  # loads ffmpeg: only where a video is sent

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=VIDEO_FPS)
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        sounds = container.add_stream("aac", rate=SOUND_RATE_HZ, layout="mono")
        for number in range(seconds * VIDEO_FPS):
            frame = av.VideoFrame.from_ndarray(_picture(64, 48), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, VIDEO_FPS)
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
        samples = np.frombuffer(pcm(seconds), "<f4").reshape(1, -1)
        sound = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        sound.sample_rate, sound.pts, sound.time_base = SOUND_RATE_HZ, 0, Fraction(1, SOUND_RATE_HZ)
        container.mux(sounds.encode(sound))
        container.mux(sounds.encode())
    return file.getvalue()


def make_voices(folder: Path, names: Iterable[str]) -> Path:
    """Put a second of sound into a folder under each name, as an operator's library has it."""
    for name in names:
        (folder / f"{name}.wav").write_bytes(wav(1.0))
    return folder
