"""The measures of one recording: what is gathered from its log, and what follows from that.

The log is read once, as a time line (`export.timeline`): its moments have sound and words where
they are heard, and the story behind them has the events. Units are metered by the server's own
meter, so a recording has as many late ones as the server counted; that needs the session to be
stepped, and ends where it cannot be. Memory holds intervals and counts, and no sound.

The measures of Full-Duplex-Bench that need timestamps only were written from what its code computes
(v1: `eval_smooth_turn_taking`, `eval_pause_handling`; v1.5: `get_timing`), and share no line with
it. There a transcriber and a detector give the timestamps.

A forced session (`antiphon eval --mode forced`) is measured from its units. Their sound is in the
session's own count of samples, so the user's speech is found as in a log whose server did not
search for it.

Inside are integers only: ticks of sound, nanoseconds of the session's clock, counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, Self

import attrs

from protocol.values import events as ev
from protocol.values.limits import NS_PER_MS, OF_MODE, Mode, Work
from protocol.values.model import UNIT_SAMPLES, Unit, UnitResult
from recorder.format.format import Fields, Record
from recorder.format.mapping import EVENT_KINDS
from recorder.read.scan import Damage
from runtime.measures import conversation as limits
from runtime.measures.conversation import (
    TICK_HZ,
    TICKS_PER_MS,
    Conversation,
    Ratio,
    Scores,
    Span,
    Times,
    Total,
    TrackedToolCall,
    Value,
    joined,
    ns_of,
    ratio,
    shared,
    talk_scores,
    times,
    tool_scores,
)
from runtime.measures.talk import Sound, SpeechSource, Talk, UserSound, UserSpeech, time_of
from runtime.model.backends.base import ForcedResult, ListenDecision
from runtime.telemetry import catalogue as c
from runtime.telemetry.meters import Instruments, ModeInstruments, UnitMeter

from ..export.timeline import Moment, Timeline, Words
from ..rerun.outputs import is_near_tie
from ..shared.recordings import removed_in, typed
from ..story.model_calls import ModelCall
from ..story.reading import DecodedRecord, SessionStory

Lost = Literal["speech", "words"]
"""What a redaction took out that measures need: the user's sound, or the model's text."""


@attrs.frozen(kw_only=True)
class Answer:
    """A question of a chat, and when its answer came.

    Attributes:
        piece_ns: when its first piece was sent; None if none was.
        sound_ns: when its first sample was played.
        generating_ns: from the end of the prefill to the end of the answer; 0 if it did not end.
    """

    asked_ns: int
    piece_ns: int | None = None
    sound_ns: int | None = None
    generated_tokens: int = 0
    generating_ns: int = 0


@attrs.frozen(kw_only=True)
class Facts:
    """A recording.

    Attributes:
        recording_id, mode, dialect: None if the log does not say.
        work: what its mode asks of a model.
        finished: the log has its end.
        damage_count: of the log; with damage the facts have gaps.
        lost: what is missing for some measures; speech only if the log does not say where it was.
        speech_source: who found the user's speech; None except in duplex sessions.
        input_lead: when sound came that could not have been spoken yet, and by how much.
        late_units, answered_units: late is None if the session could not be stepped to its end.
        decisions: units whose first token was free and has a margin.
        word_delays: of a transcription: when words came, and how long after their sound.
        calls: of tools, in a duplex session.
    """

    recording_id: str | None
    mode: Mode | None
    dialect: str | None
    work: Work
    duration_ns: int
    finished: bool
    damage_count: int
    lost: frozenset[Lost]
    speech_source: SpeechSource | None
    conversation: Conversation
    input_lead: tuple[int, int] | None
    errors: int
    dropped_units: int
    late_units: int | None
    answered_units: int
    underruns: int
    near_ties: int
    decisions: int
    answers: tuple[Answer, ...]
    word_delays: tuple[tuple[int, int], ...]
    calls: tuple[TrackedToolCall, ...] = ()


# -- gathered from a log ---------------------------------------------------------------------------


def gather(
    head: Fields, items: Iterable[Record | Damage], also: Callable[[Moment], object] | None = None
) -> Facts:
    """Read a log, given the fields of its `session` record, its records in order, and damage.

    `also` is called with each moment of its time line.
    """
    with FactsCollector(head, also=also) as collector:
        for item in items:
            collector.take(item, collector.story.take(item))
        return collector.end()


class FactsCollector:
    """Gathers the facts while `story` reads a log; a context, which lets go of held sound.

    `also` is called with each moment of the `timeline`.
    """

    def __init__(
        self,
        head: Fields,
        story: SessionStory | None = None,
        also: Callable[[Moment], object] | None = None,
    ) -> None:
        self.timeline: Final = Timeline(head, story=story)
        self.story: Final = self.timeline.story
        self._also: Final = also
        self._talk: Final = Talk()
        self._talked_ns = 0
        self._units: Final = _Units()
        self._chat: Final = _Chat()
        self._word_delays: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.timeline.close()

    def take(self, item: Record | Damage, decoded: DecodedRecord | None) -> None:
        """Take the next record, or damage, as the story read it."""
        moments = [*self.timeline.take(item, decoded)]
        if decoded is not None:
            self._take_decoded(decoded)
        self._take_moments(moments)

    def end(self) -> Facts:
        """Return the facts, once all records are taken."""
        self._take_moments(self.timeline.end())
        story, units, talk = self.story, self._units, self._talk
        if story.model_calls.current is not None:
            self._chat.ended(story.model_calls.current)
        work = self._work
        is_talk = work == "unit"
        opened, session = story.opened, story.session
        return Facts(
            recording_id=typed(self.timeline.head, "recording_id", str),
            mode=None if opened is None else opened.mode,
            dialect=None if session is None else session.dialect_name,
            work=work,
            duration_ns=story.duration_ns,
            finished=story.end.finished,
            damage_count=story.damage_count,
            lost=lost_in(self.timeline.head) - _IN_EVENTS[talk.user.source],
            speech_source=talk.user.source if is_talk else None,
            conversation=talk.conversation(self._talked_ns) if is_talk else Conversation(),
            input_lead=talk.user.lead if is_talk else None,
            errors=len(story.errors),
            dropped_units=len(story.drops),
            late_units=int(units.sum_of(c.UNITS_LATE)) if units.is_in_step else None,
            answered_units=int(units.sum_of(c.UNIT_ANSWER_SECONDS, is_counted=True)),
            underruns=talk.model.underruns,
            near_ties=units.near_ties,
            decisions=units.decisions,
            answers=self._chat.answers() if work == "turn" else (),
            word_delays=tuple(self._word_delays),
            calls=tuple(story.calls.found.values()),
        )

    @property
    def _work(self) -> Work:
        opened = self.story.opened
        return "unit" if opened is None else OF_MODE[opened.mode].work

    def _take_moments(self, moments: Iterable[Moment]) -> None:
        for moment in moments:
            match moment:
                case Sound(voice="model"):
                    self._chat.answer(moment.at_ns, moment.begin_ns)
                case Words(voice="model"):
                    self._chat.answer(moment.at_ns)
            if self._also is not None:
                self._also(moment)

    def _take_decoded(self, decoded: DecodedRecord) -> None:
        record, story, request = decoded.record, self.story, self.timeline.request
        if record.kind in EVENT_KINDS:
            self._talked_ns = record.at_ns
        if decoded.effect == "DetectSpeech":
            at, rate_hz = (typed(record.fields, name, int) for name in ("at_samples", "rate_hz"))
            if at is not None and rate_hz:
                silence_ms = typed(record.fields, "silence_ms", int)
                self._talk.user.searched(record.at_ns, at, rate_hz, silence_ms)
        if request is not None:
            self._talk.received(record.at_ns, story.wire.piece or request)
        for message in self.timeline.messages:
            self._talk.sent(record.at_ns, message)
        if decoded.effect == "StartUnit" and story.session is not None and story.is_in_step:
            self._talk.unit_started(record.at_ns, story.session.samples_waiting)
        match decoded.event:
            case ev.SpeechStarted() | ev.SpeechStopped():
                self._talk.user.found(decoded.event)
            case ev.UnitDone(result=result):
                self._units.decided(result, story.model_calls.current, story.forced_units)
            case ev.ChunkDone(at_ns=at_ns, result=result) if result.text:
                fed_ns = story.backlog.fed_ns
                if fed_ns:  # else the dialect's sound is not placed
                    self._word_delays.append((at_ns, max(0, at_ns - fed_ns)))
        if decoded.ended is not None:
            self._chat.ended(decoded.ended)
        if story.session is not None:
            self._chat.asked(record.at_ns, story.session.counts)
        if self._work == "unit":
            self._units.take(decoded, self.timeline)


def lost_in(head: Fields) -> frozenset[Lost]:
    """Say what redactions took out of a log."""
    removed = removed_in(head)
    return frozenset(lost for lost, kind in _LOST.items() if kind in removed)


_LOST: Final[Mapping[Lost, tuple[str, str]]] = {
    "speech": ("audio", "user"),
    "words": ("text", "model"),
}
_IN_EVENTS: Final[Mapping[SpeechSource, frozenset[Lost]]] = {
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

    def decided(self, result: UnitResult, unit: ModelCall | None, forced: int) -> None:
        """Take a result; the first `forced` units of a session have to listen."""
        is_it = unit is not None and (unit.kind, unit.index) == ("unit", result.index)
        is_free = is_it and unit is not None and not unit.forced and result.index >= forced
        if is_free and result.margin > 0:
            self.decisions += 1
            self.near_ties += result.margin < limits.NEAR_TIE_LOGITS

    def take(self, decoded: DecodedRecord, timeline: Timeline) -> None:
        """Meter an event; it goes on no further once one could not be stepped."""
        step, session = decoded.step, timeline.story.session
        is_event = decoded.record.kind in EVENT_KINDS
        self.is_in_step = self.is_in_step and (step is not None or not is_event)
        if step is None or session is None or not self.is_in_step:
            return
        if isinstance(step.event, ev.ConnectionOpened):
            self._made = Instruments()
            self._meter = UnitMeter(ModeInstruments(self._made, step.event.mode))
        if self._meter is not None:
            self._meter.saw(step.event, step.effects, session)

    def sum_of(self, metric: c.Metric, *, is_counted: bool = False) -> float:
        """Sum a metric over its labels; if it is counted, its cases."""
        if self._made is None:
            return 0
        found = (self._made.series(metric, *labels) for labels in metric.series)
        return sum(sum(series.counts) if is_counted else series.total for series in found)


class _Chat:
    """The questions of a chat and their answers."""

    def __init__(self) -> None:
        self._asked: list[Answer] = []
        self._turns = 0
        self._pieces: list[tuple[int, int | None]] = []

    def asked(self, at_ns: int, counts: Mapping[str, int]) -> None:
        """Note a question, if the session has counted another one."""
        turns = counts.get("turns", 0)
        if turns > self._turns:
            self._asked.append(Answer(asked_ns=at_ns))
        self._turns = turns

    def answer(self, at_ns: int, sound_ns: int | None = None) -> None:
        """Take a piece of an answer: when it was sent, and when its sound was played."""
        self._pieces.append((at_ns, sound_ns))

    def ended(self, turn: ModelCall) -> None:
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
        for at_ns, sound_ns in sorted(self._pieces, key=lambda piece: piece[0]):
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


# -- measures --------------------------------------------------------------------------------------


OF_WORDS: Final = ("barge_in_words", "fdb_v1_take_over_rate", "fdb_v1_latency")
"""Measures that count the model's words."""


