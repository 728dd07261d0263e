"""A duplex session that loses its worker goes on with another (B11), at each point of a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from protocol.machine.duplex import Setup
from protocol.machine.kind import Migration
from protocol.machine.session import Session
from protocol.machine.unit_loop import UnitLoop
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import SLEEPS_AMID_MOVES
from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.limits import LOSSES_MAX
from protocol.values.model import Unit
from protocol.values.state import State
from tests.protocol.test_session_properties import SessionMachine, append

LISTENS = 9
SPEAKS = 11
FAILS = 0


class World(SessionMachine):
    """A session in ACTIVE, and all that it asked for."""

    def __init__(
        self,
        *,
        deferred: bool = True,
        rebuilds: bool = True,
        resumes: bool = False,
        behaviour: int = 0,
    ) -> None:
        super().__init__()
        self.make_session = lambda it: Session.open(attrs.evolve(it, behaviour=behaviour))
        self.done: list[ef.Effect] = []
        self.open(
            "realtime", deferred, can_rollback=True, active=True, rebuilds=rebuilds, resumes=resumes
        )

    def take(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Keep the effects, and let the referee see them."""
        self.done = [*getattr(self, "done", []), *effects]
        super().take(event, effects)

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of one class so far."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    @property
    def said(self) -> list[str]:
        """The frames so far."""
        return [effect.frame for effect in self.of(ef.Send)]

    def say(self, *, force: bool = False) -> None:
        """A second of sound comes."""
        self.appended += 1
        self.post(ev.FrameReceived, frame=append("realtime", 16_000, self.appended, force))

    def ends(self, dice: int = LISTENS) -> None:
        """The call in progress ends."""
        self.end_call(self.calls.pop(0), dice)

    def comes_back(self) -> None:
        """The slot is back, another comes, and the model is rebuilt."""
        self.ends()
        self.queue_answers(2)
        self.ends()

    def is_good(self) -> None:
        """No rule is broken."""
        assert not self.referee.violations


def test_the_unit_that_was_lost_starts_again() -> None:
    """The unit is skipped, has another index and so another seed, or is answered twice."""
    world = World()
    world.say()
    world.lose_worker()
    assert world.session.state is State.ACTIVE
    world.say()
    world.comes_back()
    world.ends(SPEAKS)
    first, again = world.of(ef.StartUnit)
    assert first == again
    assert len(world.of(ef.Rebuild)) == 1
    assert sum('"kind":"audio"' in frame or '"kind":"text"' in frame for frame in world.said) <= 2
    world.ends()
    assert [start.unit.index for start in world.of(ef.StartUnit)] == [0, 0, 1]
    world.is_good()


def test_an_outcome_that_waited_for_its_finalize_is_said_after_the_rebuild() -> None:
    """The unit is answered never, or by a second run of the model."""
    world = World(deferred=False)
    world.say()
    world.ends(SPEAKS)
    assert not any("response" in frame for frame in world.said)
    world.lose_worker()
    world.comes_back()
    assert len(world.of(ef.StartUnit)) == 1
    assert any("response" in frame for frame in world.said)
    world.is_good()


def test_a_rebuild_stands_for_the_finalize_or_the_rollback_that_was_lost() -> None:
    """The session waits for ever for a completion of the old worker."""
    for dice, told in ((LISTENS, 0), (FAILS, 1)):
        world = World()
        world.say()
        world.ends(dice)
        world.say()
        world.lose_worker()
        world.comes_back()
        assert [start.unit.index for start in world.of(ef.StartUnit)] == [0, 1]
        assert sum("inference_error" in frame for frame in world.said) == told
        world.is_good()


def test_a_unit_that_was_being_cut_listens_after_the_move() -> None:
    """What the client interrupted is spoken by the next worker."""
    for before in (True, False):
        world = World()
        world.say()
        if before:
            world.say(force=True)
        world.lose_worker()
        if not before:
            world.say(force=True)
        world.comes_back()
        assert world.of(ef.StartUnit)[-1].unit.force_listen
        world.is_good()


