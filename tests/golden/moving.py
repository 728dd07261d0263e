"""Scenes of golden logs in which a session loses its worker and goes on with another (B11).

The first worker dies where its script says; the one that takes its place plays the same script and
lives on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import attrs

from protocol.values.model import Chunk, Turn, Unit
from runtime.model.backends.base import Backend
from runtime.model.backends.scripted import Call, ScriptedBackend, Step
from runtime.model.backends.scripted_chat import (
    Answer,
    Transcribed,
    default_answer,
    default_hearing,
)
from runtime.slots.workers import Load
from tests.golden.chat import ask
from tests.golden.openai import LOUD, say, speak
from tests.golden.stage import Scene, brief, eventful, part, picture
from tests.golden.transcription import done, said
from tests.sessions.in_memory import World, append_frame, init_frame

GONE = Call(duration_s=0.3, fault="gone")


def worker(**script: Any) -> Backend:
    """A worker that takes any session of the scene's first one."""
    backend = ScriptedBackend(slots=2, **script)
    fingerprint = {**backend.info.fingerprint, "script": eventful.__name__}
    backend.info = attrs.evolve(backend.info, fingerprint=fingerprint)
    return backend


def another(**script: Any) -> Load:
    """Load a worker, which takes a while."""

    async def load(_place: int) -> Backend:
        await anyio.sleep(1.5)
        return worker(**script)

    return load


def dies_at(index: int, **fields: Any) -> Callable[[Unit, int], Step]:
    """`brief`, and the worker is gone at a unit."""

    def script(unit: Unit, seed: int) -> Step:
        step = brief(unit, seed)
        return attrs.evolve(step, **fields) if unit.index == index else step

    return script


def moving(play: Any, index: int, **fields: Any) -> Scene:
    """A duplex scene whose first worker is gone at a unit."""
    script = {"script": dies_at(index, **fields)}
    return Scene(play=play, backend=script, settings={"load": another(script=brief)})


async def speaks_on(server: World) -> None:
    """The worker dies amid an answer, and sound comes all the while."""
    peer = await server.activate("video", config={"force_listen_count": 0})
    for number in range(12):
        pictures = [picture()] if number % 2 == 0 else []
        peer.send(append_frame(force_listen=number == 7, video_frames=pictures))
        await anyio.sleep(1)
    await part(peer)


async def waits_for_finalize(server: World) -> None:
    """Two clients: one's worker dies in a finalize that comes before the answer."""
    peer = await server.activate("audio")
    for _ in range(6):
        peer.send(append_frame())
        await anyio.sleep(1)
    await part(peer)


async def opens_late(server: World) -> None:
    """The worker dies while it opens the session."""
    peer = server.connect("video")
    await peer.heard("session.queue_done")
    peer.send(init_frame())
    await peer.heard("session.created")
    peer.send(append_frame())
    await peer.heard("response.output.delta")
    await part(peer)


async def is_drained(server: World) -> None:
    """The worker is drained amid a unit, and another one has room."""
    peer = await server.activate("video", config={"force_listen_count": 0})
    for number in range(8):
        peer.send(append_frame())
        await anyio.sleep(1)
        if number == 4:
            server.server.workers.drain(0)
    await part(peer)


async def is_given_up(server: World) -> None:
    """The model that comes cannot be brought to the past."""
    peer = await server.activate("audio")
    for _ in range(6):
        peer.send(append_frame())
        await anyio.sleep(1)
    await peer.over()


async def asks(server: World) -> None:
    """The worker dies amid an answer; what was sent is not sent again."""
    peer = await server.activate_chat()
    peer.send(ask("tell me all", tts={"enabled": True}))
    await peer.heard("response.done")
    peer.send(ask("and again"))
    await peer.heard("response.done", 2)
    await part(peer)


def breaks_off(turn: Turn) -> Answer:
    """The first answer is lost after two pieces."""
    said = default_answer(turn)
    return attrs.evolve(said, fault="gone", fault_at=2) if turn.index == 0 else said


async def is_heard(server: World) -> None:
    """The worker dies amid an utterance, and again between two."""
    peer = await server.activate_transcription()
    peer.send(*said(6, 440))
    await done(peer, 1)
    peer.send(*said(3))
    await done(peer, 2)
    peer.vanish()
    await server.quiet()


def deaf_at(second: int, takes_s: float = 0.02) -> Callable[[Chunk], Transcribed]:
    """The worker is gone at a second of the first utterance, after a while."""

    def script(chunk: Chunk) -> Transcribed:
        result = default_hearing(chunk)
        is_it = chunk.utterance == 0 and chunk.index == second
        return attrs.evolve(result, fault="gone", takes_s=takes_s) if is_it else result

    return script


async def is_cleared(server: World) -> None:
    """The worker dies amid a second of an utterance that was cleared; the next one is heard."""
    peer = server.connect("transcription", endpoint="openai")
    await peer.heard("session.created")
    audio = {"input": {"turn_detection": None}}
    say(peer, "session.update", session={"type": "transcription", "audio": audio})
    await speak(peer, "input_audio_buffer.append", LOUD, LOUD, LOUD[:24_000])
    say(peer, "input_audio_buffer.clear")
    await speak(peer, "input_audio_buffer.append", LOUD)
    say(peer, "input_audio_buffer.commit")
    await peer.heard("conversation.item.input_audio_transcription.completed")
    peer.leave(1000)
    await server.quiet()


MOVING_SCENES: dict[str, Scene] = {
    "moving-unit": moving(speaks_on, 4, fault="gone"),
    "moving-finalize": moving(waits_for_finalize, 3, finalize=GONE),
    "moving-rollback": moving(speaks_on, 2, fault="fail", rollback=GONE),
    "moving-drained": Scene(
        play=is_drained,
        backend={"script": brief},
        settings={"beside": partial(worker, script=brief)},
    ),
    "moving-failed": Scene(
        play=is_given_up,
        backend={"script": dies_at(2, fault="gone")},
        settings={"load": another(script=brief, rebuild=Call(fault="fail"))},
    ),
    "moving-opening": Scene(
        play=opens_late,
        backend={"script": brief, "opening": lambda _: GONE},
        settings={"load": another(script=brief)},
    ),
    "moving-chat": Scene(play=asks, backend={"chat": breaks_off}, settings={"load": another()}),
    "moving-transcription": Scene(
        play=is_heard, backend={"transcription": deaf_at(3)}, settings={"load": another()}
    ),
    "openai-transcription-lost": Scene(
        play=is_cleared,
        backend={"transcription": deaf_at(1, takes_s=1.0)},
        settings={"load": another()},
    ),
}
