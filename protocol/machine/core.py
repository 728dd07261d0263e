"""What all parts of a session share: the step in progress, timers, the recording, the model call.

- `Step` has the session's first event, its clock, and the effects of the step in progress.
- `Timers` knows a timer by its generation, so that a stale one has no effect.
- `Call` is the model call in progress: one at a time, so that cleanup knows what to wait for (B4).
- `Watchdog` ends a session whose call gives no sign of life for too long.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.digest import derive_id
from ..values.errors import LocalProtocolError
from ..values.events import SessionLimits
from ..values.limits import NS_PER_S
from ..values.messages import RecordingState
from ..values.requests import Voice, VoiceName

LIFE_TIMERS: Final[tuple[ev.TimerName, ...]] = (
    *("session", "init", "idle", "pause", "watchdog", "rebuild"),
    *("detach", "resume", "silence", "quiet", "calls"),
)
"""Timers that bound a session's life, and end with it."""
SIGNS_OF_LIFE: Final = (
    *(ev.BackendOpened, ev.Rebuilt, ev.UnitDone, ev.UnitFailed, ev.FinalizeDone),
    *(ev.RollbackDone, ev.TurnPrefilled, ev.TurnProgress, ev.ChunkDone, ev.ChunkFailed),
)
"""Events that show that the model goes on; the next call may follow in the same step."""


@attrs.define(eq=False)
class Step:
    """The session's clock and first event, and the effects of the step in progress.

    Attributes:
        opened: the session's first event: its ids, seed and limits.
        limits: the limits of the session; a fork has its own (`reopen`).
        do: appends an effect.
        is_forking: the model is to be brought to the past of another session.
        media: the number of the next `DecodeMedia`.
    """

    opened: ev.ConnectionOpened
    is_forking: bool = False
    now_ns: int = 0
    effects: list[ef.Effect] = attrs.Factory(list)
    media: int = 0
    limits: SessionLimits = attrs.field(init=False)
    do: Callable[[ef.Effect], None] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.limits, self.do = self.opened.limits, self.effects.append

    def reopen(self, opened: ev.ConnectionOpened) -> None:
        """Begin again, as the fork of a session."""
        self.opened, self.limits, self.is_forking = opened, opened.limits, True

    def behaves(self, change: int) -> bool:
        """Whether the session includes a change of behaviour (`behaviour`)."""
        return self.opened.behaviour >= change

    def decode(self, kind: ef.MediaKind, data: bytes, **how: int) -> int:
        """Request `DecodeMedia`; returns the media's number."""
        number, self.media = self.media, self.media + 1
        self.do(ef.DecodeMedia(media=number, kind=kind, data=data, **how))
        return number

    def derive(self, prefix: str, number: int) -> str:
        """Derive an id from the recording's id and a count."""
        return derive_id(prefix, self.opened.recording_id, number)


@attrs.define(eq=False)
class Timers:
    """Generations of the timers that are set; the runtime holds the clock."""

    step: Step
    pending: dict[ev.TimerName, int] = attrs.Factory(dict)
    generation: int = 0

    def set(self, name: ev.TimerName, seconds: float) -> None:
        """Set a timer, in seconds from now; none of this name is set."""
        self.set_at(name, self.step.now_ns + int(seconds * NS_PER_S))

    def set_at(self, name: ev.TimerName, at_ns: int) -> None:
        """Set a timer to a time."""
        self.generation += 1
        self.pending[name] = self.generation
        self.step.do(ef.SetTimer(name=name, generation=self.generation, at_ns=at_ns))

    def cancel(self, name: ev.TimerName) -> None:
        """Cancel a timer, if it is set."""
        generation = self.pending.pop(name, None)
        if generation is not None:
            self.step.do(ef.CancelTimer(name=name, generation=generation))

    def fire(self, name: ev.TimerName, generation: int) -> bool:
        """Whether this timer is set and not stale; it is not set afterwards."""
        if self.pending.get(name) != generation:
            return False
        del self.pending[name]
        return True


