"""`Forked` in the machine: any session may become another one, and none breaks by it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.state import State
from recorder.format.format import SUFFIX
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.format.records import Record
from recorder.format.steps import advance
from recorder.read.reader import LogReader
from tests.golden.logs import FOLDER

LOGS: Final = sorted(FOLDER.glob("*" + SUFFIX))
MOMENTS: Final = 12
"""Of each log."""
INITS: Final = {
    "live": '{"type": "session.start", "session": {}}',
    "opening": '{"type": "session.init", "payload": {}}',
    "legacy-duplex": '{"type": "prepare"}',
}
"""By dialect: what sets a session up."""


def events_in(log: Path) -> list[ev.Event]:
    """The events of a log, up to damage."""
    events = []
    with LogReader(log) as reader:
        for item in reader:
            if not isinstance(item, Record):
                break
            if item.kind in EVENT_KINDS:
                events.append(event_of(item.fields, item.at_ns))
    return events


def played(events: list[ev.Event]) -> Session:
    """The session after some events."""
    session: Session | None = None
    for event in events:
        session, _ = advance(session, event)
    assert session is not None
    return session


def fork(session: Session) -> tuple[ef.Effect, ...]:
    """Let a session begin again."""
    opened = session.opened
    limits = ev.SessionLimits(
        session_s=100,
        init_wait_s=10,
        cleanup_wait_s=10,
        context_tokens=opened.limits.context_tokens,
        rebuild_wait_s=10,
        models=opened.limits.models,
    )
    return session.step(ev.Forked(at_ns=session.now_ns, limits=limits))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.name.removesuffix(SUFFIX))
def test_a_session_that_is_forked_goes_on_or_takes_no_notice(log: Path) -> None:
    """A log that was edited or is hostile would break its replay, or leave a session half made."""
    events = events_in(log)
    for upto in range(1, len(events) + 1, max(1, len(events) // MOMENTS)):
        session = played(events[:upto])
        before = session.digest()
        units, is_active = session.counts["units"], session.state is State.ACTIVE
        effects = fork(session)
        if not effects:
            assert session.digest() == before
            continue
        assert is_active
        assert isinstance(effects[-1], ef.EnterQueue)
        assert not effects[-1].ahead
        go_on(session, units)


def go_on(session: Session, units: int) -> None:
    """Have a fork set up, say something, and end."""
    at_ns, said = session.now_ns, session.counts["frames_sent"]
    session.step(ev.SlotLeased(at_ns=at_ns, lease=99, slot=0))
    assert session.state is State.CONNECTED
    frame = INITS[session.dialect_name]
    assert ef.Rebuild(lease=99) in session.step(ev.FrameReceived(at_ns=at_ns, frame=frame))
    session.step(ev.Rebuilt(at_ns=at_ns, lease=99, steps=units))
    assert session.state is State.ACTIVE
    assert session.units_waiting == 0
    assert session.counts["frames_sent"] > said
    assert session.counts["units"] == units
    session.step(ev.PeerGone(at_ns=at_ns))
    session.step(ev.BackendReleased(at_ns=at_ns, lease=99))
    assert session.is_finished
    session.digest()