def score(facts: Facts) -> Scores:
    """Return the measures that mean something in a recording."""
    found: dict[str, Value | None] = {"errors": Total(facts.errors)}
    match facts.work:
        case "unit":
            found |= service_scores(facts)
            spoken = () if "speech" in facts.lost else facts.conversation.user
            found |= tool_scores(facts.calls, spoken)
            if "speech" not in facts.lost and not facts.conversation.is_written:
                found |= conversation_scores(facts.conversation)
            if "words" in facts.lost:
                found |= dict.fromkeys(OF_WORDS)
        case "turn":
            found |= _chat(facts.answers)
        case "chunk":
            found["word_delay"] = times(facts.word_delays)
    return {name: value for name, value in found.items() if value is not None}


def conversation_scores(talk: Conversation) -> dict[str, Value | None]:
    """Measure two voices."""
    return {**talk_scores(talk), **benchmark_scores(talk)}


def service_scores(facts: Facts) -> dict[str, Value | None]:
    """Measure how the server kept up with a duplex session."""
    late, answered = facts.late_units, facts.answered_units
    found: dict[str, Value | None] = {
        "near_tie_rate": ratio(facts.near_ties, facts.decisions),
        "input_lead": None if facts.input_lead is None else Times((facts.input_lead,)),
    }
    if answered or facts.dropped_units:
        found["dropped_units"] = Total(facts.dropped_units)
    if answered and late is not None:
        found |= {"late_units": Total(late), "deadline_miss_rate": ratio(late, answered)}
    if facts.conversation.model:
        found["underruns"] = Total(facts.underruns)
    return found


