"""Header checks: real files pass, bombs and liars do not, and no garbage loops or crashes."""

from __future__ import annotations

import contextlib
import io
import struct
from typing import Any, Final

import numpy as np
import pytest
import simplejpeg
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from protocol.values.errors import FieldError
from protocol.values.limits import (
    FRAME_JPEG_BYTES_MAX,
    IMAGE_BYTES_MAX,
    VIDEO_BYTES_MAX,
    WAV_BYTES_MAX,
)
from protocol.values.requests import AudioPart, ReferenceAudio
from protocol.wire.media import (
    AUDIO_BYTES_MAX,
    SOUND_HEADS,
    WavHeader,
    audio_s,
    check_frame,
    check_image,
    check_video,
    check_wav,
    read_audio,
    read_reference_audio,
    read_wav,
    sound_kind,
)
from tests.strategies.messages import jpeg_header, mp4_head, noise, wav

BASELINE = simplejpeg.encode_jpeg(np.zeros((48, 64, 3), dtype=np.uint8))
FILLED = jpeg_header(640, 480).replace(b"\xff\xc0", b"\xff\xff\xff\xc0")


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (BASELINE, (64, 48)),
        (jpeg_header(640, 480, 0xC2), (640, 480)),
        (FILLED, (640, 480)),
        (jpeg_header(5000, 4000), (5000, 4000)),
    ],
)
def test_a_jpeg_is_measured(data: bytes, size: tuple[int, int]) -> None:
    """Else a good camera frame is refused."""
    assert check_frame("$", data) == size


PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)
SEGMENT = b"\xff\xe1\x00\x02"
BAD_JPEGS = {
    "empty": (b"", "0 bytes that are not a JPEG"),
    "png": (PNG, "72 bytes that are not a JPEG"),
    "bomb": (jpeg_header(65500, 65500), "65500 x 65500 pixels, at most 20000000 are allowed"),
    "a pixel too many": (jpeg_header(5000, 4001), "at most 20000000 are allowed"),
    "a strip": (jpeg_header(1, 51), "1 x 51 pixels, at most 50 to 1 is allowed"),
    "no height": (jpeg_header(640, 0), "a JPEG of 640 x 0 pixels"),
    "no width": (jpeg_header(0, 480), "a JPEG of 0 x 480 pixels"),
    "only a start": (b"\xff\xd8", "truncated before its frame header"),
    "cut in a segment": (jpeg_header(64, 48)[:15], "truncated before its frame header"),
    "cut in the header": (jpeg_header(64, 48)[:-1], "truncated in its frame header"),
    "no marker": (b"\xff\xd8" + bytes(99), "without a marker at byte 2"),
    "ends at once": (b"\xff\xd8\xff\xd9\0\0", "without a frame header before byte 2"),
    "scan without a frame": (b"\xff\xd8\xff\xda\0\2", "without a frame header before byte 2"),
    "length of one": (b"\xff\xd8\xff\xe0\0\1\0\0", "a broken segment at byte 2"),
    "no components": (b"\xff\xd8\xff\xc0\0\x08\x08\0\1\0\1\0", "a broken frame header"),
    "endless segments": (b"\xff\xd8" + SEGMENT * 9999, "in 1000 segments"),
    "endless fill": (b"\xff\xd8" + b"\xff" * 999_999, "in 1000 segments"),
    "too many bytes": (b"\xff\xd8" + bytes(FRAME_JPEG_BYTES_MAX), "at most 4194304 are allowed"),
}


@pytest.mark.parametrize("name", BAD_JPEGS)
def test_a_bad_jpeg_is_refused_by_its_header(name: str) -> None:
    """Else a small file makes the server allocate gigabytes, or a bad one reaches the decoder."""
    data, text = BAD_JPEGS[name]
    with pytest.raises(FieldError) as caught:
        check_frame("$.video_frames[0]", data)
    assert caught.value.code == "invalid_payload"
    assert caught.value.message.startswith("$.video_frames[0]: ")
    assert text in caught.value.message


SOUND = np.zeros((16_000, 2), dtype=np.float32)


