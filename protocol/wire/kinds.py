"""The kinds of value that a field can have: how each is read, written and described.

A kind reads a `codec.Value`, or raises `FieldError`; it writes a value that it has read. `schema`
describes it in JSON Schema (draft 07), and `holds` its user content, which a client may want taken
out of a recording. Kinds know no message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

import attrs

from ..values import limits
from ..values.behaviour import ANY_PICTURE, DATA_URLS, SOUND_FILES
from ..values.errors import FieldError, LocalProtocolError
from ..values.model import SAMPLE16_BYTES, SAMPLE_BYTES
from ..values.requests import BadPicture, ReferenceAudio, Voice, VoiceName
from . import codec
from .media import ImageKind, check_frame, check_image, check_video, kind_of, read_reference_audio

Schema = dict[str, Any]
"""A piece of JSON Schema."""
VOICE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""A voice's name can be no path and no hidden file, on any system."""
T = TypeVar("T")


@attrs.frozen
class Holds:
    """The user content of a value.

    `form` is the value's: base64 of samples, of a WAV or samples, of a picture, of a video; text.
    `pattern` is that of a name, if others are refused.
    """

    kind: Literal["audio", "video", "image", "voice", "prompt", "text", "name"]
    form: Literal["pcm", "sound", "picture", "video", "words", "name"]
    pattern: re.Pattern[str] | None = None


