"""Scenes of duplex sessions that golden logs are made of, in three dialects."""

from __future__ import annotations

import json
from typing import Any

import anyio

from runtime.model.backends.scripted import Call, Step
from tests.golden.stage import ONE_SLOT, Play, Scene, brief, only, part, picture, talk
from tests.sessions.in_memory import Peer, World, append_frame, base64, close_frame, init_frame, pcm
from tests.strategies.messages import wav

# -- realtime -------------------------------------------------------------------------------------


async def realtime_video(server: World) -> None:
    """A `realtime` session: speech, a failure, an interruption, mistakes, drops, a close."""
    peer = await server.activate("video", config={"force_listen_count": 0})
    for number in range(6):
        body = json.loads(append_frame())
        body["input_id"] = f"second-{number}"
        if number % 2 == 0:
            body["input"]["video_frames"] = [picture()]
        peer.send(json.dumps(body))
        await anyio.sleep(1)
    peer.send('{"type": "who.knows"}', '{"type": "input.append", "input": {"audio": "?"}}')
    peer.send(append_frame())
    await anyio.sleep(0.3)
    body = json.loads(append_frame(0.5))
    body["input"]["force_listen"] = True
    peer.send(json.dumps(body))
    await anyio.sleep(1)
    peer.send(append_frame(8.25))
    await anyio.sleep(3)
    peer.send(close_frame("enough"))
    await peer.over()


async def invalid_frame(server: World) -> None:
    """A session that ends with a binary frame."""
    peer = await server.activate("audio")
    peer.send(append_frame(0.75), init_frame(), b"\x00\xff\xfe")
    await peer.over()


async def audio(server: World) -> None:
    """Nothing but listening and speaking."""
    peer = await server.activate("audio")
    await talk(peer, 4)
    await part(peer)


async def many_units(server: World) -> None:
    """So many units that the state is hashed twice."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    await talk(peer, 21)
    await part(peer, "done")


async def text_alone(server: World) -> None:
    """Speech that is not heard."""
    settings = {"generate_audio": False, "force_listen_count": 0, "temperature": 0}
    peer = await server.activate("video", config=settings)
    await talk(peer, 3)
    await part(peer)


async def voices(server: World) -> None:
    """Two reference voices, one of which is refused at first."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.send(init_frame(voice={"ref_audio_base64": base64(b"RIFF....WAVEjunk")}))
    await peer.heard("error")
    voice = base64(wav(8_000))
    peer.send(init_frame(voice={"ref_audio_base64": voice, "tts_ref_audio_base64": voice}))
    await peer.heard("session.created")
    await talk(peer, 2)
    await part(peer)


async def pictures(server: World) -> None:
    """Several pictures a unit, cut into slices, and one that cannot be decoded."""
    peer = await server.activate("video", max_slice_nums=4)
    await talk(peer, 1, video_frames=[picture(), picture(96, 80)], max_slice_nums=2)
    await talk(peer, 1, video_frames=[picture()[:400]])
    await talk(peer, 1, video_frames=[picture()])
    await part(peer)


async def crumbs(server: World) -> None:
    """Sound in quarters and in pieces of several seconds."""
    peer = await server.activate("audio")
    for seconds in (0.25, 0.25, 0.5, 2.75, 0.25):
        peer.send(append_frame(seconds))
        await anyio.sleep(seconds)
    await part(peer)


async def mistakes(server: World) -> None:
    """Whatever a client can get wrong without being shown the door, too early and too late."""
    peer = server.connect("audio")
    peer.send(append_frame(), '{"type": 7}', "{}")
    await peer.heard("session.queue_done")
    peer.send(append_frame(), init_frame(config={"temperature": "hot"}), init_frame())
    await peer.heard("session.created")
    peer.send(init_frame(), append_frame(0.01), '{"type": "input.append"}')
    peer.send(append_frame(video_frames=[picture()]), append_frame(force_listen="no"))
    await anyio.sleep(1)
    await part(peer, "x" * 65)
    assert peer.all("error")


async def late_words(server: World) -> None:
    """A client that talks on after its goodbye."""
    peer = await server.activate("audio")
    peer.send(append_frame(), close_frame(), append_frame(), close_frame("again"))
    await peer.over()


def not_json(frame: str | bytes | None) -> Play:
    """A session that ends with a frame that cannot be read."""

    async def play(server: World) -> None:
        peer = await server.activate("audio")
        await talk(peer, 1)
        peer.send(frame)
        await peer.over()

    return play


async def flood(server: World) -> None:
    """Twelve seconds of sound at once: the oldest that wait are dropped."""
    peer = await server.activate("audio")
    peer.send(*(append_frame() for _ in range(12)))
    await anyio.sleep(9)
    await part(peer)


