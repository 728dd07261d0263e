"""The dialect `vllm-omni`: the duplex protocol of vLLM-Omni, `/v1/realtime?duplex=1`.

Names, fields and words are those of its page "Realtime Duplex API" and of its client, version 0.30.
Items, responses and their steps are those of `openai`, whose names it has taken.

Choices in addition to them:
- Sound is PCM16, at 16 kHz from the client and 24 kHz to it. Another form is refused by its name,
  and so is all that the model cannot do.
- Each second of the model is a `response.listen` or a piece of a response: its sound, then its
  words. A queued client is told so by the events of `realtime`.
- `server_event_seq` and `event_id` are filled in by the session, which knows the frame's number.
- An item of a response has its number: `item_...` for `resp_...`; `item_resp_...`, which the
  client makes itself, is the same.
- The token of `session.created` is filled in behind the log (`TOKEN`).

It cannot show: metrics, the recording's name, the client's input that a second of.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, get_args

import attrs

from ...values import messages as ms
from ...values import omni as om
from ...values import openai as oa
from ...values.behaviour import DUPLEX_TOOLS
from ...values.errors import LIVE_ERRORS, TRANSCRIPTION_ERRORS, ErrorCode, invalid
from ...values.limits import APPEND_SAMPLES_MAX, INPUT_ID_CHARS_MAX, MS_PER_S
from ...values.model import CODINGS, INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES, DuplexConfig
from ...values.requests import Append, Init, ReferenceAudio, Report, Request
from .. import codec as c
from ..audio import to_float32, to_pcm16
from ..table import (
    Constant,
    Dialect,
    Field,
    Object,
    Row,
    Table,
    checked,
    computed,
    fixed,
    one,
    optional,
    typed,
)
from . import openai_shared as api
from . import shared
from .openai import CANCEL, CLEAR, ITEM_REQUESTS, SILENCE, THRESHOLD, request
from .shared import APPEND_SLICES, PLAYED_MS_MAX, PROMPT, RECORD, TOKEN, frames, setting

OMNI_PREFIX: Final = "duplex-"
"""A session is named by it and its recording."""
SEQ: Final = '"server_event_seq":0'
"""The field of a frame that no session has sent; a session puts the frame's number there."""
_NUMBER: Final = computed(
    "server_event_seq",
    c.INTEGER,
    Constant(0),
    rank=-1,
    example=1,
    doc="The event's number, from 1; what `session.resume` counts by.",
)
_DATA_URL: Final = "data:"

# -- from the client ----------------------------------------------------------------------------


def _modality(value: c.Value, _: c.ParseState) -> str:
    found = {each.choice(api.MODALITIES) for each in value.items(2)}
    return "audio" if "audio" in found or not found else "text"


_MODALITY: Final = c.FieldType(
    read=_modality,
    write=lambda modality: ["text"] if modality == "text" else ["audio", "text"],
    schema={"type": "array", "items": {"type": "string", "enum": list(api.MODALITIES)}},
)
_GA, _BOTH = ("output_modalities",), ["audio", "text"]
_FORMATS: Final = ("pcm16", "pcm_s16le", "s16le")
_FORMAT: Final = api.offered(c.TEXT, "sound is pcm16 here", *_FORMATS, type="string", const="pcm16")


def _rate(rate_hz: int) -> c.FieldType:
    what = f"there are only {rate_hz} Hz here"
    return api.offered(api.ANY, what, rate_hz, type="integer", const=rate_hz)


def _form(name: str, rate_hz: int) -> Object:
    """The form of sound in one direction, as OpenAI's GA API has it; ours is fixed."""
    kind = api.only(CODINGS, "audio/pcm", "sound is pcm16 here")
    rows = (checked("type", kind, "PCM16."), checked("rate", _rate(rate_hz), "Samples a second."))
    rate = checked("sample_rate_hz", _rate(rate_hz), "Samples a second.")
    return Object(name, Object("format", *rows, doc="Its form."), rate, doc="Sound.")


def _voice(value: c.Value, at: c.ParseState) -> ReferenceAudio:
    url = value.text()
    if url.startswith(_DATA_URL):
        _, comma, data = url.partition(";base64,")
        if not comma:
            raise invalid(value.path, "a data URL without base64")
        value = c.Value(path=value.path, value=data)
    voice: ReferenceAudio = c.VOICE_OR_NAME.read(value, at)
    return voice


