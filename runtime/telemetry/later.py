"""Sessions are counted later, many steps at once.

A step of a session comes some milliseconds after another's, and by then the CPU's caches hold other
things: counted at once, each takes three times as long. What a meter reads of the session is noted
with the step, so the figures are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.effects import Effect, StartTurn
from protocol.values.messages import EndReason, ServerMessage
from protocol.values.requests import ClientMessage
from protocol.values.state import State

from .meter import Meter

STEPS_MAX: Final = 32
"""Counted at once: a millisecond."""
BYTES_MAX: Final = 4 << 20
"""Of clients' messages and media, kept by steps that wait."""


@attrs.define
class _Noted:
    """A session after a step, as far as a meter reads it (`Shown`)."""

    end_reason: EndReason | None
    said: Sequence[ServerMessage]
    state: State
    taken: ClientMessage | None
    units_waiting: int


class Backlog:
    """The steps of a server's sessions that are not counted yet, in order."""

    def __init__(self) -> None:
        self._steps: list[tuple[Later, ev.Event, tuple[Effect, ...], _Noted]] = []
        self._bytes = 0

    def put(
        self, later: Later, event: ev.Event, effects: tuple[Effect, ...], session: Session
    ) -> None:
        """Take a step; count all if they are many, or large: a turn has a whole conversation."""
        noted = _Noted(
            session.end_reason, session.said, session.state, session.taken, session.units_waiting
        )
        self._steps.append((later, event, effects, noted))
        if isinstance(event, ev.FrameReceived):
            self._bytes += len(event.frame or b"")
        elif isinstance(event, ev.MediaDecoded):
            self._bytes += len(event.pcm) + sum(map(len, event.pictures + event.stacked))
        is_large = self._bytes > BYTES_MAX or any(isinstance(it, StartTurn) for it in effects)
        if is_large or len(self._steps) >= STEPS_MAX:
            self.count()

    def count(self) -> None:
        """Count all steps."""
        steps, self._steps, self._bytes = self._steps, [], 0
        for later, event, effects, noted in steps:
            later.count(event, effects, noted)


class Later:
    """A session's meter, which counts when the backlog does (`Watcher`).

    What it raises is raised by the next call.
    """

    def __init__(self, meter: Meter, backlog: Backlog) -> None:
        self.meter: Final = meter
        self._backlog = backlog
        self._error: Exception | None = None

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """As `Watcher`."""
        self._check()
        self._backlog.put(self, event, effects, session)

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        self._backlog.count()
        self._check()
        self.meter.over(reason)

    def count(self, event: ev.Event, effects: tuple[Effect, ...], noted: _Noted) -> None:
        """Count a step, unless an earlier one could not be counted."""
        if self._error is None:
            try:
                self.meter.saw(event, effects, noted)
            except Exception as error:
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
