"""Images: a JPEG stays as it is, a PNG becomes the same picture, and no damaged one is shown."""

from __future__ import annotations

import base64
import contextlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.values.limits import FRAME_JPEG_BYTES_MAX, FRAME_PIXELS_MAX, IMAGE_BYTES_MAX
from runtime.media.image import (
    JPEG_SCANS_MAX,
    PNG_CHUNKS_MAX,
    decode_image,
    decode_jpeg,
    orientation,
    pixels_of,
    prove_small,
)
from runtime.media.values import MediaError
from tests.fairness.heavy_pictures import heavy_jpeg
from tests.media import webps

DAMAGED = "the image is a damaged PNG"
JPEG_DAMAGED = "the image is not a JPEG, or is damaged"


def make_jpeg(height: int = 96, width: int = 128) -> bytes:
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.stack([rows * 7 % 256, columns * 5 % 256, (rows * columns) % 256], axis=-1)
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image.astype(np.uint8))))


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def make_png(
    rows: list[bytes], width: int, bits: int, colour: int, *extra: bytes, split: int = 9_999
) -> bytes:
    """Make a PNG of packed rows, with more chunks before its data, which comes in pieces."""
    head = struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    pieces = [chunk(b"IDAT", data[at : at + split]) for at in range(0, len(data), split)]
    body = chunk(b"IHDR", head) + b"".join(extra) + b"".join(pieces) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def pixels(jpeg: bytes) -> NDArray[np.uint8]:
    return np.asarray(simplejpeg.decode_jpeg(jpeg, colorspace="RGB"))


def reason(data: bytes) -> str:
    with pytest.raises(MediaError) as refused:
        decode_image(data)
    assert str(refused.value) == refused.value.reason
    return refused.value.reason


SMOOTH = np.stack(np.meshgrid(np.arange(0, 240, 6), np.arange(0, 240, 8)), -1).astype(np.uint8)
RGB = np.ascontiguousarray(np.concatenate([SMOOTH, 255 - SMOOTH[..., :1]], -1))
RGB_PNG = make_png([row.tobytes() for row in RGB], 40, 8, 2)

PROGRESSIVE = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVt"
    "VkVGZIhlbXd7gYKBTmCNl4x9lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8"
    "fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/wgARCAAYACgDASIAAhEBAxEB/8QAGAABAQEBAQAAAAAAAAAAAAAA"
    "AAIDBAX/xAAYAQADAQEAAAAAAAAAAAAAAAABAgQDBf/aAAwDAQACEAMQAAAB8u99QnPfRTUYuktEamfEqwUWM6f/"
    "xAAYEAEAAwEAAAAAAAAAAAAAAAAAAQISEf/aAAgBAQABBQLLLLLKKoq44yiriKuMv//EABcRAAMBAAAAAAAAAAAA"
    "AAAAAAABAgP/2gAIAQMBAT8BnQnQVksliZ//xAAZEQADAQEBAAAAAAAAAAAAAAAAAREhAhL/2gAIAQIBAT8B50fl"
    "YYctrijyJFdiP//EABQQAQAAAAAAAAAAAAAAAAAAADD/2gAIAQEABj8Cf//EABgQAQEBAQEAAAAAAAAAAAAAAAEA"
    "ECFR/9oACAEBAAE/ISEKU2HENgmHJgeIBf/aAAwDAQACAAMAAAAQRdNCDC//xAAYEQEBAQEBAAAAAAAAAAAAAAAA"
    "AREhMf/aAAgBAwEBPxDBZx9V1dTH/8QAGhEBAQADAQEAAAAAAAAAAAAAAQARIUExcf/aAAgBAgEBPxAXK6ZegPrK"
    "B7JGhmSWjF//xAAbEAADAQEBAQEAAAAAAAAAAAAAARFhIVExcf/aAAgBAQABPxDIzMjMSvvDAxEvErMD8IF4ZCgi"
    "6zMa3Ei9OBK/D//Z"
)
"""40x24 pixels in ten scans or so, as a browser's canvas or a phone may write them."""


# -- JPEG -----------------------------------------------------------------------------------------


