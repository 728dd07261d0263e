"""Strict JSON, base64 and the types of fields: from wire text to checked values and back.

- A frame is one JSON object in a text frame, without duplicate keys, NaN, infinities or lone
  surrogates; anything else is a `FrameError` with a fixed reason, which closes the connection.
- A field has exactly the requested type: neither `true` nor `1.0` is an integer, an integer is a
  number. An explicit null counts as absent, as JavaScript clients send it.
- A `FieldError` names the path, the kind of the value and the limit. It may show a number or a
  length, never a client's text.
- A `FieldType` reads a `Value`, or raises `FieldError`; it writes a value that it has read. It is
  described in JSON Schema (draft 07), with its user content, which a client may want taken out of a
  recording. It knows no message.

JPEG and WAV files are checked in `protocol.wire.media`, samples in `protocol.wire.audio`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, NoReturn, TypeVar

import attrs
import orjson
import pybase64

from ..values import limits
from ..values.behaviour import ANY_PICTURE, DATA_URLS, NEWEST, SOUND_FILES
from ..values.errors import (
    CLOSE_TOO_BIG,
    ErrorCode,
    FieldError,
    FrameError,
    LocalProtocolError,
    invalid,
)
from ..values.frames import Frame, Utf8Text, count_keys, has_more, not_json, refuse_duplicates
from ..values.limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN, FRAME_BYTES_MAX, Mode
from ..values.model import SAMPLE16_BYTES, SAMPLE_BYTES, SlidingWindow
from ..values.requests import BadPicture, ReferenceAudio, Voice, VoiceName
from .audio import check_pcm, looks_float32
from .media import (
    ImageKind,
    check_frame,
    check_image,
    check_video,
    image_kind,
    read_reference_audio,
)

JSON_VALUES_MAX: Final = 65_536
"""Values a frame: no source's message has 100, and each costs 60 bytes or more once parsed, so
that 24 MiB of `{},` would fill half a gigabyte. An estimate: commas are counted, and brackets of
either kind, as nesting needs no comma; those in strings too.
"""
KEY_SHOWN: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
"""Keys that may be shown in a path; any other is a client's text and shown as `?`."""

DATA_URL: Final = re.compile(r"data:[\w.+/;= -]{0,128};base64,", re.ASCII)
"""How a data URL of bytes begins (RFC 2397)."""

T = TypeVar("T")
C = TypeVar("C", bound=str)


# -- frames -------------------------------------------------------------------------------------


def parse_frame(frame: Frame, bytes_max: int = FRAME_BYTES_MAX) -> Mapping[str, object]:
    """Read a WebSocket message as a JSON object (000, Invalid JSON; the wire decisions).

    The values are str, int, float, bool, None, list and dict. `FrameError` if it is not a JSON
    object (1003), or longer than `bytes_max` (1009).
    """
    if frame is None or len(frame) > bytes_max:
        raise FrameError(CLOSE_TOO_BIG, f"frame above {bytes_max} bytes")
    if isinstance(frame, bytes):
        raise not_json("binary frame, text frames only")
    text = frame.data if isinstance(frame, Utf8Text) else frame
    is_long = len(text) > JSON_VALUES_MAX
    if is_long and any(has_more(text, char, JSON_VALUES_MAX) for char in ",[{"):
        raise not_json(f"frame with more than {JSON_VALUES_MAX} values")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise not_json("frame is not JSON") from None
    if not isinstance(value, dict):
        raise not_json("frame is not a JSON object")
    # Each key has its colon, and some text may hold more of them. Where there are no more colons
    # than keys were kept, no key was lost to a duplicate; else those in strings are left out.
    keys = count_keys(value)
    if has_more(text, ":", keys):
        refuse_duplicates(text, keys)
    return value


def dump_frame(body: Mapping[str, object]) -> str:
    """Write a message: compact JSON, keys in the order of insertion, always the same text."""
    return orjson.dumps(body).decode()


def frame_bytes(frame: str | bytes | Utf8Text) -> int:
    """Count the bytes of a message on the wire; for ASCII without looking at it."""
    if not isinstance(frame, str) or frame.isascii():
        return len(frame)
    return len(frame.encode("utf-8", "surrogatepass"))


# -- base64 and PCM -----------------------------------------------------------------------------


