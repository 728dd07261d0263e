"""Decoding of images: a JPEG is proven and kept unchanged, a PNG or a WebP becomes a JPEG.

- A picture that its EXIF data turns or mirrors, as a phone writes it, becomes an upright JPEG.

- A PNG is proven before it is decoded: each chunk's checksum, the order of critical chunks, and
  that its data inflates to exactly the bytes of its header.
- A WebP has no checksums: its sizes must agree, so a truncated file is refused. A truncated lossy
  picture with all sizes corrected is not noticed.
- The decoder gets only the picture's chunks: text and colour profiles could inflate to gigabytes.
- What becomes a JPEG is shown on white, and scaled down to `SIDE_MAX`, as pictures of videos are.
  Gamma and colour profiles are not applied.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from protocol.values.errors import FieldError
from protocol.values.limits import FRAME_JPEG_BYTES_MAX, FRAME_PIXELS_MAX, IMAGE_BYTES_MAX
from protocol.wire.media import PNG_SIGNATURE, check_image, is_webp, read_webp

from .values import MediaError

if TYPE_CHECKING:
    from av import VideoFrame

SIDE_MAX: Final = 1_920
"""Pixels: the model sees at most nine slices of 448 x 448 of a picture."""
JPEG_SCANS_MAX: Final = 64
"""A progressive file has about 10; each scan costs a pass over the whole image."""
CODED_PIXELS_MAX: Final = FRAME_PIXELS_MAX + FRAME_PIXELS_MAX // 8
"""A decoder's allocation: it rounds each side up to blocks of 64, and crops afterwards."""
JPEG_QUALITY: Final = 95
"""Of the pictures that are made here: the model sees no difference to the source."""
SMALL_BYTES: Final = 64 * 1024
SMALL_PIXELS: Final = 640 * 480
"""A picture within both, of one scan, is proven in a quarter of a millisecond."""
PACKED_BYTES_MAX: Final = 256 * 1024
"""Of a lossless WebP, or its transparency, that this process decodes: code tables inflate to
hundreds of bytes of memory for each byte of the file."""
PNG_CHUNKS_MAX: Final = 16_384
"""64 MiB at 4 KiB each, the smallest that encoders write."""