IMAGE_URL_HEADS: Final[Mapping[ImageKind, str]] = {
    "JPEG": "data:image/jpeg;base64,",
    "PNG": "data:image/png;base64,",
    "WebP": "data:image/webp;base64,",
}
"""By kind: how a data URL of a picture begins."""
SPOKEN: Final = Holds("audio", "pcm")
SEEN: Final = Holds("video", "picture")
PICTURED: Final = Holds("image", "picture")
VOICE_SOUND: Final = Holds("voice", "sound")
VOICE_NAMED: Final = Holds("voice", "name", VOICE_NAME)
PROMPTED: Final = Holds("prompt", "words")
USER_TEXT: Final = Holds("text", "words")
NAMED: Final = Holds("name", "name")


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of value.

    Attributes:
        write: converts a value for writing; None writes it unchanged.
        holds: its user content; None for a number, a switch, or a word of the protocol.
        cls: the class of the value, if its docstring adds to the description.
    """

    read: Callable[[codec.Value, codec.Reading], Any]
    schema: Schema
    write: Callable[[Any], object] | None = None
    holds: Holds | None = None
    cls: type | None = None


# -- text, switches and numbers -----------------------------------------------------------------


def text(chars_max: int | None = None, chars_min: int = 0, *, holds: Holds | None = None) -> Kind:
    """A string of `chars_min` to `chars_max` characters."""
    schema: Schema = {"type": "string"}
    if chars_min:
        schema["minLength"] = chars_min
    if chars_max is not None:
        schema["maxLength"] = chars_max
    return Kind(read=lambda value, _: value.text(chars_max, chars_min), schema=schema, holds=holds)


def choice(options: tuple[str, ...]) -> Kind:
    """A string that is one of several."""
    schema = {"type": "string", "enum": [str(option) for option in options]}
    return Kind(read=lambda value, _: value.choice(options), schema=schema)


def word_of(words: Mapping[str, Any], write: Callable[[Any], str] | None = None) -> Kind:
    """A word that stands for a value."""
    options = tuple(words)
    return Kind(
        read=lambda value, _: words[value.choice(options)],
        write=write,
        schema=choice(options).schema,
    )


def integer(low: int = 0, high: int | None = None) -> Kind:
    """An integer from `low` up to `high`, both included."""
    schema: Schema = {"type": "integer", "minimum": low}
    if high is not None:
        schema["maximum"] = high
    if low == high:
        schema = {"type": "integer", "const": low}
    return Kind(read=lambda value, _: value.integer(low, high), schema=schema)


def number(low: float, high: float, open_low: Literal["", "above "] = "") -> Kind:
    """A number from `low` up to `high`; `open_low="above "` leaves `low` itself out."""
    below = "exclusiveMinimum" if open_low else "minimum"
    schema: Schema = {"type": "number", below: low, "maximum": high}
    if low == high:
        schema = {"type": "number", "const": low}
    return Kind(read=lambda value, _: value.number(low, high, open_low), schema=schema)


def because(kind: Kind, why: str) -> Kind:
    """A kind that ends its errors with the reason for its limit."""

    def read(value: codec.Value, at: codec.Reading) -> Any:
        try:
            return kind.read(value, at)
        except FieldError as error:
            raise FieldError(error.code, f"{error.message}: {why}") from None

    return attrs.evolve(kind, read=read)


def or_null(kind: Kind) -> Kind:
    """A kind that writes null for an empty value."""
    write = kind.write
    return attrs.evolve(
        kind,
        write=lambda value: (write(value) if write else value) or None,
        schema={**kind.schema, "type": [kind.schema["type"], "null"]},
    )


def always(value: float | bool) -> Kind:
    """A constant that the server sends and no client reads."""
    name = "boolean" if isinstance(value, bool) else "number"
    return Kind(read=lambda found, _: found.value, schema={"type": name, "const": value})


OBJECT: Final = Kind(
    read=lambda value, _: codec.as_object(value.value, value.path),
    write=lambda _: {},
    schema={"type": "object", "properties": {}},
)
"""An object without meaning in its fields; it is written empty."""
TEXT: Final = text()
FLAG: Final = Kind(read=lambda value, _: value.flag(), schema={"type": "boolean"})
INTEGER: Final = integer()

# -- sound and files ----------------------------------------------------------------------------

FLOAT32: Final = "float32 PCM"
"""Raw samples have no media type of their own."""
PCM16: Final = "int16 PCM"


def base64_of(*media: str, **more: object) -> Schema:
    """Describe base64 by the media that it may hold."""
    schema: Schema = {"type": "string", "contentEncoding": "base64", **more}
    schema["x-antiphon-media"] = list(media)
    if len(media) == 1 and "/" in media[0]:
        schema["contentMediaType"] = media[0]
    return schema


def _chars(count: int) -> int:
    return (count + 2) // 3 * 4


def binary(value: codec.Value, at: codec.Reading, *, line_breaks: bool = False) -> bytes:
    """Read base64 of media, also in a data URL."""
    return value.binary(line_breaks=line_breaks, data_url=at.context.behaves(DATA_URLS))


def input_sound(samples_min: int) -> Kind:
    """Base64 of float32 LE samples, `samples_min` to `APPEND_SAMPLES_MAX`."""

    def read(value: codec.Value, at: codec.Reading) -> bytes:
        return codec.check_pcm(
            value.path,
            binary(value, at),
            samples_min,
            limits.APPEND_SAMPLES_MAX,
            compares=at.context.behaves(SOUND_FILES),
        )

    lengths = {
        "maxLength": _chars(limits.APPEND_SAMPLES_MAX * SAMPLE_BYTES),
        "minLength": _chars(samples_min * SAMPLE_BYTES),
    }
    schema = base64_of(FLOAT32, **lengths)
    return Kind(read=read, write=codec.encode_base64, schema=schema, holds=SPOKEN)


def _sound16(value: codec.Value, at: codec.Reading) -> bytes:
    pcm16 = value.check_pcm16(binary(value, at, line_breaks=True))
    if at.context.behaves(SOUND_FILES) and codec.looks_float32(pcm16):
        raise codec.invalid(value.path, "samples that look like float32, int16 are needed")
    return pcm16


SOUND16: Final = Kind(
    read=_sound16,
    write=codec.encode_base64,
    schema=base64_of(PCM16, minLength=_chars(SAMPLE16_BYTES)),
    holds=SPOKEN,
)


def _piece(value: codec.Value, at: codec.Reading) -> bytes:
    data = binary(value, at)
    if not data:
        raise codec.invalid(value.path, "no samples, at least 1 is needed")
    return data


PIECE: Final = Kind(
    read=_piece,
    write=codec.encode_base64,
    schema=base64_of(PCM16, minLength=_chars(1)),
    holds=SPOKEN,
)
"""Sound in the format of its session, which knows whether it is whole samples."""
SPEECH: Final = Kind(
    read=lambda value, _: value.pcm(samples_min=0, samples_max=limits.FRAME_BYTES_MAX),
    write=codec.encode_base64,
    schema=base64_of(FLOAT32),
)
"""Output audio: base64 of float32 LE 24 kHz mono, of any length (000, first and last)."""


def _frame(value: codec.Value, at: codec.Reading) -> bytes:
    data = binary(value, at)
    check_frame(value.path, data, None if at.context.behaves(ANY_PICTURE) else "JPEG")
    return data


def _frame_or_none(value: codec.Value, at: codec.Reading) -> bytes | BadPicture:
    try:
        return _frame(value, at)
    except FieldError as error:
        if not at.context.behaves(ANY_PICTURE):
            raise
        return BadPicture(reason=error.message)


def _image_url(value: codec.Value, _: codec.Reading) -> bytes:
    url = value.value if isinstance(value.value, str) else ""
    for kind, head in IMAGE_URL_HEADS.items():
        if url.startswith(head):
            data = codec.Value(path=value.path, value=url.removeprefix(head)).binary()
            check_frame(value.path, data, kind)
            return data
    text = "only a JPEG, PNG or WebP is taken here"
    raise codec.invalid(value.path, f"{text}: {IMAGE_URL_HEADS['JPEG']}...")


def _write_image_url(data: bytes) -> str | None:
    return IMAGE_URL_HEADS[kind_of(data) or "JPEG"] + codec.encode_base64(data) if data else None


PICTURES: Final = ("image/jpeg", "image/png", "image/webp")
FRAME: Final = Kind(read=_frame, write=codec.encode_base64, schema=base64_of(*PICTURES), holds=SEEN)
"""A picture of a duplex session."""
FRAME_OF_SEVERAL: Final = attrs.evolve(FRAME, read=_frame_or_none)
"""The same next to sound, which is taken if the picture is not."""
IMAGE_URL: Final = Kind(
    read=_image_url,
    write=_write_image_url,
    schema={"type": "string", "pattern": f"^({'|'.join(IMAGE_URL_HEADS.values())})"},
    holds=PICTURED,
)
"""A picture of a live conversation, as a data URL."""


def _file(check: Callable[[str, bytes], object], holds: Holds, *media: str) -> Kind:
    """Base64 of a file whose head passes a check."""

    def read(value: codec.Value, at: codec.Reading) -> bytes:
        data = binary(value, at)
        check(value.path, data)
        return data

    return Kind(read=read, write=codec.encode_base64, schema=base64_of(*media), holds=holds)


IMAGE: Final = _file(check_image, PICTURED, *PICTURES)
VIDEO: Final = _file(check_video, Holds("video", "video"), "video/mp4", "video/webm")


def _voice_data(voice: Voice | None) -> str | None:
    return codec.encode_base64(voice.data) if isinstance(voice, ReferenceAudio) else None


def _voice_only(voice: Voice) -> str:
    if isinstance(voice, VoiceName):
        raise LocalProtocolError("the name of a voice has no field there, only its audio has")
    return codec.encode_base64(voice.data)


def _voice_name(value: codec.Value, _: codec.Reading) -> VoiceName:
    name = value.text(limits.VOICE_NAME_CHARS_MAX, chars_min=1)
    if not VOICE_NAME.fullmatch(name):
        found = f"{len(name)} characters that are no name of a voice: letters, digits, _, . and -"
        raise codec.invalid(value.path, found)
    return VoiceName(name=name)


def _voice(value: codec.Value, at: codec.Reading) -> ReferenceAudio:
    is_any = at.context.behaves(SOUND_FILES)
    return read_reference_audio(value.path, binary(value, at), is_any=is_any)


VOICE_OR_NAME: Final = Kind(
    read=_voice,
    write=_voice_data,
    schema=base64_of(FLOAT32, "audio/wav"),
    holds=VOICE_SOUND,
    cls=ReferenceAudio,
)
"""Reference audio: base64 of a WAV (000) or of raw samples (001); a name is in another field."""
VOICE: Final = attrs.evolve(VOICE_OR_NAME, write=_voice_only)
"""Reference audio in a dialect without names."""
VOICE_BY_NAME: Final = Kind(
    read=_voice_name,
    write=lambda voice: voice.name if isinstance(voice, VoiceName) else None,
    schema={"type": "string", "minLength": 1, "maxLength": limits.VOICE_NAME_CHARS_MAX},
    holds=VOICE_NAMED,
    cls=VoiceName,
)
"""The name of a voice in the server's library (002 and 004, ref_audio_path)."""
STOCK_VOICES: Final = frozenset(
    {
        *("alloy", "ash", "ballad", "coral", "echo", "sage", "shimmer", "verse", "marin", "cedar"),
        *("beacon", "cinder", "stone", "vesper"),
    }
)
"""Voices of OpenAI that its clients name by default: the model's own stands for them."""