def test_a_unit_that_kills_its_worker_does_not_kill_a_third_one() -> None:
    """One client takes down all workers, one after the other."""
    world = World()
    world.say()
    world.lose_worker()
    world.comes_back()
    world.lose_worker()
    assert world.session.end_reason == "backend_error"
    assert world.of(ef.Close)[-1].code == 1011
    world.is_good()


def test_a_worker_that_is_lost_amid_a_rebuild_is_followed_by_another() -> None:
    """The second loss in a row ends the session, or a session tries for ever."""
    world = World()
    world.say()
    for _ in range(LOSSES_MAX):
        world.lose_worker()
        assert world.session.state is State.ACTIVE
        world.ends()
        world.queue_answers(2)
    world.lose_worker()
    assert world.session.end_reason == "backend_error"


def test_a_session_whose_opening_was_lost_is_opened_anew() -> None:
    """It is rebuilt from nothing, or waits for ever."""
    world = World()
    machine = SessionMachine()
    machine.open("realtime", True, can_rollback=True, active=False, rebuilds=True, resumes=False)
    machine.queue_answers(2)
    machine.client_inits()
    machine.lose_worker()
    machine.end_call(machine.calls.pop(0), LISTENS)
    machine.queue_answers(2)
    assert isinstance(machine.calls[0], ef.OpenBackend)
    machine.end_call(machine.calls.pop(0), LISTENS)
    assert machine.session.state is State.ACTIVE
    world.is_good()


def test_without_a_log_or_the_setting_a_loss_ends_the_session() -> None:
    """The session waits for a rebuild that cannot be."""
    world = World(rebuilds=False)
    world.lose_worker()
    assert world.session.end_reason == "backend_error"
    world = World()
    world.post(ev.RecordingFailed)
    world.lose_worker()
    assert world.session.end_reason == "backend_error"


def test_a_recording_that_fails_amid_a_move_ends_the_session_at_its_next_slot() -> None:
    """A model is opened for a rebuild that has no log."""
    world = World()
    world.say()
    world.lose_worker()
    world.ends()
    world.post(ev.RecordingFailed)
    assert world.session.state is State.ACTIVE
    world.queue_answers(2)
    assert not world.of(ef.Rebuild)
    assert world.session.end_reason == "backend_error"
    world.is_good()
    world.teardown()


@pytest.mark.parametrize("where", ["leaving", "queued", "rebuilding"])
@pytest.mark.parametrize("what", ["timer", "refused", "gone", "failed"])
def test_a_move_that_fails_ends_the_session_and_returns_the_slot(where: str, what: str) -> None:
    """A slot leaks, or the session hangs between two workers."""
    world = World()
    world.say()
    world.lose_worker()
    if where != "leaving":
        world.ends()
    if where == "rebuilding":
        world.queue_answers(2)
    if what == "timer":
        world.post(ev.TimerFired, name="rebuild", generation=world.timers.pop("rebuild"))
    elif what == "refused" and where == "queued":
        world.waits = False
        world.post(ev.AdmissionRefused, code=ErrorCode.SERVICE_UNAVAILABLE)
    elif what == "failed" and where == "rebuilding":
        world.end_call(world.calls.pop(0), FAILS)
    else:
        world.post(ev.PeerGone)
    wanted = "peer_gone" if not world.of(ef.Close) else "backend_error"
    assert world.session.end_reason == wanted
    world.teardown()


@pytest.mark.parametrize("where", ["leaving", "queued", "rebuilding"])
@pytest.mark.parametrize("returns", ["at once", "later", "never"])
def test_a_client_that_is_away_during_a_move_finds_its_session(where: str, returns: str) -> None:
    """The session slept, and the end of its wait for another slot ended it all the same."""
    world = World(resumes=True, behaviour=SLEEPS_AMID_MOVES)
    world.say()
    world.post(ev.PeerGone, code=1006)
    world.lose_worker()
    if where != "leaving":
        world.ends()
    if where == "rebuilding":
        world.queue_answers(2)
    world.post(ev.TimerFired, name="detach", generation=world.timers.pop("detach"))
    assert ("rebuild" in world.timers) == (where == "rebuilding")  # which a hanging call would miss
    if returns == "later":
        world.ends()
    if returns == "never":
        world.post(ev.TimerFired, name="resume", generation=world.timers.pop("resume"))
        assert world.session.end_reason == "timeout"
        world.teardown()
        return
    world.post(ev.PeerAttached, after=-1, resume_hash="1" * 64)
    if returns == "at once":
        world.ends()
    if where != "rebuilding":
        world.queue_answers(2)
        world.ends()
    assert world.session.state is State.ACTIVE
    assert len(world.of(ef.StartUnit)) == 2
    assert "rebuild" not in world.timers
    world.is_good()
    world.teardown()