@pytest.mark.parametrize(
    ("container", "subtype", "bits", "is_float"),
    [
        ("WAV", "PCM_U8", 8, False),
        ("WAV", "PCM_16", 16, False),
        ("WAV", "PCM_24", 24, False),
        ("WAV", "PCM_32", 32, False),
        ("WAV", "FLOAT", 32, True),
        ("WAV", "DOUBLE", 64, True),
        ("WAVEX", "PCM_16", 16, False),
        ("WAVEX", "FLOAT", 32, True),
    ],
)
def test_a_wav_of_every_common_kind_is_read(
    container: str, subtype: str, bits: int, is_float: bool
) -> None:
    """Else a voice that plays everywhere else is refused here."""
    file = io.BytesIO()
    soundfile.write(file, SOUND, 16_000, format=container, subtype=subtype)
    header = check_wav("$", file.getvalue())
    assert header == WavHeader(
        channels=2, rate_hz=16_000, sample_bits=bits, is_float=is_float, samples=16_000
    )


def patched(data: bytes, at: int, piece: bytes) -> bytes:
    """Overwrite some bytes."""
    return data[:at] + piece + data[at + len(piece) :]


GOOD = wav(16_000)
JUNK = b"LIST" + struct.pack("<I", 3) + b"abc\0"
BAD_WAVS = {
    "cut off": (GOOD[:-2], "says 32044 bytes and has 32042"),
    "only a head": (b"RIFF", "4 bytes that are not a WAV"),
    "an AVI": (GOOD.replace(b"WAVE", b"AVI "), "that are not a WAV"),
    "data longer than the file": (patched(GOOD, 40, b"\xff\xff\xff\x7f"), "where 32000 are left"),
    "format longer than the file": (patched(GOOD, 16, b"\xff\xff\xff\xff"), "where 32024 are left"),
    "format of 4 bytes": (patched(GOOD, 16, b"\4\0\0\0"), "a format of 4 bytes"),
    "no data": (GOOD.replace(b"data", b"atad"), "without a data chunk"),
    "data first": (GOOD.replace(b"fmt ", b"tmf "), "without a format before its data"),
    "endless chunks": (
        b"RIFF" + struct.pack("<I", 4 + 8 * 100) + b"WAVE" + (b"junk" + bytes(4)) * 100,
        "in 64 chunks",
    ),
    "mu-law": (wav(16_000, bits=8, tag=7), "format 7 with 8 bits"),
    "12 bits": (patched(GOOD, 34, b"\x0c\0"), "format 1 with 12 bits"),
    "float of 16 bits": (wav(16_000, tag=3), "format 3 with 16 bits"),
    "mu-law, extensible": (wav(16_000, bits=8, tag=7, extensible=True), "format 7 with 8 bits"),
    "a strange sub-format": (
        wav(16_000, extensible=True).replace(b"\x38\x9b\x71", b"\0\0\0"),
        "a broken extensible format",
    ),
    "extensible, cut": (patched(GOOD, 20, b"\xfe\xff"), "a broken extensible format"),
    "no channel": (patched(GOOD, 22, b"\0\0"), "0 channels, allowed is 1 to 8"),
    "9 channels": (wav(16_000, channels=9), "9 channels, allowed is 1 to 8"),
    "7999 Hz": (wav(16_000, 7999), "7999 Hz, allowed is 8000 to 192000"),
    "a rate of 0": (patched(GOOD, 24, bytes(4)), "0 Hz, allowed is 8000 to 192000"),
    "a lying byte rate": (patched(GOOD, 28, b"\1\0\0\0"), "byte rate does not fit"),
    "a lying block size": (patched(GOOD, 32, b"\1\0"), "byte rate does not fit"),
    "half a sample": (patched(patched(GOOD, 40, b"\1\0\0\0"), 4, b"\x25\0\0\0"), "in blocks of 2"),
    "0.4 s": (wav(6400), "0.400 s of audio, allowed is 0.5 to 30 s"),
    "31 s": (wav(31 * 16_000), "31.000 s of audio, allowed is 0.5 to 30 s"),
    "too many bytes": (b"RIFF" + bytes(WAV_BYTES_MAX), "at most 12582912 are allowed"),
}


