"""Scenes of golden logs that hold a replay to the machine's states, the one at the end too."""

from __future__ import annotations

import anyio

from runtime.model.backends.scripted import Call
from tests.golden.chat import ask, failing
from tests.golden.stage import Scene, only, part, picture
from tests.golden.transcription import done, said
from tests.sessions.in_memory import World, append_frame, init_frame

SLOWLY = Call(duration_s=0.6)


async def appends_amid_finalize(server: World) -> None:
    """Seconds of sound come while a unit is finalized: they wait behind the barrier."""
    peer = server.connect("video")
    await peer.heard("session.queue_done")
    peer.send(init_frame())
    await peer.heard("session.created")
    for _ in range(3):
        peer.send(append_frame())
        await peer.heard("response.output.delta")
        await anyio.sleep(0.3)
    peer.send(append_frame(), append_frame(0.7, video_frames=[picture()]))
    await anyio.sleep(0.3)
    peer.send(append_frame(0.7, force_listen=True))
    await anyio.sleep(12)
    for _ in range(8):
        peer.send(append_frame())
        await anyio.sleep(1.2)
    await part(peer)


async def asks_again(server: World) -> None:
    """A chat of four questions, of which the model fails at two."""
    peer = await server.activate_chat()
    for number in range(4):
        peer.send(ask(f"question {number}", tts={"enabled": True}))
        await anyio.sleep(2)
    await part(peer)


async def is_heard(server: World) -> None:
    """A dozen seconds of speech, and a client that leaves amid the next."""
    peer = await server.activate_transcription()
    peer.send(*said(12, 440))
    await done(peer, 1)
    peer.send(*said(2)[:9])
    await anyio.sleep(1)
    peer.vanish()
    await server.quiet()


STATE_SCENES: dict[str, Scene] = {
    "realtime-states": Scene(
        play=appends_amid_finalize, backend={"script": only(1, finalize=SLOWLY)}
    ),
    "chat-states": Scene(play=asks_again, backend={"chat": failing}),
    "transcription-states": Scene(play=is_heard),
}
