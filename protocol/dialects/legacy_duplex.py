"""The dialect of 002: `prepare`, `audio_chunk`, `result`, and a session that can be paused.

Choices beside what 002 says:
- `ref_audio_path` is the name of a voice of the server's library, never a path; data wins over it.
- `video_frame` in mode=audio is set aside unseen: a `See` without a frame.
- An end that was nobody's wish is told twice, by an `error` with its code and by `stopped`, for
  clients wait for `stopped`. It is read as the end that the `error` names; the `stopped` after it
  is another end, of a session that is over by then. A timeout is told by `timeout` alone, and its
  text says whether it was the pause's.
- `stop` has no reason, so a client's own words are left unsaid rather than its goodbye refused.

What 002 cannot show: ids of responses, input and sessions once prepared, what prefill took, units
dropped, and whether the recording goes on. The reading side leaves ids empty and takes the name of
the recording to mean that there is one. That an operator cancelled a session reads as a stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from ..codec import Fields, Value, dump_frame, encode_base64
from ..errors import LocalProtocolError
from ..messages import (
    Closed,
    Created,
    GoingAway,
    Interrupted,
    Listen,
    Mode,
    Paused,
    Pending,
    Resumed,
    ServerMessage,
    Speech,
)
from ..requests import (
    Append,
    ClientMessage,
    CloseRequest,
    Init,
    Interrupt,
    Pause,
    Report,
    Request,
    Resume,
    See,
)
from . import legacy
from . import legacy_results as results
from .base import Context, Json, no_frame, refusal
from .inputs import (
    InputNames,
    any_voice_fields,
    append_fields,
    encode_voice,
    read_any_voice,
    read_append,
    read_instructions,
    read_jpeg,
    read_notices,
    read_record,
    read_slices,
    read_voice,
    record_fields,
    required_alias,
)
from .settings import config_fields, merge_slices, read_config

NAMES: Final = InputNames(audio=("audio", "audio_base64"), frames="frame_base64_list")

_OWN: Final[Mapping[str, Request]] = {
    "prepare": Request.INIT,
    "audio_chunk": Request.APPEND,
    "video_frame": Request.SEE,
    "pause": Request.PAUSE,
    "resume": Request.RESUME,
    "stop": Request.CLOSE,
    "interrupt": Request.INTERRUPT,
    "client_diagnostic": Request.REPORT,
}
_VOICE: Final = ("ref_audio_base64", "ref_audio_path")


class LegacyDuplex:
    """The dialect of 002; see `base.Dialect` for what its methods do."""

    @property
    def name(self) -> str:
        """`legacy-duplex`."""
        return "legacy-duplex"

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is."""
        kind = body.get("type")
        return _OWN.get(kind, Request.UNKNOWN) if isinstance(kind, str) else Request.UNKNOWN

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        fields = Fields(body)
        match request:
            case Request.INIT:
                return _parse_prepare(fields, context)
            case Request.APPEND:
                return _parse_audio_chunk(fields, context)
            case Request.SEE:
                return _parse_video_frame(fields, context)
            case Request.PAUSE:
                return Pause(timeout_s=fields.optional("timeout", results.read_pause, None))
            case Request.RESUME:
                return Resume()
            case Request.INTERRUPT:
                return Interrupt()
            case Request.REPORT:
                fields.optional_child("metrics")
                return Report()
            case Request.CLOSE:
                return CloseRequest()
        raise refusal(request, body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        match message:
            case Created():
                return (results.encode_prepared(message),)
            case Listen() | Speech() | Pending():
                return (results.encode_result(message),)
            case Paused(timeout_s=timeout_s):
                return (dump_frame({"type": "paused", "timeout": timeout_s}),)
            case Resumed():
                return (dump_frame({"type": "resumed"}),)
            case Interrupted():
                return (dump_frame({"type": "interrupted"}),)
            case GoingAway(seconds_left=seconds_left):
                return (dump_frame({"type": "going_away", "seconds_left": seconds_left}),)
            case Closed():
                return results.encode_closed(message)
        return (legacy.encode_common(self, message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame; refuses an id, which 002 cannot say."""
        match message:
            case Init():
                return dump_frame({"type": "prepare", **_prepare_fields(message)})
            case Append(input_id=None):
                return dump_frame({"type": "audio_chunk", **append_fields(message, NAMES)})
            case Append():
                raise LocalProtocolError("input_id has no field in legacy-duplex")
            case See(jpeg=jpeg):
                return dump_frame({"type": "video_frame", "frame": encode_base64(jpeg)})
            case Pause(timeout_s=None):
                return dump_frame({"type": "pause"})
            case Pause(timeout_s=timeout_s):
                return dump_frame({"type": "pause", "timeout": timeout_s})
            case Resume():
                return dump_frame({"type": "resume"})
            case Interrupt():
                return dump_frame({"type": "interrupt"})
            case Report():
                return dump_frame({"type": "client_diagnostic", "metrics": {}})
            case CloseRequest():
                return dump_frame({"type": "stop"})
        raise no_frame(self, message)

    def decode(self, body: Json, _mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message."""
        fields = Fields(body)
        match kind := fields.required("type", Value.text):
            case "prepared":
                return (results.decode_prepared(fields),)
            case "result":
                return (results.decode_result(fields),)
            case "paused":
                return (Paused(timeout_s=fields.required("timeout", results.read_pause)),)
            case "resumed":
                return (Resumed(),)
            case "interrupted":
                return (Interrupted(),)
            case "going_away":
                return (GoingAway(seconds_left=fields.required("seconds_left", Value.integer)),)
            case "stopped":
                session_id = fields.optional("session_id", Value.text, "")
                return (Closed(session_id=session_id, reason="client"),)
            case "timeout":
                return (results.decode_timeout(fields),)
            case "error":
                return (results.decode_error(fields),)
        return (legacy.decode_common(kind, fields),)


LEGACY_DUPLEX: Final = LegacyDuplex()


# -- from the client ----------------------------------------------------------------------------


def _parse_prepare(fields: Fields, context: Context) -> Init:
    fields.has("type")
    config, inner_slices = read_config(fields.optional_child("config"), context)
    slices = fields.optional("max_slice_nums", read_slices, None)
    prompts = ("system_prompt", "prefix_system_prompt")
    return Init(
        instructions=fields.alias(prompts, read_instructions, ""),
        ref_audio=read_any_voice(fields, *_VOICE),
        tts_ref_audio=fields.optional("tts_ref_audio_base64", read_voice, None),
        max_slice_nums=merge_slices(f"{fields.path}.max_slice_nums", slices, inner_slices),
        config=attrs.evolve(
            config, deferred_finalize=fields.optional("deferred_finalize", Value.flag, True)
        ),
        notices=read_notices(fields, context),
        record=read_record(fields, context),
        ignored=fields.ignored(),
    )


def _prepare_fields(init: Init) -> dict[str, object]:
    config = config_fields(attrs.evolve(init.config, deferred_finalize=True))
    tts = init.tts_ref_audio
    return {
        "system_prompt": init.instructions,
        **any_voice_fields(init.ref_audio, *_VOICE),
        **({} if tts is None else {"tts_ref_audio_base64": encode_voice(tts)}),
        **({"config": config} if config else {}),
        "deferred_finalize": init.config.deferred_finalize,
        "max_slice_nums": init.max_slice_nums,
        **({"notices": True} if init.notices else {}),
        **record_fields(init.record),
    }


def _parse_audio_chunk(fields: Fields, context: Context) -> Append:
    fields.has("type")
    return attrs.evolve(read_append(fields, context, NAMES), ignored=fields.ignored())


def _parse_video_frame(fields: Fields, context: Context) -> See:
    fields.has("type")
    names = ("frame", "frame_base64")
    if context.mode == "audio":
        for name in filter(fields.has, names):
            fields.set_aside(name)
        return See(jpeg=b"", ignored=fields.ignored())
    return See(jpeg=required_alias(fields, names, read_jpeg), ignored=fields.ignored())
