"""The model calls of one session: each effect that asks for one becomes a task that posts a fact.

    OpenBackend -> BackendOpened | BackendOpenFailed
    StartUnit -> UnitDone | UnitFailed          StartFinalize -> FinalizeDone | FinalizeFailed
    Rollback -> RollbackDone | RollbackFailed   Release -> BackendReleased
    StartTurn -> TurnPrefilled, TurnProgress..., TurnDone | TurnFailed
    any of them -> BackendLost, where the backend is gone

The machine never asks for two at once (B1, B4), so none is guarded here. The tasks live in the
server's nursery, not the session's: a call that hangs must not keep its session from ending. An
exception that is no `BackendError` is a bug of the backend: it costs that session, not the server.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from protocol import effects as ef
from protocol import events as ev

from .admission import Admission
from .backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendSession,
    Chats,
    ContextFull,
    TurnSession,
)
from .pool import Lease

RELEASE_WAIT_S: Final = 10.0
"""A release that takes longer hangs: its slot is condemned rather than waited for (B4)."""

Argument = TypeVar("Argument")

_logger = logging.getLogger("antiphon.session")


class Post(Protocol):
    """Posts an event to the session's inbox; it never blocks."""

    def __call__(self, kind: type[Any], **fields: object) -> None:
        """Post `kind(at_ns=now, **fields)`."""
        ...


