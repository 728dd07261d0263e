"""Header checks of images, sound and videos: the declared format, sizes and bounds.

Only headers and sizes are read, in bounded steps, so that a bomb is refused before anything is
allocated for it. Nothing is decoded here: a decoder off the event loop checks the body, and its
result comes back as an event. Every refusal is a `FieldError` (`invalid_payload`), and `path` is
the place in the message for that error. Of a video, and of a sound file that is not a WAV, only the
size and the head are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NoReturn

import attrs

from ..values import limits
from ..values.errors import invalid
from ..values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from ..values.requests import AudioPart, ReferenceAudio
from .audio import check_pcm

JPEG_STEPS_MAX: Final = 1_000
"""Segments and fill bytes before the frame header; 255 of a colour profile is the most in use."""
AUDIO_BYTES_MAX: Final = 64 * 1024 * 1024
"""A conversation's sound file: 300 s of 48 kHz stereo 16-bit, headers included."""
AUDIO_S_MIN: Final = limits.AUDIO_SAMPLES_MIN / INPUT_RATE_HZ
"""`AUDIO_SAMPLES_MIN`, at any rate."""
EBML_HEAD_BYTES_MAX: Final = 128
"""Matroska must have named itself by here; files in use have a head of 40 bytes."""

ImageKind = Literal["JPEG", "PNG", "WebP"]
Container = Literal["mp4", "matroska"]
"""Of a video: MP4 and QuickTime (ISO 14496-12) are one family, Matroska and WebM another."""

# -- images -------------------------------------------------------------------------------------


def image_kind(data: bytes) -> ImageKind | None:
    """Return an image's kind by its head; None if it is of another kind."""
    if data.startswith(PNG_SIGNATURE):
        return "PNG"
    if data.startswith(_SOI):
        return "JPEG"
    return "WebP" if is_webp(data) else None


def check_frame(path: str, data: bytes, kind: ImageKind | None = "JPEG") -> tuple[int, int]:
    """Check a picture of a live session, of a declared kind; returns width and height in pixels.

    None is any kind.

    `FieldError` for another kind, or a picture bigger than a frame may be.
    """
    check_bytes(path, data, limits.FRAME_JPEG_BYTES_MAX)
    if kind is not None and image_kind(data) != kind:
        raise invalid(path, f"{len(data)} bytes that are not a {kind}")
    return check_image(path, data)


def check_image(path: str, data: bytes) -> tuple[int, int]:
    """Check a conversation's JPEG, PNG or WebP; returns width and height in pixels.

    `FieldError` for another format, or a bigger image.
    """
    check_bytes(path, data, limits.IMAGE_BYTES_MAX)
    match image_kind(data):
        case "PNG":
            return _check_sides(path, "PNG", *_png_size(path, data))
        case "JPEG":
            return _check_sides(path, "JPEG", *_frame_size(path, data))
        case "WebP":
            header = read_webp(path, data)
            return _check_sides(path, "WebP", header.width, header.height)
    raise invalid(path, f"{len(data)} bytes that are no JPEG, PNG or WebP")


def _check_sides(path: str, kind: ImageKind, width: int, height: int) -> tuple[int, int]:
    """Check a picture's sides against the limits, before anything is allocated by them."""
    size = f"a {kind} of {width} x {height} pixels"
    if not width or not height:
        raise invalid(path, size)
    if width * height > limits.FRAME_PIXELS_MAX:
        raise invalid(path, f"{size}, at most {limits.FRAME_PIXELS_MAX} are allowed")
    if max(width, height) > limits.FRAME_SIDES_RATIO_MAX * min(width, height):
        raise invalid(path, f"{size}, at most {limits.FRAME_SIDES_RATIO_MAX} to 1 is allowed")
    return width, height