_START_OF_SCAN: Final = b"\xff\xda"
_NEEDED: Final = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By colour type: grey, RGB, palette, grey and alpha, RGB and alpha."""
_ADAM7: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
                 (0, 1, 1, 2))  # fmt: skip
"""The passes of an interlaced image: first column and row, and the steps between them."""
_HAS_ALPHA: Final = 0x10
_NAMES: Final = {"png": "PNG", "webp": "WebP"}
_PIECE_BYTES: Final = 1 << 20
_BAND_ROWS: Final = 64


def pixels_of(data: bytes) -> int:
    """The pixels of a JPEG, PNG or WebP by its head, which was checked before; 0 for others."""
    try:
        width, height = check_image("image", data)
    except FieldError:
        return 0
    return width * height


def decode_jpeg(data: bytes, bytes_max: int = FRAME_JPEG_BYTES_MAX) -> bytes:
    """Prove that a JPEG of at most 20 megapixels decodes; else `MediaError`.

    The result is the picture upright, or empty if it is: the model decodes the file again in its
    own way.
    """
    if len(data) > bytes_max:
        raise MediaError(f"the image has more than {bytes_max} bytes")
    if data.count(_START_OF_SCAN) > JPEG_SCANS_MAX:
        raise MediaError(f"the image has more than {JPEG_SCANS_MAX} scans")
    if _jpeg_pixels(data) > FRAME_PIXELS_MAX:
        raise MediaError(f"the image has more than {FRAME_PIXELS_MAX} pixels")
    turned = orientation(data)
    if turned == UPRIGHT:
        _prove_jpeg(data)
        return b""
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    size = fitted(width, height)
    try:
        whole = simplejpeg.decode_jpeg(data, min_width=size[0], min_height=size[1])
    except ValueError:
        raise _damaged_jpeg() from None
    return encode_jpeg(
        upright(whole if whole.shape[1::-1] == size else scale(whole, *size), turned)
    )


def prove_small(data: bytes) -> bool:
    """Prove a JPEG if that takes less time than to wake a thread; else False: use `decode_jpeg`.

    `MediaError`: it is small, and damaged.
    """
    if len(data) > SMALL_BYTES or data.count(_START_OF_SCAN) != 1:
        return False
    if orientation(data) != UPRIGHT:
        return False
    if _jpeg_pixels(data) > SMALL_PIXELS:
        return False
    _prove_jpeg(data)
    return True


def _jpeg_pixels(data: bytes) -> int:
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        raise _damaged_jpeg() from None
    return int(height * width)


def _prove_jpeg(data: bytes) -> None:
    try:
        # At an eighth of its size, in grey, the whole file is still read, with half of the work.
        simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError:
        raise _damaged_jpeg() from None


def _damaged_jpeg() -> MediaError:
    return MediaError("the image is not a JPEG, or is damaged")


def encode_jpeg(picture: NDArray[np.uint8], colours: Literal["444", "420"] = "444") -> bytes:
    """A picture, uint8, shape (height, width, 3), RGB, as a JPEG file for the model.

    "420" keeps colours at half the size, as filmed.
    """
    rows = np.ascontiguousarray(picture)
    return bytes(simplejpeg.encode_jpeg(rows, quality=JPEG_QUALITY, colorsubsampling=colours))


def decode_image(data: bytes) -> bytes:
    """An upright JPEG unchanged, or another picture as a JPEG with no side above `SIDE_MAX`.

    `MediaError`: the file is of another kind, damaged, or above 16 MiB or 20 megapixels.
    """
    kind = "PNG" if data.startswith(PNG_SIGNATURE) else "WebP"
    if kind == "WebP" and not is_webp(data):
        return decode_jpeg(data, IMAGE_BYTES_MAX) or data
    try:
        width, height = check_image("image", data)
    except FieldError:
        raise MediaError(f"the image is a {kind} that is too big, or damaged") from None
    made = _decode_webp(data) if kind == "WebP" else _decode_png(data, width, height)
    return encode_jpeg(upright(made, orientation(data)))


def needs_process(data: bytes) -> bool:
    """Whether an image may inflate so far that a process of its own decodes it."""
    try:
        return is_webp(data) and read_webp("image", data).packed_bytes > PACKED_BYTES_MAX
    except FieldError:
        return False


# -- orientation (Exif 2.32, 4.6.4: tag 0x0112) -------------------------------------------------


UPRIGHT: Final = 1
"""Also of a picture whose EXIF data says nothing, or cannot be read."""
EXIF_AT_MAX: Final = 64 * 1024
"""Of a JPEG: EXIF data is the first of its segments, or the second."""
TAGS_MAX: Final = 256
_TAG: Final = 0x0112
_SHORT: Final = 3
_MIRRORED: Final = frozenset({2, 3, 6, 7})
_UPSIDE_DOWN: Final = frozenset({3, 4, 7, 8})
_LYING: Final = frozenset({5, 6, 7, 8})
"""Orientations whose rows are columns; the others are flips, which come after that."""


def orientation(data: bytes) -> int:
    """How a JPEG, PNG or WebP is to be turned, by its EXIF data: 1 to 8."""
    if data.startswith(PNG_SIGNATURE):
        at = data.find(b"eXIf")
        start = at + 4
    elif is_webp(data):
        at = data.find(b"EXIF")
        start = at + 8 + 6 * data.startswith(b"Exif\0\0", at + 8)
    else:
        at = data.find(b"Exif\0\0", 0, EXIF_AT_MAX)
        start = at + 6
    if at < 0:
        return UPRIGHT
    try:
        return _orientation_in(data, start)
    except struct.error:
        return UPRIGHT


def _orientation_in(data: bytes, start: int) -> int:
    """Read the first directory of a TIFF file in some bytes."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[start : start + 4])
    if order is None:
        return UPRIGHT
    (offset,) = struct.unpack_from(f"{order}I", data, start + 4)
    (count,) = struct.unpack_from(f"{order}H", data, start + offset)
    for number in range(min(count, TAGS_MAX)):
        at = start + offset + 2 + 12 * number
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", data, at)
        if tag == _TAG and kind == _SHORT and 1 <= value <= 8:
            return int(value)
    return UPRIGHT


def upright(picture: NDArray[np.uint8], turned: int) -> NDArray[np.uint8]:
    """Turn a picture as its orientation says; uint8, shape (height, width, 3)."""
    if turned in _LYING:
        picture = picture.swapaxes(0, 1)
    if turned in _MIRRORED:
        picture = picture[:, ::-1]
    return picture[::-1] if turned in _UPSIDE_DOWN else picture


# -- WebP (RFC 9649) ----------------------------------------------------------------------------


def _decode_webp(data: bytes) -> NDArray[np.uint8]:
    """Decode only the parts named by its header; shape (height, width, 3), RGB."""
    header = read_webp("image", data)
    body = _padded(data[header.picture])
    if header.alpha.stop:
        sides = (header.width - 1).to_bytes(3, "little") + (header.height - 1).to_bytes(3, "little")
        canvas = b"VP8X" + struct.pack("<IB3x", 10, _HAS_ALPHA) + sides
        body = canvas + _padded(data[header.alpha]) + body
    file = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body
    return _decode_still("webp", file, header.is_clear)


def _padded(chunk: bytes) -> bytes:
    return chunk + bytes(len(chunk) % 2)


# -- PNG (ISO 15948) ----------------------------------------------------------------------------


def _decode_png(data: bytes, width: int, height: int) -> NDArray[np.uint8]:
    """Prove and decode it; shape (height, width, 3), RGB."""
    chunks = list(_prove_png(data, width, height))
    names, colour = {name for name, _ in chunks}, data[25]
    if colour == 3 and b"PLTE" not in names:
        raise _damaged()
    is_clear = colour in (4, 6) or b"tRNS" in names
    file = PNG_SIGNATURE + b"".join(chunk for _, chunk in chunks)
    return _decode_still("png", file, is_clear)