_VOICE: Final = attrs.evolve(c.VOICE_OR_NAME, read=_voice)
_NO_VOICE: Final = api.offered(
    c.TEXT, "a voice has no name here, it is given as ref_audio", "", type="string", maxLength=0
)
_INTERRUPTS: Final = api.offered(
    c.FLAG, "detected speech interrupts the model", True, type="boolean", const=True
)
_VAD: Final = api.only(
    ("server_vad", "semantic_vad"), "server_vad", "the model decides, or server_vad"
)
_DETECTION: Final = api.detection(
    one(
        Table(
            oa.TurnDetection,
            Field("type", _VAD, attr="kind"),
            THRESHOLD,
            SILENCE,
            checked("interrupt_response", _INTERRUPTS, "Must be true."),
        )
    )
)
_PLAIN: Final = DuplexConfig()
_INIT: Final = typed(
    Init,
    shared.SESSION_UPDATE,
    Object(
        "session",
        optional("model", c.TEXT, "omni.model", example="tiny"),
        optional("modalities", _MODALITY, "omni.modality", also=_GA, example=_BOTH),
        Field("instructions", PROMPT, "", omit=True),
        optional("ref_audio", _VOICE, doc="A voice: base64 of a WAV, or a data URL."),
        checked("voice", _NO_VOICE, api.EMPTY),
        checked("input_audio_format", _FORMAT, "PCM16."),
        checked("output_audio_format", _FORMAT, "PCM16."),
        checked("sample_rate_hz", _rate(INPUT_RATE_HZ), "Of the client's sound."),
        Object(
            "audio",
            _form("input", INPUT_RATE_HZ),
            _form("output", OUTPUT_RATE_HZ),
            doc="The same, as the GA API has it.",
        ),
        optional("turn_detection", _DETECTION, "omni.detection"),
        optional("overlap_policy", c.choice(get_args(om.Overlap)), "omni.overlap"),
        optional("playback_commit_policy", c.choice(get_args(om.History)), "omni.history"),
        setting("temperature", c.number(0, 2), _PLAIN.temperature, attr="config.temperature"),
        Object(
            "extra_body",
            optional("auto_response", c.FLAG, "omni.answers"),
            setting(
                "force_listen_count",
                c.integer(0, 100),
                _PLAIN.force_listen_count,
                attr="config.force_listen_count",
            ),
            omit=True,
            doc="Settings of the model.",
        ),
        RECORD,
        Field("tools", api.FUNCTIONS, (), omit=True, since=DUPLEX_TOOLS, doc=api.CALLED),
        *map(api.ignored, ("idle_timeout_s", "input_audio_transcription", "tracing", "speed")),
        is_required=True,
        doc="The settings; others than these are ignored.",
    ),
    api.ANY_EVENT_ID,
)


def _piece(value: c.Value, _: c.ParseState) -> bytes:
    pcm16 = value.pcm16()
    if not 0 < len(pcm16) // 2 <= APPEND_SAMPLES_MAX:
        found = f"{len(pcm16) // 2} samples, 1 to {APPEND_SAMPLES_MAX} are allowed"
        raise invalid(value.path, found)
    return to_float32(pcm16)


_PIECE: Final = c.FieldType(
    read=_piece,
    write=lambda pcm: c.encode_base64(to_pcm16(pcm)),
    schema=c.base64_of(c.PCM16),
    holds=c.SPOKEN,
)


def _item_id(value: c.Value, _: c.ParseState) -> str:
    name = value.text(INPUT_ID_CHARS_MAX, 1)
    return name.replace("item_resp_", "item_", 1) if name.startswith("item_resp_") else name