def test_a_revoked_lease_is_left_between_two_calls() -> None:
    """A drained worker cuts a unit, or waits for the end of the session."""
    world = World()
    world.say()
    world.post(ev.LeaseRevoked, lease=world.lease)
    assert not world.of(ef.Release)
    world.ends()
    assert not world.of(ef.Release)
    world.ends()
    world.say()
    assert len(world.of(ef.Release)) == 1
    world.comes_back()
    assert [start.unit.index for start in world.of(ef.StartUnit)] == [0, 1]
    world.is_good()


def test_a_lease_that_is_revoked_amid_a_rebuild_is_left_after_it() -> None:
    """A drained worker waits for the end of a session that had just come to it."""
    world = World()
    world.say()
    world.ends()
    world.ends()
    world.lose_worker()
    world.ends()
    world.queue_answers(2)
    world.post(ev.LeaseRevoked, lease=world.lease)
    world.ends()
    assert len(world.of(ef.Release)) == 2
    world.comes_back()
    world.say()
    assert [start.unit.index for start in world.of(ef.StartUnit)] == [0, 1]
    world.is_good()


def _next_index(patch: pytest.MonkeyPatch) -> None:
    again = UnitLoop.start_again

    def start_again(self: UnitLoop, unit: Unit) -> None:
        again(self, attrs.evolve(unit, index=unit.index + 1))

    patch.setattr(UnitLoop, "start_again", start_again)


def _speaks(patch: pytest.MonkeyPatch) -> None:
    again = UnitLoop.start_again

    def start_again(self: UnitLoop, unit: Unit) -> None:
        self.interrupted = False
        again(self, unit)

    patch.setattr(UnitLoop, "start_again", start_again)


def _poison(patch: pytest.MonkeyPatch) -> None:
    lost = Migration.backend_lost

    def backend_lost(self: Migration) -> None:
        self.is_repeated, self.losses = False, 0
        lost(self)

    patch.setattr(Migration, "backend_lost", backend_lost)


def _queue_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Migration, "is_quiet", False)


def _no_rebuild(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Setup, "past_s", lambda self: None)
    patch.setattr(Migration, "is_migrating", property(lambda self: False, lambda self, value: None))


def _said_again(patch: pytest.MonkeyPatch) -> None:
    resume_work = UnitLoop.resume_work

    def sent_twice(self: UnitLoop) -> None:
        held = self.held
        resume_work(self)
        if held is not None:
            self.peer.send(held)

    patch.setattr(UnitLoop, "resume_work", sent_twice)


@pytest.mark.parametrize(
    "break_it", [_next_index, _speaks, _poison, _queue_told, _no_rebuild, _said_again]
)
def test_a_broken_move_is_seen_by_the_referee(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would pass with a machine that does it wrong."""
    break_it(monkeypatch)
    with pytest.raises((AssertionError, LocalProtocolError)):
        play_moves()


def play_moves() -> None:
    """Lose the worker with an outcome held back, and with a unit that is being cut, twice."""
    world = World(deferred=False)
    world.say()
    world.ends(SPEAKS)
    world.lose_worker()
    world.comes_back()
    world.say()
    world.say(force=True)
    for _ in range(3):
        world.lose_worker()
        for _ in range(3):
            if world.waits:
                world.queue_moves(2)
                world.queue_answers(2)
            elif world.calls:
                world.ends()
    world.is_good()


def test_those_moves_are_good_as_they_are() -> None:
    """The test before is passed by any machine."""
    play_moves()
