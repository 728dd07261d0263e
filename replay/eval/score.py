"""Computes the measures of one recording from what was gathered from its log.

Inside are integers only: ticks of sound, nanoseconds of the session's clock, counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from . import benchmark
from .conversation import Conversation, Span, ns_of, shared
from .facts import Answer, Facts
from .measures import Ratio, Scores, Times, Total, Value
from .turns import BargeIn, Turns

OF_WORDS: Final = ("barge_in_words", "fdb_v1_take_over_rate", "fdb_v1_latency")
"""Measures that count the model's words."""


def score(facts: Facts) -> Scores:
    """Return the measures that mean something in a recording."""
    found: dict[str, Value | None] = {"errors": Total(facts.errors)}
    match facts.work:
        case "unit":
            found |= service_scores(facts)
            talk = facts.conversation
            is_written = bool(talk.texts) and not talk.model  # the model has no voice
            if "speech" not in facts.lost and not is_written:
                found |= conversation_scores(talk)
            if "words" in facts.lost:
                found |= dict.fromkeys(OF_WORDS)
        case "turn":
            found |= _chat(facts.answers)
        case "chunk":
            found["word_delay"] = _times(facts.word_delays)
    return {name: value for name, value in found.items() if value is not None}


def conversation_scores(talk: Conversation) -> dict[str, Value | None]:
    """Measure two voices."""
    turns = Turns(talk)
    found: dict[str, Value | None] = {**_taking(turns), **benchmark.scores(talk)}
    if talk.model:
        found["self_talk"] = Total(ns_of(sum(span.ticks for span in turns.unprompted)))
    if talk.model and talk.user:
        found |= _starts(turns) | _over(talk, turns)
    return found


def service_scores(facts: Facts) -> dict[str, Value | None]:
    """Measure how the server kept up with a duplex session."""
    late, answered = facts.late_units, facts.answered_units
    found: dict[str, Value | None] = {
        "near_tie_rate": _ratio(facts.near_ties, facts.decisions),
        "input_lead": None if facts.input_lead is None else Times((facts.input_lead,)),
    }
    if answered or facts.dropped_units:
        found["dropped_units"] = Total(facts.dropped_units)
    if answered and late is not None:
        found |= {"late_units": Total(late), "deadline_miss_rate": _ratio(late, answered)}
    if facts.conversation.model:
        found["underruns"] = Total(facts.underruns)
    return found


def _taking(turns: Turns) -> dict[str, Value | None]:
    judged = [turn for turn in turns.turns if turn.is_judged]
    answered = [(turn.speech.end, turn.answer) for turn in judged if turn.answer is not None]
    delays = [(turn.speech.end, turn.delay) for turn in judged if turn.delay is not None]
    first = delays[:1] if answered and delays and answered[0][0] == delays[0][0] else []
    mistaken = turns.pauses.count("mistaken")
    return {
        "response_delay": _lengths(delays),
        "time_to_first_audio": _lengths(first),
        "take_over_rate": _ratio(len(answered), len(judged)),
        "unanswered": Total(sum(turn.is_silent for turn in judged)) if judged else None,
        "pause_take_over_rate": _ratio(mistaken, len(turns.pauses)),
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
        "talk_over": _ratio(ns_of(_overlap(talk.user, turns.early_starts)), ns_of(talk.ticks)),
        "barge_ins": Total(len(turns.barge_ins)),
        "barge_in_yield_rate": _ratio(len(yielded), len(turns.barge_ins)),
        "barge_in_stop_latency": _lengths(stops),
        "barge_in_words": _times(said),
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


def _chat(answers: Iterable[Answer]) -> dict[str, Value | None]:
    answers = [*answers]
    tokens = [it for it in answers if it.generated_tokens and it.generating_ns > 0]
    return {
        "chat_response_delay": _times(
            (it.asked_ns, it.piece_ns - it.asked_ns) for it in answers if it.piece_ns is not None
        ),
        "chat_time_to_first_audio": _times(
            (it.asked_ns, it.sound_ns - it.asked_ns) for it in answers if it.sound_ns is not None
        ),
        "chat_tokens_per_second": _ratio(
            sum(it.generated_tokens for it in tokens), sum(it.generating_ns for it in tokens)
        ),
    }


def _times(values: Iterable[tuple[int, int]]) -> Times | None:
    kept = tuple(values)
    return Times(kept) if kept else None


def _lengths(values: Iterable[tuple[int, int]]) -> Times | None:
    """Values in ticks."""
    return _times((ns_of(at), ns_of(ticks)) for at, ticks in values)


def _ratio(part: int, whole: int) -> Ratio | None:
    return Ratio(part, whole) if whole else None
