"""The model's calls in a fork, made as on a server.

Rules:
- Before the fork's unit the model must reach the state of the recording. It gets the recorded
  inputs, with forced decoding if it supports it (`runtime.model.backends.base`): differences
  from its own decisions are noted, and the recorded decisions are used. Without forced decoding it
  decides itself, and must produce the recorded results.
- An interrupted unit is cut where the recording cut it. A new interruption comes after the unit's
  last step: the unit is complete, and its result is not sent (B6).
- Costs are the recording's; nothing is measured here.
- A failure that the environment caused fails again, without a call of the model (`timeline`).
- A failure of the model becomes the same event as on a server; one that loses the session there
  ends the fork.
"""

from __future__ import annotations

from typing import Final

import anyio
import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Cut, Unit, UnitResult
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendSession,
    ContextFull,
    Forced,
    Forces,
)

from ..rerun.difference import Difference
from ..rerun.held import hold
from ..rerun.outputs import compare_outputs
from .timeline import Answer
from .values import CannotForkError, Prefix

CALL_S_MAX: Final = 600
"""A model that needs ten minutes for a second of sound will not finish a session."""
RELEASE_WAIT_S: Final = 10.0
"""A model that does not release a session in this time is left until the process ends."""


@attrs.frozen(kw_only=True)
class ForkQuestion:
    """A call of the model, and its answer's time; `recorded` is the recorded answer's event.

    `lost`: the call that was lost with the recording's worker, for a rebuild that stands for it.
    """

    effect: ef.Effect
    at_ns: int
    answer: Answer
    recorded: ev.Event | None
    is_interrupted: bool
    lost: ef.StartFinalize | ef.Rollback | None = None