def _chat(answers: Iterable[Answer]) -> dict[str, Value | None]:
    answers = [*answers]
    tokens = [it for it in answers if it.generated_tokens and it.generating_ns > 0]
    return {
        "chat_response_delay": times(
            (it.asked_ns, it.piece_ns - it.asked_ns) for it in answers if it.piece_ns is not None
        ),
        "chat_time_to_first_audio": times(
            (it.asked_ns, it.sound_ns - it.asked_ns) for it in answers if it.sound_ns is not None
        ),
        "chat_tokens_per_second": ratio(
            sum(it.generated_tokens for it in tokens), sum(it.generating_ns for it in tokens)
        ),
    }


# -- Full-Duplex-Bench -----------------------------------------------------------------------------


def benchmark_scores(talk: Conversation) -> dict[str, Value | None]:
    """Measure two voices as the benchmark does; None where it has nothing to measure."""
    takes = takes_turn(talk.model, sum(text.words for text in talk.texts))
    user = joined(talk.user, limits.FDB_USER_GAP_MS * TICKS_PER_MS + 1)
    model = joined(talk.model, limits.FDB_MODEL_GAP_MS * TICKS_PER_MS + 1)
    latency = None
    if takes and len(talk.user) == 1:
        end = talk.user[0].end
        latency = Times(((ns_of(end), ns_of(max(0, talk.model[0].begin - end))),))
    begins = [(it.end, [span.begin for span in model if span.begin > it.end]) for it in user]
    gaps = [Span(end, after[0]) for end, after in begins if after]
    return {
        "fdb_v1_take_over_rate": Ratio(int(takes), 1) if talk.user else None,
        "fdb_v1_latency": latency,
        "fdb_v1_5_stop_latency": _shortest(shared(user, model)),
        "fdb_v1_5_response_latency": _shortest(gaps),
    }


