"""The slot and the model calls of one session: an effect begins each, its outcome is an event.

    Admit -> Admitted | AdmissionRefused
    EnterQueue -> TicketMoved..., then SlotLeased | TicketCancelled | AdmissionRefused
    LeaveQueue -> TicketLeft, unless a slot was leased just before
    OpenBackend -> BackendOpened | BackendOpenFailed
    StartUnit -> UnitDone | UnitFailed          StartFinalize -> FinalizeDone | FinalizeFailed
    Rollback -> RollbackDone | RollbackFailed   Release -> BackendReleased
    StartTurn -> TurnPrefilled, TurnProgress..., TurnDone | TurnFailed
    RunChunk -> ChunkDone | ChunkFailed         (the first opens the transcription)
    Rebuild -> Rebuilt | RebuildFailed          (opens the model again)
    any of them -> BackendLost, where the backend is gone

- A call belongs to its lease. After the release its outcome is neither posted nor awaited: the
  session may hold another lease by then.
- The machine never asks for two calls at once (B1, B4), so one task makes all calls of a lease in
  turn. It runs in the server's nursery: a hung call must not keep its session from ending. An
  exception other than `BackendError` is a bug of the backend: it ends that session, not the server.
- The calls of a condemned lease are cancelled, so that they do not keep a hung backend alive. A
  call in a thread goes on; its result is released or forgotten.
- Only opening is retried, a few times and briefly: a remote may restart, or still free its last
  session. A refusal is final, and so is a backend that fails slowly: a client and a slot wait. A
  turn or an utterance that cannot be begun fails at once, but in a rebuild that ends the session.
- A rebuild (B11) reads and steps the log in a thread, some units at a time, so that a long past
  takes little memory. Recorded units are forced; the chunks of an open utterance are transcribed
  again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import islice
from typing import Final, Protocol

import anyio
import attrs
from anyio.abc import TaskGroup
from structlog import contextvars

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import ErrorCode
from protocol.values.messages import QueuePlace
from protocol.values.model import PAST_UNITS_MAX, PastUnit
from recorder.format.format import RecorderError
from recorder.read.past import Past

from ..model.backends import base
from ..slots.admission import Admission, Refused, Ticket
from ..slots.workers import Lease, Workers
from . import journal

RELEASE_WAIT_S: Final = 10.0
"""A longer release hangs: its slot is condemned (B4)."""
OPEN_S_MAX: Final = 5.0
"""No retry so long after the first try began."""
BATCH_BYTES: Final = 32 * 1024 * 1024
"""Sound and pictures that are handed to the model at once; a unit may have 64 MiB of pictures."""

_logger = logging.getLogger("antiphon.session")

SlotEffect = ef.Admit | ef.EnterQueue | ef.LeaveQueue | ef.Interrupt | ef.CutTurn | ef.Release
"""The effects that are performed at once."""
CallEffect = (
    ef.OpenBackend
    | ef.StartUnit
    | ef.StartFinalize
    | ef.Rollback
    | ef.StartTurn
    | ef.RunChunk
    | ef.Rebuild
)
"""The effects that are calls of the model, made in turn."""
ModelEffect = SlotEffect | CallEffect


class Inbox(Protocol):
    """A session's queue of events."""

    def now_ns(self) -> int:
        """The session's clock: nanoseconds since it was opened."""
        ...

    def post(self, event: ev.Event) -> None:
        """Add an event of this moment; never blocks."""
        ...

    def step_or_post(self, event: ev.Event) -> None:
        """Step an event of this moment in the calling task, if nothing else waits; else post it.

        For a task of the event's own: the effects are performed before it returns.
        """
        ...

    def past(self) -> AbstractAsyncContextManager[Past]:
        """The session's past, from its log; `LogFailed` or `Unreadable` without a sound one."""
        ...


@attrs.define(eq=False, kw_only=True)
class LeasedSlot:
    """A slot from its `SlotLeased` to its `BackendReleased`, and the task that makes its calls.

    Attributes:
        model: what the backend holds on the slot.
        is_lost: the backend reported that it is gone.
        is_over: set when opening must not be retried.
        asked: the calls to be made, the one in flight first; None: the release of the model.
    """

    lease: Lease
    model: base.HeldModel
    is_lost: bool = False
    is_releasing: bool = False
    is_over: anyio.Event = attrs.Factory(anyio.Event)
    asked: deque[CallEffect | None] = attrs.Factory(deque)
    wakeup: anyio.Event = attrs.Factory(anyio.Event)
    settled: anyio.Event = attrs.Factory(anyio.Event)
    scope: anyio.CancelScope | None = None

    async def settle(self) -> None:
        """Wait until no call is in flight."""
        while self.asked:
            self.settled = anyio.Event()
            await self.settled.wait()

    def cancel(self) -> None:
        """End the task that makes the calls; the next call begins another."""
        if self.scope is not None:
            self.scope.cancel()
        self.scope = None


