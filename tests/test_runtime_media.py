"""Media: damaged or oversized files are refused in words for the client; good ones decode."""

from __future__ import annotations

import io
import struct
import threading
from typing import Any

import anyio
import numpy as np
import pytest
import simplejpeg
import soundfile

from protocol.limits import FRAME_JPEG_BYTES_MAX, WAV_BYTES_MAX
from runtime import media
from runtime.media import JPEG_SCANS_MAX, WORKERS_MAX, MediaError, decode_jpeg, decode_wav


def make_jpeg(height: int = 96, width: int = 128) -> bytes:
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows * 7 % 256, columns * 5 % 256, (rows * columns) % 256], axis=-1)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image.astype(np.uint8))))


def make_wav(samples: Any, rate_hz: int = 16_000, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples), rate_hz, **{"format": "WAV", **options})
    return file.getvalue()


def silence(seconds: float, rate_hz: int = 16_000) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(int(seconds * rate_hz), np.float32)


def reason(data: bytes, *, wav: bool) -> str:
    with pytest.raises(MediaError) as refused:
        (decode_wav if wav else decode_jpeg)(data)
    assert str(refused.value) == refused.value.reason
    return refused.value.reason


@pytest.mark.anyio
async def test_decodes_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session on the server would stand still while one frame decodes."""
    threads: set[int] = set()

    def note(data: bytes) -> bytes:
        threads.add(threading.get_ident())
        return decode_jpeg(data)

    monkeypatch.setattr(media, "decode_jpeg", note)
    assert await media.decode("jpeg", make_jpeg()) == b""
    assert threads
    assert threading.get_ident() not in threads
    assert await media.decode("wav", make_wav(silence(1))) == bytes(64_000)


@pytest.mark.anyio
async def test_bounds_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of frames would take every core from the model."""
    lock, full = threading.Lock(), threading.Barrier(WORKERS_MAX)
    running = most = 0

    def slow(_: bytes) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(timeout=10)  # Passes only in groups of `WORKERS_MAX`.
        with lock:
            running -= 1
        return b""

    monkeypatch.setattr(media, "decode_wav", slow)
    async with anyio.create_task_group() as tasks:
        for _ in range(3 * WORKERS_MAX):
            tasks.start_soon(media.decode, "wav", b"")
    assert most == WORKERS_MAX


@pytest.mark.anyio
async def test_tells_what_is_wrong() -> None:
    """A client would lose its session, or be shown a library's error, over one bad frame."""
    with pytest.raises(MediaError, match=r"^the image is not a JPEG, or is damaged$"):
        await media.decode("jpeg", b"\xff\xd8\xff\xe0 and so on")


def test_refuses_every_truncated_jpeg() -> None:
    """The model would see a frame whose lower half is grey."""
    jpeg = make_jpeg(16, 24)
    decode_jpeg(jpeg)
    for length in range(len(jpeg)):
        assert reason(jpeg[:length], wav=False) == "the image is not a JPEG, or is damaged"


def test_refuses_a_damaged_jpeg() -> None:
    """The model would see colours that nobody filmed."""
    jpeg = make_jpeg()
    middle = len(jpeg) // 2
    for damage in (b"\xff\xd9" * 8, b"\xff\xc4" * 8, b"\xff\xd0\xff\xd3" * 4):
        damaged = jpeg[:middle] + damage + jpeg[middle + len(damage) :]
        assert reason(damaged, wav=False) == "the image is not a JPEG, or is damaged"


def test_bounds_a_jpeg_before_decoding_it() -> None:
    """A small file that unfolds to gigabytes, or takes minutes, would take the server down."""
    jpeg = make_jpeg()
    at = jpeg.index(b"\xff\xc0") + 5
    huge = jpeg[:at] + struct.pack(">HH", 5_000, 5_000) + jpeg[at + 4 :]
    assert reason(huge, wav=False) == "the image has more than 20000000 pixels"
    scans = jpeg + b"\xff\xda" * JPEG_SCANS_MAX
    assert reason(scans, wav=False) == "the image has more than 64 scans"
    assert "bytes" in reason(bytes(FRAME_JPEG_BYTES_MAX + 1), wav=False)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_converts_every_common_rate(rate_hz: int) -> None:
    """A voice recorded at 44.1 kHz would be heard at the wrong pitch."""
    time_s = np.arange(rate_hz) / rate_hz
    tone = 0.5 * np.sin(2 * np.pi * 440 * time_s)
    pcm = np.frombuffer(decode_wav(make_wav(tone, rate_hz, subtype="FLOAT")), "<f4")
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert pcm.shape == (16_000,)
    assert np.abs(pcm - expected)[500:-500].max() < 0.001


def test_mixes_channels_to_one() -> None:
    """A stereo voice would be heard at half speed, or on one side only."""
    stereo = np.stack([np.full(16_000, 0.5), np.full(16_000, -0.25)], axis=-1)
    pcm = np.frombuffer(decode_wav(make_wav(stereo, subtype="PCM_16")), "<f4")
    assert np.allclose(pcm, 0.125)


def test_decodes_the_same_way_twice() -> None:
    """A replay would hear another voice than the session did."""
    noise = np.random.default_rng(1).uniform(-1, 1, (30_000, 2))
    wav = make_wav(noise, 44_100, subtype="PCM_24")
    assert decode_wav(wav) == decode_wav(wav)


@pytest.mark.parametrize("seconds", [0.4, 30.1])
def test_refuses_a_voice_that_is_too_short_or_too_long(seconds: float) -> None:
    """The model would get a voice that it cannot hear."""
    assert reason(make_wav(silence(seconds)), wav=True) == "the audio does not last 0.5 to 30 s"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_refuses_sound_that_is_not_finite(bad: float) -> None:
    """One such sample would make everything the model computes after it not finite."""
    wav = make_wav(np.full(16_000, bad), subtype="DOUBLE")
    assert reason(wav, wav=True) == "the audio holds values that are not finite"


def test_refuses_what_is_no_plain_wav() -> None:
    """A file of another kind could unfold to far more than its size."""
    sound = silence(1)
    assert "uncompressed" in reason(make_wav(sound, format="FLAC"), wav=True)
    assert "uncompressed" in reason(make_wav(sound, subtype="IMA_ADPCM"), wav=True)
    assert "rate" in reason(make_wav(silence(1, 4_000), 4_000), wav=True)
    assert "channels" in reason(make_wav(np.zeros((16_000, 9), np.float32)), wav=True)
    assert "bytes" in reason(bytes(WAV_BYTES_MAX + 1), wav=True)
    for data in (b"", b"RIFF", make_wav(sound)[:40]):
        assert reason(data, wav=True) == "the audio is not a WAV file, or is damaged"