def test_refuses_every_truncated_jpeg() -> None:
    """The model would see a frame whose lower half is grey."""
    jpeg = make_jpeg(16, 24)
    decode_jpeg(jpeg)
    for length in range(len(jpeg)):
        with pytest.raises(MediaError, match=f"^{JPEG_DAMAGED}$"):
            decode_jpeg(jpeg[:length])


@given(data=st.data())
def test_a_small_proof_is_a_whole_one(data: st.DataObject) -> None:
    """A damaged picture would pass, because it is decoded at an eighth of its size."""
    jpeg = bytearray(data.draw(st.sampled_from([PROGRESSIVE, make_jpeg(16, 24)])))
    at = data.draw(st.integers(2, len(jpeg) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "blank"])):
        case "flip":
            jpeg[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del jpeg[at:]
        case "insert":
            jpeg[at:at] = bytes([data.draw(st.integers(0, 255))])
        case "remove":
            del jpeg[at]
        case "blank":
            jpeg[at : at + 16] = bytes(len(jpeg[at : at + 16]))
    try:
        simplejpeg.decode_jpeg(bytes(jpeg))
    except ValueError:
        with pytest.raises(MediaError):
            decode_jpeg(bytes(jpeg))
    else:
        with contextlib.suppress(MediaError):  # which may refuse it for its size
            decode_jpeg(bytes(jpeg))


def test_a_progressive_jpeg_is_one() -> None:
    """Pictures of some cameras would be refused, or pass half."""
    decode_jpeg(PROGRESSIVE)
    for length in range(len(PROGRESSIVE) - 1):
        with pytest.raises(MediaError):
            decode_jpeg(PROGRESSIVE[:length])


def test_the_heavy_picture_of_the_tests_is_one() -> None:
    """What is measured against it would be measured against a refusal."""
    jpeg = heavy_jpeg()
    decode_jpeg(jpeg)
    assert (pixels_of(jpeg), len(jpeg) < 120_000) == (FRAME_PIXELS_MAX, True)


def test_refuses_a_damaged_jpeg() -> None:
    """The model would see colours that nobody filmed."""
    jpeg = make_jpeg()
    middle = len(jpeg) // 2
    for damage in (b"\xff\xd9" * 8, b"\xff\xc4" * 8, b"\xff\xd0\xff\xd3" * 4):
        damaged = jpeg[:middle] + damage + jpeg[middle + len(damage) :]
        assert reason(damaged) == JPEG_DAMAGED


def test_bounds_a_jpeg_before_decoding_it() -> None:
    """A small file that unfolds to gigabytes, or takes minutes, would take the server down."""
    jpeg = make_jpeg()
    at = jpeg.index(b"\xff\xc0") + 5
    huge = jpeg[:at] + struct.pack(">HH", 5_000, 5_000) + jpeg[at + 4 :]
    assert reason(huge) == "the image has more than 20000000 pixels"
    scans = jpeg + b"\xff\xda" * JPEG_SCANS_MAX
    assert reason(scans) == "the image has more than 64 scans"
    with pytest.raises(MediaError, match=f"more than {FRAME_JPEG_BYTES_MAX} bytes"):
        decode_jpeg(bytes(FRAME_JPEG_BYTES_MAX + 1))
    assert reason(bytes(IMAGE_BYTES_MAX + 1)) == f"the image has more than {IMAGE_BYTES_MAX} bytes"


def test_a_jpeg_stays_as_it_is() -> None:
    """A photograph would lose by being compressed again."""
    jpeg = make_jpeg()
    assert decode_image(jpeg) == jpeg


# -- PNG ------------------------------------------------------------------------------------------


def packed(values: list[int], bits: int) -> bytes:
    """Pack one row of samples."""
    text = "".join(f"{value:0{bits}b}" for value in values)
    text += "0" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8)


PALETTE = chunk(b"PLTE", bytes([200, 30, 30, 30, 200, 30, 30, 30, 200]))
RED, GREEN, BLUE = (200, 30, 30), (30, 200, 30), (30, 30, 200)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_grey_of_any_depth_is_seen(bits: int) -> None:
    """A scanned page would be black, or refused."""
    most = 2**bits - 1
    png = make_png([packed([0] * 32 + [most] * 32, bits)] * 32, 64, bits, 0)
    seen = pixels(decode_image(png))
    assert seen.shape == (32, 64, 3)
    assert seen[:, :28].max() < 4
    assert seen[:, 36:].min() > 251


