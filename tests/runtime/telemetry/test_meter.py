"""What is measured of sessions: by sessions whose figures are known, and by their own logs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import anyio
import numpy as np
import pytest
import simplejpeg
from hypothesis import given

from protocol.machine.session import Session
from protocol.values.errors import ErrorCode
from protocol.values.events import Event, UnitDone
from protocol.values.limits import Mode
from protocol.values.messages import Closed, ErrorReport, ServerMessage
from protocol.values.model import Unit
from protocol.wire.dialects import DIALECTS, OPENING
from runtime.model.backends.scripted import Call, ScriptedBackend, Step
from runtime.model.backends.scripted_chat import Answer
from runtime.telemetry.catalogue import BROKEN_OFF
from runtime.telemetry.meters import ERROR_BEGINS, error_code
from runtime.telemetry.metrics import Metrics
from tests.generated.clients import (
    IDENTITIES_A_WORLD,
    SeededDice,
    client_script,
    play,
    scripted_backend,
)
from tests.golden.logs import FOLDER
from tests.sessions.in_memory import World, append_frame, base64, close_frame, on_virtual_time
from tests.sessions.telemetry import Checked, Checking, Figures, is_whole, meter_log, watched
from tests.simulation.test_simulation import chatty, stream
from tests.simulation.test_simulation_chat import ask_frame, chunk_frame, prepare_frame
from tests.strategies.messages import server_messages

US = 1e-6


def figures_of(
    scene: Callable[[World], Awaitable[None]],
    backend: ScriptedBackend | None = None,
    **settings: Any,
) -> Figures:
    """Play a scene to its end on virtual time, and read what was measured of it."""
    metrics = Metrics()

    async def body() -> None:
        async with watched(metrics, backend, **settings) as server:
            await scene(server)

    on_virtual_time(body)
    return Figures(metrics)


# -- sessions whose figures are known -------------------------------------------------------------


def test_units_are_counted_and_timed() -> None:
    """An operator would see a model that is faster, slower or more silent than it is."""

    async def scene(server: World) -> None:
        peer = await server.activate("audio")
        await stream(peer, 10)
        peer.send(close_frame())
        await peer.over()

    seen = figures_of(scene)
    assert seen("units_total", mode="audio", outcome="listen") == 6
    assert seen("units_total", mode="audio", outcome="speech") == 4
    assert seen.all_of("units_total") == 10
    wall_s = 6 * 0.07 + 4 * 0.48
    assert seen("unit_seconds_sum", mode="audio") == pytest.approx(wall_s, abs=20 * US)
    assert seen("unit_answer_seconds_sum", mode="audio") == pytest.approx(wall_s, abs=20 * US)
    assert seen("unit_answer_seconds_count", mode="audio") == 10
    assert seen("unit_stage_seconds_sum", stage="prefill") == pytest.approx(6 * 0.05 + 4 * 0.08)
    assert seen("unit_stage_seconds_sum", stage="generate") == pytest.approx(6 * 0.02 + 4 * 0.4)
    assert seen("unit_stage_seconds_sum", stage="finalize") == pytest.approx(10 * 0.037)
    assert seen("unit_stage_seconds_count", stage="token2wav") == 4
    assert seen("unit_wait_seconds_sum", mode="audio") == 0
    assert seen("units_late_total", mode="audio") == 0
    assert seen("speech_seconds_total", mode="audio") == 2 * (1 + 0.75)
    assert seen("sessions_ended_total", mode="audio", reason="client") == 1
    assert seen("session_seconds_sum", mode="audio") == pytest.approx(10, abs=0.01)
    assert seen("frames_received_total", mode="audio") == 12
    assert seen("queue_wait_seconds_sum", mode="audio") == 0


def test_a_burst_waits_is_late_and_loses_its_oldest() -> None:
    """A server that falls behind would look as if it kept up."""

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.send(append_frame(9.5))
        await peer.heard("audio", 6)
        await anyio.sleep(1)

    seen = figures_of(scene, ScriptedBackend(chatty))
    assert seen("units_dropped_total", mode="video") == 3
    assert seen("units_total", mode="video", outcome="speech") == 6
    round_s = 0.05 + 0.8 + 0.037
    waited_s = round_s * (1 + 2 + 3 + 4 + 5)
    assert seen("unit_wait_seconds_sum", mode="video") == pytest.approx(waited_s, abs=30 * US)
    assert seen("unit_barrier_seconds_sum", mode="video") == pytest.approx(5 * 0.037, abs=30 * US)
    assert seen("units_late_total", mode="video") == 5
    assert seen("unit_answer_seconds_bucket", mode="video", le="1.0") == 1


def test_a_unit_that_becomes_whole_amid_a_finalize_waits_for_the_rest_of_it() -> None:
    """Deferring the finalize would look free, or dearer than it is."""

    def script(unit: Unit, seed: int) -> Step:
        return Step(prefill_s=0.4, generate_s=0.5, finalize=Call(duration_s=0.3))

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.send(append_frame())
        await anyio.sleep(1.05)  # 0.15 s into its finalize
        peer.send(append_frame())
        await peer.heard("listen", 2)

    seen = figures_of(scene, ScriptedBackend(script))
    assert seen("unit_barrier_seconds_sum", mode="video") == pytest.approx(0.15, abs=5 * US)
    assert seen("unit_wait_seconds_sum", mode="video") == pytest.approx(0.15, abs=5 * US)
    assert seen("units_late_total", mode="video") == 1


def test_a_pause_is_a_wait_and_not_the_barrier_s() -> None:
    """The model would be blamed for what a client asked for."""

    async def scene(server: World) -> None:
        peer = server.connect("audio", endpoint="duplex", label="adx_1")
        await peer.heard("queue_done")
        peer.send(prepare_frame())
        await peer.heard("prepared")
        peer.send(chunk_frame(2))
        peer.send('{"type": "pause"}')
        await anyio.sleep(5)
        peer.send('{"type": "resume"}')
        await peer.heard("result", 2)

    seen = figures_of(scene)
    assert seen("unit_wait_seconds_sum", mode="audio") == pytest.approx(5, abs=0.01)
    assert seen("unit_barrier_seconds_sum", mode="audio") == pytest.approx(0.037, abs=5 * US)


def test_an_answer_that_waits_for_its_finalize_is_timed_until_then() -> None:
    """What a client waits for would be measured without its last part (B2, not deferred)."""

    async def scene(server: World) -> None:
        peer = server.connect("audio", endpoint="duplex", label="adx_1")
        await peer.heard("queue_done")
        peer.send(prepare_frame(deferred_finalize=False))
        await peer.heard("prepared")
        peer.send(chunk_frame())
        await peer.heard("result")

    seen = figures_of(scene)
    assert seen("unit_seconds_sum", mode="audio") == pytest.approx(0.07, abs=5 * US)
    assert seen("unit_answer_seconds_sum", mode="audio") == pytest.approx(0.107, abs=5 * US)


def test_the_queue_is_timed_by_mode() -> None:
    """An operator would not know how long people wait."""

    async def scene(server: World) -> None:
        first = await server.activate("audio")
        second = server.connect("video")
        third = server.connect("video")
        await third.heard("session.queued")
        await anyio.sleep(7)
        third.vanish()
        first.vanish()
        await second.heard("session.queue_done")
        refused = server.connect("video")
        await refused.heard("session.queued")
        second.vanish()
        await refused.heard("session.queue_done")

    seen = figures_of(scene, ScriptedBackend(slots=1))
    assert seen("queue_wait_seconds_sum", mode="video") == pytest.approx(7, abs=0.01)
    assert seen("queue_wait_seconds_count", mode="video") == 2
    assert seen("queue_wait_seconds_count", mode="audio") == 1
    assert seen("queue_left_total", mode="video", how="left") == 1
    assert seen("slot_seconds_sum", mode="audio") == pytest.approx(7, abs=0.01)


def test_refusals_are_counted_by_their_code() -> None:
    """Somebody is turned away, and nobody knows."""

    async def scene(server: World) -> None:
        await server.activate()
        refused = server.connect()
        await refused.over()

    seen = figures_of(scene, ScriptedBackend(slots=1), queue_max=0)
    assert seen("errors_total", code="worker_busy") == 1
    assert seen.all_of("errors_total") == 1
    assert seen("queue_left_total", mode="video", how="refused") == 1
    assert seen("sessions_ended_total", mode="video", reason="refused") == 1


def test_speech_over_the_model_s_is_measured() -> None:
    """An operator could not tell that noise interrupts the model."""
    metrics = Metrics()
    meter_log(FOLDER / "v1-barge-in.session.zst", metrics)
    seen = Figures(metrics)
    assert seen("overlap_seconds_count", mode="audio") == 1, "the first speech began in silence"
    assert seen("overlap_seconds_sum", mode="audio") == 2.5, "two seconds, and half of silence"


def test_an_interrupt_is_no_end() -> None:
    """Every session that ends amid a unit would count as a client that interrupts."""

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.send(append_frame())
        await anyio.sleep(0.4)
        peer.send(append_frame(0.5, force_listen=True))
        await peer.heard("listen")
        peer.send(append_frame(0.5))
        await peer.heard("listen", 2)
        peer.send(append_frame())
        await anyio.sleep(0.4)
        peer.vanish()
        await server.quiet()

    seen = figures_of(scene, ScriptedBackend(chatty))
    assert seen("interrupts_total", mode="video") == 1
    assert seen("units_total", mode="video", outcome="cut") == 1
    assert seen("units_total", mode="video", outcome="listen") == 1
    assert seen("units_total", mode="video", outcome="ended") == 1
    assert seen("unit_answer_seconds_count", mode="video") == 2
    assert seen("sessions_ended_total", mode="video", reason="peer_gone") == 1


def test_failures_and_their_undoing_are_counted() -> None:
    """A model that stumbles would look well until it falls."""

    def failing(unit: Unit, seed: int) -> Step:
        return Step(fault="fail") if unit.index in (1, 3, 4, 5) else Step()

    async def scene(server: World) -> None:
        peer = await server.activate()
        await stream(peer, 10)
        await peer.over()

    seen = figures_of(scene, ScriptedBackend(failing))
    assert seen("units_total", mode="video", outcome="failed") == 4
    assert seen("rollbacks_total", outcome="done") == 3
    assert seen("errors_total", code="inference_error") == 3
    assert seen("sessions_ended_total", mode="video", reason="backend_error") == 1


def test_a_unit_that_hangs_has_an_outcome_too() -> None:
    """Units would be begun and never accounted for."""

    def hanging(unit: Unit, seed: int) -> Step:
        return Step(fault="hang")

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.send(append_frame())
        await peer.over()
        await server.quiet()

    seen = figures_of(scene, ScriptedBackend(hanging, slots=2), limit_video_s=20)
    assert seen("units_total", mode="video", outcome="ended") == 1
    assert seen.all_of("units_total") == 1
    assert seen("unit_seconds_count", mode="video") == 0


def test_media_is_counted_by_kind_and_fate() -> None:
    """Clients that send broken pictures could not be told from servers that break them."""
    good = simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8))

    async def scene(server: World) -> None:
        peer = await server.activate()
        frames = [base64(good), base64(good[: len(good) // 2]), base64(good)]
        peer.send(append_frame(video_frames=frames))
        await peer.heard("listen")

    seen = figures_of(scene)
    assert seen("media_total", kind="jpeg", outcome="decoded") == 2
    assert seen("media_total", kind="jpeg", outcome="rejected") == 1
    assert seen("media_seconds_count", kind="jpeg") == 3
    assert seen("errors_total", code="invalid_payload") == 1
    assert seen("tokens_total", kind="picture") == 2 * 64


def test_turns_of_chat_are_counted_and_timed() -> None:
    """Chat would be a blind spot."""

    def answer(turn: Any) -> Answer:
        fault = "fail" if turn.index == 1 else None
        return Answer(tokens=("a ",) * 10, prefill_s=0.5, token_s=0.1, fault=fault)

    async def scene(server: World) -> None:
        first, second = await server.activate_chat(), await server.activate_chat()
        first.send(ask_frame("one"))
        await first.heard("text")
        second.send(ask_frame("two"))
        await first.heard("response.done")
        first.send(ask_frame("three"))
        await first.heard("error")
        await second.heard("response.done")

    seen = figures_of(scene, ScriptedBackend(chat=answer, slots=1))
    assert seen("turns_total", outcome="turn_end") == 2
    assert seen("turns_total", outcome="failed") == 1
    assert seen.all_of("turns_total") == 3
    assert seen("turn_stage_seconds_count", stage="end") == 2
    assert seen("turn_stage_seconds_sum", stage="end") == pytest.approx(2 * 1.5, abs=10 * US)
    assert seen("turn_stage_seconds_sum", stage="prefill") == pytest.approx(3 * 0.5, abs=20 * US)
    assert seen("turn_stage_seconds_sum", stage="first") == pytest.approx(2 * 0.6, abs=20 * US)
    assert seen("queue_wait_seconds_count", mode="chat") == 3
    assert seen("queue_wait_seconds_sum", mode="chat") > 0.8
    assert seen("tokens_total", kind="text") >= 20


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_a_turn_that_nobody_waits_for_has_ended(how: str) -> None:
    """Clients that leave would look like a model that ends its turns, or fails."""

    def answer(turn: Any) -> Answer:
        return Answer(tokens=("a ",) * 10, token_s=0.1)

    async def scene(server: World) -> None:
        peer = await server.activate_chat()
        peer.send(ask_frame("one"))
        await peer.heard("text", 3)
        if how == "close":
            peer.send(close_frame())
        else:
            peer.vanish()
        await server.quiet()

    seen = figures_of(scene, ScriptedBackend(chat=answer))
    assert seen("turns_total", outcome="ended") == 1
    assert seen.all_of("turns_total") == 1
    assert seen("turn_stage_seconds_count", stage="first") == 1


def test_a_deleted_ticket_is_counted_as_such() -> None:
    """An operator's own act would look like impatient callers."""

    async def scene(server: World) -> None:
        await server.activate()
        peer = server.connect("audio")
        queued = await peer.heard("session.queued")
        assert server.server.admission.cancel(queued["ticket_id"])
        await peer.over()

    seen = figures_of(scene, ScriptedBackend(slots=1))
    assert seen("queue_left_total", mode="audio", how="cancelled") == 1
    assert seen.all_of("queue_left_total") == 1
    assert seen("sessions_ended_total", mode="audio", reason="cancelled") == 1


