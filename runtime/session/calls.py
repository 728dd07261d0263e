"""The model calls of one session: each effect starts one, and its outcome is posted as an event.

    OpenBackend -> BackendOpened | BackendOpenFailed
    StartUnit -> UnitDone | UnitFailed          StartFinalize -> FinalizeDone | FinalizeFailed
    Rollback -> RollbackDone | RollbackFailed   Release -> BackendReleased
    StartTurn -> TurnPrefilled, TurnProgress..., TurnDone | TurnFailed
    RunChunk -> ChunkDone | ChunkFailed         (the first opens the transcription)
    Rebuild -> Rebuilt | RebuildFailed          (opens the model again)
    any of them -> BackendLost, where the backend is gone

- A call belongs to its lease (`tenure`). After the release its outcome is neither posted nor
  awaited: the session may hold another lease by then.
- The calls of a condemned lease are cancelled, so that they do not keep a hung backend alive. A
  call in a thread goes on; its result is released or forgotten.
- Only opening is retried, a few times and briefly (`opening`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import MethodType
from typing import Any, Final, Protocol

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.format.errors import RecorderError
from recorder.read.past import Past

from ..model.backends.base import (
    BackendError,
    BackendGone,
    BackendRefused,
    Chats,
    ModelSession,
    Transcribes,
)
from ..slots.admission import Admission
from ..slots.pool import Lease
from ..slots.workers import Workers
from .opening import try_to_open
from .rebuilding import bring_back
from .tenure import Tenure

RELEASE_WAIT_S: Final = 10.0
"""A longer release hangs: its slot is condemned (B4)."""

_logger = logging.getLogger("antiphon.session")


ModelEffect = (
    ef.OpenBackend
    | ef.StartUnit
    | ef.Interrupt
    | ef.StartFinalize
    | ef.Rollback
    | ef.StartTurn
    | ef.CutTurn
    | ef.RunChunk
    | ef.Rebuild
    | ef.Release
)
"""The effects that are calls of the model."""


class Inbox(Protocol):
    """A session's queue of events."""

    def now_ns(self) -> int:
        """The session's clock: nanoseconds since it was opened."""
        ...

    def post(self, event: ev.Event) -> None:
        """Add an event of this moment; never blocks."""
        ...

    def bring(self, event: ev.Event) -> None:
        """Step an event of this moment in the calling task, if nothing else waits; else post it.

        For a task of the event's own: the effects are performed before it returns.
        """
        ...

    def past(self) -> AbstractAsyncContextManager[Past]:
        """The session's past, from its log; `LogFailed` or `Unreadable` without a sound one."""
        ...


