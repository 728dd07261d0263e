"""The messages of the remote backend protocol, encoded and parsed, without IO.

Sent messages have exactly the fields of the protocol; of a chat turn, those of its schema
(OpenBMB/MiniCPM-o-Demo, docs/backend-protocol/schema.md, 4.2 and 4.4). A setting of a turn is sent
or refused, never dropped: also those that a llama.cpp-omni server (tools/server/ws_handler.cpp)
reads and ignores.

Unknown received fields are ignored; used ones are checked by type, base64 and samples;
`response_id` and metrics are optional. Older servers put a delta's payload in `delta`; newer ones
name it `text` or `audio`. Any other message is a `BackendError` with the expected and the received,
by path, kind and length, never by content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

import attrs

from protocol.values import model as md
from protocol.values.errors import ProtocolError
from protocol.wire.codec import (
    SPEECH,
    TEXT,
    Fields,
    Value,
    choice,
    dump_frame,
    encode_base64,
    integer,
    number,
    parse_frame,
    text,
)
from protocol.wire.table import Field, Object, Table
from runtime.model.backends.base import BackendError, BackendRefused

RemoteMode = Literal["full_duplex", "turn_based"]
US_PER_S: Final = 1_000_000
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
    prefill_us: int = 0
    generate_us: int = 0
    llm_us: int = 0
    tts_us: int = 0
    token2wav_us: int = 0
    vision_slices: int = 0
    vision_tokens: int = 0

    def costs(self, *, wall_us: int) -> md.Costs:
        """The server's costs, and our time for the whole."""
        return md.Costs(
            prefill_us=self.prefill_us,
            generate_us=self.generate_us,
            llm_us=self.llm_us,
            tts_us=self.tts_us,
            token2wav_us=self.token2wav_us,
            wall_us=wall_us,
        )


@attrs.frozen(kw_only=True)
class Created:
    """The session is open."""

    session_id: str
    mode: RemoteMode | None = None
    metrics: Metrics = Metrics()


@attrs.frozen(kw_only=True)
class Answer:
    """A part of an answer."""

    response_id: str | None = None
    metrics: Metrics = Metrics()


@attrs.frozen(kw_only=True)
class Listen(Answer):
    """The model listens: for this second, or after its text in it."""


@attrs.frozen(kw_only=True)
class Text(Answer):
    """A piece of text."""

    text: str


@attrs.frozen(kw_only=True)
class Audio(Answer):
    """A piece of speech: float32 LE, 24 kHz mono, any number of samples."""

    pcm: bytes


@attrs.frozen(kw_only=True)
class Done(Answer):
    """The end of a response; `text` is the whole response, or empty; `reason` is why it ended."""

    text: str = ""
    reason: str = ""


@attrs.frozen(kw_only=True)
class Closed:
    """The server has ended the session."""

    reason: str = ""


RemoteEvent = Created | Listen | Text | Audio | Done | Closed


# -- up -----------------------------------------------------------------------------------------


def init_message(opening: md.Opening) -> str:
    """Encode `session.init`; empty fields are omitted, so that the server's defaults apply."""
    voice = {"ref_audio": opening.voice.llm_pcm, "tts_ref_audio": opening.voice.tts_pcm}
    payload: dict[str, object] = {"mode": FULL_DUPLEX, "use_tts": opening.config.generate_audio}
    if any(voice.values()):
        payload["voice"] = {name: encode_base64(pcm) for name, pcm in voice.items() if pcm}
    if opening.instructions:
        payload["system_prompt"] = opening.instructions
    payload["config"] = _config(opening.config)
    return dump_frame({"type": "session.init", "payload": payload})


def append_message(unit: md.Unit) -> str:
    """Encode `input.append`; the server uses only the first frame, so no other is sent."""
    body: dict[str, object] = {"audio": encode_base64(unit.pcm)}
    if unit.frames:
        body["video_frames"] = [encode_base64(unit.frames[0])]
        body["max_slice_nums"] = unit.max_slice_nums
    body["force_listen"] = unit.force_listen
    return dump_frame({"type": "input.append", "input": body})


