"""What must be true of a simulated session whose client is away (docs/resume.md).

It goes by events and effects. Held here: a client is waited for no longer than `resume_s`, and a
session that sleeps holds no slot once no call of its model is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL

S: Final = 1_000_000_000


class Absence:
    """The times without a client of one session.

    Args:
        opened: the session's first event.
        report: told of what must not be.

    Attributes:
        is_away: the client may come back.
        is_asleep: its slot is given back, or will be.
    """

    def __init__(self, opened: ev.ConnectionOpened, report: Callable[[str], None]) -> None:
        self.may_return = bool(opened.resume_hash) and opened.recording == "on"
        self._wait_ns = opened.limits.resume_s * S
        self._report = report
        self._since_ns: int | None = None
        self._grace: int | None = None
        self.is_asleep = False

    @property
    def is_away(self) -> bool:
        """Whether the client is away, and may come back."""
        return self._since_ns is not None

    def follow(self, event: ev.Event, effects: tuple[ef.Effect, ...], tolerance_ns: int) -> None:
        """Take in a step of a session that lives."""
        if (
            self._since_ns is not None
            and event.at_ns > self._since_ns + self._wait_ns + tolerance_ns
        ):
            self._report(f"resume: its client is waited for after {self._wait_ns / S:.0f} s")
        match event:
            case ev.PeerGone() | ev.SendFailed():
                leaves = isinstance(event, ev.PeerGone) and event.code == CLOSE_NORMAL
                if self.may_return and not leaves and not self.is_away:
                    self._since_ns = event.at_ns
            case ev.PeerAttached():
                self._since_ns, self.is_asleep = None, False
            case ev.TimerFired(name="detach", generation=generation):
                self.is_asleep |= self.is_away and generation == self._grace
            case ev.RecordingFailed():
                self.may_return = False
        for effect in effects:
            if isinstance(effect, ef.ForgetRecording):
                self.may_return = False
            if isinstance(effect, ef.SetTimer) and effect.name == "detach":
                self._grace = effect.generation
