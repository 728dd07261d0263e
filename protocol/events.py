"""The machine's inputs: facts, in the past tense.

Everything that a session did not decide itself reaches it as an event: frames, the clock, ids,
seeds, the model's output, queue moves, faults. Everything it wants done leaves it as an effect
(`effects`). All of both are logged, so `events -> effects` can be run again at any time.

`at_ns` is the session's clock: monotonic nanoseconds since its `ConnectionOpened`, which is at 0.
Timers, leases, backend sessions and units carry a generation or an index; a stale one is ignored.
"""

from __future__ import annotations

from typing import Literal

import attrs

from .digest import added
from .errors import ErrorCode
from .limits import IDLE_S, PAUSE_S, SOUND_BYTES_MAX
from .messages import Mode, QueuePlace
from .model import Finalized, Opened, SlidingWindow, UnitResult
from .transcript import ChunkResult
from .turn import Prefill, TurnChunk, TurnResult
from .utf8 import Frame

Endpoint = Literal["realtime", "duplex", "chat"]
"""Where a client connected: `/v1/realtime`, `/ws/duplex/{label}` (002) or `/ws/chat` (004)."""

TimerName = Literal["session", "init", "cleanup", "idle", "pause", "call"]


@attrs.frozen(kw_only=True)
class SessionLimits:
    """The settings that bound one session, as resolved at its start.

    Attributes:
        session_s: total time, queueing and idling included.
        init_wait_s: time for the init once a slot is assigned.
        cleanup_wait_s: time for the calls in flight once the session ended.
        context_tokens: the backend's context limit.
        sliding_windows: the window policies that the backend honours.
        can_rollback: whether the backend can undo a failed unit.
        close_on_recording_failure: end the session when its log fails; else go on and say so.
        idle_s: time between two turns of chat; silence of a client that has something transcribed.
        pause_s: longest pause.
        call_wait_s: how long a model call may show no sign of life; 0 waits for ever.
        models: the names by which a transcription's model may be chosen.
        sound_bytes: PCM16 of a transcription that may wait for the model.
    """

    session_s: int
    init_wait_s: int
    cleanup_wait_s: int
    context_tokens: int
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    can_rollback: bool = True
    close_on_recording_failure: bool = False
    idle_s: int = added(IDLE_S)
    pause_s: int = added(PAUSE_S)
    call_wait_s: int = added(0)
    models: tuple[str, ...] = added(())
    sound_bytes: int = added(SOUND_BYTES_MAX)


@attrs.frozen(kw_only=True)
class ConnectionOpened:
    """A client's WebSocket is open; always the first event.

    Attributes:
        at_ns: 0.
        recording_id: names the session on this server; derived ids are made from it.
        created_ms: wall clock, Unix milliseconds, unique on this server (`rt_` ids are made of it).
        mode: what the client asked for.
        seed: keys every random choice of the session.
        limits: the settings that bound it.
        recording: whether it is recorded.
        endpoint: where it connected.
        label: the client's own name for the session, 64 characters at most; it may repeat (002).
    """

    at_ns: int = 0
    recording_id: str
    created_ms: int
    mode: Mode
    seed: int
    limits: SessionLimits
    recording: Literal["on", "off"]
    endpoint: Endpoint = added("realtime")
    label: str = added("")


@attrs.frozen(kw_only=True)
class FrameReceived:
    """A WebSocket message, verbatim; None where it was longer than the connection allows."""

    at_ns: int
    frame: Frame


@attrs.frozen(kw_only=True)
class PeerGone:
    """The connection is over: the peer closed or lost it."""

    at_ns: int


@attrs.frozen(kw_only=True)
class SendFailed:
    """A frame could not be sent: the peer reads too slowly, or is gone. The socket is aborted."""

    at_ns: int


@attrs.frozen(kw_only=True)
class TicketMoved:
    """The session waits, at this place."""

    at_ns: int
    place: QueuePlace


@attrs.frozen(kw_only=True)
class TicketLeft:
    """The session waits no more and no slot will come, by its own wish (`LeaveQueue`)."""

    at_ns: int


