"""Scenes of golden logs of a session's opening: sent early, in lockstep, refused, or named."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio

from protocol.values.events import Endpoint
from protocol.values.limits import Mode
from tests.golden.scenes import chunk
from tests.golden.stage import ONE_SLOT, Scene, brief, part, picture
from tests.sessions.in_memory import Peer, World, append_frame, init_frame

UPDATE = '{"type": "session.update", "session": {"instructions": "be brief"}}'
PREPARE = '{"type": "prepare", "system_prompt": "be brief", "config": {"force_listen_count": 0}}'


async def comes_early(server: World) -> None:
    """An opening message is kept while queued, and a second one refused."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.heard("session.queued")
    peer.send(init_frame(), init_frame(), append_frame())
    await peer.heard("error", 2)
    await part(first)
    await peer.heard("session.created")
    peer.send(append_frame(0.0001), append_frame())
    await anyio.sleep(1)
    await part(peer)


async def v1_comes_early(server: World) -> None:
    """The same in the words of 000, whose client leaves before its turn is over."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.heard("session.queued")
    peer.send(UPDATE)
    await part(first)
    await peer.heard("session.created")
    peer.vanish()
    await server.quiet()


async def legacy_comes_early(server: World) -> None:
    """The same in the words of 002, with a mistake in it: the client is told at its turn."""
    first = await server.activate("audio")
    peer = server.connect("audio", endpoint="duplex", label="omni_1")
    await peer.heard("queued")
    peer.send('{"type": "prepare", "system_prompt": 7}')
    await part(first)
    await peer.heard("error")
    peer.send(PREPARE)
    await peer.heard("prepared")
    await stop(peer)


async def stop(peer: Peer) -> None:
    """Say goodbye in the words of 002."""
    peer.send('{"type": "stop"}')
    await peer.over()


async def lockstep(server: World) -> None:
    """Pieces of sound, each with its result: amid a turn, dropped, with too many frames."""
    peer = server.connect("video", endpoint="duplex", label="omni_1")
    await peer.heard("queue_done")
    peer.send(PREPARE)
    await peer.heard("prepared")
    for sent in range(1, 13):
        peer.send(chunk(0.4))
        await peer.heard("result", sent)
    peer.send(*(chunk(1.2) for _ in range(8)))
    await anyio.sleep(10)
    frames = [picture()] * 4
    peer.send(*(chunk(0.01, frame_base64_list=frames) for _ in range(5)))
    await anyio.sleep(1)
    peer.send(json.dumps({"type": "video_frame", "frame": picture()}), chunk(1))
    await anyio.sleep(2)
    await stop(peer)


async def wants_openai(server: World) -> None:
    """A client of OpenAI is refused while it waits, and waits no longer."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.heard("session.queued")
    peer.send('{"type": "session.update", "session": {"type": "realtime"}}')
    await peer.over()
    await part(first)


def names_itself(
    mode: Mode, opens: str, created: str, *, endpoint: Endpoint = "realtime", label: str = ""
) -> Callable[[World], Awaitable[None]]:
    """Make a scene: a recording is declined and refused, then named; an error names its session."""

    async def play(server: World) -> None:
        peer = server.connect(mode, endpoint=endpoint, label=label)
        if mode == "transcription":  # which is greeted first
            await peer.heard(created)
        peer.send(opens.replace("%", '"record": false'))
        await peer.heard("error")
        peer.send(opens.replace("%", '"record": true'))
        await peer.heard(created)
        peer.send('{"type": "no.such.event"}')
        await peer.heard("error", 2)
        peer.vanish()
        await server.quiet()

    return play


OPENING_SCENES: dict[str, Scene] = {
    name: Scene(play=play, backend={"script": brief, **backend})
    for name, play, backend in (
        ("realtime-early", comes_early, ONE_SLOT),
        ("duplex-v1-early", v1_comes_early, ONE_SLOT),
        ("legacy-duplex-early", legacy_comes_early, ONE_SLOT),
        ("legacy-duplex-lockstep", lockstep, {}),
        ("realtime-openai", wants_openai, ONE_SLOT),
    )
} | {
    f"{name}-named": Scene(
        play=play,
        backend={"script": brief},
        settings={"record_always": True, "recording_notice": "This call is recorded."},
    )
    for name, play in (
        (
            "realtime",
            names_itself("audio", '{"type": "session.init", "payload": {%}}', "session.created"),
        ),
        (
            "realtime-chat",
            names_itself("chat", '{"type": "session.init", "payload": {%}}', "session.created"),
        ),
        (
            "duplex-v1",
            names_itself(
                "audio",
                '{"type": "session.update", "session": {"instructions": "be brief", %}}',
                "session.created",
            ),
        ),
        (
            "legacy-duplex",
            names_itself(
                "audio",
                '{"type": "prepare", "system_prompt": "be brief", %}',
                "prepared",
                endpoint="duplex",
                label="omni_1",
            ),
        ),
        (
            "transcription",
            names_itself(
                "transcription",
                '{"type": "session.update", "model": "scripted", %}',
                "session.created",
            ),
        ),
    )
}