def takes_turn(model: Sequence[Span], words: int) -> bool:
    """Whether the model's sound is more than a few words in a short time (TOR)."""
    if not model:
        return False
    ticks = model[-1].end - model[0].begin
    return ticks >= limits.FDB_SHORT_MS * TICKS_PER_MS or words > limits.FDB_WORDS_MAX


def _shortest(spans: Iterable[Span]) -> Times | None:
    """Of the spans that end in the same millisecond take the shortest, in the order of the ends."""
    found: dict[int, Span] = {}
    for span in spans:
        end_ms = round(ns_of(span.end) / NS_PER_MS)
        if end_ms not in found or span.ticks < found[end_ms].ticks:
            found[end_ms] = span
    ordered = sorted(found.values(), key=lambda span: span.end)
    return times((ns_of(span.begin), ns_of(span.ticks)) for span in ordered)


# -- a forced session ------------------------------------------------------------------------------


OVERLAP_MIN: Final = limits.OVERLAP_MS_MIN * TICKS_PER_MS
MICRO: Final = 1_000_000
"""Logits inside are in millionths."""
NANO: Final = 1_000_000_000
"""Probabilities inside are in billionths: a `listen` of 2e-5 has five digits."""
_FLIPS: Final[Mapping[str, tuple[bool, bool]]] = {
    "take_overs_missed": (False, False),
    "take_overs_added": (False, True),
    "stops_missed": (True, True),
    "stops_added": (True, False),
}
"""Shares of decisions not as recorded: of those in an open turn, and recorded as silent."""