@attrs.define(eq=False, kw_only=True)
class ModelCalls:
    """Leases one session's slots, makes its model calls and posts their outcomes.

    Attributes:
        tasks: the server's nursery for model calls.
        admit: refuses a session without a slot, with its code, where there is no room.
        owner: the name of the session's key; empty where the server has no keys.
        party: to whom the session counts in the queue.
        refusal: the code with which it is refused a slot; None: it may have one.
    """

    _workers: Workers
    _admission: Admission
    _inbox: Inbox
    _tasks: TaskGroup
    _rebuilds_exactly: bool = True
    _admit: Callable[[], ErrorCode | None] = lambda: None
    _owner: str = ""
    _party: str = ""
    _refusal: ErrorCode | None = None
    _ticket: Ticket | None = attrs.field(default=None, init=False)
    _slot: LeasedSlot | None = attrs.field(default=None, init=False)

    @property
    def lease(self) -> Lease | None:
        """The slot in use; None before `SlotLeased` and after the release."""
        return None if self._slot is None else self._slot.lease

    def perform(self, effect: ModelEffect) -> None:
        """Make a call, cut the one in flight at once, or ask for a slot or give it back."""
        match effect:
            case ef.Interrupt():
                if self._slot is not None:
                    self._slot.model.cut(effect.index)
            case ef.CutTurn():
                if self._slot is not None:
                    self._slot.model.cut()
            case ef.Admit():
                refused = self._refusal or self._admit()
                if refused is None:
                    self._inbox.post(ev.Admitted(at_ns=self._inbox.now_ns()))
                else:
                    self._refuse(refused)
            case ef.EnterQueue():
                self._enter_queue(effect)
            case ef.LeaveQueue():
                if self._ticket is not None and self._admission.leave(self._ticket):
                    self._inbox.post(ev.TicketLeft(at_ns=self._inbox.now_ns()))
            case ef.Release():
                if self._slot is not None:
                    self._release_slot(self._slot, condemn=effect.condemn)
                else:  # it was that of a server that is gone
                    at_ns = self._inbox.now_ns()
                    self._inbox.post(ev.BackendReleased(at_ns=at_ns, lease=effect.lease))
            case _:
                assert self._slot is not None
                self._ask(self._slot, effect)

    def give_up(self) -> None:
        """Leave the queue and post nothing, or cut the call in flight and give the slot back."""
        if self._ticket is not None:
            self._admission.leave(self._ticket)
        if self._slot is not None:
            self._slot.model.cut()
            self._release_slot(self._slot, condemn=False)

    def stop_trying(self) -> None:
        """The session is over: do not retry an opening."""
        if self._slot is not None:
            self._slot.is_over.set()

    # -- the slot -------------------------------------------------------------------------------

    def _enter_queue(self, effect: ef.EnterQueue) -> None:
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        try:
            self._ticket = self._admission.enter(
                effect.mode,
                ahead=effect.ahead,
                owner=self._owner,
                party=self._party,
                on_leased=self.hold,
                on_moved=self._move,
                on_cancelled=self._cancelled,
                on_refused=self._refuse,
            )
        except Refused as refused:
            self._refuse(refused.code)

    def _refuse(self, code: ErrorCode) -> None:
        self._inbox.post(ev.AdmissionRefused(at_ns=self._inbox.now_ns(), code=code))

    def _move(self, place: QueuePlace) -> None:
        self._inbox.post(ev.TicketMoved(at_ns=self._inbox.now_ns(), place=place))

    def _cancelled(self) -> None:
        self._inbox.post(ev.TicketCancelled(at_ns=self._inbox.now_ns()))

    def hold(self, lease: Lease) -> None:
        """Take the slot that was leased to the session."""
        assert self._slot is None, "a slot is given back before the next is leased"
        now_ns, number = self._inbox.now_ns, lease.generation
        backend = self._workers.backend_of(lease)
        model = base.HeldModel(backend=backend, slot=lease.slot, now_ns=now_ns)
        self._slot = LeasedSlot(lease=lease, model=model)
        self._inbox.post(ev.SlotLeased(at_ns=now_ns(), lease=number, slot=lease.slot))
        self._workers.watch_lease(
            lease, lambda: self._inbox.post(ev.LeaseRevoked(at_ns=now_ns(), lease=number))
        )

    def _release_slot(self, slot: LeasedSlot, *, condemn: bool) -> None:
        """Give the slot back once it is clean; a second call does nothing (B5).

        `condemn` means that its call hangs, so it will never be clean. Otherwise a call in flight
        is awaited for at most `RELEASE_WAIT_S` (B4).
        """
        if not slot.is_releasing:
            slot.is_releasing = True
            slot.is_over.set()
            self._tasks.start_soon(self._release, slot, condemn)

    async def _release(self, slot: LeasedSlot, condemn: bool) -> None:
        clean = False
        try:
            if not condemn:
                with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
                    clean = await self._clean_up(slot)
        finally:  # B5: the slot always returns, even if only to be condemned
            lease, lost = slot.lease, slot.is_lost and self._workers.can_replace
            if not clean:
                text = "slot %d of worker %d is condemned: its call hangs or broke"
                _logger.error(text, lease.slot, lease.worker)
            self._slot = None
            self._workers.unwatch_lease(lease)
            slot.cancel()
            self._admission.release(lease, condemned=lost or not clean)
            at_ns = self._inbox.now_ns()
            self._inbox.post(ev.BackendReleased(at_ns=at_ns, lease=lease.generation))

    async def _clean_up(self, slot: LeasedSlot) -> bool:
        """Wait for the call in flight, then release the backend's session in a task of its own.

        True if it is released: a thread that hangs in the release has no bound.
        """
        await slot.settle()
        if slot.model.held is not None:
            slot.cancel()
            self._ask(slot, None, shield=True)  # A server that is cut off would cancel it.
            await slot.settle()
        return slot.model.held is None

    # -- the calls ------------------------------------------------------------------------------

    def _ask(self, slot: LeasedSlot, effect: CallEffect | None, *, shield: bool = False) -> None:
        """Make a call after those that were asked for before.

        With `shield`, and as the task's first call, a server's shutdown does not cancel it.
        """
        slot.asked.append(effect)
        slot.wakeup.set()
        if slot.scope is None:
            slot.scope = anyio.CancelScope(shield=shield)
            self._tasks.start_soon(self._make_calls, slot, slot.scope)

    async def _make_calls(self, slot: LeasedSlot, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                while not slot.asked:
                    slot.wakeup = anyio.Event()
                    await slot.wakeup.wait()
                effect = slot.asked[0]
                unit = effect.unit if isinstance(effect, ef.StartUnit) else effect
                name_unit(getattr(unit, "index", None))
                try:
                    if effect is None:
                        await slot.model.release()
                    elif isinstance(effect, ef.Rebuild):
                        self._post(slot, await self._rebuild(slot, effect))
                    elif await self._is_open(slot, effect):
                        event = await slot.model.call(effect, emit=partial(self._post, slot))
                        self._post(slot, event, at_once=True)
                except Exception as error:
                    self._failed(slot, effect, error)
                finally:
                    slot.asked.popleft()
                    if not slot.asked:
                        slot.settled.set()

    async def _is_open(self, slot: LeasedSlot, effect: CallEffect) -> bool:
        """Open what a call is made on, if that is due; whether the session still has the lease."""
        if isinstance(effect, ef.OpenBackend):
            await try_to_open(slot.model, effect, slot.is_over)
        elif slot.model.held is None:
            await slot.model.begin(effect)
        if self._slot is slot:
            return True
        with anyio.move_on_after(RELEASE_WAIT_S, shield=True):
            await slot.model.release()
        return False

    def _failed(self, slot: LeasedSlot, effect: object, error: Exception) -> None:
        """Post the event of a call that failed, or that the backend is lost."""
        name, at_ns = type(effect).__name__, self._inbox.now_ns()
        event, is_gone = None, isinstance(error, base.BackendGone)
        if is_gone:
            _logger.warning("the worker is gone in %s: %s", name, error)
            slot.is_lost = True
        if isinstance(error, base.BackendError) and (
            isinstance(effect, ef.OpenBackend) or not is_gone
        ):
            refused = str(error) if isinstance(error, base.BackendRefused) else ""
            event = base.failure_of(effect, error, at_ns, refused)
            level = logging.INFO if slot.model.is_cut else logging.WARNING
            _logger.log(level, "%s: %s", event, error)
        elif not is_gone:
            _logger.error("the backend broke in %s", name, exc_info=error)
        self._post(slot, event or ev.BackendLost(at_ns=at_ns, lease=slot.lease.generation))

    def _post(self, slot: LeasedSlot, event: ev.Event, *, at_once: bool = False) -> None:
        """Post a call's progress or outcome; `at_once` steps it in this task."""
        if self._slot is not slot:
            late = type(event).__name__
            _logger.info("late %s of lease %d", late, slot.lease.generation)
        elif at_once:
            self._inbox.step_or_post(event)
        else:
            self._inbox.post(event)

    async def _rebuild(self, slot: LeasedSlot, effect: ef.Rebuild) -> ev.Rebuilt:
        began_ns = self._inbox.now_ns()
        try:
            async with self._workers.rebuilds_of(slot.lease), self._inbox.past() as past:
                steps, batches = await rebuild(slot, past, exact=self._rebuilds_exactly)
        except (RecorderError, OSError) as error:
            raise base.BackendError(f"the log cannot be read: {error}") from error
        now_ns = self._inbox.now_ns()
        return ev.Rebuilt(
            at_ns=now_ns,
            lease=effect.lease,
            steps=steps,
            batches=batches,
            cost_us=(now_ns - began_ns) // 1000,
        )


def name_unit(index: int | None) -> None:
    """Set the unit id on this task's log records; None clears it."""
    if index is None:
        contextvars.unbind_contextvars("unit")
    else:
        contextvars.bind_contextvars(unit=index)


async def try_to_open(
    model: base.HeldModel, effect: ef.OpenBackend | ef.RunChunk, is_over: anyio.Event
) -> None:
    """Open what a call is made on; retry while that may help until `is_over`.

    Raises the last `BackendError`.
    """
    began_s, tries, slot = anyio.current_time(), 0, model.slot
    while True:
        try:
            await model.begin(effect)
            return
        except base.BackendError as error:
            tries += 1
            _logger.warning("opening on slot %d failed (try %d): %s", slot, tries, error)
            waited_s = anyio.current_time() - began_s
            is_final = isinstance(error, base.ContextFull | base.BackendRefused)
            if is_final or tries == base.OPEN_TRIES or waited_s >= OPEN_S_MAX:
                raise
            with anyio.move_on_after(base.OPEN_PAUSE_S * 2 ** (tries - 1)):
                await is_over.wait()
            if is_over.is_set():
                raise


# -- rebuilding -----------------------------------------------------------------------------------


async def rebuild(slot: LeasedSlot, past: Past, *, exact: bool) -> tuple[int, tuple[int, ...]]:
    """Open the model, or its transcription, and feed it the past.

    Returns:
        The number of units or chunks fed, and the units of each long prefill (none: exact).

    Raises:
        BackendError: the model cannot, found another result than the recorded one, or the session
            ended meanwhile; or the log is damaged.
        BackendGone: the worker is lost.
    """
    units, batches = past.units(), list[int]()
    while batch := await journal.in_thread(partial(_take, units)):
        _check_wanted(slot)
        if slot.model.opened is None:
            await _open_again(slot, past)
        if not isinstance(slot.model.opened, base.Rebuilds):
            raise base.BackendError("the model cannot be rebuilt")
        await slot.model.opened.rebuild(batch, exact=exact)
        batches.append(len(batch))
    if past.is_damaged:
        raise base.BackendError("the log has a gap")
    if past.chunks:
        await _transcribe_again(slot, past)
        return len(past.chunks), ()
    if slot.model.opened is None:
        await _open_again(slot, past)
    return sum(batches), () if exact else tuple(batches)


def _take(units: Iterator[PastUnit]) -> list[PastUnit]:
    """Take the next units, `PAST_UNITS_MAX` and about `BATCH_BYTES` at most; none at the end."""
    batch, size = list[PastUnit](), 0
    for past in islice(units, PAST_UNITS_MAX):
        batch.append(past)
        size += len(past.unit.pcm) + sum(map(len, past.unit.frames))
        if size >= BATCH_BYTES:
            break
    return batch


def _check_wanted(slot: LeasedSlot) -> None:
    if slot.is_over.is_set():
        raise base.BackendError("the session is over")


async def _open_again(slot: LeasedSlot, past: Past) -> None:
    if past.opening is None:
        raise base.BackendError("the log holds no opening of the model")
    effect = ef.OpenBackend(lease=slot.lease.generation, opening=past.opening)
    await try_to_open(slot.model, effect, slot.is_over)


async def _transcribe_again(slot: LeasedSlot, past: Past) -> None:
    model, number = slot.model, slot.lease.generation
    await try_to_open(model, ef.RunChunk(lease=number, chunk=past.chunks[0][0]), slot.is_over)
    for chunk, recorded in past.chunks:
        _check_wanted(slot)
        done = await model.call(ef.RunChunk(lease=number, chunk=chunk))
        assert isinstance(done, ev.ChunkDone)
        if done.result.token_ids != recorded.token_ids and model.backend.info.deterministic:
            text = f"chunk {chunk.index} of utterance {chunk.utterance} came out otherwise"
            raise base.BackendError(text)
