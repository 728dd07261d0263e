"""Teacher forcing: a model is made to decide what a recording says, and tells what it would have.

A unit that came out otherwise changes all that is fed after it, so the units behind it say nothing
about the model any more. Forced, each decision falls as it was recorded and is fed as it was then;
the model decides beside it, on the same input, and each `Choice` tells where it parts from the
recording and by how much.

Rules: forcing changes what is decided and nothing else. Decisions that the recording does not hold
are the model's own. A unit that is forced to its own decisions is the unit that it would have been.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import attrs

from protocol.model import Cut, Unit, UnitResult


@attrs.frozen(kw_only=True)
class Forced:
    """What a unit decided when it was recorded.

    Attributes:
        decided_ids: token ids, as in its `UnitResult`.
        codec_ids: speech codes, likewise.
    """

    decided_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]

    @classmethod
    def of(cls, result: UnitResult) -> Forced:
        """Take a recorded result's decisions."""
        return cls(decided_ids=result.decided_ids, codec_ids=result.codec_ids)


@attrs.frozen(kw_only=True)
class Choice:
    """A decision in which the model, left to itself, would have parted from the recording.

    Attributes:
        stage: `llm` decides tokens, `tts` speech codes.
        step: which decision of the stage, from 0.
        recorded: the id that was recorded, and fed.
        own: the id that the model would have decided.
        margin: how far the logit of `own` is above that of `recorded` where the choice was made,
            penalties included; below 0 where the less likely one was drawn. None where `recorded`
            was ruled out, or a model has no logits.
        draw_gap: how far the random number, in [0, 1), was from one that draws `recorded`. None
            where none does, and where nothing is drawn: at a temperature of 0.
    """

    stage: Literal["llm", "tts"]
    step: int
    recorded: int
    own: int
    margin: float | None = None
    draw_gap: float | None = None


@attrs.frozen(kw_only=True)
class ForcedResult:
    """What came of a forced unit.

    Attributes:
        result: the unit's, with the recorded decisions.
        choices: those in which the model parts from them, in order.
    """

    result: UnitResult
    choices: tuple[Choice, ...]


@runtime_checkable
class Forces(Protocol):
    """A `BackendSession` whose units can be forced."""

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as it was recorded; see `BackendSession.run_unit`.

        Args:
            unit: what was heard and seen.
            forced: what was decided then.
            cut: where the recording was cut.

        Raises:
            BackendError: it failed, or the ids are none of the model's.
        """
        ...