async def flood_with_interrupt(server: World) -> None:
    """A dropped unit hands its `force_listen` on."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    peer.send(append_frame(), append_frame(force_listen=True), append_frame(9.0))
    await anyio.sleep(6)
    await part(peer)


async def interrupts(server: World) -> None:
    """Speech is cut amid a unit, and again before anything was said."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    await talk(peer, 1)
    for wait_s in (0.3, 0.01):
        peer.send(append_frame())
        await anyio.sleep(wait_s)
        peer.send(append_frame(force_listen=True))
        await anyio.sleep(1.5)
    await part(peer)


async def until_over(server: World) -> None:
    """Talk until the session is over."""
    peer = await server.activate("audio")
    while not peer.is_over:
        await talk(peer, 1)


async def silent(server: World) -> None:
    """Say nothing until the session is over."""
    await (await server.activate("audio")).over()


async def opens(server: World) -> None:
    """Say what is wanted, and wait for the end."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.send(init_frame())
    await peer.over()


async def no_init(server: World) -> None:
    """A client that does not say what it wants."""
    peer = server.connect("video")
    await peer.over()


async def vanishes_amid_a_unit(server: World) -> None:
    """The connection is lost while the model speaks."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    await talk(peer, 1)
    peer.send(append_frame())
    await anyio.sleep(0.3)
    peer.vanish()
    await server.quiet()


async def vanishes_before_init(server: World) -> None:
    """The connection is lost as soon as there is a slot."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.vanish()
    await server.quiet()


async def vanishes_while_opening(server: World) -> None:
    """The connection is lost while the model reads the prompt."""
    peer = server.connect("audio")
    await peer.heard("session.queue_done")
    peer.send(init_frame())
    await anyio.sleep(1)
    peer.vanish()
    await server.quiet()


async def reads_nothing(server: World) -> None:
    """A client that stops reading is dropped."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    await talk(peer, 1)
    peer.stall()
    for _ in range(60):
        await talk(peer, 1)
        if peer.is_over:
            break
    await server.quiet()


async def waits_and_is_served(server: World) -> None:
    """Two wait for the only slot, and the second is told when its place changes."""
    first, second = await server.activate("audio"), server.connect("audio")
    await second.heard("session.queued")
    third = server.connect("audio")
    await third.heard("session.queued")
    await anyio.sleep(4)
    second.vanish()
    await anyio.sleep(1)
    await part(first)
    await third.heard("session.queue_done")
    third.send(init_frame())
    await third.heard("session.created")
    await talk(third, 1)
    await part(third)


async def waits_and_leaves(server: World) -> None:
    """A client that gives up while it waits."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.heard("session.queued")
    peer.send(append_frame(), init_frame())
    await anyio.sleep(2)
    peer.vanish()
    await anyio.sleep(1)
    await part(first)


async def closes_while_waiting(server: World) -> None:
    """A client that says goodbye while it waits."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.heard("session.queued")
    await part(peer)
    await part(first)


async def is_cancelled(server: World) -> None:
    """An operator takes a client out of the queue."""
    first, peer = await server.activate("audio"), server.connect("audio")
    queued = await peer.heard("session.queued")
    assert server.server.admission.cancel(queued["ticket_id"])
    await peer.over()
    await part(first)


async def is_refused(server: World) -> None:
    """There is neither a slot nor a place in the queue."""
    first, peer = await server.activate("audio"), server.connect("audio")
    await peer.over()
    await part(first)


async def is_drained(server: World) -> None:
    """The server is shut down: a warning first, as the client asked for, then the end."""
    peer = await server.activate("audio", notices=True)
    await talk(peer, 1)
    server.server.begin_drain(5)
    await talk(peer, 2)
    server.server.drain()
    await peer.over()


async def is_drained_while_waiting(server: World) -> None:
    """The server is shut down before the client's turn has come."""
    await server.activate("audio")
    peer = server.connect("audio")
    await peer.heard("session.queued")
    server.server.drain()
    await peer.over()


# -- duplex-v1 ------------------------------------------------------------------------------------


async def activate_v1(server: World, mode: Any = "audio") -> Peer:
    """Bring a `duplex-v1` connection to ACTIVE."""
    peer = server.connect(mode)
    await peer.heard("session.queue_done")
    peer.send(json.dumps({"type": "session.update", "session": {"instructions": "be brief"}}))
    await peer.heard("session.created")
    return peer


