"""Computes the measures of one recording from what was gathered from its log.

Inside are integers only: ticks of sound, nanoseconds of the session's clock, counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.measures.conversation import Conversation, ratio, talk_scores, times
from runtime.measures.measure import Scores, Times, Total, Value

from . import benchmark
from .facts import Answer, Facts

OF_WORDS: Final = ("barge_in_words", "fdb_v1_take_over_rate", "fdb_v1_latency")
"""Measures that count the model's words."""


def score(facts: Facts) -> Scores:
    """Return the measures that mean something in a recording."""
    found: dict[str, Value | None] = {"errors": Total(facts.errors)}
    match facts.work:
        case "unit":
            found |= service_scores(facts)
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
    return {**talk_scores(talk), **benchmark.scores(talk)}


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
