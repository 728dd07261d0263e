"""Sound: every common file becomes what the model hears, and none costs more than its bounds."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
from typing import Any, Final

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.values.limits import WAV_BYTES_MAX
from protocol.wire.media import AUDIO_BYTES_MAX
from runtime.media.sound import BLOCK_SAMPLES, decode_audio, decode_voice
from runtime.media.values import MediaError

DAMAGED = "the audio is not a sound file that is taken, or is damaged"


def make_wav(samples: Any, rate_hz: int = 16_000, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.asarray(samples), rate_hz, **{"format": "WAV", **options})
    return file.getvalue()


def silence(seconds: float, rate_hz: int = 16_000) -> NDArray[np.float32]:
    return np.zeros(int(seconds * rate_hz), np.float32)


def tone(seconds: float, rate_hz: int) -> NDArray[np.float32]:
    time_s = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * 440 * time_s)).astype(np.float32)


def heard(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<f4")


def reason(data: bytes, rate_hz: int | None = None) -> str:
    """Why reference audio, or with a rate a conversation's sound, is refused."""
    with pytest.raises(MediaError) as refused:
        _ = decode_voice(data) if rate_hz is None else decode_audio(data, rate_hz)
    assert str(refused.value) == refused.value.reason
    return refused.value.reason


# -- reference audio ------------------------------------------------------------------------------


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_converts_every_common_rate(rate_hz: int) -> None:
    """A voice recorded at 44.1 kHz would be heard at the wrong pitch."""
    pcm = heard(decode_voice(make_wav(tone(1, rate_hz), rate_hz, subtype="FLOAT")))
    assert pcm.shape == (16_000,)
    assert np.abs(pcm - tone(1, 16_000))[500:-500].max() < 0.001


def test_mixes_channels_to_one() -> None:
    """A stereo voice would be heard at half speed, or on one side only."""
    stereo = np.stack([np.full(16_000, 0.5), np.full(16_000, -0.25)], axis=-1)
    wav = make_wav(stereo, subtype="PCM_16")
    assert np.allclose(heard(decode_voice(wav)), 0.125)
    assert np.allclose(heard(decode_audio(wav, 0)), 0.125)


def test_decodes_the_same_way_twice() -> None:
    """A replay would hear another voice than the session did."""
    noise = np.random.default_rng(1).uniform(-1, 1, (30_000, 2))
    wav = make_wav(noise, 44_100, subtype="PCM_24")
    assert decode_voice(wav) == decode_voice(wav)
    assert decode_audio(wav, 0) == decode_audio(wav, 0)


@pytest.mark.parametrize("seconds", [0.4, 30.1])
def test_refuses_a_voice_that_is_too_short_or_too_long(seconds: float) -> None:
    """The model would get a voice that it cannot hear."""
    assert reason(make_wav(silence(seconds))) == "the audio does not last 0.5 to 30 s"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_refuses_sound_that_is_not_finite(bad: float) -> None:
    """One such sample would make everything the model computes after it not finite."""
    for rate_hz in (16_000, 24_000):
        wav = make_wav(np.full(rate_hz, bad), rate_hz, subtype="DOUBLE")
        assert reason(wav) == "the audio holds values that are not finite"
        assert reason(wav, 0) == "the audio holds values that are not finite"
    raw = np.full(16_000, bad, np.float64).clip(-np.inf, np.inf)
    with np.errstate(over="ignore"):
        assert "not finite" in reason(raw.astype("<f4").tobytes(), 16_000)


def test_refuses_other_formats() -> None:
    """A rare codec of libsndfile would read what a stranger wrote for it."""
    sound = silence(1)
    for data in (make_wav(sound, subtype="IMA_ADPCM"), make_wav(sound, format="CAF")):
        assert "not a plain WAV" in reason(data)
        assert "not a plain WAV" in reason(data, 0)
    assert "rate" in reason(make_wav(silence(1, 4_000), 4_000))
    assert "channels" in reason(make_wav(np.zeros((16_000, 9), np.float32)))
    assert "bytes" in reason(bytes(WAV_BYTES_MAX + 1))
    for data in (b"", b"RIFF", make_wav(sound)[:40]):
        assert reason(data) == DAMAGED


# -- files of all kinds ---------------------------------------------------------------------------