# -- PNG (ISO 15948) ----------------------------------------------------------------------------

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_IHDR: Final = b"\0\0\0\x0dIHDR"
_PNG_BITS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""Bits a sample by colour type: grey, RGB, palette, grey and alpha, RGB and alpha (11.2.2)."""


def _png_size(path: str, data: bytes) -> tuple[int, int]:
    """Read the header, which must be the first chunk."""
    body = data[len(PNG_SIGNATURE) : len(PNG_SIGNATURE) + len(_IHDR) + 13]
    if len(body) < len(_IHDR) + 13 or not body.startswith(_IHDR):
        raise invalid(path, "a PNG without a whole header")
    width, height, *form = struct.unpack_from(">IIBBBBB", body, len(_IHDR))
    bits, colour, compression, filtering, interlace = form
    if bits not in _PNG_BITS.get(colour, ()) or compression or filtering or interlace > 1:
        raise invalid(path, "a PNG with a broken header")
    return int(width), int(height)


# -- JPEG (ITU T.81, Annex B) -------------------------------------------------------------------

_SOI: Final = b"\xff\xd8"
_NOT_FRAME_HEADERS: Final = frozenset({0xC4, 0xC8, 0xCC})
"""DHT, JPG and DAC: they stand among SOF0 to SOF15, but are not frame headers."""
_FRAME_HEADERS: Final = frozenset(range(0xC0, 0xD0)) - _NOT_FRAME_HEADERS
_OUT_OF_PLACE: Final = frozenset({0x00, 0x01, *range(0xD0, 0xDB)})
"""A stuffed byte, TEM, restarts, another SOI, EOI and SOS: not before a frame header."""


def _frame_size(path: str, data: bytes) -> tuple[int, int]:
    at = len(_SOI)
    for _ in range(JPEG_STEPS_MAX):
        if at + 4 > len(data):
            raise invalid(path, "a JPEG that is truncated before its frame header")
        if data[at] != 0xFF:
            raise invalid(path, f"a JPEG without a marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte: markers may have any number of them before
            at += 1
            continue
        if marker in _OUT_OF_PLACE:
            raise invalid(path, f"a JPEG without a frame header before byte {at}")
        length = int.from_bytes(data[at + 2 : at + 4])
        if marker in _FRAME_HEADERS:
            return _read_frame_header(path, data[at + 4 : at + 2 + length], length)
        if length < 2:
            raise invalid(path, f"a JPEG with a broken segment at byte {at}")
        at += 2 + length
    raise invalid(path, f"a JPEG without a frame header in {JPEG_STEPS_MAX} segments")


def _read_frame_header(path: str, body: bytes, length: int) -> tuple[int, int]:
    """Read precision, height, width and the count of components, 3 bytes each."""
    if len(body) < 6 or len(body) != length - 2:
        raise invalid(path, "a JPEG that is truncated in its frame header")
    _, height, width, components = struct.unpack_from(">BHHB", body)
    if not components or len(body) != 6 + 3 * components:
        raise invalid(path, "a JPEG with a broken frame header")
    return width, height


# -- audio --------------------------------------------------------------------------------------

SoundKind = Literal["WAV", "RF64", "AIFF", "FLAC", "Ogg", "MP3"]
SOUND_HEADS: Final[Mapping[SoundKind, bytes]] = {
    "RF64": b"RF64\xff\xff\xff\xffWAVE",
    "AIFF": b"FORM\0\0\0\0AIFF",
    "FLAC": b"fLaC",
    "Ogg": b"OggS",
    "MP3": b"ID3\3",
}
"""By kind: a head that shows it."""
PACKED_KINDS: Final = frozenset({"FLAC", "Ogg", "MP3"})
"""Kinds that say little of how much they unpack to."""
_MP3_RATES_HZ: Final = (44_100, 48_000, 32_000)
_MP3_KBITS: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_LOW: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
"""Of layer III, by index: of version 1, and of versions 2 and 2.5."""
_OTHER_KINDS: Final = "WAV, AIFF, FLAC, Ogg (Vorbis or Opus) and MP3 are taken"


def sound_kind(data: bytes) -> SoundKind | None:
    """Return a sound file's kind by its head; None for another kind, or samples.

    No sound begins like such a head: read as float32 samples, it is far too loud, or, of MP3, two
    frames that follow one another.
    """
    if data.startswith(b"RIFF"):
        return "WAV"
    form = data[8:12]
    if (data.startswith(b"RF64") and form == b"WAVE") or form in (b"AIFF", b"AIFC"):
        return "RF64" if form == b"WAVE" else "AIFF"
    if data.startswith(b"ID3"):
        return "MP3"
    for kind in ("FLAC", "Ogg"):
        if data.startswith(SOUND_HEADS[kind]):
            return kind
    size = _mp3_frame_bytes(data, 0)
    return "MP3" if size and _mp3_frame_bytes(data, size) else None


def _mp3_frame_bytes(data: bytes, at: int) -> int:
    """Return the size of a frame of MPEG layer III (ISO 11172-3, 2.4.1.3); 0 if there is none."""
    head = int.from_bytes(data[at : at + 4])
    version, layer = head >> 19 & 3, head >> 17 & 3
    index, rate = head >> 12 & 15, head >> 10 & 3
    if head >> 21 != 0x7FF or version == 1 or layer != 1 or not 0 < index < 15 or rate == 3:
        return 0
    kbits = (_MP3_KBITS if version == 3 else _MP3_KBITS_LOW)[index]
    rate_hz = _MP3_RATES_HZ[rate] >> (3 - version if version else 2)
    return (144 if version == 3 else 72) * kbits * 1000 // rate_hz + (head >> 9 & 1)


def read_reference_audio(path: str, data: bytes, *, is_any: bool = False) -> ReferenceAudio:
    """Read a sound file (000) or raw float32 LE 16 kHz mono (001), told apart by the head.

    `is_any`: the file is of any kind of `sound_kind`; else it is a WAV that knows its size. It is
    not decoded; raw samples are finite. `FieldError` if it is neither, or not 0.5-30 s long.
    """
    kind = sound_kind(data)
    if kind == "WAV":
        check_wav(path, data, is_piped=is_any)
    elif is_any and is_sound_file(path, data):
        check_bytes(path, data, limits.WAV_BYTES_MAX)
    else:
        samples_min = int(limits.REFERENCE_S_MIN * INPUT_RATE_HZ)
        samples_max = limits.REFERENCE_S_MAX * INPUT_RATE_HZ
        pcm = check_pcm(path, data, samples_min, samples_max, compares=is_any)
        return ReferenceAudio(data=pcm, is_file=False)
    return ReferenceAudio(data=data, is_file=True)


def is_sound_file(path: str, data: bytes) -> bool:
    """Whether it is a sound file, and not samples; `FieldError` for a file of another kind."""
    kind, container = sound_kind(data), container_of(data)
    if kind is None and container is not None:
        raise invalid(path, f"a file of {container}, {_OTHER_KINDS}")
    return kind is not None


def read_audio(
    path: str, data: bytes, rate_hz: int = INPUT_RATE_HZ, *, is_any: bool = False
) -> AudioPart:
    """Read a conversation's sound file or raw float32 LE mono, told apart by the head.

    `rate_hz` is of raw samples, 8-192 kHz, and without meaning in the result for a file; `is_any`
    as in `read_reference_audio`. It is not decoded; raw samples are finite. `FieldError` if it is
    neither, not 0.1-300 s long, or of another rate.
    """
    check_bytes(path, data, AUDIO_BYTES_MAX)
    if data.startswith(b"RIFF"):
        check_wav(
            path,
            data,
            bytes_max=AUDIO_BYTES_MAX,
            s_min=AUDIO_S_MIN,
            s_max=limits.AUDIO_S_MAX,
            is_piped=is_any,
        )
        return AudioPart(data=data, is_file=True)
    if is_any and is_sound_file(path, data):
        return AudioPart(data=data, is_file=True)
    if not WAV_RATE_HZ_MIN <= rate_hz <= WAV_RATE_HZ_MAX:
        text = f"samples of {rate_hz} Hz, allowed is {WAV_RATE_HZ_MIN} to {WAV_RATE_HZ_MAX}"
        raise invalid(path, text)
    samples_min = math.ceil(limits.AUDIO_SAMPLES_MIN * rate_hz / INPUT_RATE_HZ)
    pcm = check_pcm(path, data, samples_min, limits.AUDIO_S_MAX * rate_hz, compares=is_any)
    return AudioPart(data=pcm, is_file=False, rate_hz=rate_hz)


def audio_s(part: AudioPart) -> float | None:
    """Return the seconds of a conversation's sound, by its header; None if that is not known."""
    if not part.is_file:
        return len(part.data) / (SAMPLE_BYTES * part.rate_hz)
    if sound_kind(part.data) != "WAV":
        return None
    header = read_wav("audio", part.data, is_piped=True)
    return header.samples / header.rate_hz


