"""WebP pictures are told by their headers, and none that lies about itself is decoded."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.errors import FieldError
from protocol.values.limits import FRAME_PIXELS_MAX, FRAME_SIDES_RATIO_MAX, IMAGE_BYTES_MAX
from protocol.values.requests import Ask, ImagePart, Request
from protocol.wire.codec import Context
from protocol.wire.dialects import LEGACY_CHAT
from protocol.wire.media import WEBP_CHUNKS_MAX, check_image, read_webp
from tests.media.webps import (
    ANIMATED,
    CLEAR,
    EXTENDED,
    HEIGHT,
    KINDS,
    LOSSLESS,
    LOSSY,
    RAW_ALPHA,
    WIDTH,
    canvas,
    chunk,
    chunks_of,
    container,
)
from tests.sessions.in_memory import base64

PICTURE = chunk(b"VP8 ", chunks_of(LOSSY)[b"VP8 "])


@pytest.mark.parametrize("name", KINDS)
def test_a_picture_is_measured(name: str) -> None:
    """A good picture would be refused."""
    assert check_image("$", KINDS[name]) == (WIDTH, HEIGHT)
    assert check_image("$", KINDS[name] + b"what follows") == (WIDTH, HEIGHT)
    header = read_webp("$", KINDS[name])
    assert header.is_clear == ("transparen" in name)
    assert header.is_lossless == name.startswith("lossless")


def lossless(width: int, height: int, version: int = 0) -> bytes:
    """Make a lossless picture that ends with its header."""
    form = width - 1 | (height - 1) << 14 | version << 29
    return container(chunk(b"VP8L", struct.pack("<BI", 0x2F, form)))


def with_byte(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


BAD = {
    "no more than a head": (LOSSY[:12], "says"),
    "truncated": (LOSSY[:-1], f"a WebP that says {len(LOSSY)} bytes and has {len(LOSSY) - 1}"),
    "a chunk that is longer than the file": (
        container(PICTURE[:4] + struct.pack("<I", 9_999) + PICTURE[8:]),
        "a WebP with a chunk of 9999 bytes where",
    ),
    "nothing": (container(), "a WebP without a picture"),
    "no picture": (container(canvas(9, 9)), "a WebP without a picture"),
    "too many chunks": (
        container(canvas(WIDTH, HEIGHT), *[chunk(b"what", b"")] * WEBP_CHUNKS_MAX, PICTURE),
        "a WebP without a picture in 64 chunks",
    ),
    "a picture second, without a canvas": (container(chunk(b"what", b""), PICTURE), "out of place"),
    "two canvases": (container(canvas(9, 9), canvas(9, 9), PICTURE), "out of place at byte 30"),
    "transparency without a canvas": (container(chunk(b"ALPH", b"\1"), PICTURE), "out of place"),
    "a frame of an animation": (container(canvas(9, 9), chunk(b"ANMF", b"")), "out of place"),
    "a larger canvas": (
        container(canvas(WIDTH + 1, HEIGHT), PICTURE),
        "a WebP of 64 x 47 pixels on a canvas of 65 x 47",
    ),
    "a smaller canvas": (container(canvas(1, 1), PICTURE), "on a canvas of 1 x 1"),
    "half a canvas": (container(chunk(b"VP8X", bytes(9)), PICTURE), "a WebP with a broken header"),
    "animated": (ANIMATED, "an animated WebP, only still pictures are taken"),
    "a bomb": (lossless(16_384, 16_384), "a WebP of 16384 x 16384 pixels, at most 20000000"),
    "a strip": (lossless(1, 51), "a WebP of 1 x 51 pixels, at most 50 to 1 is allowed"),
    "no width": (LOSSY[:26] + b"\0\0" + LOSSY[28:], "a WebP of 0 x 47 pixels"),
    "no key frame": (with_byte(LOSSY, 20, LOSSY[20] | 1), "a WebP with a broken header"),
    "a hidden frame": (with_byte(LOSSY, 20, LOSSY[20] & ~0x10), "a WebP with a broken header"),
    "a first part that is too long": (with_byte(LOSSY, 22, 0xFF), "a WebP with a broken header"),
    "no start code": (with_byte(LOSSY, 23, 0), "a WebP with a broken header"),
    "no signature": (with_byte(LOSSLESS, 20, 0), "a WebP with a broken header"),
    "another version": (lossless(9, 9, 1), "a WebP with a broken header"),
    "half a head": (container(chunk(b"VP8L", b"/\0\0\0")), "a WebP with a broken header"),
    "an empty picture": (container(chunk(b"VP8 ", b"")), "a WebP with a broken header"),
    "no transparency": (
        container(canvas(WIDTH, HEIGHT), chunk(b"ALPH", b""), PICTURE),
        "a WebP with broken transparency",
    ),
    "half of the transparency": (
        container(canvas(WIDTH, HEIGHT), chunk(b"ALPH", bytes(WIDTH * HEIGHT)), PICTURE),
        "a WebP with broken transparency",
    ),
    "transparency packed in no known way": (
        container(canvas(WIDTH, HEIGHT), chunk(b"ALPH", b"\2" + bytes(9_999)), PICTURE),
        "a WebP with broken transparency",
    ),
    "too many bytes": (LOSSY + bytes(IMAGE_BYTES_MAX), "at most 16777216 are allowed"),
    "another RIFF": (b"RIFF\4\0\0\0WAVE", "12 bytes that are no JPEG, PNG or WebP"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_refused_by_its_header(name: str) -> None:
    """A small file would make the server allocate gigabytes, or a bad one reach the decoder."""
    data, text = BAD[name]
    with pytest.raises(FieldError) as caught:
        check_image("$.content[0]", data)
    assert caught.value.code == "invalid_payload"
    assert caught.value.message.startswith("$.content[0]: ")
    assert text in caught.value.message


def cuts() -> st.SearchStrategy[bytes]:
    """Break a picture's header: bytes changed, put in, taken out, or cut off."""
    whole = st.sampled_from([*KINDS.values(), ANIMATED])
    spot, piece = st.integers(0, 60), st.binary(max_size=6)
    changed = st.builds(lambda d, at, p: d[:at] + p + d[at + len(p) :], whole, spot, piece)
    put_in = st.builds(lambda d, at, p: d[:at] + p + d[at:], whole, spot, piece)
    taken = st.builds(lambda d, at, p: d[:at] + d[at + len(p) :], whole, spot, piece)
    return changed | put_in | taken | st.builds(lambda d, at: d[:at], whole, st.integers(0, 400))


