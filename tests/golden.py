"""Golden logs: one session a file, made once and replayed for ever.

`python -m tests.golden` makes those that are missing, on virtual time, beside a readable twin
(`.jsonl`, a record a line, bytes named by length and hash). One that exists is never written again:
if it no longer replays, the machine has changed its mind about the past, and either that is a bug
or the log needs a new version and an upcast.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import attrs
import numpy as np
import simplejpeg

from protocol.digest import digest
from protocol.model import Unit
from recorder.reader import read
from recorder.records import Record
from runtime.backends.scripted import ScriptedBackend, Speaks, Step
from runtime.backends.scripted_tone import tone
from tests.helpers import (
    World,
    append_frame,
    base64,
    close_frame,
    init_frame,
    on_virtual_time,
    pcm,
    world,
)

FOLDER = Path(__file__).parents[1] / "fixtures" / "logs"
SUFFIX = ".session.zst"


def eventful(unit: Unit, seed: int) -> Step:
    """Listen, speak, fail and speak again, so that one log shows it all."""
    if unit.index in (2, 3, 6):
        speech = Speaks(
            text=f"unit {unit.index} ",
            pcm=tone(unit.index, seed, samples=24_000 if unit.index != 3 else 9_000),
            end_of_turn=unit.index == 3,
        )
        return Step(speech=speech, generate_s=0.5, steps=10)
    return Step(fault="fail") if unit.index == 4 else Step()


def picture() -> str:
    """A small JPEG, base64."""
    image = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)
    return base64(simplejpeg.encode_jpeg(image))


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


async def invalid_frame(server: World) -> None:
    """A session that ends with a binary frame."""
    peer = await server.activate("audio")
    peer.send(append_frame(0.75), init_frame(), b"\x00\xff\xfe")
    await peer.over()


def _ask(text: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return json.dumps({"type": "input.append", "input": {"messages": messages, **fields}})


async def realtime_chat(server: World) -> None:
    """A chat: a turn that waits, a picture, speech at once, mistakes, a close amid a turn."""
    first = await server.activate("video")
    peer = await server.activate_chat()
    peer.send(_ask("hello"))
    await peer.heard("session.queued")
    first.send(close_frame())
    await peer.heard("response.done")
    contents = [{"type": "image", "data": picture()}, {"type": "text", "text": "what is it?"}]
    asked = {"messages": [{"role": "user", "content": contents}], "streaming": False}
    asked["tts"] = {"enabled": True}
    peer.send(json.dumps({"type": "input.append", "input_id": "look", "input": asked}))
    await peer.heard("response.done", 2)
    peer.send(_ask("too much", generation={"max_new_tokens": 0}))
    await peer.heard("error")
    peer.send(_ask("one two three four five six"))
    await peer.heard("text", 7)
    peer.send(_ask("out of place"), close_frame("enough"))
    await peer.over()


async def legacy_chat(server: World) -> None:
    """A single request, spoken and streamed."""
    peer = server.connect("chat", endpoint="chat")
    audio = {"type": "audio", "data": base64(pcm(0.5)), "sample_rate": 16000}
    request = {"messages": [{"role": "user", "content": [audio]}], "tts": {"enabled": True}}
    peer.send(json.dumps(request))
    await peer.over()


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


SCENES: dict[str, Callable[[World], Awaitable[None]]] = {
    "realtime-video": realtime_video,
    "duplex-v1-audio": duplex_v1_audio,
    "invalid-frame": invalid_frame,
    "realtime-chat": realtime_chat,
    "legacy-chat": legacy_chat,
    "legacy-duplex": legacy_duplex,
}


CROWDED = (duplex_v1_audio, realtime_chat)
"""Scenes in which somebody waits."""


def record(scene: Callable[[World], Awaitable[None]], folder: Path) -> Path:
    """Run a scene; returns the log of its last session."""

    async def body() -> None:
        backend = ScriptedBackend(eventful, slots=1 if scene in CROWDED else 2)
        # Not the script that `--model scripted` plays: a full replay must say so.
        fingerprint = {**backend.info.fingerprint, "script": eventful.__name__}
        backend.info = attrs.evolve(backend.info, fingerprint=fingerprint)
        async with world(backend, record_to=folder) as server:
            await scene(server)

    on_virtual_time(body)
    return max(folder.iterdir())


def twin(records: list[Record]) -> str:
    """Write records as readable JSON lines."""
    return "".join(
        json.dumps(
            {
                "seq": record.seq,
                "at_ns": record.at_ns,
                "kind": record.kind,
                "fields": _readable(record.fields),
            },
            sort_keys=True,
        )
        + "\n"
        for record in records
    )


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": len(value), "blake2b": digest(value)}
    if isinstance(value, str) and len(value) > 400:
        return {"chars": len(value), "blake2b": digest(value), "begins": value[:120]}
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value


def main() -> None:
    """Make the golden logs that are missing."""
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        path = FOLDER / f"v1-{name}{SUFFIX}"
        if path.exists():
            continue
        with TemporaryDirectory() as folder:
            path.write_bytes(record(scene, Path(folder)).read_bytes())
        path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl").write_text(twin(list(read(path))))
        print(f"made {path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
