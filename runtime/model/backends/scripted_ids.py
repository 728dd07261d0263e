"""The ids of a scripted unit, decided and fed, and their forced replacement.

A forced unit takes and counts the recorded ids, and keeps its scripted speech.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol.values.model import UnitResult

from .forcing import Choice, Forced, ForcedResult
from .scripted_tone import draw

TOKEN_CHARS: Final = 4
UNIT_END_ID: Final = 151_684
"""The model's own ids (model.md)."""
LISTEN_ID: Final = 151_705
SPEAK_ID: Final = 151_706
TURN_EOS_ID: Final = 151_717
CHUNK_EOS_ID: Final = 151_718


def speech_ids(text: str, seed: int, *, end_of_turn: bool, ids_max: int) -> tuple[int, ...]:
    """Make the ids that a speaking unit feeds: at most one less than it may decide."""
    words = draw("words", text, seed)[: len(text) // TOKEN_CHARS]
    ids = (SPEAK_ID, *(word * 587 for word in words), *(TURN_EOS_ID,) * end_of_turn)
    return ids[: ids_max - 1]


def force(made: UnitResult, forced: Forced) -> ForcedResult:
    """Replace a unit's ids by recorded ones; see `Forces.run_forced`."""
    ends = forced.decided_ids[-1:] in {(CHUNK_EOS_ID,), (LISTEN_ID,)}
    fed_ids = forced.decided_ids[:-1] if ends else forced.decided_ids
    pairs = zip(forced.decided_ids, made.decided_ids, strict=False)
    choices = [
        Choice(stage="llm", step=step, recorded=recorded, own=own)
        for step, (recorded, own) in enumerate(pairs)
        if recorded != own
    ]
    result = attrs.evolve(
        made,
        kv_length=made.kv_length - len(made.fed_ids) + len(fed_ids),
        decided_ids=forced.decided_ids,
        fed_ids=fed_ids,
        codec_ids=forced.codec_ids,
    )
    return ForcedResult(result=result, choices=tuple(choices))
