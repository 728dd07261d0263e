"""Who speaks when in a conversation: the user's turns, their answers, and who speaks over whom.

Everything follows from the intervals of both voices; `measures` has the definitions in words.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal

import attrs

from .conversation import TICKS_PER_MS, Conversation, Span
from .limits import ANSWER_WAIT_MS, PAUSE_MS, SHORT_MS, YIELD_MS

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
        said_by_the_way = set(self.model_backchannels)
        self.early_starts: Final = [
            it for it in talk.model if within[it] is not None and it not in said_by_the_way
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


def _is_heard(spans: Sequence[Span], begin: int, end: int) -> bool:
    """Whether a voice is heard at any time from `begin` until before `end`."""
    return _speaking_at(spans, begin) is not None or bool(_between(spans, begin, end))


def _gap_of(model: Sequence[Span], before: Span, after: Span) -> Gap:
    if after.begin - before.end >= PAUSE:
        return "end"
    if any(span.end > after.begin for span in _between(model, before.end, after.begin)):
        return "mistaken"
    return "end" if _is_heard(model, before.end, after.begin) else "quiet"


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
        is_silent=until >= waited and not _is_heard(talk.model, turn.end, waited),
    )


def _unprompted(talk: Conversation) -> Iterator[Span]:
    since = -1
    for span in talk.model:
        last = bisect_right(talk.user, span.begin - 1, key=lambda it: it.begin) - 1
        if last < 0 or talk.user[last].end <= since:
            yield span
        since = span.begin
