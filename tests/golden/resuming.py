"""Scenes of golden logs in which a client loses its connection and comes back on another one."""

from __future__ import annotations

from functools import partial

import anyio

from protocol.values.limits import REBUILD_WAIT_S
from runtime.model.backends.scripted import Call
from tests.golden.chat import ask
from tests.golden.moving import another, dies_at, worker
from tests.golden.stage import ONE_SLOT, Scene, brief, part
from tests.golden.transcription import done, said
from tests.sessions.in_memory import Peer, World, append_frame, close_frame

SPEAKING = {"force_listen_count": 0}


async def talk(peer: Peer, seconds: int) -> None:
    """Send sound as it comes."""
    for _ in range(seconds):
        peer.send(append_frame())
        await anyio.sleep(1)


async def comes_back(server: World) -> None:
    """Its client is back in time, then takes over from another connection, then is away long."""
    peer = await server.activate("audio", resumable=True, config=SPEAKING)
    await talk(peer, 3)
    for _ in range(3):
        peer.send(append_frame())
    peer.vanish()
    await anyio.sleep(10)
    second = server.come_back(*peer.way_back)
    await talk(second, 2)
    third = server.come_back(*second.way_back)
    await talk(third, 2)
    third.send(append_frame())
    third.vanish()
    await anyio.sleep(45)
    fourth = server.come_back(*third.way_back)
    await talk(fourth, 4)
    await part(fourth)


async def finds_no_slot(server: World) -> None:
    """It is rebuilt when another session ends; meanwhile its client leaves and comes back again."""
    other = await server.activate("audio", resumable=True)
    other.vanish()
    await anyio.sleep(40)
    peer = await server.activate("audio", resumable=True)
    await talk(peer, 2)
    peer.vanish()
    await anyio.sleep(40)
    other = server.come_back(*other.way_back)
    again = server.come_back(*peer.way_back)
    await again.greeted()
    await talk(again, 2)
    again.vanish()
    await anyio.sleep(40)
    third = server.come_back(*again.way_back)
    await third.greeted()
    other.send(close_frame())
    await talk(third, 2)
    await part(third)


async def sleeps_amid_a_move(server: World) -> None:
    """It falls asleep while its drained worker cleans the slot, and its client is away for long."""
    peer = await server.activate("audio", resumable=True, config=SPEAKING)
    await talk(peer, 3)
    peer.vanish()
    await anyio.sleep(29)
    server.server.workers.drain(0)
    await anyio.sleep(REBUILD_WAIT_S + 10)
    again = server.come_back(*peer.way_back)
    await talk(again, 2)
    await part(again)


async def is_waited_for(server: World) -> None:
    """Its client never comes back."""
    peer = await server.activate("audio", resumable=True)
    await talk(peer, 2)
    peer.vanish()
    await server.quiet()


async def leaves_the_queue(server: World) -> None:
    """Its client is back while it waits for its first slot, and does not come back later on."""
    other = await server.activate("audio")
    peer = server.connect("audio", resumable=True)
    await peer.heard("session.queued")
    peer.vanish()
    await anyio.sleep(5)
    again = server.come_back(*peer.way_back)
    await again.greeted()
    again.vanish()
    await anyio.sleep(60)
    other.send(close_frame())
    await server.quiet()


async def loses_its_worker_too(server: World) -> None:
    """The worker dies while the client is away."""
    peer = await server.activate("audio", resumable=True)
    for _ in range(4):
        peer.send(append_frame())
    await peer.heard("listen")
    peer.vanish()
    await anyio.sleep(20)
    again = server.come_back(*peer.way_back)
    await talk(again, 3)
    await part(again)


async def asks_and_leaves(server: World) -> None:
    """An answer goes on while its client is away, for longer than a chat may be idle."""
    peer = await server.activate_chat(resumable=True)
    peer.send(ask("tell me all", tts={"enabled": True}))
    await peer.heard("text")
    peer.vanish()
    await anyio.sleep(200)
    again = server.come_back(*peer.way_back)
    again.send(ask("and again"))
    await again.heard("response.done", 2)
    await part(again)


async def is_not_heard(server: World) -> None:
    """A transcription sleeps amid an utterance, and goes on with it."""
    peer = await server.activate_transcription(resumable=True)
    peer.send(*said(6, 440)[:-1])
    await anyio.sleep(2)
    peer.vanish()
    await anyio.sleep(100)
    again = server.come_back(*peer.way_back)
    again.send(*said(3))
    await done(again, 1)
    again.leave(1000)
    await server.quiet()


RESUMING_SCENES: dict[str, Scene] = {
    "resume": Scene(play=comes_back, backend={"script": brief}),
    "resume-queued": Scene(play=finds_no_slot, backend={"script": brief, **ONE_SLOT}),
    "resume-ended": Scene(play=is_waited_for, backend={"script": brief}),
    "resume-waiting": Scene(play=leaves_the_queue, backend={"script": brief, **ONE_SLOT}),
    "resume-moved": Scene(
        play=loses_its_worker_too,
        backend={"script": dies_at(1, fault="gone")},
        settings={"load": another(script=brief)},
    ),
    "resume-asleep": Scene(
        play=sleeps_amid_a_move,
        backend={"script": brief, "release": Call(duration_s=2)},
        settings={"beside": partial(worker, script=brief)},
    ),
    "resume-chat": Scene(play=asks_and_leaves, backend={}),
    "resume-transcription": Scene(play=is_not_heard, backend={}),
}