def _config(config: md.DuplexConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in CONFIG_FIELDS}


# -- down ---------------------------------------------------------------------------------------


def read_event(frame: str | bytes) -> RemoteEvent:
    """Parse one message; `BackendError` if it is not valid in the protocol."""
    try:
        body = parse_frame(frame)
        name = Fields(body).required("type", Value.text)
    except ProtocolError as error:
        raise BackendError(f"expected an event, got a message that is none: {error}") from None
    tables = _EVENTS.get(name)
    if tables is None:
        expected = ", ".join(_EVENTS)
        raise BackendError(f"expected one of {expected}, got the event {shown(name)}")
    try:
        kind = Fields(body).required("kind", Value.text) if tables is _DELTAS else ""
        if kind not in tables:
            expected = ", ".join(tables)
            raise BackendError(
                f"expected a delta of kind {expected}, got one of kind {shown(kind)}"
            )
        event: RemoteEvent = tables[kind].parse(body)
    except ProtocolError as error:
        raise BackendError(f"expected {name} as the protocol has it, got {error}") from None
    return event


def shown(name: str) -> str:
    """Show a name from the server, or only its length if it may be a payload."""
    return name if NAME.fullmatch(name) else f"a text of {len(name)} characters"


_COUNT: Final = integer(0, TOKENS_MAX)
_US: Final = attrs.evolve(
    number(0, MS_MAX), read=lambda value, _: round(value.number(0, MS_MAX) * 1000)
)
"""Milliseconds, read as microseconds."""
_PCM: Final = attrs.evolve(
    SPEECH, read=lambda value, _: value.pcm(samples_min=0, samples_max=EVENT_SAMPLES_MAX)
)
_ID: Final = text(ID_CHARS_MAX, 1)
_METRICS: Final = Object(
    "metrics",
    Field("prefill_ms", _US, 0, attr="prefill_us"),
    Field("generate_ms", _US, 0, attr="generate_us"),
    Field("cost_llm_ms", _US, 0, attr="llm_us"),
    Field("cost_tts_ms", _US, 0, attr="tts_us"),
    Field("cost_token2wav_ms", _US, 0, attr="token2wav_us"),
    Field("kv_cache_length", _COUNT, None, attr="kv_length"),
    Field("n_tokens", _COUNT, None, attr="tokens"),
    Field("vision_slices", _COUNT, 0),
    Field("vision_tokens", _COUNT, 0),
    attr="metrics",
)
_ANSWER: Final = (Field("response_id", _ID, None), _METRICS)
_DELTAS: Final = {
    "listen": Table(Listen, *_ANSWER),
    "text": Table(Text, Field("text", text(TEXT_CHARS_MAX), also=("delta",)), *_ANSWER),
    "audio": Table(Audio, Field("audio", _PCM, attr="pcm", also=("delta",)), *_ANSWER),
}
_REASON: Final = Field("reason", TEXT, "")
_EVENTS: Final[Mapping[str, Mapping[str, Table]]] = {
    "session.created": {
        "": Table(Created, Field("session_id", _ID), Field("mode", choice(MODES), None), _METRICS)
    },
    "response.output.delta": _DELTAS,
    "response.done": {
        "": Table(Done, Field("text", text(ANSWER_CHARS_MAX), ""), _REASON, *_ANSWER)
    },
    "session.closed": {"": Table(Closed, _REASON)},
}
"""The server's events, by type and kind; only deltas have kinds."""


# -- a chat turn, sent --------------------------------------------------------------------------

QUESTION_BYTES_MAX: Final = 16 * 1024 * 1024
"""The default message limit of the server's WebSocket library."""
CHARACTER_BYTES_MAX: Final = 6
"""Of a character in JSON."""
PART_BYTES_MAX: Final = 128
"""Of a content or a message besides its text or data; a setting takes less."""
SETTINGS: Final = 8
SPEECH_MODES: Final = ("default", "audio_assistant")
"""The server puts one system message before its speech, which is that of these modes."""
_DEFAULT: Final = md.ChatConfig()


