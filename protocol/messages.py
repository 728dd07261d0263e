"""Canonical messages: what client and server say to each other, the same in every dialect.

A dialect (`protocol.dialects`) turns wire frames into these and back. They are values without
behaviour; their fields are already checked where they come from a client.

Audio is float32 LE, mono: 16 kHz from the client, 24 kHz from the server.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import attrs

from .errors import ErrorCode
from .model import DuplexConfig

Mode = Literal["video", "audio"]
"""What a session carries; `chat` and `transcription` are not served yet."""

RecordingState = Literal["on", "off", "failed"]


class Request(StrEnum):
    """The kinds of message a client can send: what the reception table is keyed by."""

    INIT = "init"
    APPEND = "append"
    CLOSE = "close"
    MISPLACED = "misplaced"
    """An event that some dialect knows, in a session where it has no place."""
    UNKNOWN = "unknown"
    """No event of ours; parsing it says what is wrong with it."""


# -- from the client ----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ReferenceAudio:
    """Reference audio as it came: a WAV file, to be decoded, or float32 LE 16 kHz mono."""

    data: bytes
    is_wav: bool


@attrs.frozen(kw_only=True)
class Init:
    """Sets up the session: prompt, voices, settings.

    Attributes:
        instructions: the system prompt.
        ref_audio: the voice the model hears in its prompt.
        tts_ref_audio: the voice it speaks with; `ref_audio` where it is None (000).
        max_slice_nums: slices a frame, 1-9, for appends that do not say.
        config: inference settings.
        ignored: paths of fields that the dialect does not know, for counting.
    """

    instructions: str
    ref_audio: ReferenceAudio | None = None
    tts_ref_audio: ReferenceAudio | None = None
    max_slice_nums: int = 1
    config: DuplexConfig = DuplexConfig()
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Append:
    """Audio, and what was seen with it.

    Attributes:
        pcm: float32 LE, 16 kHz mono, finite; 4000 samples to 10 s.
        frames: JPEG files whose headers have been checked.
        force_listen: stop speaking, at once (B6).
        max_slice_nums: for these frames, 1-9; None takes the session's.
        input_id: the client's name for this append, if it gave one.
        ignored: paths of fields that were ignored, for counting.
    """

    pcm: bytes
    frames: tuple[bytes, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None
    input_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CloseRequest:
    """The client ends the session; `reason` is its own, 64 characters at most."""

    reason: str | None = None


ClientMessage = Init | Append | CloseRequest


# -- from the server ----------------------------------------------------------------------------


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
    """The session must wait for a slot."""

    place: QueuePlace


@attrs.frozen(kw_only=True)
class QueueUpdate:
    """Its place has changed."""

    place: QueuePlace


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
    """

    session_id: str
    prompt_length: int
    recording: RecordingState


@attrs.frozen(kw_only=True)
class Metrics:
    """What one unit took and where the session stands; milliseconds are rounded to 1 µs."""

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


@attrs.frozen(kw_only=True)
class Listen:
    """The unit's outcome: the model listens; the client stops what it still plays."""

    session_id: str
    input_id: str
    metrics: Metrics


@attrs.frozen(kw_only=True)
class Speech:
    """The unit's outcome: the model speaks.

    Attributes:
        session_id: the session.
        response_id: one for each speaking turn.
        input_id: the append that completed the unit.
        text: may be empty; it runs ahead of the audio.
        pcm: float32 LE, 24 kHz mono; may be empty.
        end_of_turn: the turn ends here.
        metrics: of this unit.
    """

    session_id: str
    response_id: str
    input_id: str
    text: str
    pcm: bytes
    end_of_turn: bool
    metrics: Metrics


@attrs.frozen(kw_only=True)
class ErrorReport:
    """Something went wrong; whether the connection stays is the code's (`protocol.errors`)."""

    code: ErrorCode
    message: str


EndReason = Literal[
    "client",
    "timeout",
    "context_full",
    "backend_error",
    "server_shutdown",
    "cancelled",
    "invalid_frame",
    "refused",
    "peer_gone",
]
"""Why a session ended. Each dialect has its own words for them; the last two are never said."""


@attrs.frozen(kw_only=True)
class Closed:
    """The session's last event.

    Attributes:
        session_id: the session.
        reason: why.
        client_reason: the client's own words, where it ended the session and gave any.
    """

    session_id: str
    reason: EndReason
    client_reason: str | None = None


ServerMessage = Queued | QueueUpdate | QueueDone | Created | Listen | Speech | ErrorReport | Closed
