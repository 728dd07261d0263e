"""The dialects `legacy-duplex` (002) and `legacy-chat` (004), and their queue events and errors.

Their event types have no `session.` prefix. An error has its text at the top level, and `code` as
our addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from ...values import messages as ms
from ...values import requests as rq
from ...values.errors import ErrorCode, LocalProtocolError
from .. import codec as c
from ..dialects import shared
from ..table import Dialect, Field, Row, Table, computed, optional, typed
from .chat import MADE_CALLS, ask_rows

ERROR: Final = {"type": "error"}
ERROR_TEXT: Final = Field("error", c.TEXT, attr="message")
QUEUE: Final = (
    typed(ms.Queued, "queued", *shared.PLACE),
    typed(ms.QueueUpdate, "queue_update", *shared.PLACE),
    typed(ms.QueueDone, "queue_done"),
)
COMMON: Final = (
    *QUEUE,
    Table(
        ms.ErrorReport,
        ERROR_TEXT,
        Field("code", c.choice(shared.ERROR_CODES), ErrorCode.INFERENCE_ERROR),
        shared.ERROR_SESSION,
        tag=ERROR,
    ),
)
"""An error without a code comes from another server, and counts as its failure."""


def faults(cls: type, text: Field, code: Field) -> Table:
    """Make the table of an end that is sent as an error."""
    session_id = Field("session_id", c.TEXT, "", attr="named", omit=True)
    rows: tuple[Row | str, ...] = (text, code, session_id)
    return Table(cls, *rows, tag=ERROR)


# -- The server's messages in the dialect of 002, without queue events ----------------------------

PAUSE_S_MAX: Final = 86_400
"""A day: the server's own limit is much less and cuts a longer wish (the wire decisions)."""
UNIX_S_MAX: Final = 1e11
"""The year 5138: a later time is in other units."""
PAUSE_S: Final = c.number(0, PAUSE_S_MAX, "above ")
FAULTS: Final[Mapping[ms.EndReason, str]] = {
    "context_full": "the model's context is full",
    "backend_error": "the model failed",
    "server_shutdown": "the server shuts down",
    "invalid_frame": "a frame is not JSON, or too long",
    "flooded": "more was sent than can be recorded",
}
TIMEOUTS: Final[Mapping[ms.EndReason, str]] = {
    "timeout": "the session's time is over",
    "pause_timeout": "the pause was too long",
}

# -- a unit's outcome ---------------------------------------------------------------------------

_UNIX_S: Final = c.number(0, UNIX_S_MAX)
_SENT: Final = attrs.evolve(
    _UNIX_S,
    read=lambda value, at: round(_UNIX_S.read(value, at) * 1000, 3),
    write=lambda wall_ms: round(wall_ms / 1000, 6),
)


def _costs(name: str, attribute: str) -> Field:
    return Field(name, shared.TIME_MS, 0.0, attr=f"metrics.{attribute}")


def _counts(name: str) -> Field:
    return Field(name, c.INTEGER, 0, attr=f"metrics.{name}")


_METRICS: Final[tuple[Row | str, ...]] = (
    Field(
        "current_time",
        attrs.evolve(shared.TIME_MS, write=lambda time_ms: round(time_ms, 3)),
        0.0,
        attr="metrics.session_ms",
    ),
    _costs("cost_llm_ms", "cost_llm_ms"),
    computed("cost_tts_prep_ms", c.always(0.0), lambda _: 0.0, is_read=False),
    "Always 0: it is part of `cost_tts_ms`.",
    _costs("cost_tts_ms", "cost_tts_ms"),
    _costs("cost_token2wav_ms", "cost_token2wav_ms"),
    _costs("cost_all_ms", "generate_ms"),
    _counts("n_tokens"),
    _counts("n_tts_tokens"),
    Field("server_send_ts", _SENT, 0.0, attr="metrics.wall_ms"),
    _costs("wall_clock_ms", "wall_clock_ms"),
    _counts("kv_cache_length"),
    _counts("vision_slices"),
    _counts("vision_tokens"),
)


def _is_listen(outcome: ms.Listen | ms.Speech | ms.Pending) -> bool:
    """To clients a listen ends the turn, so a pending result during a turn is not a listen."""
    if isinstance(outcome, ms.Pending):
        return not outcome.is_speaking
    return isinstance(outcome, ms.Listen)


def _of_speech(name: str, default: object) -> Any:
    return lambda outcome: getattr(outcome, name) if isinstance(outcome, ms.Speech) else default


