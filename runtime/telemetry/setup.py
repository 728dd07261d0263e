"""Puts together what a server shows of itself, as its operator decided.

This is the one place that knows all who watch. Spans are optional: what makes them is imported
only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from .hub import Hub
from .metrics import Metrics
from .story import Stories
from .watching import ServerStatus, Telemetry

if TYPE_CHECKING:
    from .traces import Traces


class TracesMissingError(Exception):
    """Spans were asked for, and what makes or sends them is not installed."""


@attrs.frozen(kw_only=True)
class Sight:
    """All that watches a server.

    Attributes:
        metrics: what `/metrics` answers.
        hub: sees every session; a server's `telemetry`.
        traces: makes the spans; None where none were asked for.
    """

    metrics: Metrics
    hub: Hub
    traces: Traces | None

    def close(self) -> None:
        """Send the last spans; it blocks for as long as their exporter waits: call it in a thread.

        No session may run any more.
        """
        if self.traces is not None:
            self.traces.close()


def make_sight(status: Callable[[], ServerStatus], *, version: str, traces: bool) -> Sight:
    """Make all that watches a server.

    Args:
        status: asks the server how it stands; called when metrics are read, not before.
        version: of the server.
        traces: make spans.

    Raises:
        TracesMissingError: the extra `traces` is not installed.
    """
    metrics = Metrics(status=status, process=True)
    watching: list[Telemetry] = [metrics, Stories()]
    made = _open_traces(version) if traces else None
    if made is not None:
        watching.append(made)
    return Sight(metrics=metrics, hub=Hub(watching), traces=made)


def _open_traces(version: str) -> Traces:
    try:
        from .traces import Traces, make_provider

        return Traces(make_provider(version))
    except ImportError as error:
        raise TracesMissingError(
            f"traces need the extra: pip install 'antiphon[traces]' ({error.name} is missing)"
        ) from error
