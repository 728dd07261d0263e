"""The messages of the remote backend protocol (wire.md): encoded and parsed, without IO.

Rules: sent messages have exactly the fields of wire.md. Unknown received fields are ignored; used
ones are checked by type, base64 and samples; `response_id` and metrics are optional. Older servers
put a delta's payload in `delta`; newer ones name it `text` or `audio`. Any other message is a
`BackendError` with the expected and the received, by path, kind and length, never by content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import attrs

from protocol.values.errors import ProtocolError
from protocol.values.model import Costs, DuplexConfig, Opening, Unit
from protocol.wire.codec import Fields, Value, check_pcm, dump_frame, encode_base64, parse_frame

from .base import BackendError

RemoteMode = Literal["full_duplex", "turn_based"]
FULL_DUPLEX: Final = "full_duplex"
TURN_BASED: Final = "turn_based"
MODES: Final[tuple[RemoteMode, ...]] = (FULL_DUPLEX, TURN_BASED)
EVENT_SAMPLES_MAX: Final = 24_000 * 30
"""30 s of sound: no server sends more at once, and its base64 fits `MESSAGE_CHARS_MAX`."""
TEXT_CHARS_MAX: Final = 4_096
"""Of a unit, which decides 20 tokens at most, or of a delta; no token has as many characters."""
ANSWER_CHARS_MAX: Final = 131_072
"""A turn's whole text: 8192 tokens, the maximum of a request, of 16 characters each."""
ID_CHARS_MAX: Final = 128
"""Servers' ids have 12 to 40 characters."""
US_PER_S: Final = 1_000_000
MS_MAX: Final = 3_600_000.0
"""A cost above an hour is implausible."""
TOKENS_MAX: Final = 2**31 - 1
"""The server counts tokens in 32 bits."""
CONFIG_FIELDS: Final = (
    "force_listen_count",
    "max_new_speak_tokens_per_chunk",
    "temperature",
    "top_k",
    "top_p",
    "listen_prob_scale",
    "length_penalty",
)
"""The server's sampling settings. `generate_audio` is `use_tts`; other settings are not sent."""
NAME: Final = re.compile(r"[a-z][a-z0-9_.]{0,39}")
"""The name of an event or reason that may appear in an error; other text may be a payload."""


@attrs.frozen(kw_only=True)
class Metrics:
    """The server's measurements; None or 0 if not sent."""

    kv_length: int | None = None
    tokens: int | None = None
    costs: Costs = Costs()
    vision_slices: int = 0
    vision_tokens: int = 0


@attrs.frozen(kw_only=True)
class Created:
    """The session is open."""

    session_id: str
    mode: RemoteMode | None = None
    metrics: Metrics = Metrics()


@attrs.frozen(kw_only=True)
class Response:
    """A part of an answer."""

    response_id: str | None = None
    metrics: Metrics = Metrics()


@attrs.frozen(kw_only=True)
class Listen(Response):
    """The model listens: for this second, or after its text in it."""


@attrs.frozen(kw_only=True)
class Text(Response):
    """A piece of text."""

    text: str


@attrs.frozen(kw_only=True)
class Audio(Response):
    """A piece of speech: float32 LE, 24 kHz mono, any number of samples."""

    pcm: bytes


@attrs.frozen(kw_only=True)
class Done(Response):
    """The end of a response; `text` is the whole response, or empty; `reason` is why it ended."""

    text: str = ""
    reason: str = ""


@attrs.frozen(kw_only=True)
class Closed:
    """The server has ended the session."""

    reason: str = ""


RemoteEvent = Created | Listen | Text | Audio | Done | Closed


# -- up -----------------------------------------------------------------------------------------


def init_message(opening: Opening) -> str:
    """Encode `session.init`; empty fields are omitted, so that the server's defaults apply."""
    voice = {"ref_audio": opening.voice.llm_pcm, "tts_ref_audio": opening.voice.tts_pcm}
    payload: dict[str, object] = {"mode": FULL_DUPLEX, "use_tts": opening.config.generate_audio}
    if any(voice.values()):
        payload["voice"] = {name: encode_base64(pcm) for name, pcm in voice.items() if pcm}
    if opening.instructions:
        payload["system_prompt"] = opening.instructions
    payload["config"] = _config(opening.config)
    return dump_frame({"type": "session.init", "payload": payload})


def append_message(unit: Unit) -> str:
    """Encode `input.append`; the server uses only the first frame, so no other is sent."""
    body: dict[str, object] = {"audio": encode_base64(unit.pcm)}
    if unit.frames:
        body["video_frames"] = [encode_base64(unit.frames[0])]
        body["max_slice_nums"] = unit.max_slice_nums
    body["force_listen"] = unit.force_listen
    return dump_frame({"type": "input.append", "input": body})


