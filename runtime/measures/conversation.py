"""A conversation as intervals of time (`Span`), its turns, and the measures of them.

Who speaks when, the user's turns, their answers, and who speaks over whom follow from the intervals
of both voices; `Measure` is one measure with its values, and `replay.eval.evaluate` has all of them
in words. Inside are integers only: ticks of sound, nanoseconds of the session's clock, counts.

Intervals are half open, and in ticks of 1/48000 s since the session's start: a sample of the user
(16 kHz) is three of them and a sample of the model (24 kHz) two, so nothing is rounded.

A call of a tool is followed by the name that the model gave it, from the silent part that closes
it (`ToolCallTracker`). Its result is what the next unit feeds; the speech after that counts as the
model's answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.machine.input import UNANSWERED
from protocol.values import events as ev
from protocol.values import model
from protocol.values.limits import MS_PER_S, NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ

# -- measures and their values ---------------------------------------------------------------------

SPEECH_GAP_MS: Final = 500
"""Shorter silence within a voice's speech is part of the speech: breaths, and late pieces."""
PAUSE_MS: Final = 2_000
"""A user who goes on sooner has paused, and not ended a turn; longer pauses in a turn are rare."""
ANSWER_WAIT_MS: Final = 4_000
"""Silence for so long is not an answer: people begin to repeat what they said."""
SHORT_MS: Final = 1_000
"""Shorter speech is a backchannel or a false start: a word or two."""
YIELD_MS: Final = 2_000
"""A model that falls silent within this time has given way to a user who begins to speak."""
NEAR_TIE_LOGITS: Final = 0.5
"""Of two tokens that are nearer, the likelier one has less than 62 % of their probability."""
FDB_USER_GAP_MS: Final = 600
"""Full-Duplex-Bench v1.5 joins the user's speech over gaps up to this."""
FDB_MODEL_GAP_MS: Final = 500
"""Full-Duplex-Bench v1.5 joins the model's speech over gaps up to this."""
FDB_SHORT_MS: Final = 1_000
"""Full-Duplex-Bench v1 takes shorter speech of few words for no turn."""
FDB_WORDS_MAX: Final = 3
"""Full-Duplex-Bench v1 takes short speech of up to so many words for no turn."""
OVERLAP_MS_MIN: Final = 400
"""Speech over the model: shorter speech in a unit may not be noticed in it (`tiny` needs 0.4 s)."""


Kind = Literal["times", "total", "ratio"]
"""How a recording has it: as values of single moments, as one amount, or as a part of a whole."""
Unit = Literal["s", "words", "count", "share", "s/min", "tokens/s", "logits", "%"]
Better = Literal["lower", "higher", ""]
Source = Literal["Antiphon", "Full-Duplex-Bench v1", "Full-Duplex-Bench v1.5"]

SCALES: Final[Mapping[Unit, float]] = MappingProxyType(
    {
        **{"words": 1, "count": 1, "share": 1},
        **{"s": 1 / NS_PER_S, "s/min": 60, "tokens/s": NS_PER_S},
        **{"logits": 1e-6, "%": 1e-7},
    }
)
"""By unit: the factor from an internal value to a shown one.

Internal times are nanoseconds, logits millionths, and probabilities billionths.
"""


@attrs.frozen(kw_only=True)
class Measure:
    """One measure.

    Attributes:
        better: which values are good; empty if the measure only describes.
        modes: the sessions that have it; `forced`: duplex sessions judged by `--mode forced`.
    """

    name: str
    kind: Kind
    unit: Unit
    better: Better
    definition: str
    source: Source = "Antiphon"
    modes: Literal["duplex", "chat", "transcription", "all", "forced"] = "duplex"


@attrs.frozen
class Times:
    """Values of single moments: when (nanoseconds of the session), and how much."""

    values: tuple[tuple[int, int], ...]


@attrs.frozen
class Total:
    """One amount of a recording."""

    amount: int


@attrs.frozen
class Ratio:
    """A part of a whole, or a sum of several values; never of nothing."""

    part: int
    whole: int


Value = Times | Total | Ratio
Scores = Mapping[str, Value]
"""What was measured in a recording, by name; the other measures are absent."""
KINDS: Final[Mapping[type, Kind]] = MappingProxyType(
    {Times: "times", Total: "total", Ratio: "ratio"}
)


# -- intervals -------------------------------------------------------------------------------------

