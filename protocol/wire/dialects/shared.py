"""The common part of `realtime` and `duplex-v1`: type tags, queue events, errors, metrics.

On `/v1/realtime` queue events and errors are the same in both (the wire decisions), so a client
reads them before it has chosen a dialect. `session.close` is the same too, and never refused. The
legacy dialects share places in the queue, output and metrics, but no type tags: see `legacy`.

Here are also the settings of a duplex session (`config`), and the messages by which a client of any
dialect comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import attrs

from ...values import errors, limits
from ...values import messages as ms
from ...values.errors import invalid
from ...values.model import INPUT_RATE_HZ, DuplexConfig, SlidingWindow
from ...values.requests import CloseRequest, Played, Request
from .. import codec as c
from ..table import Field, Object, Row, Rule, checked, computed, items, optional, typed

SLICES: Final = c.integer(1, limits.SLICES_MAX)
"""A slice count (000, max_slice_nums)."""
PROMPT: Final = c.text(limits.INSTRUCTIONS_CHARS_MAX, holds=c.PROMPTED)
INPUT_ID: Final = optional("input_id", c.text(limits.INPUT_ID_CHARS_MAX, 1, holds=c.NAMED))
"""The client's own name for its input, returned in the answers to it."""
FORCE_LISTEN: Final = Field("force_listen", c.FLAG, False)
APPEND_SLICES: Final = optional("max_slice_nums", SLICES)


def frames(name: str) -> Field:
    """Make the row of an append's pictures; `mode=audio` ignores them."""
    kind = items(c.FRAME_OF_SEVERAL, limits.FRAMES_MAX)
    return Field(name, kind, (), attr="frames", omit=True, aside_in={"audio": ()})


def _record(value: c.Value, at: c.ParseState) -> bool:
    if not value.flag() and at.context.must_record:
        raise invalid(value.path, "false, but this server records all sessions of this client")
    return bool(value.value)


RECORD: Final = Field("record", attrs.evolve(c.FLAG, read=_record), True, omit=True, rank=9)
"""Whether the session may be recorded."""
ASKED: Final[tuple[Row | str, ...]] = (Field("notices", c.FLAG, False, omit=True, rank=9), RECORD)
"""A client's wishes for the server in addition to its settings."""


def setting(name: str, kind: c.FieldType, default: object, **more: Any) -> Field:
    """Make the row of a setting, which is written unless it is the default."""
    return Field(name, kind, default, omit=True, **more)


def one_value(name: str, kind: c.FieldType, why: str = "", **more: Any) -> Field:
    """Make the row of a setting with a single allowed value."""
    return checked(name, c.because(kind, why) if why else kind, **more)


SESSION_INIT: Final = "session.init"
SESSION_UPDATE: Final = "session.update"
INPUT_APPEND: Final = "input.append"
AUDIO_APPEND: Final = "input_audio_buffer.append"
SESSION_CLOSE: Final = "session.close"
PLAYBACK_ACK: Final = "playback.ack"
TOOL_RESULT: Final = "input.tool_result"
STANDALONE: Final = "input.standalone"
KNOWN_TYPES: Final = frozenset(
    {SESSION_INIT, SESSION_UPDATE, INPUT_APPEND, AUDIO_APPEND, SESSION_CLOSE, PLAYBACK_ACK}
    | {TOOL_RESULT, STANDALONE}
)
"""Types of clients of any dialect of `/v1/realtime`; others are unknown, not misplaced."""

SESSION_QUEUED: Final = "session.queued"
SESSION_QUEUE_UPDATE: Final = "session.queue_update"
SESSION_QUEUE_DONE: Final = "session.queue_done"
SESSION_CREATED: Final = "session.created"
SESSION_GOING_AWAY: Final = "session.going_away"
SESSION_CLOSED: Final = "session.closed"
ERROR: Final = "error"

ERROR_CODES: Final = tuple(
    code
    for code in errors.ErrorCode
    if code not in errors.TRANSCRIPTION_ERRORS | errors.LIVE_ERRORS
)
ERROR_TYPES: Final = tuple(dict.fromkeys(map(errors.error_type, errors.ErrorCode)))
RECORDING_STATES: Final[tuple[ms.RecordingState, ...]] = ("on", "off", "failed")

# -- the client's type --------------------------------------------------------------------------


def classify(body: c.Json, own: Mapping[str, Request]) -> Request:
    """Return the kind of a message; MISPLACED for a type that only another dialect has."""
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in KNOWN_TYPES:
        return Request.UNKNOWN
    return own.get(kind, Request.MISPLACED)


def is_model_update(body: c.Json) -> bool:
    """Whether this is 003's `session.update`: a `model`, and no object `session` (000)."""
    return (
        body.get("type") == SESSION_UPDATE
        and body.get("model") is not None
        and not isinstance(body.get("session"), dict)
    )


OPENAI_SESSIONS: Final = ("realtime", "transcription")
"""The types of sessions in OpenAI's Realtime API; no session of ours has a type."""