@pytest.mark.parametrize("bits", [8, 16])
def test_colours_are_kept(bits: int) -> None:
    """The model would be asked about red and see blue."""
    rows = [row.tobytes() if bits == 8 else row.repeat(2, axis=-1).tobytes() for row in RGB]
    seen = pixels(decode_image(make_png(rows, 40, bits, 2, split=100)))
    assert np.abs(seen.astype(int) - RGB).max() <= 6
    assert np.abs(seen.astype(int) - RGB).mean() < 1


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_palette_is_looked_up(bits: int) -> None:
    """A drawing would be seen as its numbers."""
    row = packed([0] * 16 + [1] * 16 + [2] * 16, bits)
    seen = pixels(decode_image(make_png([row] * 16, 48, bits, 3, PALETTE)))
    for left, colour in ((4, RED), (20, GREEN), (36, BLUE)):
        assert np.abs(seen[8, left + 2].astype(int) - colour).max() <= 4


CLEAR = {
    "RGB and alpha": ([bytes([200, 30, 30, 0] * 16 + [200, 30, 30, 255] * 16)] * 16, 8, 6, ()),
    "half": ([bytes([0, 0, 0, 0] * 16 + [145, 0, 0, 128] * 16)] * 16, 8, 6, ()),
    "16 bits": ([bytes([200, 0, 30, 0, 30, 0, 0, 0] * 16 + [200, 0, 30, 0, 30, 0, 255, 255] * 16)]
                * 16, 16, 6, ()),
    "grey and alpha": ([bytes([90, 0] * 16 + [90, 255] * 16)] * 16, 8, 4, ()),
    "palette": ([bytes([0] * 16 + [1] * 16)] * 16, 8, 3, (PALETTE, chunk(b"tRNS", b"\0"))),
    "a clear colour": ([bytes([1, 2, 3] * 16 + [200, 30, 30] * 16)] * 16, 8, 2,
                       (chunk(b"tRNS", b"\0\1\0\2\0\3"),)),
    "a clear grey": ([bytes([7] * 16 + [90] * 16)] * 16, 8, 0, (chunk(b"tRNS", b"\0\7"),)),
}  # fmt: skip
SEEN = {"half": (200, 127, 127), "grey and alpha": (90,) * 3, "palette": GREEN,
        "a clear grey": (90,) * 3}  # fmt: skip


@pytest.mark.parametrize("name", CLEAR)
def test_what_is_transparent_is_white(name: str) -> None:
    """A logo or a drawing on a clear ground would be black on black."""
    rows, bits, colour, extra = CLEAR[name]
    seen = pixels(decode_image(make_png(rows, 32, bits, colour, *extra)))
    assert seen[:, :12].min() > 250
    assert np.abs(seen[8, 26].astype(int) - SEEN.get(name, RED)).max() <= 4


def test_an_interlaced_image_is_seen() -> None:
    """Some drawing tools write nothing else."""
    grey = RGB[:29, :37, 0] // 2 + RGB[:29, :37, 1] // 2
    passes = [grey[0::8, 0::8], grey[0::8, 4::8], grey[4::8, 0::4], grey[0::4, 2::4]]
    passes += [grey[2::4, 0::2], grey[0::2, 1::2], grey[1::2, :]]
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for part in passes for row in part))
    head = struct.pack(">IIBBBBB", 37, 29, 8, 0, 0, 0, 1)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    plain = make_png([row.tobytes() for row in grey], 37, 8, 0)
    assert decode_image(b"\x89PNG\r\n\x1a\n" + parts) == decode_image(plain)


def test_refuses_every_truncated_png() -> None:
    """The model would see a picture whose lower half is black."""
    for length in range(8, len(RGB_PNG)):
        assert reason(RGB_PNG[:length]) in {
            DAMAGED,
            "the image is a PNG that is too big, or damaged",
        }


@given(st.integers(8, len(RGB_PNG) - 1), st.integers(0, 7))
def test_refuses_every_flipped_bit(at: int, bit: int) -> None:
    """The model would see colours that nobody drew."""
    flipped = bytearray(RGB_PNG)
    flipped[at] ^= 1 << bit
    assert "damaged" in reason(bytes(flipped))


