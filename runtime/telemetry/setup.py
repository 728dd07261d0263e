"""Puts a server's telemetry together, as its operator configured it; traces are optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ..settings.extras import install
from .hub import Hub
from .metrics import Metrics
from .story import Stories
from .watching import ServerStatus, Telemetry

if TYPE_CHECKING:
    from .traces import Traces


class TracesMissingError(Exception):
    """Traces are set, and their package is not installed."""


@attrs.frozen(kw_only=True)
class Sight:
    """A server's telemetry; `hub` sees every session, and `traces` may be `None`."""

    metrics: Metrics
    hub: Hub
    traces: Traces | None

    def close(self) -> None:
        """Send the last spans, after all sessions; blocks for the exporter: call it in a thread."""
        if self.traces is not None:
            self.traces.close()


def make_sight(status: Callable[[], ServerStatus], *, version: str, traces: bool) -> Sight:
    """Make a server's telemetry; `status` is called when metrics are read, not before.

    `TracesMissingError`: the extra `traces` is not installed.
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
            f"traces need the extra: {install('traces')} ({error.name} is missing)"
        ) from error
