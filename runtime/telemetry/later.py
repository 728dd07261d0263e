"""Sessions are counted later, many steps at once.

A step of a session comes some milliseconds after another's, and by then the CPU's caches hold other
things: counted at once, each takes three times as long. What a meter reads of the session is noted
with the step, so the figures are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
        self._steps: list[Callable[[], None]] = []
        self._bytes = 0

    def put(self, count: Callable[[], None], size_bytes: int, *, is_large: bool = False) -> None:
        """Take what counts a step of a size; count all if they are many, or one is large."""
        self._steps.append(count)
        self._bytes += size_bytes
        if is_large or self._bytes > BYTES_MAX or len(self._steps) >= STEPS_MAX:
            self.count()

    def count(self) -> None:
        """Count all steps."""
        steps, self._steps, self._bytes = self._steps, [], 0
        for count in steps:
            count()


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
        count = partial(self.meter.saw, event, effects, _note(session))
        is_turn = any(isinstance(effect, StartTurn) for effect in effects)
        # A turn has a whole conversation.
        self._backlog.put(partial(self._count, count), _size_bytes(event), is_large=is_turn)

    def heard(
        self,
        events: Sequence[ev.FrameReceived],
        messages: Sequence[ClientMessage],
        session: Session,
    ) -> None:
        """As `Watcher`."""
        self._check()
        count = partial(self.meter.heard, events, messages, _note(session))
        self._backlog.put(partial(self._count, count), sum(map(_size_bytes, events)))

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        self._backlog.count()
        self._check()
        self.meter.over(reason)

    def _count(self, count: Callable[[], None]) -> None:
        """Count a step, unless an earlier one could not be counted."""
        if self._error is None:
            try:
                count()
            except Exception as error:
                self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _note(session: Session) -> _Noted:
    return _Noted(
        session.end_reason, session.said, session.state, session.taken, session.units_waiting
    )


def _size_bytes(event: ev.Event) -> int:
    if isinstance(event, ev.FrameReceived):
        return len(event.frame or b"")
    if isinstance(event, ev.MediaDecoded):
        return len(event.pcm) + sum(map(len, event.pictures + event.stacked))
    return 0
