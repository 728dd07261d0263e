"""The dialect of 001: `session.init`, `input.append`, `response.output.delta`, `response.done`.

Choices beside what 001 says:
- A prompt may be absent, and is empty then; `system_prompt` wins over its alias `instructions`.
- `input_id` stands at the top of `input.append`, as it does in the deltas that answer it.
- A speaking unit sends a text delta, if there is text, then an audio delta, if there is audio; with
  neither, an empty text delta, for each unit has an outcome that can be seen (B9).
- `end_of_turn` is only there, as true, on the last delta of a speaking turn.
- In mode=chat an init may carry a prompt, the system message of turns that bring none. A voice or a
  setting in it is refused, for each turn brings its own. A turn without `tts` is text alone, as
  001's examples are.
- An answer that was not streamed has its speech in `response.done`, as `audio`; what is left of a
  streamed one comes as a last audio delta before it. Both token counts stand among its metrics.

What 001 cannot show: a client's own close reason is told back as it is, so one that reads like a
server's (`timeout`) cannot be told from it, there is a single field for both. An answer without
`audio` reads as a streamed one. The end of prefill has no place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from ..codec import Fields, Value, dump_frame
from ..errors import LocalProtocolError
from ..messages import (
    Closed,
    Created,
    Delta,
    EndReason,
    Listen,
    Mode,
    Prefilled,
    Response,
    ServerMessage,
    Speech,
)
from ..requests import Append, Ask, ClientMessage, CloseRequest, Init, Request
from . import realtime_chat as chat
from . import shared
from .base import Context, Json, no_frame, refusal
from .inputs import (
    append_fields,
    encode_voice,
    read_append,
    read_input_id,
    read_instructions,
    read_notices,
    read_record,
    read_slices,
    read_voice,
    record_fields,
)
from .settings import config_fields, merge_slices, read_config

FULL_DUPLEX: Final = "full_duplex"
"""The runtime mode of both `mode=video` and `mode=audio` (001, Modes)."""
RUNTIME_MODES: Final = (FULL_DUPLEX, chat.TURN_BASED)
KINDS: Final = ("listen", "text", "audio")

_OWN: Final[Mapping[str, Request]] = {
    shared.SESSION_INIT: Request.INIT,
    shared.INPUT_APPEND: Request.APPEND,
    shared.SESSION_CLOSE: Request.CLOSE,
}
_REASONS: Final[Mapping[EndReason, str]] = {
    "client": "client_closed",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "backend_error",
    "server_shutdown": "server_shutdown",
    "cancelled": "cancelled",
    "invalid_frame": "invalid_frame",
    "flooded": "flooded",
    "refused": "refused",
}
_ENDS: Final[Mapping[str, EndReason]] = {word: end for end, word in _REASONS.items()}


class Realtime:
    """The dialect of 001; see `base.Dialect` for what its methods do."""

    @property
    def name(self) -> str:
        """`realtime`."""
        return "realtime"

    def classify(self, body: Json) -> Request:
        """Say what kind of request a client's message is."""
        return shared.classify(body, _OWN)

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message."""
        if request is Request.CLOSE:
            return shared.parse_close(body)
        fields, is_chat = Fields(body), context.mode == "chat"
        if request is Request.INIT:
            return chat.parse_init(fields, context) if is_chat else _parse_init(fields, context)
        if request is Request.APPEND:
            return chat.parse_ask(fields, context) if is_chat else _parse_append(fields, context)
        raise refusal(request, body)

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        match message:
            case Created():
                return (_encode_created(message),)
            case Listen():
                return (_encode_listen(message),)
            case Speech():
                return _encode_speech(message)
            case Prefilled():
                return ()
            case Delta():
                return chat.encode_delta(message)
            case Response():
                return chat.encode_response(message)
            case Closed():
                return (_encode_closed(message),)
        return (shared.encode_common(message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame."""
        match message:
            case Init():
                return dump_frame({"type": shared.SESSION_INIT, "payload": _payload(message)})
            case Append(input_id=input_id):
                own_id = {} if input_id is None else {"input_id": input_id}
                frame = {"type": shared.INPUT_APPEND, **own_id, "input": append_fields(message)}
                return dump_frame(frame)
            case Ask():
                return chat.encode_ask(message)
            case CloseRequest():
                return shared.encode_close(message)
        raise no_frame(self, message)

    def decode(self, body: Json, mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; text and audio of a unit are a `Speech` each, or a `Delta`."""
        fields = Fields(body)
        match kind := fields.required("type", Value.text):
            case shared.SESSION_CREATED:
                return (_decode_created(fields),)
            case "response.output.delta":
                is_chat = mode == "chat"
                return (chat.decode_delta(fields) if is_chat else _decode_delta(fields),)
            case "response.done":
                return (chat.decode_response(fields),)
            case shared.SESSION_CLOSED:
                return (_decode_closed(fields),)
        return (shared.decode_common(kind, body),)


REALTIME: Final = Realtime()


# -- from the client ----------------------------------------------------------------------------


def _parse_init(fields: Fields, context: Context) -> Init:
    fields.has("type")
    payload = fields.child("payload")
    voice = payload.optional_child("voice") or Fields({})
    config, inner_slices = read_config(payload.optional_child("config"), context)
    slices = payload.optional("max_slice_nums", read_slices, None)
    return Init(
        instructions=payload.alias(("system_prompt", "instructions"), read_instructions, ""),
        ref_audio=voice.optional("ref_audio_base64", read_voice, None),
        tts_ref_audio=voice.optional("tts_ref_audio_base64", read_voice, None),
        max_slice_nums=merge_slices(f"{payload.path}.max_slice_nums", slices, inner_slices),
        config=config,
        notices=read_notices(payload, context),
        record=read_record(payload, context),
        ignored=fields.ignored(),
    )


def _payload(init: Init) -> dict[str, object]:
    payload: dict[str, object] = {}
    if init.instructions:
        payload["system_prompt"] = init.instructions
    voices = {"ref_audio_base64": init.ref_audio, "tts_ref_audio_base64": init.tts_ref_audio}
    voice = {name: encode_voice(voice) for name, voice in voices.items() if voice}
    if voice:
        payload["voice"] = voice
    if config := config_fields(init.config):
        payload["config"] = config
    if init.max_slice_nums != 1:
        payload["max_slice_nums"] = init.max_slice_nums
    if init.notices:
        payload["notices"] = True
    payload |= record_fields(init.record)
    return payload


def _parse_append(fields: Fields, context: Context) -> Append:
    fields.has("type")
    append = read_append(fields.child("input"), context)
    input_id = fields.optional("input_id", read_input_id, None)
    return attrs.evolve(append, input_id=input_id, ignored=fields.ignored())


# -- from the server ----------------------------------------------------------------------------


def _encode_created(created: Created) -> str:
    return dump_frame(
        {
            "type": shared.SESSION_CREATED,
            "session_id": created.session_id,
            "mode": chat.TURN_BASED if created.is_chat else FULL_DUPLEX,
            "prompt_length": created.prompt_length,
            "recording": created.recording,
            **shared.recorded_as(created.recording_id, created.recording_notice),
            "metrics": {},
        }
    )


def _decode_created(fields: Fields) -> Created:
    mode = fields.optional("mode", lambda value: value.choice(RUNTIME_MODES), FULL_DUPLEX)
    return Created(
        session_id=fields.required("session_id", Value.text),
        prompt_length=fields.optional("prompt_length", Value.integer, 0),
        recording=fields.optional("recording", shared.read_recording, "off"),
        recording_id=fields.optional("recording_id", Value.text, ""),
        recording_notice=fields.optional("recording_notice", Value.text, ""),
        is_chat=mode == chat.TURN_BASED,
    )


def _encode_listen(listen: Listen) -> str:
    return dump_frame(
        {
            "type": chat.OUTPUT_DELTA,
            "kind": "listen",
            "session_id": listen.session_id,
            **({"response_id": listen.response_id} if listen.response_id else {}),
            "input_id": listen.input_id,
            "metrics": shared.metrics_fields(listen.metrics),
        }
    )


def _encode_speech(speech: Speech) -> tuple[str, ...]:
    branches = chat.branches(speech.text, speech.pcm)
    last = list(branches)[-1]
    return tuple(
        dump_frame(
            {
                "type": chat.OUTPUT_DELTA,
                "kind": kind,
                "session_id": speech.session_id,
                "response_id": speech.response_id,
                "input_id": speech.input_id,
                kind: content,
                **({"end_of_turn": True} if speech.end_of_turn and kind == last else {}),
                "metrics": shared.metrics_fields(speech.metrics),
            }
        )
        for kind, content in branches.items()
    )


def _decode_delta(fields: Fields) -> Listen | Speech:
    kind = fields.required("kind", lambda value: value.choice(KINDS))
    session_id = fields.required("session_id", Value.text)
    input_id = fields.optional("input_id", Value.text, "")
    metrics = shared.read_metrics(fields.optional_child("metrics"))
    if kind == "listen":
        return Listen(
            session_id=session_id,
            response_id=fields.optional("response_id", Value.text, ""),
            input_id=input_id,
            metrics=metrics,
        )
    return Speech(
        session_id=session_id,
        response_id=fields.required("response_id", Value.text),
        input_id=input_id,
        text=fields.required("text", Value.text) if kind == "text" else "",
        pcm=fields.required("audio", shared.read_output) if kind == "audio" else b"",
        end_of_turn=fields.optional("end_of_turn", Value.flag, False),
        metrics=metrics,
    )


def _encode_closed(closed: Closed) -> str:
    reason = closed.client_reason if closed.reason == "client" else None
    word = reason or _REASONS.get(closed.reason)
    if word is None:
        raise LocalProtocolError(f"no session.closed for {closed.reason}: nobody hears it")
    return dump_frame(
        {"type": shared.SESSION_CLOSED, "session_id": closed.session_id, "reason": word}
    )


def _decode_closed(fields: Fields) -> Closed:
    session_id = fields.required("session_id", Value.text)
    word = fields.required("reason", Value.text)
    if word in _ENDS:
        return Closed(session_id=session_id, reason=_ENDS[word])
    return Closed(session_id=session_id, reason="client", client_reason=word or None)
