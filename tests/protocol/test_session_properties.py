"""`Session.step` under anything that can happen, judged by the referee.

The machine below is the world around a session: a queue, a model, timers and a client, each of
which does what it may at any moment, and sends completions that are stale as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.machine.core import Call, Phase
from protocol.machine.duplex import Duplex
from protocol.machine.session import Session
from protocol.machine.unit_loop import UnitLoop
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL, ErrorCode, LocalProtocolError
from protocol.values.messages import QueuePlace
from protocol.values.model import Cut, Finalized, Opened, UnitResult
from protocol.values.state import TRANSITIONS, State
from tests.project.sampling import sample
from tests.sessions.in_memory import base64
from tests.sessions.referee import Referee

LIMITS = ev.SessionLimits(session_s=300, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
GARBAGE = (
    "{", "[]", b"\x00", None, "{}", '{"type": 5}', '{"type": "who.knows"}', '{"a": 1, "a": 2}',
    '{"type": "input.append"}', '{"type": "input.append", "input": {"audio": "!"}}',
    '{"type": "input_audio_buffer.append", "audio": ""}', '{"type": "session.update"}',
    '{"type": "session.update", "model": "x"}', '{"type": "session.init", "payload": 1}',
)  # fmt: skip


@cache
def append(dialect: str, samples: int, number: int, force: bool) -> str:
    """Write an append whose samples tell it from any other."""
    audio = base64(np.full(samples, number / 64, dtype="<f4").tobytes())
    if dialect == "duplex-v1":
        body: dict[str, Any] = {"type": "input_audio_buffer.append", "audio": audio}
        return json.dumps(body | ({"force_listen": True} if force else {}))
    fields: dict[str, Any] = {"audio": audio} | ({"force_listen": True} if force else {})
    return json.dumps({"type": "input.append", "input": fields})


def init(dialect: str) -> str:
    """Write the first message of a dialect."""
    if dialect == "duplex-v1":
        return json.dumps({"type": "session.update", "session": {"instructions": "x"}})
    return json.dumps({"type": "session.init", "payload": {"system_prompt": "x"}})


class SessionMachine(RuleBasedStateMachine):
    """Everything around a session."""

    make_session: Callable[[ev.ConnectionOpened], Any] = staticmethod(Session.open)
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.referee = Referee()
        self.now_ns = 0
        self.calls: list[ef.Effect] = []
        self.timers: dict[str, int] = {}
        self.waits = False
        self.lease = 0
        self.appended = 0

    @initialize(
        dialect=st.sampled_from(["realtime", "duplex-v1"]),
        deferred=st.booleans(),
        can_rollback=st.sampled_from([True, True, False]),
        active=st.sampled_from([True, True, False]),
        rebuilds=st.sampled_from([True, True, False]),
        resumes=st.booleans(),
    )
    def open(  # noqa: PLR0917 - Hypothesis gives them by name
        self,
        dialect: str,
        deferred: bool,
        can_rollback: bool,
        active: bool,
        rebuilds: bool,
        resumes: bool,
    ) -> None:
        """A client connects; mostly it is served at once, for what comes then is the most."""
        self.dialect = dialect
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode="audio",
            seed=1,
            recording="on",
            resume_hash="0" * 64 if resumes else "",
            limits=attrs.evolve(
                LIMITS,
                can_rollback=can_rollback,
                **({"detach_s": 30, "resume_s": 600} if resumes else {}),
                **({"rebuild_wait_s": 10, "rebuild_units": 30} if rebuilds else {}),
            ),
        )
        self.session, effects = self.make_session(opened)
        self.deferred = deferred
        self.referee.trace.deferred = deferred
        self.take(opened, effects)
        if active:
            self.queue_answers(2)
            self.client_inits()
            self.end_call(self.calls.pop(), 9)

    def post(self, kind: type[Any], **fields: object) -> None:
        """Step the session and let the referee see it."""
        self.now_ns += 7_000_000
        event = kind(at_ns=self.now_ns, **fields)
        self.take(event, self.session.step(event))

    def take(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Do what the effects ask for, as far as it changes what can happen next."""
        type(self).steps += 1
        self.referee.observe(event, effects)
        for effect in effects:
            match effect:
                case ef.EnterQueue():
                    self.waits = True
                case ef.LeaveQueue():
                    self.calls.append(effect)
                case ef.SetTimer():
                    self.timers[effect.name] = effect.generation
                case ef.CancelTimer():
                    self.timers.pop(effect.name)
                case ef.OpenBackend():
                    # No dialect of today can ask for it; the machine obeys it all the same.
                    kind = self.session.kind
                    assert isinstance(kind, Duplex)
                    kind.loop.deferred_finalize = self.deferred
                    self.calls.append(effect)
                case ef.Send() | ef.Attach() | ef.Close() | ef.Interrupt() | ef.DropUnit():
                    pass
                case _:
                    self.calls.append(effect)

    # -- the client -----------------------------------------------------------------------------

    @rule(samples=st.sampled_from([4000, 8000, 16000, 16000, 23456]), force=st.booleans())
    def client_appends(self, samples: int, force: bool) -> None:
        """Audio comes, of any length."""
        self.appended += 1
        number = self.appended % 61 + 1
        self.post(ev.FrameReceived, frame=append(self.dialect, samples, number, force))

    @rule()
    def client_floods(self) -> None:
        """Nine seconds come at once."""
        self.appended += 1
        number = self.appended % 61 + 1
        self.post(ev.FrameReceived, frame=append(self.dialect, 9 * 16_000, number, False))

    @rule()
    def client_inits(self) -> None:
        """The client says how it wants its session."""
        self.post(ev.FrameReceived, frame=init(self.dialect))

    @rule(number=st.integers(0, 29))
    def client_errs(self, number: int) -> None:
        """Something that is wrong comes; the fatal kinds are rarer."""
        frame = GARBAGE[number] if number < len(GARBAGE) else GARBAGE[4 + number % 10]
        if frame in GARBAGE[:4] + GARBAGE[7:8] and number != 0:
            frame = "{}"
        self.post(ev.FrameReceived, frame=frame)

    @rule(dice=st.integers(0, 19))
    def client_leaves(self, dice: int) -> None:
        """The client closes, or is gone, now and then."""
        if dice == 0:
            self.post(ev.FrameReceived, frame='{"type": "session.close", "reason": "bye"}')
        elif dice == 1:
            self.post(ev.PeerGone)
        elif dice == 2:
            self.post(ev.SendFailed)

    @precondition(lambda self: self.referee.trace.numbered)
    @rule(dice=st.integers(0, 9), missed=st.integers(0, 9), between=st.integers(0, 4))
    def client_comes_back(self, dice: int, missed: int, between: int) -> None:
        """It loses its connection, falls asleep or not, and comes back; or it takes over."""
        if dice:
            self.post(ev.PeerGone, code=1006)
        if dice > 3 and "detach" in self.timers:
            generation = self.timers.pop("detach")
            self.post(ev.TimerFired, name="detach", generation=generation)
        for _ in range(between):
            if self.calls:
                self.end_call(self.calls.pop(0), 9)
        after = max(-1, self.referee.trace.sends - 1 - missed)
        if not self.session.is_finished:
            self.post(ev.PeerAttached, after=after, resume_hash="1" * 64)

    # -- the server -----------------------------------------------------------------------------

    @precondition(lambda self: self.waits)
    @rule(position=st.integers(1, 3))
    def queue_moves(self, position: int) -> None:
        """Its place changes."""
        place = QueuePlace(
            position=position, estimated_wait_s=9, ticket_id="ticket_1", queue_length=3
        )
        self.post(ev.TicketMoved, place=place)

    @precondition(lambda self: self.waits)
    @rule(dice=st.integers(0, 29))
    def queue_answers(self, dice: int) -> None:
        """A slot, mostly; a refusal or a deleted ticket, rarely."""
        self.waits = False
        self.calls = [call for call in self.calls if not isinstance(call, ef.LeaveQueue)]
        if dice == 0:
            self.post(ev.AdmissionRefused, code=ErrorCode.QUEUE_FULL)
        elif dice == 1:
            self.post(ev.TicketCancelled)
        else:
            self.lease += 1
            self.post(ev.SlotLeased, lease=self.lease, slot=0)

    @precondition(lambda self: self.calls)
    @rule(ends=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), min_size=1, max_size=5))
    def calls_end(self, ends: list[tuple[int, int]]) -> None:
        """Some of the calls under way come to an end, well or badly, in any order."""
        for at, dice in ends:
            if self.calls:
                self.end_call(self.calls.pop(at % len(self.calls)), dice)

    def end_call(self, call: ef.Effect, dice: int) -> None:
        """Tell how a call ended."""
        match call:
            case ef.LeaveQueue():
                self.waits = False
                self.post(ev.TicketLeft)
            case ef.OpenBackend():
                if dice == 0:
                    self.post(ev.BackendOpenFailed, lease=call.lease, context_full=dice % 2 == 0)
                else:
                    self.post(ev.BackendOpened, lease=call.lease, opened=Opened(prompt_length=9))
            case ef.StartUnit():
                self.end_unit(call, dice)
            case ef.StartFinalize():
                done = Finalized(index=call.index, kv_length=9)
                if dice in (0, 1):
                    self.post(ev.FinalizeFailed, index=call.index)
                else:
                    self.post(ev.FinalizeDone, finalized=done)
            case ef.Rollback():
                kind = ev.RollbackFailed if dice == 0 else ev.RollbackDone
                self.post(kind, index=call.index)
            case ef.Release():
                self.post(ev.BackendReleased, lease=call.lease)
            case ef.Rebuild() if dice == 0:
                self.post(ev.RebuildFailed, lease=call.lease)
            case ef.Rebuild():
                self.post(ev.Rebuilt, lease=call.lease, steps=1)
            case ef.DecodeMedia():
                self.post(ev.MediaDecoded, media=call.media)

    def end_unit(self, call: ef.StartUnit, dice: int) -> None:
        """A unit fails, is too much, is cut, listens or speaks."""
        index = call.unit.index
        if dice in (0, 1):
            self.post(ev.UnitFailed, index=index, context_full=dice == 1)
            return
        cut = Cut(stage="llm", step=1) if self.referee.trace.withheld and dice % 2 else None
        speaks = dice > 10
        result = UnitResult(
            index=index,
            is_listen=not speaks,
            cut=cut,
            kv_length=9000 if dice == 2 else 100,
            text="a" * (dice % 3) if speaks else "",
            pcm=b"\0\0\0\0" * (dice % 2) if speaks else b"",
            end_of_turn=speaks and dice % 4 == 0,
        )
        self.post(ev.UnitDone, result=result)

    @rule(
        name=st.sampled_from(["session", "init", "cleanup", "rebuild", "detach", "resume"]),
        dice=st.integers(0, 9),
    )
    def timer_fires(self, name: str, dice: int) -> None:
        """A timer's time has come; or a stale one's."""
        if dice == 0 and name in self.timers:
            self.post(ev.TimerFired, name=name, generation=self.timers.pop(name))
        else:
            self.post(ev.TimerFired, name=name, generation=0)

    @rule(index=st.integers(-1, 3), dice=st.integers(0, 7))
    def stale_completion(self, index: int, dice: int) -> None:
        """Something that nobody waits for comes in: it must change nothing."""
        pending = [getattr(call, "index", None) for call in self.calls]
        pending += [call.unit.index for call in self.calls if isinstance(call, ef.StartUnit)]
        if index in pending:
            return
        result = UnitResult(index=index, is_listen=False, text="stale")
        stale: tuple[tuple[type[Any], dict[str, Any]], ...] = (
            (ev.UnitDone, {"result": result}),
            (ev.UnitFailed, {"index": index}),
            (ev.FinalizeDone, {"finalized": Finalized(index=index, kv_length=1)}),
            (ev.FinalizeFailed, {"index": index}),
            (ev.RollbackDone, {"index": index}),
            (ev.BackendLost, {"lease": 999}),
            (ev.Rebuilt, {"lease": 999, "steps": 0}),
            (ev.LeaseRevoked, {"lease": 999}),
        )
        kind, fields = stale[dice]
        before = self.session.digest(), self.session.state
        self.now_ns -= 7_000_000  # so that the clock, a part of the state, stands still
        self.post(kind, **fields)
        assert (self.session.digest(), self.session.state) == before

    @rule(dice=st.integers(0, 39))
    def server_fails(self, dice: int) -> None:
        """The backend is lost, the recording fails, the server shuts down; rarely."""
        if dice == 4 and self.lease:
            self.post(ev.LeaseRevoked, lease=self.lease)
        elif dice in (0, 5) and self.lease:
            self.lose_worker()
        elif dice == 1:
            self.post(ev.RecordingFailed)
        elif dice == 2:
            self.post(ev.Draining)
        elif dice == 3:
            self.post(ev.DrainBegan, wait_s=30)

    def lose_worker(self) -> None:
        """The calls of the worker end with it."""
        keeps = ef.Release | ef.LeaveQueue
        self.calls = [call for call in self.calls if isinstance(call, keeps)]
        self.post(ev.BackendLost, lease=self.lease)

    @precondition(lambda self: self.lease)
    @rule(steps=st.integers(1, 6), revoked=st.booleans(), between=st.booleans())
    def session_moves(self, steps: int, revoked: bool, between: bool) -> None:
        """Its worker is lost or drained, and another slot comes, or the move stops half way."""
        if revoked:
            self.post(ev.LeaseRevoked, lease=self.lease)
        else:
            self.lose_worker()
        for _ in range(steps):
            if between:
                self.client_appends(16_000, force=steps % 2 == 1)
            if self.calls:
                self.end_call(self.calls.pop(0), 9)
            elif self.waits:
                self.queue_answers(2)

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def referee_agrees(self) -> None:
        """No rule is broken, and the state is the one that its client can know."""
        assert not self.referee.violations
        if hasattr(self, "session"):
            assert self.session.state == self.referee.trace.state

    def teardown(self) -> None:
        """Whatever happened, once the client is gone and every call has ended the slot is back."""
        if not hasattr(self, "session"):
            return
        self.post(ev.PeerGone, code=CLOSE_NORMAL)
        for _ in range(9):
            if self.calls:
                self.end_call(self.calls.pop(0), 9)
        assert self.session.is_finished
        self.referee.finish()
        assert not self.referee.violations