@attrs.frozen(kw_only=True)
class TicketCancelled:
    """An operator deleted the ticket."""

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
class SlotLeased:
    """A slot is the session's until it is released; `lease` is the lease's generation."""

    at_ns: int
    lease: int
    slot: int


@attrs.frozen(kw_only=True)
class BackendOpened:
    """The model holds the session and its prompt."""

    at_ns: int
    lease: int
    opened: Opened


@attrs.frozen(kw_only=True)
class BackendOpenFailed:
    """It does not; `context_full` tells a prompt that does not fit from a failure."""

    at_ns: int
    lease: int
    context_full: bool = False


@attrs.frozen(kw_only=True)
class MediaDecoded:
    """Media was decoded by a worker.

    Attributes:
        at_ns: when.
        media: its number.
        pcm: its sound, float32 LE 16 kHz mono; empty where it has none.
        pictures: JPEG files: an image by itself, a video's first of each second. Empty for a JPEG
            that was only to be proven.
        stacked: JPEG files: the other pictures of each second of a video, side by side.
    """

    at_ns: int
    media: int
    pcm: bytes = b""
    pictures: tuple[bytes, ...] = added(())
    stacked: tuple[bytes, ...] = added(())


@attrs.frozen(kw_only=True)
class MediaRejected:
    """Media is damaged, or not what it said."""

    at_ns: int
    media: int
    reason: str


@attrs.frozen(kw_only=True)
class UnitDone:
    """The model has made its result of a unit."""

    at_ns: int
    result: UnitResult


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
    finalized: Finalized


@attrs.frozen(kw_only=True)
class FinalizeFailed:
    """It is not: the session's state on the model is unknown."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class RollbackDone:
    """The state from before unit `index` is restored."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class RollbackFailed:
    """It is not."""

    at_ns: int
    index: int


@attrs.frozen(kw_only=True)
class TurnPrefilled:
    """The model holds a turn's conversation, and goes on to answer it."""

    at_ns: int
    prefill: Prefill


@attrs.frozen(kw_only=True)
class TurnProgress:
    """The model has made a piece of its answer."""

    at_ns: int
    chunk: TurnChunk


@attrs.frozen(kw_only=True)
class TurnDone:
    """The answer is over."""

    at_ns: int
    result: TurnResult


@attrs.frozen(kw_only=True)
class TurnFailed:
    """There is no answer, or no more of it; `context_full`: the turn does not fit the context."""

    at_ns: int
    index: int
    context_full: bool = False


@attrs.frozen(kw_only=True)
class ChunkDone:
    """The model has written what it heard of a chunk."""

    at_ns: int
    result: ChunkResult


@attrs.frozen(kw_only=True)
class ChunkFailed:
    """It has not, and the utterance is lost to it; `context_full`: nothing of it was fed (B10)."""

    at_ns: int
    utterance: int
    index: int
    context_full: bool = False


@attrs.frozen(kw_only=True)
class BackendLost:
    """The backend or its worker is gone."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class BackendReleased:
    """The slot's cleanup is done and the slot is back in its pool (B5)."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class TimerFired:
    """The time of a `SetTimer` has come."""

    at_ns: int
    name: TimerName
    generation: int


@attrs.frozen(kw_only=True)
class RecordingFailed:
    """The session's log took no more; it is never retried."""

    at_ns: int


@attrs.frozen(kw_only=True)
class DrainBegan:
    """The server will shut down: what is under way may be finished, nothing new begins.

    Attributes:
        at_ns: when.
        wait_s: seconds until `Draining`.
    """

    at_ns: int
    wait_s: int


@attrs.frozen(kw_only=True)
class Draining:
    """The server shuts down: every session ends now."""

    at_ns: int


Event = (
    ConnectionOpened
    | FrameReceived
    | PeerGone
    | SendFailed
    | TicketMoved
    | TicketLeft
    | TicketCancelled
    | AdmissionRefused
    | Admitted
    | SlotLeased
    | BackendOpened
    | BackendOpenFailed
    | MediaDecoded
    | MediaRejected
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
    | BackendReleased
    | TimerFired
    | RecordingFailed
    | DrainBegan
    | Draining
)
