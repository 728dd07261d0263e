"""Puts a server's telemetry together, as its operator configured it; traces are optional.

`Hub` shows several watchers every session. A watcher that raises is logged once and dropped: that
is a bug of ours, and costs figures, never a session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from protocol.machine.session import Session
from protocol.values.effects import Effect
from protocol.values.events import ConnectionOpened, Event, FrameReceived
from protocol.values.requests import ClientMessage

from ..settings.extras import install
from .logs import SessionsLogger
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

    def received(
        self, events: Sequence[FrameReceived], messages: Sequence[ClientMessage], session: Session
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
