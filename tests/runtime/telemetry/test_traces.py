"""Spans of sessions, units and turns: their times, their nesting, and what they do not say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from protocol.values.model import Unit
from runtime.model.backends.scripted import Call, ScriptedBackend, Step
from runtime.settings.extras import install
from runtime.telemetry import metrics
from runtime.telemetry.metrics import TracesMissingError, make_telemetry
from runtime.telemetry.traces import Traces, make_provider
from tests.sessions.in_memory import World, append_frame, close_frame, init_frame, on_virtual_time
from tests.sessions.telemetry import watched
from tests.simulation.test_simulation import stream
from tests.simulation.test_simulation_chat import ask_frame, chunk_frame, prepare_frame

CREATED_NS = 1_700_000_000_001 * 1_000_000
MS = 1_000_000
US = 1_000


def spans_of(
    scene: Callable[[World], Awaitable[None]],
    backend: ScriptedBackend | None = None,
    **settings: Any,
) -> dict[str, list[ReadableSpan]]:
    """Play a scene on virtual time and return its spans, by name, in the order of their ends."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)

    async def body() -> None:
        async with watched(traces, backend) as server:
            await scene(server)

    on_virtual_time(body)
    traces.close()
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def took_ms(span: ReadableSpan) -> float:
    """Say how long a span is, in milliseconds."""
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / MS, 1)