EXAMPLES = sample(330, 75)
STEPS = sample(10_000, 2_000)
BUDGET = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
NO_SHRINKING = settings(
    BUDGET, max_examples=330, phases=[hypothesis.Phase.generate], report_multiple_bugs=False
)
"""Whether a mutant is caught is the question, not how briefly."""


@pytest.mark.slow
def test_no_rule_is_broken_in_thousands_of_steps() -> None:
    """A client is lied to, a slot lost, or a unit run on half-fed state."""
    SessionMachine.steps = 0
    run_state_machine_as_test(SessionMachine, settings=BUDGET)
    assert SessionMachine.steps >= STEPS


def mutant(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Give a way to break the machine."""

    def no_barrier(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Call, "is_idle", property(lambda self: self.phase is not Phase.RUNNING))
        patch.setattr(Call, "require", lambda self, phase: None)

    def barrier_opens_on_failed_finalize(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(UnitLoop, "finalize_failed", lambda self, _: self._go_on())

    def finalize_before_send(patch: pytest.MonkeyPatch) -> None:
        step = Session.step

        def swapped(self: Session, event: ev.Event) -> tuple[ef.Effect, ...]:
            effects = step(self, event)
            return tuple(sorted(effects, key=lambda e: not isinstance(e, ef.StartFinalize)))

        patch.setattr(Session, "step", swapped)

    def release_at_once(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Call, "is_idle", property(lambda self: True))

    def no_interrupt(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(UnitLoop, "cut", lambda self: None)

    def any_completion_will_do(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Call, "awaits", lambda self, phase, index: self.phase is phase)

    return locals()[name]


FEW_MUTANTS = ["barrier_opens_on_failed_finalize", "finalize_before_send", "release_at_once"]
"""Those that are caught soonest; test_referee.py breaks each rule by itself."""
MUTANTS = [*FEW_MUTANTS, "no_barrier", "no_interrupt", "any_completion_will_do"]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("name", sample(MUTANTS, FEW_MUTANTS))
def test_a_broken_machine_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules above are checked by nothing."""
    mutant(name)(monkeypatch)
    with pytest.raises((AssertionError, LocalProtocolError, ExceptionGroup)):
        run_state_machine_as_test(SessionMachine, settings=NO_SHRINKING)


def test_the_table_has_an_end_and_no_way_back() -> None:
    """A CLOSED session says something more."""
    for table in TRANSITIONS.values():
        for row in table.values():
            assert all(target in table for target in row.values())
        assert not table[State.CLOSED]
