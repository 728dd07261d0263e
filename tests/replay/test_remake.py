"""Logs made again of their events: the same as they were, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocol.values import events as ev
from protocol.values.errors import ErrorCode
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, SCHEMA, event_of
from recorder.read.reader import read
from recorder.repair import verify
from replay.rerun.logic import RegenerationError, replay
from tests.golden.logs import SAMPLE
from tests.replay.test_logs import HEAD, OPENED
from tests.sessions.answering import play, regenerate, write_events
from tests.sessions.in_memory import append_frame, close_frame, init_frame

OWN_OF_A_FILE = frozenset({"blocks", "chain", "compacted"})
"""What `fin` says of blocks: a server closes them more often."""
OF_STATES = frozenset({"schema", "digest", "counts"})
"""What a log says of its states, which are written anew as they are written today."""
GOLDEN = [path for path in SAMPLE if verify(path).state == "finished"]


def told(records: list[Record]) -> list[tuple[Any, ...]]:
    """Return all that records say, but for what only their file knows, and for states."""
    return [
        (
            record.kind,
            record.at_ns,
            {
                name: value
                for name, value in record.fields.items()
                if name not in OWN_OF_A_FILE | OF_STATES
            },
        )
        for record in records
        if record.kind != "state"
    ]


def events_of(records: list[Record]) -> list[ev.Event]:
    """Return the events among records."""
    return [event_of(r.fields, r.at_ns) for r in records if r.kind in EVENT_KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.split(".")[0])
def test_a_sound_log_is_made_again_as_it_was(path: Path, tmp_path: Path) -> None:
    """What is made of a log would differ from it in more than what was changed."""
    records = list(read(path))
    again = tmp_path / path.name
    assert regenerate(again, records[0].fields, events_of(records)) == len(events_of(records))
    regenerated = list(read(again))
    assert told(regenerated) == told(records)
    assert [record.seq for record in regenerated] == list(range(len(regenerated)))
    assert regenerated[0].fields["schema"] == SCHEMA
    assert verify(again).state == "finished"
    report = replay(regenerated)
    assert report.identical, report.divergence
    assert report.states == sum(record.kind == "state" for record in regenerated) + 1
    if records[0].fields["schema"] == SCHEMA:
        assert [record.fields for record in regenerated if record.kind == "state"] == [
            record.fields for record in records if record.kind == "state"
        ]


def test_a_session_without_an_end_is_broken_off(tmp_path: Path) -> None:
    """A log that is made of half a session would claim an end that it never had."""
    events = play([init_frame(), append_frame()])[:8]
    path = write_events(tmp_path, events)
    records = list(read(path))
    assert records[-1].fields["reason"] == "broken_off"
    assert replay(records).identical
    path.unlink()
    open_log = write_events(tmp_path, events, is_open=True)
    assert verify(open_log).state == "open"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([ev.Draining(at_ns=0)], "a session begins with ConnectionOpened"),
        ([OPENED, OPENED], "event 1, ConnectionOpened: LocalProtocolError"),
        ([OPENED, ev.PeerGone(at_ns=5), ev.Draining(at_ns=4)], "time went back"),
        ([OPENED, ev.SlotLeased(at_ns=0, lease=1, slot=0)] * 1
         + [ev.SlotLeased(at_ns=0, lease=2, slot=0)], "event 2, SlotLeased"),
    ],
)  # fmt: skip
def test_what_the_machine_refuses_is_no_log(
    tmp_path: Path, events: list[ev.Event], words: str
) -> None:
    """A log would hold a session that cannot be, or half a file would be left of it."""
    with pytest.raises(RegenerationError, match=words):
        write_events(tmp_path, events)
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    """Somebody's log would be lost to a typing error."""
    path = write_events(tmp_path, [OPENED])
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        regenerate(path, HEAD, [OPENED, ev.Draining(at_ns=0)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_refusal_is_read_back_as_it_was(tmp_path: Path) -> None:
    """The log of a session that found no slot could be read, and not be written again."""
    refused = ev.AdmissionRefused(at_ns=1, code=ErrorCode.QUEUE_FULL)
    path = write_events(tmp_path, [OPENED, refused])
    assert events_of(list(read(path)))[1] == refused
    assert type(events_of(list(read(path)))[1].code) is ErrorCode  # type: ignore[union-attr]


def test_the_end_of_a_client_is_recorded(tmp_path: Path) -> None:
    """A regenerated log would not say why its session ended."""
    path = write_events(tmp_path, play([init_frame(), append_frame(), close_frame("enough")]))
    assert list(read(path))[-1].fields["reason"] == "client"
