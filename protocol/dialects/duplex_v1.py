"""The dialect of 000: `session.update`, `input_audio_buffer.append`, `response.output_audio.delta`.

Choices beside what 000 says:
- Listens and deltas bear a `metrics` object as in `realtime`, so that dropped units can be seen.
- A session that ends without the client's wish and without a word of 000 for it is an `error`, but
  for one that an operator cancelled, which is `stopped` as it is on the close frame.

- `session.voice_config` holds the settings that 002 has in `config`: the source's pages send it.

000 has no ids for input, responses, or sessions once created: the writing side refuses to lose the
first, the reading side leaves ids empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from ..behaviour import SOURCE_FIELDS
from ..codec import Fields, Value, dump_frame, encode_base64
from ..errors import LocalProtocolError
from ..limits import APPEND_SAMPLES_MIN
from ..messages import Closed, Created, EndReason, Listen, Metrics, Mode, ServerMessage, Speech
from ..requests import Append, ClientMessage, CloseRequest, Init, Request
from . import shared
from .base import Context, Json, no_frame
from .inputs import (
    InputNames,
    append_fields,
    encode_voice,
    read_append,
    read_instructions,
    read_notices,
    read_record,
    read_slices,
    read_voice,
    record_fields,
)
from .settings import config_fields, merge_slices, read_config

NAMES: Final = InputNames(samples_min=APPEND_SAMPLES_MIN)
OUTPUT_AUDIO_DELTA: Final = "response.output_audio.delta"
RESPONSE_LISTEN: Final = "response.listen"

_OWN: Final[Mapping[str, Request]] = {
    shared.SESSION_UPDATE: Request.INIT,
    shared.AUDIO_APPEND: Request.APPEND,
    shared.SESSION_CLOSE: Request.CLOSE,
}
_REASONS: Final[Mapping[EndReason, str]] = {
    "client": "stopped",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "error",
    "server_shutdown": "server_shutdown",
    "cancelled": "stopped",
    "invalid_frame": "error",
    "flooded": "error",
}
_ENDS: Final[Mapping[str, EndReason]] = {
    "stopped": "client",
    "timeout": "timeout",
    "context_full": "context_full",
    "server_shutdown": "server_shutdown",
    "error": "backend_error",
}
_WORDS: Final = tuple(_ENDS)


class DuplexV1:
    """The dialect of 000; see `base.Dialect` for what its methods do."""

    @property
    def name(self) -> str:
        """`duplex-v1`."""
        return "duplex-v1"

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is; an update of 003 is misplaced."""
        if shared.is_model_update(body):
            return Request.MISPLACED
        return shared.classify(body, _OWN)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        if request is Request.CLOSE:
            return shared.parse_close(body)
        if request is Request.INIT:
            return _parse_update(Fields(body), context)
        if request is Request.APPEND:
            return _parse_append(Fields(body), context)
        raise shared.refusal(request, body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as a frame."""
        match message:
            case Created():
                return (_encode_created(message),)
            case Listen():
                return (_encode_listen(message),)
            case Speech():
                return (_encode_speech(message),)
            case Closed():
                return (_encode_closed(message),)
        return (shared.encode_common(message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame; refuses an id, which 000 cannot say."""
        match message:
            case Init():
                return dump_frame({"type": shared.SESSION_UPDATE, "session": _session(message)})
            case Append(input_id=None):
                return dump_frame({"type": shared.AUDIO_APPEND, **append_fields(message)})
            case Append():
                raise LocalProtocolError("input_id has no field in duplex-v1")
            case CloseRequest():
                return shared.encode_close(message)
        raise no_frame(self, message)

    def decode(self, body: Json, _mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; 000 says the same in every mode."""
        fields = Fields(body)
        match kind := fields.required("type", Value.text):
            case shared.SESSION_CREATED:
                return (_decode_created(fields),)
            case "response.listen":
                return (_decode_listen(fields),)
            case "response.output_audio.delta":
                return (_decode_speech(fields),)
            case shared.SESSION_CLOSED:
                word = fields.required("reason", lambda value: value.choice(_WORDS))
                return (Closed(session_id="", reason=_ENDS[word]),)
        return (shared.decode_common(kind, body),)


DUPLEX_V1: Final = DuplexV1()


# -- from the client ----------------------------------------------------------------------------


def _parse_update(fields: Fields, context: Context) -> Init:
    fields.has("type")
    session = fields.child("session")
    has_config = context.behaves(SOURCE_FIELDS)
    given = session.optional_child("voice_config") if has_config else None
    config, inner_slices = read_config(given, context)
    slices = session.optional("max_slice_nums", read_slices, None)
    return Init(
        instructions=session.required("instructions", read_instructions),
        ref_audio=session.optional("ref_audio", read_voice, None),
        tts_ref_audio=session.optional("tts_ref_audio", read_voice, None),
        max_slice_nums=merge_slices(f"{session.path}.max_slice_nums", slices, inner_slices),
        config=config,
        notices=read_notices(session, context),
        record=read_record(session, context),
        ignored=fields.ignored(),
    )


def _session(init: Init) -> dict[str, object]:
    session: dict[str, object] = {
        "instructions": init.instructions,
        "max_slice_nums": init.max_slice_nums,
    }
    if config := config_fields(init.config):
        session["voice_config"] = config
    if init.notices:
        session["notices"] = True
    session |= record_fields(init.record)
    voices = {"ref_audio": init.ref_audio, "tts_ref_audio": init.tts_ref_audio}
    return session | {name: encode_voice(voice) for name, voice in voices.items() if voice}


def _parse_append(fields: Fields, context: Context) -> Append:
    fields.has("type")
    return attrs.evolve(read_append(fields, context, NAMES), ignored=fields.ignored())


# -- from the server ----------------------------------------------------------------------------


def _encode_created(created: Created) -> str:
    return dump_frame(
        {
            "type": shared.SESSION_CREATED,
            "session_id": created.session_id,
            "prompt_length": created.prompt_length,
            "recording": created.recording,
            **shared.recorded_as(created.recording_id, created.recording_notice),
        }
    )


def _decode_created(fields: Fields) -> Created:
    return Created(
        session_id=fields.required("session_id", Value.text),
        prompt_length=fields.required("prompt_length", Value.integer),
        recording=fields.optional("recording", shared.read_recording, "off"),
        recording_id=fields.optional("recording_id", Value.text, ""),
        recording_notice=fields.optional("recording_notice", Value.text, ""),
    )


def _encode_listen(listen: Listen) -> str:
    return dump_frame(
        {
            "type": RESPONSE_LISTEN,
            "kv_cache_length": listen.metrics.kv_cache_length,
            "metrics": shared.metrics_fields(listen.metrics),
        }
    )


def _decode_listen(fields: Fields) -> Listen:
    return Listen(session_id="", input_id="", metrics=_read_metrics(fields))


def _encode_speech(speech: Speech) -> str:
    return dump_frame(
        {
            "type": OUTPUT_AUDIO_DELTA,
            "text": speech.text,
            "audio": encode_base64(speech.pcm),
            "end_of_turn": speech.end_of_turn,
            "kv_cache_length": speech.metrics.kv_cache_length,
            "metrics": shared.metrics_fields(speech.metrics),
        }
    )


def _decode_speech(fields: Fields) -> Speech:
    return Speech(
        session_id="",
        response_id="",
        input_id="",
        text=fields.required("text", Value.text),
        pcm=fields.required("audio", shared.read_output),
        end_of_turn=fields.required("end_of_turn", Value.flag),
        metrics=_read_metrics(fields),
    )


def _read_metrics(fields: Fields) -> Metrics:
    """Read the addition of ours, if it is there, and the length that 000 has beside it."""
    kv_cache_length = fields.required("kv_cache_length", Value.integer)
    metrics = shared.read_metrics(fields.optional_child("metrics"))
    return attrs.evolve(metrics, kv_cache_length=kv_cache_length)


def _encode_closed(closed: Closed) -> str:
    if closed.reason not in _REASONS:
        raise LocalProtocolError(f"no session.closed for {closed.reason}: nobody hears it")
    return dump_frame({"type": shared.SESSION_CLOSED, "reason": _REASONS[closed.reason]})
