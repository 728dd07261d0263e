"""Gathers the facts of one recording, in one reading of its log.

The log is told once, by `export.timeline`: its moments have sound and words where they are heard,
and the story behind them has the events. Units are metered by the server's own meter, so a
recording has as many late ones as the server counted; that needs the session to be stepped, and
ends where it cannot be. Memory holds intervals and counts, and no sound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self

import attrs

from protocol.values import events as ev
from protocol.values.messages import ServerMessage
from protocol.values.model import UnitResult
from protocol.values.modes import OF_MODE, Work
from protocol.values.requests import ClientMessage
from recorder.format.mapping import EVENT_KINDS
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from runtime.measures.conversation import Conversation
from runtime.measures.measure import NEAR_TIE_LOGITS
from runtime.measures.placing import Sound
from runtime.measures.talk import SpeechSource, Talk
from runtime.telemetry import catalogue as c
from runtime.telemetry.meters import Instruments, ModeInstruments, UnitMeter

from ..export.moments import Moment, Words
from ..export.timeline import Timeline
from ..shared.fields import removed_in, typed
from ..story.exchanges import Exchange
from ..story.reading import Passage, SessionStory
from .facts import Answer, Facts, Lost


def gather(head: Fields, items: Iterable[Record | Damage]) -> Facts:
    """Read a log, given the fields of its `session` record, its records in order, and damage."""
    with Gathering(head) as gathering:
        for item in items:
            gathering.take(item, gathering.story.take(item))
        return gathering.end()[1]


class Gathering:
    """Gathers the facts while `story` reads a log; a context, which lets go of held sound."""

    def __init__(self, head: Fields, story: SessionStory | None = None) -> None:
        self._timeline: Final = Timeline(head, watch=self._watch, story=story)
        self.story: Final = self._timeline.story
        self._talk: Final = Talk()
        self._talked_ns = 0
        self._units: Final = _Units()
        self._chat: Final = _Chat()
        self._word_delays: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline.close()

    def take(self, item: Record | Damage, passage: Passage | None) -> list[Moment]:
        """Take the next record, or damage, as the story read it; give the settled moments."""
        return self._told(self._timeline.take(item, passage))

    def end(self) -> tuple[list[Moment], Facts]:
        """Return the last moments and the facts, once all records are taken."""
        return self._told(self._timeline.end()), self._facts()

    def _told(self, moments: Iterable[Moment]) -> list[Moment]:
        told = [*moments]
        for moment in told:
            self._take(moment)
        return told

    def _facts(self) -> Facts:
        story, units, talk = self.story, self._units, self._talk
        if story.exchanges.current is not None:
            self._chat.ended(story.exchanges.current)
        work = self._work
        is_talk = work == "unit"
        opened, session = story.opened, story.session
        return Facts(
            recording_id=typed(self._timeline.head, "recording_id", str),
            mode=None if opened is None else opened.mode,
            dialect=None if session is None else session.dialect_name,
            work=work,
            duration_ns=story.duration_ns,
            finished=story.end.finished,
            damage_count=story.damage_count,
            lost=lost_in(self._timeline.head) - _SAID[talk.user.source],
            speech_source=talk.user.source if is_talk else None,
            conversation=talk.conversation(self._talked_ns) if is_talk else Conversation(),
            input_lead=talk.user.lead if is_talk else None,
            errors=len(story.errors),
            dropped_units=len(story.drops),
            late_units=units.late if units.is_in_step else None,
            answered_units=units.answered,
            underruns=talk.model.underruns,
            near_ties=units.near_ties,
            decisions=units.decisions,
            answers=self._chat.answers() if work == "turn" else (),
            word_delays=tuple(self._word_delays),
        )

    @property
    def _work(self) -> Work:
        opened = self.story.opened
        return "unit" if opened is None else OF_MODE[opened.mode].work

    # -- as it is told --------------------------------------------------------------------------

    def _take(self, moment: Moment) -> None:
        match moment:
            case Sound(voice="model"):
                self._chat.heard(moment.at_ns, moment.begin_ns)
            case Words(voice="model"):
                self._chat.heard(moment.at_ns)

    def _watch(
        self, passage: Passage, request: ClientMessage | None, messages: Sequence[ServerMessage]
    ) -> None:
        record, story = passage.record, self.story
        if record.kind in EVENT_KINDS:
            self._talked_ns = record.at_ns
        if passage.effect == "DetectSpeech":
            at, rate_hz = (typed(record.fields, name, int) for name in ("at_samples", "rate_hz"))
            if at is not None and rate_hz:
                silence_ms = typed(record.fields, "silence_ms", int)
                self._talk.user.searched(record.at_ns, at, rate_hz, silence_ms)
        if request is not None:
            self._talk.received(record.at_ns, story.wire.piece or request)
        for message in messages:
            self._talk.sent(record.at_ns, message)
        match passage.event:
            case ev.SpeechStarted() | ev.SpeechStopped():
                self._talk.user.found(passage.event)
            case ev.UnitDone(result=result):
                self._units.decided(result, story.exchanges.current, story.forced_units)
            case ev.ChunkDone(at_ns=at_ns, result=result) if result.text:
                heard_ns = story.dictated.heard_ns
                if heard_ns:  # else the dialect's sound is not placed
                    self._word_delays.append((at_ns, max(0, at_ns - heard_ns)))
        if passage.ended is not None:
            self._chat.ended(passage.ended)
        if story.session is not None:
            self._chat.asked(record.at_ns, story.session.counts)
        if self._work == "unit":
            self._units.take(passage, self._timeline)


def lost_in(head: Fields) -> frozenset[Lost]:
    """Say what redactions took out of a log."""
    removed = removed_in(head)
    return frozenset(lost for lost, kind in _LOST.items() if kind in removed)


_LOST: Final[Mapping[Lost, tuple[str, str]]] = {
    "speech": ("audio", "user"),
    "words": ("text", "model"),
}
_SAID: Final[Mapping[SpeechSource, frozenset[Lost]]] = {
    "log": frozenset({"speech"}),
    "energy": frozenset(),
}
"""What the events of a redacted log still hold, by where its speech was found."""


class _Units:
    """How the units of a session went; `is_in_step`: all of its events could be stepped."""

    def __init__(self) -> None:
        self.near_ties = self.decisions = 0
        self.is_in_step = True
        self._made: Instruments | None = None
        self._meter: UnitMeter | None = None

    def decided(self, result: UnitResult, unit: Exchange | None, forced: int) -> None:
        """Take a result; the first `forced` units of a session have to listen."""
        is_it = unit is not None and (unit.kind, unit.index) == ("unit", result.index)
        is_free = is_it and unit is not None and not unit.forced and result.index >= forced
        if is_free and result.margin > 0:
            self.decisions += 1
            self.near_ties += result.margin < NEAR_TIE_LOGITS

    def take(self, passage: Passage, timeline: Timeline) -> None:
        """Meter an event; it goes on no further once one could not be stepped."""
        step, session = passage.step, timeline.story.session
        is_event = passage.record.kind in EVENT_KINDS
        self.is_in_step = self.is_in_step and (step is not None or not is_event)
        if step is None or session is None or not self.is_in_step:
            return
        if isinstance(step.event, ev.ConnectionOpened):
            self._made = Instruments()
            self._meter = UnitMeter(ModeInstruments(self._made, step.event.mode))
        if self._meter is not None:
            self._meter.saw(step.event, step.effects, session)

    @property
    def late(self) -> int:
        """Units answered late."""
        return int(self._sum(c.UNITS_LATE))

    @property
    def answered(self) -> int:
        """Units answered."""
        return int(self._sum(c.UNIT_ANSWER_SECONDS, is_counted=True))

    def _sum(self, metric: c.Metric, *, is_counted: bool = False) -> float:
        if self._made is None:
            return 0
        found = (self._made.series(metric, *labels) for labels in metric.series)
        return sum(sum(series.counts) if is_counted else series.total for series in found)


class _Chat:
    """The questions of a chat and their answers."""

    def __init__(self) -> None:
        self._asked: list[Answer] = []
        self._turns = 0
        self._heard: list[tuple[int, int | None]] = []

    def asked(self, at_ns: int, counts: Mapping[str, int]) -> None:
        """Note a question, if the session has counted another one."""
        turns = counts.get("turns", 0)
        if turns > self._turns:
            self._asked.append(Answer(asked_ns=at_ns))
        self._turns = turns

    def heard(self, at_ns: int, sound_ns: int | None = None) -> None:
        """Take a piece of an answer: when it was sent, and when its sound was played."""
        self._heard.append((at_ns, sound_ns))

    def ended(self, turn: Exchange) -> None:
        """Take a turn that is over."""
        is_it = turn.kind == "turn" and turn.index < len(self._asked)
        if is_it and turn.prefilled_ns is not None and turn.done_ns is not None:
            self._asked[turn.index] = attrs.evolve(
                self._asked[turn.index],
                generated_tokens=turn.generated_tokens,
                generating_ns=turn.done_ns - turn.prefilled_ns,
            )

    def answers(self) -> tuple[Answer, ...]:
        """Return the questions in order, each with the pieces that were sent before the next."""
        found = [*self._asked]
        asked_ns = [answer.asked_ns for answer in found]
        for at_ns, sound_ns in sorted(self._heard, key=lambda piece: piece[0]):
            index = bisect_right(asked_ns, at_ns) - 1
            if index < 0:
                continue
            answer = found[index]
            if answer.piece_ns is None:
                answer = attrs.evolve(answer, piece_ns=at_ns)
            if answer.sound_ns is None and sound_ns is not None:
                answer = attrs.evolve(answer, sound_ns=sound_ns)
            found[index] = answer
        return tuple(found)