# -- video --------------------------------------------------------------------------------------

_MP4_BOXES: Final = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
"""The first boxes of such files; QuickTime had no `ftyp` at first."""
_EBML: Final = b"\x1a\x45\xdf\xa3"
_DOC_TYPES: Final = (b"matroska", b"webm")


def check_video(path: str, data: bytes) -> Container:
    """Check a video's size, and return its container by its head; the content is not checked.

    `FieldError` if it is too big, or in no accepted container.
    """
    check_bytes(path, data, limits.VIDEO_BYTES_MAX)
    container = container_of(data)
    if container is None:
        text = f"{len(data)} bytes that are no video of MP4, QuickTime, Matroska or WebM"
        raise invalid(path, text)
    return container


def container_of(data: bytes) -> Container | None:
    """Return a video's container by its head, at any size; None if it is not accepted."""
    if data[4:8] in _MP4_BOXES:
        return "mp4"
    if data.startswith(_EBML):
        head = data[:EBML_HEAD_BYTES_MAX]
        if any(name in head for name in _DOC_TYPES):
            return "matroska"
    return None


# -- Header checks of WAV files -------------------------------------------------------------------
#
# Block size, byte rate and chunk sizes must agree with each other and with the bytes present; a
# WAV that contradicts itself is a `FieldError`, with the `path` of the field. Neither samples nor
# chunks after the data are read.