def is_openai_update(body: c.Json) -> bool:
    """Whether this is the `session.update` of OpenAI's Realtime API, which is not spoken here.

    An update for a transcription that also has 003's `model` is 003's.
    """
    session = body.get("session")
    if body.get("type") != SESSION_UPDATE or not isinstance(session, dict):
        return False
    realtime, transcription = OPENAI_SESSIONS
    kind, is_003 = session.get("type"), isinstance(body.get("model"), str)
    return kind == realtime or (kind == transcription and not is_003)


def end_word(reasons: Mapping[ms.EndReason, str]) -> Callable[[ms.Closed], str]:
    """Make the `get` of a session's end; one for which the dialect has no word is never sent."""

    def word(closed: ms.Closed) -> str:
        if closed.reason not in reasons:
            raise errors.LocalProtocolError(
                f"no session.closed for {closed.reason}: it is never sent"
            )
        return reasons[closed.reason]

    return word


# -- tables -------------------------------------------------------------------------------------


def _closing_words(value: c.Value, _: c.ParseState) -> str | None:
    """Read a client's own words: None if it is not a string or empty; a longer one is cut."""
    words = value.value
    return words[: limits.REASON_CHARS_MAX] or None if isinstance(words, str) else None


CLOSE: Final = typed(
    CloseRequest,
    SESSION_CLOSE,
    optional("reason", c.FieldType(read=_closing_words, schema={}, holds=c.USER_TEXT)),
)
"""`session.close`: it is honoured in every state, so nothing in it is refused."""
PLAYED_MS_MAX: Final = 2**53
"""Whole numbers up to it are exact in JavaScript."""
PLAYED: Final = typed(Played, PLAYBACK_ACK, Field("played_ms", c.integer(0, PLAYED_MS_MAX)))

_TIME_MS_MAX: Final = 1e9
"""Eleven days: no unit takes longer, and no session lives as long."""
TIME_MS: Final = c.number(0, _TIME_MS_MAX)
RECORDING: Final = c.choice(RECORDING_STATES)
PLACE: Final[tuple[Row | str, ...]] = (
    Field("position", c.integer(1), attr="place.position"),
    Field("estimated_wait_s", c.INTEGER, attr="place.estimated_wait_s"),
    Field("ticket_id", c.TEXT, attr="place.ticket_id"),
    Field("queue_length", c.INTEGER, attr="place.queue_length"),
)
NOWHERE: Final = ms.QueuePlace(position=0, estimated_wait_s=0, ticket_id="", queue_length=0)
ERROR_SESSION: Final = Field("session_id", c.TEXT, "", omit=True)
"""The session of an error, if known; other servers do not name it."""
RECORDED: Final[tuple[Row | str, ...]] = (
    Field("recording_id", c.TEXT, "", omit=True),
    Field("recording_notice", c.TEXT, "", omit=True),
)
METRICS: Final[tuple[Row | str, ...]] = (
    Field("kv_cache_length", c.INTEGER, 0),
    Field("prefill_ms", TIME_MS, 0.0),
    Field("generate_ms", TIME_MS, 0.0),
    Field("wall_clock_ms", TIME_MS, 0.0),
    Field("cost_llm_ms", TIME_MS, 0.0),
    Field("cost_tts_ms", TIME_MS, 0.0),
    Field("cost_token2wav_ms", TIME_MS, 0.0),
    Field("n_tokens", c.INTEGER, 0),
    Field("n_tts_tokens", c.INTEGER, 0),
    Field("vision_slices", c.INTEGER, 0),
    Field("vision_tokens", c.INTEGER, 0),
    Field("dropped_units", c.INTEGER, 0),
    Field("recording", RECORDING, "off"),
)
"""The metrics of a unit (the wire decisions, `realtime`); 0 if another server omits one."""
COMMON: Final = (
    typed(ms.Queued, SESSION_QUEUED, *PLACE),
    typed(ms.QueueUpdate, SESSION_QUEUE_UPDATE, *PLACE),
    typed(ms.QueueDone, SESSION_QUEUE_DONE),
    typed(ms.GoingAway, SESSION_GOING_AWAY, Field("seconds_left", c.INTEGER)),
    typed(
        ms.ErrorReport,
        ERROR,
        Object(
            "error",
            Field("code", c.choice(ERROR_CODES)),
            Field("message", c.TEXT),
            computed(
                "type",
                c.choice(ERROR_TYPES),
                lambda report: errors.error_type(report.code),
                is_read=False,
            ),
            "Whose mistake it is.",
            is_required=True,
        ),
        ERROR_SESSION,
    ),
)
"""Queue events, a warning and errors, as `realtime` and `duplex-v1` have them."""


# -- The inference settings of a duplex session: `config` (002), each honoured or refused ---------
#
# Bounds are those of `model.DuplexConfig`. `chunk_ms`, `sample_rate`, `ls_mode` and the source's
# settings that are not offered here have one allowed value each; an unknown key is refused, so
# that an ineffective setting is noticed.

CHUNK_MS: Final = 1000
"""A unit is one second; no other length is served."""
DECODE_MODES: Final = ("sampling", "greedy")
_REPETITION: Final = "the weight of repeated text is not offered as a setting"


