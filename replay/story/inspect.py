"""Reports what happened in a session from its log: its states, units, drops, errors and end.

Values are those recorded. Only the states come from stepping the session, so they end at a
divergence. Damage is counted and skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from protocol.values.limits import NS_PER_MS
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from recorder.storage.marks import Marks
from recorder.storage.summary import WALL_MS_MAX, session_id_in

from ..rerun.environment import model_of
from ..rerun.logic import Replayer
from ..shared.fields import typed
from .exchanges import OUTPUTS, Exchange
from .inspection import Inspection, Mark, StateSpan, UtteranceStory
from .reading import Passage, SessionStory


def inspect(head: Fields, items: Iterable[Record | Damage]) -> Inspection:
    """Read a session, given the fields of its `session` record, all records in order and damage."""
    inspector = Inspector()
    for item in items:
        inspector.take(item)
    return inspector.inspection(head)


def with_marks(told: Inspection, later: Marks) -> Inspection:
    """Add the marks next to the log."""
    more = [
        Mark(at_ns=it.at_ms * NS_PER_MS, text=it.text, by=it.by or None, is_later=True)
        for it in later.marks
    ]
    marks = sorted([*told.marks, *more], key=lambda it: it.at_ns)
    return attrs.evolve(told, marks=tuple(marks))


class Inspector(SessionStory):
    """A story that keeps its states and its exchanges without their outputs."""

    def __init__(self) -> None:
        self.replayer: Final = Replayer(go_on=True)
        super().__init__(self.replayer, leaves_out=OUTPUTS)
        self._states: list[StateSpan] = []
        self._told: list[Exchange] = []
        self._utterances: dict[int, UtteranceStory] = {}

    def take(self, item: Record | Damage) -> Passage | None:
        """Take the next record, or damage."""
        passage, session = super().take(item), self.session
        if passage is None:
            return None
        if session is not None and not self.replayer.is_stopped:
            state = StateSpan(state=session.state, at_ns=passage.record.at_ns)
            if not self._states or self._states[-1].state is not state.state:
                self._states.append(state)
        if passage.ended is not None:
            self._keep(passage.ended)
        return passage

    def _keep(self, exchange: Exchange) -> None:
        if exchange.kind != "chunk":
            self._told.append(exchange)
            return
        index, heard = exchange.place[0], exchange.heard
        told = self._utterances.get(index)
        if told is None:
            told = UtteranceStory(index=index, started_ns=exchange.started_ns)
        if heard is not None:
            told = attrs.evolve(
                told,
                done_ns=exchange.done_ns,
                outcome="done" if exchange.is_last else told.outcome,
                chunks=told.chunks + 1,
                text=told.text + heard.text,
                prompt_tokens=told.prompt_tokens + heard.prompt_tokens,
                completion_tokens=told.completion_tokens + heard.generated_tokens,
                kv_length=heard.kv_length,
                longest_us=max(told.longest_us, heard.costs.wall_us),
            )
        elif exchange.done_ns is not None:
            told = attrs.evolve(told, done_ns=exchange.done_ns, outcome=exchange.outcome)
        self._utterances[index] = told

    def inspection(self, head: Fields) -> Inspection:
        """Return the inspection, once all records are taken."""
        last, self.exchanges.current = self.exchanges.current, None
        if last is not None:
            self._keep(last)
        session, opened, divergence = self.session, self.opened, self.replayer.report().divergence
        ended = session.end_reason if session is not None else None
        wall_ms = typed(head, "wall_ms", int)
        return Inspection(
            recording_id=typed(head, "recording_id", str),
            session_id=session_id_in(head),
            model=model_of(head),
            mode=opened.mode if opened is not None else None,
            dialect=session.dialect_name if session is not None else None,
            seed=typed(head, "seed", int),
            wall_ms=wall_ms if wall_ms is not None and 0 <= wall_ms <= WALL_MS_MAX else None,
            duration_ns=self.duration_ns,
            states=tuple(self._states),
            frames_received=self.frames_received,
            shortened=tuple(self.shortened),
            frames_sent=self.frames_sent,
            fields_ignored=0 if session is None else session.counts["fields_ignored"],
            units=tuple(it for it in self._told if it.kind == "unit"),
            turns=tuple(it for it in self._told if it.kind == "turn"),
            utterances=tuple(self._utterances.values()),
            drops=tuple(self.drops),
            moves=tuple(self.moves),
            absences=tuple(self.absences.told),
            playback=tuple(self.playback),
            said=tuple(self.said),
            errors=tuple(self.errors),
            marks=tuple(self.marks),
            end=attrs.evolve(self.end, reason=self.end.reason or ended),
            records=self.records,
            damage_count=self.damage_count,
            diverged_seq=divergence.seq if divergence is not None else None,
        )
