"""The machine's inputs: facts, in the past tense.

Everything that a session does not decide itself reaches it as an event: frames, the clock, ids,
seeds, the model's output, queue moves, faults. Its actions are effects (`effects`). All are logged,
so `events -> effects` can be run again at any time.

`at_ns` is the session's clock: monotonic nanoseconds since its `ConnectionOpened`, which is at 0.
Timers, leases, backend sessions and units have a generation or an index; a stale one is ignored.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

from . import model
from .errors import ErrorCode
from .frames import Frame, Shortened
from .limits import IDLE_S, PAUSE_S, SOUND_BYTES_MAX, UNITS_PENDING_MAX, Mode
from .messages import QueuePlace

Endpoint = Literal["realtime", "duplex", "chat", "live", "openai", "omni"]
"""The client's address: `/v1/realtime`, `/ws/duplex/{label}` (002), `/ws/chat` (004),
`/v1/live/sessions`, `/v1/realtime?model=` or `/v1/realtime?duplex=1`."""

PIECES: Final[tuple[Endpoint, ...]] = ("live", "openai")
"""Addresses whose sound is 16-bit and comes in pieces of any size."""
EVENT_IDS: Final[tuple[Endpoint, ...]] = (*PIECES, "omni")
"""Addresses whose events have ids, and whose sound is 16-bit."""

TimerName = Literal[
    "session",
    "init",
    "cleanup",
    "idle",
    "pause",
    "watchdog",
    "rebuild",
    "detach",
    "resume",
    "silence",
    "quiet",
    "calls",
]


@attrs.frozen(kw_only=True)
class ConnectionOpened:
    """A client's WebSocket is open; always the first event.

    Attributes:
        recording_id: names the session on this server; derived ids are made from it.
        created_ms: wall clock, Unix milliseconds, unique on this server (`rt_` ids use it).
        seed: keys every random choice of the session.
        label: the client's own name for the session, 64 characters at most; it may repeat (002). In
            `openai` the name of the model.
        behaviour: the server's behaviour number (`behaviour`).
        quiet: no queue messages if a slot is free (002, the worker's own address).
        must_record: a client that asks not to be recorded is refused.
        recording_notice: the operator's words for a client that is recorded.
        resume_hash: SHA-256 of the token with which the client may come back, in hex; empty: it did
            not ask for a session that can be resumed.
    """

    at_ns: int = 0
    recording_id: str
    created_ms: int
    mode: Mode
    seed: int
    limits: SessionLimits
    recording: Literal["on", "off"]
    endpoint: Endpoint = "realtime"
    label: str = ""
    behaviour: int = 0
    quiet: bool = False
    must_record: bool = False
    recording_notice: str = ""
    resume_hash: str = ""


@attrs.frozen(kw_only=True)
class FrameReceived:
    """A WebSocket message.

    Attributes:
        frame: verbatim; None if it was longer than the connection allows.
        has_room: there is memory to keep it, if it comes early.
        shortened: the original, if `frame` is only an outline or None: it is refused.
    """

    at_ns: int
    frame: Frame
    has_room: bool = True
    shortened: Shortened | None = None


@attrs.frozen(kw_only=True)
class Flooded:
    """The client sent a large message on top of more than its log may hold back.

    Neither that message nor any later one is read.
    """

    at_ns: int


@attrs.frozen(kw_only=True)
class PeerGone:
    """The connection is over: the peer closed or lost it.

    `code` as in RFC 6455, 7.4; 0 if unknown.
    """

    at_ns: int
    code: int = 0


@attrs.frozen(kw_only=True)
class PeerAttached:
    """The client came back, with the right token, on a new connection.

    Attributes:
        after: the number of the last frame that it has; -1 for none.
        resume_hash: SHA-256 of the token with which it may come back again, in hex.
    """

    at_ns: int
    after: int
    resume_hash: str


@attrs.frozen(kw_only=True)
class SendFailed:
    """A frame could not be sent: the peer reads too slowly, or is gone. The socket is aborted."""

    at_ns: int


@attrs.frozen(kw_only=True)
class TicketMoved:
    """The session waits at this place in the queue."""

    at_ns: int
    place: QueuePlace


@attrs.frozen(kw_only=True)
class TicketLeft:
    """The session left the queue by its own wish (`LeaveQueue`), and no slot will come."""

    at_ns: int


@attrs.frozen(kw_only=True)
class TicketCancelled:
    """An operator deleted the ticket."""

    at_ns: int


@attrs.frozen(kw_only=True)
class AnswerCancelled:
    """The client's page asked over HTTP for the end of the answer (`/api/streaming/stop`)."""

    at_ns: int


@attrs.frozen(kw_only=True)
class AdmissionRefused:
    """There is no slot and no place in the queue."""

    at_ns: int
    code: ErrorCode


@attrs.frozen(kw_only=True)
class Admitted:
    """There is room for another connection that holds no slot between its turns (chat)."""

    at_ns: int


@attrs.frozen(kw_only=True)
class BackendOpened:
    """The model holds the session and its prompt."""

    at_ns: int
    lease: int
    opened: model.Opened


@attrs.frozen(kw_only=True)
class BackendOpenFailed:
    """The model could not open the session.

    `context_full`: its prompt does not fit. `is_lost`: the worker is gone. `refused`: why it never
    opens so, for the client.
    """

    at_ns: int
    lease: int
    context_full: bool = False
    is_lost: bool = False
    refused: str = ""


@attrs.frozen(kw_only=True)
class MediaDecoded:
    """Media was decoded by a worker.

    Attributes:
        pcm: float32 LE 16 kHz mono; empty without sound.
        pictures: JPEG files: an image by itself, a video's first of each second. Empty for a JPEG
            that was only to be proven.
        stacked: JPEG files: the other pictures of each second of a video, side by side.
    """

    at_ns: int
    media: int
    pcm: bytes = b""
    pictures: tuple[bytes, ...] = ()
    stacked: tuple[bytes, ...] = ()


@attrs.frozen(kw_only=True)
class MediaRejected:
    """Media is damaged, or of another kind than declared."""

    at_ns: int
    media: int
    reason: str


@attrs.frozen(kw_only=True)
class SpeechStarted:
    """The client began to speak, `at_ms` milliseconds into its sound."""

    at_ns: int
    at_ms: int


@attrs.frozen(kw_only=True)
class SpeechStopped:
    """The client stopped speaking, `at_ms` milliseconds into its sound: the silence is over."""

    at_ns: int
    at_ms: int


@attrs.frozen(kw_only=True)
class UserTranscribed:
    """What the user said, transcribed by another model than the session's.

    Attributes:
        text: words since the last event, or a part of one; may be empty.
        start_ms, end_ms: where they were said in the client's sound, in milliseconds.
        is_last: the user has finished, for now.
    """

    at_ns: int
    text: str
    start_ms: int
    end_ms: int
    is_last: bool = False


@attrs.frozen(kw_only=True)
class UnitDone:
    """The model has finished a unit."""

    at_ns: int
    result: model.UnitResult


@attrs.frozen(kw_only=True)
class UnitFailed:
    """Prefill or generate failed; `context_full`: refused before anything was fed (B10)."""

    at_ns: int
    index: int
    context_full: bool = False


@attrs.frozen(kw_only=True)
class FinalizeDone:
    """The unit is finalized: the barrier opens (B1)."""

    at_ns: int
    finalized: model.Finalized


@attrs.frozen(kw_only=True)
class FinalizeFailed:
    """Finalizing failed: the session's state on the model is unknown."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class RollbackDone:
    """The state from before unit `index` is restored."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class RollbackFailed:
    """Undoing a unit failed: the session's state on the model is unknown."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class TimerFired:
    """The time of a `SetTimer` has come."""

    at_ns: int
    name: TimerName
    generation: int


@attrs.frozen(kw_only=True)
class RecordingFailed:
    """The session's log failed; it is never retried."""

    at_ns: int


@attrs.frozen(kw_only=True)
class DrainBegan:
    """The server will shut down in `wait_s` s: work in progress may end, nothing new begins."""

    at_ns: int
    wait_s: int


@attrs.frozen(kw_only=True)
class Draining:
    """The server shuts down: every session ends now."""

    at_ns: int


# -- The limits of a session ----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SessionLimits:
    """The settings that bound one session, as resolved at its start.

    Attributes:
        session_s: total time, queueing and idling included.
        init_wait_s: time for the init once a slot is assigned.
        cleanup_wait_s: time for the calls in flight after the session's end.
        context_tokens: the backend's context limit.
        sliding_windows: the window policies that the backend supports.
        can_rollback: the backend can undo a failed unit.
        close_on_recording_failure: end the session when its log fails; else go on and report it.
        idle_s: time between two turns of chat, or of a transcription's silence.
        pause_s: longest pause.
        call_wait_s: longest time of a model call without a sign of life; 0 waits for ever.
        models: the names by which a transcription's model may be chosen.
        sound_bytes: PCM16 of a transcription that may wait for the model.
        rebuild_wait_s: wait for another slot after the loss of the worker; 0: the session ends.
        rebuild_units: units that may wait while the model is brought back, and until they are run.
        can_speak: the model can be made to speak.
        can_see: the model sees the pictures of items.
        transcriber: the model that transcribes what the user says; empty without one.
        barge_in: the user's speech stops the model's.
        backchannel_ms: shorter speech of the user does not; in milliseconds.
        can_repeat: the model gives an interrupted turn's answer again, piece by piece.
        detach_s: time without a connection for which a session that can be resumed keeps its slot.
        resume_s: time without a connection after which it ends.
        duplex_tools: the model calls tools in a duplex session.
    """

    session_s: int
    init_wait_s: int
    cleanup_wait_s: int
    context_tokens: int
    sliding_windows: tuple[model.SlidingWindow, ...] = ("off",)
    can_rollback: bool = True
    close_on_recording_failure: bool = False
    idle_s: int = IDLE_S
    pause_s: int = PAUSE_S
    call_wait_s: int = 0
    models: tuple[str, ...] = ()
    sound_bytes: int = SOUND_BYTES_MAX
    rebuild_wait_s: int = 0
    rebuild_units: int = UNITS_PENDING_MAX
    can_repeat: bool = False
    can_speak: bool = False
    can_see: bool = False
    transcriber: str = ""
    barge_in: bool = False
    detach_s: int = 0
    resume_s: int = 0
    backchannel_ms: int = 0
    duplex_tools: bool = False


# -- The session's slot ---------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SlotLeased:
    """A slot is the session's until it is released; `lease` is the lease's generation."""

    at_ns: int
    lease: int
    slot: int


@attrs.frozen(kw_only=True)
class BackendLost:
    """The backend or its worker is gone."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class LeaseRevoked:
    """The slot's worker is drained, or lost: the session moves between two model calls."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class Rebuilt:
    """The model on a new slot has the session's past.

    Attributes:
        steps: the units, or the chunks of an utterance, that it was fed.
        batches: of a rebuild in long prefills, the units of each; empty if each unit was fed as
            recorded, so that the model's state is the same byte for byte.
        cost_us: the time it took.
    """

    at_ns: int
    lease: int
    steps: int
    batches: tuple[int, ...] = ()
    cost_us: int = 0


@attrs.frozen(kw_only=True)
class RebuildFailed:
    """The session's past cannot be brought to the model on the new slot."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class BackendReleased:
    """The slot's cleanup is done and the slot is back in its pool (B5)."""

    at_ns: int
    lease: int


# -- Turns of chat, and chunks of a transcription -------------------------------------------------


@attrs.frozen(kw_only=True)
class TurnPrefilled:
    """The model holds a turn's conversation, and goes on to answer it."""

    at_ns: int
    prefill: model.Prefill


@attrs.frozen(kw_only=True)
class TurnProgress:
    """The model has made a piece of its answer."""

    at_ns: int
    chunk: model.TurnChunk


@attrs.frozen(kw_only=True)
class TurnDone:
    """The answer is over."""

    at_ns: int
    result: model.TurnResult


@attrs.frozen(kw_only=True)
class TurnFailed:
    """The turn's answer failed, or its rest.

    Attributes:
        context_full: the turn does not fit the context.
        refused: the reason for the client, if the model cannot do what the turn asks for; empty: it
            failed.
    """

    at_ns: int
    index: int
    context_full: bool = False
    refused: str = ""


@attrs.frozen(kw_only=True)
class ChunkDone:
    """The model has written the text of a chunk."""

    at_ns: int
    result: model.ChunkResult


@attrs.frozen(kw_only=True)
class ChunkFailed:
    """A chunk and so its utterance failed; `context_full`: nothing of the chunk was fed (B10)."""

    at_ns: int
    utterance: int
    index: int
    context_full: bool = False


# -- Forks ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Forked:
    """From here on the session is a new one; all before it was copied from another's recording.

    It has another client, no slot yet, and these values in place of those of its first event.

    Attributes:
        limits: of its own server.
        resume_hash, recording_notice: as in `ConnectionOpened`.
    """

    at_ns: int
    limits: SessionLimits
    resume_hash: str = ""
    recording_notice: str = ""


Event = (
    ConnectionOpened
    | Forked
    | FrameReceived
    | PeerGone
    | PeerAttached
    | SendFailed
    | TicketMoved
    | TicketLeft
    | TicketCancelled
    | AnswerCancelled
    | AdmissionRefused
    | Admitted
    | SlotLeased
    | BackendOpened
    | BackendOpenFailed
    | MediaDecoded
    | MediaRejected
    | SpeechStarted
    | SpeechStopped
    | UserTranscribed
    | UnitDone
    | UnitFailed
    | FinalizeDone
    | FinalizeFailed
    | RollbackDone
    | RollbackFailed
    | TurnPrefilled
    | TurnProgress
    | TurnDone
    | TurnFailed
    | ChunkDone
    | ChunkFailed
    | BackendLost
    | LeaseRevoked
    | Rebuilt
    | RebuildFailed
    | BackendReleased
    | TimerFired
    | RecordingFailed
    | Flooded
    | DrainBegan
    | Draining
)
