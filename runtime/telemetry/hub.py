"""Several watchers as one: a watcher that raises is logged once and dropped.

That is a bug of ours, and costs figures, never a session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from protocol.machine.session import Session
from protocol.values.effects import Effect
from protocol.values.events import ConnectionOpened, Event

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
        self._show(lambda watcher: watcher.saw(event, effects, session))

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        self._show(lambda watcher: watcher.over(reason))

    def _show(self, to: Callable[[Watcher], None]) -> None:
        """Show it to each watcher; log an exception, and drop its watcher."""
        for watcher in self._watchers:
            try:
                to(watcher)
            except Exception:
                text = "%s broke, and watches this session no more"
                _logger.exception(text, type(watcher).__name__)
                self._watchers = [it for it in self._watchers if it is not watcher]