def encode_base64(data: bytes) -> str:
    """Write bytes as base64, standard alphabet, padded."""
    return pybase64.b64encode_as_string(data)


# -- fields -------------------------------------------------------------------------------------


def kind_of(value: object) -> str:
    """Name the kind of a JSON value, with its length and without its content."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)} items"
        case _:
            return "an object"


@attrs.define(kw_only=True)
class Value:
    """One JSON value and its path; its methods read it as one type or raise `FieldError`.

    It is not frozen: one is made for every field, and that would take twice as long.
    """

    path: str
    value: object

    def text(self, chars_max: int | None = None, chars_min: int = 0) -> str:
        """Read a string of `chars_min` to `chars_max` characters."""
        if not isinstance(self.value, str):
            self._fail_kind("a string")
        count = len(self.value)
        if chars_max is not None and not chars_min <= count <= chars_max:
            raise invalid(self.path, f"{count} characters, allowed is {chars_min} to {chars_max}")
        return self.value

    def choice(self, options: tuple[C, ...]) -> C:
        """Read a string that is one of `options`."""
        text = self.text()
        for option in options:
            if option == text:
                return option
        raise invalid(self.path, f"{kind_of(text)}, allowed is {', '.join(options)}")

    def flag(self) -> bool:
        """Read a boolean."""
        if not isinstance(self.value, bool):
            self._fail_kind("a boolean")
        return self.value

    def integer(self, low: int = 0, high: int | None = None) -> int:
        """Read an integer from `low` up to `high`, both included."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._fail_kind("an integer")
        if self.value < low or (high is not None and self.value > high):
            self._fail_range(f"{low} to {high}" if high is not None else f"{low} and more")
        return self.value

    def number(self, low: float, high: float, open_low: Literal["", "above "] = "") -> float:
        """Read a number from `low` up to `high`; `open_low="above "` leaves `low` itself out."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self._fail_kind("a number")
        if not low <= self.value <= high or (open_low and self.value == low):
            self._fail_range(f"{open_low}{low:g} to {high:g}")
        return float(self.value)

    def items(self, count_max: int, count_min: int = 0) -> tuple[Value, ...]:
        """Read an array of `count_min` to `count_max` items."""
        if not isinstance(self.value, list):
            self._fail_kind("an array")
        count = len(self.value)
        if not count_min <= count <= count_max:
            raise invalid(self.path, f"{count} items, allowed is {count_min} to {count_max}")
        return tuple(
            Value(path=f"{self.path}[{index}]", value=item) for index, item in enumerate(self.value)
        )

    def binary(self, *, line_breaks: bool = False, data_url: bool = False) -> bytes:
        """Read strict base64: standard alphabet, correct padding, no white space.

        `line_breaks` allows CR and LF anywhere in it (RFC 2045, 6.8), `data_url` the head of a data
        URL before it, of any media type.
        """
        text = self.text()
        try:
            return pybase64.b64decode(text, validate=True)
        except ValueError:
            head = DATA_URL.match(text) if data_url else None
            if head is not None:
                rest = Value(path=self.path, value=text[head.end() :])
                return rest.binary(line_breaks=line_breaks)
            if line_breaks:  # rarely there, so looked for only now
                joined = text.replace("\r", "").replace("\n", "")
                with suppress(ValueError):
                    return pybase64.b64decode(joined, validate=True)
            raise invalid(self.path, f"{kind_of(text)} that is not base64") from None

    def pcm(
        self, samples_min: int = APPEND_SAMPLES_MIN, samples_max: int = APPEND_SAMPLES_MAX
    ) -> bytes:
        """Read base64 of float32 LE samples; the default bounds are an append's."""
        return check_pcm(self.path, self.binary(), samples_min, samples_max)

    def pcm16(self) -> bytes:
        """Read base64 of signed 16-bit LE samples, at least one."""
        return self.check_pcm16(self.binary())

    def check_pcm16(self, pcm16: bytes) -> bytes:
        """Check signed 16-bit LE samples, at least one, and return them."""
        if not pcm16:
            raise invalid(self.path, "no samples, at least 1 is needed")
        if len(pcm16) % SAMPLE16_BYTES:
            text = f"{len(pcm16)} bytes, a multiple of {SAMPLE16_BYTES} is needed (int16)"
            raise invalid(self.path, text)
        return pcm16

    def _fail_kind(self, needed: str) -> NoReturn:
        raise invalid(self.path, f"{kind_of(self.value)}, {needed} is needed")

    def _fail_range(self, allowed: str) -> NoReturn:
        shown = f"{self.value}" if _is_short(self.value) else kind_of(self.value)
        raise invalid(self.path, f"{shown}, allowed is {allowed}")


