"""Who spoke when, and the measures of a session, for the page; `antiphon eval` prints the same.

Times are nanoseconds of the session's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runtime.measures.conversation import Span, Turns, ns_of, shared

from ..eval.facts import Facts
from ..eval.score import score
from ..eval.summary import own_values
from ..eval.table import MEASURES
from .parts import Json

POINTS_MAX: Final = 10_000
"""Of one kind: an hour of seconds, each spoken over, has fewer."""


def talk_of(facts: Facts) -> Json:
    """Place the user's turns, their answers and all speech over speech.

    None without two voices to place: in chats and transcriptions, and where a redaction took the
    user's sound and the log does not say where it was.
    """
    talk = facts.conversation
    if facts.work != "unit" or "speech" in facts.lost or not (talk.user or talk.model):
        return None
    turns = Turns(talk)
    return {
        "user": _spans(talk.user),
        "model": _spans(talk.model),
        "overlaps": _spans(shared(talk.user, talk.model)),
        "turns": [
            {
                "begin_ns": ns_of(turn.speech.begin),
                "end_ns": ns_of(turn.speech.end),
                "delay_ns": None if turn.delay is None else ns_of(turn.delay),
                "answer_ns": None if turn.answer is None else ns_of(turn.answer.begin),
                "is_silent": turn.is_silent and turn.is_judged,
            }
            for turn in turns.turns[:POINTS_MAX]
        ],
        "barge_ins": [
            {
                "begin_ns": ns_of(it.speech.begin),
                "end_ns": ns_of(it.over.end),
                "is_yielded_to": it.is_yielded_to,
            }
            for it in turns.barge_ins[:POINTS_MAX]
        ],
    }


def measures_of(facts: Facts) -> Json:
    """List the recording's measures, in the order of their table, each with its definition."""
    values = own_values(score(facts))
    return [
        {
            "name": name,
            "unit": measure.unit,
            "definition": measure.definition,
            "value": values[name],
        }
        for name, measure in MEASURES.items()
        if name in values
    ]


def _spans(spans: Iterable[Span]) -> Json:
    return [[ns_of(span.begin), ns_of(span.end)] for span in [*spans][:POINTS_MAX]]