def refuse_what_it_lacks(turn: md.Turn) -> None:
    """Refuse a turn with a setting or content that the server would ignore (`BackendRefused`)."""
    config, speech = turn.config, turn.speech
    last = turn.messages[-1].content
    lacks = {
        "generation.repetition_penalty": config.repetition_penalty != _DEFAULT.repetition_penalty,
        "generation.min_new_tokens": config.min_new_tokens != _DEFAULT.min_new_tokens,
        "image.use_image_id: false": not turn.use_image_id,
        "enable_thinking": turn.thinking,
        "tools": turn.has_tools,
        "use_tts_template without tts": turn.tts_template and speech is None,
        f"tts.mode: {speech.mode}" if speech else "": speech and speech.mode not in SPEECH_MODES,
        "more than one picture in a question": _count(last, md.Picture) > 1,
        "more than one sound in a question": _count(last, md.Sound) > 1,
    }
    for name, is_asked in lacks.items():
        if is_asked:
            raise BackendRefused(f"{name}: this server's model cannot do that")
    size = _bytes_at_most(turn)
    if size > QUESTION_BYTES_MAX:
        text = f"a turn of {size} bytes: this server's model takes at most {QUESTION_BYTES_MAX}"
        raise BackendRefused(text)


def _count(contents: tuple[md.Content, ...], kind: type[md.Content]) -> int:
    return sum(isinstance(part, kind) for part in contents)


def _bytes_at_most(turn: md.Turn) -> int:
    """Upper bound of a turn's append, in bytes."""
    voice = b"" if turn.speech is None else turn.speech.voice_pcm
    size = SETTINGS * PART_BYTES_MAX + _base64_bytes(voice)
    for message in turn.messages:
        size += PART_BYTES_MAX
        for part in message.content:
            size += PART_BYTES_MAX
            match part:
                case md.Text(text=text) | md.ToolCall(arguments=text) | md.ToolResult(output=text):
                    size += CHARACTER_BYTES_MAX * len(text)
                case md.Picture(jpeg=data) | md.Sound(pcm=data):
                    size += _base64_bytes(data)
    return size


def _base64_bytes(data: bytes) -> int:
    return -(-len(data) // 3) * 4


def chat_init_message(turn: md.Turn) -> str:
    """Encode the `session.init` of a turn: sampling and voice."""
    config = turn.config
    payload: dict[str, object] = {"mode": TURN_BASED, "use_tts": turn.speech is not None}
    if turn.speech is not None and turn.speech.voice_pcm:
        payload["voice"] = {"tts_ref_audio": encode_base64(turn.speech.voice_pcm)}
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    return dump_frame({"type": "session.init", "payload": payload | {"config": sampling}})


def question_message(turn: md.Turn) -> str:
    """Encode the `input.append` of a turn; servers differ in where they look for the voice."""
    config, speech = turn.config, turn.speech
    voice = encode_base64(speech.voice_pcm) if speech is not None and speech.voice_pcm else None
    body: dict[str, object] = {
        "messages": [_message_fields(message) for message in turn.messages],
        "streaming": True,
        "generation": {
            "max_new_tokens": config.max_new_tokens,
            "length_penalty": config.length_penalty,
        },
        "image": {"max_slice_nums": turn.max_slice_nums},
        "tts": {"enabled": speech is not None, **({"ref_audio_data": voice} if voice else {})},
        "omni_mode": turn.omni,
    }
    return dump_frame({"type": "input.append", "input": body})


def _message_fields(message: md.Message) -> dict[str, object]:
    return {"role": message.role, "content": [_part_fields(part) for part in message.content]}


def _part_fields(part: md.Content) -> dict[str, str]:
    match part:
        case md.Text(text=text):
            return {"type": "text", "text": text}
        case md.Picture(jpeg=jpeg):
            return {"type": "image", "data": encode_base64(jpeg)}
        case md.Sound(pcm=pcm):
            return {"type": "audio", "data": encode_base64(pcm)}
        case md.ToolCall() | md.ToolResult():
            raise BackendRefused("tools: this server's model cannot do that")