@pytest.mark.parametrize("name", BAD_WAVS)
def test_a_wav_that_lies_is_refused(name: str) -> None:
    """Else a voice is read past its end, or as something that it is not."""
    data, text = BAD_WAVS[name]
    with pytest.raises(FieldError) as caught:
        read_reference_audio("$.ref_audio", data)
    assert caught.value.message.startswith("$.ref_audio: ")
    assert text in caught.value.message


def test_chunks_before_the_data_are_stepped_over() -> None:
    """Else a voice with a title in it is refused."""
    titled = GOOD[:36] + JUNK + GOOD[36:]
    titled = patched(titled, 4, struct.pack("<I", len(titled) - 8))
    assert check_wav("$", titled) == check_wav("$", GOOD)


def test_reference_audio_is_told_apart_by_its_head() -> None:
    """Else a raw voice is taken for a broken WAV, or a WAV's header is heard as a click."""
    assert read_reference_audio("$", GOOD).is_file
    assert not read_reference_audio("$", noise(8000)).is_file


@pytest.mark.parametrize("samples", [7999, 480_001])
def test_raw_reference_audio_has_bounds(samples: int) -> None:
    """Else a voice too short to be heard is accepted and the model speaks with none."""
    with pytest.raises(FieldError, match="samples, at "):
        read_reference_audio("$", bytes(4 * samples))


# -- what conversations bring ---------------------------------------------------------------------


def png(width: int, height: int, bits: int = 8, colour: int = 2, rest: bytes = b"\0\0\0") -> bytes:
    """Make the head of a PNG."""
    head = struct.pack(">IIBB", width, height, bits, colour) + rest
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + head + bytes(4)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (BASELINE, (64, 48)),
        (jpeg_header(5000, 4000), (5000, 4000)),
        (png(640, 480), (640, 480)),
        (png(5000, 4000, 16, 6), (5000, 4000)),
        (png(640, 480, 1, 3, b"\0\0\1"), (640, 480)),
    ],
)
def test_an_image_is_measured(data: bytes, size: tuple[int, int]) -> None:
    """Else a good photograph or drawing is refused."""
    assert check_image("$", data) == size


def test_an_image_may_be_larger_than_a_frame() -> None:
    """Else a photograph is refused that a phone has just made."""
    padded = BASELINE + bytes(FRAME_JPEG_BYTES_MAX)
    assert check_image("$", padded) == (64, 48)