def _prove_png(data: bytes, width: int, height: int) -> Iterator[tuple[bytes, bytes]]:
    """Check the chunks after a valid header; yield the needed ones, whole."""
    inflater, inflated = zlib.decompressobj(), 0
    bytes_max = _unfolded_bytes(data, width, height)
    for name, body, chunk in _chunks(data):
        if name == b"IDAT":
            inflated += _inflate(inflater, body, bytes_max - inflated)
        if name in _NEEDED:
            yield name, chunk
        elif name[0:1].isupper():
            raise _damaged()
    if not inflater.eof or inflated != bytes_max:
        raise _damaged()


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview, bytes]]:
    """The chunks up to the end's, each with a valid checksum."""
    view, at = memoryview(data), len(PNG_SIGNATURE)
    for _ in range(PNG_CHUNKS_MAX):
        head = data[at : at + 8]
        if len(head) < 8:
            raise _damaged()
        size, name = struct.unpack(">I4s", head)
        body, end = view[at + 8 : at + 8 + size], at + 12 + size
        if end > len(data) or zlib.crc32(view[at + 4 : end - 4]) != _number(data, end - 4):
            raise _damaged()
        yield name, body, data[at:end]
        if name == b"IEND":
            return
        at = end
    raise MediaError(f"the image has more than {PNG_CHUNKS_MAX} chunks")


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4])


def _inflate(inflater: zlib._Decompress, body: memoryview, bytes_max: int) -> int:
    """Inflate a piece of the data, at most a byte beyond `bytes_max`, and count it."""
    count = 0
    rest: bytes | memoryview = body
    try:
        while len(rest) and not inflater.eof and count <= bytes_max:
            count += len(inflater.decompress(rest, _PIECE_BYTES))
            rest = inflater.unconsumed_tail
    except zlib.error:
        raise _damaged() from None
    return count


def _unfolded_bytes(data: bytes, width: int, height: int) -> int:
    """The bytes that the data must inflate to: a filter byte and the samples of each row."""
    pixel_bits = data[24] * _CHANNELS[data[25]]
    passes = _ADAM7 if data[28] else ((0, 0, 1, 1),)
    total = 0
    for column, row, columns_step, rows_step in passes:
        columns = -(-(width - column) // columns_step)
        rows = -(-(height - row) // rows_step)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * pixel_bits // 8))
    return total


# -- what both have -----------------------------------------------------------------------------


def _decode_still(codec: Literal["png", "webp"], data: bytes, is_clear: bool) -> NDArray[np.uint8]:
    """Decode a file of valid structure; shape (height, width, 3), RGB, within `SIDE_MAX`."""
    import av  # It costs 50 ms, for the first such file only.

    decoder = av.CodecContext.create(codec, "r")
    decoder.thread_count = 1
    decoder.options = {"max_pixels": str(CODED_PIXELS_MAX)}
    try:
        frames = decoder.decode(av.Packet(data)) or decoder.decode(None)
    except (av.FFmpegError, ValueError):
        raise _damaged(codec) from None
    if len(frames) != 1:
        raise _damaged(codec)
    frame = frames[0]
    size = fitted(frame.width, frame.height)
    if not is_clear:
        return to_rgb(frame, *size)
    seen = _on_white(frame)  # at full size: scaled edges would mix in hidden colours
    return seen if size == (frame.width, frame.height) else scale(seen, *size)


def fitted(width: int, height: int) -> tuple[int, int]:
    """Fit a picture's size, in pixels, into `SIDE_MAX`: the same shape, each side 1 or more."""
    factor = min(Fraction(1), Fraction(SIDE_MAX, max(width, height)))
    return max(1, round(width * factor)), max(1, round(height * factor))


def scale(picture: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Scale a picture to `width` x `height` pixels; uint8, shape (rows, columns, 3), RGB."""
    from av import VideoFrame

    frame = VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
    return to_rgb(frame, width, height)


def to_rgb(frame: VideoFrame, width: int = 0, height: int = 0) -> NDArray[np.uint8]:
    """Convert a frame to uint8, shape (height, width, 3), RGB, without transparency.

    It is scaled to `width` and `height` in pixels; 0 keeps the frame's.
    """
    return _convert(frame, "rgb24", width or frame.width, height or frame.height)


def _on_white(frame: VideoFrame) -> NDArray[np.uint8]:
    """Lay a frame on white, some rows at a time."""
    seen = _convert(frame, "rgba", frame.width, frame.height)
    shown = np.empty((*seen.shape[:2], 3), np.uint8)
    for at in range(0, len(seen), _BAND_ROWS):
        band = seen[at : at + _BAND_ROWS].astype(np.uint16)
        alpha = band[..., 3:]
        shown[at : at + _BAND_ROWS] = (band[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255
    return shown


def _convert(frame: VideoFrame, form: str, width: int, height: int) -> NDArray[np.uint8]:
    from av.video.reformatter import Interpolation

    flags = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
    made = frame.reformat(width, height, form, interpolation=int(flags), threads=1)
    return made.to_ndarray().astype(np.uint8, copy=False)


def _damaged(codec: Literal["png", "webp"] = "png") -> MediaError:
    return MediaError(f"the image is a damaged {_NAMES[codec]}")