def _outcome(values: dict[str, Any]) -> ms.Listen | ms.Speech | ms.Pending:
    costs = {key[8:]: values.pop(key) for key in [*values] if key.startswith("metrics.")}
    metrics = ms.Metrics(**costs, recording="off")
    is_listen, is_pending = values.pop("is_listen"), values.pop("pending")
    if is_pending:
        return ms.Pending(is_speaking=not is_listen, metrics=metrics)
    if is_listen:
        return ms.Listen(session_id="", input_id="", metrics=metrics)
    return ms.Speech(session_id="", response_id="", input_id="", metrics=metrics, **values)


RESULT: Final = typed(
    ms.Speech,
    "result",
    Field("is_listen", c.FLAG, get=_is_listen, doc="The model listens: it says nothing."),
    Field("text", c.TEXT, "", get=_of_speech("text", "")),
    Field("audio_data", c.or_null(c.SPEECH), b"", attr="pcm", get=_of_speech("pcm", b"")),
    Field("end_of_turn", c.FLAG, False, get=_of_speech("end_of_turn", False)),
    *_METRICS,
    Field(
        "pending",
        attrs.evolve(c.FLAG, schema=c.always(True).schema),
        False,
        get=lambda outcome: isinstance(outcome, ms.Pending),
        omit=True,
    ),
    "A chunk completed no unit: its sound waits for more.",
    make=_outcome,
    others=(ms.Listen, ms.Pending),
)

# -- other messages of the server ------------------------------------------------------------------


def _prepared(values: dict[str, Any]) -> ms.Created:
    is_recorded = bool(values["recording_id"])
    return ms.Created(session_id="", recording="on" if is_recorded else "off", **values)


def _timeout(values: dict[str, Any]) -> ms.Closed:
    is_pause = values["reason"] == TIMEOUTS["pause_timeout"]
    return ms.Closed(session_id="", reason="pause_timeout" if is_pause else "timeout")


def _error(values: dict[str, Any]) -> ms.ErrorReport | ms.Closed:
    for reason in FAULTS:
        if values["code"] == reason:
            return ms.Closed(session_id="", reason=reason, named=values["session_id"])
    return ms.ErrorReport(**{**values, "code": ErrorCode(values["code"])})


FAULT: Final = faults(
    ms.Closed,
    Field("error", c.TEXT, get=lambda closed: FAULTS[closed.reason]),
    Field("code", c.TEXT, attr="reason"),
)
STOPPED: Final = typed(
    ms.Closed, "stopped", Field("session_id", c.TEXT, ""), lacks={"reason": "client"}
)
TIMEOUT: Final = typed(
    ms.Closed,
    "timeout",
    Field(
        "reason",
        c.FieldType(
            read=c.TEXT.read,
            write=TIMEOUTS.__getitem__,
            schema=c.choice((*TIMEOUTS.values(),)).schema,
        ),
        "",
    ),
    make=_timeout,
)
ANSWERS: Final = (
    typed(
        ms.Created,
        "prepared",
        Field("prompt_length", c.INTEGER, 0),
        Field("recording_session_id", c.TEXT, "", attr="recording_id", omit=True),
        Field("recording_notice", c.TEXT, "", omit=True),
        make=_prepared,
    ),
    RESULT,
    typed(ms.Paused, "paused", Field("timeout", PAUSE_S, attr="timeout_s")),
    typed(ms.Resumed, "resumed"),
    typed(ms.Interrupted, "interrupted"),
    typed(ms.GoingAway, "going_away", Field("seconds_left", c.INTEGER)),
    Table(
        ms.ErrorReport,
        ERROR_TEXT,
        Field("code", c.choice((*shared.ERROR_CODES, *FAULTS)), ErrorCode.INFERENCE_ERROR),
        shared.ERROR_SESSION,
        tag=ERROR,
        make=_error,
    ),
    STOPPED,
    TIMEOUT,
    *QUEUE,
)


def _of_end(closed: ms.Closed) -> tuple[Table, ...]:
    """The tables of a session's end; `LocalProtocolError` if it is never sent here."""
    reason = closed.reason
    if reason in TIMEOUTS:
        return (TIMEOUT,)
    if reason in FAULTS:
        return FAULT, STOPPED
    if reason in {"client", "cancelled"}:
        return (STOPPED,)
    raise LocalProtocolError(f"no frame for the end {reason} in legacy-duplex: it is never sent")


# -- The dialect of 004: a connection is one request, `prefill_done`, `chunk`s, `done` ------------
#
# Every object is a request, without a type (fields: `chat.ask_rows`); the client has no other
# message. The end has no word: the server closes the connection.
#
# 004 cannot show: the ids of session, response and input, why an answer ended, whether it was
# streamed, and its costs. The reading side has empty ids, `turn_end`, streaming and no metrics.