def _is_short(value: object) -> bool:
    """Whether a number has few digits; a long one is neither written nor shown."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)


class Fields:
    """Reads the fields of one JSON object and remembers which; `$` is the message's path."""

    def __init__(self, body: Mapping[str, object], path: str = "$") -> None:
        self.path = path
        self._body = body
        self._asked: set[str] = set()

    def required(self, name: str, read: Callable[[Value], T]) -> T:
        """Read a field by a method of `Value`, or a function over one.

        `FieldError` with `missing_field` if it is absent or null, else as from `read`.
        """
        self._asked.add(name)
        if self._body.get(name) is None:
            text = f"{self._at(name)}: required field is missing"
            raise FieldError(ErrorCode.MISSING_FIELD, text)
        return read(Value(path=self._at(name), value=self._body[name]))

    def refuse_unknown(self) -> None:
        """Raise `FieldError` if a field was not read, null or not."""
        for path in self._unknown():
            raise invalid(path, f"unknown field, known are {', '.join(sorted(self._asked))}")

    def _at(self, name: str) -> str:
        return f"{self.path}.{name if KEY_SHOWN.fullmatch(name) else '?'}"

    def _unknown(self) -> list[str]:
        return [self._at(name) for name in self._body if name not in self._asked]


# -- A message that is being read -----------------------------------------------------------------

Json = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Context:
    """Everything outside a message that its parsing may depend on."""

    mode: Mode
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    behaviour: int = NEWEST
    must_record: bool = False
    is_fork: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session has a change (`behaviour`)."""
        return self.behaviour >= change


@attrs.define
class ParseState:
    """One object of a message, while it is read.

    Attributes:
        path: `$` is the message itself.
        prefix: of its fields' attributes, such as `config.`.
        values: values read so far from the message, by attribute.
        aside: paths of this object's fields that are known and were not read.
        below: paths of ignored fields of the objects in it.
    """

    body: Json
    path: str
    prefix: str
    context: Context
    values: dict[str, Any]
    aside: list[str] = attrs.Factory(list)
    below: list[str] = attrs.Factory(list)


def as_object(value: object, path: str) -> Json:
    """Return a value that is an object; else `FieldError`."""
    if not isinstance(value, dict):
        raise invalid(path, f"{kind_of(value)}, an object is needed")
    return value


# -- the types of a field -----------------------------------------------------------------------

Schema = dict[str, Any]
"""A piece of JSON Schema."""
VOICE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
"""A voice's name can be no path and no hidden file, on any system."""


@attrs.frozen
class UserContent:
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
SPOKEN: Final = UserContent("audio", "pcm")
SEEN: Final = UserContent("video", "picture")
PICTURED: Final = UserContent("image", "picture")
VOICE_SOUND: Final = UserContent("voice", "sound")
VOICE_NAMED: Final = UserContent("voice", "name", VOICE_NAME)
PROMPTED: Final = UserContent("prompt", "words")
USER_TEXT: Final = UserContent("text", "words")
NAMED: Final = UserContent("name", "name")


@attrs.frozen(kw_only=True)
class FieldType:
    """The type of a field: how its value is read, written and described.

    Attributes:
        write: converts a value for writing; None writes it unchanged.
        holds: its user content; None for a number, a switch, or a word of the protocol.
        cls: the class of the value, if its docstring adds to the description.
    """

    read: Callable[[Value, ParseState], Any]
    schema: Schema
    write: Callable[[Any], object] | None = None
    holds: UserContent | None = None
    cls: type | None = None


# -- text, switches and numbers -----------------------------------------------------------------


