"""Run a fork: the recording's events on its own clock, through a new session and a model.

    recorded events --> client, changed --> Session --> journal --> the fork's own log
    calls of the model, timers <--answers at their recorded times--+

Rules:
- External events (frames, disconnects, the queue, decoded media, a shutdown) come at their recorded
  times. Answers to the session's own effects come after their recorded delays (`timeline`). Events
  at the same time keep the order of the recording.
- So a fork without a change equals its parent, except for names that derive from the recording.
- The fork ends where the recording ends: if its session has not ended by then, its client leaves.
- The log is a server's journal, and names its parent. The parent's annotations are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL
from protocol.values.state import State
from recorder.format.mapping import EVENT_KINDS, event_of, fin_fields
from recorder.format.records import Record
from recorder.read.scan import Damage
from runtime.model.backends.base import Backend
from runtime.session.journal import Journal

from ..story.questions import Call, answered, asked
from .calls import ForkedModel, ForkQuestion
from .client import Client
from .timeline import LAST_SEQ, Answer, RecordedTimes, numbered
from .values import CannotForkError, Change, Decisions, decisions_of

Place = tuple[int, int]
"""The time of an event: nanoseconds, then the recording's order for equal times."""
NEVER: Final[Place] = (1 << 63, LAST_SEQ)
Items = Iterable[Record | Damage]
Watch = Callable[[int, int], None]
"""Receives the number of finished units, and of all units."""


@attrs.frozen(kw_only=True)
class _Due:
    place: Place
    effect: ef.Effect
    answer: Answer | None


class _World:
    """Recorded external events and answers; `next` is the next with its time, None at the end."""

    def __init__(self, items: Items, at: int) -> None:
        self._at: Final = at
        self._answers: Final[dict[int, ev.Event]] = {}
        self._events: Final = self._read(items)
        self.next: tuple[Place, ev.Event] | None = next(self._events, None)

    def take(self) -> ev.Event:
        """Return the next event, and find the one after it."""
        assert self.next is not None
        event = self.next[1]
        self.next = next(self._events, None)
        return event

    def answer(self, seq: int) -> ev.Event | None:
        """Return the recorded answer of an earlier record, once; only of the prefix."""
        return self._answers.pop(seq, None)

    def _read(self, items: Items) -> Iterator[tuple[Place, ev.Event]]:
        for item in items:
            if not isinstance(item, Record) or item.kind not in EVENT_KINDS:
                continue
            event = event_of(item.fields, item.at_ns)
            call = answered(event)
            if call is not None:
                if call[0] == "open" or call[1] < self._at:
                    self._answers[item.seq] = event
            elif not isinstance(event, ev.TimerFired | ev.ConnectionOpened):
                yield (item.at_ns, item.seq), event