def is_inside(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether a span is a child, in name and in time."""
    assert span.start_time is not None
    assert span.end_time is not None
    assert parent.start_time is not None
    assert parent.end_time is not None
    named = span.parent is not None and span.parent.span_id == parent.context.span_id
    return named and parent.start_time <= span.start_time <= span.end_time <= parent.end_time


def test_a_session_is_a_tree_of_spans() -> None:
    """Whoever asks why an answer was late would see no more than that it was."""

    async def scene(server: World) -> None:
        peer = await server.activate()
        await stream(peer, 4)
        peer.send(close_frame())
        await peer.over()

    spans = spans_of(scene)
    (session,) = spans["session"]
    assert session.parent is None
    assert session.start_time == CREATED_NS
    assert took_ms(session) == pytest.approx(4000, abs=1)
    assert all(
        is_inside(span, session) for name in ("queue", "open", "unit") for span in spans[name]
    )
    assert len(spans["unit"]) == 4
    for index, unit in enumerate(spans["unit"]):
        assert unit.attributes is not None
        assert unit.attributes["index"] == index
        assert unit.attributes["listen"] is (index < 3)
        parts = [spans[name][index] for name in ("prefill", "generate", "finalize")]
        assert all(is_inside(part, unit) for part in parts)
        speaks = index == 3
        assert [took_ms(part) for part in parts] == [
            80 if speaks else 50,
            400 if speaks else 20,
            37,
        ]
        assert took_ms(unit) == (517 if speaks else 107)
    trace_ids = {span.context.trace_id for named in spans.values() for span in named}
    assert len(trace_ids) == 1


def test_sessions_are_traces_of_their_own() -> None:
    """One caller's units would hang below another's session."""

    async def scene(server: World) -> None:
        for _ in range(2):
            await server.activate()

    spans = spans_of(scene)
    first, second = spans["session"]
    assert first.context.trace_id != second.context.trace_id


def test_a_turn_of_chat_is_traced() -> None:
    """Chat would be a blind spot."""

    async def scene(server: World) -> None:
        peer = await server.activate_chat()
        peer.send(ask_frame("what is this"))
        await peer.heard("response.done")

    spans = spans_of(scene)
    (turn,), (queue,) = spans["turn"], spans["queue"]
    assert is_inside(spans["prefill"][0], turn)
    assert is_inside(spans["answer"][0], turn)
    assert turn.attributes is not None
    assert turn.attributes["outcome"] == "turn_end"
    assert is_inside(turn, spans["session"][0])
    assert is_inside(queue, spans["session"][0])


def _failing(unit: Unit, seed: int) -> Step:
    return Step(fault="fail") if unit.index == 0 else Step()


def _hanging(unit: Unit, seed: int) -> Step:
    return Step(fault="hang") if unit.index == 1 else Step()


@pytest.mark.parametrize(("script", "units"), [(_failing, 2), (_hanging, 2)])
def test_every_span_ends(script: Any, units: int) -> None:
    """A unit that fails or hangs would leave no trace, just when one is looked for."""

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.send(append_frame())
        await anyio.sleep(1)
        peer.send(append_frame())
        await anyio.sleep(1)
        peer.vanish()
        await server.quiet()

    spans = spans_of(scene, ScriptedBackend(script, slots=2))
    assert len(spans["unit"]) == units
    statuses = [unit.status.status_code for unit in spans["unit"]]
    assert (statuses[0] is StatusCode.ERROR) is (script is _failing)
    assert spans["session"][0].status.status_code is StatusCode.UNSET


def test_who_waits_in_vain_leaves_a_span() -> None:
    """A session that was never served would not be seen to have waited."""

    async def scene(server: World) -> None:
        await server.activate()
        peer = server.connect()
        await peer.heard("session.queued")
        await anyio.sleep(3)
        peer.vanish()
        await anyio.sleep(1)

    spans = spans_of(scene, ScriptedBackend(slots=1))
    assert 3000 in [took_ms(span) for span in spans["queue"]]


def test_a_session_that_breaks_off_ends_all_its_spans() -> None:
    """A bug would leave nothing to look at but what went well before it."""

    async def scene(server: World) -> None:
        await server.activate()
        peer = server.connect()
        await peer.heard("session.queued")
        peer.break_down()
        await anyio.sleep(1)

    spans = spans_of(scene, ScriptedBackend(slots=1))
    assert len(spans["queue"]) == 2
    broken = spans["session"][0]
    assert broken.status.status_code is StatusCode.ERROR
    assert broken.attributes is not None
    assert broken.attributes["reason"] == "broken_off"


def test_spans_say_nothing_that_a_client_said() -> None:
    """Words would leave the server for a system that nobody meant them for."""

    async def scene(server: World) -> None:
        peer = server.connect("audio", endpoint="duplex", label="secret-label")
        await peer.heard("queue_done")
        peer.send(prepare_frame(system_prompt="secret-words"))
        await peer.heard("prepared")
        peer.send(chunk_frame())
        await peer.heard("result")
        peer = server.connect()
        await peer.heard("session.queue_done")
        peer.send(init_frame(system_prompt="secret-words"))
        await peer.heard("session.created")
        peer.send(append_frame(input_id="secret-input"))
        await peer.heard("listen")
        peer.send(close_frame("secret-reason"))
        await peer.over()

    spans = spans_of(scene, ScriptedBackend(opening=lambda _: Call(duration_s=0.1)))
    assert took_ms(spans["open"][0]) == 100
    told = "".join(span.to_json() for named in spans.values() for span in named)
    assert "secret" not in told


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who turns traces on would get a stack of frames about modules."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("runtime.telemetry.traces.import_module", missing)
    with pytest.raises(TracesMissingError, match=re.escape(install("traces"))):
        make_telemetry(lambda: pytest.fail("nobody looks"), version="1", traces=True)


def test_the_exporter_is_the_operator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans would go nowhere, or under the name of an unknown service."""
    exporter = InMemorySpanExporter()

    class Module:
        OTLPSpanExporter = staticmethod(lambda: exporter)

    monkeypatch.setattr("runtime.telemetry.traces.import_module", lambda _: Module)
    for name, expected in (("", "antiphon"), ("mine", "mine")):
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        provider = make_provider("1.2.3")
        provider.get_tracer("x").start_span("one").end()
        assert provider.force_flush()
        resource = exporter.get_finished_spans()[-1].resource
        assert resource.attributes["service.name"] == expected
        assert resource.attributes["service.version"] == "1.2.3"
        exporter.clear()
        provider.shutdown()
        exporter = InMemorySpanExporter()


def test_spans_are_loaded_only_when_asked_for() -> None:
    """Every start would pay for an SDK that is optional, or fail where it is not installed."""
    code = (
        "import sys, runtime.telemetry.metrics as s;"
        "s.make_telemetry(print, version='1', traces=False);"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(metrics.__file__))))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": root}
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
