"""Chats, single requests and pauses on a whole server in memory, on virtual time.

The real driver, queue, connection and recorder around a scripted backend; only the sockets and the
clock are not real.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.values import effects as ef
from protocol.values.model import Text, Turn
from recorder.read.reader import LogReader
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from runtime.media.decoder import Client
from runtime.media.values import Decoded, MediaError
from runtime.model.backends.scripted import Call, ScriptedBackend
from runtime.model.backends.scripted_chat import Answer
from tests.golden.stage import picture
from tests.project.sampling import sample
from tests.sessions.in_memory import Peer, World, base64, close_frame, on_virtual_time, pcm, world

TOKEN_S = 0.1


def echo(turn: Turn) -> Answer:
    """Answer with the user's own words, ten times, so that answers can be told apart."""
    said = "".join(part.text for part in turn.messages[-1].content if isinstance(part, Text))
    return Answer(tokens=(f"{said} ",) * 10, token_s=TOKEN_S)


def ask_frame(text: str, **fields: Any) -> str:
    """Write a turn of `realtime`."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"type": "input.append", "input": {"messages": messages, **fields}})


def request_frame(text: str, **fields: Any) -> str:
    """Write a request of `legacy-chat`."""
    body = {"messages": [{"role": "user", "content": text}], "tts": {"enabled": False}, **fields}
    return json.dumps(body)


def prepare_frame(**fields: Any) -> str:
    """Write a `prepare` of `legacy-duplex`."""
    return json.dumps({"type": "prepare", "system_prompt": "be brief", **fields})


def chunk_frame(seconds: float = 1.0) -> str:
    """Write an `audio_chunk`."""
    return json.dumps({"type": "audio_chunk", "audio_base64": base64(pcm(seconds))})


async def chat(server: World) -> Peer:
    """Open a chat and bring it to ACTIVE."""
    return await server.activate_chat()


def test_twenty_chats_answer_each_to_its_own() -> None:
    """One user would read another's answer, or wait for ever."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo, slots=3)) as server:
            peers = [await chat(server) for _ in range(20)]
            for number, peer in enumerate(peers):
                peer.send(ask_frame(f"number {number}"))
            for number, peer in enumerate(peers):
                done = await peer.heard("response.done")
                assert done["text"] == f"number {number} " * 10
                assert "".join(it["text"] for it in peer.all("text")) == done["text"]
            assert sum("session.queued" in peer.kinds for peer in peers) == 17

    on_virtual_time(body)


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_a_cancelled_turn_frees_its_slot_within_a_token(how: str) -> None:
    """The next in line would wait for words that nobody reads."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo, slots=1)) as server:
            first, second = await chat(server), await chat(server)
            first.send(ask_frame("one"))
            await first.heard("text", 3)
            second.send(ask_frame("two"))
            await second.heard("session.queued")
            if how == "close":
                first.send(close_frame())
            else:
                first.vanish()
            left_s = anyio.current_time()
            await second.heard("text")
            spent_s = anyio.current_time() - left_s
            assert spent_s <= TOKEN_S + 0.02 + TOKEN_S + 0.001  # its token, prefill, our token
            assert (await second.heard("response.done"))["reason"] == "turn_end"

    on_virtual_time(body)


def test_turns_and_duplex_sessions_wait_in_one_queue() -> None:
    """A chat would overtake a caller who came before it, or never get a slot."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo, slots=1)) as server:
            caller = await server.activate("audio")
            talker = await chat(server)
            talker.send(ask_frame("hello"))
            assert (await talker.heard("session.queued"))["position"] == 1
            later = server.connect("audio")
            assert (await later.heard("session.queued"))["position"] == 2
            caller.send(close_frame())
            await talker.heard("response.done")
            await later.heard("session.queue_done")
            assert talker.kinds.count("session.queue_done") == 1

    on_virtual_time(body)