def test_refuses_a_png_that_lies() -> None:
    """A picture with too little data would be grey, one with too much a bomb."""
    rows = [row.tobytes() for row in RGB]
    short = make_png(rows, 41, 8, 2)
    long = make_png(rows, 39, 8, 2)
    unknown = make_png(rows, 40, 8, 2, chunk(b"XXXX", b""))
    twice = make_png(rows, 40, 8, 2, RGB_PNG[8:33])
    unpainted = make_png([bytes(40)] * 30, 40, 8, 3)
    for png in (short, long, unknown, twice, unpainted):
        assert reason(png) == DAMAGED


def test_refuses_a_bomb_of_data() -> None:
    """A small file would unfold to gigabytes before it is refused."""
    head = struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(200_000_000), 9)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    assert reason(b"\x89PNG\r\n\x1a\n" + parts) == DAMAGED


def test_the_largest_image_is_taken() -> None:
    """A photograph that was within the limits would be called damaged."""
    png = make_png([bytes(625)] * 4_000, 5_000, 1, 0)
    assert simplejpeg.decode_jpeg_header(decode_image(png))[:2] == (1_536, 1_920)


@pytest.mark.parametrize("colour", [2, 6])
def test_a_large_png_is_scaled_down(colour: int) -> None:
    """Screenshots of noise would fill the log and the memory with pictures nobody can see."""
    clear = {2: b"", 6: b"\xff"}[colour]
    halves = (bytes(RED) + clear) * 1_000 + (bytes(BLUE) + clear) * 1_000
    seen = pixels(decode_image(make_png([halves] * 500, 2_000, 8, colour)))
    assert seen.shape == (480, 1_920, 3)
    assert np.abs(seen[:, :950].astype(int) - RED).max() < 4
    assert np.abs(seen[:, 970:].astype(int) - BLUE).max() < 4


def test_hidden_colours_stay_hidden_in_a_large_png() -> None:
    """Edges of a drawing on nothing would take on a colour that nobody sees."""
    row = (bytes(RED) + b"\0") * 1_000 + b"\xff\xff\xff\xff" * 1_000
    seen = pixels(decode_image(make_png([row] * 500, 2_000, 8, 6)))
    assert seen.shape == (480, 1_920, 3)
    assert seen.min() == 255


def test_a_png_of_just_the_largest_side_keeps_its_size() -> None:
    """Small print would be blurred without need."""
    png = make_png([bytes(240)] * 1_080, 1_920, 1, 0)
    assert simplejpeg.decode_jpeg_header(decode_image(png))[:2] == (1_080, 1_920)


def test_text_and_profiles_are_not_unfolded() -> None:
    """A title of gigabytes, folded small, would take the server's memory."""
    bomb = zlib.compress(bytes(50_000_000), 9)
    extra = chunk(b"zTXt", b"Title\0\0" + bomb), chunk(b"iCCP", b"x\0\0" + bomb)
    rows = [row.tobytes() for row in RGB]
    assert decode_image(make_png(rows, 40, 8, 2, *extra)) == decode_image(RGB_PNG)


def test_bounds_the_chunks_of_a_png() -> None:
    """A file of a million empty chunks would keep a thread busy for seconds."""
    rows = [row.tobytes() for row in RGB]
    png = make_png(rows, 40, 8, 2, *[chunk(b"teXt", b"")] * PNG_CHUNKS_MAX)
    assert reason(png) == f"the image has more than {PNG_CHUNKS_MAX} chunks"


@given(st.sampled_from([RGB_PNG, make_jpeg(16, 24)]), st.binary(max_size=40), st.integers(0, 999))
def test_no_garbage_crashes_the_decoder(data: bytes, piece: bytes, at: int) -> None:
    """A damaged upload would end the session with an internal error."""
    with contextlib.suppress(MediaError):
        decode_image(data[:at] + piece + data[at + len(piece) :])


def test_the_same_bytes_give_the_same_picture() -> None:
    """A recording could not be replayed."""
    made: list[Any] = [decode_image(RGB_PNG) for _ in range(2)]
    assert made[0] == made[1]