WAV_CHUNKS_MAX: Final = 64
"""Chunks before the data; recorders write five or six."""
UNKNOWN_SIZE_MIN: Final = 0x7FFF_0000
"""Of a chunk: encoders that write to a pipe say 2 or 4 GiB, or a little less."""
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
    """The format of a WAV file; `samples` counts each channel's, and `data_at` is their place."""

    channels: int
    rate_hz: int
    sample_bits: int
    is_float: bool
    samples: int
    data_at: int = attrs.field(default=0, eq=False)

    @property
    def data_bytes(self) -> int:
        """Bytes of the samples."""
        return self.samples * self.channels * self.sample_bits // 8


def check_wav(
    path: str,
    data: bytes,
    *,
    bytes_max: int = limits.WAV_BYTES_MAX,
    s_min: float = limits.REFERENCE_S_MIN,
    s_max: float = limits.REFERENCE_S_MAX,
    is_piped: bool = False,
) -> WavHeader:
    """Check a WAV's header and its bounds: 8-192 kHz, 1-8 channels, size and duration.

    The default bounds are those of reference audio; `is_piped` as in `read_wav`. `FieldError` if it
    is no such WAV.
    """
    check_bytes(path, data, bytes_max)
    header = read_wav(path, data, is_piped=is_piped)
    seconds = header.samples / header.rate_hz
    if not s_min <= seconds <= s_max:
        raise invalid(path, f"{seconds:.3f} s of audio, allowed is {s_min:g} to {s_max:g} s")
    return header


def read_wav(path: str, data: bytes, *, is_piped: bool = False) -> WavHeader:
    """Read the header of a WAV of any length, and compare it with the bytes present.

    `is_piped`: it may come from a program that wrote it to a pipe, and left its sizes unknown: 0,
    or the largest. `FieldError` if it is not a WAV, or contradicts itself.
    """
    if len(data) < 12 or not data.startswith(b"RIFF") or data[8:12] != b"WAVE":
        raise invalid(path, f"{len(data)} bytes that are not a WAV")
    size = int.from_bytes(data[4:8], "little")
    end = len(data) if is_piped and _is_unknown(size) else 8 + size
    if end > len(data):
        raise invalid(path, f"a WAV that says {end} bytes and has {len(data)}")
    return _walk_chunks(path, data, end, is_piped)