def test_units_that_come_one_by_one_are_timed_one_by_one() -> None:
    """After a drop each unit would be given the time of the one before it."""

    def slow(unit: Unit, seed: int) -> Step:
        return Step(prefill_s=3, generate_s=0, finalize=Call())

    async def scene(server: World) -> None:
        peer = await server.activate()
        for _ in range(9):
            peer.send(append_frame())
            await anyio.sleep(0.25)
        await peer.heard("listen", 6)

    seen = figures_of(scene, ScriptedBackend(slow))
    assert seen("units_dropped_total", mode="video") == 3
    # One runs at once. Of the eight that follow it, at 0.25 s and so on, the oldest three go.
    waits_s = [3 * turn - 0.25 * (turn + 3) for turn in range(1, 6)]
    assert seen("unit_wait_seconds_sum", mode="video") == pytest.approx(sum(waits_s), abs=0.001)


def test_a_result_that_comes_twice_counts_once() -> None:
    """What the machine takes for stale would be measured."""
    metrics = Metrics()
    seen: list[tuple[Any, Any, Any]] = []

    class Twice(Checked):
        def saw(self, event: Event, effects: Any, session: Session) -> None:
            super().saw(event, effects, session)
            if isinstance(event, UnitDone):
                super().saw(event, (), session)
                seen.append((event, effects, session))

    class Telemetry:
        def watch(self, opened: Any, owner: str) -> Twice:
            return Twice(metrics.watch(opened, owner))

    async def body() -> None:
        async with watched(Telemetry()) as server:
            peer = await server.activate()
            await stream(peer, 3)

    on_virtual_time(body)
    assert len(seen) == 3
    assert Figures(metrics).all_of("units_total") == 3
    assert Figures(metrics)("unit_answer_seconds_count", mode="video") == 3