def _config(config: DuplexConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in CONFIG_FIELDS}


# -- down ---------------------------------------------------------------------------------------


def read_event(frame: str | bytes) -> RemoteEvent:
    """Parse one message; `BackendError` if it is not valid in the protocol."""
    try:
        fields = Fields(parse_frame(frame))
        name = fields.required("type", Value.text)
    except ProtocolError as error:
        raise BackendError(f"expected an event, got a message that is none: {error}") from None
    read = _READERS.get(name)
    if read is None:
        expected = ", ".join(_READERS)
        raise BackendError(f"expected one of {expected}, got the event {shown(name)}")
    try:
        return read(fields)
    except ProtocolError as error:
        raise BackendError(f"expected {name} as the protocol has it, got {error}") from None


def shown(text: str) -> str:
    """Show a name from the server, or only its length if it may be a payload."""
    return text if NAME.fullmatch(text) else f"a text of {len(text)} characters"


def _read_created(fields: Fields) -> Created:
    return Created(
        session_id=fields.required("session_id", _read_id),
        mode=fields.optional("mode", lambda value: value.choice(MODES), None),
        metrics=_metrics(fields),
    )


def _read_delta(fields: Fields) -> Listen | Text | Audio:
    kind = fields.required("kind", Value.text)
    if kind not in _DELTAS:
        raise BackendError(
            f"expected a delta of kind {', '.join(_DELTAS)}, got one of kind {shown(kind)}"
        )
    return _DELTAS[kind](fields)


def _read_listen(fields: Fields) -> Listen:
    return Listen(**_response(fields))


def _read_text(fields: Fields) -> Text:
    name = _payload_name(fields, "text")
    text = fields.required(name, lambda value: value.text(TEXT_CHARS_MAX))
    return Text(text=text, **_response(fields))


def _read_audio(fields: Fields) -> Audio:
    pcm = fields.required(_payload_name(fields, "audio"), _read_pcm)
    return Audio(pcm=pcm, **_response(fields))


def _read_done(fields: Fields) -> Done:
    return Done(
        text=fields.optional("text", lambda value: value.text(ANSWER_CHARS_MAX), ""),
        reason=fields.optional("reason", Value.text, ""),
        **_response(fields),
    )


def _read_closed(fields: Fields) -> Closed:
    return Closed(reason=fields.optional("reason", Value.text, ""))


def _payload_name(fields: Fields, name: str) -> str:
    return "delta" if not fields.has(name) and fields.has("delta") else name


def _response(fields: Fields) -> dict[str, Any]:
    """The attributes of any `Response`."""
    response_id = fields.optional("response_id", _read_id, None)
    return {"response_id": response_id, "metrics": _metrics(fields)}


def _metrics(fields: Fields) -> Metrics:
    body = fields.optional_child("metrics")
    if body is None:
        return Metrics()
    costs = Costs(
        prefill_us=_us(body, "prefill_ms"),
        generate_us=_us(body, "generate_ms"),
        llm_us=_us(body, "cost_llm_ms"),
        tts_us=_us(body, "cost_tts_ms"),
        token2wav_us=_us(body, "cost_token2wav_ms"),
    )
    return Metrics(
        kv_length=body.optional("kv_cache_length", _read_count, None),
        tokens=body.optional("n_tokens", _read_count, None),
        costs=costs,
        vision_slices=body.optional("vision_slices", _read_count, 0),
        vision_tokens=body.optional("vision_tokens", _read_count, 0),
    )


def _us(body: Fields, name: str) -> int:
    milliseconds = body.optional(name, lambda value: value.number(0, MS_MAX), 0.0)
    return round(milliseconds * 1000)


def _read_count(value: Value) -> int:
    return value.integer(0, TOKENS_MAX)


def _read_id(value: Value) -> str:
    return value.text(ID_CHARS_MAX, 1)


def _read_pcm(value: Value) -> bytes:
    return check_pcm(value.path, value.binary(), 0, EVENT_SAMPLES_MAX)


_DELTAS: Final[Mapping[str, Callable[[Fields], Listen | Text | Audio]]] = {
    "listen": _read_listen,
    "text": _read_text,
    "audio": _read_audio,
}
_READERS: Final[Mapping[str, Callable[[Fields], RemoteEvent]]] = {
    "session.created": _read_created,
    "response.output.delta": _read_delta,
    "response.done": _read_done,
    "session.closed": _read_closed,
}