BAD_IMAGES = {
    "empty": (b"", "0 bytes that are no JPEG, PNG or WebP"),
    "a GIF": (b"GIF89a", "6 bytes that are no JPEG, PNG or WebP"),
    "a JPEG bomb": (jpeg_header(65500, 65500), "a JPEG of 65500 x 65500 pixels, at most 20000000"),
    "a PNG bomb": (png(2**31, 2**31), "a PNG of 2147483648 x 2147483648 pixels, at most 20000000"),
    "a strip": (png(1, 51), "a PNG of 1 x 51 pixels, at most 50 to 1 is allowed"),
    "no width": (png(0, 9), "a PNG of 0 x 9 pixels"),
    "cut": (png(9, 9)[:28], "a PNG without a whole header"),
    "another chunk first": (png(9, 9).replace(b"IHDR", b"IDAT"), "a PNG without a whole header"),
    "3 bits": (png(9, 9, 3), "a PNG with a broken header"),
    "a palette of 16 bits": (png(9, 9, 16, 3), "a PNG with a broken header"),
    "colour type 5": (png(9, 9, 8, 5), "a PNG with a broken header"),
    "another compression": (png(9, 9, rest=b"\1\0\0"), "a PNG with a broken header"),
    "another interlacing": (png(9, 9, rest=b"\0\0\2"), "a PNG with a broken header"),
    "too many bytes": (png(9, 9) + bytes(IMAGE_BYTES_MAX), "at most 16777216 are allowed"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_refused_by_its_header(name: str) -> None:
    """Else a small file makes the server allocate gigabytes, or a bad one reaches the decoder."""
    data, text = BAD_IMAGES[name]
    with pytest.raises(FieldError) as caught:
        check_image("$.content[0]", data)
    assert caught.value.code == "invalid_payload"
    assert caught.value.message.startswith("$.content[0]: ")
    assert text in caught.value.message


def test_a_conversation_s_sound_is_told_apart_by_its_head() -> None:
    """Else a WAV's header is heard as a click, or raw sound at the wrong pitch."""
    raw = noise(2400)
    assert read_audio("$", GOOD, 24_000) == AudioPart(data=GOOD, is_file=True)
    assert read_audio("$", raw, 24_000) == AudioPart(data=raw, is_file=False, rate_hz=24_000)
    assert read_audio("$", noise(1600)).rate_hz == 16_000


def test_a_conversation_s_sound_may_last_longer_than_a_voice() -> None:
    """Else a question of a minute is refused."""
    assert read_audio("$", wav(60 * 16_000)).is_file
    assert read_audio("$", wav(1600)).is_file


BAD_SOUNDS = {
    "short": (wav(1599), 0, "0.100 s of audio, allowed is 0.1 to 300 s"),
    "long": (wav(2_400_001, 8000, bits=8), 0, "300.000 s of audio, allowed is 0.1 to 300 s"),
    "lying": (GOOD[:-2], 0, "says 32044 bytes and has 32042"),
    "raw, short": (bytes(4 * 2399), 24_000, "2399 samples, at least 2400 are needed"),
    "raw, long": (bytes(4 * 2_400_001), 8000, "2400001 samples, at most 2400000 are allowed"),
    "half a sample": (bytes(6401), 16_000, "a multiple of 4 is needed"),
    "not finite": (noise(2000) + b"\0\0\x80\x7f", 16_000, "sample 2000 is not finite"),
    "too slow": (noise(9000), 7999, "samples of 7999 Hz, allowed is 8000 to 192000"),
    "too fast": (noise(9000), 192_001, "samples of 192001 Hz, allowed is 8000 to 192000"),
    "no rate": (noise(9000), 0, "samples of 0 Hz, allowed is 8000 to 192000"),
    "too many bytes": (bytes(AUDIO_BYTES_MAX + 4), 192_000, "at most 67108864 are allowed"),
}


@pytest.mark.parametrize("name", BAD_SOUNDS)
def test_bad_sound_is_refused_by_its_header(name: str) -> None:
    """Else a file unfolds to hours, or one sample silences the model."""
    data, rate_hz, text = BAD_SOUNDS[name]
    with pytest.raises(FieldError) as caught:
        read_audio("$.content[0]", data, rate_hz)
    assert caught.value.code == "invalid_payload"
    assert text in caught.value.message


EBML = b"\x1a\x45\xdf\xa3\x9f\x42\x86\x81\1\x42\xf7\x81\1\x42\x82"


@pytest.mark.parametrize(
    ("head", "container"),
    [
        (b"\0\0\0\x20ftypisom", "mp4"),
        (b"\0\0\0\x14ftypqt  ", "mp4"),
        (b"\0\0\1\0moov", "mp4"),
        (EBML + b"\x84webm", "matroska"),
        (EBML + b"\x88matroska", "matroska"),
    ],
)
def test_a_video_is_told_by_its_head(head: bytes, container: str) -> None:
    """Else a phone's or a browser's recording is refused."""
    assert check_video("$", head + bytes(99)) == container


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"ftyp", b"#EXTM3U\nhttp://x/y.ts", b"RIFF\0\0\0\0AVI LIST", b"\x47" * 188),
        *(EBML + b"\x84weba", EBML + bytes(200) + b"webm", b"FLV\1" + bytes(9), BASELINE, GOOD),
    ],
)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    """Else a playlist or an old container reaches decoders that nobody looks after."""
    with pytest.raises(FieldError, match="no video of MP4, QuickTime, Matroska or WebM") as caught:
        check_video("$", data)
    assert caught.value.code == "invalid_payload"