def test_a_session_s_tokens_are_known_while_it_runs_and_gone_with_it() -> None:
    """The cache would seem full of sessions that are over."""
    metrics = Metrics()
    held = []

    async def body() -> None:
        async with watched(metrics) as server:
            peer = await server.activate()
            held.append(metrics.kv_tokens("rec-000001"))
            await stream(peer, 2)
            held.append(metrics.kv_tokens("rec-000001"))
            peer.vanish()
            await server.quiet()
            held.append(metrics.kv_tokens("rec-000001"))

    on_virtual_time(body)
    prompt, two_units, gone = held
    assert prompt == 12
    assert two_units == prompt + 2 * (11 + 2)
    assert gone == 0
    assert Figures(metrics)("session_kv_tokens_sum", mode="video") == two_units


def test_bytes_are_counted_as_they_cross_the_wire() -> None:
    """Traffic in other scripts would be counted by characters."""
    metrics = Metrics()
    heard = []
    question = ask_frame("你好").replace("\\u4f60", "你")

    async def body() -> None:
        async with watched(metrics) as server:
            peer = await server.activate_chat()
            peer.send(question)
            await peer.heard("response.done")
            peer.send(None)
            await peer.over()
            heard.extend(peer.frames)

    on_virtual_time(body)
    seen = Figures(metrics)
    init = '{"type": "session.init", "payload": {}}'
    assert not all(frame.isascii() for frame in (question, *heard))
    received = len(init) + len(question.encode())
    assert seen("received_bytes_total", mode="chat") == received
    assert seen("frames_received_total", mode="chat") == 3
    assert seen("sent_bytes_total", mode="chat") == sum(len(frame.encode()) for frame in heard)


