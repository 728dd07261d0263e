"""Full replay: runs the model again on the logged inputs, then the machine on its new outputs.

Rules:
- The model's inputs are the effects of logic replay. A session has one kind of call: `full_units`,
  `full_turns` or `full_chunks` run and compare it.
- The environment's part stays as recorded: a call without a result is not run.
- The model's new outputs, with the recorded times, costs and indices, replace the recorded ones,
  and step a second machine, which gives the frames that the client would have got.
- After a difference the model goes on, on its own outputs, so that the units that differ can be
  counted; the first is explained. `replay.assess.forcing` judges each unit by itself.
- The log must be sound: a model that missed an input cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import anyio
import attrs

from protocol.values import events as ev
from protocol.values.modes import OF_MODE, Work
from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from runtime.model.backends.base import Backend

from ..shared.progress import Watch, unwatched
from .difference import Difference
from .environment import Loading, loading_of, mismatches, model_of
from .full_chunks import ChunkReplay
from .full_turns import TurnReplay
from .full_units import UnitReplay
from .held import held_units
from .logic import Replayer
from .report import FullReport
from .verdicts import Finding, ModelUnavailableError, Rerun, Verdicts
from .words import Step

RELEASE_WAIT_S: Final = 10.0
"""A model that takes longer to release a session keeps it to the end of the process."""

KINDS: Final[Mapping[Work, type[Rerun[Any]]]] = {
    "unit": UnitReplay,
    "turn": TurnReplay,
    "chunk": ChunkReplay,
}
"""The replay of a session's calls, by the work of its mode."""


async def replay_fully(
    head: Fields,
    items: Iterable[Record | Damage],
    load: Callable[[Loading], Backend],
    *,
    model: str | None = None,
    anyway: bool = False,
    watch: Watch = unwatched,
) -> FullReport:
    """Run a log's model again, or another `model`, and compare its outputs with the recorded ones.

    Args:
        head: the fields of the log's `session` record.
        items: the log's records in order, `session` first, and its damage.
        load: loads a model, as `Loading.load` does.
        anyway: compare although the environment differs.
        watch: called with 0 when the model is loaded, then with the number of calls made again.

    `ModelUnavailableError`: no model is named, or `load` failed.
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
    run = FullReplay(backend, held_units=held_units(head))
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
    except Exception as error:  # any error means that there is no model
        text = f"the model {loading.name!r} cannot be loaded: {error}"
        raise ModelUnavailableError(text) from error


class FullReplay:
    """A full replay in progress, record by record; `close` it.

    `held_units` units, from the first on, were held to another recording (`held`). After
    `is_stopped` it takes no more records.
    """

    def __init__(self, backend: Backend, *, held_units: int = 0) -> None:
        self.is_stopped = False
        self._backend: Final = backend
        self._held_units: Final = held_units
        self._verdicts: Final = Verdicts()
        self._recorded: Final = Replayer()
        self._renewed: Final = Replayer()
        self._kind: Rerun[Any] | None = None

    @property
    def calls(self) -> int:
        """The number of units, turns and chunks made again."""
        return 0 if self._kind is None else self._kind.made

    async def feed(self, item: Record | Damage) -> None:
        """Take the next record; run the model if the record holds an output of the model."""
        step = self._recorded.feed(item)
        event = None if step is None else await self._renew(step)
        if not self.is_stopped:
            self._renewed.feed(item, instead=event)
            self.is_stopped = self._recorded.is_stopped

    def report(self) -> FullReport:
        """Report the findings so far; the caller adds the model's name and the environment."""
        found = self._verdicts
        return FullReport(
            model=self._backend.info.name,
            environment=(),
            compared=True,
            changed=tuple(found.changed),
            **({} if self._kind is None else self._kind.counts(len(found.indices))),
            divergence=found.divergence,
            recorded=self._recorded.report(),
            renewed=self._renewed.report(),
        )

    async def close(self) -> None:
        """Give the session back to the backend."""
        if self._kind is not None:
            with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                await self._kind.close()

    # -- the model again ------------------------------------------------------------------------

    async def _renew(self, step: Step) -> ev.Event | None:
        """Make the model's part of an event again; None if it has no part, or it failed."""
        if isinstance(step.event, ev.ConnectionOpened):
            kind = KINDS[OF_MODE[step.event.mode].work]
            self._kind = kind(self._backend, self._held_units)
        if self._kind is None:
            return None
        last_unit = self._recorded.last_unit
        try:
            verdict = await self._kind.renew(step.event)
        except ModelUnavailableError:
            raise
        except Exception as error:  # the backend's bug is a result, too
            difference = Difference(
                path="", recorded="a result", came_out=f"{type(error).__name__}: {error}"
            )
            finding = Finding(difference=difference)
            self._verdicts.first(step, finding, unit=last_unit, kind="model_failed")
            self.is_stopped = True
            return None
        for effect in step.effects:
            self._kind.note(effect)
        self._verdicts.take(step, verdict, last_unit)
        return verdict.event
