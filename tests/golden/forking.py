"""Scenes of golden logs of forks: sessions that begin from the past of another one."""

from __future__ import annotations

from typing import Any

import anyio

from runtime.session.setup import Parent
from tests.golden.moving import moving
from tests.golden.openai import LOUD, QUIET, say, speak
from tests.golden.stage import ONE_SLOT, Scene, brief, part, picture, talk
from tests.sessions.in_memory import Peer, World, base64, init_frame, pcm

APPEND = "session.input_audio.append"
LAW = {"audio": {"format": {"type": "audio/pcmu", "rate": 8000}}}
TONE = bytes(range(250)) * 32
"""A second in G.711."""
PCM = base64(pcm(1))


async def begin(server: World, parent: Parent | None = None, **session: Any) -> Peer:
    """Have a session that can be resumed, or a fork of one."""
    peer = server.connect("audio", endpoint="live", resumable=True, parent=parent)
    await peer.heard("info")
    say(peer, "session.start", session=session)
    await peer.heard("session.started")
    return peer


def log_of(server: World, peer: Peer, at: int | None = None) -> Parent:
    """The recording of a session, to be forked."""
    info = server.log_of(peer.way_back[0])
    return Parent(info=info, at=at)


async def forks(server: World) -> None:
    """A muted client is away amid a second; its fork waits for the slot, and is muted no more."""
    parent = await begin(server, model="scripted", instructions="Be brief.", **LAW)
    await speak(parent, APPEND, *[TONE] * 3)
    say(parent, "session.input_audio.mute")
    await speak(parent, APPEND, TONE, TONE[:4000])
    parent.vanish()
    await anyio.sleep(1)
    pcm = {"format": {"type": "audio/pcm", "rate": 24_000}}
    fork = await begin(server, log_of(server, parent, 3), audio=pcm)
    await speak(fork, APPEND, LOUD, QUIET)
    fork.vanish()
    await anyio.sleep(1)
    again = server.come_back(*fork.way_back)
    await speak(again, APPEND, *[LOUD] * 7)
    say(again, "session.close")
    await again.over()


async def forks_twice(server: World) -> None:
    """The fork of a fork, whose worker dies; it may not go unrecorded, nor have another model."""
    parent = await begin(server, model="scripted")
    await speak(parent, APPEND, LOUD, LOUD)
    await anyio.sleep(1)
    first = await begin(server, log_of(server, parent))
    say(parent, "session.close")
    await speak(first, APPEND, LOUD)
    await anyio.sleep(1)
    say(first, "session.close")
    await first.over()
    fork = server.connect("audio", endpoint="live", parent=log_of(server, first))
    await fork.heard("info")
    say(fork, "session.start", session={"store": False})
    say(fork, "session.start", session={"model": "other"})
    say(fork, "session.start", session={"delegation": {"type": "client"}})
    await fork.heard("session.started")
    await speak(fork, APPEND, *[LOUD] * 6)
    say(fork, "session.close")
    await fork.over()


async def talks_on(server: World) -> None:
    """A session with pictures goes on from its third second, in another dialect."""
    parent = server.connect("video", resumable=True)
    parent.send(init_frame())
    await parent.heard("session.created")
    await talk(parent, 4, video_frames=[picture()])
    await part(parent)
    fork = server.connect("video", parent=log_of(server, parent, 2))
    await fork.heard("session.queue_done")
    say(fork, "session.update", session={"instructions": "Be long."})
    await fork.heard("error")
    say(fork, "session.update", session={"instructions": ""})
    await fork.heard("session.created")
    for force_listen in (False, True, False):
        say(fork, "input_audio_buffer.append", audio=PCM, force_listen=force_listen)
        await anyio.sleep(1)
    await part(fork)


FORKING_SCENES: dict[str, Scene] = {
    "live-fork": Scene(play=forks, backend={"script": brief, **ONE_SLOT}),
    "realtime-fork": Scene(play=talks_on, backend={"script": brief}),
    "live-fork-lost": moving(forks_twice, 4, fault="gone"),
}
