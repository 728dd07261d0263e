"""OpenTelemetry spans of each session, its units and its turns, made from its events.

    session -> queue, open, unit -> prefill, generate, finalize
                            turn -> prefill, answer

- A session is a trace of its own. Times are the log's: the wall clock of its start plus the
  session's own clock. `prefill` begins with its unit and `generate` ends with its result; the gap
  between them is the model's waiting time.
- Attributes are numbers and fixed words; never text, sound, labels or keys.
- An ended span goes to a bounded queue that a thread of the SDK empties: the event loop never waits
  for the network, and without a collector spans are lost, not sessions.
- It needs the extra `antiphon[traces]`; the OTEL_ variables set exporter, sampler and service name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_MS
from protocol.values.model import UnitResult

from .catalogue import BROKEN_OFF, OUR_FAULTS

EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
NS_PER_US: Final = 1_000
NONE: Final = -1
"""No unit and no turn."""

Values = Mapping[str, int | float | str | bool]


def make_provider(version: str) -> TracerProvider:
    """A provider of spans over OTLP, by the OTEL_ variables; `ImportError` without exporter."""
    exporter = import_module(EXPORTER).OTLPSpanExporter()
    named = {} if os.environ.get(OTEL_SERVICE_NAME) else {"service.name": "antiphon"}
    resource = Resource.create({SERVICE_VERSION: version, **named})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Traces:
    """Makes the spans of every session (`Telemetry`); it closes its `provider`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("antiphon")

    def watch(self, opened: ev.ConnectionOpened, owner: str) -> SessionTrace:  # noqa: ARG002
        """As `Telemetry`; the owner is not shown."""
        return SessionTrace(self._tracer, opened)

    def close(self) -> None:
        """Send the last spans; blocks for the exporter: call it in a thread."""
        self._provider.shutdown()