class ForcedSession:
    """The units of one session, in order; it keeps no sound.

    After a unit whose recorded decisions the model did not take, the others are only counted.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, ListenDecision, bool]] = []
        """The units that were free to decide: the index, the decision, whether it is a near-tie."""
        self._counts: Final = Counter[str]()
        self._units = self._elsewhere = 0
        self._speech: Final = UserSpeech()

    def take(self, unit: Unit, recorded: UnitResult, forced: ForcedResult) -> None:
        """Take a unit, the recorded result, and the forced one."""
        begin = (self._units + self._elsewhere) * UNIT_SAMPLES
        at_ns = time_of("user", begin + UNIT_SAMPLES)
        self._speech.add(UserSound.of(Sound(voice="user", at_ns=at_ns, begin=begin, pcm=unit.pcm)))
        made, counts = forced.result, self._counts
        is_same = (made.is_listen, made.decided_ids) == (recorded.is_listen, recorded.decided_ids)
        if self._elsewhere or not is_same:
            self._elsewhere += 1
            return
        stages = [choice.stage for choice in forced.choices]
        if forced.listen_decision is not None:
            first = next((it for it in forced.choices if (it.stage, it.step) == ("llm", 0)), None)
            is_tie = first is not None and is_near_tie(first) is True
            self._free.append((self._units, forced.listen_decision, is_tie))
            counts["tokens"] += len(recorded.decided_ids)
        counts["tokens_otherwise"] += stages.count("llm")
        counts["codes"] += len(recorded.codec_ids)
        counts["codes_otherwise"] += stages.count("tts")
        if recorded.logits_hash and made.logits_hash:
            counts["logits"] += 1
            counts["logits_otherwise"] += recorded.logits_hash != made.logits_hash
        if recorded.pcm:
            counts["sound"] += 1
            counts["sound_otherwise"] += recorded.pcm != made.pcm
        self._units += 1

    def scores(self) -> Scores:
        """Measure the session, once all units are taken."""
        spoken, counts = self._speech.spans(), self._counts
        leanings = [it for _, it, _ in self._free]
        flips = [is_tie for _, it, is_tie in self._free if it.is_silent != it.was_silent]
        margins = [it.margin for it in leanings if it.margin is not None]
        over = [it for index, it, _ in self._free if it.is_open and _is_spoken_over(index, spoken)]
        found: dict[str, Value | None] = {
            "decisions": Total(len(leanings)),
            "decision_agreement": ratio(len(leanings) - len(flips), len(leanings)),
            "near_tie_flips": _share(flips),
            "silence_margin": _mean(margins, MICRO),
            "barge_in_stops": _share(it.is_silent for it in over),
            "barge_in_listen_probability": _mean([it.listen for it in over], NANO),
            "barge_in_end_probability": _mean([it.turn_end for it in over], NANO),
            "units_elsewhere": Total(self._elsewhere),
        }
        for name, where in _FLIPS.items():
            there = [it for it in leanings if (it.is_open, it.was_silent) == where]
            found[name] = _share(it.is_silent != it.was_silent for it in there)
        for name in ("logits", "tokens", "codes", "sound"):
            found[f"{name}_otherwise"] = ratio(counts[f"{name}_otherwise"], counts[name])
        return {name: value for name, value in found.items() if value is not None}


def _is_spoken_over(index: int, spoken: Iterable[Span]) -> bool:
    """Whether the user speaks for `OVERLAP_MIN` in a unit."""
    second = Span(index * TICK_HZ, (index + 1) * TICK_HZ)
    return sum(second.overlap(span) for span in spoken) >= OVERLAP_MIN


def _mean(values: Sequence[float], scale: int) -> Ratio | None:
    return ratio(sum(round(value * scale) for value in values), len(values))


def _share(values: Iterable[bool]) -> Ratio | None:
    found = [*values]
    return ratio(sum(found), len(found))