def test_a_video_has_a_size() -> None:
    """Else one message takes the server's memory."""
    with pytest.raises(FieldError, match="at most 67108864 are allowed"):
        check_video("$", b"\0\0\0\x20ftyp" + bytes(VIDEO_BYTES_MAX))


HEADS = [b"", b"\xff\xd8\xff", jpeg_header(64, 48)[:-9], b"RIFF", GOOD[:44], GOOD[:20]]
HEADS += [png(9, 9), png(9, 9)[:20], EBML, EBML + b"\x84webm", b"\0\0\0\x20ftypisom"]


@given(st.sampled_from(HEADS), st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=4))
def test_no_garbage_crashes_a_check(head: bytes, tail: bytes, at: int, piece: bytes) -> None:
    """Else a damaged upload ends the session with an internal error."""
    data = patched(head + tail, at, piece)
    checks = (check_frame, check_image, check_wav, check_video, read_audio, read_reference_audio)
    for check in checks:
        with contextlib.suppress(FieldError):
            check("$", data)


# -- sound files of other kinds -------------------------------------------------------------------

FILES: Final = {
    "RF64": ("RF64", "PCM_16"),
    "AIFF": ("AIFF", "PCM_16"),
    "FLAC": ("FLAC", "PCM_16"),
    "Ogg": ("OGG", "OPUS"),
    "MP3": ("MP3", "MPEG_LAYER_III"),
}


def sound_file(kind: str, rate_hz: int = 24_000) -> bytes:
    """A second of silence."""
    file, (form, subtype) = io.BytesIO(), FILES[kind]
    soundfile.write(file, np.zeros(rate_hz), rate_hz, format=form, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("kind", FILES)
def test_a_sound_file_is_known_by_its_head(kind: Any) -> None:
    """It would be heard as samples, which is noise."""
    data = sound_file(kind)
    assert sound_kind(data) == kind
    assert sound_kind(SOUND_HEADS[kind] + bytes(100)) == kind
    assert read_audio("$", data, is_any=True) == AudioPart(data=data, is_file=True)
    assert read_reference_audio("$", data, is_any=True) == ReferenceAudio(data=data, is_file=True)
    assert audio_s(AudioPart(data=data, is_file=True)) is None


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
def test_an_mp3_is_known_at_every_rate(rate_hz: int) -> None:
    """Only some of the files would be taken."""
    data = sound_file("MP3", rate_hz)
    assert sound_kind(data[data.index(b"\xff\xe3") :] if data[0] != 0xFF else data) == "MP3"


@given(st.lists(st.floats(-1, 1, width=32), max_size=8), st.integers(0, 99))
def test_samples_are_no_file(first: list[float], seed: int) -> None:
    """Sound that happens to begin like a file would be refused."""
    more = np.random.default_rng(seed).uniform(-1, 1, 2_000)
    raw = np.asarray([*first, *more], "<f4").tobytes()
    assert sound_kind(raw) is None
    assert not read_audio("$", raw, is_any=True).is_file


def test_a_file_of_another_kind_is_named() -> None:
    """An M4A would be heard as samples."""
    with pytest.raises(FieldError, match="a file of mp4, WAV, AIFF, FLAC"):
        read_audio("$", mp4_head(), is_any=True)


SIZES: Final = [(0, 0), (36, 0), (0x7FFFFFFF, 0x7FFFFFDB), (0xFFFFFFFF, 0xFFFFFFFF)]


@pytest.mark.parametrize(("whole", "data"), SIZES)
def test_a_wav_from_a_pipe_is_as_long_as_its_bytes(whole: int, data: int) -> None:
    """What ffmpeg and sox write to a pipe is refused."""
    file = wav(16_000)
    piped = file[:4] + struct.pack("<I", whole) + file[8:40] + struct.pack("<I", data) + file[44:]
    assert read_wav("$", piped, is_piped=True) == read_wav("$", file)
    assert audio_s(AudioPart(data=piped, is_file=True)) == 1
    with pytest.raises(FieldError):
        read_audio("$", piped)