def _is_unknown(size: int) -> bool:
    """Whether a size is that of a file that was not finished: 0, or near 2 or 4 GiB."""
    return size == 0 or size >= UNKNOWN_SIZE_MIN


def _walk_chunks(path: str, data: bytes, end: int, is_piped: bool) -> WavHeader:
    """Walk the chunks up to the data, which the format must precede."""
    at = 12
    form: WavHeader | None = None
    for _ in range(WAV_CHUNKS_MAX):
        if at + 8 > end:
            raise invalid(path, "a WAV without a data chunk")
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if is_piped and name == b"data" and form is not None and _is_unknown(size):
            block_bytes = form.channels * form.sample_bits // 8
            size = (len(data) - at) // block_bytes * block_bytes
            end = len(data)
        if at + size > end:
            raise invalid(path, f"a WAV with a chunk of {size} bytes where {end - at} are left")
        if name == b"fmt ":
            form = _read_format(path, data[at : at + size])
        if name == b"data":
            return attrs.evolve(_count_samples(path, form, size), data_at=at)
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


# -- Header checks of WebP pictures (RFC 9649) ----------------------------------------------------
#
# The sizes of the file, of its chunks and of its canvas must agree with each other and with the
# bytes present; a WebP that contradicts itself is a `FieldError`, with the `path` of the field.
# Neither pixels nor chunks after the picture are read. An animated picture is refused by name: a
# model could see any of its frames.

WEBP_CHUNKS_MAX: Final = 64
"""Chunks up to the picture: encoders write only a canvas, a colour profile and transparency, and
readers skip others.
"""

_FILE_HEAD: Final = struct.Struct("<4sI4s")
_CHUNK_HEAD: Final = struct.Struct("<4sI")
_CANVAS_BYTES: Final = 10
_IS_ANIMATED: Final = 0x02
_LOSSY_HEAD_BYTES: Final = 10
_START_CODE: Final = b"\x9d\x01\x2a"
_SIDE_BITS: Final = 14
_SIDE_MASK: Final = (1 << _SIDE_BITS) - 1
_LOSSLESS_HEAD_BYTES: Final = 5
_LOSSLESS_SIGNATURE: Final = 0x2F
_RAW_ALPHA: Final = 0
_PACKED_ALPHA: Final = 1


@attrs.frozen(kw_only=True)
class WebpHeader:
    """The structure of a WebP file; sizes in pixels.

    Attributes:
        picture: the chunk of the picture, whole.
        is_lossless: VP8L, else VP8.
        alpha: the chunk of its transparency, whole; empty without one, and for a lossless picture.
        is_clear: it may be transparent.
        packed_bytes: bytes packed as lossless pictures are, transparency included.
    """

    width: int
    height: int
    picture: slice
    is_lossless: bool
    alpha: slice
    is_clear: bool
    packed_bytes: int


def is_webp(data: bytes) -> bool:
    """Whether a file's head is a WebP's."""
    return data.startswith(b"RIFF") and data[8:12] == b"WEBP"


def read_webp(path: str, data: bytes) -> WebpHeader:
    """Read the header of a WebP of any size, and compare it with the bytes present.

    `is_webp` must be true. `FieldError` if it is animated, or contradicts itself.
    """
    canvas: tuple[int, int] | None = None
    alpha, packed_bytes, view = slice(0, 0), 0, memoryview(data)
    for number, (name, chunk) in enumerate(_chunks(path, data)):
        body = view[chunk.start + _CHUNK_HEAD.size : chunk.stop]
        if name == b"VP8X" and number == 0:
            canvas = _read_canvas(path, body)
        elif name == b"ALPH" and canvas is not None and alpha.stop == 0:
            packed_bytes = _read_alpha(path, body, canvas)
            alpha = chunk
        elif name in (b"VP8 ", b"VP8L") and (number == 0 or canvas is not None):
            is_lossless = name == b"VP8L"
            read = _read_lossless if is_lossless else _read_lossy
            width, height, has_alpha = read(path, body)
            if canvas is not None and canvas != (width, height):
                size = f"{width} x {height} pixels on a canvas of {canvas[0]} x {canvas[1]}"
                raise invalid(path, f"a WebP of {size}")
            return WebpHeader(
                width=width,
                height=height,
                picture=chunk,
                is_lossless=is_lossless,
                alpha=slice(0, 0) if is_lossless else alpha,
                is_clear=has_alpha if is_lossless else alpha.stop > 0,
                packed_bytes=len(body) if is_lossless else packed_bytes,
            )
        elif number == 0 or name in (b"VP8X", b"ALPH", b"VP8 ", b"VP8L", b"ANMF", b"ANIM"):
            raise invalid(path, f"a WebP with a chunk out of place at byte {chunk.start}")
    raise invalid(path, "a WebP without a picture")


