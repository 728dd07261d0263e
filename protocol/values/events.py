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
from .messages import Mode, QueuePlace
from .model import Finalized, Opened, UnitResult
from .session_limits import SessionLimits as SessionLimits  # noqa: PLC0414 - a part of events
from .transcript import ChunkResult
from .turn import Prefill, TurnChunk, TurnResult
from .utf8 import Frame, Shortened

Endpoint = Literal["realtime", "duplex", "chat"]
"""Where a client connected: `/v1/realtime`, `/ws/duplex/{label}` (002) or `/ws/chat` (004)."""

TimerName = Literal["session", "init", "cleanup", "idle", "pause", "call"]


@attrs.frozen(kw_only=True)
class ConnectionOpened:
    """A client's WebSocket is open; always the first event.

    Attributes:
        at_ns: 0.
        recording_id: names the session on this server; derived ids are made from it.
        created_ms: wall clock, Unix milliseconds, unique on this server (`rt_` ids use it).
        mode: what the client asked for.
        seed: keys every random choice of the session.
        limits: the settings that bound it.
        recording: whether it is recorded.
        endpoint: where it connected.
        label: the client's own name for the session, 64 characters at most; it may repeat (002).
        behaviour: which server's course it takes (`behaviour`).
        quiet: no queue messages where a slot is free (002, the worker's own address).
        must_record: a client that asks not to be recorded is refused.
        recording_notice: what a client that is recorded is told about it, in the operator's words.
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
    behaviour: int = added(0)
    quiet: bool = added(False)
    must_record: bool = added(False)
    recording_notice: str = added("")


@attrs.frozen(kw_only=True)
class FrameReceived:
    """A WebSocket message.

    Attributes:
        at_ns: when.
        frame: verbatim; None where it was longer than the connection allows.
        has_room: whether there is memory to keep it, if it comes early.
        shortened: the original, where `frame` is only an outline: it is refused.
    """

    at_ns: int
    frame: Frame
    has_room: bool = added(True)
    shortened: Shortened | None = added(None)


@attrs.frozen(kw_only=True)
class Flooded:
    """The client sent a large message on top of more than its log may hold back.

    That message is not read, and nothing after it.
    """

    at_ns: int


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
    """There is no answer, or no further part.

    Attributes:
        at_ns: when.
        index: the turn's.
        context_full: the turn does not fit the context.
        refused: what the model cannot do that the turn asks for, in words for the client; empty:
            it failed.
    """

    at_ns: int
    index: int
    context_full: bool = False
    refused: str = added("")


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
    | Flooded
    | DrainBegan
    | Draining
)
