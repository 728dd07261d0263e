"""What is said in the dialect of 001 in mode=chat alone; `realtime` describes and speaks it."""

from __future__ import annotations

from typing import Final

import attrs

from ..behaviour import CHAT_PROMPT
from ..codec import Fields, Value, dump_frame, encode_base64, invalid
from ..errors import FieldError, LocalProtocolError
from ..messages import Delta, Response
from ..requests import Ask, Init
from ..turn import StopReason
from . import shared
from .base import Context
from .chat_inputs import ask_fields, read_ask
from .inputs import read_input_id, read_instructions, read_notices, read_record

OUTPUT_DELTA: Final = "response.output.delta"
RESPONSE_DONE: Final = "response.done"
TURN_BASED: Final = "turn_based"
"""The runtime mode of `mode=chat` (001, Modes)."""
KINDS: Final = ("text", "audio")
_PROMPT: Final = ("system_prompt", "instructions")
_OF_TURNS: Final = "in chat each turn brings its own"
STOP_REASONS: Final[tuple[StopReason, ...]] = ("turn_end", "length", "interrupted")

# -- from the client ----------------------------------------------------------------------------


def parse_init(fields: Fields, context: Context) -> Init:
    """Read a `session.init`: its payload must be there, and may hold a system prompt for its turns.

    Raises:
        FieldError: naming what cannot be honoured.
    """
    fields.has("type")
    payload = fields.child("payload")
    instructions = ""
    if context.behaves(CHAT_PROMPT):
        instructions = payload.alias(_PROMPT, read_instructions, "")
    else:
        for name in _PROMPT:
            payload.optional(name, _read_nothing, None)
    voice = payload.optional_child("voice") or Fields({})
    for name in ("ref_audio_base64", "tts_ref_audio_base64"):
        voice.optional(name, _read_nothing, None)
    config = payload.optional_child("config") or Fields({})
    for path in config.ignored():
        raise invalid(path, f"not allowed: {_OF_TURNS}")
    config.refuse_unknown()  # never raises after that: it is for who describes the parser
    notices = read_notices(payload, context)
    record = read_record(payload, context)
    return Init(instructions=instructions, notices=notices, record=record, ignored=fields.ignored())


def _read_nothing(value: Value) -> str:
    """Read an empty text, as clients fill in what they do not want."""
    try:
        return value.text(0)
    except FieldError as error:
        raise FieldError(error.code, f"{error.message}: {_OF_TURNS}") from None


def parse_ask(fields: Fields, context: Context) -> Ask:
    """Read an `input.append` with a turn in it.

    Raises:
        FieldError: naming the field that is wrong.
    """
    fields.has("type")
    ask = read_ask(fields.child("input"), context, speaks=False)
    input_id = fields.optional("input_id", read_input_id, None)
    return attrs.evolve(ask, input_id=input_id, ignored=fields.ignored())


def encode_ask(ask: Ask) -> str:
    """Write a turn as an `input.append`; what it says of the recording, an init says here."""
    if not ask.record:
        raise LocalProtocolError("record has no field in a turn of realtime")
    own_id = {} if ask.input_id is None else {"input_id": ask.input_id}
    return dump_frame({"type": shared.INPUT_APPEND, **own_id, "input": ask_fields(ask)})


# -- from the server ----------------------------------------------------------------------------


def branches(text: str, pcm: bytes) -> dict[str, str]:
    """Say which deltas tell of text and sound, by kind: text first, and never none at all."""
    told: dict[str, str] = {}
    if text or not pcm:
        told["text"] = text
    if pcm:
        told["audio"] = encode_base64(pcm)
    return told


def encode_delta(delta: Delta) -> tuple[str, ...]:
    """Write a piece of an answer."""
    return tuple(
        dump_frame(
            {
                "type": OUTPUT_DELTA,
                "kind": kind,
                "session_id": delta.session_id,
                "response_id": delta.response_id,
                "input_id": delta.input_id,
                kind: content,
                "metrics": {},
            }
        )
        for kind, content in branches(delta.text, delta.pcm).items()
    )


def decode_delta(fields: Fields) -> Delta:
    """Read a delta of an answer; text and audio are a `Delta` each."""
    kind = fields.required("kind", lambda value: value.choice(KINDS))
    return Delta(
        session_id=fields.required("session_id", Value.text),
        response_id=fields.required("response_id", Value.text),
        input_id=fields.optional("input_id", Value.text, ""),
        text=fields.required("text", Value.text) if kind == "text" else "",
        pcm=fields.required("audio", shared.read_output) if kind == "audio" else b"",
    )


def encode_response(response: Response) -> tuple[str, ...]:
    """Write the end of a turn; the last of a streamed answer's speech goes before it."""
    rest: tuple[str, ...] = ()
    audio: dict[str, object] = {}
    if response.pcm and response.streaming:
        rest = encode_delta(
            Delta(
                session_id=response.session_id,
                response_id=response.response_id,
                input_id=response.input_id,
                pcm=response.pcm,
            )
        )
    elif response.pcm:
        audio = {"audio": encode_base64(response.pcm)}
    return (*rest, _encode_done(response, audio))


def _encode_done(response: Response, audio: dict[str, object]) -> str:
    counts = {
        "input_tokens": response.input_tokens,
        "generated_tokens": response.generated_tokens,
    }
    return dump_frame(
        {
            "type": RESPONSE_DONE,
            "session_id": response.session_id,
            "response_id": response.response_id,
            "input_id": response.input_id,
            "text": response.text,
            **audio,
            "reason": response.reason,
            "metrics": shared.metrics_fields(response.metrics) | counts,
        }
    )


def decode_response(fields: Fields) -> Response:
    """Read the end of a turn."""
    counts = fields.optional_child("metrics")
    metrics = shared.read_metrics(counts)
    read = (counts or Fields({})).optional
    return Response(
        session_id=fields.required("session_id", Value.text),
        response_id=fields.required("response_id", Value.text),
        input_id=fields.optional("input_id", Value.text, ""),
        text=fields.required("text", Value.text),
        pcm=fields.optional("audio", shared.read_output, b""),
        reason=fields.optional("reason", lambda value: value.choice(STOP_REASONS), "turn_end"),
        streaming=None,
        input_tokens=read("input_tokens", Value.integer, 0),
        generated_tokens=read("generated_tokens", Value.integer, 0),
        recording_id="",
        metrics=metrics,
    )
