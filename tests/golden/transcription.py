"""Scenes of transcription that golden logs are made of."""

from __future__ import annotations

import json

import anyio
import numpy as np

from protocol.values.model import Chunk
from runtime.model.backends.scripted_chat import Transcribed, default_hearing
from tests.golden.stage import ONE_SLOT, Scene
from tests.sessions.in_memory import Peer, World, append_sound, close_frame


def speech(seconds: float, pitch: int = 300) -> bytes:
    """Sound that is loud enough, in integers: the same on every machine."""
    at = np.arange(int(seconds * 16_000), dtype=np.int64)
    return (at * pitch % 16_000 - 8_000).astype("<i2").tobytes()


def commit(*, final: bool = False) -> str:
    """Commit what was appended."""
    return json.dumps({"type": "input_audio_buffer.commit", "final": final})


def said(seconds: float, pitch: int = 300) -> tuple[str, ...]:
    """Say an utterance, in pieces of some 4 KB."""
    pcm16 = speech(seconds, pitch)
    pieces = (pcm16[at : at + 4096] for at in range(0, len(pcm16), 4096))
    return (commit(), *map(append_sound, pieces), commit(final=True))


async def done(peer: Peer, count: int) -> None:
    """Wait until so many utterances are answered."""
    await peer.heard("transcription.done", count)


def failing(chunk: Chunk) -> Transcribed:
    """Fail at the third second of the first utterance; hear slowly."""
    if (chunk.utterance, chunk.index) == (0, 2):
        return Transcribed(takes_s=0.1, fault="fail")
    return Transcribed(text=default_hearing(chunk).text, takes_s=0.2)


async def conversation(server: World) -> None:
    """Mistakes, then utterances: pipelined, empty, and one of a dozen seconds."""
    peer = server.connect("transcription")
    await peer.heard("session.created")
    peer.send(append_sound(speech(0.5)))
    peer.send('{"type": "session.update", "model": "whisper-9"}', '{"type": "session.update"}')
    peer.send("no JSON", b"\0", '{"type": "nope"}', append_sound(b"odd"))
    await peer.heard("error", 6)
    peer.send('{"type": "session.update", "model": "scripted"}')
    peer.send(*said(1.5), commit(final=True), *said(12, 440))
    await done(peer, 3)
    peer.vanish()
    await server.quiet()


async def other_names(server: World) -> None:
    """The other set of names, by its own name of the model."""
    peer = server.connect("transcription")
    await peer.heard("session.created")
    peer.send('{"type": "session.create", "model": "whisper-1"}', '{"type": "response.create"}')
    peer.send(append_sound(speech(2)))
    await peer.heard("response.text.delta", 2)
    peer.send(commit(final=True))
    await peer.heard("response.done")
    peer.vanish()
    await server.quiet()


async def goes_on_and_is_silent(server: World) -> None:
    """Utterances of which some are lost, then silence until the session is let go."""
    peer = await server.activate_transcription()
    for number in range(3):
        peer.send(*said(4, 200 + number))
        await done(peer, number + 1)
    await peer.over()


async def is_lost(server: World) -> None:
    """An utterance amid which the model is lost, or hangs."""
    peer = await server.activate_transcription()
    peer.send(*said(3))
    await peer.over()


async def is_drained(server: World) -> None:
    """The server is shut down amid an utterance, which is heard out."""
    peer = await server.activate_transcription()
    peer.send(*said(4))
    await peer.heard("transcription.delta", 2)
    server.server.begin_drain(3)
    await peer.over()


async def is_shut_down(server: World) -> None:
    """The server is shut down before an utterance is over."""
    peer = await server.activate_transcription()
    peer.send(commit(), append_sound(speech(2)))
    await peer.heard("transcription.delta", 2)
    server.server.begin_drain(3)
    await anyio.sleep(1)
    server.server.drain()
    await peer.over()


async def waits(server: World) -> None:
    """A client that must wait is greeted when a slot is free, and leaves amid a second."""
    first = await server.activate("audio")
    peer = server.connect("transcription")
    peer.send(append_sound(speech(1)))
    await anyio.sleep(4)
    first.send(close_frame())
    await peer.heard("session.created")
    peer.send('{"type": "session.update", "model": "scripted"}', *said(2))
    await peer.heard("transcription.delta")
    peer.vanish()
    await server.quiet()


TRANSCRIPTION_SCENES: dict[str, Scene] = {
    "transcription": Scene(play=conversation),
    **{
        name: Scene(play=play, backend=backend, settings=settings)
        for name, play, backend, settings in (
            ("transcription-names", other_names, {}, {"served_model_names": ("whisper-1",)}),
            ("transcription-fails", goes_on_and_is_silent, {"hears": failing}, {"idle_s": 3}),
            ("transcription-context-full", goes_on_and_is_silent, {"context_limit": 90}, {}),
            ("transcription-gone", is_lost, {"hears": lambda _: Transcribed(fault="gone")}, {}),
            ("transcription-hangs", is_lost, {"hears": lambda _: Transcribed(fault="hang")}, {}),
            ("transcription-drained", is_drained, {"hears": failing}, {}),
            ("transcription-shutdown", is_shut_down, {}, {}),
            ("transcription-timeout", goes_on_and_is_silent, {}, {"limit_transcription_s": 9}),
            ("transcription-queue", waits, {**ONE_SLOT, "hears": failing}, {}),
        )
    },
}
