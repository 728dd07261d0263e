"""A conversation as intervals of time (`placing.Span`), its turns, and the measures of them.

Who speaks when, the user's turns, their answers, and who speaks over whom follow from the intervals
of both voices; `measures` has the definitions in words. Inside are integers only: ticks of sound,
nanoseconds of the session's clock, counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal

import attrs

from . import measure
from .placing import TICKS_PER_MS, Span, ns_of, shared


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


PAUSE: Final = measure.PAUSE_MS * TICKS_PER_MS
ANSWER_WAIT: Final = measure.ANSWER_WAIT_MS * TICKS_PER_MS
SHORT: Final = measure.SHORT_MS * TICKS_PER_MS
YIELD: Final = measure.YIELD_MS * TICKS_PER_MS

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


def talk_scores(talk: Conversation) -> measure.Scores:
    """Return the measures that mean something."""
    turns = Turns(talk)
    found: dict[str, measure.Value | None] = _taking(turns)
    if talk.model:
        found["self_talk"] = measure.Total(ns_of(sum(span.ticks for span in turns.unprompted)))
    if talk.model and talk.user:
        found |= _starts(turns) | _over(talk, turns)
    return {name: value for name, value in found.items() if value is not None}


def _taking(turns: Turns) -> dict[str, measure.Value | None]:
    judged = [turn for turn in turns.turns if turn.is_judged]
    answered = [(turn.speech.end, turn.answer) for turn in judged if turn.answer is not None]
    delays = [(turn.speech.end, turn.delay) for turn in judged if turn.delay is not None]
    first = delays[:1] if answered and delays and answered[0][0] == delays[0][0] else []
    mistaken = turns.pauses.count("mistaken")
    return {
        "response_delay": _lengths(delays),
        "time_to_first_audio": _lengths(first),
        "take_over_rate": ratio(len(answered), len(judged)),
        "unanswered": measure.Total(sum(turn.is_silent for turn in judged)) if judged else None,
        "pause_take_over_rate": ratio(mistaken, len(turns.pauses)),
    }


def _starts(turns: Turns) -> dict[str, measure.Value | None]:
    return {
        "false_starts": measure.Total(len(turns.false_starts)),
        "early_starts": measure.Total(len(turns.early_starts)),
        "user_backchannels": measure.Total(turns.user_backchannels),
        "model_backchannels": measure.Total(len(turns.model_backchannels)),
    }


def _over(talk: Conversation, turns: Turns) -> dict[str, measure.Value | None]:
    yielded = [it for it in turns.barge_ins if it.is_yielded_to]
    stops = [(it.speech.begin, it.over.end - it.speech.begin) for it in yielded]
    words = [(ns_of(it.speech.begin), _words_after(talk, it)) for it in turns.barge_ins]
    return {
        "overlap": measure.Total(ns_of(_overlap(talk.user, talk.model))),
        "talk_over": ratio(ns_of(_overlap(talk.user, turns.early_starts)), ns_of(talk.ticks)),
        "barge_ins": measure.Total(len(turns.barge_ins)),
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


def times(values: Iterable[tuple[int, int]]) -> measure.Times | None:
    """Return values of single moments; None without one."""
    kept = tuple(values)
    return measure.Times(kept) if kept else None


def _lengths(values: Iterable[tuple[int, int]]) -> measure.Times | None:
    """Values in ticks."""
    return times((ns_of(at), ns_of(ticks)) for at, ticks in values)


def ratio(part: int, whole: int) -> measure.Ratio | None:
    """Return a part of a whole; None if that is nothing."""
    return measure.Ratio(part, whole) if whole else None
