"""A whole server on virtual time: what an hour of clients does, in milliseconds.

Only the sockets and the model are not real: driver, connection, queue, recorder and machine are.
Every world ends by checking that every slot came back and that no rule of the model's was broken.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
import simplejpeg

from protocol.values.model import Unit
from recorder.read.reader import read
from runtime.model.backends.scripted import Call, ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from tests.sessions.in_memory import (
    Peer,
    World,
    append_frame,
    base64,
    close_frame,
    init_frame,
    on_virtual_time,
    pcm,
    world,
)


def chatty(unit: Unit, seed: int) -> Step:
    """Speak in every unit, slowly enough to be interrupted."""
    speech = Speaks(text=f"word {unit.index} ", pcm=tone(unit.index, seed, samples=24_000))
    return Step(speech=speech, prefill_s=0.05, generate_s=0.8, steps=16)


async def stream(peer: Peer, seconds: int, **fields: object) -> None:
    """Send a second of audio every second."""
    frame = append_frame(**fields)
    for _ in range(seconds):
        if peer.is_over:
            return
        peer.send(frame)
        await anyio.sleep(1)


def all_slots_back(server: World) -> None:
    """Nothing is held any more."""
    assert not server.backend.held_slots
    assert server.server.readiness == "ready"


@pytest.mark.parametrize(("mode", "limit_s"), [("video", 300), ("audio", 600)])
def test_a_session_ends_at_its_limit(mode: str, limit_s: int) -> None:
    """A forgotten client holds a slot for ever."""

    async def body() -> None:
        async with world(ScriptedBackend(context_limit=1 << 20)) as server:
            began_s = anyio.current_time()
            peer = await server.activate(mode)  # type: ignore[arg-type]
            await stream(peer, limit_s + 5)
            await peer.over()
            await server.quiet()
            assert peer.events[-1] == {
                "type": "session.closed",
                "session_id": peer.events[1]["session_id"],
                "reason": "timeout",
            }
            assert peer.closed == (1000, "timeout")
            assert limit_s <= anyio.current_time() - began_s < limit_s + 7
            all_slots_back(server)

    on_virtual_time(body)


def test_the_limit_counts_the_queue_too() -> None:
    """Somebody who waited for most of the limit gets the whole of it again (000)."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), limit_video_s=100, limit_audio_s=60) as server:
            first = await server.activate("audio")
            second = server.connect("video")
            await second.heard("session.queued")
            await first.over()
            assert anyio.current_time() < 61
            await second.heard("session.queue_done")
            second.send(init_frame())
            await second.over()
            assert anyio.current_time() < 101
            assert second.events[-1]["reason"] == "timeout"

    on_virtual_time(body)


def test_a_slot_is_not_held_without_an_init() -> None:
    """A client that says nothing keeps others waiting."""

    async def body() -> None:
        async with world() as server:
            peer = server.connect()
            await peer.over()
            assert peer.kinds == ["session.queue_done"]
            assert peer.closed == (1000, "timeout")
            assert 30 <= anyio.current_time() < 31

    on_virtual_time(body)


def test_the_queue_is_served_in_order() -> None:
    """Somebody overtakes, or is not told where they stand."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), queue_max=2) as server:
            first = await server.activate()
            second = server.connect()
            await second.heard("session.queued")
            third = server.connect()
            queued = await third.heard("session.queued")
            assert (queued["position"], queued["queue_length"]) == (2, 2)
            assert set(queued) == {
                "type", "position", "estimated_wait_s", "ticket_id", "queue_length",
            }  # fmt: skip
            refused = server.connect()
            await refused.over()
            assert refused.kinds == ["error"]
            assert refused.events[0]["error"]["code"] == "queue_full"
            assert refused.closed == (1013, "queue_full")

            first.send(close_frame())
            await second.heard("session.queue_done")
            moved = await third.heard("session.queue_update")
            assert (moved["position"], moved["ticket_id"]) == (1, queued["ticket_id"])
            assert "session.queue_done" not in third.kinds

            second.vanish()
            await third.heard("session.queue_done")

    on_virtual_time(body)


def test_the_estimate_is_told_at_most_every_three_seconds() -> None:
    """A waiting client is flooded with updates."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1)) as server:
            await server.activate()
            waiting = server.connect()
            await anyio.sleep(20)
            updates = waiting.all("session.queue_update")
            assert 4 <= len(updates) <= 7
            waits = [update["estimated_wait_s"] for update in updates]
            assert waits == sorted(waits, reverse=True)

    on_virtual_time(body)


