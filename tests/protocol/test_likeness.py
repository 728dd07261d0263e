"""A session whose appends are read by templates says what one says that parses them all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.machine.reception import Template
from protocol.machine.session import Session
from protocol.values import events as ev
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader
from tests.sessions.in_memory import base64
from tests.test_golden import LOGS

SOUND = base64(bytes(1280))
WRONG = base64(bytes(7))
DIALECTS = {"realtime", "duplex-v1", "legacy-duplex", "transcription", "live", "openai"}
READS_MIN = 10
"""Messages of a dialect that a template must have read, or nothing was tried."""


def events_in(path: Path) -> Iterator[ev.Event]:
    with LogReader(path) as reader:
        for item in reader:
            if isinstance(item, Record) and item.kind in EVENT_KINDS:
                yield event_of(item.fields, item.at_ns)


def others_like(frame: str) -> Iterator[str]:
    """Appends that differ from one in a way that a client may try."""
    try:
        body = json.loads(frame)
    except json.JSONDecodeError:
        return
    place = body.get("input") if isinstance(body, dict) else None
    place = place if isinstance(place, dict) else body
    name = "audio" if isinstance(place, dict) and "audio" in place else "audio_base64"
    if not isinstance(place, dict) or not isinstance(place.get(name), str):
        return
    for more in ({}, {"event_id": ["k1"]}, {"event_id": "k1"}, {"event_id": "k\u00e9"}, {"x": 1}):
        for sound in (SOUND, WRONG, SOUND, "", SOUND[:-4] + "\n" + SOUND[-4:]):
            place[name] = sound
            yield json.dumps(body | more, ensure_ascii=False)
    yield json.dumps(body, indent=1)
    yield json.dumps(body | {"event_id": "k" * 5000, "input_id": "~0~"})


class Twins:
    """Sessions that are given the same events: as a server, as a replay, and without templates."""

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        self.live, said = Session.open(opened)
        self.replayed, _ = Session.open(opened)
        self.parsing, parsed = Session.open(opened)
        assert said == parsed

    def step(self, event: ev.Event, path: Path) -> None:
        self.parsing._reception._templates._tries = 0
        if isinstance(event, ev.FrameReceived) and event.shortened is None:
            event = self.live.shortened(event)
        said = self.live.step(event)
        assert said == self.parsing.step(event), (path, event)
        assert said == self.replayed.step(event), (path, event)
        assert self.live.digest() == self.parsing.digest() == self.replayed.digest()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The frames that a template read."""
    reads, read = list[str](), Template.read

    def noting(self: Template, frame: str) -> object:
        alike = read(self, frame)
        reads.extend([] if alike is None else [frame])
        return alike

    monkeypatch.setattr(Template, "read", noting)
    return reads


@pytest.mark.soak
def test_recorded_sessions_and_hostile_clients(reads: list[str]) -> None:
    """What a client sends in between must not be read otherwise, nor change what follows."""
    read = Counter[str]()
    for path in LOGS:
        opened, *events = events_in(path)
        assert isinstance(opened, ev.ConnectionOpened)
        twins, tried = Twins(opened), set[str]()
        for event in events:
            if isinstance(event, ev.FrameReceived) and isinstance(event.frame, str):
                kind = event.frame[:30]
                for frame in () if kind in tried else others_like(event.frame):
                    twins.step(ev.FrameReceived(at_ns=event.at_ns, frame=frame), path)
                    tried.add(kind)
            twins.step(event, path)
        read[twins.live.dialect_name] += len(reads)
        reads.clear()
    assert {name for name, count in read.items() if count >= READS_MIN} >= DIALECTS, read
