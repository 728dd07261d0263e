"""One gateway at a worker: its sessions, and their calls on the backend.

- A session holds a slot of the worker from its first call to its release: the one that the gateway
  names if it is free, else another.
- A session has one call at a time; only its release waits for it, and an interrupt comes between.
  An interrupt that overtook its unit cuts it when it has begun.
- When the gateway is lost, the calls of its sessions are cut, and the sessions are released when
  these have ended (B4, B5). A call or release that hangs withholds its slot for good.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.turn import TurnChunk
from recorder.format.errors import RecordInvalid

from ..link.errors import LinkError
from ..link.hello import Wire
from ..link.limits import TEXT_CHARS_MAX
from ..link.link import Link
from ..link.messages import Answer, Ask, Cancel, Failed, Message, Proceed, Rebuild, Speaks, Why
from ..model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendRefused,
    BackendSession,
    Chats,
    ContextFull,
    DeviceLost,
    Rebuilds,
    Transcribes,
)
from .session import Session, Work

CALL_WAIT_S: Final = 10.0
"""For a call that was cut, as a gateway waits by default; then it hangs."""
RELEASE_WAIT_S: Final = 10.0
"""A longer release hangs."""

_logger = logging.getLogger("antiphon.worker")

_WHYS: Final[tuple[tuple[type[BackendError], Why], ...]] = (
    (DeviceLost, "device_lost"),
    (BackendGone, "gone"),
    (BackendRefused, "refused"),
    (ContextFull, "context_full"),
    (BackendError, "error"),
)
"""From the most special class to the most general."""


class Host(Protocol):
    """What a gateway's sessions need of the worker."""

    backend: Backend
    tasks: TaskGroup

    def lease(self, wanted: int) -> int:
        """Lease a free slot, `wanted` if it is one; `BackendError` where none is free."""
        ...

    def give_back(self, slot: int, *, is_clean: bool) -> None:
        """Take a slot back; one that is not clean is never leased again."""
        ...

    def lost(self, error: BackendGone) -> None:
        """The backend is gone, with all sessions."""
        ...