class ForkRun:
    """One fork in progress.

    `watch` is called with the number of finished units, and of all; `anyway` as in `ForkedModel`.
    `is_reached`: the unit of the fork was started, as required; `ended_early`: the fork was still
    running at the recording's end, so that its client left; `decided`: of each unit, what its model
    decided.
    """

    def __init__(
        self,
        times: RecordedTimes,
        change: Change,
        backend: Backend,
        journal: Journal,
        *,
        anyway: bool = False,
        watch: Watch = lambda _done, _units: None,
    ) -> None:
        self.model: Final = ForkedModel(backend, change.at, anyway=anyway)
        self.is_reached = False
        self.ended_early = False
        self.decided: dict[int, Decisions] = {}
        self._times: Final = times
        self._change: Final = change
        self._journal: Final = journal
        self._watch: Final = watch
        self._due: dict[Call | str, _Due] = {}
        self._openings = 0
        self._interrupted = -1
        self._closing: ef.StartFinalize | ef.Rollback | None = None

    async def run(self, connected: ev.ConnectionOpened, items: Items) -> Session:
        """Run the fork to its end, with its first event and the recording's records in order.

        `ForkRefusedError`: the change is not possible; `CannotForkError`: the model is lost, or
        does not reach the state of the recording.
        """
        world = _World(items, self._change.at)
        client = Client(self._change, connected, self._times.begin_sample)
        event: ev.Event = connected
        try:
            self._journal.append_event(connected)
            session, effects = Session.open(connected)
            await self._perform(session, connected, effects)
            while not session.is_finished:
                event = await self._next(session, world)
                events: tuple[ev.Event, ...] = (event,)
                if isinstance(event, ev.FrameReceived):
                    events = client.says(event, session)
                for each in events:
                    self._journal.append_event(each)
                    await self._perform(session, each, session.step(each))
        finally:
            await self.model.close()
        await self._journal.finish(event.at_ns, fin_fields(session, session.end_reason))
        return session

    # -- the next event ----------------------------------------------------------------------

    async def _next(self, session: Session, world: _World) -> ev.Event:
        call = min(self._due, key=lambda call: self._due[call].place, default=None)
        due_place = NEVER if call is None else self._due[call].place
        world_place = NEVER if world.next is None else world.next[0]
        place = min(due_place, world_place)
        if place[0] > self._times.end_ns and session.state is not State.CLOSED:
            self.ended_early = True
            is_final = (
                CLOSE_NORMAL if session.is_resumable else 0
            )  # else it would wait for its peer
            return ev.PeerGone(at_ns=self._times.end_ns, code=is_final)
        if place == world_place != NEVER:
            event = world.take()
            if isinstance(event, ev.BackendLost):
                self._due = {name: due for name, due in self._due.items() if due.answer is None}
            return event
        if call is None:
            raise CannotForkError("the recording leaves its session waiting for ever")
        return await self._answer(self._due.pop(call), world)

    async def _answer(self, due: _Due, world: _World) -> ev.Event:
        at_ns, seq = due.place
        if isinstance(due.effect, ef.SetTimer):
            timer = due.effect
            return ev.TimerFired(at_ns=at_ns, name=timer.name, generation=timer.generation)
        assert due.answer is not None, "only a timer comes without being asked"
        unit = due.effect.unit.index if isinstance(due.effect, ef.StartUnit) else None
        question = ForkQuestion(
            effect=due.effect,
            at_ns=at_ns,
            answer=due.answer,
            recorded=world.answer(seq),
            is_interrupted=unit is not None and unit == self._interrupted,
            lost=self._closing,
        )
        event = await self.model.answer(question)
        if due.effect is self._closing:
            self._closing = None
        if unit is not None:
            self._watch(unit + 1, self._times.units)
        if isinstance(event, ev.UnitDone):
            self.decided[event.result.index] = decisions_of(event.result)
        return event

    # -- effects --------------------------------------------------------------

    async def _perform(
        self, session: Session, event: ev.Event, effects: tuple[ef.Effect, ...]
    ) -> None:
        ready = self._journal.append_effects(session, event, effects)
        for effect in effects:
            self._note(effect, event.at_ns)
        await ready()

    def _note(self, effect: ef.Effect, now_ns: int) -> None:
        """Keep an effect until its answer; a call that hung in the recording has none."""
        match effect:
            case ef.SetTimer(name=name):
                at_ns, seq = self._times.firing(effect)
                place = (max(at_ns, now_ns), seq)
                self._due[name] = _Due(place=place, effect=effect, answer=None)
            case ef.CancelTimer(name=name):
                self._due.pop(name, None)
            case ef.StartFinalize() | ef.Rollback():
                self._closing = effect
            case ef.Interrupt(index=index):
                self._interrupted = index
            case ef.OpenBackend():
                self._openings += 1
            case ef.StartUnit(unit=unit) if unit.index == self._change.at:
                self.is_reached = unit.force_listen or not self._change.force_listen
        call = numbered(asked(effect), self._openings)
        answer = None if call is None else self._times.answer(call)
        if call is not None and answer is not None:
            place = (now_ns + answer.after_ns, answer.seq)
            self._due[call] = _Due(place=place, effect=effect, answer=answer)
