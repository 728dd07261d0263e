"""What the tests of a session's page share: a long session, and a page's parts as they are read."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio

from recorder.format.format import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.view.document import page_of
from replay.view.parts import Part
from replay.view.story import Narrator
from runtime.model.backends.scripted import ScriptedBackend, default_script
from tests.generated.clients import append_pcm
from tests.sessions.in_memory import base64, on_virtual_time, world

Told = dict[str, list[Any]]
LONG = {"limit_audio_s": 3600, "limit_video_s": 3600}

BLOCK = re.compile(r'<script type="application/json" data-part="(\w+)">(.*?)</script>', re.DOTALL)


def narrate(head: Fields, items: Iterable[Record | Damage], **also: Any) -> Told:
    """Tell records; each part's values, by the part's name, the rows of all parts joined."""
    parts: list[Part] = []
    with Narrator(head) as narrator:
        for item in items:
            parts += narrator.narrate(item)
        parts += narrator.conclude(**also)
    return gather((part.name, part.value) for part in parts)


def gather(parts: Iterable[tuple[str, Any]]) -> Told:
    """Sort parts by name."""
    told: Told = {"rows": [], "sound": [], "picture": [], "story": []}
    for name, value in parts:
        told[name] += value if name == "rows" else [value]
    return told


def read_page(page: str) -> Told:
    """Read a page's data as its script does."""
    return gather((name, json.loads(text)) for name, text in BLOCK.findall(page))


def page_text(log: bytes, **also: Any) -> str:
    """Write a log's page."""
    with LogReader(log) as reader:
        return b"".join(page_of(reader.head.fields, reader, **also)).decode()


def policy_of(page: str) -> dict[str, list[str]]:
    """Read the policy that a page sets itself: what is allowed, by directive."""
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    directives = html.unescape(found[1]).split("; ")
    return {name: values for name, *values in map(str.split, directives)}


def record_long(folder: Path, units: int, pictures: tuple[str, ...] = ()) -> Path:
    """Record a session of so many seconds on virtual time; with pictures, one in each second."""

    async def body() -> None:
        backend = ScriptedBackend(default_script, context_limit=100_000)
        async with world(backend, record_to=folder, **LONG) as server:
            peer = await server.activate("video" if pictures else "audio")
            for number in range(units):
                audio = base64(append_pcm("speech", 16_000, 3, 16_000 * number))
                seen = {"video_frames": [pictures[number % len(pictures)]]} if pictures else {}
                peer.send(json.dumps({"type": "input.append", "input": {"audio": audio, **seen}}))
                await anyio.sleep(1)
            peer.send('{"type":"session.close"}')
            await peer.over()

    on_virtual_time(body)
    return next(folder.iterdir())


def texts_of(value: Any) -> Iterator[str]:
    """Give all texts in a plain value, but for its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)