@given(cuts())
@example(CLEAR)
@example(RAW_ALPHA)
@example(EXTENDED)
def test_what_is_taken_is_within_the_bounds(data: bytes) -> None:
    """A lying header would get past the limits, or end the session by an internal error."""
    refused: FieldError | None = None
    width = height = 1
    try:
        width, height = check_image("$.data", data)
    except FieldError as error:
        refused = error
    if refused is not None:
        assert refused.code == "invalid_payload"
        assert refused.message.startswith("$.data: ")
        assert len(refused.message) < 200
        return
    assert 0 < width * height <= FRAME_PIXELS_MAX
    assert max(width, height) <= FRAME_SIDES_RATIO_MAX * min(width, height)
    if data.startswith(b"RIFF"):
        header = read_webp("$", data)
        assert header.picture.stop <= len(data)
        assert header.alpha.stop <= header.picture.start


def test_a_conversation_may_hold_one() -> None:
    """The pages of the source, which take them, would be refused."""
    content = [{"type": "image", "data": base64(LOSSY)}]
    body = {"messages": [{"role": "user", "content": content}]}
    context = Context(mode="chat")
    ask = LEGACY_CHAT.parse(Request.INIT, body, context)
    assert isinstance(ask, Ask)
    assert ask.messages[0].content == (ImagePart(data=LOSSY),)