KINDS: Final = [
    ("RF64", "PCM_16"),
    ("AIFF", "PCM_16"),
    ("AIFF", "FLOAT"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
]


@pytest.mark.parametrize(("form", "subtype"), KINDS)
def test_takes_every_common_kind(form: str, subtype: str) -> None:
    """A user would have to convert what every other program takes."""
    file = make_wav(tone(2, 48_000), 48_000, format=form, subtype=subtype)
    for pcm in (decode_voice(file), decode_audio(file, 0)):
        assert abs(len(heard(pcm)) - 32_000) <= 1
        spectrum = np.abs(np.fft.rfft(heard(pcm)[:32_000]))
        assert int(spectrum.argmax()) == 880  # half hertz each


SIZES: Final = [(0, 0), (36, 0), (0x7FFFFFFF, 0x7FFFFFFF - 36), (0x7FFFF024, 0x7FFFF000)]


@pytest.mark.parametrize(("whole", "data"), [*SIZES, (0xFFFFFFFF, 0xFFFFFFFF)])
def test_takes_a_wav_from_a_pipe(whole: int, data: int) -> None:
    """What ffmpeg, sox and arecord write to a pipe would be damaged."""
    file = make_wav(tone(1, 24_000), 24_000, subtype="PCM_16")
    piped = file[:4] + struct.pack("<I", whole) + file[8:40] + struct.pack("<I", data) + file[44:]
    assert decode_audio(piped, 0) == decode_audio(file, 0)
    assert decode_voice(piped + b"\0") == decode_voice(file)


def flac(seconds: float, *, length: int | None = None) -> bytes:
    """A FLAC of silence that says that it has so many samples; 0 does not say."""
    file = bytearray(make_wav(silence(seconds), format="FLAC", subtype="PCM_16"))
    if length is not None:
        file[21] &= 0xF0
        file[22:26] = struct.pack(">I", length)
    return bytes(file)


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_a_packed_file_is_no_longer_than_it_may_be(length: int) -> None:
    """A header would decide how much memory a file takes."""
    assert len(heard(decode_audio(flac(2, length=0), 0))) == 32_000
    assert len(heard(decode_audio(flac(301, length=16_000), 0))) == 16_000
    assert "last 0.1 to 300 s" in reason(flac(301, length=length), 0)
    assert "last 0.5 to 30 s" in reason(flac(31, length=length))


def test_a_packed_bomb_takes_no_more_than_the_longest_sound() -> None:
    """Twenty kilobytes of silence would unfold to gigabytes."""
    bomb = flac(2_000, length=0)
    tracemalloc.start()
    try:
        assert "last 0.1 to 300 s" in reason(bomb, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(bomb) < 200_000
    assert peak < 3 * 300 * 64_000


# -- a conversation's sound -----------------------------------------------------------------------


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100, 192_000])
def test_blocks_join_without_a_seam(rate_hz: int) -> None:
    """A click would be heard every few seconds, or the sound drift from its text."""
    seconds = 3 * BLOCK_SAMPLES / rate_hz + 0.1
    sound = tone(seconds, rate_hz)
    wanted = tone(seconds, 16_000)
    raw, file = sound.astype("<f4").tobytes(), make_wav(sound, rate_hz, subtype="FLOAT")
    for data, said_hz in ((raw, rate_hz), (file, 0)):
        pcm = heard(decode_audio(data, said_hz))
        assert abs(len(pcm) - len(wanted)) <= 1
        count = min(len(pcm), len(wanted))
        assert np.abs(pcm[:count] - wanted[:count])[500:-500].max() < 0.001


def test_raw_samples_at_the_model_s_rate_stay_as_they_are() -> None:
    """What a client sends as the model hears it would be changed on its way."""
    raw = np.random.default_rng(0).uniform(-1, 1, 50_000).astype("<f4").tobytes()
    assert decode_audio(raw, 16_000) == raw


@pytest.mark.parametrize("seconds", [0.09, 300.1])
def test_refuses_sound_that_is_too_short_or_too_long(seconds: float) -> None:
    """The model would get sound that it cannot hear, or that leaves no room for an answer."""
    text = "the audio does not last 0.1 to 300 s"
    assert reason(make_wav(silence(seconds, 8_000), 8_000, subtype="PCM_U8"), 0) == text
    assert reason(silence(seconds, 8_000).tobytes(), 8_000) == text


def test_refuses_sound_of_a_strange_rate_or_size() -> None:
    """A rate of 1 Hz would unfold a file to sixteen thousand times its size."""
    for rate_hz in (-1, 1, 7_999, 192_001):
        assert reason(bytes(4_000), rate_hz) == "the audio's rate is not 8000 to 192000 Hz"
    assert reason(bytes(3), 16_000) == "the audio is not whole samples of 4 bytes"
    assert "bytes" in reason(bytes(AUDIO_BYTES_MAX + 1), 16_000)


def test_long_sound_takes_no_more_than_its_result() -> None:
    """A few recordings of minutes in eight channels would take all memory."""
    wav = make_wav(np.zeros((1_000_000, 8), np.int16), 192_000)
    tracemalloc.start()
    try:
        pcm = decode_audio(wav, 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(wav) == pytest.approx(16_000_000, rel=0.01)
    assert peak < 4 * len(pcm) + 8 * BLOCK_SAMPLES * 4 * 3


@given(
    st.sampled_from(
        [
            *(b"", make_wav(silence(0.2)), make_wav(silence(0.2), subtype="FLOAT")),
            *(make_wav(silence(0.2), format=form) for form in ("FLAC", "AIFF", "OGG", "MP3")),
        ]
    ),
    st.integers(0, 60),
    st.binary(max_size=8),
    st.sampled_from([0, 8_000, 16_000]),
)
def test_no_garbage_crashes_the_decoder(data: bytes, at: int, piece: bytes, rate_hz: int) -> None:
    """A damaged upload would end the session with an internal error."""
    damaged = data[:at] + piece + data[at + len(piece) :]
    for decode in (decode_voice, lambda data: decode_audio(data, rate_hz)):
        with contextlib.suppress(MediaError):
            decode(damaged)
