"""Header checks: real files pass, bombs and liars do not, and no garbage loops or crashes."""

from __future__ import annotations

import contextlib
import io
import struct

import numpy as np
import pytest
import simplejpeg
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import FieldError
from protocol.limits import FRAME_JPEG_BYTES_MAX, WAV_BYTES_MAX
from protocol.media import WavHeader, check_jpeg, check_wav, read_reference_audio

from .strategies import jpeg_header, noise, wav

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
    assert check_jpeg("$", data) == size


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
        check_jpeg("$.video_frames[0]", data)
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
    assert read_reference_audio("$", GOOD).is_wav
    assert not read_reference_audio("$", noise(8000)).is_wav


@pytest.mark.parametrize("samples", [7999, 480_001])
def test_raw_reference_audio_has_bounds(samples: int) -> None:
    """Else a voice too short to be heard is accepted and the model speaks with none."""
    with pytest.raises(FieldError, match="samples, at "):
        read_reference_audio("$", bytes(4 * samples))


HEADS = [b"", b"\xff\xd8\xff", jpeg_header(64, 48)[:-9], b"RIFF", GOOD[:44], GOOD[:20]]


@given(st.sampled_from(HEADS), st.binary(max_size=200), st.integers(0, 60), st.binary(max_size=4))
def test_no_garbage_crashes_a_check(head: bytes, tail: bytes, at: int, piece: bytes) -> None:
    """Else a damaged upload ends the session with an internal error."""
    data = patched(head + tail, at, piece)
    for check in (check_jpeg, check_wav, read_reference_audio):
        with contextlib.suppress(FieldError):
            check("$", data)
