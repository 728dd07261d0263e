"""Sessions of a model without an engine: a call computes to its end, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from protocol.values.model import Cut, Finalized, Opened, Opening, Silent, Unit, UnitResult
from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Compute, Steps, Work

Result = TypeVar("Result")


def alone(steps: Steps[Result], compute: Compute) -> Result:
    """Drive a generator to its result, one request at a time; failures are thrown into it."""
    go_on: Callable[[], Work] = partial(steps.send, None)
    try:
        while True:
            work = go_on()
            try:
                (answer,) = compute((work,))
            except Exception as error:
                go_on = partial(steps.throw, error)
            else:
                go_on = partial(steps.send, answer)
    except StopIteration as end:
        result: Result = end.value
        return result


class BlockingSession:
    """A session whose calls compute to their end, unbatched; see `SteppedSession`."""

    def __init__(self, model: DuplexModel, opening: Opening, slot: int) -> None:
        self._model, self.stepped = model, model.session(opening, slot=slot)
        self.slot = slot
        self.opened: Opened = alone(self.stepped.open(), model.compute)

    def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Run `SteppedSession.unit`."""
        return alone(self.stepped.unit(unit, cut), self._model.compute)

    def interrupt(self, index: int) -> None:
        """Run `SteppedSession.interrupt`."""
        self.stepped.interrupt(index)

    def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Run `SteppedSession.finalize`."""
        steps = self.stepped.finalize(index, interrupted=interrupted)
        return alone(steps, self._model.compute)

    def finalize_again(
        self, index: int, *, interrupted: bool, silent: Silent | None, forced: bool
    ) -> Finalized:
        """Run `SteppedSession.finalize_again`."""
        steps = self.stepped.finalize_again(
            index, interrupted=interrupted, silent=silent, forced=forced
        )
        return alone(steps, self._model.compute)

    def rollback(self, index: int) -> None:
        """Run `SteppedSession.rollback`."""
        self.stepped.rollback(index)

    def release(self) -> None:
        """Run `SteppedSession.release`, and free the slot."""
        self.stepped.release()
        taken = _taken[self._model]
        if taken.get(self.slot) is self:
            del taken[self.slot]


_taken: WeakKeyDictionary[DuplexModel, dict[int, BlockingSession]] = WeakKeyDictionary()
"""The sessions that hold a model's slots."""


def open_session(model: DuplexModel, opening: Opening) -> BlockingSession:
    """Open a session in a free slot.

    `ContextFull`: the prompt does not fit; `BackendError`: the reference audio is malformed, or no
    slot is free.
    """
    taken = _taken.setdefault(model, {})
    for slot in range(model.info.slots):
        if slot not in taken:
            session = taken[slot] = BlockingSession(model, opening, slot)
            return session
    raise BackendError(f"all {model.info.slots} slots are taken")
