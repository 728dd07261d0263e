"""Forced decoding of a unit: recorded decisions replace the model's, and differences are measured.

See `..forcing`. `unit.py` asks after each of its decisions; a teacher returns the recorded one, and
keeps a `Choice` where they differ.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from ..forcing import Choice, Forced, Leaning


class Apart(Protocol):
    """Measures how far a decision was from another id."""

    def __call__(self, wanted: int) -> tuple[float | None, float | None]:
        """Return `Choice.margin` and `Choice.draw_gap`."""
        ...


class Teacher:
    """The decisions of one recorded unit, and the model's different choices, in order.

    `codec_eos` ends speech: it is decided, but not in `forced`. `leaning` is of the first token, if
    it was free.
    """

    def __init__(self, forced: Forced, codec_eos: int) -> None:
        self._tokens: Final = forced.decided_ids
        self._codes: Final = (*forced.codec_ids, codec_eos)
        self.choices: list[Choice] = []
        self.leaning: Leaning | None = None

    def token(self, step: int, own: int, apart: Apart) -> int:
        """Return the recorded token of a step, or the model's own after the last."""
        return self._decide("llm", self._tokens, step, own, apart)

    def code(self, step: int, own: int, apart: Apart) -> int:
        """Return the recorded code of a step; after the last, speech ends."""
        return self._decide("tts", self._codes, step, own, apart)

    def _decide(
        self, stage: Literal["llm", "tts"], ids: tuple[int, ...], step: int, own: int, apart: Apart
    ) -> int:
        recorded = ids[step] if step < len(ids) else own
        if recorded != own:
            margin, gap = apart(recorded)
            self.choices.append(
                Choice(
                    stage=stage, step=step, recorded=recorded, own=own, margin=margin, draw_gap=gap
                )
            )
        return recorded