def _greedy(at: c.ParseState) -> None:
    if at.values.pop("decode_mode", None) == "greedy":
        at.values["config.temperature"] = 0.0


_DEFAULT: Final = DuplexConfig()
_WINDOWS: Final = get_args(SlidingWindow)
WINDOW: Final = attrs.evolve(
    c.choice(_WINDOWS), read=lambda value, at: value.choice(at.context.sliding_windows)
)
CONFIG: Final[tuple[Row | str, ...]] = (
    setting("generate_audio", c.FLAG, _DEFAULT.generate_audio),
    setting("force_listen_count", c.integer(0, 100), _DEFAULT.force_listen_count),
    setting(
        "max_new_speak_tokens_per_chunk", c.integer(2, 20), _DEFAULT.max_new_speak_tokens_per_chunk
    ),
    setting("temperature", c.number(0, 2), _DEFAULT.temperature),
    setting("top_k", c.integer(1, 1000), _DEFAULT.top_k),
    setting("top_p", c.number(0, 1, "above "), _DEFAULT.top_p),
    setting("listen_prob_scale", c.number(0, 10), _DEFAULT.listen_prob_scale),
    setting("length_penalty", c.number(0.1, 10), _DEFAULT.length_penalty),
    setting("sliding_window", WINDOW, _DEFAULT.sliding_window),
    one_value("ls_mode", c.choice(("explicit",))),
    one_value("chunk_ms", c.integer(CHUNK_MS, CHUNK_MS)),
    one_value("sample_rate", c.integer(INPUT_RATE_HZ, INPUT_RATE_HZ)),
    Field("max_slice_nums", SLICES, 1, attr="^inner_slices", is_written=False),
    "Slices a frame may be cut into, 1-9, for appends that do not say.",
    Field("decode_mode", c.choice(DECODE_MODES), "sampling", attr="^decode_mode", is_written=False),
    "`greedy` takes the most likely token, as a `temperature` of 0 does.",
    one_value("text_repetition_penalty", c.number(1.05, 1.05), _REPETITION),
    one_value("text_repetition_window_size", c.integer(512, 512), _REPETITION),
    one_value("listen_top_k", c.integer(0, 0), "listening is sampled as any token is"),
    one_value("tts_temperature", c.number(0.8, 0.8), "the sampling of speech is not a setting"),
    Rule(_greedy),
)
"""The inference settings, each honoured or refused."""


def config(name: str, **more: Any) -> Object:
    """Make the row of the object that holds the inference settings."""
    return Object(name, *CONFIG, attr="config", closed=True, omit=True, **more)


def slices_once(name: str) -> Rule:
    """Settle `max_slice_nums`, which may stand in the settings (`name`) and next to them.

    `FieldError` if both are there and differ, so that one of them would be ignored.
    """

    def check(at: c.ParseState) -> None:
        inner = at.values.pop("inner_slices", None)
        settings = at.body.get(name)
        if inner is None or not isinstance(settings, dict):
            return
        if settings.get("max_slice_nums") is None:
            return
        if at.body.get("max_slice_nums") is None:
            at.values["max_slice_nums"] = inner
        outer = at.values["max_slice_nums"]
        if outer != inner:
            raise invalid(f"{at.path}.max_slice_nums", f"{outer}, while config says {inner}")

    return Rule(check)


# -- The messages by which a client comes back to its session, the same in every dialect ----------
#
# They belong to no dialect, as `seq` and `ack` do not: only a connection whose address asks for a
# session that can be resumed has them.

TOKEN: Final = "$token"
"""Stands for the token in the log, and is replaced where a connection is greeted."""
SESSION_RESUMABLE: Final = "session.resumable"
SESSION_RESUME: Final = "session.resume"
SESSION_REPLACED: Final = "session.replaced"
TOKEN_CHARS_MAX: Final = 64
"""32 random bytes in base64 have 43 characters."""

RESUMABLE: Final = typed(
    ms.Resumable,
    SESSION_RESUMABLE,
    Field("recording_id", c.TEXT, ""),
    Field("token", c.TEXT, ""),
    Field("grace_s", c.INTEGER, 0),
    Field("expires_in_s", c.INTEGER, 0),
    Field("next_seq", c.INTEGER, 0),
    Field("ack", c.INTEGER, 0),
)
UNRESUMABLE: Final = typed(
    ms.Resumable, SESSION_RESUMABLE, Field("token", c.TEXT, ""), lacks={"recording_id": ""}
)
"""The same later on: the session cannot be resumed any more."""
REPLACED: Final = typed(ms.ConnectionReplaced, SESSION_REPLACED)
RESUME: Final = typed(
    ms.ResumeRequest,
    SESSION_RESUME,
    Field("token", c.text(TOKEN_CHARS_MAX, 1)),
    Field("last_seq", c.integer(-1), -1),
)


def numbered(frame: str, *, seq: int, ack: int) -> str:
    """Put the numbers into a frame, which is a JSON object with a field or more."""
    return f'{frame[:-1]},"seq":{seq},"ack":{ack}}}'
