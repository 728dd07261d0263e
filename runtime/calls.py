"""The model calls of one session: each effect that asks for one becomes a task that posts a fact.

    OpenBackend -> BackendOpened | BackendOpenFailed
    StartUnit -> UnitDone | UnitFailed          StartFinalize -> FinalizeDone | FinalizeFailed
    Rollback -> RollbackDone | RollbackFailed   Release -> BackendReleased
    StartTurn -> TurnPrefilled, TurnProgress..., TurnDone | TurnFailed
    RunChunk -> ChunkDone | ChunkFailed         (the first opens the transcription)
    any of them -> BackendLost, where the backend is gone

Rules:

- What is done under a lease belongs to that lease (`_Tenure`). Once it is given back, nothing that
  its calls still do is told to the session, which may hold another by then, nor waited for.
- The calls of a lease that is condemned are cancelled, so that nothing keeps a hung backend alive
  that can be made to let go. One in a thread goes on; what it returns is released or forgotten.
- Opening alone is tried again, a few times and briefly (`opening`).

The machine never asks for two at once (B1, B4), so one task makes all calls of a lease, one after
the other; it lasts as long as the lease, for a task costs more than a call has to. It lives in the
server's nursery, not the session's: a call that hangs must not keep its session from ending. An
exception that is no `BackendError` is a bug of the backend: it costs that session, not the server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol import effects as ef
from protocol import events as ev

from .admission import Admission
from .backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendRefused,
    BackendSession,
    Chats,
    ContextFull,
    Transcribes,
    TranscriptSession,
    TurnSession,
)
from .opening import try_to_open
from .pool import Lease
from .telemetry.logs import name_unit
from .workers import Workers

RELEASE_WAIT_S: Final = 10.0
"""A release that takes longer hangs: its slot is condemned rather than waited for (B4)."""

_logger = logging.getLogger("antiphon.session")


class Post(Protocol):
    """Posts an event to the session's inbox; it never blocks."""

    def __call__(self, kind: type[Any], **fields: object) -> None:
        """Post `kind(at_ns=now, **fields)`."""
        ...


_Call = Callable[["_Tenure", Any], Awaitable[None]]
_Held = BackendSession | TurnSession | TranscriptSession


@attrs.define(eq=False)
class _Tenure:
    """One lease, from its `SlotLeased` to its `BackendReleased`, and what is done under it.

    Attributes:
        lease: the slot.
        backend: whose slot it is.
        held: what the backend holds for the session; None before it is opened.
        turn, transcript: likewise for a turn of chat, and for a transcription.
        is_cut: the turn is not wanted any more, be it begun or not.
        is_lost: the backend said that it is gone.
        is_releasing: asked for already.
        is_over: set once opening is not to be tried again.
        asked: the calls that are to be made, the one under way first.
        wakeup: set when there is one.
        settled: set when there is none any more.
        scope: of the task that makes them; None before the first.
    """

    lease: Lease
    backend: Backend
    held: BackendSession | None = None
    turn: TurnSession | None = None
    transcript: TranscriptSession | None = None
    is_cut: bool = False
    is_lost: bool = False
    is_releasing: bool = False
    is_over: anyio.Event = attrs.Factory(anyio.Event)
    asked: deque[tuple[_Call, object]] = attrs.Factory(deque)
    wakeup: anyio.Event = attrs.Factory(anyio.Event)
    settled: anyio.Event = attrs.Factory(anyio.Event)
    scope: anyio.CancelScope | None = None

    async def settle(self) -> None:
        """Wait until no call is under way."""
        while self.asked:
            self.settled = anyio.Event()
            await self.settled.wait()