_NAMES_ITEM: Final = attrs.evolve(api.ID, read=_item_id)
_MS: Final = c.integer(0, PLAYED_MS_MAX)
_NO_PROMPT: Final = api.offered(
    api.ANY, "the model has its prompt already, and takes no other", "", type="string", maxLength=0
)
REQUESTS: Final = {
    Request.INIT: _INIT,
    Request.APPEND: typed(
        Append,
        shared.AUDIO_APPEND,
        Field("audio", _PIECE, attr="pcm"),
        checked("format", _FORMAT, "PCM16.", also=("input_audio_format",)),
        checked("sample_rate_hz", _rate(INPUT_RATE_HZ), "Of the sound."),
        frames("video_frames"),
        APPEND_SLICES,
        *(api.ignored(name, holds=None) for name in ("is_speech", "duration_ms", "audio_end_ms")),
        api.ANY_EVENT_ID,
        lacks={"input_id": None, "force_listen": False},
        where="vllm-omni",
    ),
    Request.COMMIT: request(
        om.CommitTurn,
        "input_audio_buffer.commit",
        optional("response_create", c.FLAG, "responds", also=("create_response",)),
        Field("is_speech", c.FLAG, True, omit=True),
        api.ignored("final", holds=None),
    ),
    Request.RESPOND: request(
        oa.Respond,
        "response.create",
        Object(
            "response",
            optional("modalities", _MODALITY, "modality", also=_GA, example=_BOTH),
            checked("instructions", _NO_PROMPT, "Must be empty here.", example=""),
            setting("max_output_tokens", api.TOKENS, 0, attr="max_tokens", example=100),
            optional("metadata", api.METADATA, example={"trace": "3"}),
            omit=True,
            doc="Settings of this response; others than these are ignored.",
        ),
    ),
    Request.CANCEL: CANCEL,
    Request.INTERRUPT: request(
        om.BargeIn,
        "barge_in",
        checked("event", c.choice(("barge_in", "response.cancel")), "Of `turn.signal`, the same."),
        api.ignored("payload"),
    ),
    Request.CLEAR_OUTPUT: request(om.ClearOutput, "output_audio_buffer.clear"),
    Request.PLAYED: request(
        om.AckPlayback,
        shared.PLAYBACK_ACK,
        Field("played_ms", _MS),
        optional("committed_ms", _MS),
        optional("response_id", api.ID),
        optional("item_id", _NAMES_ITEM),
        Field("truncate", c.FLAG, False, attr="truncates", omit=True),
    ),
    Request.HEARTBEAT: request(om.Heartbeat, "session.heartbeat"),
    Request.REPORT: typed(
        Report,
        "session.event_ack",
        api.ignored(
            "server_event_seq", "The last event that arrived; kept in the log without effect."
        ),
    ),
    Request.CLEAR: CLEAR,
    **ITEM_REQUESTS,
    Request.CLOSE: shared.CLOSE,
}
_OTHER_TYPES: Final[Mapping[str, Request]] = {
    "input.commit": Request.COMMIT,
    "input.cancel": Request.CLEAR,
    "turn.signal": Request.INTERRUPT,
    "audio.playback_ack": Request.PLAYED,
    "close": Request.CLOSE,
    shared.SESSION_RESUME: Request.MISPLACED,
}
UNSUPPORTED: Final = frozenset({"input.text.append", "input_text.append", "push_text"})
"""Events that ask for what the model cannot do."""

# -- coming back --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class OmniResume:
    """The first message of a client that is back, and the session that it names."""

    recording_id: str
    request: ms.ResumeRequest


def _return(values: dict[str, Any]) -> OmniResume:
    seq = values["last_received"]
    request = ms.ResumeRequest(token=values["token"], last_seq=seq - 1)
    return OmniResume(recording_id=values["session_id"].removeprefix(OMNI_PREFIX), request=request)


RESUME: Final = Table(
    OmniResume,
    Field("session_id", c.text(INPUT_ID_CHARS_MAX, 1)),
    Field("resume_token", c.text(shared.TOKEN_CHARS_MAX, 1), attr="token"),
    Field("last_received_server_event_seq", c.INTEGER, 0, attr="last_received"),
    make=_return,
)
_REFUSED: Final = Object(
    "error",
    fixed("code", "session_resume_expired"),
    fixed("type", "invalid_request_error"),
    Field("message", c.TEXT),
)
NOT_RESUMED: Final = typed(ms.ErrorReport, shared.ERROR, _REFUSED)
"""The answer to a client that cannot come back; its code is the one of no session and no token."""
RESYNC: Final = typed(
    ms.Resumable, "session.resync_required", _NUMBER, fixed("reason", "journal_overflow")
)
"""The session cannot be resumed any more."""

# -- from the server ----------------------------------------------------------------------------

_CAPABILITIES: Final[Mapping[str, object]] = {
    "implementation_level": "model_native_duplex",
    "supports_input_append": True,
    "supports_barge_in": True,
    "supports_session_lease": True,
    "supports_multi_session": True,
    "supports_audio_truncate": True,
    "chunk_period_ms": MS_PER_S,
    "input_modes": ["append_audio_chunk"],
    "signal_sources": ["model_native", "client_event", "server_policy"],
}


def _facts(name: str, doc: str, made: Mapping[str, object] | None = None) -> Field:
    """An object that is always the same, but for whether a session can be resumed."""

    def get(message: Any) -> dict[str, object]:
        return {**(made or {"supports_session_resume": message.omni.is_resumable, **_CAPABILITIES})}

    kind = c.FieldType(read=lambda *_: None, schema={"type": "object"})
    return computed(name, kind, get, example={**(made or {})}, doc=doc)


