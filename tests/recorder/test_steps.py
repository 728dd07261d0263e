"""The one loop that steps a log: what a rebuild, a recovery, a fork and a replay stand on."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from protocol.values import events as ev
from protocol.values.errors import LocalProtocolError
from recorder.format.format import Record
from recorder.format.mapping import EVENT_KINDS, Hashes, advance, event_record, step_records, steps
from recorder.read.reader import read
from tests.golden.logs import FOLDER

LOG = FOLDER / "v1-realtime-mistakes.session.zst"


def records(log: Path = LOG) -> list[Record]:
    """Give a log's records behind its head."""
    return [record for record in read(log) if record.kind != "session"]


def test_each_record_comes_with_its_step() -> None:
    """A caller would pair a step's effects with the records of another one."""
    made, hashes = list[tuple[str, object]](), Hashes()
    for record, step in steps(records()):
        assert (step is not None) is (record.kind in EVENT_KINDS)
        if step is not None:
            assert step.record is record
            after = step_records(step.session, step.event, step.effects, hashes)
            made += [event_record(step.event), *after]
    recorded = [(record.kind, record.fields) for record in records()]
    assert made == [one for one in recorded if one[0] not in ("mark", "fin")]


def test_an_event_is_changed_before_it_is_stepped() -> None:
    """A fork would have its parent's name in what it sends."""

    def named(event: ev.Event) -> ev.Event:
        is_first = isinstance(event, ev.ConnectionOpened)
        return attrs.evolve(event, recording_id="another") if is_first else event

    step = next(steps(records(), edit=named))[1]
    assert step is not None
    assert step.session.opened.recording_id == "another"


def test_it_goes_on_with_a_session() -> None:
    """A recovered session would begin again, in the middle of its log."""
    first, *rest = steps(records()[:1])
    assert (rest, first[1] is None) == ([], False)
    assert first[1] is not None
    session = first[1].session
    *_, last = (step for _, step in steps(records()[1:], session=session) if step is not None)
    assert last.session is session
    assert session.is_finished


def test_a_session_begins_with_its_connection() -> None:
    """A log that lost its first event would be stepped as a session that never was."""
    with pytest.raises(LocalProtocolError, match="begins with ConnectionOpened"):
        advance(None, ev.PeerGone(at_ns=0))
    with pytest.raises(LocalProtocolError):
        list(steps(records()[2:]))
