"""Every metric of sessions, as data: its name, its kind, its labels and its buckets.

- Names follow Prometheus: `antiphon_`, base units, `_total` for counters.
- A label's values are a fixed set: modes, codes, reasons, stages; never an id or a client's text.
  So the number of series is known in advance. Each exists from the start, at 0, so that its first
  rise shows.
- A metric of the sessions of a mode has `mode` as its first label.
- Times are of the session's clock or the model's own costs. Both are in the log, so recordings give
  the same figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Final, Literal, get_args

import attrs

from protocol.values.effects import MediaKind
from protocol.values.errors import ErrorCode
from protocol.values.events import Endpoint
from protocol.values.limits import MODES, OF_MODE
from protocol.values.messages import EndReason

UNIT_BUCKETS_S: Final = (
    *(0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    *(1.25, 1.5, 2.0, 3.0, 5.0),
)
"""A unit has one second: fine below it, and a bound at 1.0 to read misses."""
STAGE_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.0, 5.0),
)
"""From a finalize on a GPU, some milliseconds, to a unit that takes its whole second."""
WAIT_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
"""At most five units wait, a second each."""
OVERLAP_BUCKETS_S: Final = (0.8, 2.0)
"""A knock and its silence last half a second, a word nearly one."""
DELAY_BUCKETS_S: Final = (
    *(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0),
)
"""People answer each other after 0.2 s; after 4 s they begin to repeat what they said."""
AMOUNT_BUCKETS_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds of a session that should not be."""
SHARE_BUCKETS: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Fine at both ends: of good values, and of bad ones."""
QUEUE_BUCKETS_S: Final = (
    *(0.01, 0.1, 1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
"""From a free slot to half an hour; a longer wait meets the session's limit."""
SESSION_BUCKETS_S: Final = (
    *(1.0, 5.0, 15.0, 30.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1800.0, 3600.0),
)
"""Contexts last 90 s, video sessions 300 s, audio sessions 600 s; chats have no limit."""
TURN_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""From the first token of a fast model to a long spoken answer of a slow one."""
CALL_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Opening, cleaning up and decoding: bounded by their timeouts, 10 s to 30 s."""
TOKEN_BUCKETS: Final = (256.0, 512.0, 1024.0, 2048.0, 4096.0, 6144.0, 8192.0, 16384.0, 32768.0)
"""Up to the published context of 8192, and two larger ones."""

BROKEN_OFF: Final = "broken_off"
"""The end of a session without a reason: a bug of ours, or a hard stop."""
OUR_FAULTS: Final = frozenset({BROKEN_OFF, "backend_error"})
"""The ends that are warnings in the log."""
_DUPLEX: Final = tuple(mode for mode in MODES if OF_MODE[mode].work == "unit")