class ForkedModel:
    """One fork's model; `close` it. `prefix` holds the results for the units before `at`.

    Before the unit `at` decoding is forced; `anyway` goes on if the recorded state is not reached.
    """

    def __init__(self, backend: Backend, at: int, *, anyway: bool) -> None:
        self.prefix = Prefix(units=at)
        self._backend: Final = backend
        self._at: Final = at
        self._anyway: Final = anyway
        self._held: BackendSession | None = None
        self._has_run = False

    async def answer(self, question: ForkQuestion) -> ev.Event:
        """Perform an effect that calls the model, and return the answer.

        `CannotForkError`: the model is lost, or does not reach the state of the recording.
        """
        if question.answer.event is not None:
            self._has_run = False
            return attrs.evolve(question.answer.event, at_ns=question.at_ns)
        name = type(question.effect).__name__
        try:
            with anyio.fail_after(CALL_S_MAX):
                return await self._ask(question)
        except TimeoutError as error:
            raise CannotForkError(f"the model hangs in {name}, {CALL_S_MAX} s by now") from error
        except BackendGone as error:
            raise CannotForkError(f"the model is lost in {name}: {error}") from error
        except BackendError as error:
            return _failure(question, error)
        except CannotForkError:
            raise
        except Exception as error:  # a bug of the backend; on a server the session ends
            raise CannotForkError(f"the model broke in {name}: {error!r}") from error

    async def close(self) -> None:
        """Release the model's session, if it is still open."""
        held, self._held = self._held, None
        if held is not None:
            with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                await held.release()

    async def _ask(self, question: ForkQuestion) -> ev.Event:
        at_ns, answer, recorded = question.at_ns, question.answer, question.recorded
        match question.effect:
            case ef.OpenBackend(lease=lease, opening=opening):
                await self.close()
                self._held = await self._backend.open(opening, slot=0)
                opened = self._held.opened
                if self._at and isinstance(recorded, ev.BackendOpened):
                    self._judge("the opening", compare_outputs(recorded.opened, opened))
                return ev.BackendOpened(at_ns=at_ns, lease=lease, opened=opened)
            case ef.StartUnit(unit=unit):
                self._has_run = True
                cut = answer.cut if question.is_interrupted else None
                result = await self._run(unit, cut, recorded)
                return ev.UnitDone(at_ns=at_ns, result=attrs.evolve(result, costs=answer.costs))
            case ef.StartFinalize(index=index, interrupted=interrupted):
                made = await self._session.finalize(index, interrupted=interrupted)
                if index < self._at and isinstance(recorded, ev.FinalizeDone):
                    found = compare_outputs(recorded.finalized, made)
                    self._judge(f"finalizing unit {index}", found)
                made = attrs.evolve(made, cost_us=answer.cost_us)
                return ev.FinalizeDone(at_ns=at_ns, finalized=made)
            case ef.Rollback(index=index):
                if self._has_run:
                    await self._session.rollback(index)
                return ev.RollbackDone(at_ns=at_ns, index=index)
            case ef.Rebuild(lease=lease):  # the fork's own model has lost nothing
                if isinstance(question.lost, ef.StartFinalize):
                    lost = question.lost
                    await self._session.finalize(lost.index, interrupted=lost.interrupted)
                elif question.lost is not None and self._has_run:
                    await self._session.rollback(question.lost.index)
                return ev.Rebuilt(
                    at_ns=at_ns, lease=lease, steps=answer.steps, cost_us=answer.cost_us
                )
            case ef.Release(lease=lease):
                return ev.BackendReleased(at_ns=at_ns, lease=lease)
        raise AssertionError(f"{type(question.effect).__name__} asks the model for nothing")

    @property
    def _session(self) -> BackendSession:
        assert self._held is not None, "the session asks for units once it is open"
        return self._held

    async def _run(self, unit: Unit, cut: Cut | None, recorded: ev.Event | None) -> UnitResult:
        held = self._session
        if unit.index >= self._at or not isinstance(recorded, ev.UnitDone):
            return await held.run_unit(unit, cut=cut)
        if not isinstance(held, Forces):
            made = await held.run_unit(unit, cut=cut)
            self._judge_unit(recorded.result, made, held_back=False)
            return made
        try:
            forced = await held.run_forced(unit, Forced.of(recorded.result), cut)
        except (ContextFull, BackendGone):
            raise
        except BackendError as error:
            text = f"unit {unit.index} cannot be made to come out as recorded: {error}"
            raise CannotForkError(f"{text}; fork at unit 0") from error
        self._judge_unit(recorded.result, forced.result, held_back=bool(forced.choices))
        return hold(recorded.result, forced.result)

    def _judge_unit(self, recorded: UnitResult, made: UnitResult, *, held_back: bool) -> None:
        prefix, found = self.prefix, compare_outputs(recorded, made)
        self.prefix = attrs.evolve(
            prefix, held=prefix.held + held_back, otherwise=prefix.otherwise + (found is not None)
        )
        self._judge(f"unit {recorded.index}", found)

    def _judge(self, where: str, found: Difference | None) -> None:
        """Note a difference; without forced decoding the model is then in another state."""
        if found is None:
            return
        text = f"{where}, {found.path}: recorded {found.recorded}, came out {found.came_out}"
        if self.prefix.first is None:
            self.prefix = attrs.evolve(self.prefix, first=text)
        if not self._anyway and not isinstance(self._held, Forces):
            raise CannotForkError(
                f"the model does not come to where the recording was: {text}; fork at unit 0, "
                "or --anyway"
            )


def _failure(question: ForkQuestion, error: BackendError) -> ev.Event:
    at_ns, is_full = question.at_ns, isinstance(error, ContextFull)
    match question.effect:
        case ef.OpenBackend(lease=lease):
            return ev.BackendOpenFailed(at_ns=at_ns, lease=lease, context_full=is_full)
        case ef.StartUnit(unit=unit):
            return ev.UnitFailed(at_ns=at_ns, index=unit.index, context_full=is_full)
        case ef.StartFinalize(index=index):
            return ev.FinalizeFailed(at_ns=at_ns, index=index)
        case ef.Rollback(index=index):
            return ev.RollbackFailed(at_ns=at_ns, index=index)
        case ef.Rebuild(lease=lease):
            return ev.RebuildFailed(at_ns=at_ns, lease=lease)
        case ef.Release(lease=lease):
            return ev.BackendReleased(at_ns=at_ns, lease=lease)
    raise AssertionError(f"{type(question.effect).__name__} cannot fail")