# -- orientation ----------------------------------------------------------------------------------


STORED: Final[Mapping[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]] = {
    1: lambda shown: shown,
    2: lambda shown: shown[:, ::-1],
    3: lambda shown: np.rot90(shown, 2),
    4: lambda shown: shown[::-1],
    5: lambda shown: np.rot90(shown)[::-1],
    6: np.rot90,
    7: lambda shown: np.rot90(shown)[:, ::-1],
    8: lambda shown: np.rot90(shown, -1),
}
"""By orientation: how a camera stores a picture that is shown so (Exif 2.32, 4.6.4)."""


def exif(orientation: int, order: str = ">") -> bytes:
    """The EXIF data of a phone: two tags."""
    head = b"MM\0*" if order == ">" else b"II*\0"
    tags = struct.pack(f"{order}HHIHH", 0x0100, 3, 1, 640, 0)
    tags += struct.pack(f"{order}HHIHH", 0x0112, 3, 1, orientation, 0)
    return head + struct.pack(f"{order}IH", 8, 2) + tags + struct.pack(f"{order}I", 0)


def shown() -> NDArray[np.uint8]:
    """A picture whose corners all differ, in blocks that a JPEG keeps."""
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[:32, :48] = 255, 0, 0
    picture[:32, 48:] = 0, 255, 0
    picture[32:, :48] = 0, 0, 255
    return picture


def turned(kind: str, orientation: int) -> bytes:
    """The picture as a camera stores it, with its orientation."""
    stored = np.ascontiguousarray(STORED[orientation](shown()))
    height, width = stored.shape[:2]
    if kind == "PNG":
        rows = [row.tobytes() for row in stored]
        return make_png(rows, width, 8, 2, chunk(b"eXIf", exif(orientation)))
    if kind == "WebP":
        parts = webps.chunks_of(webps.encode(stored, lossless=True))
        pieces = [webps.canvas(width, height, 8), webps.chunk(b"VP8L", parts[b"VP8L"])]
        return webps.container(*pieces, webps.chunk(b"EXIF", exif(orientation, "<")))
    body = b"Exif\0\0" + exif(orientation, "<" if orientation % 2 else ">")
    jpeg = bytes(simplejpeg.encode_jpeg(stored, quality=95))
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_is_shown_upright(kind: str, orientation: int) -> None:
    """A phone's picture would lie on its side, and its text could not be read."""
    seen = pixels(decode_image(turned(kind, orientation))).astype(int)
    assert seen.shape == (64, 96, 3)
    assert np.abs(seen - shown()).mean() < 4


def test_only_a_turned_frame_is_made_anew() -> None:
    """A camera's every frame would be decoded and encoded again."""
    assert decode_jpeg(turned("JPEG", 1)) == b""
    frame = turned("JPEG", 6)
    assert not prove_small(frame)
    assert np.abs(pixels(decode_jpeg(frame)).astype(int) - shown()).mean() < 4


def test_a_large_turned_frame_is_scaled_down() -> None:
    """A photograph of a phone would take its memory twice."""
    body = b"Exif\0\0" + exif(8)
    jpeg = bytes(simplejpeg.encode_jpeg(np.zeros((2_100, 4_200, 3), np.uint8)))
    jpeg = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + jpeg[2:]
    assert pixels(decode_jpeg(jpeg)).shape == (1_920, 960, 3)


@given(st.integers(0, 40), st.binary(max_size=8))
def test_broken_exif_turns_nothing(at: int, piece: bytes) -> None:
    """A strange file would end the session with an internal error."""
    frame = turned("JPEG", 1)
    broken = frame[: 12 + at] + piece + frame[12 + at + len(piece) :]
    with contextlib.suppress(MediaError):
        decode_jpeg(broken)


def test_exif_without_end_is_bounded() -> None:
    """Sixty-five thousand tags would be read for each frame."""
    body = b"MM\0*" + struct.pack(">IH", 8, 0xFFFF)
    assert orientation(b"\xff\xd8Exif\0\0" + body + bytes(12) * 300 + exif(6)[10:]) == 1
    assert orientation(b"\xff\xd8Exif\0\0" + body) == 1
