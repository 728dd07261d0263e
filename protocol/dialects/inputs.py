"""The client's input, the same in every dialect but for where it stands: audio, frames, voices.

It reads and writes the objects that hold it: `$.input` in `realtime`, the message itself elsewhere.
What of them has another name in a dialect is told by `InputNames`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import attrs

from ..behaviour import NOTICES, RECORD_ASKED, SHORT_APPENDS
from ..codec import Fields, Value, encode_base64, invalid
from ..errors import FieldError, LocalProtocolError
from ..limits import (
    APPEND_SAMPLES_MIN,
    FRAMES_MAX,
    INPUT_ID_CHARS_MAX,
    INSTRUCTIONS_CHARS_MAX,
    SLICES_MAX,
    VOICE_NAME_CHARS_MAX,
)
from ..media import check_jpeg, read_reference_audio
from ..requests import Append, ReferenceAudio, Voice, VoiceName
from ..wire.kinds import FLAG, JPEG, NAMED, PROMPTED, VOICE_NAME, integer, text
from ..wire.nested import items
from ..wire.reading import Reading
from ..wire.table import Field, Row
from .base import Context

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class InputNames:
    """What a dialect calls the parts of an append, and how short its audio may be.

    Attributes:
        audio: the first name is the one that it writes.
        frames: of the pictures.
        samples_min: fewest samples.
    """

    audio: tuple[str, ...] = ("audio",)
    frames: str = "video_frames"
    samples_min: int = 1


COMMON_NAMES: Final = InputNames()


def read_append(fields: Fields, context: Context, names: InputNames = COMMON_NAMES) -> Append:
    """Read audio and what comes with it (000, input_audio_buffer.append; 001, input.append).

    Args:
        fields: the object that holds the input.
        context: the session's mode; `audio` sets frames aside without looking at them.
        names: what the parts are called.

    Returns:
        The append, without an `input_id` and without what was ignored.

    Raises:
        FieldError: naming the field that is wrong.
    """
    is_short = context.behaves(SHORT_APPENDS)
    samples_min = names.samples_min if is_short else APPEND_SAMPLES_MIN
    return Append(
        pcm=required_alias(fields, names.audio, lambda value: value.pcm(samples_min)),
        frames=_read_frames(fields, context, names.frames),
        force_listen=fields.optional("force_listen", Value.flag, False),
        max_slice_nums=fields.optional("max_slice_nums", read_slices, None),
    )


def append_fields(append: Append, names: InputNames = COMMON_NAMES) -> dict[str, object]:
    """Write an append as the fields of the object that holds the input."""
    fields: dict[str, object] = {names.audio[0]: encode_base64(append.pcm)}
    if append.frames:
        fields[names.frames] = [encode_base64(frame) for frame in append.frames]
    fields["force_listen"] = append.force_listen
    if append.max_slice_nums is not None:
        fields["max_slice_nums"] = append.max_slice_nums
    return fields


def read_slices(value: Value) -> int:
    """Read a slice count, 1-9 (000, max_slice_nums)."""
    return value.integer(1, SLICES_MAX)


def read_instructions(value: Value) -> str:
    """Read a system prompt."""
    return value.text(INSTRUCTIONS_CHARS_MAX)


def integer_of(low: int, high: int) -> Callable[[Value], int]:
    """Make a reader of integers from `low` to `high`."""
    return lambda value: value.integer(low, high)


def number_of(low: float, high: float) -> Callable[[Value], float]:
    """Make a reader of numbers from `low` to `high`."""
    return lambda value: value.number(low, high)


def read_notices(fields: Fields, context: Context) -> bool:
    """Read whether the client wants notices; it stands beside its other settings."""
    return context.behaves(NOTICES) and fields.optional("notices", Value.flag, False)


def read_record(fields: Fields, context: Context) -> bool:
    """Read whether the session may be recorded.

    Raises:
        FieldError: it is not to be, and must.
    """
    if not context.behaves(RECORD_ASKED):
        return True
    return fields.optional("record", _must_be if context.must_record else Value.flag, True)


def _must_be(value: Value) -> bool:
    if not value.flag():
        raise invalid(value.path, "false, but this server records all sessions of this client")
    return True


def record_fields(record: bool) -> dict[str, object]:
    """Write that a session is not to be recorded."""
    return {} if record else {"record": False}


def fixed(read: Callable[[Value], T], why: str) -> Callable[[Value], T]:
    """Make a reader of a setting that has one value: another is refused with the reason."""

    def reader(value: Value) -> T:
        try:
            return read(value)
        except FieldError as error:
            raise FieldError(error.code, f"{error.message}: {why}") from None

    return reader


def read_input_id(value: Value) -> str:
    """Read the client's own name for its input, which comes back in what answers it."""
    return value.text(INPUT_ID_CHARS_MAX, chars_min=1)


