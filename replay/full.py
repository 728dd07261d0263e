"""Full replay: the model again on the inputs that were logged, then the machine on what it made.

Rules:
- The inputs are the effects of logic replay (`OpenBackend`, `StartUnit`, `StartFinalize`,
  `StartTurn`, `RunChunk`): what the machine asks for is what the model is given. A unit is cut
  where its recording was cut; turns of chat are `full_turns`', chunks of sound `full_chunks`'.
- What the environment did stays as it was: an opening or a unit that failed is not run again, for
  its rollback left no trace; a call without a result is not made.
- The model's new outputs take the place of the recorded ones, with the recorded times, costs and
  indices, and a second machine is stepped with those: it says what the client would have got.
- The model goes on after a difference, on its own outputs, so that the units that differ can be
  counted; what is explained is the first. Teacher-forced it goes on as it was recorded, so that
  each unit is judged by itself. Turns of chat need no forcing: each carries all that it depends on.
- Units of a fork that were held to its parent's are held again, and not judged by what they decide.
- The log must be sound: a model that missed an input cannot be compared.

It works with any `Backend`, on any event loop that AnyIO runs on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import anyio
import attrs

from protocol import effects as ef
from protocol import events as ev
from protocol.model import Unit, UnitResult
from recorder.records import Fields, Record
from recorder.scan import Damage
from runtime.backends.base import Backend, BackendSession
from runtime.backends.forcing import Forced, ForcedResult, Forces

from .difference import Difference
from .environment import Loading, loading_of, mismatches, model_of
from .full_chunks import ChunkReplay
from .full_turns import TurnReplay
from .held import held_units, hold
from .logic import Replayer
from .outputs import (
    compare_finalized,
    compare_forced,
    compare_openings,
    logits_differ,
    snr_db,
)
from .progress import Watch, unwatched
from .report import FullReport
from .verdicts import Finding, Verdicts
from .words import Step

RELEASE_WAIT_S: Final = 10.0
"""A model that does not let go of a session in this time is left to the end of the process."""

Made = TypeVar("Made")


class ModelUnavailableError(Exception):
    """The log does not name its model, or it cannot be had here, or not be forced."""


async def replay_fully(
    head: Fields,
    items: Iterable[Record | Damage],
    load: Callable[[Loading], Backend],
    *,
    model: str | None = None,
    anyway: bool = False,
    teacher_forced: bool = False,
    watch: Watch = unwatched,
) -> FullReport:
    """Run a log's model again and compare what it makes with what was recorded.

    Args:
        head: the fields of the log's `session` record.
        items: its records in order, that one first, and its damage.
        load: loads a model, as `Loading.load` does.
        model: its name, in place of the one that the log gives.
        anyway: compare although the environment differs.
        teacher_forced: make it decide what was recorded, and say where it would not have.
        watch: told 0 when the model is loaded, then how many of its calls were made again.

    Returns:
        What was compared, and the first difference.

    Raises:
        ModelUnavailableError: no model is named, `load` failed, or it cannot be forced.
    """
    name = model if model is not None else model_of(head)
    if name is None:
        raise ModelUnavailableError("the log does not say which model made it")
    backend = _load(loading_of(head, name), load)
    watch(0)
    environment, fingerprint = mismatches(head, backend.info), dict(backend.info.fingerprint)
    if environment and not anyway:
        return FullReport(
            model=name, environment=environment, fingerprint=fingerprint, compared=False
        )
    run = FullReplay(backend, teacher_forced=teacher_forced, held_units=held_units(head))
    try:
        for item in items:
            calls = run.calls
            await run.feed(item)
            if run.calls > calls:
                watch(run.calls - calls)
            if run.is_stopped:
                break
    finally:
        await run.close()
    return attrs.evolve(run.report(), model=name, environment=environment, fingerprint=fingerprint)


def _load(loading: Loading, load: Callable[[Loading], Backend]) -> Backend:
    try:
        return load(loading)
    except Exception as error:  # whatever it is, there is no model
        text = f"the model {loading.name!r} cannot be loaded: {error}"
        raise ModelUnavailableError(text) from error


class FullReplay:
    """A full replay under way, record by record; `close` it.

    Args:
        backend: the model.
        teacher_forced: make it decide what was recorded.
        held_units: units that were held to another recording (`held`), from the first on.

    Attributes:
        is_stopped: there is nothing left to run: it takes no more.
    """

    def __init__(
        self, backend: Backend, *, teacher_forced: bool = False, held_units: int = 0
    ) -> None:
        self.is_stopped = False
        self._backend: Final = backend
        self._teacher_forced: Final = teacher_forced
        self._held_units: Final = held_units
        self._verdicts: Final = Verdicts()
        self._recorded: Final = Replayer()
        self._renewed: Final = Replayer()
        self._session: BackendSession | None = None
        self._opening: ef.OpenBackend | None = None
        self._unit: ef.StartUnit | None = None
        self._finalize: ef.StartFinalize | None = None
        self._chat: Final = TurnReplay(backend)
        self._heard: Final = ChunkReplay(backend)
        self._units = self._units_held = 0
        self._logits_changed: int | None = None

    @property
    def calls(self) -> int:
        """How many units, turns and chunks were made again."""
        return self._units + self._chat.turns + self._heard.chunks

    async def feed(self, item: Record | Damage) -> None:
        """Take the next record; run the model where it holds an output of the model's."""
        step = self._recorded.feed(item)
        event = None if step is None else await self._renew(step)
        if not self.is_stopped:
            self._renewed.feed(item, instead=event)
            self.is_stopped = self._recorded.is_stopped

    def report(self) -> FullReport:
        """Say what was found so far; the model's name and the environment are the caller's."""
        found = self._verdicts
        return FullReport(
            model=self._backend.info.name,
            environment=(),
            compared=True,
            teacher_forced=self._teacher_forced,
            units=self._units,
            units_held=self._units_held,
            units_changed=found.units_changed,
            changed=tuple(found.changed),
            turns=self._chat.turns,
            turns_changed=found.turns_changed,
            chunks=self._heard.chunks,
            chunks_changed=found.chunks_changed,
            decisions=found.decisions,
            decisions_changed=found.decisions_changed,
            near_ties=found.near_ties,
            logits_changed=self._logits_changed,
            divergence=found.divergence,
            recorded=self._recorded.report(),
            renewed=self._renewed.report(),
        )

    async def close(self) -> None:
        """Give the session back to the backend."""
        session, self._session = self._session, None
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await self._chat.close()
            await self._heard.close()
            if session is not None:
                await session.release()

    # -- the model again ------------------------------------------------------------------------

    async def _renew(self, step: Step) -> ev.Event | None:
        """Make the model's part of an event again; None where it has none."""
        renewed: ev.Event | None = None
        match step.event:
            case ev.BackendOpened() as event if self._opening is not None:
                renewed = await self._open(step, event, self._opening)
            case ev.UnitDone() as event if self._unit is not None:
                renewed = await self._run_unit(step, event, self._unit)
            case ev.FinalizeDone() as event if self._finalize is not None:
                renewed = await self._run_finalize(step, event, self._finalize)
            case ev.UnitFailed():
                self._unit = None
            case ev.TurnPrefilled() | ev.TurnProgress() | ev.TurnDone():
                renewed = await self._renew_turn(step)
            case ev.ChunkDone() | ev.ChunkFailed():
                renewed = await self._renew_chunk(step)
            case ev.TurnFailed() | ev.BackendLost():
                renewed = await self._renew_turn(step)
                await self._heard.renew(step.event)
        self._note(step.effects)
        return renewed

    def _note(self, effects: tuple[ef.Effect, ...]) -> None:
        """Keep what the machine asks the model for, until its answer comes."""
        for effect in effects:
            self._chat.note(effect)
            self._heard.note(effect)
            if isinstance(effect, ef.OpenBackend):
                self._opening = effect
            elif isinstance(effect, ef.StartUnit):
                self._unit = effect
            elif isinstance(effect, ef.StartFinalize):
                self._finalize = effect

    async def _open(
        self, step: Step, event: ev.BackendOpened, asked: ef.OpenBackend
    ) -> ev.Event | None:
        if event.lease != asked.lease or self._session is not None:
            return None
        self._session = await self._call(step, self._backend.open(asked.opening, slot=0))
        if self._session is None:
            return None
        if self._teacher_forced and not isinstance(self._session, Forces):
            raise ModelUnavailableError(f"the model {self._backend.info.name!r} cannot be forced")
        opened = self._session.opened
        self._judge(step, compare_openings(event.opened, opened))
        return attrs.evolve(event, opened=opened)

    async def _run_unit(
        self, step: Step, event: ev.UnitDone, asked: ef.StartUnit
    ) -> ev.Event | None:
        recorded = event.result
        if self._session is None or recorded.index != asked.unit.index:
            return None
        self._unit = None
        forced = await self._call(step, self._play(self._session, asked.unit, recorded))
        if forced is None:
            return None
        made = forced.result
        self._units += 1
        if self._logits_changed is None and logits_differ(recorded, made):
            self._logits_changed = recorded.index
        if self._is_held(recorded.index):
            self._units_held += 1
        elif self._teacher_forced:
            self._verdicts.count(forced)
        found, choice = compare_forced(recorded, forced)
        if found is not None:
            snr = snr_db(recorded.pcm, made.pcm)
            finding = Finding(difference=found, snr_db=snr, choice=choice)
            self._verdicts.unit(step, recorded.index, finding)
        return attrs.evolve(
            event, result=attrs.evolve(made, index=recorded.index, costs=recorded.costs)
        )

    async def _play(
        self, session: BackendSession, unit: Unit, recorded: UnitResult
    ) -> ForcedResult:
        """Run a unit as it was cut, and forced where it was or where that is asked for."""
        is_held = self._is_held(unit.index)
        if not isinstance(session, Forces) or not (is_held or self._teacher_forced):
            made = await session.run_unit(unit, cut=recorded.cut)
            return ForcedResult(result=made, choices=())
        forced = await session.run_forced(unit, Forced.of(recorded), recorded.cut)
        if not is_held:
            return forced
        return ForcedResult(result=hold(recorded, forced.result), choices=())

    def _is_held(self, index: int) -> bool:
        """Whether a unit was held to another recording; what cannot be forced never was."""
        return index < self._held_units and isinstance(self._session, Forces)

    async def _run_finalize(
        self, step: Step, event: ev.FinalizeDone, asked: ef.StartFinalize
    ) -> ev.Event | None:
        recorded = event.finalized
        if self._session is None or recorded.index != asked.index:
            return None
        self._finalize = None
        made = await self._call(
            step, self._session.finalize(asked.index, interrupted=asked.interrupted)
        )
        if made is None:
            return None
        found = compare_finalized(recorded, made)
        if found is not None:
            self._verdicts.unit(step, recorded.index, Finding(difference=found))
        kept = attrs.evolve(made, index=recorded.index, cost_us=recorded.cost_us)
        return attrs.evolve(event, finalized=kept)

    async def _renew_turn(self, step: Step) -> ev.Event | None:
        verdict = await self._call(step, self._chat.renew(step.event))
        if verdict is None:
            return None
        if verdict.found is not None:
            finding = Finding(difference=verdict.found, snr_db=verdict.snr)
            self._verdicts.turn(step, self._chat.turns - 1, finding, unit=self._recorded.last_unit)
        return verdict.event

    async def _renew_chunk(self, step: Step) -> ev.Event | None:
        verdict = await self._call(step, self._heard.renew(step.event))
        if verdict is None:
            return None
        if verdict.found is not None:
            finding = Finding(difference=verdict.found)
            self._verdicts.chunk(step, self._heard.chunks - 1, finding)
        return verdict.event

    async def _call(self, step: Step, call: Awaitable[Made]) -> Made | None:
        """Await a call of the model's; None where it failed, which ends the replay."""
        try:
            return await call
        except Exception as error:  # a bug of the backend's too: it is what came out
            difference = Difference(
                path="", recorded="a result", came_out=f"{type(error).__name__}: {error}"
            )
            unit = self._recorded.last_unit
            finding = Finding(difference=difference)
            self._verdicts.first(step, finding, unit=unit, kind="model_failed")
            self.is_stopped = True
            return None

    def _judge(self, step: Step, found: Difference | None) -> None:
        if found is not None:
            self._verdicts.first(step, Finding(difference=found), unit=self._recorded.last_unit)