class Calls:
    """Runs one session's model calls and posts what came of them."""

    def __init__(
        self, *, workers: Workers, admission: Admission, post: Post, tasks: TaskGroup
    ) -> None:
        """Serve one session.

        Args:
            workers: the model.
            admission: where the slot goes back to.
            post: the session's inbox.
            tasks: the server's nursery for model calls.
        """
        self._workers = workers
        self._admission = admission
        self._post = post
        self._tasks = tasks
        self._tenure: _Tenure | None = None

    @property
    def lease(self) -> Lease | None:
        """The slot that is held; None before `SlotLeased` and after the release."""
        return None if self._tenure is None else self._tenure.lease

    def hold(self, lease: Lease) -> None:
        """Take the slot that was leased to the session."""
        assert self._tenure is None, "a slot is given back before the next is leased"
        self._tenure = _Tenure(lease=lease, backend=self._workers.backend_of(lease))
        self._post(ev.SlotLeased, lease=lease.generation, slot=lease.slot)

    def open(self, effect: ef.OpenBackend) -> None:
        """Open the session on its slot."""
        self._start(self._open, effect)

    def start_unit(self, effect: ef.StartUnit) -> None:
        """Prefill and generate a unit."""
        self._start(self._run_unit, effect)

    def interrupt(self, effect: ef.Interrupt) -> None:
        """Cut the unit in flight, at once."""
        if self._tenure is not None and self._tenure.held is not None:
            self._tenure.held.interrupt(effect.index)

    def finalize(self, effect: ef.StartFinalize) -> None:
        """Finalize a unit."""
        self._start(self._finalize, effect)

    def roll_back(self, effect: ef.Rollback) -> None:
        """Undo a unit."""
        self._start(self._roll_back, effect)

    def start_turn(self, effect: ef.StartTurn) -> None:
        """Prefill a conversation and answer it."""
        self._start(self._run_turn, effect)

    def run_chunk(self, effect: ef.RunChunk) -> None:
        """Have a second of an utterance heard."""
        self._start(self._run_chunk, effect)

    def cut_turn(self) -> None:
        """Cut the answer under way, at once, or as soon as there is one to be cut."""
        tenure = self._tenure
        if tenure is not None:
            tenure.is_cut = True
            if tenure.turn is not None:
                tenure.turn.interrupt()

    def stop_trying(self) -> None:
        """The session is over: an opening that fails, or has failed, is not tried again."""
        if self._tenure is not None:
            self._tenure.is_over.set()

    def release(self, *, condemn: bool) -> None:
        """Give the slot back once it is clean; asked twice, do it once (B5).

        Args:
            condemn: its call hangs, so it never will be clean. Otherwise a call that is still under
                way, as after a bug of ours, is waited for: at most `RELEASE_WAIT_S` (B4).
        """
        tenure = self._tenure
        assert tenure is not None
        if not tenure.is_releasing:
            tenure.is_releasing = True
            tenure.is_over.set()
            self._tasks.start_soon(self._release, tenure, condemn)

    # -- the tasks ------------------------------------------------------------------------------

    def _start(self, call: _Call, argument: object, *, shield: bool = False) -> None:
        tenure = self._tenure
        assert tenure is not None
        tenure.asked.append((call, argument))
        tenure.wakeup.set()
        if tenure.scope is None:
            tenure.scope = anyio.CancelScope(shield=shield)
            self._tasks.start_soon(self._make_calls, tenure, tenure.scope)

    async def _make_calls(self, tenure: _Tenure, scope: anyio.CancelScope) -> None:
        """Make the calls of a lease, until it is over."""
        with scope:
            while True:
                while not tenure.asked:
                    tenure.wakeup = anyio.Event()
                    await tenure.wakeup.wait()
                call, argument = tenure.asked[0]
                name_unit(_unit_of(argument))
                try:
                    await call(tenure, argument)
                except BackendGone as error:
                    _logger.warning("the worker is gone in %s: %s", _name(call), error)
                    tenure.is_lost = True
                    self._lost(tenure)
                except Exception:
                    _logger.exception("the backend broke in %s", _name(call))
                    self._lost(tenure)
                finally:
                    tenure.asked.popleft()
                    if not tenure.asked:
                        tenure.settled.set()

    def _tell(self, tenure: _Tenure, kind: type[Any], **fields: object) -> None:
        """Post a fact, unless its lease is over: it concerns nobody then."""
        if self._tenure is tenure:
            self._post(kind, **fields)
        else:
            _logger.info("a late %s of lease %d", kind.__name__, tenure.lease.generation)

    def _lost(self, tenure: _Tenure) -> None:
        self._tell(tenure, ev.BackendLost, lease=tenure.lease.generation)

    async def _open(self, tenure: _Tenure, effect: ef.OpenBackend) -> None:
        lease = tenure.lease
        try:
            held = await try_to_open(tenure.backend, effect.opening, lease.slot, tenure.is_over)
        except BackendError as error:
            tenure.is_lost = isinstance(error, BackendGone)
            full = isinstance(error, ContextFull)
            self._tell(tenure, ev.BackendOpenFailed, lease=lease.generation, context_full=full)
        else:
            if not await self._is_late(tenure, held):
                tenure.held = held
                self._tell(tenure, ev.BackendOpened, lease=lease.generation, opened=held.opened)

    async def _is_late(self, tenure: _Tenure, held: _Held) -> bool:
        """Release what came after its lease was condemned: nobody waits for it any more."""
        if self._tenure is tenure:
            return False
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await held.release()
        return True

    async def _run_unit(self, tenure: _Tenure, effect: ef.StartUnit) -> None:
        assert tenure.held is not None
        index = effect.unit.index
        try:
            result = await tenure.held.run_unit(effect.unit)
        except BackendGone:
            raise
        except BackendError as error:
            _logger.warning("unit %d failed: %s", index, error)
            full = isinstance(error, ContextFull)
            self._tell(tenure, ev.UnitFailed, index=index, context_full=full)
        else:
            self._tell(tenure, ev.UnitDone, result=result)

    async def _finalize(self, tenure: _Tenure, effect: ef.StartFinalize) -> None:
        assert tenure.held is not None
        try:
            done = await tenure.held.finalize(effect.index, interrupted=effect.interrupted)
        except BackendGone:
            raise
        except BackendError as error:
            _logger.warning("finalize of unit %d failed: %s", effect.index, error)
            self._tell(tenure, ev.FinalizeFailed, index=effect.index)
        else:
            self._tell(tenure, ev.FinalizeDone, finalized=done)

    async def _roll_back(self, tenure: _Tenure, effect: ef.Rollback) -> None:
        assert tenure.held is not None
        try:
            await tenure.held.rollback(effect.index)
        except BackendGone:
            raise
        except BackendError as error:
            _logger.warning("rollback of unit %d failed: %s", effect.index, error)
            self._tell(tenure, ev.RollbackFailed, index=effect.index)
        else:
            self._tell(tenure, ev.RollbackDone, index=effect.index)

    async def _run_turn(self, tenure: _Tenure, effect: ef.StartTurn) -> None:
        turn = effect.turn
        assert isinstance(tenure.backend, Chats)
        try:
            held = await tenure.backend.chat(turn, slot=tenure.lease.slot)
            if await self._is_late(tenure, held):
                return
            tenure.turn = held
            if tenure.is_cut:
                held.interrupt()
            self._tell(tenure, ev.TurnPrefilled, prefill=await held.prefill())
            result = await held.generate(
                lambda chunk: self._tell(tenure, ev.TurnProgress, chunk=chunk)
            )
        except BackendGone:
            raise
        except BackendError as error:
            level = logging.INFO if tenure.is_cut else logging.WARNING
            _logger.log(level, "turn %d failed: %s", turn.index, error)
            failed = {"index": turn.index, "context_full": isinstance(error, ContextFull)}
            is_refused = isinstance(error, BackendRefused) and tenure.turn is None
            self._tell(tenure, ev.TurnFailed, **failed, refused=str(error) if is_refused else "")
        else:
            self._tell(tenure, ev.TurnDone, result=result)

    async def _run_chunk(self, tenure: _Tenure, effect: ef.RunChunk) -> None:
        chunk = effect.chunk
        assert isinstance(tenure.backend, Transcribes)
        try:
            if tenure.transcript is None:
                held = await tenure.backend.transcribe(slot=tenure.lease.slot)
                if await self._is_late(tenure, held):
                    return
                tenure.transcript = held
            result = await tenure.transcript.run_chunk(chunk)
        except BackendGone:
            raise
        except BackendError as error:
            _logger.warning("chunk %d.%d failed: %s", chunk.utterance, chunk.index, error)
            failed = {"utterance": chunk.utterance, "index": chunk.index}
            failed["context_full"] = isinstance(error, ContextFull)
            self._tell(tenure, ev.ChunkFailed, **failed)
        else:
            self._tell(tenure, ev.ChunkDone, result=result)

    async def _release(self, tenure: _Tenure, condemn: bool) -> None:
        clean = False
        try:
            if not condemn:
                with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                    clean = await self._clean_up(tenure)
        finally:  # B5: it always returns, if only to be condemned
            lease, lost = tenure.lease, tenure.is_lost and self._workers.can_replace
            if not clean:
                text = "slot %d of worker %d is condemned: its call hangs or broke"
                _logger.error(text, lease.slot, lease.worker)
            self._tenure = None
            if tenure.scope is not None:
                tenure.scope.cancel()
            self._admission.release(lease, condemned=lost or not clean)
            self._post(ev.BackendReleased, lease=lease.generation)

    async def _clean_up(self, tenure: _Tenure) -> bool:
        """Wait for the call under way, then have the backend forget the session; True once it has.

        The release is a task of its own: a thread that hangs in it has no bound.
        """
        await tenure.settle()
        held = tenure.held or tenure.turn or tenure.transcript
        if held is None:
            return True
        released = anyio.Event()

        async def release(_: _Tenure, __: object) -> None:
            await held.release()
            released.set()

        if tenure.scope is not None:
            tenure.scope.cancel()  # A server that is cut off cancels it, and the release with it.
        tenure.scope = None
        self._start(release, None, shield=True)
        await tenure.settle()
        return released.is_set()


def _unit_of(argument: object) -> int | None:
    """Say which unit a call is about; None for other calls."""
    match argument:
        case ef.StartUnit():
            return argument.unit.index
        case ef.StartFinalize() | ef.Rollback():
            return argument.index
    return None


def _name(call: Callable[..., object]) -> str:
    return getattr(call, "__name__", "a call")
