"""A model in another process, as a `Backend`: the gateway's end of a link.

- Each call is one message and its answer, with the errors that the worker's backend raised.
- Once the worker is lost, every call in flight and every later one raises `BackendGone`, at once;
  so does the loss of its device, since another process can be connected instead.
- A call that is cancelled is cancelled at the worker too, and not waited for.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import LocalProtocolError
from protocol.values.model import (
    Chunk,
    ChunkResult,
    Cut,
    Finalized,
    Opened,
    Opening,
    PastUnit,
    Prefill,
    Turn,
    TurnChunk,
    TurnResult,
    Unit,
    UnitResult,
)
from recorder.format.errors import RecordInvalid

from ..model.backends.base import (
    BackendError,
    BackendGone,
    BackendInfo,
    BackendRefused,
    ContextFull,
    require_tools,
)
from .address import WorkerAddress
from .address import connect as connect_to
from .frames import LinkError, LinkRefused
from .hello import Wire, greet_worker
from .limits import HELLO_WAIT_S, TEXT_CHARS_MAX
from .link import Link
from .messages import SETUP, Answer, Ask, Cancel, Failed, Message, Proceed, Rebuild, Speaks, Why

Done = TypeVar("Done", bound=ev.Event)
Made = TypeVar("Made", bound="WorkerBackend")

Request = Ask | Proceed | Rebuild

_ERRORS: Final[dict[Why, type[BackendError]]] = {
    "error": BackendError,
    "context_full": ContextFull,
    "refused": BackendRefused,
    "gone": BackendGone,
    "device_lost": BackendGone,
}


class WorkerBroke(Exception):  # noqa: N818 - names say what happened
    """The worker's backend raised what no backend should; its own log has the trace."""


@attrs.define(eq=False)
class _Call:
    """A call in flight; `emit` takes the pieces of a turn."""

    done: anyio.Event = attrs.Factory(anyio.Event)
    emit: Callable[[TurnChunk], None] | None = None
    came: ev.Event | Failed | None = None


async def connect(
    address: WorkerAddress, *, token: str = "", tls: ssl.SSLContext | None = None, tasks: TaskGroup
) -> WorkerBackend:
    """Connect to a worker; the link runs in `tasks` until it is lost or closed; see `greet`."""
    backend = await greet(WorkerBackend, address, token=token, tls=tls)
    tasks.start_soon(backend.run)
    return backend