def append_v1(seconds: float = 1.0, **fields: object) -> str:
    """Write an `input_audio_buffer.append`."""
    body = {"type": "input_audio_buffer.append", "audio": base64(pcm(seconds)), **fields}
    return json.dumps(body)


async def duplex_v1_audio(server: World) -> None:
    """A `duplex-v1` session that waits its turn and whose peer vanishes."""
    first = await server.activate("audio")
    peer = server.connect("audio")
    await peer.heard("session.queued")
    await anyio.sleep(4)
    first.send(close_frame())
    await peer.heard("session.queue_done")
    peer.send(json.dumps({"type": "session.update", "session": {"instructions": "be brief"}}))
    await peer.heard("session.created")
    for _ in range(5):
        audio = json.loads(append_frame())["input"]["audio"]
        peer.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await anyio.sleep(1)
    peer.vanish()


async def v1_video(server: World) -> None:
    """Pictures, an interruption, mistakes and a close."""
    peer = await activate_v1(server, "video")
    peer.send(append_v1(video_frames=[picture()]), "{}", append_v1(0.001))
    await anyio.sleep(1)
    peer.send(append_v1())
    await anyio.sleep(0.3)
    peer.send(append_v1(force_listen=True))
    await anyio.sleep(1)
    await part(peer)


async def v1_flood(server: World) -> None:
    """More sound than may wait."""
    peer = await activate_v1(server)
    peer.send(*(append_v1() for _ in range(9)))
    await anyio.sleep(7)
    await part(peer)


async def v1_until_over(server: World) -> None:
    """Talk until the session is over."""
    peer = await activate_v1(server)
    while not peer.is_over:
        peer.send(append_v1())
        await anyio.sleep(1)


# -- legacy-duplex --------------------------------------------------------------------------------


async def prepare(server: World, mode: Any = "audio", **fields: object) -> Peer:
    """Bring a `legacy-duplex` connection to ACTIVE."""
    peer = server.connect(mode, endpoint="duplex", label="omni_1")
    await peer.heard("queue_done")
    peer.send(json.dumps({"type": "prepare", "prefix_system_prompt": "be brief", **fields}))
    await peer.heard("prepared")
    return peer


def chunk(seconds: float = 1.0, **fields: object) -> str:
    """Write an `audio_chunk`."""
    return json.dumps({"type": "audio_chunk", "audio": base64(pcm(seconds)), **fields})


async def legacy_duplex(server: World) -> None:
    """A `legacy-duplex` session: a picture apart, an interrupt, a pause and its end by time."""
    peer = server.connect("video", endpoint="duplex", label="omni_1")
    await peer.heard("queue_done")
    settings = {"force_listen_count": 0}
    peer.send(
        json.dumps({"type": "prepare", "prefix_system_prompt": "be brief", "config": settings})
    )
    await peer.heard("prepared")
    for number in range(4):
        if number == 1:
            peer.send(json.dumps({"type": "video_frame", "frame": picture()}))
        peer.send(json.dumps({"type": "audio_chunk", "audio": base64(pcm())}))
        await anyio.sleep(0.3)
        if number == 2:
            peer.send('{"type": "interrupt"}')
        await anyio.sleep(0.7)
    peer.send('{"type": "client_diagnostic", "metrics": {"rtt_ms": 12.5}}')
    peer.send('{"type": "pause", "timeout": 5}')
    await anyio.sleep(1)
    peer.send('{"type": "resume"}', '{"type": "pause", "timeout": 2}')
    await peer.over()


async def legacy_inline(server: World) -> None:
    """Each unit is finalized before it is answered."""
    settings = {"force_listen_count": 0}
    peer = await prepare(server, config=settings, deferred_finalize=False)
    for _ in range(3):
        peer.send(chunk())
        await anyio.sleep(1)
    peer.send('{"type": "stop"}')
    await peer.over()


async def legacy_stops(server: World) -> None:
    """Sound, mistakes, words at the wrong time, and a stop."""
    peer = await prepare(server)
    peer.send('{"type": "resume"}', '{"type": "prepare"}', '{"type": "sing"}', chunk(0.001))
    peer.send(chunk(2.5), '{"type": "pause"}', chunk())
    await anyio.sleep(2)
    peer.send('{"type": "resume"}', chunk())
    await anyio.sleep(1)
    peer.send('{"type": "stop"}')
    await peer.over()


async def legacy_vanishes_paused(server: World) -> None:
    """The connection is lost amid a pause."""
    peer = await prepare(server, "video")
    peer.send(chunk())
    await anyio.sleep(1)
    peer.send('{"type": "pause", "timeout": 30}')
    await anyio.sleep(3)
    peer.vanish()
    await server.quiet()


