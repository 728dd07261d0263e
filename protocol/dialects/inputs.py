"""The client's input, the same in every dialect but for where it stands: audio, frames, voices.

It reads and writes the objects that hold it: `$.input` in `realtime`, the message in `duplex-v1`.
"""

from __future__ import annotations

from ..codec import Fields, Value, encode_base64
from ..limits import FRAMES_MAX, INSTRUCTIONS_CHARS_MAX, SLICES_MAX
from ..media import check_jpeg, read_reference_audio
from ..messages import Append, ReferenceAudio
from .base import Context


def read_append(fields: Fields, context: Context) -> Append:
    """Read audio and what comes with it (000, input_audio_buffer.append; 001, input.append).

    Args:
        fields: the object that holds the input.
        context: the session's mode; `audio` sets frames aside without looking at them.

    Returns:
        The append, without an `input_id` and without what was ignored.

    Raises:
        FieldError: naming the field that is wrong.
    """
    return Append(
        pcm=fields.required("audio", Value.pcm),
        frames=_read_frames(fields, context),
        force_listen=fields.optional("force_listen", Value.flag, False),
        max_slice_nums=fields.optional("max_slice_nums", read_slices, None),
    )


def append_fields(append: Append) -> dict[str, object]:
    """Write an append as the fields of the object that holds the input."""
    fields: dict[str, object] = {"audio": encode_base64(append.pcm)}
    if append.frames:
        fields["video_frames"] = [encode_base64(frame) for frame in append.frames]
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


def read_voice(value: Value) -> ReferenceAudio:
    """Read reference audio: base64 of a WAV (000) or of raw samples (001)."""
    return read_reference_audio(value.path, value.binary())


def _read_frames(fields: Fields, context: Context) -> tuple[bytes, ...]:
    if context.mode == "audio":
        if fields.has("video_frames"):
            fields.set_aside("video_frames")
        return ()
    return fields.optional("video_frames", _read_jpegs, ())


def _read_jpegs(value: Value) -> tuple[bytes, ...]:
    return tuple(_read_jpeg(item) for item in value.items(FRAMES_MAX))


def _read_jpeg(value: Value) -> bytes:
    data = value.binary()
    check_jpeg(value.path, data)
    return data