def test_too_many_chats_are_turned_away() -> None:
    """Idle browser tabs would take all memory."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo), chats_max=2) as server:
            peers = [await chat(server) for _ in range(2)]
            third = server.connect("chat")
            await third.over()
            assert third.events[-1]["error"]["code"] == "queue_full"
            assert third.closed == (1013, "queue_full")
            peers[0].send(close_frame())
            await peers[0].over()
            await server.activate_chat()

    on_virtual_time(body)


def test_a_drain_ends_turns_and_requests_with_what_there_is() -> None:
    """A restart would leave clients amid a sentence without a word."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo)) as server:
            talker = await chat(server)
            talker.send(ask_frame("hello"))
            request = server.connect("chat", endpoint="chat")
            request.send(request_frame("hello"))
            await talker.heard("text", 2)
            await request.heard("chunk")
            server.server.drain()
            await talker.over()
            await request.over()
            assert talker.events[-2]["reason"] == "interrupted"
            assert talker.events[-1]["reason"] == "server_shutdown"
            assert talker.closed is not None
            assert talker.closed[0] == 1012
            assert request.events[-1]["code"] == "service_unavailable"
            assert request.closed == (1013, "service_unavailable")

    on_virtual_time(body)


@pytest.mark.parametrize("seed", range(8))
def test_a_client_that_leaves_as_its_slot_comes_costs_no_slot(seed: int) -> None:
    """The turn would run on for nobody, and its slot be condemned for it."""

    async def body() -> None:
        backend = ScriptedBackend(chat=lambda _: Answer(tokens=("word ",) * 400), slots=1)
        async with world(backend, cleanup_wait_s=2) as server:
            first, second = await chat(server), await chat(server)
            first.send(ask_frame("one"))
            await first.heard("text")
            second.send(ask_frame("two"))
            await second.heard("session.queued")
            first.send(close_frame())
            await first.heard("session.closed")
            second.vanish()
            await anyio.sleep(5)
            third = await chat(server)
            third.send(ask_frame("three"))
            await third.heard("text")

    on_virtual_time(body, seed=seed)


def test_a_long_answer_at_once_reaches_a_slow_reader() -> None:
    """Two minutes of speech in one frame would be dropped for its size."""

    async def body() -> None:
        answer = Answer(tokens=("word ",) * 24, samples=24_000 * 5)
        async with world(ScriptedBackend(chat=lambda _: answer)) as server:
            request = server.connect("chat", endpoint="chat")
            request.send(request_frame("hello", streaming=False, tts={"enabled": True}))
            done = await request.heard("done")
            assert len(done["audio_data"]) > 15_000_000
            await request.over()
            assert request.closed == (1000, "answered")

    on_virtual_time(body)


def test_what_is_decoded_for_a_turn_that_was_refused_is_given_up() -> None:
    """Videos that nobody waits for would hold up those of others for minutes."""
    ended: list[str] = []

    async def decode(effect: ef.DecodeMedia, _client: Client) -> Decoded:
        if effect.kind == "image":
            raise MediaError("the image is damaged")
        try:
            await anyio.sleep(1000)
        except anyio.get_cancelled_exc_class():
            ended.append(effect.kind)
            raise
        return Decoded()

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo)) as server:
            server.server._decode_media = decode
            talker = await chat(server)
            video = {"type": "video", "data": base64(b"\0\0\0\x18ftypisom" + bytes(400))}
            image = {"type": "image", "data": picture()}
            messages = [{"role": "user", "content": [video, image]}]
            talker.send(json.dumps({"type": "input.append", "input": {"messages": messages}}))
            await talker.heard("error")
            await anyio.sleep(1)
            assert ended == ["video"]
            talker.send(ask_frame("hello"))
            await talker.heard("response.done")

    on_virtual_time(body)


@pytest.mark.parametrize("fault", ["fail", "gone"])
def test_a_turn_that_failed_amid_its_answer_replays_fully(tmp_path: Path, fault: Any) -> None:
    """An engineer with a failed turn would be told that its recording is wrong."""
    answer = Answer(tokens=("word ",) * 5, fault=fault, fault_at=3)
    made = ScriptedBackend(chat=lambda _: answer)

    async def body() -> None:
        async with world(made, record_to=tmp_path) as server:
            talker = await chat(server)
            talker.send(ask_frame("hello"))
            await talker.heard("error")
            talker.send(close_frame())
            await talker.over()

    on_virtual_time(body)
    (path,) = tmp_path.iterdir()
    with LogReader(path) as reader:
        items = list(reader)
    again = ScriptedBackend(chat=lambda _: answer)
    report = anyio.run(replay_fully, items[0].fields, items, partial(_load, again), backend="trio")
    assert report.identical, report.first_divergence
    assert not again.held_slots