class SessionTrace:
    """The spans of one session (`Watcher`)."""

    def __init__(self, tracer: trace.Tracer, opened: ev.ConnectionOpened) -> None:
        self._tracer = tracer
        self._began_ns = opened.created_ms * NS_PER_MS
        self._now_ns = 0
        self._session: Session | None = None
        self._open: dict[str, Span] = {}
        self._index = NONE
        self._unit_ns = 0
        self._begin(
            "session",
            {"mode": opened.mode, "endpoint": opened.endpoint, "session": opened.recording_id},
            kind=SpanKind.SERVER,
        )

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """Begin and end spans with the event and its effects."""
        self._session, self._now_ns = session, event.at_ns
        self._note(event)
        for effect in effects:
            match effect:
                case ef.EnterQueue():
                    self._begin("queue", {}, within="session")
                case ef.OpenBackend():
                    self._begin("open", {}, within="session")
                case ef.StartUnit():
                    self._index, self._unit_ns = effect.unit.index, self._now_ns
                    self._begin("unit", {"index": self._index}, within="session")
                case ef.StartFinalize():
                    self._begin("finalize", {}, within="unit")
                case ef.Rollback():
                    self._begin("rollback", {}, within="unit")
                case ef.RunChunk():
                    chunk = effect.chunk
                    values = {"utterance": chunk.utterance, "index": chunk.index}
                    self._begin("chunk", values, within="session")
                case ef.Interrupt() | ef.CutTurn():
                    self._mark("interrupt")
                case ef.StartTurn():
                    self._index = effect.turn.index
                    self._begin("turn", {"index": self._index}, within="session")
                    self._begin("prefill", {}, within="turn")

    def received(
        self, events: Sequence[ev.FrameReceived], _messages: object, session: Session
    ) -> None:
        """As `Watcher`; no span begins or ends."""
        self._session, self._now_ns = session, events[-1].at_ns

    def _note(self, event: ev.Event) -> None:
        match event:
            case ev.SlotLeased():
                self._end("queue")
            case ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                self._end("queue", failed=True)
            case ev.BackendOpened():
                self._end("open", {"prompt_tokens": event.opened.prompt_length})
            case ev.BackendOpenFailed():
                self._end("open", failed=True)
            case ev.UnitDone() if event.result.index == self._index:
                self._unit_done(event.result)
            case ev.FinalizeDone() if event.finalized.index == self._index:
                self._end("finalize", {"kv_tokens": event.finalized.kv_length})
                self._end("unit")
            case ev.RollbackDone() if event.index == self._index:
                self._end("rollback")
                self._end("unit", failed=True)
            case ev.FinalizeFailed() | ev.RollbackFailed() | ev.BackendLost():
                self._end_work(failed=True)
            case ev.TurnPrefilled() if event.prefill.index == self._index:
                self._end("prefill", {"tokens": event.prefill.input_tokens})
                self._begin("answer", {}, within="turn")
            case ev.TurnDone() if event.result.index == self._index:
                self._end("answer", {"tokens": event.result.generated_tokens})
                self._end("turn", {"outcome": event.result.reason})
            case ev.ChunkDone():
                self._end("chunk", {"tokens": event.result.generated_tokens})
            case ev.ChunkFailed():
                self._end("chunk", failed=True)
            case ev.TurnFailed() if event.index == self._index:
                self._end_work(failed=True)

    def over(self, reason: str | None) -> None:
        """End the session's span, and all that are open."""
        why = reason or BROKEN_OFF
        failed = why in OUR_FAULTS
        self._end_work(failed=failed)
        for name in ("queue", "open"):
            self._end(name, failed=failed)
        counts = {} if self._session is None else self._session.counts
        self._end("session", {"reason": why, **counts}, failed=failed)

    # -- one unit -------------------------------------------------------------------------------

    def _unit_done(self, result: UnitResult) -> None:
        unit = self._open.get("unit")
        if unit is None:
            return
        unit.set_attributes(
            {
                "listen": result.is_listen,
                "cut": result.cut is not None,
                "kv_tokens": result.kv_length,
                "text_tokens": len(result.decided_ids),
                "speech_codes": len(result.codec_ids),
                "picture_tokens": result.vision_tokens,
            }
        )
        costs = result.costs
        self._past("prefill", self._unit_ns, self._unit_ns + costs.prefill_us * NS_PER_US)
        self._past("generate", self._now_ns - costs.generate_us * NS_PER_US, self._now_ns)
        self._mark("result")

    def _end_work(self, *, failed: bool) -> None:
        """End the spans of the model's work."""
        for name in ("finalize", "rollback", "unit", "prefill", "answer", "turn", "chunk"):
            self._end(name, failed=failed)

    # -- spans ----------------------------------------------------------------------------------

    def _wall_ns(self, at_ns: int) -> int:
        return self._began_ns + at_ns

    def _begin(
        self, name: str, values: Values, *, within: str = "", kind: SpanKind = SpanKind.INTERNAL
    ) -> None:
        """Begin a span; an open one of that name ends."""
        self._end(name)
        self._open[name] = self._tracer.start_span(
            name, self._inside(within), kind, dict(values), start_time=self._wall_ns(self._now_ns)
        )

    def _past(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Make a span for a past part of the unit."""
        begin_ns = max(begin_ns, self._unit_ns)
        span = self._tracer.start_span(
            name, self._inside("unit"), start_time=self._wall_ns(begin_ns)
        )
        span.end(self._wall_ns(max(begin_ns, min(end_ns, self._now_ns))))

    def _inside(self, within: str) -> Context:
        parent = self._open.get(within) or self._open.get("session")
        return Context() if parent is None else trace.set_span_in_context(parent, Context())

    def _mark(self, name: str) -> None:
        span = self._open.get("unit") or self._open.get("turn")
        if span is not None:
            span.add_event(name, timestamp=self._wall_ns(self._now_ns))

    def _end(self, name: str, values: Values | None = None, *, failed: bool = False) -> None:
        span = self._open.pop(name, None)
        if span is None:
            return
        span.set_attributes(dict(values or {}))
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(self._wall_ns(self._now_ns))