@attrs.frozen(kw_only=True, eq=False)
class Metric:
    """One metric: `meaning` is one sentence, `buckets` the rising upper bounds of a histogram.

    `labels` are the names, `series` the values of each series, as far as they are known before.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()


def _count(name: str, meaning: str, **labels: Iterable[str]) -> Metric:
    return Metric(
        name=f"antiphon_{name}_total",
        kind="counter",
        meaning=meaning,
        labels=tuple(labels),
        series=tuple(product(*labels.values())),
    )


def _spread(name: str, meaning: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Metric:
    return Metric(
        name=f"antiphon_{name}",
        kind="histogram",
        meaning=meaning,
        labels=tuple(labels),
        series=tuple(product(*labels.values())),
        buckets=buckets,
    )


# -- traffic --------------------------------------------------------------------------------------

SESSIONS_OPENED: Final = _count(
    "sessions_opened",
    "Sessions whose connection was opened.",
    mode=MODES,
    endpoint=get_args(Endpoint),
)
SESSIONS_ENDED: Final = _count(
    "sessions_ended",
    "Sessions that are over; broken_off: by a bug or a hard stop.",
    mode=MODES,
    reason=(*get_args(EndReason), BROKEN_OFF),
)
SESSION_SECONDS: Final = _spread(
    "session_seconds",
    "From a session's connection to its last event.",
    SESSION_BUCKETS_S,
    mode=MODES,
)
FRAMES_RECEIVED: Final = _count("frames_received", "Messages that clients sent.", mode=MODES)
FRAMES_SENT: Final = _count("frames_sent", "Messages handed to connections.", mode=MODES)
RECEIVED_BYTES: Final = _count("received_bytes", "Bytes of messages that clients sent.", mode=MODES)
SENT_BYTES: Final = _count("sent_bytes", "Bytes of messages handed to connections.", mode=MODES)
SENDS_FAILED: Final = _count(
    "sends_failed", "Connections dropped because a client read too slowly.", mode=MODES
)
FORKED: Final = _count(
    "sessions_forked", "Sessions that began from the past of a recorded one.", mode=MODES
)
RESUMED: Final = _count(
    "sessions_resumed", "Times that a client came back to its session.", mode=MODES
)
ERRORS: Final = _count("errors", "Errors sent to clients, by their wire code.", code=ErrorCode)
MEDIA: Final = _count(
    "media",
    "Images, sounds and videos handed to decoders: decoded or rejected.",
    outcome=("decoded", "rejected"),
    kind=get_args(MediaKind),
)
MEDIA_SECONDS: Final = _spread(
    "media_seconds",
    "From handing media to a decoder to its answer.",
    CALL_BUCKETS_S,
    kind=get_args(MediaKind),
)
RECORDINGS_FAILED: Final = _count(
    "recordings_failed", "Sessions whose log failed while they ran.", mode=MODES
)

# -- the queue and the slots ----------------------------------------------------------------------

QUEUE_WAIT_SECONDS: Final = _spread(
    "queue_wait_seconds",
    "From asking for a slot to having it; a chat asks for one each turn.",
    QUEUE_BUCKETS_S,
    mode=MODES,
)
QUEUE_LEFT: Final = _count(
    "queue_left",
    "Requests for a slot that got none: left, cancelled or refused.",
    mode=MODES,
    how=("left", "cancelled", "refused"),
)
SLOT_SECONDS: Final = _spread(
    "slot_seconds", "How long slots were held, cleanup included.", SESSION_BUCKETS_S, mode=MODES
)
RELEASE_SECONDS: Final = _spread(
    "release_seconds", "From the return of a slot to the end of its cleanup.", CALL_BUCKETS_S
)
OPEN_SECONDS: Final = _spread(
    "open_seconds", "Opening a duplex session on the model, its prompt included.", CALL_BUCKETS_S
)
OPENS_FAILED: Final = _count("opens_failed", "Session openings that failed permanently.")
BACKENDS_LOST: Final = _count("backends_lost", "Times that a session lost its model.", mode=MODES)
REBUILDS: Final = _count(
    "rebuilds",
    "Sessions brought to their past on another slot: done or failed.",
    outcome=("done", "failed"),
)
REBUILD_SECONDS: Final = _spread(
    "rebuild_seconds", "From asking for a rebuild to its end.", CALL_BUCKETS_S
)
REBUILT_SECONDS: Final = _count(
    "rebuilt_seconds", "Seconds of sessions that were fed again in rebuilds."
)

# -- units ----------------------------------------------------------------------------------------

UNITS: Final = _count(
    "units",
    "Units started, by outcome: listen, speech, cut (interrupted), failed (sent as "
    "inference_error), ended (the session was over first).",
    mode=_DUPLEX,
    outcome=("listen", "speech", "cut", "failed", "ended"),
)
UNITS_DROPPED: Final = _count(
    "units_dropped", "Waiting units that were dropped for newer ones (B7).", mode=_DUPLEX
)
UNITS_LATE: Final = _count(
    "units_late",
    "Units answered more than 1 s after their last sample came: the next second was whole by then.",
    mode=_DUPLEX,
)
UNIT_ANSWER_SECONDS: Final = _spread(
    "unit_answer_seconds",
    "From a unit's last sample to its answer, as the session saw both.",
    UNIT_BUCKETS_S,
    mode=_DUPLEX,
)
UNIT_WAIT_SECONDS: Final = _spread(
    "unit_wait_seconds",
    "From a unit's last sample to its start: for the barrier, for pictures, through a pause.",
    WAIT_BUCKETS_S,
    mode=_DUPLEX,
)
UNIT_BARRIER_SECONDS: Final = _spread(
    "unit_barrier_seconds",
    "How long a whole unit waited for the finalize, or the undoing, of the one before it (B1).",
    WAIT_BUCKETS_S,
    mode=_DUPLEX,
)
UNIT_SECONDS: Final = _spread(
    "unit_seconds", "From a unit's start to its result, by the wall.", UNIT_BUCKETS_S, mode=_DUPLEX
)
UNIT_STAGE_SECONDS: Final = _spread(
    "unit_stage_seconds",
    "A unit's time in each stage, as the model measured it. prefill and generate follow one "
    "another; llm, tts and token2wav are parts of generate; finalize comes after the answer.",
    STAGE_BUCKETS_S,
    stage=("prefill", "generate", "llm", "tts", "token2wav", "finalize"),
)
INTERRUPTS: Final = _count("interrupts", "Units cut because the client asked for it.", mode=_DUPLEX)
OVERLAP_SECONDS: Final = _spread(
    "overlap_seconds",
    "Speech of users that began while the model spoke, with the silence that ended it: short ones "
    "are noise.",
    OVERLAP_BUCKETS_S,
    mode=_DUPLEX,
)
ROLLBACKS: Final = _count(
    "rollbacks",
    "Failed units undone (done), or not (failed: the session ends).",
    outcome=("done", "failed"),
)
FINALIZES_FAILED: Final = _count("finalizes_failed", "Failed finalizes, which end their session.")
SPEECH_SECONDS: Final = _count("speech_seconds", "Speech that the model made.", mode=MODES)
TOKENS: Final = _count(
    "tokens",
    "Tokens: text and speech made, picture and prompt taken in.",
    kind=("text", "speech", "picture", "prompt"),
)
SESSION_KV_TOKENS: Final = _spread(
    "session_kv_tokens", "Maximum tokens of a session in the KV cache.", TOKEN_BUCKETS, mode=MODES
)

# -- conversations, at their ends -----------------------------------------------------------------


def _talk(name: str, meaning: str, buckets: tuple[float, ...]) -> Metric:
    return _spread(f"conversation_{name}", meaning, buckets, mode=_DUPLEX)


def _times(name: str, meaning: str) -> Metric:
    return _count(f"conversation_{name}", meaning, mode=_DUPLEX)


CONVERSATION: Final[Mapping[str, Metric]] = {
    "response_delay": _talk(
        "response_delay_seconds",
        "From the end of a user's turn to the first sample of the answer, as played.",
        DELAY_BUCKETS_S,
    ),
    "time_to_first_audio": _talk(
        "time_to_first_audio_seconds",
        "The response delay of a session's first answer.",
        DELAY_BUCKETS_S,
    ),
    "take_over_rate": _talk(
        "take_over_ratio", "Share of a session's turns that the model answered.", SHARE_BUCKETS
    ),
    "unanswered": _times("unanswered", "Turns that the model did not answer for 4 s."),
    "pause_take_over_rate": _talk(
        "pause_take_over_ratio",
        "Share of a session's pauses that the model took for the end of a turn.",
        SHARE_BUCKETS,
    ),
    "false_starts": _times(
        "false_starts", "Short starts of the model that ended as the user spoke."
    ),
    "early_starts": _times("early_starts", "Starts of the model while the user spoke."),
    "overlap": _talk(
        "overlap_seconds", "Time of a session in which both voices are heard.", AMOUNT_BUCKETS_S
    ),
    "talk_over": _talk(
        "talk_over_ratio",
        "Share of a session in which early starts of the model are heard over the user.",
        SHARE_BUCKETS,
    ),
    "barge_ins": _times("barge_ins", "Times that the user began to speak over the model."),
    "barge_in_yield_rate": _talk(
        "barge_in_yield_ratio",
        "Share of a session's barge-ins to which the model yielded.",
        SHARE_BUCKETS,
    ),
    "barge_in_stop_latency": _talk(
        "barge_in_stop_seconds",
        "From the begin of a barge-in to the last sample of the model that yielded to it.",
        DELAY_BUCKETS_S,
    ),
    "forced_stop_latency": _talk(
        "forced_stop_seconds",
        "From a client's `force_listen` to the last sample that the model is heard.",
        DELAY_BUCKETS_S,
    ),
    "user_backchannels": _times("user_backchannels", "Backchannels of the user."),
    "model_backchannels": _times("model_backchannels", "Backchannels of the model."),
    "self_talk": _talk(
        "self_talk_seconds",
        "Sound of the model in a session that answers no speech.",
        AMOUNT_BUCKETS_S,
    ),
    "tool_calls": _times("tool_calls", "Calls of tools in duplex sessions."),
    "tool_calls_unanswered": _times(
        "tool_calls_unanswered", "Of these, calls without a result of the client."
    ),
    "tool_call_delay": _talk(
        "tool_call_delay_seconds",
        "From the end of the user's last speech before a call of a tool to the call.",
        DELAY_BUCKETS_S,
    ),
    "tool_result_delay": _talk(
        "tool_result_delay_seconds",
        "From a call of a tool to the second that gives its result to the model.",
        DELAY_BUCKETS_S,
    ),
    "tool_speech_delay": _talk(
        "tool_speech_delay_seconds",
        "From that second to the next one in which the model speaks.",
        DELAY_BUCKETS_S,
    ),
}
"""By the measure of `antiphon eval` that each holds: of rates and amounts, that of a session."""

# -- turns of chat --------------------------------------------------------------------------------

TURNS: Final = _count(
    "turns",
    "Turns of chat begun on the model, by their end: turn_end, tool_calls (it calls tools), "
    "length, interrupted, failed, ended (the session was over first).",
    outcome=("turn_end", "tool_calls", "length", "interrupted", "failed", "ended"),
)
TURN_STAGE_SECONDS: Final = _spread(
    "turn_stage_seconds",
    "From a turn's start on its slot to its prefill, to the first piece of its answer, to its end.",
    TURN_BUCKETS_S,
    stage=("prefill", "first", "end"),
)

# -- transcriptions -------------------------------------------------------------------------------

UTTERANCES: Final = _count("utterances", "Utterances that the model began to hear.")
CHUNKS: Final = _count(
    "chunks",
    "Seconds of sound given to the model to be transcribed: heard, failed (sent as "
    "inference_error), context_full, ended (the session was over first).",
    outcome=("heard", "failed", "context_full", "ended"),
)
CHUNK_SECONDS: Final = _spread(
    "chunk_seconds", "From handing a second to the model to its text.", UNIT_BUCKETS_S
)

ALL: Final[tuple[Metric, ...]] = (
    *(value for value in list(globals().values()) if isinstance(value, Metric)),
    *CONVERSATION.values(),
)
"""In the order of this file, conversations last."""