def _chunks(path: str, data: bytes) -> Iterator[tuple[bytes, slice]]:
    """Walk the chunks: the name and place of each, without its padding."""
    if len(data) < _FILE_HEAD.size:
        raise invalid(path, "a WebP without a whole header")
    _, size, _ = _FILE_HEAD.unpack_from(data)
    at, end = _FILE_HEAD.size, 8 + size
    if end > len(data):
        raise invalid(path, f"a WebP that says {end} bytes and has {len(data)}")
    for _ in range(WEBP_CHUNKS_MAX):
        if at + _CHUNK_HEAD.size > end:
            return
        name, size = _CHUNK_HEAD.unpack_from(data, at)
        stop = at + _CHUNK_HEAD.size + size
        if stop > end:
            left = end - at - _CHUNK_HEAD.size
            raise invalid(path, f"a WebP with a chunk of {size} bytes where {left} are left")
        yield name, slice(at, stop)
        at = stop + size % 2  # chunks are padded to an even length
    raise invalid(path, f"a WebP without a picture in {WEBP_CHUNKS_MAX} chunks")


def _read_canvas(path: str, body: memoryview) -> tuple[int, int]:
    """Read the extended header: flags, and the canvas (RFC 9649, 2.7)."""
    if len(body) < _CANVAS_BYTES:
        raise invalid(path, "a WebP with a broken header")
    if body[0] & _IS_ANIMATED:
        raise invalid(path, "an animated WebP, only still pictures are taken")
    return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")


def _read_alpha(path: str, body: memoryview, canvas: tuple[int, int]) -> int:
    """Check the head of the transparency; returns how many of its bytes are packed."""
    how = body[0] & 3 if body else None
    is_whole = how == _PACKED_ALPHA or len(body) > canvas[0] * canvas[1]
    if how not in (_RAW_ALPHA, _PACKED_ALPHA) or not is_whole:
        raise invalid(path, "a WebP with broken transparency")
    return len(body) if how == _PACKED_ALPHA else 0


def _read_lossy(path: str, body: memoryview) -> tuple[int, int, bool]:
    """Read the head of a VP8 frame: a visible key frame (RFC 6386, 9.1)."""
    tag = int.from_bytes(body[:3], "little")
    is_key, is_shown, first_part_bytes = not tag & 1, tag >> 4 & 1, tag >> 5
    is_whole = len(body) >= _LOSSY_HEAD_BYTES + first_part_bytes
    if not (is_key and is_shown and is_whole) or bytes(body[3:6]) != _START_CODE:
        raise invalid(path, "a WebP with a broken header")
    width, height = struct.unpack_from("<HH", body, 6)
    return width & _SIDE_MASK, height & _SIDE_MASK, False


def _read_lossless(path: str, body: memoryview) -> tuple[int, int, bool]:
    """Read the head of a VP8L picture: its sides, and whether it is transparent (RFC 9649, 3.4)."""
    form = int.from_bytes(body[1:_LOSSLESS_HEAD_BYTES], "little")
    version = form >> 2 * _SIDE_BITS + 1
    if len(body) < _LOSSLESS_HEAD_BYTES or body[0] != _LOSSLESS_SIGNATURE or version:
        raise invalid(path, "a WebP with a broken header")
    width, height = form & _SIDE_MASK, form >> _SIDE_BITS & _SIDE_MASK
    return 1 + width, 1 + height, bool(form >> 2 * _SIDE_BITS & 1)