def text(
    chars_max: int | None = None, chars_min: int = 0, *, holds: UserContent | None = None
) -> FieldType:
    """A string of `chars_min` to `chars_max` characters."""
    schema: Schema = {"type": "string"}
    if chars_min:
        schema["minLength"] = chars_min
    if chars_max is not None:
        schema["maxLength"] = chars_max
    return FieldType(
        read=lambda value, _: value.text(chars_max, chars_min), schema=schema, holds=holds
    )


def choice(options: tuple[str, ...]) -> FieldType:
    """A string that is one of several."""
    schema = {"type": "string", "enum": [str(option) for option in options]}
    return FieldType(read=lambda value, _: value.choice(options), schema=schema)


def word_of(words: Mapping[str, Any], write: Callable[[Any], str] | None = None) -> FieldType:
    """A word that stands for a value."""
    options = tuple(words)
    return FieldType(
        read=lambda value, _: words[value.choice(options)],
        write=write,
        schema=choice(options).schema,
    )


def integer(low: int = 0, high: int | None = None) -> FieldType:
    """An integer from `low` up to `high`, both included."""
    schema: Schema = {"type": "integer", "minimum": low}
    if high is not None:
        schema["maximum"] = high
    if low == high:
        schema = {"type": "integer", "const": low}
    return FieldType(read=lambda value, _: value.integer(low, high), schema=schema)


def number(low: float, high: float, open_low: Literal["", "above "] = "") -> FieldType:
    """A number from `low` up to `high`; `open_low="above "` leaves `low` itself out."""
    below = "exclusiveMinimum" if open_low else "minimum"
    schema: Schema = {"type": "number", below: low, "maximum": high}
    if low == high:
        schema = {"type": "number", "const": low}
    return FieldType(read=lambda value, _: value.number(low, high, open_low), schema=schema)


def because(kind: FieldType, why: str) -> FieldType:
    """A kind that ends its errors with the reason for its limit."""

    def read(value: Value, at: ParseState) -> Any:
        try:
            return kind.read(value, at)
        except FieldError as error:
            raise FieldError(error.code, f"{error.message}: {why}") from None

    return attrs.evolve(kind, read=read)


def or_null(kind: FieldType) -> FieldType:
    """A kind that writes null for an empty value."""
    write = kind.write
    return attrs.evolve(
        kind,
        write=lambda value: (write(value) if write else value) or None,
        schema={**kind.schema, "type": [kind.schema["type"], "null"]},
    )


def always(value: float | bool) -> FieldType:
    """A constant that the server sends and no client reads."""
    name = "boolean" if isinstance(value, bool) else "number"
    return FieldType(read=lambda found, _: found.value, schema={"type": name, "const": value})


OBJECT: Final = FieldType(
    read=lambda value, _: as_object(value.value, value.path),
    write=lambda _: {},
    schema={"type": "object", "properties": {}},
)
"""An object without meaning in its fields; it is written empty."""
TEXT: Final = text()
FLAG: Final = FieldType(read=lambda value, _: value.flag(), schema={"type": "boolean"})
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


def binary(value: Value, at: ParseState, *, line_breaks: bool = False) -> bytes:
    """Read base64 of media, also in a data URL."""
    return value.binary(line_breaks=line_breaks, data_url=at.context.behaves(DATA_URLS))