def test_what_is_said_too_early_is_refused_but_for_the_opening() -> None:
    """Audio of a client that did not wait turns up in its session later."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1)) as server:
            first = await server.activate()
            early = server.connect()
            await early.heard("session.queued")
            early.send(append_frame(), init_frame(), '{"type": "nonsense"}', init_frame())
            await early.heard("error", 3)
            first.vanish()
            await early.heard("session.created")
            codes = [error["error"]["code"] for error in early.all("error")]
            assert codes == ["not_ready", "not_ready", "invalid_event"]
            await anyio.sleep(5)
            assert not early.all("listen")

    on_virtual_time(body)


def test_a_full_context_ends_the_session() -> None:
    """The model is fed beyond what it can hold (B10)."""

    async def body() -> None:
        async with world(ScriptedBackend(context_limit=200)) as server:
            peer = await server.activate()
            await stream(peer, 60)
            await peer.over()
            assert peer.events[-1]["reason"] == "context_full"
            assert peer.closed == (1000, "context_full")
            lengths = [listen["metrics"]["kv_cache_length"] for listen in peer.all("listen")]
            assert max(lengths) <= 200

    on_virtual_time(body)


def test_a_reader_that_stalls_is_cut_off_and_its_slot_freed() -> None:
    """One client that stops reading takes a slot with it."""

    async def body() -> None:
        async with world(ScriptedBackend(chatty, slots=1)) as server:
            peer = await server.activate()
            peer.stall()
            for _ in range(20):
                peer.send(append_frame())
                await anyio.sleep(1)
            assert peer.aborted
            all_slots_back(server)
            await server.activate()

    on_virtual_time(body)


async def in_queue(server: World) -> Peer:
    """A client that waits."""
    await server.activate()
    peer = server.connect()
    await peer.heard("session.queued")
    return peer


async def before_init(server: World) -> Peer:
    """A client that holds a slot and has said nothing."""
    peer = server.connect()
    await peer.heard("session.queue_done")
    return peer


async def while_opening(server: World) -> Peer:
    """A client whose model is being opened."""
    peer = await before_init(server)
    peer.send(init_frame())
    await anyio.sleep(1)
    return peer


async def idle(server: World) -> Peer:
    """A client that has a session and sends nothing."""
    return await server.activate()


async def in_prefill(server: World) -> Peer:
    """A client whose first unit has just begun."""
    peer = await server.activate()
    peer.send(append_frame())
    await anyio.sleep(0.01)
    return peer


async def in_generate(server: World) -> Peer:
    """A client whose model is about to speak."""
    peer = await server.activate()
    peer.send(append_frame())
    await anyio.sleep(0.4)
    return peer


async def in_finalize(server: World) -> Peer:
    """A client whose unit was sent and is being finalized, with another one waiting."""
    peer = await server.activate()
    peer.send(append_frame(2))
    await peer.heard("audio")
    return peer


PLACES = [in_queue, before_init, while_opening, idle, in_prefill, in_generate, in_finalize]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("way", ["vanish", "close", "drain"])
def test_leaving_at_any_moment_loses_no_slot(
    place: Callable[[World], Awaitable[Peer]], way: str, tmp_path: Path
) -> None:
    """A slot leaks, and after as many bad moments as there are slots nobody is served (B5)."""

    async def body() -> None:
        backend = ScriptedBackend(chatty, slots=1, opening=lambda _: Call(duration_s=3))
        async with world(backend, record_to=tmp_path) as server:
            peer = await place(server)
            if way == "vanish":
                peer.vanish()
            elif way == "close":
                peer.send(close_frame("enough"))
            else:
                server.server.drain()
            await peer.over()
            if way != "drain":
                await anyio.sleep(1)
        assert not backend.held_slots
        if way == "close":
            created = bool(peer.all("session.created"))
            assert peer.closed == (1000, "stopped")
            assert (peer.events[-1].get("reason") == "enough") is created
        if way == "drain":
            assert peer.closed == (1012, "server_shutdown")

    on_virtual_time(body)
    for path in tmp_path.iterdir():
        assert [record.kind for record in read(path)][-1] == "fin"


def test_force_listen_cuts_the_unit_in_flight() -> None:
    """The model talks on after it was told to stop (B6)."""

    async def body() -> None:
        async with world(ScriptedBackend(chatty)) as server:
            peer = await server.activate()
            peer.send(append_frame())
            await anyio.sleep(0.4)
            at_s = anyio.current_time()
            body = json.loads(append_frame(0.5))
            body["input"]["force_listen"] = True
            peer.send(json.dumps(body))
            await peer.heard("listen")
            assert anyio.current_time() - at_s < 0.1
            assert peer.kinds[2:] == ["listen"]
            peer.send(append_frame(0.5))  # completes the second that force_listen came with
            await peer.heard("listen", 2)
            peer.send(append_frame())
            await peer.heard("audio")

    on_virtual_time(body)


def test_too_much_at_once_drops_the_oldest() -> None:
    """A client that was held up in a tunnel is answered about what it said a minute ago (B7)."""

    async def body() -> None:
        async with world(ScriptedBackend(chatty)) as server:
            peer = await server.activate()
            peer.send(append_frame(9.5))
            await peer.heard("audio", 6)
            await anyio.sleep(5)
            assert len(peer.all("audio")) == 6
            assert peer.events[-1]["metrics"]["dropped_units"] == 3
            assert not peer.all("error")

    on_virtual_time(body)


def test_a_failing_unit_is_undone_and_three_in_a_row_end_the_session() -> None:
    """A passing fault ends the call, or a broken model goes on talking (B3)."""

    def failing(unit: Unit, seed: int) -> Step:
        return Step(fault="fail") if unit.index in (1, 3, 4, 5) else Step()

    async def body() -> None:
        async with world(ScriptedBackend(failing)) as server:
            peer = await server.activate()
            await stream(peer, 10)
            await peer.over()
            assert peer.kinds[2:] == [
                "listen", "error", "listen", "error", "error", "session.closed",
            ]  # fmt: skip
            assert peer.events[-1]["reason"] == "backend_error"
            assert peer.closed == (1011, "backend_error")
            assert {error["error"]["code"] for error in peer.all("error")} == {"inference_error"}

    on_virtual_time(body)


def test_a_model_that_hangs_costs_its_session_and_is_replaced() -> None:
    """One hung call stops the whole server (B4)."""

    def hanging(unit: Unit, seed: int) -> Step:
        return Step(fault="hang") if seed == 1 else Step()

    async def load(_: int) -> ScriptedBackend:
        await anyio.sleep(20)
        return ScriptedBackend(hanging, slots=1)

    async def body() -> None:
        backend = ScriptedBackend(hanging, slots=1)
        async with world(backend, load=load, limit_video_s=60) as server:
            peer = await server.activate()
            waiting = server.connect("audio")
            await waiting.heard("session.queued")
            peer.send(append_frame())
            await peer.over()
            assert peer.events[-1]["reason"] == "backend_error"
            await anyio.sleep(11)
            assert server.server.readiness == "ready"
            await waiting.heard("session.queue_done")
            waiting.send(init_frame())
            await waiting.heard("session.created")
            waiting.send(append_frame())
            await waiting.heard("listen")
            assert 60 <= anyio.current_time() < 62
            third = server.connect()
            await third.heard("session.queued")

    on_virtual_time(body)


def test_frames_are_decoded_before_their_unit_and_bad_ones_left_out() -> None:
    """A damaged picture takes its second of sound with it, or reaches the model."""
    good = simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8))
    torn = good[: len(good) // 2]
    seen: list[tuple[bytes, ...]] = []

    def watching(unit: Unit, seed: int) -> Step:
        seen.append(unit.frames)
        return Step()

    async def body() -> None:
        async with world(ScriptedBackend(watching)) as server:
            peer = await server.activate()
            body = json.loads(append_frame())
            body["input"]["video_frames"] = [base64(torn), base64(good)]
            peer.send(json.dumps(body))
            await peer.heard("listen")
            assert peer.all("error")[0]["error"]["code"] == "invalid_payload"
            assert seen == [(good,)]

    on_virtual_time(body)


def test_reference_audio_that_is_no_wav_leaves_the_client_a_second_try() -> None:
    """One bad upload costs the client its place."""

    async def body() -> None:
        async with world() as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame(voice={"ref_audio_base64": base64(b"RIFF....WAVEjunk")}))
            error = await peer.heard("error")
            assert error["error"]["code"] == "invalid_payload"
            peer.send(init_frame(voice={"ref_audio_base64": base64(pcm(1))}))
            await peer.heard("session.created")

    on_virtual_time(body)


def test_sessions_do_not_touch_each_other() -> None:
    """One caller hears what another was told (B8)."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=4)) as server:
            peers = [await server.activate() for _ in range(4)]
            async with anyio.create_task_group() as tasks:
                for peer in peers:
                    tasks.start_soon(stream, peer, 20)
            for peer in peers:
                own = {event["session_id"] for event in peer.events if "session_id" in event}
                assert len(own) == 1
            voices = [tuple(audio["audio"] for audio in peer.all("audio")) for peer in peers]
            assert len(set(voices)) == 4

    on_virtual_time(body)