async def legacy_until_over(server: World) -> None:
    """Talk until the session is over."""
    peer = await prepare(server)
    while not peer.is_over:
        peer.send(chunk())
        await anyio.sleep(1)


async def legacy_waits(server: World) -> None:
    """A wait for the only slot, and the server's end."""
    first = await server.activate("audio")
    peer = server.connect("audio", endpoint="duplex", label="omni_2")
    await anyio.sleep(5)
    await part(first)
    await peer.heard("queue_done")
    server.server.drain()
    await peer.over()


FAILS = Call(fault="fail")
HANGS = Call(fault="hang")
SLOW = Call(duration_s=3)

DUPLEX_SCENES: dict[str, Scene] = {
    "realtime-video": Scene(play=realtime_video),
    "duplex-v1-audio": Scene(play=duplex_v1_audio, backend=ONE_SLOT),
    "invalid-frame": Scene(play=invalid_frame),
    "legacy-duplex": Scene(play=legacy_duplex),
    **{
        name: Scene(play=play, backend={"script": brief})
        for name, play in {
            "realtime-audio": audio,
            "realtime-many-units": many_units,
            "realtime-text-alone": text_alone,
            "realtime-voices": voices,
            "realtime-pictures": pictures,
            "realtime-crumbs": crumbs,
            "realtime-mistakes": mistakes,
            "realtime-late-words": late_words,
            "realtime-not-json": not_json("no JSON"),
            "realtime-too-long": not_json(None),
            "realtime-nested": not_json("[" * 40 + "]" * 40),
            "realtime-flood": flood,
            "realtime-flood-interrupt": flood_with_interrupt,
            "realtime-interrupts": interrupts,
            "realtime-no-init": no_init,
            "realtime-vanishes-amid-unit": vanishes_amid_a_unit,
            "realtime-vanishes-early": vanishes_before_init,
            "realtime-reads-nothing": reads_nothing,
            "realtime-drained": is_drained,
            "duplex-v1-video": v1_video,
            "duplex-v1-flood": v1_flood,
            "legacy-duplex-inline": legacy_inline,
            "legacy-duplex-stops": legacy_stops,
            "legacy-duplex-vanishes": legacy_vanishes_paused,
        }.items()
    },
    **{
        name: Scene(play=play, backend={"script": brief, **ONE_SLOT}, settings=settings)
        for name, play, settings in (
            ("realtime-queue", waits_and_is_served, {}),
            ("realtime-queue-left", waits_and_leaves, {}),
            ("realtime-queue-closed", closes_while_waiting, {}),
            ("realtime-queue-cancelled", is_cancelled, {}),
            ("realtime-queue-full", is_refused, {"queue_max": 0}),
            ("realtime-queue-drained", is_drained_while_waiting, {}),
            ("legacy-duplex-queue", legacy_waits, {}),
        )
    },
    **{
        name: Scene(play=play, backend={"script": only(2, **fields)})
        for name, play, fields in (
            ("realtime-unit-gone", until_over, {"fault": "gone"}),
            ("realtime-unit-hangs", until_over, {"fault": "hang"}),
            ("realtime-context-full", until_over, {"fault": "context_full"}),
            ("realtime-rollback-fails", until_over, {"fault": "fail", "rollback": FAILS}),
            ("realtime-finalize-fails", until_over, {"finalize": FAILS}),
            ("duplex-v1-unit-gone", v1_until_over, {"fault": "gone"}),
            ("legacy-duplex-gone", legacy_until_over, {"fault": "gone"}),
        )
    },
    "realtime-failures": Scene(
        play=until_over, backend={"script": lambda unit, seed: Step(fault="fail")}
    ),
    "realtime-no-rollback": Scene(
        play=until_over, backend={"script": only(1, fault="fail"), "can_rollback": False}
    ),
    **{
        name: Scene(play=play, backend={"script": brief, **backend}, settings=settings)
        for name, play, backend, settings in (
            ("realtime-timeout", silent, {}, {"limit_audio_s": 3}),
            ("legacy-duplex-timeout", legacy_until_over, {}, {"limit_audio_s": 3}),
            ("realtime-grows-full", until_over, {"context_limit": 90}, {}),
            ("realtime-prompt-full", opens, {"context_limit": 8}, {}),
            ("realtime-open-fails", opens, {"opening": lambda _: FAILS}, {}),
            ("realtime-open-hangs", opens, {"opening": lambda _: HANGS}, {}),
            ("realtime-open-left", vanishes_while_opening, {"opening": lambda _: SLOW}, {}),
            ("realtime-release-hangs", audio, {"release": HANGS}, {}),
        )
    },
}