async def greet(
    kind: type[Made], address: WorkerAddress, *, token: str = "", tls: ssl.SSLContext | None = None
) -> Made:
    """Connect to a worker and greet it; `run` of the backend must be called then.

    `BackendRefused`: one of the two refuses the other, for good. `BackendGone`: it is not there,
    or does not greet in `HELLO_WAIT_S`.
    """
    stream = None
    try:
        with anyio.fail_after(HELLO_WAIT_S):
            stream = await connect_to(address, tls)
            wire = Wire(stream)
            return kind(wire, await greet_worker(wire, token), str(address))
    except BaseException as error:
        if stream is not None:
            await anyio.aclose_forcefully(stream)
        if isinstance(error, LinkRefused):
            raise BackendRefused(f"worker {address}: {error}") from error
        if isinstance(error, TimeoutError):
            text = f"worker {address} did not greet in {HELLO_WAIT_S:g} s"
            raise BackendGone(text) from error
        if isinstance(error, LinkError | OSError):
            raise BackendGone(f"worker {address}: {_words(error)}") from error
        raise


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class WorkerBackend:
    """The model of a worker that greeted; `name` is its address, for errors."""

    def __init__(self, wire: Wire, info: BackendInfo, name: str) -> None:
        self._info = info
        self._name = name
        self._numbers = itertools.count(1)
        self._sessions = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._link = Link(wire, self._received, self._lost)

    @property
    def info(self) -> BackendInfo:
        """The worker's metadata."""
        return self._info

    @property
    def where(self) -> str:
        """Its address."""
        return self._name

    async def run(self) -> None:
        """Run the link until it is lost or closed."""
        await self._link.run()

    async def check(self) -> None:
        """Check that the worker is there."""
        if self._link.reason:
            raise self._gone()

    async def wait_gone(self) -> None:
        """Wait until the worker is lost."""
        await self._link.lost.wait()

    async def aclose(self) -> None:
        """Close the link; the worker releases all sessions."""
        self._link.lose("it was closed here")

    async def open(self, opening: Opening, *, slot: int) -> WorkerSession:
        """Open a session; the worker may hold it on another slot of its own."""
        session = self._session(slot)
        effect = ef.OpenBackend(lease=session, opening=opening)
        message = Ask(call=self.number(), session=session, slot=slot, effect=effect)
        opened = (await self.ask(message, ev.BackendOpened)).opened
        return WorkerSession(backend=self, session=session, opened=opened)

    async def chat(self, turn: Turn, *, slot: int) -> WorkerTurn:
        """Take a chat turn; one with tools is not told to a worker that does not know of them."""
        require_tools(self.info, turn)
        session = self._session(slot)
        effect = ef.StartTurn(lease=session, turn=turn)
        message = Ask(call=self.number(), session=session, slot=slot, effect=effect)
        await self.ask(message, ev.SlotLeased)
        return WorkerTurn(backend=self, session=session, index=turn.index)

    async def transcribe(self, *, slot: int) -> WorkerTranscript:
        """Take a transcription; its first chunk opens it at the worker."""
        await self.check()
        return WorkerTranscript(backend=self, session=self._session(slot), slot=slot)

    # -- for its sessions -----------------------------------------------------------------------

    def number(self) -> int:
        """A new call's number."""
        return next(self._numbers)

    async def ask(
        self,
        message: Request,
        kind: type[Done],
        index: int | None = None,
        emit: Callable[[TurnChunk], None] | None = None,
    ) -> Done:
        """Begin a call and wait until it is done; raises the error that the worker reports.

        A worker whose answer is not the one that was asked for is lost.

        Args:
            kind: of the event that is the answer.
            index: of the unit, turn or chunk that the answer must be about.
            emit: takes the pieces of a turn.
        """
        self.send(message)
        call = self._calls[message.call] = _Call(emit=emit)
        try:
            await call.done.wait()
        finally:
            if self._calls.pop(message.call, None) is not None:
                self._cancel(message)
        came = call.came
        if isinstance(came, Failed):
            raise self._failure(came)
        if came is None:
            raise self._gone()
        if not isinstance(came, kind) or (index is not None and _index_of(came) != index):
            self._link.lose(f"it broke the protocol: a {type(came).__name__} is no answer here")
            raise self._gone()
        return came

    def send(self, message: Message) -> None:
        """Send a message without an answer; `BackendError` if it cannot be sent."""
        try:
            self._link.send(message)
        except LinkError:
            raise self._gone() from None
        except RecordInvalid as error:
            raise BackendRefused(f"too large for one message: {error}") from error

    # -- inside ---------------------------------------------------------------------------------

    def _session(self, slot: int) -> int:
        if not 0 <= slot < self._info.slots:
            raise LocalProtocolError(f"slot {slot} of {self._info.slots}")
        return next(self._sessions)

    def _cancel(self, message: Request) -> None:
        """Have the worker cancel a call, and release what it opened, in the call's own stream."""
        is_setup = isinstance(message, Ask) and isinstance(
            message.effect, ef.OpenBackend | ef.StartTurn
        )
        stream = SETUP if is_setup else None
        with suppress(LinkError):
            self._link.send(Cancel(call=message.call, session=message.session), stream)
            if is_setup:
                release = ef.Release(lease=message.session)
                self._link.send(Ask(call=0, session=message.session, effect=release), stream)

    def _received(self, message: Message) -> None:
        if isinstance(message, Speaks):
            self._info = attrs.evolve(self._info, speaks=message.speaks)
            return
        if not isinstance(message, Answer | Failed):
            raise LinkError(f"a {type(message).__name__} from a worker")
        call = self._calls.get(message.call)
        if call is None:
            return  # it was cancelled
        if isinstance(message, Answer) and isinstance(message.event, ev.TurnProgress):
            if call.emit is None:
                raise LinkError("a piece of an answer that was not asked for")
            call.emit(message.event.chunk)
            return
        call.came = message.event if isinstance(message, Answer) else message
        del self._calls[message.call]
        call.done.set()

    def _lost(self, _reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done.set()

    def _gone(self) -> BackendGone:
        return BackendGone(f"worker {self._name}: {self._link.reason}")

    def _failure(self, failed: Failed) -> Exception:
        text = failed.text[:TEXT_CHARS_MAX]
        error = _ERRORS.get(failed.why)
        return WorkerBroke(text) if error is None else error(text)


def _index_of(event: ev.Event) -> int | None:
    """Which unit, turn or chunk an answer is about."""
    match event:
        case ev.UnitDone() | ev.TurnDone() | ev.ChunkDone():
            return event.result.index
        case ev.FinalizeDone():
            return event.finalized.index
        case ev.TurnPrefilled():
            return event.prefill.index
        case ev.RollbackDone():
            return event.index
    return None


@attrs.define(eq=False, kw_only=True)
class _Held:
    """What a worker holds for a session, by its number."""

    backend: WorkerBackend
    session: int

    async def release(self) -> None:
        """Free everything at the worker."""
        with suppress(BackendGone):
            await self.backend.ask(self._asked(ef.Release(lease=self.session)), ev.BackendReleased)

    def _asked(self, effect: ef.Effect, *, slot: int = 0, cut: Cut | None = None) -> Ask:
        call = self.backend.number()
        return Ask(call=call, session=self.session, effect=effect, slot=slot, cut=cut)


@attrs.define(eq=False, kw_only=True)
class WorkerSession(_Held):
    """One session on a worker."""

    opened: Opened
    _running: tuple[int, int] | None = None

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Run one unit."""
        asked = self._asked(ef.StartUnit(unit=unit), cut=cut)
        self._running = unit.index, asked.call
        try:
            return (await self.backend.ask(asked, ev.UnitDone, unit.index)).result
        finally:
            self._running = None

    def interrupt(self, index: int) -> None:
        """Cut unit `index`; the message overtakes all others."""
        if self._running is not None and self._running[0] == index:
            effect, call = ef.Interrupt(index=index), self._running[1]
            with suppress(BackendGone):
                self.backend.send(Ask(call=call, session=self.session, effect=effect))

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit."""
        asked = self._asked(ef.StartFinalize(index=index, interrupted=interrupted))
        return (await self.backend.ask(asked, ev.FinalizeDone, index)).finalized

    async def rebuild(self, past: Sequence[PastUnit], *, exact: bool) -> Finalized:
        """Feed past units again; `BackendError` too if the worker's model cannot."""
        call = self.backend.number()
        asked = Rebuild(call=call, session=self.session, exact=exact, past=tuple(past))
        return (await self.backend.ask(asked, ev.FinalizeDone)).finalized

    async def rollback(self, index: int) -> None:
        """Undo the failed unit."""
        await self.backend.ask(self._asked(ef.Rollback(index=index)), ev.RollbackDone, index)


@attrs.define(eq=False, kw_only=True)
class WorkerTurn(_Held):
    """One chat turn on a worker."""

    index: int

    async def prefill(self) -> Prefill:
        """Feed the conversation."""
        asked = Proceed(call=self.backend.number(), session=self.session, step="prefill")
        return (await self.backend.ask(asked, ev.TurnPrefilled, self.index)).prefill

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer the turn."""
        call = self.backend.number()
        asked = Proceed(call=call, session=self.session, step="generate", cut=cut)
        return (await self.backend.ask(asked, ev.TurnDone, self.index, emit)).result

    def interrupt(self) -> None:
        """Cut the turn; the message overtakes all others."""
        with suppress(BackendGone):
            effect = ef.CutTurn(index=self.index)
            self.backend.send(Ask(call=0, session=self.session, effect=effect))


@attrs.define(eq=False, kw_only=True)
class WorkerTranscript(_Held):
    """One transcription on a worker."""

    slot: int
    _is_asked: bool = False

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Transcribe a second of an utterance."""
        self._is_asked = True
        asked = self._asked(ef.RunChunk(lease=self.session, chunk=chunk), slot=self.slot)
        return (await self.backend.ask(asked, ev.ChunkDone, chunk.index)).result

    async def release(self) -> None:
        """Free everything at the worker, if it began."""
        if self._is_asked:
            await super().release()
