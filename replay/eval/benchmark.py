"""The measures of Full-Duplex-Bench that need timestamps only, from those of a log.

Written from what its code computes (v1: `eval_smooth_turn_taking`, `eval_pause_handling`; v1.5:
`get_timing`); it shares no line with it. There a transcriber and a detector give the timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.values.limits import NS_PER_MS
from runtime.measures.conversation import TICKS_PER_MS, Conversation, Span, joined, ns_of
from runtime.measures.measure import (
    FDB_MODEL_GAP_MS,
    FDB_SHORT_MS,
    FDB_USER_GAP_MS,
    FDB_WORDS_MAX,
    Ratio,
    Times,
    Value,
)

SHORT: Final = FDB_SHORT_MS * TICKS_PER_MS


def scores(talk: Conversation) -> dict[str, Value | None]:
    """Measure two voices as the benchmark does; None where it has nothing to measure."""
    takes = takes_turn(talk.model, sum(text.words for text in talk.texts))
    user = joined(talk.user, FDB_USER_GAP_MS * TICKS_PER_MS + 1)
    model = joined(talk.model, FDB_MODEL_GAP_MS * TICKS_PER_MS + 1)
    latency = None
    if takes and len(talk.user) == 1:
        end = talk.user[0].end
        latency = Times(((ns_of(end), ns_of(max(0, talk.model[0].begin - end))),))
    return {
        "fdb_v1_take_over_rate": Ratio(int(takes), 1) if talk.user else None,
        "fdb_v1_latency": latency,
        "fdb_v1_5_stop_latency": _times(overlaps(user, model)),
        "fdb_v1_5_response_latency": _times(response_gaps(user, model)),
    }


def takes_turn(model: Sequence[Span], words: int) -> bool:
    """Whether the model's sound is more than a few words in a short time (TOR)."""
    if not model:
        return False
    return model[-1].end - model[0].begin >= SHORT or words > FDB_WORDS_MAX


def overlaps(user: Sequence[Span], model: Sequence[Span]) -> list[Span]:
    """List the overlaps; of those that end in the same millisecond, the shortest."""
    shortest: dict[int, Span] = {}
    for speech in user:
        for over in model:
            both = Span(max(speech.begin, over.begin), min(speech.end, over.end))
            if both.ticks > 0:
                key = _millisecond(both.end)
                before = shortest.get(key)
                if before is None or both.ticks < before.ticks:
                    shortest[key] = both
    return sorted(shortest.values(), key=lambda span: span.end)


def response_gaps(user: Sequence[Span], model: Sequence[Span]) -> list[Span]:
    """List the gaps to the model's next beginning; of those with the same one, the shortest."""
    shortest: dict[int, Span] = {}
    for speech in user:
        begin = next((span.begin for span in model if span.begin > speech.end), None)
        if begin is not None:
            gap, key = Span(speech.end, begin), _millisecond(begin)
            if key not in shortest or gap.begin > shortest[key].begin:
                shortest[key] = gap
    return sorted(shortest.values(), key=lambda span: span.end)


def _millisecond(ticks: int) -> int:
    return round(ns_of(ticks) / NS_PER_MS)


def _times(spans: Sequence[Span]) -> Times | None:
    values = tuple((ns_of(span.begin), ns_of(span.ticks)) for span in spans)
    return Times(values) if values else None
