"""Full replay of units: the model is opened again, runs each unit and finalizes it.

A unit is cut where its recording was cut. An opening or a unit that failed is not run again, since
its rollback left no trace. A session that moved to another worker and was rebuilt exactly is not
rebuilt here: the model that lost nothing must come to the same. Units of a fork that were held to
its parent's are held again, and their decisions are not judged.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Opening, PastUnit, Unit, UnitResult
from recorder.read.past import PastUnits, voiced
from runtime.model.backends.base import Backend, BackendSession, Rebuilds
from runtime.model.backends.forcing import Forced, ForcedResult, Forces

from .held import hold
from .outputs import (
    compare_forced,
    compare_outputs,
    logits_differ,
    snr_db,
)
from .verdicts import ModelUnavailableError, Rerun, Verdict, finding_of


class UnitReplay(Rerun[BackendSession]):
    """The units of one session, run again."""

    name = "units"

    units_held = 0
    logits_changed: int | None = None
    _opening: Opening | None = None

    is_forced = False
    """Whether the model takes all recorded decisions, and `judge` gets each unit."""

    def __init__(self, backend: Backend, held_units: int = 0) -> None:
        super().__init__(backend, held_units)
        self._units: Final = PastUnits()
        self._past: Final[list[PastUnit]] = []

    def counts(self, changed: int) -> dict[str, Any]:
        """Count units and held units."""
        return {
            **super().counts(changed),
            "units_held": self.units_held,
            "logits_changed": self.logits_changed,
        }

    async def renew(self, event: ev.Event) -> Verdict:
        """Run an opening, a unit or its finalize at its result."""
        self._units.take(event)
        match event:
            case ev.BackendOpened():
                return await self._open(event)
            case ev.UnitDone():
                return await self._run_unit(event)
            case ev.FinalizeDone():
                return await self._finalize(event)
            case ev.UnitFailed():
                self.asked.pop(ef.StartUnit, None)
            case ev.Rebuilt():
                await self._rebuild(event)
        return Verdict()

    def note(self, effect: ef.Effect) -> None:
        """Keep a call of the model, and what a rebuild in long prefills would feed again."""
        super().note(effect)
        if isinstance(effect, ef.OpenBackend):
            self._opening = effect.opening
        past = self._units.take(effect)
        if past is not None:
            self._past.append(past)

    async def _rebuild(self, event: ev.Rebuilt) -> None:
        """Finalize what was lost before its finalize; rebuild as recorded, if in long prefills."""
        asked = self.asked.pop(ef.StartFinalize, None)
        if self.held is None or self._opening is None:
            return
        if not event.batches:
            if asked is not None:
                await self.held.finalize(asked.index, interrupted=asked.interrupted)
            return
        await self.close()
        self.held = await self.backend.open(self._opening, slot=0)
        if not isinstance(self.held, Rebuilds):
            raise ModelUnavailableError(f"the model {self.backend.info.name!r} cannot be rebuilt")
        units = voiced(self._past)
        for size in event.batches:
            await self.held.rebuild(list(islice(units, size)), exact=False)

    async def _open(self, event: ev.BackendOpened) -> Verdict:
        asked = self.asked.get(ef.OpenBackend)
        if asked is None or event.lease != asked.lease or self.held is not None:
            return Verdict()
        self.held = await self.backend.open(asked.opening, slot=0)
        if self.is_forced and not isinstance(self.held, Forces):
            raise ModelUnavailableError(f"the model {self.backend.info.name!r} cannot be forced")
        opened = self.held.opened
        found = finding_of(compare_outputs(event.opened, opened))
        return Verdict(event=attrs.evolve(event, opened=opened), finding=found)

    async def _run_unit(self, event: ev.UnitDone) -> Verdict:
        recorded, asked = event.result, self.asked.get(ef.StartUnit)
        if asked is None or self.held is None or recorded.index != asked.unit.index:
            return Verdict()
        del self.asked[ef.StartUnit]
        forced = await self._play(self.held, asked.unit, recorded)
        made = forced.result
        self.made += 1
        if self.logits_changed is None and logits_differ(recorded, made):
            self.logits_changed = recorded.index
        if self._is_held(recorded.index):
            self.units_held += 1
        elif self.is_forced:
            self.judge(asked.unit, recorded, forced)
        found, choice = compare_forced(recorded, forced)
        kept = attrs.evolve(made, index=recorded.index, costs=recorded.costs)
        return Verdict(
            event=attrs.evolve(event, result=kept),
            finding=finding_of(found, snr_db(recorded.pcm, made.pcm), choice),
            index=recorded.index,
        )

    async def _play(
        self, session: BackendSession, unit: Unit, recorded: UnitResult
    ) -> ForcedResult:
        """Run a unit as it was cut, forced if it was forced or `is_forced` is set."""
        is_held = self._is_held(unit.index)
        if not isinstance(session, Forces) or not (is_held or self.is_forced):
            made = await session.run_unit(unit, cut=recorded.cut)
            return ForcedResult(result=made, choices=())
        forced = await session.run_forced(unit, Forced.of(recorded), recorded.cut)
        if not is_held:
            return forced
        return ForcedResult(result=hold(recorded, forced.result), choices=())

    def _is_held(self, index: int) -> bool:
        """Whether a unit was held to another recording; only a model with forcing holds units."""
        return index < self.held_units and isinstance(self.held, Forces)

    def judge(self, unit: Unit, recorded: UnitResult, forced: ForcedResult) -> None:
        """Judge a forced unit that was not held."""

    async def _finalize(self, event: ev.FinalizeDone) -> Verdict:
        recorded, asked = event.finalized, self.asked.get(ef.StartFinalize)
        if asked is None or self.held is None or recorded.index != asked.index:
            return Verdict()
        del self.asked[ef.StartFinalize]
        made = await self.held.finalize(asked.index, interrupted=asked.interrupted)
        kept = attrs.evolve(made, index=recorded.index, cost_us=recorded.cost_us)
        return Verdict(
            event=attrs.evolve(event, finalized=kept),
            finding=finding_of(compare_outputs(recorded, made)),
            index=recorded.index,
        )