_SOUND: Final[Mapping[str, object]] = {
    name: {"format": {"type": "audio/pcm", "rate": rate_hz}, "sample_rate_hz": rate_hz}
    for name, rate_hz in (("input", INPUT_RATE_HZ), ("output", OUTPUT_RATE_HZ))
}
_SESSION: Final = Object(
    "session",
    fixed("object", "realtime.session"),
    fixed("type", "realtime"),
    Field("id", c.TEXT, example="duplex-20261123T101500-8f3a5b7c9d1e"),
    Field("model", c.TEXT, example="tiny"),
    fixed("state", "open"),
    Field("epoch", c.INTEGER),
    Field("turn_id", c.INTEGER),
    Field("modalities", _MODALITY, attr="modality", example=_BOTH),
    computed("output_modalities", _MODALITY, attrgetter("omni.modality"), example=_BOTH),
    "The same, as the GA API names it.",
    Field("instructions", c.TEXT),
    api.null("voice"),
    fixed("input_audio_format", "pcm16"),
    fixed("output_audio_format", "pcm16"),
    _facts("audio", "The form of sound in both directions.", _SOUND),
    Field("turn_detection", _DETECTION, None, attr="detection"),
    Field("overlap_policy", c.choice(get_args(om.Overlap)), attr="overlap"),
    Field("playback_commit_policy", c.choice(get_args(om.History)), attr="history"),
    _facts("capabilities", "What the server can."),
    attr="omni",
    doc="The session as it is in force.",
)
_TOKEN: Final = computed(
    "resume_token",
    c.TEXT,
    lambda message: TOKEN if message.omni.is_resumable else None,
    omit=True,
    example="q3bV0k",
    doc="The right to come back, once; only in a session that can be resumed.",
)
RESUMED: Final = typed(
    om.SessionResumed,
    "session.resumed",
    Field("session_id", c.TEXT),
    Field("attachment_generation", c.INTEGER, attr="connection"),
    _TOKEN,
    _SESSION,
)
"""The first frame of a connection that comes back; no event, so it has no number."""
_REASONS: Final[Mapping[ms.EndReason, str]] = {
    "client": "client_close",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "error",
    "server_shutdown": "shutdown",
    "cancelled": "cancelled",
    **dict.fromkeys(("invalid_frame", "flooded"), "transport_error"),
}
_ENDS: Final[Mapping[str, ms.EndReason]] = {
    word: end for end, word in reversed([*_REASONS.items()])
}


_NEVER: Final = (TRANSCRIPTION_ERRORS | LIVE_ERRORS) - {
    *(ErrorCode.MODEL_NOT_FOUND, ErrorCode.INVALID_JSON, ErrorCode.INVALID_FRAME),
    *(ErrorCode.UNSUPPORTED, ErrorCode.ACTIVE_RESPONSE, ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE),
    *(ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY, ErrorCode.ITEM_NOT_FOUND),
}
ERROR_CODES: Final = tuple(code for code in ErrorCode if code not in _NEVER)


def _event(cls: type, kind: str, *rows: Row | str, **lacks: object) -> Table:
    return typed(cls, kind, _NUMBER, api.EVENT_ID, *rows, lacks=lacks)


def _numbered(table: Table, *rows: Row | str, kind: str = "") -> Table:
    """An event of `openai`, with its number and more fields."""
    return table.with_rows(_NUMBER, *rows, tag={"type": kind} if kind else None)


_OF_SESSION: Final = (Field("session_id", c.TEXT), Field("epoch", c.INTEGER))


def _end_ms(speech: ms.Speech) -> int:
    return speech.start_ms + len(speech.pcm) // SAMPLE_BYTES * MS_PER_S // OUTPUT_RATE_HZ


_OUTPUT_RATE: Final = c.integer(OUTPUT_RATE_HZ, OUTPUT_RATE_HZ)
_AUDIO: Final = _numbered(
    api.SOUND,
    attrs.evolve(fixed("format", "pcm16"), rank=1),
    computed("sample_rate_hz", _OUTPUT_RATE, lambda _: OUTPUT_RATE_HZ, rank=1),
    "Of the sound.",
    Object(
        "metadata",
        *_OF_SESSION,
        computed("audio_duration_ms", c.INTEGER, _end_ms, example=1000),
        "Of the response's sound so far.",
        rank=1,
        doc="Where it stands.",
    ),
)
_WORDS: Final = _numbered(api.WORDS)


def _of_response(table: Table) -> Table:
    """A state of a response, which names it at the top too."""
    row = computed("response_id", c.TEXT, attrgetter("response.id"), example="resp_7b20d9c3a415")
    return _numbered(table, row, "The response.")