@attrs.define(eq=False, kw_only=True)
class Calls:
    """Makes one session's model calls and posts their outcomes.

    `tasks` is the server's nursery for model calls.
    """

    _workers: Workers
    _admission: Admission
    _inbox: Inbox
    _tasks: TaskGroup
    _rebuilds_exactly: bool = True
    _tenure: Tenure | None = attrs.field(default=None, init=False)

    @property
    def lease(self) -> Lease | None:
        """The slot in use; None before `SlotLeased` and after the release."""
        return None if self._tenure is None else self._tenure.lease

    def _now_ns(self) -> int:
        return self._inbox.now_ns()

    def hold(self, lease: Lease) -> None:
        """Take the slot that was leased to the session."""
        assert self._tenure is None, "a slot is given back before the next is leased"
        self._tenure = Tenure(
            lease=lease,
            backend=self._workers.backend_of(lease),
            tasks=self._tasks,
            on_lost=self._lost,
            on_failed=self._failed,
        )
        self._inbox.post(
            ev.SlotLeased(at_ns=self._now_ns(), lease=lease.generation, slot=lease.slot)
        )
        self._workers.hold(lease, partial(self._revoked, lease.generation))

    def _revoked(self, lease: int) -> None:
        self._inbox.post(ev.LeaseRevoked(at_ns=self._now_ns(), lease=lease))

    def perform(self, effect: ModelEffect) -> None:
        """Make a call, cut the one in flight at once, or give the slot back."""
        match effect:
            case ef.Interrupt():
                if self._tenure is not None and self._tenure.held is not None:
                    self._tenure.held.interrupt(effect.index)
            case ef.CutTurn():
                self._cut_turn()
            case ef.Release() if self._tenure is None:  # it was that of a server that is gone
                self._inbox.post(ev.BackendReleased(at_ns=self._now_ns(), lease=effect.lease))
            case ef.Release():
                self._release_slot(condemn=effect.condemn)
            case _:
                assert self._tenure is not None
                self._tenure.ask(MethodType(_METHODS[type(effect)], self), effect)

    def give_up(self) -> None:
        """Cut the call in flight and give the slot back, if there is one."""
        if self._tenure is not None:
            self._cut_turn()
            self._release_slot(condemn=False)

    def _cut_turn(self) -> None:
        """Cut the answer in flight at once, or as soon as it starts."""
        tenure = self._tenure
        if tenure is not None:
            tenure.is_cut = True
            if tenure.turn is not None:
                tenure.turn.interrupt()

    def stop_trying(self) -> None:
        """The session is over: do not retry an opening."""
        if self._tenure is not None:
            self._tenure.is_over.set()

    def _release_slot(self, *, condemn: bool) -> None:
        """Give the slot back once it is clean; a second call does nothing (B5).

        `condemn` means that its call hangs, so it will never be clean. Otherwise a call in flight
        is awaited for at most `RELEASE_WAIT_S` (B4).
        """
        tenure = self._tenure
        assert tenure is not None
        if not tenure.is_releasing:
            tenure.is_releasing = True
            tenure.is_over.set()
            self._tasks.start_soon(self._release, tenure, condemn)

    # -- the tasks ------------------------------------------------------------------------------

    def _lost(self, tenure: Tenure) -> None:
        lease = tenure.lease.generation
        self._tell(tenure, ev.BackendLost(at_ns=self._now_ns(), lease=lease))

    def _failed(self, tenure: Tenure, effect: object, error: BackendError) -> bool:
        """Post the event of a call that failed; False for one that has none."""
        at_ns, context_full = self._now_ns(), error.context_full
        event: ev.Event
        match effect:
            case ef.StartUnit():
                index = effect.unit.index
                name = f"unit {index}"
                event = ev.UnitFailed(at_ns=at_ns, index=index, context_full=context_full)
            case ef.StartFinalize():
                name = f"finalize of unit {effect.index}"
                event = ev.FinalizeFailed(at_ns=at_ns, index=effect.index)
            case ef.Rollback():
                name = f"rollback of unit {effect.index}"
                event = ev.RollbackFailed(at_ns=at_ns, index=effect.index)
            case ef.StartTurn():
                index = effect.turn.index
                name = f"turn {index}"
                is_refused = isinstance(error, BackendRefused) and tenure.turn is None
                refused = str(error) if is_refused else ""
                event = ev.TurnFailed(
                    at_ns=at_ns, index=index, context_full=context_full, refused=refused
                )
            case ef.RunChunk():
                utterance, index = effect.chunk.utterance, effect.chunk.index
                name = f"chunk {utterance}.{index}"
                event = ev.ChunkFailed(
                    at_ns=at_ns, utterance=utterance, index=index, context_full=context_full
                )
            case ef.Rebuild():
                name, event = "rebuild", ev.RebuildFailed(at_ns=at_ns, lease=effect.lease)
            case _:
                return False
        level = logging.INFO if tenure.is_cut else logging.WARNING
        _logger.log(level, "%s failed: %s", name, error)
        self._tell(tenure, event)
        return True

    def _bring(self, tenure: Tenure, event: ev.Event) -> None:
        """Tell the outcome of a unit, and have it stepped at once."""
        if self._tenure is tenure:
            self._inbox.bring(event)
        else:
            self._tell(tenure, event)

    def _tell(self, tenure: Tenure, event: ev.Event) -> None:
        if self._tenure is tenure:
            self._inbox.post(event)
        else:
            late = type(event).__name__
            _logger.info("a late %s of lease %d", late, tenure.lease.generation)

    async def _open(self, tenure: Tenure, effect: ef.OpenBackend) -> None:
        lease = tenure.lease.generation
        try:
            held = await try_to_open(
                tenure.backend, effect.opening, tenure.lease.slot, tenure.is_over
            )
        except BackendError as error:
            tenure.is_lost = isinstance(error, BackendGone)
            failed = ev.BackendOpenFailed(
                at_ns=self._now_ns(),
                lease=lease,
                context_full=error.context_full,
                is_lost=tenure.is_lost,
            )
            self._tell(tenure, failed)
        else:
            if not await self._is_late(tenure, held):
                tenure.held, opened = held, held.opened
                self._tell(
                    tenure, ev.BackendOpened(at_ns=self._now_ns(), lease=lease, opened=opened)
                )

    async def _run_unit(self, tenure: Tenure, effect: ef.StartUnit) -> None:
        assert tenure.held is not None
        result = await tenure.held.run_unit(effect.unit)
        self._bring(tenure, ev.UnitDone(at_ns=self._now_ns(), result=result))

    async def _finalize(self, tenure: Tenure, effect: ef.StartFinalize) -> None:
        assert tenure.held is not None
        done = await tenure.held.finalize(effect.index, interrupted=effect.interrupted)
        self._bring(tenure, ev.FinalizeDone(at_ns=self._now_ns(), finalized=done))

    async def _roll_back(self, tenure: Tenure, effect: ef.Rollback) -> None:
        assert tenure.held is not None
        await tenure.held.rollback(effect.index)
        self._tell(tenure, ev.RollbackDone(at_ns=self._now_ns(), index=effect.index))

    async def _run_turn(self, tenure: Tenure, effect: ef.StartTurn) -> None:
        assert isinstance(tenure.backend, Chats)
        held = await tenure.backend.chat(effect.turn, slot=tenure.lease.slot)
        if await self._is_late(tenure, held):
            return
        tenure.turn = held
        if tenure.is_cut:
            held.interrupt()
        prefill = await held.prefill()
        self._tell(tenure, ev.TurnPrefilled(at_ns=self._now_ns(), prefill=prefill))
        result = await held.generate(
            lambda chunk: self._tell(tenure, ev.TurnProgress(at_ns=self._now_ns(), chunk=chunk))
        )
        self._tell(tenure, ev.TurnDone(at_ns=self._now_ns(), result=result))

    async def _run_chunk(self, tenure: Tenure, effect: ef.RunChunk) -> None:
        assert isinstance(tenure.backend, Transcribes)
        if tenure.transcript is None:
            held = await tenure.backend.transcribe(slot=tenure.lease.slot)
            if await self._is_late(tenure, held):
                return
            tenure.transcript = held
        result = await tenure.transcript.run_chunk(effect.chunk)
        self._bring(tenure, ev.ChunkDone(at_ns=self._now_ns(), result=result))

    async def _rebuild(self, tenure: Tenure, effect: ef.Rebuild) -> None:
        began_ns = self._now_ns()
        try:
            async with self._workers.rebuilds_of(tenure.lease), self._inbox.past() as past:
                fed = await bring_back(tenure, past, exact=self._rebuilds_exactly)
        except (RecorderError, OSError) as error:
            raise BackendError(f"the log cannot be read: {error}") from error
        now_ns = self._now_ns()
        rebuilt = ev.Rebuilt(
            at_ns=now_ns,
            lease=effect.lease,
            steps=fed.steps,
            batches=fed.batches,
            cost_us=(now_ns - began_ns) // 1000,
        )
        self._tell(tenure, rebuilt)

    async def _is_late(self, tenure: Tenure, held: ModelSession) -> bool:
        """Release a session that opened after its lease was condemned."""
        if self._tenure is tenure:
            return False
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await held.release()
        return True

    async def _release(self, tenure: Tenure, condemn: bool) -> None:
        clean = False
        try:
            if not condemn:
                with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                    clean = await self._clean_up(tenure)
        finally:  # B5: the slot always returns, even if only to be condemned
            lease, lost = tenure.lease, tenure.is_lost and self._workers.can_replace
            if not clean:
                text = "slot %d of worker %d is condemned: its call hangs or broke"
                _logger.error(text, lease.slot, lease.worker)
            self._tenure = None
            self._workers.let_go(lease)
            tenure.cancel()
            self._admission.release(lease, condemned=lost or not clean)
            self._inbox.post(ev.BackendReleased(at_ns=self._now_ns(), lease=lease.generation))

    async def _clean_up(self, tenure: Tenure) -> bool:
        """Wait for the call in flight, then release the backend's session in a task of its own.

        True if it is released: a thread that hangs in the release has no bound.
        """
        await tenure.settle()
        held = tenure.held or tenure.turn or tenure.transcript
        if held is None:
            return True
        released = anyio.Event()

        async def release(_: Tenure, __: None) -> None:
            await held.release()
            released.set()

        tenure.cancel()
        tenure.ask(release, None, shield=True)  # A server that is cut off would cancel it.
        await tenure.settle()
        return released.is_set()


_METHODS: Final[Mapping[type, Callable[[Calls, Tenure, Any], Awaitable[None]]]] = {
    ef.OpenBackend: Calls._open,
    ef.StartUnit: Calls._run_unit,
    ef.StartFinalize: Calls._finalize,
    ef.Rollback: Calls._roll_back,
    ef.StartTurn: Calls._run_turn,
    ef.RunChunk: Calls._run_chunk,
    ef.Rebuild: Calls._rebuild,
}
"""What makes each call."""