def input_sound(samples_min: int) -> FieldType:
    """Base64 of float32 LE samples, `samples_min` to `APPEND_SAMPLES_MAX`."""

    def read(value: Value, at: ParseState) -> bytes:
        return check_pcm(
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
    return FieldType(read=read, write=encode_base64, schema=schema, holds=SPOKEN)


def _sound16(value: Value, at: ParseState) -> bytes:
    pcm16 = value.check_pcm16(binary(value, at, line_breaks=True))
    if at.context.behaves(SOUND_FILES) and looks_float32(pcm16):
        raise invalid(value.path, "samples that look like float32, int16 are needed")
    return pcm16


SOUND16: Final = FieldType(
    read=_sound16,
    write=encode_base64,
    schema=base64_of(PCM16, minLength=_chars(SAMPLE16_BYTES)),
    holds=SPOKEN,
)


def _piece(value: Value, at: ParseState) -> bytes:
    data = binary(value, at)
    if not data:
        raise invalid(value.path, "no samples, at least 1 is needed")
    return data


PIECE: Final = FieldType(
    read=_piece, write=encode_base64, schema=base64_of(PCM16, minLength=_chars(1)), holds=SPOKEN
)
"""Sound in the format of its session, which knows whether it is whole samples."""
SPEECH: Final = FieldType(
    read=lambda value, _: value.pcm(samples_min=0, samples_max=limits.FRAME_BYTES_MAX),
    write=encode_base64,
    schema=base64_of(FLOAT32),
)
"""Output audio: base64 of float32 LE 24 kHz mono, of any length (000, first and last)."""


def _frame(value: Value, at: ParseState) -> bytes:
    data = binary(value, at)
    check_frame(value.path, data, None if at.context.behaves(ANY_PICTURE) else "JPEG")
    return data


def _frame_or_none(value: Value, at: ParseState) -> bytes | BadPicture:
    try:
        return _frame(value, at)
    except FieldError as error:
        if not at.context.behaves(ANY_PICTURE):
            raise
        return BadPicture(reason=error.message)


def _image_url(value: Value, _: ParseState) -> bytes:
    url = value.value if isinstance(value.value, str) else ""
    for kind, head in IMAGE_URL_HEADS.items():
        if url.startswith(head):
            data = Value(path=value.path, value=url.removeprefix(head)).binary()
            check_frame(value.path, data, kind)
            return data
    text = "only a JPEG, PNG or WebP is taken here"
    raise invalid(value.path, f"{text}: {IMAGE_URL_HEADS['JPEG']}...")


def _write_image_url(data: bytes) -> str | None:
    return IMAGE_URL_HEADS[image_kind(data) or "JPEG"] + encode_base64(data) if data else None


PICTURES: Final = ("image/jpeg", "image/png", "image/webp")
FRAME: Final = FieldType(read=_frame, write=encode_base64, schema=base64_of(*PICTURES), holds=SEEN)
"""A picture of a duplex session."""
FRAME_OF_SEVERAL: Final = attrs.evolve(FRAME, read=_frame_or_none)
"""The same next to sound, which is taken if the picture is not."""
IMAGE_URL: Final = FieldType(
    read=_image_url,
    write=_write_image_url,
    schema={"type": "string", "pattern": f"^({'|'.join(IMAGE_URL_HEADS.values())})"},
    holds=PICTURED,
)
"""A picture of a live conversation, as a data URL."""


def _file(check: Callable[[str, bytes], object], holds: UserContent, *media: str) -> FieldType:
    """Base64 of a file whose head passes a check."""

    def read(value: Value, at: ParseState) -> bytes:
        data = binary(value, at)
        check(value.path, data)
        return data

    return FieldType(read=read, write=encode_base64, schema=base64_of(*media), holds=holds)


IMAGE: Final = _file(check_image, PICTURED, *PICTURES)
VIDEO: Final = _file(check_video, UserContent("video", "video"), "video/mp4", "video/webm")


def _voice_data(voice: Voice | None) -> str | None:
    return encode_base64(voice.data) if isinstance(voice, ReferenceAudio) else None


def _voice_only(voice: Voice) -> str:
    if isinstance(voice, VoiceName):
        raise LocalProtocolError("the name of a voice has no field there, only its audio has")
    return encode_base64(voice.data)


def _voice_name(value: Value, _: ParseState) -> VoiceName:
    name = value.text(limits.VOICE_NAME_CHARS_MAX, chars_min=1)
    if not VOICE_NAME.fullmatch(name):
        found = f"{len(name)} characters that are no name of a voice: letters, digits, _, . and -"
        raise invalid(value.path, found)
    return VoiceName(name=name)


def _voice(value: Value, at: ParseState) -> ReferenceAudio:
    is_any = at.context.behaves(SOUND_FILES)
    return read_reference_audio(value.path, binary(value, at), is_any=is_any)


VOICE_OR_NAME: Final = FieldType(
    read=_voice,
    write=_voice_data,
    schema=base64_of(FLOAT32, "audio/wav"),
    holds=VOICE_SOUND,
    cls=ReferenceAudio,
)
"""Reference audio: base64 of a WAV (000) or of raw samples (001); a name is in another field."""
VOICE: Final = attrs.evolve(VOICE_OR_NAME, write=_voice_only)
"""Reference audio in a dialect without names."""
VOICE_BY_NAME: Final = FieldType(
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
