"""Golden logs are read and replayed for ever, and say what their readable twins say."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.mapping import EVENT_KINDS, event_of
from recorder.reader import LogReader, read
from recorder.verify import verify
from replay.logic import replay
from tests.golden import FOLDER, SCENES, SUFFIX, record, twin

LOGS = sorted(FOLDER.glob(f"*{SUFFIX}"))


def test_there_is_one_for_every_scene() -> None:
    """A golden log is lost, and nobody notices that it no longer replays."""
    assert {path.name for path in LOGS} >= {f"v1-{name}{SUFFIX}" for name in SCENES}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_it_replays(path: Path) -> None:
    """An update of the server makes recordings of yesterday worthless."""
    assert verify(path).state == "finished"
    with LogReader(path) as reader:
        report = replay(reader)
    assert report.divergence is None
    assert report.finished


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_it_says_what_its_twin_says(path: Path) -> None:
    """A log is read as something that nobody has written."""
    readable = path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")
    assert twin(list(read(path))) == readable.read_text()


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_the_events_in_it_are_whole(path: Path) -> None:
    """An event loses a field on its way through the log."""
    events = [item for item in read(path) if item.kind in EVENT_KINDS]
    assert events
    for item in events:
        assert event_of(item.fields, item.at_ns).at_ns == item.at_ns


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_gives_the_same_log_twice(name: str, tmp_path: Path) -> None:
    """Something that is no event reaches a session: a clock, an id, an order of a set."""
    logs = []
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        logs.append(record(SCENES[name], folder).read_bytes())
    assert logs[0] == logs[1]