class Calls:
    """Runs one session's model calls and posts what came of them."""

    def __init__(
        self, *, backend: Backend, admission: Admission, post: Post, tasks: TaskGroup
    ) -> None:
        """Serve one session.

        Args:
            backend: the model.
            admission: where the slot goes back to.
            post: the session's inbox.
            tasks: the server's nursery for model calls.
        """
        self._backend = backend
        self._admission = admission
        self._post = post
        self._tasks = tasks
        self._lease: Lease | None = None
        self._held: BackendSession | None = None
        self._turn: TurnSession | None = None
        self._turn_is_cut = False
        self._in_flight = 0
        self._settled = anyio.Event()
        self._releasing = False

    @property
    def lease(self) -> Lease | None:
        """The slot that is held; None before `SlotLeased` and after the release."""
        return self._lease

    def hold(self, lease: Lease) -> None:
        """Take the slot that was leased to the session."""
        self._lease = lease
        self._post(ev.SlotLeased, lease=lease.generation, slot=lease.slot)

    def open(self, effect: ef.OpenBackend) -> None:
        """Open the session on its slot."""
        self._start(self._open, effect)

    def start_unit(self, effect: ef.StartUnit) -> None:
        """Prefill and generate a unit."""
        self._start(self._run_unit, effect)

    def interrupt(self, effect: ef.Interrupt) -> None:
        """Cut the unit in flight, at once."""
        if self._held is not None:
            self._held.interrupt(effect.index)

    def finalize(self, effect: ef.StartFinalize) -> None:
        """Finalize a unit."""
        self._start(self._finalize, effect)

    def roll_back(self, effect: ef.Rollback) -> None:
        """Undo a unit."""
        self._start(self._roll_back, effect)

    def start_turn(self, effect: ef.StartTurn) -> None:
        """Prefill a conversation and answer it."""
        self._turn_is_cut = False  # here, for the cut may come before the task begins
        self._start(self._run_turn, effect)

    def cut_turn(self) -> None:
        """Cut the answer under way, at once, or as soon as there is one to be cut."""
        self._turn_is_cut = True
        if self._turn is not None:
            self._turn.interrupt()

    def release(self, *, condemn: bool) -> None:
        """Give the slot back once it is clean; asked twice, do it once (B5).

        Args:
            condemn: its call hangs, so it never will be clean. Otherwise a call that is still under
                way, as after a bug of ours, is waited for: at most `RELEASE_WAIT_S` (B4).
        """
        if not self._releasing:
            self._releasing = True
            self._tasks.start_soon(self._release, condemn)

    # -- the tasks ------------------------------------------------------------------------------

    def _start(self, call: Callable[[Argument], Awaitable[None]], argument: Argument) -> None:
        self._in_flight += 1
        self._tasks.start_soon(self._contain, call, argument)

    async def _contain(
        self, call: Callable[[Argument], Awaitable[None]], argument: Argument
    ) -> None:
        try:
            await call(argument)
        except Exception:
            _logger.exception("the backend broke in %s", getattr(call, "__name__", "a call"))
            self._lost()
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._settled.set()

    def _lost(self) -> None:
        if self._lease is not None:
            self._post(ev.BackendLost, lease=self._lease.generation)

    async def _open(self, effect: ef.OpenBackend) -> None:
        lease = self._lease
        assert lease is not None
        try:
            held = await self._backend.open(effect.opening, slot=lease.slot)
        except BackendError as error:
            _logger.warning("opening on slot %d failed: %s", lease.slot, error)
            full = isinstance(error, ContextFull)
            self._post(ev.BackendOpenFailed, lease=lease.generation, context_full=full)
            return
        if self._lease is not lease:  # condemned meanwhile: nobody waits for it any more
            await held.release()
            return
        self._held = held
        self._post(ev.BackendOpened, lease=lease.generation, opened=held.opened)

    async def _run_unit(self, effect: ef.StartUnit) -> None:
        assert self._held is not None
        index = effect.unit.index
        try:
            result = await self._held.run_unit(effect.unit)
        except BackendGone:
            self._lost()
        except BackendError as error:
            _logger.warning("unit %d failed: %s", index, error)
            full = isinstance(error, ContextFull)
            self._post(ev.UnitFailed, index=index, context_full=full)
        else:
            self._post(ev.UnitDone, result=result)

    async def _finalize(self, effect: ef.StartFinalize) -> None:
        assert self._held is not None
        try:
            done = await self._held.finalize(effect.index, interrupted=effect.interrupted)
        except BackendGone:
            self._lost()
        except BackendError as error:
            _logger.warning("finalize of unit %d failed: %s", effect.index, error)
            self._post(ev.FinalizeFailed, index=effect.index)
        else:
            self._post(ev.FinalizeDone, finalized=done)

    async def _roll_back(self, effect: ef.Rollback) -> None:
        assert self._held is not None
        try:
            await self._held.rollback(effect.index)
        except BackendGone:
            self._lost()
        except BackendError as error:
            _logger.warning("rollback of unit %d failed: %s", effect.index, error)
            self._post(ev.RollbackFailed, index=effect.index)
        else:
            self._post(ev.RollbackDone, index=effect.index)

    async def _run_turn(self, effect: ef.StartTurn) -> None:
        lease, turn = self._lease, effect.turn
        assert lease is not None
        assert isinstance(self._backend, Chats)
        try:
            held = await self._backend.chat(turn, slot=lease.slot)
            if self._lease is not lease:  # condemned meanwhile: nobody waits for it any more
                await held.release()
                return
            self._turn = held
            if self._turn_is_cut:
                held.interrupt()
            self._post(ev.TurnPrefilled, prefill=await held.prefill())
            result = await held.generate(lambda chunk: self._post(ev.TurnProgress, chunk=chunk))
        except BackendGone:
            self._lost()
        except BackendError as error:
            _logger.warning("turn %d failed: %s", turn.index, error)
            full = isinstance(error, ContextFull)
            self._post(ev.TurnFailed, index=turn.index, context_full=full)
        else:
            self._post(ev.TurnDone, result=result)

    async def _release(self, condemn: bool) -> None:
        lease = self._lease
        assert lease is not None
        clean = False
        try:
            if not condemn:
                with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                    clean = await self._clean_up()
        finally:  # B5: it always returns, if only to be condemned
            if not clean:
                _logger.error("slot %d is condemned: its worker hangs or broke", lease.slot)
            self._lease = self._held = self._turn = None
            self._releasing = False
            self._admission.release(lease, condemned=not clean)
            self._post(ev.BackendReleased, lease=lease.generation)

    async def _clean_up(self) -> bool:
        """Wait for the call under way, then have the backend forget the session; True once it has.

        The release is a task of its own: a thread that hangs in it could not be waited for in
        bounded time.
        """
        while self._in_flight:
            self._settled = anyio.Event()
            await self._settled.wait()
        held = self._held or self._turn
        if held is None:
            return True
        released = anyio.Event()

        async def release(_: None) -> None:
            await held.release()
            released.set()

        self._start(release, None)
        while self._in_flight:
            self._settled = anyio.Event()
            await self._settled.wait()
        return released.is_set()