# -- errors, by their frames ----------------------------------------------------------------------

ALL_DIALECTS = [*DIALECTS.values(), OPENING]


@pytest.mark.parametrize("dialect", ALL_DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("code", ErrorCode)
def test_the_code_of_an_error_is_read_in_every_dialect(dialect: Any, code: ErrorCode) -> None:
    """Errors of one protocol would not be counted, or break the meter."""
    (frame,) = dialect.encode(ErrorReport(code=code, message='a "code": "x" in words'))
    assert frame.startswith(ERROR_BEGINS)
    assert error_code(frame) == code.value


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("name", DIALECTS)
def test_no_other_frame_begins_as_an_error(name: str, mode: Mode) -> None:
    """Speech would be taken for errors, and parsed for a code that is not there."""

    @given(server_messages(name, mode))
    def hold(message: ServerMessage) -> None:
        for frame in DIALECTS[name].encode(message):
            if frame.startswith(ERROR_BEGINS):
                # 002 and 003 tell an end so.
                ends = {message.reason} if isinstance(message, Closed) else set()
                assert error_code(frame) in {*ErrorCode, *ends}

    hold()


# -- whatever a client does -----------------------------------------------------------------------


@pytest.mark.parametrize("number", range(60))
def test_a_log_measures_as_its_session_did(number: int, tmp_path: Path) -> None:
    """What the metrics say of yesterday could not be found again in yesterday's recordings."""
    script = client_script(SeededDice("client", number), audio_s_max=10)
    live = Checking(Metrics())

    async def body() -> None:
        limits = {"limit_video_s": script.limit_s, "limit_audio_s": script.limit_s}
        backend = scripted_backend(number)
        async with watched(live, backend, record_to=tmp_path, **limits) as server:
            server.server._identities.drawn = number * IDENTITIES_A_WORLD
            await play(server, script)

    on_virtual_time(body)
    assert [checked.wrong for checked in live.seen] == [[]] * len(live.seen)
    logged = Metrics()
    for log in sorted(tmp_path.iterdir()):
        meter_log(log, logged)
    assert _connections(logged) == _connections(live.metrics)
    sessions = [checked.session for checked in live.seen]
    seen = Figures(live.metrics)
    for name, counted in (
        ("units_total", "units"),
        ("units_dropped_total", "units_dropped"),
        ("frames_sent_total", "frames_sent"),
    ):
        assert seen.all_of(name) == sum(session.counts[counted] for session in sessions if session)
    assert seen.all_of("sessions_ended_total") == len(sessions)


def _connections(metrics: Metrics) -> list[str]:
    """Write the metrics, sums rounded: sessions are added up in another order."""
    lines = []
    for line in metrics.text()[0].decode().splitlines():
        name, _, value = line.rpartition(" ")
        lines.append(f"{name} {float(value):.9g}" if not line.startswith("#") else line)
    return lines


def test_a_session_that_is_broken_off_is_counted() -> None:
    """A bug that ends sessions would leave no trace in the figures."""

    async def scene(server: World) -> None:
        peer = await server.activate()
        peer.break_down()
        await server.quiet()

    seen = figures_of(scene)
    assert seen("sessions_ended_total", mode="video", reason=BROKEN_OFF) == 1


@pytest.mark.costly
@pytest.mark.parametrize("watched_from", [0.3, 0.5, 0.6, 0.8])
def test_a_session_can_be_measured_from_any_point(
    watched_from: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Sessions that went on after a restart had no figures: units waited that no one had seen."""
    folder = Path(__file__).parents[3] / "fixtures" / "logs"
    metrics = Metrics()
    for log in filter(is_whole, sorted(folder.glob("*.session.zst"))[::2]):
        meter_log(log, metrics, watched_from)
    assert Figures(metrics).all_of("sessions_ended_total") > 3
    assert not caplog.records


def test_the_golden_logs_can_be_measured() -> None:
    """Recordings of old could not be told of in figures."""
    metrics = Metrics()
    folder = Path(__file__).parents[3] / "fixtures" / "logs"
    logs = [log for log in sorted(folder.glob("*.session.zst")) if is_whole(log)]
    counted = [meter_log(log, metrics).counts for log in logs]
    seen = Figures(metrics)
    assert seen.all_of("sessions_ended_total") == len(logs) > 3
    assert seen.all_of("units_total") == sum(counts["units"] for counts in counted) > 0
    assert 0 < seen.all_of("turns_total") <= sum(counts.get("turns", 0) for counts in counted)
