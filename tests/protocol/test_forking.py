"""`Forked` in the machine: any session may become another one, and none breaks by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import LOSSES_MAX, UNIT_FAILURES_MAX, UNITS_PENDING_MAX
from protocol.values.model import Finalized, Opened, UnitResult
from protocol.values.state import State
from recorder.format.format import SUFFIX, Record
from recorder.format.mapping import EVENT_KINDS, advance, event_of
from recorder.read.reader import LogReader
from tests.golden.logs import FOLDER
from tests.protocol.test_early import LIMITS
from tests.sessions.in_memory import append_frame, init_frame

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


# -- what a fork does not inherit ------------------------------------------------------------------


class Life:
    """A session and its fork, fed by hand."""

    def __init__(self) -> None:
        self.limits = attrs.evolve(
            LIMITS, barge_in=True, detach_s=30, resume_s=600, rebuild_wait_s=10
        )
        self.now_ns, self.lease = 0, 0
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode="audio",
            seed=1,
            limits=self.limits,
            recording="on",
            resume_hash="0" * 64,
        )
        self.session, _ = Session.open(opened)
        self.leased()
        self.step(ev.FrameReceived, frame=init_frame())
        self.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=9))

    def step(self, kind: type[Any], **fields: Any) -> list[ef.Effect]:
        """Step an event a millisecond later; returns its effects."""
        self.now_ns += 1_000_000
        return list(self.session.step(kind(at_ns=self.now_ns, **fields)))

    def leased(self) -> list[ef.Effect]:
        """The next slot comes."""
        self.lease += 1
        return self.step(ev.SlotLeased, lease=self.lease, slot=0)

    def append(self) -> list[ef.Effect]:
        """A second of sound comes."""
        return self.step(ev.FrameReceived, frame=append_frame())

    def unit_of(self, effects: list[ef.Effect]) -> Any:
        """The unit that is started by effects."""
        (unit,) = [it.unit for it in effects if isinstance(it, ef.StartUnit)]
        return unit

    def run(self, **result: Any) -> None:
        """The unit in flight ends well."""
        index = self.session.counts["units"] - 1
        made = UnitResult(index=index, **{"is_listen": True, **result})
        self.step(ev.UnitDone, result=made)
        self.step(ev.FinalizeDone, finalized=Finalized(index=index, kv_length=9))

    def fail(self) -> list[ef.Effect]:
        """A second comes, and its unit fails."""
        self.append()
        index = self.session.counts["units"] - 1
        effects = self.step(ev.UnitFailed, index=index)
        self.step(ev.RollbackDone, index=index)
        return effects

    def lose(self) -> None:
        """The worker is lost, and another slot comes."""
        self.step(ev.BackendLost, lease=self.lease)
        self.step(ev.BackendReleased, lease=self.lease)
        self.leased()

    def fork(self) -> list[ef.Effect]:
        """Fork it, and set the fork up, up to its rebuild."""
        (*_, asked) = self.step(ev.Forked, limits=self.limits, resume_hash="1" * 64)
        assert asked == ef.EnterQueue(mode="audio", ahead=False)
        assert self.session.connection == "connected"
        assert not any(isinstance(it, ef.Release | ef.Rebuild) for it in self.leased())
        return self.step(ev.FrameReceived, frame=init_frame(system_prompt=""))

    def rebuilt(self) -> list[ef.Effect]:
        """Have the model rebuilt."""
        steps = self.session.counts["units"]
        effects = self.step(ev.Rebuilt, lease=self.lease, steps=steps)
        assert self.session.state is State.ACTIVE
        return effects


def test_a_fork_of_a_session_that_was_interrupted_may_speak() -> None:
    """The user of the recording spoke over the model, and the model was silent in each fork."""
    life = Life()
    life.append()
    life.run(is_listen=False, text="and ")
    life.step(ev.SpeechStarted, at_ms=500)
    assert life.unit_of(life.append()).force_listen
    life.run()
    life.fork()
    life.rebuilt()
    effects = life.append()
    assert not life.unit_of(effects).force_listen
    assert [it.is_speech for it in effects if isinstance(it, ef.DetectSpeech)] == [False]


@pytest.mark.parametrize("sleeps", [False, True], ids=["detached", "asleep"])
def test_a_fork_of_a_session_whose_client_is_away_has_a_client(sleeps: bool) -> None:
    """A fork gave its slot back as soon as it had one, or was over when its client left."""
    life = Life()
    life.append()
    life.run()
    gone = life.step(ev.PeerGone, code=1006)
    if sleeps:
        (timer,) = [it for it in gone if isinstance(it, ef.SetTimer) and it.name == "detach"]
        released = life.step(ev.TimerFired, name="detach", generation=timer.generation)
        assert ef.Release(lease=1) in released
    assert ef.Rebuild(lease=2) in life.fork()
    assert ef.Release(lease=2) not in life.rebuilt()
    assert life.unit_of(life.append()).index == 1
    life.step(ev.PeerGone, code=1006)
    assert life.session.connection == "detached"


def test_a_fork_has_lost_no_worker_yet() -> None:
    """Workers of a recording had died, and the first that its fork lost ended the fork."""
    life = Life()
    life.append()
    life.run()
    for _ in range(LOSSES_MAX - 1):
        life.lose()
    life.step(ev.BackendLost, lease=life.lease)
    life.step(ev.BackendReleased, lease=life.lease)
    life.fork()
    life.lose()
    life.rebuilt()


def test_a_fork_does_not_leave_the_slot_that_was_revoked() -> None:
    """A fork of a session on a drained worker moved again as soon as it was set up."""
    life = Life()
    life.append()
    life.step(ev.LeaseRevoked, lease=1)
    life.step(ev.UnitDone, result=UnitResult(index=0, is_listen=True))  # and not finalized yet
    assert ef.Rebuild(lease=2) in life.fork()
    assert ef.Release(lease=2) not in life.rebuilt()
    assert life.unit_of(life.append()).index == 1


def test_a_fork_has_no_failures_and_counts_on() -> None:
    """A fork ended with its first unit that failed, or gave a unit the number of another one."""
    life = Life()
    for _ in range(UNIT_FAILURES_MAX - 1):
        life.fail()
    effects = life.fork()
    (timer,) = [it for it in effects if isinstance(it, ef.SetTimer) and it.name == "rebuild"]
    waits_s = life.limits.rebuild_wait_s + UNIT_FAILURES_MAX - 1
    assert timer.at_ns == life.now_ns + waits_s * 1_000_000_000
    life.rebuilt()
    for index in range(UNIT_FAILURES_MAX - 1, 2 * UNIT_FAILURES_MAX - 2):
        assert ef.Rollback(index=index) in life.fail()
    assert life.session.state is State.ACTIVE


def test_a_fork_counts_on_behind_units_that_were_dropped() -> None:
    """Its seconds had the numbers of seconds of its parent."""
    life = Life()
    for _ in range(1 + UNITS_PENDING_MAX + 2):
        effects = life.append()
    assert [it.ordinal for it in effects if isinstance(it, ef.DropUnit)] == [2]
    life.step(ev.UnitDone, result=UnitResult(index=0, is_listen=True))  # and not finalized yet
    life.fork()
    life.rebuilt()
    assert life.session.counts["units_dropped"] == 2
    for _ in range(1 + UNITS_PENDING_MAX + 1):
        effects = life.append()
    assert [it.ordinal for it in effects if isinstance(it, ef.DropUnit)] == [4]