def required_alias(fields: Fields, names: tuple[str, ...], read: Callable[[Value], T]) -> T:
    """Read a field that has several names and must be there under one of them.

    Raises:
        FieldError: `missing_field` for the first name, else what `read` raises.
    """
    found = fields.alias(names, read, None)
    return fields.required(names[0], read) if found is None else found


# -- voices -------------------------------------------------------------------------------------


def read_voice(value: Value) -> ReferenceAudio:
    """Read reference audio: base64 of a WAV (000) or of raw samples (001)."""
    return read_reference_audio(value.path, value.binary())


def read_voice_name(value: Value) -> VoiceName:
    """Read the name of a voice in the server's library (002 and 004, ref_audio_path)."""
    name = value.text(VOICE_NAME_CHARS_MAX, chars_min=1)
    if not VOICE_NAME.fullmatch(name):
        text = f"{len(name)} characters that are no name of a voice: letters, digits, _, . and -"
        raise invalid(value.path, text)
    return VoiceName(name=name)


def read_any_voice(fields: Fields, data: str, path: str) -> Voice | None:
    """Read reference audio, or else the name of a voice (004: the data comes first).

    Args:
        fields: the object that may hold either.
        data: the name of the field with the audio.
        path: the name of the field with the voice's name; unread where there is audio.

    Returns:
        The voice; None where there is neither.
    """

    def read(value: Value) -> Voice:
        is_name = value.path.endswith(f".{path}")
        return read_voice_name(value) if is_name else read_voice(value)

    return fields.alias((data, path), read, None)


def encode_voice(voice: Voice) -> str:
    """Write reference audio as base64.

    Raises:
        LocalProtocolError: it is the name of a voice, which has no such field.
    """
    if isinstance(voice, VoiceName):
        raise LocalProtocolError("the name of a voice has no field there, only its audio has")
    return encode_base64(voice.data)


def any_voice_fields(voice: Voice | None, data: str, path: str) -> dict[str, object]:
    """Write what `read_any_voice` reads."""
    match voice:
        case None:
            return {}
        case VoiceName(name=name):
            return {path: name}
        case ReferenceAudio():
            return {data: encode_base64(voice.data)}


# -- frames -------------------------------------------------------------------------------------


def read_jpeg(value: Value) -> bytes:
    """Read a frame: base64 of a JPEG whose header is checked."""
    data = value.binary()
    check_jpeg(value.path, data)
    return data


def _read_frames(fields: Fields, context: Context, name: str) -> tuple[bytes, ...]:
    if context.mode == "audio":
        if fields.has(name):
            fields.set_aside(name)
        return ()
    return fields.optional(name, _read_jpegs, ())


def _read_jpegs(value: Value) -> tuple[bytes, ...]:
    return tuple(read_jpeg(item) for item in value.items(FRAMES_MAX))


# -- tables -------------------------------------------------------------------------------------

SLICES: Final = integer(1, SLICES_MAX)
"""A slice count (000, max_slice_nums)."""
PROMPT: Final = text(INSTRUCTIONS_CHARS_MAX, holds=PROMPTED)
INPUT_ID: Final = Field("input_id", text(INPUT_ID_CHARS_MAX, 1, holds=NAMED), None, omit=True)
"""The client's own name for its input, which comes back in what answers it."""
FORCE_LISTEN: Final = Field("force_listen", FLAG, False)
APPEND_SLICES: Final = Field("max_slice_nums", SLICES, None, omit=True)


def frames(name: str) -> Field:
    """Make the row of an append's pictures; `mode=audio` does not look at them."""
    kind = items(JPEG, FRAMES_MAX)
    return Field(name, kind, (), attr="frames", omit=True, aside_in=("audio",))


def _record(value: Value, at: Reading) -> bool:
    if not value.flag() and at.context.must_record:
        raise invalid(value.path, "false, but this server records all sessions of this client")
    return bool(value.value)


RECORD: Final = Field(
    "record",
    attrs.evolve(FLAG, read=_record),
    True,
    omit=True,
    rank=9,
    since=RECORD_ASKED,
)
"""Whether the session may be recorded."""
ASKED: Final[tuple[Row, ...]] = (
    Field("notices", FLAG, False, omit=True, rank=9, since=NOTICES),
    RECORD,
)
"""What a client asks of the server beside its settings."""
