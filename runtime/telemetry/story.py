"""Logs each session: its start, its end with its counts, and what an operator may act on.

A client's texts and labels are never logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.digest import session_id_of
from protocol.values.effects import DropUnit, Effect, ForgetRecording
from protocol.values.limits import NS_PER_S

from .catalogue import BROKEN_OFF

OUR_FAULTS: Final = frozenset({BROKEN_OFF, "backend_error"})
"""The ends that are warnings."""

_logger = logging.getLogger("antiphon.session")


class Stories:
    """Logs every session (`Telemetry`)."""

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> Story:
        """As `Telemetry`."""
        return Story(opened, owner)


class Story:
    """Logs one session (`Watcher`); `owner` is the name of its key, or empty."""

    def __init__(self, opened: ev.ConnectionOpened, owner: str) -> None:
        self._session: Session | None = None
        self._at_ns = 0
        self._has_dropped = self._is_forking = False
        self._named: Final = {
            "session": opened.recording_id,
            "session_id": session_id_of(opened.recording_id),
            **({"key": owner} if owner else {}),
        }
        self._of: Final = {"mode": opened.mode, "endpoint": opened.endpoint}
        self._tell(logging.INFO, "session opened", **self._of)

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """Log what an operator may have to act on."""
        self._session, self._at_ns = session, event.at_ns
        match event:
            case ev.RecordingFailed():
                self._tell(logging.ERROR, "the session is no longer recorded")
            case ev.Flooded():
                self._tell(logging.WARNING, "the client sends more than can be recorded")
            case ev.BackendLost():
                self._tell(logging.WARNING, "the model was lost")
            case ev.Forked():
                self._is_forking = True
            case ev.Rebuilt() if self._is_forking:
                self._is_forking = False
                self._tell(logging.INFO, "the fork begins", steps=event.steps)
            case ev.Rebuilt():
                self._tell(logging.WARNING, "the session moved", steps=event.steps)
        for effect in effects:
            if isinstance(effect, ForgetRecording):
                self._tell(logging.INFO, "the client asked not to be recorded")
            elif isinstance(effect, DropUnit) and not self._has_dropped:
                self._has_dropped = True
                self._tell(logging.INFO, "input comes too fast, seconds of it are dropped")

    def heard(
        self, events: Sequence[ev.FrameReceived], _messages: object, session: Session
    ) -> None:
        """As `Watcher`; there is nothing to tell."""
        self._session, self._at_ns = session, events[-1].at_ns

    def over(self, reason: str | None) -> None:
        """Log the session's end, with its counts."""
        why = reason or BROKEN_OFF
        level = logging.WARNING if why in OUR_FAULTS else logging.INFO
        told: dict[str, object] = {"reason": why, **self._of}
        if self._session is not None:
            told |= {"dialect": self._session.dialect_name}
            told |= {"seconds": round(self._at_ns / NS_PER_S, 3), **self._session.counts}
        self._tell(level, "session over", **told)

    def _tell(self, level: int, text: str, **fields: object) -> None:
        if _logger.isEnabledFor(level):
            _logger.log(level, text, extra={**self._named, **fields})
