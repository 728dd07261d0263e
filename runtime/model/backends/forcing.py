"""Forced decoding: a model takes the recorded decisions, and its own are compared with them.

A differing unit changes all later input, so later units would prove nothing about the model.
Forcing changes only the decisions: each recorded one is fed, the model also decides on the same
input, and a `Choice` holds a difference. Decisions that the recording lacks are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import attrs

from protocol.values.model import Cut, Unit, UnitResult

from .base import BackendError


@attrs.frozen(kw_only=True)
class Forced:
    """A unit's recorded decisions: token ids and speech codes, as in its `UnitResult`."""

    decided_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]

    @classmethod
    def of(cls, result: UnitResult) -> Forced:
        """Take a recorded result's decisions."""
        return cls(decided_ids=result.decided_ids, codec_ids=result.codec_ids)


@attrs.frozen(kw_only=True)
class Choice:
    """A decision in which the model differs from the recording.

    Attributes:
        stage: `llm` decides tokens, `tts` speech codes.
        step: number of the decision in the stage, from 0.
        recorded: the id that was recorded, and fed.
        own: the id that the model would have decided.
        margin: logit of `own` minus that of `recorded`, penalties included; negative if the less
            likely one was drawn. None if `recorded` was ruled out, or there are no logits.
        draw_gap: distance of the random number, in [0, 1), from one that draws `recorded`. None if
            none does, and at temperature 0.
    """

    stage: Literal["llm", "tts"]
    step: int
    recorded: int
    own: int
    margin: float | None = None
    draw_gap: float | None = None


@attrs.frozen(kw_only=True)
class Leaning:
    """The first decision of a forced unit that was free to decide: to be silent or to be heard.

    `listen` is silence. Inside an open turn so is `turn_eos`: the turn goes on after a `listen`.

    Attributes:
        is_open: a turn of the model was open when the unit began.
        was_silent, is_silent: the recorded decision, and the model's own.
        margin: the best logit of silence minus the best of all other tokens, penalties and
            `listen_prob_scale` included; None if one of them was ruled out.
        listen, turn_end: probabilities of `listen` and `turn_eos` in [0, 1], without penalties.
    """

    is_open: bool
    was_silent: bool
    is_silent: bool
    margin: float | None
    listen: float
    turn_end: float


@attrs.frozen(kw_only=True)
class ForcedResult:
    """The result of a forced unit, with the recorded decisions, and the differences in order.

    `leaning` is None if the unit was not free to decide, or the model has no logits.
    """

    result: UnitResult
    choices: tuple[Choice, ...]
    leaning: Leaning | None = None


@runtime_checkable
class Forces(Protocol):
    """A `BackendSession` with forced decoding."""

    async def run_forced(self, unit: Unit, forced: Forced, cut: Cut | None = None) -> ForcedResult:
        """Prefill and generate one unit as it was recorded; see `BackendSession.run_unit`.

        `BackendError` if it failed, or the model lacks an id.
        """
        ...


def require_recorded(recorded: UnitResult, made: ForcedResult, names: Sequence[str]) -> None:
    """Require the model's own decisions, and these fields of its result, to be the recorded ones.

    `BackendError` names the first that differs.
    """
    for name in names:
        if getattr(recorded, name) != getattr(made.result, name):
            raise BackendError(f"unit {recorded.index}: {name} differs from the recorded one")
    for choice in made.choices:
        raise BackendError(
            f"unit {recorded.index}: decision {choice.step} of {choice.stage} differs from the "
            "recorded one"
        )
