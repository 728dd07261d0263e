"""What watches the sessions of a server, as its operator configured it; traces are optional.

- `Hub` shows several watchers every session. A watcher that raises is logged once and dropped: that
  is a bug of ours, and costs figures, never a session.
- Each session logs its start, its end with its counts, and what an operator may act on
  (`SessionLogger`). A client's texts and labels are never logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from protocol.machine.session import Session
from protocol.values import events as ev
from protocol.values.effects import DropUnit, Effect, ForgetRecording
from protocol.values.limits import NS_PER_S
from protocol.values.records import session_id_of
from protocol.values.requests import ClientMessage

from ..settings.extras import install
from .catalogue import BROKEN_OFF, OUR_FAULTS
from .metrics import Metrics
from .watching import ServerStatus, Telemetry, Watcher

if TYPE_CHECKING:
    from .traces import Traces

# -- several watchers as one -----------------------------------------------------------------------


_logger = logging.getLogger("antiphon.telemetry")


class Hub:
    """Shows every session to several watchers, in order (`Telemetry`)."""

    def __init__(self, watching: Sequence[Telemetry]) -> None:
        self._watching = tuple(watching)

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> Watcher:
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

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.saw(event, effects, session)
            except Exception:
                self._drop(watcher)

    def received(
        self,
        events: Sequence[ev.FrameReceived],
        messages: Sequence[ClientMessage],
        session: Session,
    ) -> None:
        """As `Watcher`."""
        for watcher in self._watchers:
            try:
                watcher.received(events, messages, session)
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
        _logger.exception("%s failed, and no longer watches this session", type(watcher).__name__)
        self._watchers = [it for it in self._watchers if it is not watcher]


# -- the lines of a session ------------------------------------------------------------------------


_lines = logging.getLogger("antiphon.session")


class SessionsLogger:
    """Logs every session (`Telemetry`)."""

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> SessionLogger:
        """As `Telemetry`."""
        return SessionLogger(opened, owner)


class SessionLogger:
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
        self._log(logging.INFO, "session opened", **self._of)

    def saw(self, event: ev.Event, effects: tuple[Effect, ...], session: Session) -> None:
        """Log what an operator may have to act on."""
        self._session, self._at_ns = session, event.at_ns
        match event:
            case ev.RecordingFailed():
                self._log(logging.ERROR, "the session is no longer recorded")
            case ev.Flooded():
                self._log(logging.WARNING, "the client sends more than can be recorded")
            case ev.BackendLost():
                self._log(logging.WARNING, "the model was lost")
            case ev.Forked():
                self._is_forking = True
            case ev.Rebuilt() if self._is_forking:
                self._is_forking = False
                self._log(logging.INFO, "the fork begins", steps=event.steps)
            case ev.Rebuilt():
                self._log(logging.WARNING, "the session moved", steps=event.steps)
        for effect in effects:
            if isinstance(effect, ForgetRecording):
                self._log(logging.INFO, "the client asked not to be recorded")
            elif isinstance(effect, DropUnit) and not self._has_dropped:
                self._has_dropped = True
                self._log(logging.INFO, "input comes too fast: seconds of it are dropped")

    def received(
        self, events: Sequence[ev.FrameReceived], _messages: object, session: Session
    ) -> None:
        """As `Watcher`; nothing is logged."""
        self._session, self._at_ns = session, events[-1].at_ns

    def over(self, reason: str | None) -> None:
        """Log the session's end, with its counts."""
        why = reason or BROKEN_OFF
        level = logging.WARNING if why in OUR_FAULTS else logging.INFO
        fields: dict[str, object] = {"reason": why, **self._of}
        if self._session is not None:
            fields |= {"dialect": self._session.dialect_name}
            fields |= {"seconds": round(self._at_ns / NS_PER_S, 3), **self._session.counts}
        self._log(level, "session over", **fields)

    def _log(self, level: int, text: str, **fields: object) -> None:
        if _lines.isEnabledFor(level):
            _lines.log(level, text, extra={**self._named, **fields})


# -- the telemetry of a server ---------------------------------------------------------------------


class TracesMissingError(Exception):
    """Traces are set, and their package is not installed."""


@attrs.frozen(kw_only=True)
class ServerTelemetry:
    """A server's telemetry; `hub` sees every session, and `traces` may be `None`."""

    metrics: Metrics
    hub: Hub
    traces: Traces | None

    def close(self) -> None:
        """Send the last spans, after all sessions; blocks for the exporter: call it in a thread."""
        if self.traces is not None:
            self.traces.close()


def make_telemetry(
    status: Callable[[], ServerStatus], *, version: str, traces: bool
) -> ServerTelemetry:
    """Make a server's telemetry; `status` is called when metrics are read, not before.

    `TracesMissingError`: the extra `traces` is not installed.
    """
    metrics = Metrics(status=status, process=True)
    watching: list[Telemetry] = [metrics, SessionsLogger()]
    made = _open_traces(version) if traces else None
    if made is not None:
        watching.append(made)
    return ServerTelemetry(metrics=metrics, hub=Hub(watching), traces=made)


def _open_traces(version: str) -> Traces:
    try:
        from .traces import Traces, make_provider

        return Traces(make_provider(version))
    except ImportError as error:
        raise TracesMissingError(
            f"traces need the extra: {install('traces')} ({error.name} is missing)"
        ) from error
