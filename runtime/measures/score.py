"""Measures what two voices did: the measures of a conversation, from its intervals only.

Inside are integers only: ticks of sound, nanoseconds of the session's clock, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .conversation import Conversation, Span, ns_of, shared
from .measure import Ratio, Scores, Times, Total, Value
from .turns import BargeIn, Turns


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
    said = [(ns_of(it.speech.begin), _words_after(talk, it)) for it in turns.barge_ins]
    return {
        "overlap": Total(ns_of(_overlap(talk.user, talk.model))),
        "talk_over": ratio(ns_of(_overlap(talk.user, turns.early_starts)), ns_of(talk.ticks)),
        "barge_ins": Total(len(turns.barge_ins)),
        "barge_in_yield_rate": ratio(len(yielded), len(turns.barge_ins)),
        "barge_in_stop_latency": _lengths(stops),
        "barge_in_words": times(said),
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
