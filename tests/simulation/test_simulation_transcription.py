"""Transcriptions beside each other and beside other sessions, on virtual time.

What a model hears says whose it is: the first sample of a second is its client's number.
"""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import pytest

from protocol.values.model import Chunk
from replay.rerun.folder import replay_log
from runtime.model.backends.base import BackendError
from runtime.model.backends.scripted import Call, ScriptedBackend
from runtime.model.backends.scripted_chat import Transcribed
from tests.project.sampling import sample
from tests.sessions.in_memory import Peer, World, append_frame, append_sound, on_virtual_time, world

FINAL = json.dumps({"type": "input_audio_buffer.commit", "final": True})
CLIENTS = 20


def echo(chunk: Chunk) -> Transcribed:
    """Write whose sound it is."""
    number = round(float(np.frombuffer(chunk.pcm, "<f4")[0]) * 32_768)
    return Transcribed(text=f"<{number}>" if number else "", takes_s=0.05)


def sound_of(number: int, seconds: int) -> bytes:
    """Sound that says whose it is, each second."""
    return np.full(seconds * 16_000, number, "<i2").tobytes()


async def says(server: World, number: int, seconds: int) -> Peer:
    """Open a transcription, and say an utterance in odd pieces."""
    peer = await server.activate_transcription()
    pcm16 = sound_of(number, seconds)
    for at in range(0, len(pcm16), 7_000):
        peer.send(append_sound(pcm16[at : at + 7_000]))
        await anyio.sleep(0.01 * (number % 5))
    peer.send(FINAL)
    return peer


def test_twenty_at_once_are_written_down_each_for_itself() -> None:
    """One client's words would be told to another (B8)."""
    texts: dict[int, str] = {}

    async def body() -> None:
        async with world(ScriptedBackend(transcription=echo, slots=3)) as server:

            async def talk(number: int) -> None:
                peer = await says(server, number, 2 + number % 4)
                done = await peer.heard("transcription.done")
                texts[number] = done["text"]
                deltas = [event["delta"] for event in peer.all("transcription.delta")]
                assert "".join(deltas) == done["text"]
                peer.vanish()

            async with anyio.create_task_group() as tasks:
                for number in range(1, CLIENTS + 1):
                    tasks.start_soon(talk, number)
            await server.quiet()

    on_virtual_time(body)
    expected = {number: f"<{number}>" * (2 + number % 4) for number in range(1, CLIENTS + 1)}
    assert texts == expected


def test_it_shares_slots_with_duplex_sessions_and_chats() -> None:
    """A transcription would overtake a caller who came before it, or never get a slot."""

    async def body() -> None:
        async with world(ScriptedBackend(transcription=echo, slots=1)) as server:
            duplex = await server.activate("audio")
            waits = server.connect("transcription")
            await anyio.sleep(1)
            behind = server.connect("audio")
            await behind.heard("session.queued")
            duplex.send(append_frame())
            await anyio.sleep(3)
            assert waits.events == []
            duplex.vanish()
            await waits.heard("session.created")
            assert not behind.all("session.queue_done")
            waits.vanish()
            await behind.heard("session.queue_done")
            behind.vanish()
            await server.quiet()

    on_virtual_time(body)


def test_its_status_counts_the_seconds_that_it_heard() -> None:
    """An operator would see a session that hears for minutes and has done nothing."""

    async def body() -> None:
        async with world(ScriptedBackend(transcription=echo)) as server:
            peer = await says(server, 7, 3)
            await peer.heard("transcription.done")
            (seen,) = server.server.roster(lambda _: 0)
            assert (seen.mode, seen.units) == ("transcription", 0)
            assert seen.chunks == 4, "three of speech, and the silence that ends them"
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)


@pytest.mark.parametrize("way", ["vanish", "big", "drain"])
def test_a_slot_comes_back_from_whatever_end(way: str) -> None:
    """A server fills up with nobody (B5)."""

    def slow(chunk: Chunk) -> Transcribed:
        return Transcribed(text="a ", takes_s=2)

    async def body() -> None:
        backend = ScriptedBackend(transcription=slow, slots=1, release=Call(duration_s=1))
        async with world(backend) as server:
            peer = await says(server, 7, 3)
            await peer.heard("transcription.delta")
            if way == "vanish":
                peer.vanish()
            elif way == "big":
                peer.send(None)
            else:
                server.server.drain()
            await server.quiet()
            assert not backend.held_slots
            assert server.server.slots.free == 1

    on_virtual_time(body)


def test_a_hanging_chunk_costs_its_slot_and_no_other_session() -> None:
    """One call that hangs holds up everybody (B4)."""

    def hangs(chunk: Chunk) -> Transcribed:
        heard = echo(chunk)
        return Transcribed(fault="hang") if heard.text == "<1>" else heard

    async def body() -> None:
        async with world(ScriptedBackend(transcription=hangs, slots=2)) as server:
            stuck = await says(server, 1, 2)
            other = await says(server, 2, 40)
            await other.heard("transcription.done")
            await stuck.over()
            assert stuck.closed == (1011, "backend_error")
            assert stuck.events[-1]["code"] == "backend_error"
            other.vanish()
            await server.quiet()
            assert server.server.workers.statistics.condemned == 1

    on_virtual_time(body)


def test_a_backend_that_cannot_take_it_costs_the_utterance() -> None:
    """A transcription that cannot be begun breaks its session, or is never answered."""

    class Refuses(ScriptedBackend):
        refusals = 1

        async def transcribe(self, *, slot: int) -> object:  # type: ignore[override]
            if self.refusals:
                self.refusals -= 1
                raise BackendError("not now")
            return await super().transcribe(slot=slot)

    async def body() -> None:
        async with world(Refuses(transcription=echo)) as server:
            peer = await says(server, 3, 1)
            assert (await peer.heard("error"))["code"] == "inference_error"
            await peer.heard("transcription.done")
            peer.send(append_sound(sound_of(3, 1)), FINAL)
            assert (await peer.heard("transcription.done", 2))["text"] == "<3>"
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(sample(3, 1)))
def test_ten_minutes_replay_and_stay_small(tmp_path: Path, seed: int) -> None:
    """A long stream outgrows its session, or cannot be replayed."""
    told: list[str] = []

    async def body() -> None:
        async with world(ScriptedBackend(transcription=echo), record_to=tmp_path) as server:
            peer = await server.activate_transcription()
            peer.send('{"type": "input_audio_buffer.commit"}')
            for second in range(600):
                peer.send(append_sound(sound_of(1 + second, 1)))
                await anyio.sleep(1)
                assert len(peer.all("transcription.delta")) >= second
            peer.send(FINAL)
            told.append((await peer.heard("transcription.done"))["text"])
            peer.vanish()
            await server.quiet()

    on_virtual_time(body, seed=seed)
    assert told == ["".join(f"<{second}>" for second in range(1, 601))]
    (log,) = tmp_path.iterdir()
    outcome = replay_log(log)
    assert outcome.result == "identical"
    assert outcome.logic is not None
    assert outcome.logic.states == 60 + 1, "every ten seconds, and the end"
