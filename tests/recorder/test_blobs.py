"""Blob codecs and base64 spans: exact for any bytes and any text, small for PCM."""

from __future__ import annotations

import base64
import contextlib

import numpy as np
import pybase64
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.format import encoding as blobs
from recorder.format.format import FormatError
from tests.recorder.test_samples import pcm


def exact(values: np.ndarray, divisor: float) -> bytes:
    return (values.astype("<f4") / np.float32(divisor)).astype("<f4").tobytes()


VALUES = np.random.default_rng(5).integers(-32768, 32768, size=500).astype("<i2")
FLOATS = st.lists(st.floats(width=32, min_value=-2, max_value=2), min_size=64, max_size=80)


def round_trip(data: bytes) -> blobs.Packed:
    packed = blobs.pack(data)
    assert blobs.unpack(packed.codec, packed.stored, len(data)) == data
    assert blobs.unpack(packed.codec, memoryview(packed.stored), len(data)) == data
    return packed


@given(st.binary(max_size=600))
def test_any_bytes_round_trip(data: bytes) -> None:
    """A blob that reads back otherwise is a recording that lies."""
    round_trip(data)


@given(FLOATS)
def test_any_floats_round_trip(values: list[float]) -> None:
    """PCM goes through the codecs that rearrange; every value must survive."""
    round_trip(np.array(values, "<f4").tobytes())


@given(st.lists(st.integers(-32768, 32767), min_size=64, max_size=80), st.sampled_from([0, 1]))
@example([-32768] * 64, 1)
def test_sixteen_bit_floats_round_trip(values: list[int], convention: int) -> None:
    """A microphone's samples take the codec with arithmetic in it; it must be exact."""
    round_trip(exact(np.array(values), (32768.0, 32767.0)[convention]))


@pytest.mark.parametrize(
    ("data", "codec"),
    [(exact(VALUES, 32768.0), blobs.EXACT_16), (exact(VALUES * 0.1, 32768.0), blobs.SHUFFLE_4)],
)
def test_small_and_large_pieces_are_stored_alike(
    data: bytes, codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take different ways, and both must read what the other wrote."""
    small = round_trip(data)
    assert small.codec == codec
    monkeypatch.setattr(blobs, "SMALL_BYTES_MAX", 0)
    large = round_trip(data)
    assert (small.codec, bytes(small.stored)) == (large.codec, bytes(large.stored))


@pytest.mark.parametrize("divisor", [32768.0, 32767.0])
def test_microphone_pcm_is_halved(divisor: float) -> None:
    """Without the exact codec a microphone's log is a third larger."""
    packed = round_trip(exact(VALUES, divisor))
    assert packed.codec == blobs.EXACT_16
    assert len(packed.stored) == 1 + 2 * len(VALUES)


def test_model_pcm_is_shuffled_and_jpeg_is_not() -> None:
    """Choosing the wrong codec would cost size or time on every unit."""
    assert round_trip(pcm(500)).codec == blobs.SHUFFLE_4
    assert round_trip(np.random.default_rng(1).bytes(2000)).codec == blobs.RAW
    assert round_trip(pcm(500)[:-1]).codec == blobs.RAW


@pytest.mark.parametrize("odd", [b"\x00\x00\x00\x80", b"\x01\x00\xc0\x7f", b"\x01\x00\x80\x7f"])
@pytest.mark.parametrize("at", [0, 1, 499])
def test_values_that_compare_wrong_fall_back(odd: bytes, at: int) -> None:
    """-0.0 equals 0.0 and NaN equals nothing: comparing numbers would change or reject them."""
    data = bytearray(exact(VALUES, 32768.0))
    data[4 * at : 4 * at + 4] = odd
    assert round_trip(bytes(data)).codec == blobs.SHUFFLE_4


def test_a_codec_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a codec, or in numpy, must cost bytes and not a recording."""
    monkeypatch.setattr(blobs, "_shuffle", lambda data, _width: bytes(len(data)))
    assert round_trip(pcm(500)).codec == blobs.RAW


@given(st.integers(-1, 6), st.binary(max_size=40), st.integers(0, 90))
@example(2, b"\x02\x00\x00", 4)
@example(2, b"\x00", 0)
@example(1, b"", 0)
def test_unpacking_garbage_is_refused_or_has_the_length(
    codec: int, stored: bytes, length: int
) -> None:
    """Lies in a blob table must end as damage, never as another exception."""
    with contextlib.suppress(FormatError):
        assert len(blobs.unpack(codec, stored, length)) == length


LONG = st.binary(min_size=40, max_size=120).map(lambda data: base64.b64encode(data).decode())
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=10),
        LONG,
        LONG.map(lambda span: f'"{span}"'),
        LONG.map(lambda span: f'"data:image/jpeg;base64,{span}"'),
        LONG.map(lambda span: f'"{span[:-1]}"'),
        st.sampled_from(['"', "\\", "é", "\ud800", "\ud83d\ude00", "=" * 70, "A" * 66]),
    )
).map("".join)


@given(TEXTS)
@example('"' + "A" * 65 + 'Q=="')
@example('"' + "A" * 65 + 'R=="')
@example('"' + "A" * 64 + '\n"')
def test_spans_are_exact_for_any_text(text: str) -> None:
    """A frame that reads back with one other character breaks byte-exact replay."""
    assert blobs.restore(blobs.extract(text)) == text


@given(
    data=st.binary(min_size=48, max_size=80),
    at=st.integers(1, 5),
    char=st.sampled_from("AQgwPJ/+=-_ \n\x00é"),
)
def test_a_span_is_taken_only_where_it_is_written_just_so(data: bytes, at: int, char: str) -> None:
    """The last group of base64 can be spelled in several ways, and the frame had another one."""
    span = pybase64.b64encode_as_string(data)
    text = f'"{span[:-at]}{char}{span[len(span) - at + 1 :]}"'
    pieces = blobs.extract(text)
    assert blobs.restore(pieces) == text
    taken = [piece for piece in pieces if isinstance(piece, bytes)]
    assert [pybase64.b64encode_as_string(blob) for blob in taken] in ([], [text[1:-1]])


def test_media_is_taken_out() -> None:
    """Left as base64, a session's log is a seventh larger and no PCM is found again."""
    heard, seen = pcm(100), b"\xff\xd8" + bytes(90)
    text = (
        f'{{"audio":"{pybase64.b64encode_as_string(heard)}","id":"resp_1",'
        f'"image":"data:image/jpeg;base64,{pybase64.b64encode_as_string(seen)}"}}'
    )
    taken = [piece for piece in blobs.extract(text) if isinstance(piece, bytes)]
    assert taken == [heard, seen]


@pytest.mark.parametrize("text", ["A" * 40, '"' + "A" * 40 + '"', '"' + "-_" * 40 + '"', ""])
def test_what_is_no_span_stays_text(text: str) -> None:
    """Short ids and URL-safe base64 must not become blobs that encode to something else."""
    assert "".join(piece for piece in blobs.extract(text) if isinstance(piece, str)) == text


def test_a_frame_of_quotes_is_bounded() -> None:
    """A hostile frame of nothing but quotes must not hold up the logs of all sessions."""
    text = '"' * (blobs.QUOTES_MAX * blobs.SPAN_CHARS_MIN + 5) + "A" * 100 + '"'
    assert blobs.extract(text) == [text]
