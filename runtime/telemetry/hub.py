"""Several watchers as one: a watcher that raises is logged once and dropped.

That is a bug of ours, and costs figures, never a session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from protocol.machine.session import Session
from protocol.values.effects import Effect
from protocol.values.events import ConnectionOpened, Event, FrameReceived
from protocol.values.requests import ClientMessage

from .watching import Telemetry, Watcher

_logger = logging.getLogger("antiphon.telemetry")


class Hub:
    """Shows every session to several watchers, in order (`Telemetry`)."""

    def __init__(self, watching: Sequence[Telemetry]) -> None:
        self._watching = tuple(watching)

    def watch(self, opened: ConnectionOpened, owner: str) -> Watcher:
        """As `Telemetry`."""
        watchers: list[Watcher] = []
        for telemetry in self._watching:
            try:
                watchers.append(telemetry.watch(opened, owner))
            except Exception:
                _logger.exception("%s cannot watch a session", type(telemetry).__name__)
        return Watchers(watchers)


class Watchers:
    """The watchers of one session, in order (`Watcher`)."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)

    def saw(self, event: Event, effects: tuple[Effect, ...], session: Session) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.saw(event, effects, session)
            except Exception:
                self._drop(watcher)

    def heard(
        self, events: Sequence[FrameReceived], messages: Sequence[ClientMessage], session: Session
    ) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.heard(events, messages, session)
            except Exception:
                self._drop(watcher)

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.over(reason)
            except Exception:
                self._drop(watcher)

    def _drop(self, watcher: Watcher) -> None:
        """Log the exception that a watcher raised, and show it nothing more."""
        _logger.exception("%s broke, and watches this session no more", type(watcher).__name__)
        self._watchers = [it for it in self._watchers if it is not watcher]