@attrs.define(eq=False)
class Recording:
    """Whether the session is recorded; `state` is as sent to clients."""

    step: Step
    state: RecordingState

    @property
    def is_on(self) -> bool:
        """Whether the log holds all that happened so far."""
        return self.state == "on"

    @property
    def id(self) -> str:
        """The recording's name as sent to the client; empty without a recording."""
        return self.step.opened.recording_id if self.is_on else ""

    @property
    def notice(self) -> str:
        """The operator's words about the recording; empty without a recording."""
        return self.step.opened.recording_notice if self.is_on else ""

    @property
    def outlives_worker(self) -> bool:
        """Whether another worker may take the place of a lost one: the log holds what it knew."""
        return self.is_on and self.step.limits.rebuild_wait_s > 0


class Phase(StrEnum):
    """The kind of the model call in progress."""

    IDLE = "idle"
    OPENING = "opening"
    RUNNING = "running"
    FINALIZING = "finalizing"
    ROLLING_BACK = "rolling_back"
    REBUILDING = "rebuilding"


@attrs.define(eq=False)
class Call:
    """The model call in progress, even if no longer wanted; one at a time.

    `index` is that of its unit, turn or chunk, or of the last one; -1 before the first.
    """

    phase: Phase = Phase.IDLE
    index: int = -1

    @property
    def is_idle(self) -> bool:
        """Whether no call is in progress."""
        return self.phase is Phase.IDLE

    def begin(self, index: int) -> None:
        """Begin a unit, a turn or a chunk."""
        self.require(Phase.IDLE)
        self.phase, self.index = Phase.RUNNING, index

    def awaits(self, phase: Phase, index: int) -> bool:
        """Whether a completion is due; others are stale."""
        return self.phase is phase and self.index == index

    def settle(self) -> None:
        """End the call."""
        self.phase = Phase.IDLE

    def require(self, phase: Phase) -> None:
        """Raise an error of ours in another phase."""
        if self.phase is not phase:
            raise LocalProtocolError(f"call {self.index} is {self.phase}, not {phase}")


@attrs.define(eq=False)
class Watchdog:
    """The watchdog of model calls; one timer serves all calls of a session.

    The timer is set again only when it fires too early for the call in progress, so it costs one
    effect in half a minute and not one a unit. A hanging call is waited for as usual, then its
    slot is condemned (B4). `alive_ns` is the last sign of life of the call; None without one.
    """

    step: Step
    timers: Timers
    call: Call
    alive_ns: int | None = None

    def watch(self, event: ev.Event) -> None:
        """Set the timer for the call in progress, if needed; runs after every event."""
        wait_s = self.step.limits.call_wait_s
        if not wait_s:
            return
        phase = self.call.phase
        if phase is Phase.IDLE or phase is Phase.REBUILDING:  # a timer of its own bounds it
            self.alive_ns = None
        elif self.alive_ns is None or isinstance(event, SIGNS_OF_LIFE):
            self.alive_ns = self.step.now_ns
        if self.alive_ns is not None and "watchdog" not in self.timers.pending:
            self.timers.set_at("watchdog", self.alive_ns + wait_s * NS_PER_S)

    @property
    def is_overdue(self) -> bool:
        """Whether the call in progress has hung for too long."""
        wait_ns = self.step.limits.call_wait_s * NS_PER_S
        return self.alive_ns is not None and self.step.now_ns - self.alive_ns >= wait_ns


Decode = Callable[..., int]
"""Has media decoded outside (`Step.decode`); returns its number."""


def decode_voice(voice: Voice, decode: Decode) -> int | bytes:
    """Have reference audio decoded, or return it if it needs no decoding."""
    if isinstance(voice, VoiceName):
        return decode("voice", voice.name.encode())
    return decode("wav", voice.data) if voice.is_file else voice.data
