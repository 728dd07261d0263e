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

from .call_events import ChunkDone as ChunkDone  # noqa: PLC0414 - a part of events
from .call_events import ChunkFailed as ChunkFailed  # noqa: PLC0414 - a part of events
from .call_events import TurnDone as TurnDone  # noqa: PLC0414 - a part of events
from .call_events import TurnFailed as TurnFailed  # noqa: PLC0414 - a part of events
from .call_events import TurnPrefilled as TurnPrefilled  # noqa: PLC0414 - a part of events
from .call_events import TurnProgress as TurnProgress  # noqa: PLC0414 - a part of events
from .errors import ErrorCode
from .fork_events import Forked as Forked  # noqa: PLC0414 - a part of events
from .messages import QueuePlace
from .model import Finalized, Opened, UnitResult
from .modes import Mode
from .session_limits import SessionLimits as SessionLimits  # noqa: PLC0414 - a part of events
from .slot_events import BackendLost as BackendLost  # noqa: PLC0414 - a part of events
from .slot_events import BackendReleased as BackendReleased  # noqa: PLC0414 - a part of events
from .slot_events import LeaseRevoked as LeaseRevoked  # noqa: PLC0414 - a part of events
from .slot_events import RebuildFailed as RebuildFailed  # noqa: PLC0414 - a part of events
from .slot_events import Rebuilt as Rebuilt  # noqa: PLC0414 - a part of events
from .slot_events import SlotLeased as SlotLeased  # noqa: PLC0414 - a part of events
from .utf8 import Frame, Shortened

Endpoint = Literal["realtime", "duplex", "chat", "live", "openai"]
"""The client's address: `/v1/realtime`, `/ws/duplex/{label}` (002), `/ws/chat` (004),
`/v1/live/sessions` or `/v1/realtime?model=`."""

PIECES: Final[tuple[Endpoint, ...]] = ("live", "openai")
"""Addresses whose sound is 16-bit and comes in pieces of any size."""

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
        shortened: the original, if `frame` is only an outline: it is refused.
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
    opened: Opened


@attrs.frozen(kw_only=True)
class BackendOpenFailed:
    """The model could not open the session.

    `context_full`: its prompt does not fit. `is_lost`: the worker is gone.
    """

    at_ns: int
    lease: int
    context_full: bool = False
    is_lost: bool = False


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
    """What the user said, written down by another model than the session's.

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