_ASK: Final = Table(
    rq.Ask,
    *ask_rows(is_enabled=False),
    shared.RECORD,
    lacks={"input_id": None},
    where="legacy-chat",
)
_IDS: Final = {"session_id": "", "response_id": "", "input_id": ""}
_ANSWERS: Final = (
    typed(ms.Prefilled, "prefill_done", Field("input_tokens", c.INTEGER)),
    typed(
        ms.Delta,
        "chunk",
        Field("text_delta", c.or_null(c.TEXT), "", attr="text"),
        Field("audio_data", c.or_null(c.SPEECH), b"", attr="pcm"),
        lacks=_IDS,
    ),
    typed(
        ms.Response,
        "done",
        Field("text", c.TEXT),
        Field("generated_tokens", c.INTEGER, 0),
        Field("input_tokens", c.INTEGER, 0),
        Field("audio_data", c.or_null(c.SPEECH), b"", attr="pcm"),
        Field("tool_calls", MADE_CALLS, (), omit=True),
        Field("recording_session_id", c.TEXT, "", attr="recording_id", omit=True),
        lacks={
            **_IDS,
            "reason": "turn_end",
            "streaming": None,
            "metrics": ms.Metrics(kv_cache_length=0, recording="off"),
        },
    ),
    *COMMON,
)


class LegacyChat(Dialect):
    """The dialect of 004."""

    def classify(self, _body: c.Json) -> rq.Request:
        """Return the kind of request: there is only one."""
        return rq.Request.INIT


LEGACY_CHAT: Final = LegacyChat("legacy-chat", {rq.Request.INIT: _ASK}, _ANSWERS)


# -- The dialect of 002: `prepare`, `audio_chunk`, `result`, and a session that can be paused -----
#
# Choices in addition to 002:
# - `ref_audio_path` is the name of a voice in the server's library, never a path; data wins over
#   it.
# - `video_frame` in mode=audio is set aside unread: a `See` without a frame.
# - An unwanted end is sent twice, as an `error` with its code and as `stopped`, since clients wait
#   for `stopped`. It is read as the end that the `error` names; the `stopped` after it is another
#   end, of a session that is over by then. A timeout is only sent as `timeout`, and its text says
#   whether it was the pause's.
# - `stop` has no reason, so a client's own words are left out rather than its goodbye refused.
#
# 002 cannot show: ids of responses, input and sessions once prepared, the cost of prefill, units
# dropped, and whether the recording goes on. The reading side leaves ids empty and takes the name
# of the recording to mean that there is one. A cancelled session reads as a stop.

_PREPARE: Final = typed(
    rq.Init,
    "prepare",
    shared.config("config", rank=1),
    Field("max_slice_nums", shared.SLICES, 1, rank=2),
    Field("system_prompt", shared.PROMPT, "", attr="instructions", also=("prefix_system_prompt",)),
    optional("ref_audio_base64", c.VOICE_OR_NAME, attr="ref_audio"),
    shared.setting(
        "ref_audio_path", c.VOICE_BY_NAME, None, attr="ref_audio", after="ref_audio_base64"
    ),
    optional("tts_ref_audio_base64", c.VOICE, attr="tts_ref_audio"),
    shared.slices_once("config"),
    Field("deferred_finalize", c.FLAG, True, attr="config.deferred_finalize", rank=1),
    *shared.ASKED,
)
_REQUESTS: Final = {
    rq.Request.INIT: _PREPARE,
    rq.Request.APPEND: typed(
        rq.Append,
        "audio_chunk",
        Field("audio", c.input_sound(1), attr="pcm", also=("audio_base64",)),
        shared.frames("frame_base64_list"),
        shared.FORCE_LISTEN,
        shared.APPEND_SLICES,
        lacks={"input_id": None},
        where="legacy-duplex",
    ),
    rq.Request.CLOSE: typed(rq.CloseRequest, "stop"),
    rq.Request.SEE: typed(
        rq.See,
        "video_frame",
        Field("frame", c.FRAME, attr="jpeg", also=("frame_base64",), aside_in={"audio": b""}),
    ),
    rq.Request.PAUSE: typed(rq.Pause, "pause", optional("timeout", PAUSE_S, attr="timeout_s")),
    rq.Request.RESUME: typed(rq.Resume, "resume"),
    rq.Request.INTERRUPT: typed(rq.Interrupt, "interrupt"),
    rq.Request.REPORT: typed(
        rq.Report, "client_diagnostic", computed("metrics", c.OBJECT, lambda _: {})
    ),
    rq.Request.PLAYED: shared.PLAYED,
}


LEGACY_DUPLEX: Final = Dialect("legacy-duplex", _REQUESTS, ANSWERS, choose={ms.Closed: _of_end})
"""The dialect of 002."""
