"""A model call, the same for units, turns and chunks, in this process and behind a link.

    begin(input) -> progress* -> done | failed, then commit | undo; cut at any moment

- An effect asks for a call, an event is its progress or its result; a failed one raises. Units,
  turns and chunks differ in their input and result only: `StartUnit -> UnitDone`,
  `StartTurn -> TurnPrefilled, TurnProgress..., TurnDone`, `RunChunk -> ChunkDone`.
- The server, a worker and a full replay make all their calls here (`HeldModel`).
- A unit is then committed (`StartFinalize -> FinalizeDone`) or undone (`Rollback -> RollbackDone`).
- The calls of one slot never overlap, except `cut`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Cut, Prefill, Silent

from ..model.backends import base

OPENED_BY: Final[Mapping[type[ef.Effect], type[ef.Effect]]] = {
    ef.OpenBackend: ef.OpenBackend,
    ef.StartUnit: ef.OpenBackend,
    ef.StartFinalize: ef.OpenBackend,
    ef.Rollback: ef.OpenBackend,
    ef.StartTurn: ef.StartTurn,
    ef.RunChunk: ef.RunChunk,
}
"""Each call, and the one that opens what it is made on."""
DONE: Final[Mapping[type[ef.Effect], type[ev.UnitDone | ev.TurnDone | ev.ChunkDone]]] = {
    ef.StartUnit: ev.UnitDone,
    ef.StartTurn: ev.TurnDone,
    ef.RunChunk: ev.ChunkDone,
}
"""What a call comes to."""


def failure_of(
    effect: object, error: base.BackendError, at_ns: int, refused: str = ""
) -> ev.Event | None:
    """Make the event of a call that failed; None for one that has none.

    `refused`: why an opening, or a turn before it began, was refused.
    """
    is_full = error.context_full
    match effect:
        case ef.OpenBackend():
            is_lost = isinstance(error, base.BackendGone)
            return ev.BackendOpenFailed(
                at_ns=at_ns,
                lease=effect.lease,
                context_full=is_full,
                is_lost=is_lost,
                refused=refused,
            )
        case ef.StartUnit():
            return ev.UnitFailed(at_ns=at_ns, index=effect.unit.index, context_full=is_full)
        case ef.StartFinalize():
            return ev.FinalizeFailed(at_ns=at_ns, index=effect.index)
        case ef.Rollback():
            return ev.RollbackFailed(at_ns=at_ns, index=effect.index)
        case ef.StartTurn():
            index = effect.turn.index
            return ev.TurnFailed(at_ns=at_ns, index=index, context_full=is_full, refused=refused)
        case ef.RunChunk():
            place = {"utterance": effect.chunk.utterance, "index": effect.chunk.index}
            return ev.ChunkFailed(at_ns=at_ns, context_full=is_full, **place)
        case ef.Rebuild():
            return ev.RebuildFailed(at_ns=at_ns, lease=effect.lease)
    return None


@attrs.define(eq=False, kw_only=True)
class HeldModel:
    """What a backend holds on a slot for one session, and the calls on it.

    Attributes:
        now_ns: the time of its events.
        held: what calls are made on, once one has opened it.
        is_cut: it was cut, also before its turn began.
    """

    backend: base.Backend
    slot: int
    now_ns: Callable[[], int]
    held: base.ModelSession[Any, Any] | None = None
    is_cut: bool = False
    _opened_by: type[ef.Effect] | None = None

    @property
    def opened(self) -> base.BackendSession | None:
        """The session of units, if it is one."""
        is_of_units = self._opened_by is ef.OpenBackend
        return self.held if is_of_units else None  # type: ignore[return-value]

    async def begin(self, effect: ef.Effect) -> None:
        """Have the backend hold what the effect's calls are made on; nothing is computed yet.

        `BackendError`: it does not, or it holds something else.
        """
        backend, slot, opened_by = self.backend, self.slot, OPENED_BY.get(type(effect))
        if self.held is None:
            match effect:
                case ef.OpenBackend():
                    self.held = await backend.open(effect.opening, slot=slot)
                case ef.StartTurn():
                    if not isinstance(backend, base.Chats):
                        raise base.BackendError(f"model {backend.info.name} does not chat")
                    self.held = await backend.chat(slot=slot)
                    if self.is_cut:
                        self.held.interrupt(effect.turn.index)
                case ef.RunChunk():
                    if not isinstance(backend, base.Transcribes):
                        raise base.BackendError(f"model {backend.info.name} does not transcribe")
                    self.held = await backend.transcribe(slot=slot)
            self._opened_by = opened_by
        if self.held is None or self._opened_by is not opened_by:
            raise base.BackendError(f"a {type(effect).__name__} out of order")

    async def call(
        self,
        effect: ef.Effect,
        cut: Cut | None = None,
        emit: Callable[[ev.Event], None] = lambda _: None,
    ) -> ev.Event:
        """Make a call, and `begin` before it; `emit` gets the progress of a turn."""
        if self._opened_by is None or self._opened_by is not OPENED_BY.get(type(effect)):
            await self.begin(effect)
        held: Any = self.held

        def progress(piece: base.Piece) -> None:
            at_ns = self.now_ns()
            if isinstance(piece, Prefill):
                emit(ev.TurnPrefilled(at_ns=at_ns, prefill=piece))
            else:
                emit(ev.TurnProgress(at_ns=at_ns, chunk=piece))

        match effect:
            case ef.StartUnit(unit=asked) | ef.RunChunk(chunk=asked):
                result = await held.run(asked, cut)
                return DONE[type(effect)](at_ns=self.now_ns(), result=result)
            case ef.StartTurn(turn=turn):
                base.require_tools(self.backend.info, turn)
                result = await held.run(turn, cut, emit=progress)
                return ev.TurnDone(at_ns=self.now_ns(), result=result)
            case ef.StartFinalize(index=index, interrupted=interrupted):
                done = await held.finalize(index, interrupted=interrupted)
                return ev.FinalizeDone(at_ns=self.now_ns(), finalized=done)
            case ef.Rollback(index=index):
                await held.rollback(index)
                return ev.RollbackDone(at_ns=self.now_ns(), index=index)
        assert isinstance(effect, ef.OpenBackend), effect
        return ev.BackendOpened(at_ns=self.now_ns(), lease=effect.lease, opened=held.opened)

    async def finalize_again(
        self, effect: ef.StartFinalize, silent: Silent | None, *, forced: bool
    ) -> ev.Event:
        """Make the call of a recorded finalize; `CallsTools` has the meaning of `silent`."""
        if not isinstance(self.held, base.CallsTools):
            return await self.call(effect)
        done = await self.held.finalize_again(
            effect.index, interrupted=effect.interrupted, silent=silent, forced=forced
        )
        return ev.FinalizeDone(at_ns=self.now_ns(), finalized=done)

    def cut(self, index: int | None = None) -> None:
        """Cut a turn, also before it begins, or this unit if it runs; never blocks."""
        self.is_cut = self.is_cut or index is None
        held: Any = self.held
        if self._opened_by is ef.StartTurn or (index is not None and self.opened is not None):
            held.interrupt(-1 if index is None else index)

    async def release(self) -> None:
        """Free everything; the slot is clean then."""
        if self.held is not None:
            await self.held.release()
        self.held = self._opened_by = None