Voice = Literal["user", "model"]
VOICES: Final[tuple[Voice, ...]] = ("user", "model")
RATE_HZ: Final[Mapping[Voice, int]] = MappingProxyType(
    {"user": INPUT_RATE_HZ, "model": OUTPUT_RATE_HZ}
)
TICK_HZ: Final = 48_000
TICKS_PER_MS: Final = TICK_HZ // MS_PER_S
TICKS_PER_SAMPLE: Final[Mapping[Voice, int]] = MappingProxyType(
    {voice: TICK_HZ // rate_hz for voice, rate_hz in RATE_HZ.items()}
)


@attrs.frozen(order=True)
class Span:
    """A stretch of time in which one voice is heard, from `begin` until before `end`."""

    begin: int
    end: int

    @property
    def ticks(self) -> int:
        """Its length."""
        return self.end - self.begin

    def overlap(self, other: Span) -> int:
        """Count the ticks that it shares with another."""
        return max(0, min(self.end, other.end) - max(self.begin, other.begin))


def ticks_of(at_ns: int) -> int:
    """Return the tick at a time, or the last one before."""
    return at_ns * TICK_HZ // NS_PER_S


def ns_of(ticks: int) -> int:
    """Return a length in nanoseconds, without its fraction."""
    return ticks * NS_PER_S // TICK_HZ


def join(spans: list[Span], span: Span, gap: int) -> None:
    """Add a span after all others; with less than `gap` between them, the last one grows."""
    if span.ticks <= 0:
        return
    if spans and span.begin - spans[-1].end < gap:
        spans[-1] = Span(spans[-1].begin, max(spans[-1].end, span.end))
    else:
        spans.append(span)


def shared(one: Iterable[Span], other: Iterable[Span]) -> Iterator[Span]:
    """Yield where two voices are heard at once; spans of a voice are in order, and apart."""
    others = iter(other)
    current = next(others, None)
    for span in one:
        while current is not None:
            if span.overlap(current):
                yield Span(max(span.begin, current.begin), min(span.end, current.end))
            if current.end > span.end:
                break
            current = next(others, None)


def joined(spans: Iterable[Span], gap: int) -> tuple[Span, ...]:
    """Sort spans, and join those with less than `gap` between them; empty ones are left out."""
    found: list[Span] = []
    for span in sorted(spans):
        join(found, span, gap)
    return tuple(found)


# -- a conversation --------------------------------------------------------------------------------


@attrs.frozen
class Text:
    """Words of the model, counted, at the tick at which their sound begins."""

    begin: int
    words: int


@attrs.frozen(kw_only=True)
class Conversation:
    """Both voices of a duplex session; spans are in order and do not touch.

    Attributes:
        user: stretches of the user's speech.
        model: stretches of the model's sound, as it was played.
        texts: the model's words that were heard.
        stops: when the client asked the model to stop (`force_listen`).
        pauses: when the client paused the session.
        end: the end of the session.
    """

    user: tuple[Span, ...] = ()
    model: tuple[Span, ...] = ()
    texts: tuple[Text, ...] = ()
    stops: tuple[int, ...] = ()
    pauses: tuple[int, ...] = ()
    end: int = 0

    @property
    def is_written(self) -> bool:
        """Whether the model has no voice, so that its turns cannot be measured."""
        return bool(self.texts) and not self.model

    @property
    def ticks(self) -> int:
        """From the first sound of either voice to the last."""
        spans = (*self.user, *self.model)
        if not spans:
            return 0
        return max(span.end for span in spans) - min(span.begin for span in spans)


# -- turns -----------------------------------------------------------------------------------------


PAUSE: Final = PAUSE_MS * TICKS_PER_MS
ANSWER_WAIT: Final = ANSWER_WAIT_MS * TICKS_PER_MS
SHORT: Final = SHORT_MS * TICKS_PER_MS
YIELD: Final = YIELD_MS * TICKS_PER_MS

Gap = Literal["quiet", "mistaken", "end"]
"""What is between two stretches of the user's speech: a pause in which the model was silent, one
that it took for the end of the turn, or the end of the turn."""


@attrs.frozen(kw_only=True)
class Turn:
    """A turn of the user, and the model's answer.

    Attributes:
        until: an answer may begin until then: the user's next turn, a pause or the session's end.
        is_followed: the user's next turn came.
        answer: the first stretch of the model that begins after the turn's begin and is heard after
            its end; None without one.
        is_silent: the model was not heard for `ANSWER_WAIT` after the turn.
    """

    speech: Span
    until: int
    is_followed: bool
    answer: Span | None
    is_silent: bool

    @property
    def delay(self) -> int | None:
        """From its end to its answer; None without one, and for an answer that began earlier."""
        if self.answer is None or self.answer.begin < self.speech.end:
            return None
        return self.answer.begin - self.speech.end

    @property
    def is_judged(self) -> bool:
        """Whether it is known that it was answered, or was not."""
        waited = self.until - self.speech.end >= ANSWER_WAIT
        return self.answer is not None or self.is_followed or waited


@attrs.frozen(kw_only=True)
class BargeIn:
    """Speech of the user that begins over a stretch of the model's sound."""

    speech: Span
    over: Span

    @property
    def is_yielded_to(self) -> bool:
        """Whether the model fell silent while the user spoke, or soon after the user began."""
        return self.over.end <= max(self.speech.end, self.speech.begin + YIELD)

    @property
    def is_backchannel(self) -> bool:
        """Whether it is short, and the model went on."""
        return self.speech.ticks < SHORT and not self.is_yielded_to


class Turns:
    """One conversation's turns.

    Attributes:
        pauses: the gaps shorter than `PAUSE` that ended no turn.
        turns: the user's turns.
        barge_ins: backchannels left out.
        user_backchannels: how often the user said a word or two while the model spoke on.
        model_backchannels: short stretches of the model, each wholly within the user's speech.
        false_starts: short stretches of the model that begin in the user's silence and end in the
            user's speech.
        early_starts: stretches of the model that begin while the user speaks.
        unprompted: stretches of the model without speech of the user since the stretch before.
    """

    def __init__(self, talk: Conversation) -> None:
        over = [*_spoken_over(talk)]
        self.barge_ins: Final = [it for it in over if not it.is_backchannel]
        short = {it.speech for it in over if it.is_backchannel}
        self.user_backchannels: Final = len(short)
        speech = [span for span in talk.user if span not in short]
        gaps = [_gap_of(talk.model, *pair) for pair in pairwise(speech)]
        self.pauses: Final = [gap for gap in gaps if gap != "end"]
        self.turns: Final = [*_turns_of(talk, speech, gaps)]
        within = {span: _speaking_at(talk.user, span.begin) for span in talk.model}
        brief = [span for span in talk.model if span.ticks < SHORT]
        self.model_backchannels: Final = [
            it for it in brief if (over_ := within[it]) is not None and it.end <= over_.end
        ]
        self.false_starts: Final = [
            it for it in brief if within[it] is None and _speaking_at(talk.user, it.end) is not None
        ]
        backchannels = set(self.model_backchannels)
        self.early_starts: Final = [
            it for it in talk.model if within[it] is not None and it not in backchannels
        ]
        self.unprompted: Final = [*_unprompted(talk)]


def _speaking_at(spans: Sequence[Span], at: int) -> Span | None:
    """Return the span that holds a tick."""
    index = bisect_right(spans, at, key=lambda span: span.begin) - 1
    return spans[index] if index >= 0 and at < spans[index].end else None


def _spoken_over(talk: Conversation) -> Iterator[BargeIn]:
    for speech in talk.user:
        over = _speaking_at(talk.model, speech.begin)
        if over is not None and over.begin < speech.begin:
            yield BargeIn(speech=speech, over=over)


def _between(spans: Sequence[Span], begin: int, end: int) -> Sequence[Span]:
    """Return the spans that begin at `begin` or later, and before `end`."""
    first = bisect_right(spans, begin - 1, key=lambda span: span.begin)
    last = bisect_right(spans, end - 1, key=lambda span: span.begin)
    return spans[first:last]


def _speaks_within(spans: Sequence[Span], begin: int, end: int) -> bool:
    """Whether a voice is heard at any time from `begin` until before `end`."""
    return _speaking_at(spans, begin) is not None or bool(_between(spans, begin, end))


def _gap_of(model: Sequence[Span], before: Span, after: Span) -> Gap:
    if after.begin - before.end >= PAUSE:
        return "end"
    if any(span.end > after.begin for span in _between(model, before.end, after.begin)):
        return "mistaken"
    return "end" if _speaks_within(model, before.end, after.begin) else "quiet"


def _turns_of(talk: Conversation, speech: Sequence[Span], gaps: Sequence[Gap]) -> Iterator[Turn]:
    begin = 0
    for index, span in enumerate(speech):
        if index < len(gaps) and gaps[index] != "end":
            continue
        turn = Span(speech[begin].begin, span.end)
        begin = index + 1
        following = speech[begin].begin if begin < len(speech) else None
        yield _turn_of(talk, turn, following)


def _turn_of(talk: Conversation, turn: Span, following: int | None) -> Turn:
    ends = [talk.end if following is None else following]
    ends += talk.pauses[bisect_left(talk.pauses, turn.end) :][:1]
    until = min(ends)
    begun = _between(talk.model, turn.begin + 1, until)
    waited = turn.end + ANSWER_WAIT
    return Turn(
        speech=turn,
        until=until,
        is_followed=until == following,
        answer=next((span for span in begun if span.end > turn.end), None),
        is_silent=until >= waited and not _speaks_within(talk.model, turn.end, waited),
    )


def _unprompted(talk: Conversation) -> Iterator[Span]:
    since = -1
    for span in talk.model:
        last = bisect_right(talk.user, span.begin - 1, key=lambda it: it.begin) - 1
        if last < 0 or talk.user[last].end <= since:
            yield span
        since = span.begin


# -- the measures ----------------------------------------------------------------------------------


def talk_scores(talk: Conversation) -> Scores:
    """Return the measures that mean something."""
    turns = Turns(talk)
    found: dict[str, Value | None] = _taking(turns)
    if talk.model:
        found["self_talk"] = Total(ns_of(sum(span.ticks for span in turns.unprompted)))
    if talk.model and talk.user:
        found |= _starts(turns) | _over(talk, turns)
    return {name: value for name, value in found.items() if value is not None}


def _taking(turns: Turns) -> dict[str, Value | None]:
    judged = [turn for turn in turns.turns if turn.is_judged]
    answered = [(turn.speech.end, turn.answer) for turn in judged if turn.answer is not None]
    delays = [(turn.speech.end, turn.delay) for turn in judged if turn.delay is not None]
    first = delays[:1] if answered and delays and answered[0][0] == delays[0][0] else []
    mistaken = turns.pauses.count("mistaken")
    return {
        "response_delay": _lengths(delays),
        "time_to_first_audio": _lengths(first),
        "take_over_rate": ratio(len(answered), len(judged)),
        "unanswered": Total(sum(turn.is_silent for turn in judged)) if judged else None,
        "pause_take_over_rate": ratio(mistaken, len(turns.pauses)),
    }


def _starts(turns: Turns) -> dict[str, Value | None]:
    return {
        "false_starts": Total(len(turns.false_starts)),
        "early_starts": Total(len(turns.early_starts)),
        "user_backchannels": Total(turns.user_backchannels),
        "model_backchannels": Total(len(turns.model_backchannels)),
    }


def _over(talk: Conversation, turns: Turns) -> dict[str, Value | None]:
    yielded = [it for it in turns.barge_ins if it.is_yielded_to]
    stops = [(it.speech.begin, it.over.end - it.speech.begin) for it in yielded]
    words = [(ns_of(it.speech.begin), _words_after(talk, it)) for it in turns.barge_ins]
    return {
        "overlap": Total(ns_of(_overlap(talk.user, talk.model))),
        "talk_over": ratio(ns_of(_overlap(talk.user, turns.early_starts)), ns_of(talk.ticks)),
        "barge_ins": Total(len(turns.barge_ins)),
        "barge_in_yield_rate": ratio(len(yielded), len(turns.barge_ins)),
        "barge_in_stop_latency": _lengths(stops),
        "barge_in_words": times(words),
        "forced_stop_latency": _lengths(_forced_stops(talk)),
    }


def _overlap(one: Iterable[Span], other: Iterable[Span]) -> int:
    """Count the ticks that two voices share."""
    return sum(span.ticks for span in shared(one, other))


def _words_after(talk: Conversation, barge_in: BargeIn) -> int:
    begin, end = barge_in.speech.begin, barge_in.over.end
    return sum(text.words for text in talk.texts if begin <= text.begin < end)


def _forced_stops(talk: Conversation) -> Iterator[tuple[int, int]]:
    """The first request in each stretch: a client may repeat it with each sound."""
    stops = iter(sorted(talk.stops))
    at = next(stops, None)
    for span in talk.model:
        while at is not None and at < span.begin:
            at = next(stops, None)
        if at is not None and at < span.end:
            yield at, span.end - at
        while at is not None and at < span.end:
            at = next(stops, None)


def times(values: Iterable[tuple[int, int]]) -> Times | None:
    """Return values of single moments; None without one."""
    kept = tuple(values)
    return Times(kept) if kept else None


def _lengths(values: Iterable[tuple[int, int]]) -> Times | None:
    """Values in ticks."""
    return times((ns_of(at), ns_of(ticks)) for at, ticks in values)


def ratio(part: int, whole: int) -> Ratio | None:
    """Return a part of a whole; None if that is nothing."""
    return Ratio(part, whole) if whole else None


# -- calls of tools -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class TrackedToolCall:
    """A call of a tool in a duplex session.

    Attributes:
        at_ns: when it was sent; of one that was not, when it was refused.
        ended_ns: when its result, or an error in its place, was fed to the model, if it was.
        spoken_ns: when the model spoke next, if it did.
        result: what was fed.
        is_answered: the client's result was fed, and no error in its place.
    """

    at_ns: int
    call: str
    name: str = ""
    arguments: str = ""
    ended_ns: int | None = None
    spoken_ns: int | None = None
    result: str = ""
    is_answered: bool = False


class ToolCallTracker:
    """Follows the calls of a session; without texts, an hour of them takes some kilobytes."""

    def __init__(self, *, keeps_texts: bool = True) -> None:
        self.found: dict[str, TrackedToolCall] = {}
        self._keeps_texts: Final = keeps_texts
        self._faults: set[str] = set()
        self._silent: list[str] = []  # calls whose result was fed, and the model did not speak
        self._made = 0

    def take(self, event: ev.Event) -> list[TrackedToolCall]:
        """Take an event: what the model did in silence, or said; returns the calls that it made."""
        match event:
            case ev.FinalizeDone(at_ns=at_ns, finalized=done) if done.silent is not None:
                return [self._called(at_ns, it) for it in done.silent.spans if it.kind == "call"]
            case ev.UnitDone(at_ns=at_ns, result=result) if not result.is_listen:
                for call in self._silent:
                    self.found[call] = attrs.evolve(self.found[call], spoken_ns=at_ns)
                self._silent.clear()
        return []

    def _called(self, at_ns: int, span: model.Span) -> TrackedToolCall:
        self._made += 1
        call = f"t{self._made}"
        if span.fault:
            self._faults.add(call)
        text = span.arguments if self._keeps_texts else ""
        made = TrackedToolCall(at_ns=at_ns, call=call, name=span.name, arguments=text)
        self.found[call] = made
        return made

    def fed(self, each: model.UnitInput, at_ns: int) -> list[TrackedToolCall]:
        """Take an event that a unit feeds, maybe again; returns the call whose result it is."""
        story = self.found.get(each.call)
        if each.kind != "result" or story is None:
            return []
        if each.call not in self._silent:
            self._silent.append(each.call)
        self.found[each.call] = story = attrs.evolve(
            story,
            ended_ns=at_ns,
            result=each.text if self._keeps_texts else "",
            is_answered=each.call not in self._faults and each.text not in UNANSWERED,
        )
        return [story]


def tool_scores(calls: Iterable[TrackedToolCall], user: Sequence[Span]) -> dict[str, Value | None]:
    """Measure the calls of a session, given the user's speech; nothing without a call."""
    made = [*calls]
    if not made:
        return {}
    answered = [it for it in made if it.is_answered]
    return {
        "tool_calls": Total(len(made)),
        "tool_calls_unanswered": Total(len(made) - len(answered)),
        "tool_call_delay": times(_delays(made, user)),
        "tool_result_delay": times(
            (it.at_ns, it.ended_ns - it.at_ns) for it in answered if it.ended_ns is not None
        ),
        "tool_speech_delay": times(
            (it.ended_ns, it.spoken_ns - it.ended_ns)
            for it in answered
            if it.ended_ns is not None and it.spoken_ns is not None
        ),
    }


def _delays(calls: Iterable[TrackedToolCall], user: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """When each call was made, and how long after the user's last word."""
    for it in calls:
        index = bisect_right(user, it.at_ns, key=lambda span: ns_of(span.begin)) - 1
        ended_ns = ns_of(user[index].end) if index >= 0 else it.at_ns + 1
        if ended_ns <= it.at_ns:
            yield it.at_ns, it.at_ns - ended_ns