def test_a_pause_ends_after_its_time_and_the_slot_is_clean_first() -> None:
    """The next session would begin on a slot that is being wiped."""

    async def body() -> None:
        backend = ScriptedBackend(slots=1, release=Call(duration_s=3.0))
        async with world(backend, pause_s=5) as server:
            peer = server.connect("audio", endpoint="duplex", label="adx_1")
            await peer.heard("queue_done")
            peer.send(prepare_frame())
            await peer.heard("prepared")
            peer.send(chunk_frame(), json.dumps({"type": "pause", "timeout": 100}))
            assert (await peer.heard("paused"))["timeout"] == 5.0
            paused_s = anyio.current_time()
            waiting = server.connect("audio")
            await waiting.heard("session.queued")
            await peer.over()
            assert peer.events[-1]["type"] == "timeout"
            assert peer.closed == (1000, "timeout")
            assert anyio.current_time() - paused_s == pytest.approx(5.0, abs=0.01)
            assert backend.held_slots == {0}
            await waiting.heard("session.queue_done")
            assert anyio.current_time() - paused_s == pytest.approx(8.0, abs=0.01)

    on_virtual_time(body)


def test_what_comes_before_a_pause_is_answered_and_what_waits_is_kept() -> None:
    """A second of speech would be lost to a pause, or answered in it."""

    async def body() -> None:
        async with world() as server:
            peer = server.connect("audio", endpoint="duplex", label="adx_1")
            await peer.heard("queue_done")
            peer.send(prepare_frame())
            await peer.heard("prepared")
            peer.send(chunk_frame(2.0), '{"type": "pause"}')
            await peer.heard("paused")
            await anyio.sleep(10)
            assert peer.kinds.count("result") == 1
            peer.send(chunk_frame())
            assert (await peer.heard("error"))["code"] == "invalid_event"
            peer.send('{"type": "resume"}')
            await peer.heard("result", 2)
            peer.send('{"type": "stop"}')
            await peer.over()
            assert peer.events[-1] == {"type": "stopped", "session_id": "adx_1"}

    on_virtual_time(body)


@pytest.mark.parametrize("deferred", [True, False])
def test_finalize_is_deferred_as_the_client_says(deferred: bool) -> None:
    """The saving of a deferred finalize could not be measured, or not be had."""

    async def body() -> None:
        async with world() as server:
            peer = server.connect("audio", endpoint="duplex", label="adx_1")
            await peer.heard("queue_done")
            peer.send(prepare_frame(deferred_finalize=deferred))
            await peer.heard("prepared")
            began_s = anyio.current_time()
            peer.send(chunk_frame())
            await peer.heard("result")
            unit_s = 0.05 + 0.02
            took_s = anyio.current_time() - began_s
            assert took_s == pytest.approx(unit_s if deferred else unit_s + 0.037, abs=0.001)

    on_virtual_time(body)


@pytest.mark.parametrize("seed", range(sample(3, 1)))
@pytest.mark.slow
def test_chats_replay_byte_for_byte(tmp_path: Path, seed: int) -> None:
    """A recorded chat comes out otherwise, or the model is not asked again."""

    async def body() -> None:
        async with world(ScriptedBackend(chat=echo, slots=2), record_to=tmp_path) as server:
            talker, other = await chat(server), await chat(server)
            talker.send(ask_frame("one", tts={"enabled": True}))
            other.send(ask_frame("two", streaming=False))
            request = server.connect("chat", endpoint="chat")
            request.send(request_frame("three"))
            await talker.heard("response.done")
            await request.over()
            talker.send(ask_frame("four"))
            await talker.heard("text", 13)
            talker.send(close_frame())
            await talker.over()
            other.vanish()
            await server.quiet()

    on_virtual_time(body, seed=seed)
    logs = sorted(tmp_path.iterdir())
    assert len(logs) == 3
    turns = 0
    for path in logs:
        with LogReader(path) as reader:
            items = list(reader)
        assert replay(items).identical
        load = partial(_load, ScriptedBackend(chat=echo))
        report = anyio.run(replay_fully, items[0].fields, items, load, backend="trio")
        assert report.identical, report.first_divergence
        turns += report.turns
    assert turns == 4


def _load(backend: ScriptedBackend, _name: str) -> ScriptedBackend:
    return backend
