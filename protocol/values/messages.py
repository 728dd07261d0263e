"""Canonical messages: what the server says, the same in every dialect.

A dialect (`protocol.wire.dialects`) converts wire frames to these and back. They are values without
behaviour. The client's messages are in `requests`.

Audio is float32 LE, 24 kHz mono: `pcm` as bytes, `samples` the same as an array.
"""

from __future__ import annotations

from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import ErrorCode
from .model import OUTPUT_RATE_HZ, Coding, StopReason, ToolCall
from .omni import OmniAnswer, OmniSession
from .openai import (
    LiveSession,
    Muted,
    Notice,
    OpenAIAnswer,
    OpenAISession,
    Unmuted,
    Updated,
    Usage,
    UserWords,
)

RecordingState = Literal["on", "off", "failed"]
ToolsState = Literal["", "called", "not_called"]
"""Whether the model calls the tools of a duplex session."""


def _samples(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<f4").astype(np.float32, copy=False)


@attrs.frozen(kw_only=True)
class QueuePlace:
    """Where a session stands in the queue.

    Attributes:
        position: 1 is next.
        estimated_wait_s: whole seconds.
        ticket_id: the place's name, `ticket_` and 12 hex digits.
        queue_length: sessions that wait, this one included.
    """

    position: int
    estimated_wait_s: int
    ticket_id: str
    queue_length: int


@attrs.frozen(kw_only=True)
class Queued:
    """The session must wait for a slot.

    Attributes:
        is_for_openai: the dialect `openai` sends it too.
    """

    place: QueuePlace
    is_for_openai: bool = attrs.field(default=False, eq=False)


@attrs.frozen(kw_only=True)
class QueueUpdate:
    """Its place has changed.

    Attributes:
        is_for_openai: the dialect `openai` sends it too.
    """

    place: QueuePlace
    is_for_openai: bool = attrs.field(default=False, eq=False)


@attrs.frozen(kw_only=True)
class QueueDone:
    """A slot is assigned; the client may send its init."""


@attrs.frozen(kw_only=True)
class Created:
    """The session is configured; the client may stream.

    Attributes:
        session_id: opaque to clients; `rt_{timestamp_ms}` in `duplex-v1`.
        prompt_length: tokens in the KV cache after the prompt.
        recording: whether the session is being recorded.
        recording_id: the recording's name; empty without a recording.
        recording_notice: the operator's words about the recording; may be empty.
        is_chat: a chat, by turns; else sound flows in (001, `turn_based`).
        created_s: when the session began, Unix time in whole seconds (003, `created`).
        live: the session as it is in force.
        client_event_id: the client's name for its message; only in `live`, and may be empty.
        tools: what becomes of the client's tools; empty if it has none.
        openai: the session as it is in force.
        omni: the session as it is in force.
    """

    session_id: str
    prompt_length: int
    recording: RecordingState
    recording_id: str = ""
    recording_notice: str = ""
    is_chat: bool = False
    created_s: int = 0
    live: LiveSession = LiveSession()
    client_event_id: str = ""
    tools: ToolsState = ""
    openai: OpenAISession = OpenAISession()
    omni: OmniSession = OmniSession()


@attrs.frozen(kw_only=True)
class Metrics:
    """The costs of one unit and the state of its session; milliseconds are rounded to 1 µs.

    Attributes:
        kv_cache_length: tokens in the KV cache.
        prefill_ms: time to feed the sound and pictures.
        generate_ms: time to decide and speak.
        wall_clock_ms: time from the start of the unit to its result.
        cost_llm_ms: time in the language model.
        cost_tts_ms: time in the model that makes speech codes.
        cost_token2wav_ms: time in the vocoder, which turns the codes into sound.
        n_tokens: tokens that were decided.
        n_tts_tokens: speech codes that were generated.
        vision_slices: slices of pictures that were fed.
        vision_tokens: embeddings of pictures that were fed.
        dropped_units: units of the session that were dropped so far, because too many waited.
        recording: whether the session is being recorded.
        session_ms: time of the message, since the connection was opened.
        wall_ms: time of the message, Unix time.
    """

    kv_cache_length: int
    prefill_ms: float = 0.0
    generate_ms: float = 0.0
    wall_clock_ms: float = 0.0
    cost_llm_ms: float = 0.0
    cost_tts_ms: float = 0.0
    cost_token2wav_ms: float = 0.0
    n_tokens: int = 0
    n_tts_tokens: int = 0
    vision_slices: int = 0
    vision_tokens: int = 0
    dropped_units: int = 0
    recording: RecordingState = "on"
    session_ms: float = 0.0
    wall_ms: float = 0.0


@attrs.frozen(kw_only=True)
class Listen:
    """The unit's outcome: the model listens; the client stops its playback.

    Attributes:
        session_id: the session.
        input_id: the append that completed the unit.
        metrics: of this unit.
        response_id: the speaking turn that it ends, else the one that it precedes; may be empty.
        silence_samples: the silence that stands for it; only in `live`.
        coding: of that silence.
        epoch: how often the client has interrupted; only in `vllm-omni`.
    """

    session_id: str
    input_id: str
    metrics: Metrics
    response_id: str = ""
    silence_samples: int = OUTPUT_RATE_HZ
    coding: Coding = "audio/pcm"
    epoch: int = 0


@attrs.frozen(kw_only=True)
class Speech:
    """The unit's outcome: the model speaks.

    Attributes:
        session_id: the session.
        response_id: one for each speaking turn.
        input_id: the append that completed the unit.
        text: may be empty; it runs ahead of the audio.
        pcm: float32 LE, 24 kHz (in OpenAI's dialects the session's rate) mono; may be empty.
        end_of_turn: the turn ends here.
        metrics: of this unit.
        start_ms: where it begins in the session's sound, in milliseconds; only in `live`. In
            `vllm-omni` it is in the response's.
        coding: how the sound is written; only in OpenAI's dialects.
        epoch: how often the client has interrupted; only in `vllm-omni`.
    """

    session_id: str
    response_id: str
    input_id: str
    text: str
    pcm: bytes
    end_of_turn: bool
    metrics: Metrics
    start_ms: int = 0
    coding: Coding = "audio/pcm"
    epoch: int = 0

    @property
    def samples(self) -> NDArray[np.float32]:
        """The sound: float32, shape (samples,), 24 kHz mono, in [-1, 1]; not to be written to."""
        return _samples(self.pcm)


@attrs.frozen(kw_only=True)
class ToolCalled:
    """The model calls a tool of a duplex session; the conversation goes on meanwhile.

    Attributes:
        session_id: the session.
        call: the call; the client sends its result by its id.
        unit: the index of the unit in which it was made.
    """

    session_id: str
    call: ToolCall
    unit: int


@attrs.frozen(kw_only=True)
class Pending:
    """A chunk completed no unit: its sound waits for more (002).

    Attributes:
        is_speaking: the model speaks, and goes on with its turn.
        metrics: without costs.
    """

    is_speaking: bool
    metrics: Metrics


@attrs.frozen(kw_only=True)
class Paused:
    """The session is paused (002).

    Attributes:
        timeout_s: seconds after which it ends unless it is resumed.
    """

    timeout_s: float


@attrs.frozen(kw_only=True)
class Resumed:
    """The session goes on (002)."""


@attrs.frozen(kw_only=True)
class Interrupted:
    """The model stops speaking (002)."""


@attrs.frozen(kw_only=True)
class GoingAway:
    """The server will shut down; until then the session goes on, and the client need not react.

    Attributes:
        seconds_left: seconds after which the session ends, unless it ends earlier.
    """

    seconds_left: int


@attrs.frozen(kw_only=True)
class Prefilled:
    """The conversation is in the model; its answer begins (004, prefill_done).

    Attributes:
        input_tokens: tokens prefilled.
    """

    input_tokens: int


@attrs.frozen(kw_only=True)
class Delta:
    """A piece of a turn's answer.

    Attributes:
        session_id: the session.
        response_id: the turn.
        input_id: the request that it answers.
        text: may be empty.
        pcm: float32 LE, 24 kHz mono; may be empty.
    """

    session_id: str
    response_id: str
    input_id: str
    text: str = ""
    pcm: bytes = b""

    @property
    def samples(self) -> NDArray[np.float32]:
        """The sound: float32, shape (samples,), 24 kHz mono, in [-1, 1]; not to be written to."""
        return _samples(self.pcm)


@attrs.frozen(kw_only=True)
class Response:
    """A turn is over (001, response.done; 004, done).

    Attributes:
        session_id: the session.
        response_id: the turn.
        input_id: the request that it answers.
        text: the whole answer.
        pcm: its speech, float32 LE, 24 kHz mono; if streamed, only what is in no delta.
        reason: why it ended.
        streaming: as requested; None if read from a frame, which does not show it.
        input_tokens: tokens prefilled.
        generated_tokens: tokens generated.
        recording_id: the recording's name; empty without a recording.
        metrics: of the turn.
        tool_calls: tools that the client is asked to call; it asks again with their results.
    """

    session_id: str
    response_id: str
    input_id: str
    text: str
    pcm: bytes
    reason: StopReason
    streaming: bool | None
    input_tokens: int
    generated_tokens: int
    recording_id: str
    metrics: Metrics
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def samples(self) -> NDArray[np.float32]:
        """The sound: float32, shape (samples,), 24 kHz mono, in [-1, 1]; not to be written to."""
        return _samples(self.pcm)


@attrs.frozen(kw_only=True)
class ErrorReport:
    """Something went wrong; the code says whether the connection stays (`protocol.values.errors`).

    Attributes:
        code: the error, for programs; it also shows whose mistake it is.
        message: the error, for people; it names path, kind of value and limit.
        session_id: as in the server's log and its recordings; empty without a session.
        client_event_id: the client's name for the message that it answers; may be empty.
    """

    code: ErrorCode
    message: str
    session_id: str = ""
    client_event_id: str = ""


EndReason = Literal[
    "client",
    "answered",
    "rejected",
    "timeout",
    "pause_timeout",
    "context_full",
    "backend_error",
    "server_shutdown",
    "cancelled",
    "invalid_frame",
    "flooded",
    "idle",
    "refused",
    "peer_gone",
]
"""Why a session ended. Each dialect has its own words for them.

`answered` and `rejected` end a single request (004): its answer, and the client's mistake.
`flooded`: the client sends more than can be recorded; `idle`: a transcription's client is silent.
These two are never sent, except to a chat that is refused while it runs.
"""


@attrs.frozen(kw_only=True)
class Closed:
    """The session's last event.

    Attributes:
        session_id: the session.
        reason: why it ended.
        client_reason: the client's own words, if it ended the session with any.
        error_text: sent in place of the reason's own text; only in a transcription.
        named: the session's id, for an end that is sent as an error (see `ErrorReport`).
        live: the session as it was in force; only in `live`.
        seconds: whole seconds of sound that the model heard; only in `live`.
    """

    session_id: str
    reason: EndReason
    client_reason: str | None = None
    error_text: str | None = None
    named: str = ""
    live: LiveSession = LiveSession()
    seconds: int = 0


@attrs.frozen(kw_only=True)
class TranscriptDelta:
    """Text of an utterance since the last delta; it is never taken back (003).

    Attributes:
        text: the words, or a part of one; never empty.
    """

    text: str


@attrs.frozen(kw_only=True)
class TranscriptDone:
    """An utterance is transcribed, as far as possible (003).

    Attributes:
        text: text of the whole utterance: its deltas, joined.
        prompt_tokens: tokens and embeddings that the model was fed.
        completion_tokens: tokens that the model generated.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int


ServerMessage = (
    Queued
    | QueueUpdate
    | QueueDone
    | Created
    | Listen
    | Speech
    | ToolCalled
    | Pending
    | Paused
    | Resumed
    | Interrupted
    | GoingAway
    | Prefilled
    | Delta
    | Response
    | TranscriptDelta
    | TranscriptDone
    | Muted
    | UserWords
    | Unmuted
    | Updated
    | Usage
    | Notice
    | OpenAIAnswer
    | OmniAnswer
    | ErrorReport
    | Closed
)


# -- Resuming: messages of no dialect, by which a client returns to its session -------------------


@attrs.frozen(kw_only=True)
class ResumeRequest:
    """Go on with a session on a new connection; its first message.

    Attributes:
        token: the last one that the session gave.
        last_seq: the number of the last frame that the client has; -1 for none.
    """

    token: str
    last_seq: int = -1


@attrs.frozen(kw_only=True)
class Resumable:
    """Where the session stands, and how its client comes back; the first frame of a connection.

    Attributes:
        recording_id: names the session in the address of a connection that comes back to it.
        token: the right to come back, once; empty: the session cannot be resumed any more.
        grace_s: seconds without a connection for which the slot is kept.
        expires_in_s: seconds without a connection after which the session ends.
        next_seq: the number of the frame that follows.
        ack: messages of the client that the session has.
    """

    recording_id: str
    token: str
    grace_s: int = 0
    expires_in_s: int = 0
    next_seq: int = 0
    ack: int = 0


@attrs.frozen(kw_only=True)
class ConnectionReplaced:
    """The client came back on another connection; this one is closed."""