_STEPS: Final = {kind: _numbered(table) for kind, table in api.STEPS.items()}
_INPUTS: Final = {
    kind: _numbered(api.INPUTS[kind]) for kind in ("committed", "cleared", "transcript_done")
}
_BETA: Final = _numbered(api.ITEMS["added"], kind="conversation.item.created")
_ITEMS: Final[Mapping[str, tuple[Table, ...]]] = {
    kind: (_numbered(table), *((_BETA,) if kind == "added" else ()))
    for kind, table in api.ITEMS.items()
}
"""An item is added in two words: that of the GA API, and that of its beta."""
_BEGAN, _DONE = _of_response(api.BEGAN), _of_response(api.DONE)
_LISTEN: Final = _event(
    ms.Listen,
    "response.listen",
    *_OF_SESSION,
    Object(
        "response",
        fixed("object", "realtime.response"),
        fixed("status", "listening"),
        doc="No response begins.",
    ),
    input_id="",
    metrics=api.NO_METRICS,
)
_CREATED: Final = typed(
    ms.Created,
    shared.SESSION_CREATED,
    _NUMBER,
    api.EVENT_ID,
    computed("attachment_generation", c.integer(1, 1), lambda _: 1),
    "The client's first connection.",
    _TOKEN,
    _SESSION,
    lacks={"session_id": "", "prompt_length": 0, "recording": "off"},
)
_PLAYED: Final = (
    Field("generated_ms", c.INTEGER),
    computed("sent_ms", c.INTEGER, lambda it: it.playback.generated_ms),
    "The same: what is spoken is sent.",
    Field("played_ms", c.INTEGER),
    Field("committed_ms", c.INTEGER),
)
_ACKNOWLEDGED: Final = _event(
    om.Acknowledged,
    "playback.acknowledged",
    Object(
        "event",
        fixed("type", "playback.acknowledged"),
        *_OF_SESSION,
        Field("item_id", c.TEXT),
        *(
            computed(name, c.INTEGER, attrgetter(f"playback.{name}"), doc="As in playback.")
            for name in ("played_ms", "committed_ms")
        ),
        Field("truncate", c.FLAG, attr="truncates"),
        Object("playback", *_PLAYED, attr="playback", doc="Where the response stands."),
        Field("history_committed", c.FLAG, attr="is_whole"),
        doc="What is noted.",
    ),
)
_CLOSED: Final = _event(
    ms.Closed,
    shared.SESSION_CLOSED,
    Field("session_id", c.TEXT),
    Field("reason", c.word_of(_ENDS), get=shared.end_word(_REASONS)),
)
_QUEUE: Final = tuple(
    _numbered(table) for table in shared.COMMON if table.cls in (ms.Queued, ms.QueueUpdate)
)
ANSWERS: Final = (
    *_QUEUE,
    _CREATED,
    _event(om.SessionUpdated, "session.updated", _SESSION),
    _event(om.HeartbeatAck, "session.heartbeat_ack", Field("session_id", c.TEXT)),
    *_INPUTS.values(),
    *(table for tables in _ITEMS.values() for table in tables),
    _numbered(api.DELETED),
    _numbered(api.TRUNCATED),
    _BEGAN,
    _event(
        om.Speaking,
        "response.speak",
        Field("response_id", c.TEXT),
        Object("metadata", Field("epoch", c.INTEGER), doc="Where it stands."),
    ),
    *_STEPS.values(),
    _AUDIO,
    _WORDS,
    _LISTEN,
    _DONE,
    _event(om.RateLimits, "rate_limits.updated", api.nothing("rate_limits")),
    _event(om.OutputCleared, "output_audio_buffer.cleared", Field("response_id", c.TEXT)),
    _ACKNOWLEDGED,
    _CLOSED,
    _numbered(api.error_table(ERROR_CODES, "event_id")),
)


def _of_input(step: oa.InputStep) -> tuple[Table, ...]:
    found = _INPUTS.get(step.kind)
    return () if found is None else (found,)


OMNI: Final = Dialect(
    "vllm-omni",
    REQUESTS,
    ANSWERS,
    types=_OTHER_TYPES,
    choose={
        ms.QueueDone: lambda _: (),
        ms.Speech: lambda speech: (_AUDIO, _WORDS) if speech.pcm else (_WORDS,),
        oa.ReplyStep: lambda step: (_STEPS[step.kind],),
        oa.InputStep: _of_input,
        oa.ItemStep: lambda step: _ITEMS[step.kind],
        oa.ReplyState: lambda it: (_BEGAN if it.response.status == "in_progress" else _DONE,),
    },
    unserved=dict.fromkeys(UNSUPPORTED, ": the model takes no text in a conversation"),
)
"""The dialect of vLLM-Omni's duplex protocol."""