class GatewayLink:
    """The worker's end of one gateway's link; `speaks` is as the gateway was told."""

    def __init__(self, wire: Wire, host: Host, *, speaks: bool) -> None:
        self._host = host
        self._sessions: dict[int, Session] = {}
        self._speaks = speaks
        self.link = Link(wire, self._take, self._lost, self._tell_speaks)

    @property
    def sessions(self) -> int:
        """The number of sessions that the gateway holds."""
        return len(self._sessions)

    # -- messages -------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        if not isinstance(message, Ask | Proceed | Rebuild | Cancel):
            raise LinkError(f"a {type(message).__name__} from a gateway")
        session = self._sessions.get(message.session)
        if isinstance(message, Cancel):
            if session is not None and session.call == message.call:
                session.cancel()
            return
        if isinstance(message, Proceed):
            found = self._of(session, message)
            self._start(found, message.call, partial(self._proceed, found, message))
            return
        if isinstance(message, Rebuild):
            found = self._of(session, message)
            self._start(found, message.call, partial(self._rebuild, found, message))
            return
        match message.effect:
            case ef.Release():
                self._ask_release(session, message)
            case ef.CutTurn():
                if session is not None and session.turn is not None:
                    session.turn.interrupt()
            case ef.Interrupt(index=index):
                self._interrupt(session, message.call, index)
            case ef.OpenBackend() | ef.StartTurn():
                if session is not None:
                    raise LinkError(f"session {message.session} is opened twice")
                self._open(message)
            case ef.RunChunk() if session is None:
                self._open(message)
            case ef.RunChunk() | ef.StartUnit() | ef.StartFinalize() | ef.Rollback():
                found = self._of(session, message)
                self._start(found, message.call, partial(self._perform, found, message))
            case effect:
                raise LinkError(f"a {type(effect).__name__} is no call of a model")

    @staticmethod
    def _of(session: Session | None, message: Ask | Proceed | Rebuild) -> Session:
        if session is None:
            raise LinkError(f"there is no session {message.session}")
        return session

    def _open(self, message: Ask) -> None:
        """Give a session its slot, and begin its first call."""
        try:
            slot = self._host.lease(message.slot)
        except BackendError as error:
            self._tell_failed(message.call, message.session, error)
            return
        session = self._sessions[message.session] = Session(number=message.session, slot=slot)
        self._start(session, message.call, partial(self._perform, session, message))

    def _interrupt(self, session: Session | None, call: int, index: int) -> None:
        """Cut unit `index`, which may be on its way; one that has ended is not cut."""
        if session is None or session.opened is None:
            return
        if session.call == call:
            session.opened.interrupt(index)
        else:
            session.early = call

    def _ask_release(self, session: Session | None, message: Ask) -> None:
        if session is None:
            self._tell_released(message.call, message.session)
        else:
            del self._sessions[session.number]
            self._host.tasks.start_soon(self._release, session, message.call)

    # -- calls ----------------------------------------------------------------------------------

    def _start(self, session: Session, call: int, work: Work) -> None:
        if not call:
            raise LinkError("a call without a number")
        if session.call:
            raise LinkError(f"two calls at once on session {session.number}")
        if session.ask(call, work):
            self._host.tasks.start_soon(session.make_calls, self._run)

    async def _run(self, session: Session, call: int, work: Work) -> None:
        done: ev.Event | Exception
        try:
            done = await work()
        except BackendError as error:
            done = error
        except Exception as error:
            _logger.exception("the backend broke")
            done = error
        except anyio.get_cancelled_exc_class():
            self._ended(session)
            if session.scope.cancel_called:
                self._tell_failed(call, session.number, BackendError("it was cancelled"))
            raise
        self._ended(session)
        if isinstance(done, Exception):
            self._tell_failed(call, session.number, done)
        else:
            self._tell(Answer(call=call, session=session.number, event=done))

    def _ended(self, session: Session) -> None:
        """A session's call has ended."""
        session.call = 0
        session.idle.set()
        if session.held is None:  # it was not opened, so the backend left the slot empty
            if self._sessions.get(session.number) is session:
                del self._sessions[session.number]
            self._give_back(session, is_clean=True)

    async def _perform(self, session: Session, message: Ask) -> ev.Event:
        backend, number = self._host.backend, session.number
        match message.effect:
            case ef.OpenBackend(opening=opening):
                session.opened = await backend.open(opening, slot=session.slot)
                return ev.BackendOpened(at_ns=0, lease=number, opened=session.opened.opened)
            case ef.StartTurn(turn=turn):
                if not isinstance(backend, Chats):
                    raise BackendError(f"model {backend.info.name} does not chat")
                session.turn = await backend.chat(turn, slot=session.slot)
                return ev.SlotLeased(at_ns=0, lease=number, slot=session.slot)
            case ef.RunChunk(chunk=chunk):
                if session.transcript is None:
                    if not isinstance(backend, Transcribes):
                        raise BackendError(f"model {backend.info.name} does not transcribe")
                    session.transcript = await backend.transcribe(slot=session.slot)
                result = await session.transcript.run_chunk(chunk)
                return ev.ChunkDone(at_ns=0, result=result)
        if session.opened is None:
            raise BackendError(f"a {type(message.effect).__name__} of a session without units")
        return await self._of_units(session, session.opened, message)

    async def _of_units(self, session: Session, opened: BackendSession, message: Ask) -> ev.Event:
        match message.effect:
            case ef.StartUnit(unit=unit):
                session.unit = unit.index
                if session.early == message.call:
                    self._host.tasks.start_soon(_interrupt, opened, unit.index)
                result = await opened.run_unit(unit, message.cut)
                return ev.UnitDone(at_ns=0, result=result)
            case ef.StartFinalize(index=index, interrupted=interrupted):
                done = await opened.finalize(index, interrupted=interrupted)
                return ev.FinalizeDone(at_ns=0, finalized=done)
            case ef.Rollback(index=index):
                await opened.rollback(index)
                return ev.RollbackDone(at_ns=0, index=index)
        raise BackendError(f"a {type(message.effect).__name__} is no call of a unit")

    async def _proceed(self, session: Session, message: Proceed) -> ev.Event:
        turn = session.turn
        if turn is None:
            raise BackendError("a step of a turn that was not taken")
        if message.step == "prefill":
            return ev.TurnPrefilled(at_ns=0, prefill=await turn.prefill())

        def emit(chunk: TurnChunk) -> None:
            event = ev.TurnProgress(at_ns=0, chunk=chunk)
            self._tell(Answer(call=message.call, session=session.number, event=event))

        return ev.TurnDone(at_ns=0, result=await turn.generate(emit, message.cut))

    async def _rebuild(self, session: Session, message: Rebuild) -> ev.Event:
        opened = session.opened
        if not isinstance(opened, Rebuilds):
            name = self._host.backend.info.name
            raise BackendError(f"model {name} cannot rebuild a session")
        done = await opened.rebuild(message.past, exact=message.exact)
        return ev.FinalizeDone(at_ns=0, finalized=done)

    async def _release(self, session: Session, call: int | None = None) -> None:
        """Release a session when its call has ended, and answer `call`; both waits are bounded."""
        failure: Exception | None = BackendError("its call, or its release, hangs")
        is_clean = False
        try:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(CALL_WAIT_S):
                    while session.call:
                        session.idle = anyio.Event()
                        await session.idle.wait()
                if not session.call:
                    with anyio.move_on_after(RELEASE_WAIT_S):
                        if session.held is not None:
                            await session.held.release()
                        is_clean, failure = True, None
        except Exception as error:
            _logger.exception("a session could not be released")
            failure = error
        self._give_back(session, is_clean=is_clean)
        if call is None:
            return
        if failure is None:
            self._tell_released(call, session.number)
        else:
            self._tell_failed(call, session.number, failure)

    def _give_back(self, session: Session, *, is_clean: bool) -> None:
        """Give a session's slot back, once: a call that hung may still end."""
        if not session.is_over:
            session.end()
            self._host.give_back(session.slot, is_clean=is_clean)

    def _lost(self, reason: str) -> None:
        """The gateway is gone: cut what runs, and release all."""
        level = logging.WARNING if self._sessions else logging.INFO
        _logger.log(level, "a gateway with %d sessions is gone: %s", self.sessions, reason)
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.cut()
            self._host.tasks.start_soon(self._release, session)

    # -- answers --------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        try:
            self.link.send(message)
        except LinkError:
            return  # The gateway is gone, and so are its sessions.
        except RecordInvalid as error:
            assert isinstance(message, Answer)
            too_large = BackendError(f"the answer is too large for one message: {error}")
            self._tell_failed(message.call, message.session, too_large)

    def _tell_released(self, call: int, session: int) -> None:
        event = ev.BackendReleased(at_ns=0, lease=session)
        self._tell(Answer(call=call, session=session, event=event))

    def _tell_failed(self, call: int, session: int, error: Exception) -> None:
        why: Why = next((why for kind, why in _WHYS if isinstance(error, kind)), "broke")
        text = str(error)[:TEXT_CHARS_MAX] if why != "broke" else type(error).__name__
        self._tell(Failed(call=call, session=session, why=why, text=text))
        if isinstance(error, BackendGone):
            self._host.lost(error)

    def _tell_speaks(self) -> None:
        speaks = self._host.backend.info.speaks
        if speaks != self._speaks:
            self._speaks = speaks
            self._tell(Speaks(speaks=speaks))


async def _interrupt(opened: BackendSession, index: int) -> None:
    """Interrupt a unit whose call began before this task did."""
    opened.interrupt(index)
