"""A model in another process, as a `Backend`: the gateway's end of a link.

- Each call is one message and its answer, with the errors that the worker's backend raised.
- Once the worker is lost, every call in flight and every later one raises `BackendGone`, at once;
  so does the loss of its device, since another process can be connected instead.
- A call that is cancelled is cancelled at the worker too, and not waited for.
"""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import LocalProtocolError
from protocol.values.model import Chunk, Cut, Finalized, Opened, Opening, PastUnit, Turn, Unit
from recorder.format.format import RecordInvalid

from ..model.backends import base
from .link import Link, Wire, WorkerAddress, greet_worker
from .link import connect as connect_to
from .messages import (
    HELLO_WAIT_S,
    SETUP,
    TEXT_CHARS_MAX,
    Answer,
    Ask,
    Cancel,
    Failed,
    LinkError,
    LinkRefused,
    Message,
    Rebuild,
    Speaks,
    Why,
)

Done = TypeVar("Done", bound=ev.Event)
Made = TypeVar("Made", bound="WorkerBackend")

Request = Ask | Rebuild

_ERRORS: Final[dict[Why, type[base.BackendError]]] = {
    "error": base.BackendError,
    "context_full": base.ContextFull,
    "refused": base.BackendRefused,
    "gone": base.BackendGone,
    "device_lost": base.BackendGone,
}


class WorkerFault(Exception):  # noqa: N818 - names say what happened
    """The worker's backend raised what no backend should; its own log has the trace."""


@attrs.define(eq=False)
class _Call:
    """A call in flight; `emit` takes the progress of a turn."""

    done: anyio.Event = attrs.Factory(anyio.Event)
    emit: base.Emit | None = None
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
            raise base.BackendRefused(f"worker {address}: {error}") from error
        if isinstance(error, TimeoutError):
            text = f"worker {address} did not greet in {HELLO_WAIT_S:g} s"
            raise base.BackendGone(text) from error
        if isinstance(error, LinkError | OSError):
            raise base.BackendGone(f"worker {address}: {_words(error)}") from error
        raise


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class WorkerBackend:
    """The model of a worker that greeted; `name` is its address, for errors."""

    def __init__(self, wire: Wire, info: base.BackendInfo, name: str) -> None:
        self._info = info
        self._name = name
        self._numbers = itertools.count(1)
        self._sessions = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._link = Link(wire, self._received, self._lost)

    @property
    def info(self) -> base.BackendInfo:
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
        return WorkerSession(backend=self, session=session, slot=slot, opened=opened, is_held=True)

    async def chat(self, *, slot: int) -> WorkerSession:
        """Take a slot for a turn or a transcription; the first call opens it at the worker."""
        await self.check()
        return WorkerSession(backend=self, session=self._session(slot), slot=slot)

    transcribe = chat

    # -- for its sessions -----------------------------------------------------------------------

    def number(self) -> int:
        """A new call's number."""
        return next(self._numbers)

    async def ask(
        self,
        message: Request,
        kind: type[Done],
        index: int | None = None,
        emit: base.Emit | None = None,
    ) -> Done:
        """Begin a call and wait until it is done; raises the error that the worker reports.

        A worker whose answer is not the one that was asked for is lost.

        Args:
            kind: of the event that is the answer.
            index: of the unit, turn or chunk that the answer must be about.
            emit: takes the progress of a turn.
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
            raise _ERRORS.get(came.why, WorkerFault)(came.text[:TEXT_CHARS_MAX])
        if came is None:
            raise self._gone()
        if not isinstance(came, kind) or (index is not None and _index_of(came) != index):
            self._link.lose(f"it broke the protocol: a {type(came).__name__} is not an answer here")
            raise self._gone()
        return came

    def send(self, message: Message, stream: int | None = None) -> None:
        """Send a message without an answer; `BackendError` if it cannot be sent."""
        try:
            self._link.send(message, stream)
        except LinkError:
            raise self._gone() from None
        except RecordInvalid as error:
            raise base.BackendRefused(f"too large for one message: {error}") from error

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
        match message:
            case Answer(event=ev.TurnPrefilled(prefill=piece) | ev.TurnProgress(chunk=piece)):
                if call.emit is None:
                    raise LinkError("a piece of an answer that was not asked for")
                call.emit(piece)
                return
        call.came = message.event if isinstance(message, Answer) else message
        del self._calls[message.call]
        call.done.set()

    def _lost(self, _reason: str) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.done.set()

    def _gone(self) -> base.BackendGone:
        return base.BackendGone(f"worker {self._name}: {self._link.reason}")


def _index_of(event: ev.Event) -> int | None:
    """Which unit, turn or chunk an answer is about."""
    match event:
        case ev.UnitDone() | ev.TurnDone() | ev.ChunkDone():
            return event.result.index
        case ev.FinalizeDone():
            return event.finalized.index
        case ev.RollbackDone():
            return event.index
    return None


_NOT_OPENED: Final = Opened(prompt_length=0)


@attrs.define(eq=False, kw_only=True)
class WorkerSession:
    """What a worker holds for a session, by its number: one of units, a turn, or a transcription.

    `is_held`: the worker may hold something; a turn or a transcription begins with its first call.
    """

    backend: WorkerBackend
    session: int
    slot: int
    opened: Opened = _NOT_OPENED
    is_held: bool = False
    _running: Ask | None = None
    _is_cut: bool = False

    async def run(
        self, call: Unit | Turn | Chunk, cut: Cut | None = None, *, emit: base.Emit = base.ignore
    ) -> Any:
        """Compute a unit, a turn or a chunk."""
        effect: ef.StartUnit | ef.StartTurn | ef.RunChunk
        match call:
            case Unit():
                effect = ef.StartUnit(unit=call)
            case Turn():
                effect = ef.StartTurn(lease=self.session, turn=call)
                if self._is_cut:
                    raise base.BackendError("the turn was cut")
            case Chunk():
                effect = ef.RunChunk(lease=self.session, chunk=call)
        self.is_held = True
        asked = self._running = self._asked(effect, cut=cut)
        is_turn = isinstance(call, Turn)
        try:
            done = await self.backend.ask(
                asked, base.DONE[type(effect)], call.index, emit if is_turn else None
            )
        finally:
            self._running = None
        return done.result

    def interrupt(self, index: int) -> None:
        """Cut the unit or the turn; the message overtakes all others."""
        asked, self._is_cut = self._running, True
        if asked is None:
            return
        message = Ask(call=asked.call, session=self.session, effect=ef.Interrupt(index=index))
        with suppress(base.BackendGone):
            match asked.effect:
                case ef.StartUnit(unit=unit) if unit.index == index:
                    self.backend.send(message)
                case ef.StartFinalize() if asked.effect.index == index:
                    self.backend.send(message)
                case ef.StartTurn():
                    self.backend.send(message)
                    self.backend.send(message, SETUP)  # The first may overtake the turn too.

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit."""
        asked = self._asked(ef.StartFinalize(index=index, interrupted=interrupted))
        self._running = asked
        try:
            return (await self.backend.ask(asked, ev.FinalizeDone, index)).finalized
        finally:
            self._running = None

    async def rebuild(self, past: Sequence[PastUnit], *, exact: bool) -> Finalized:
        """Feed past units again; `BackendError` too if the worker's model cannot."""
        call = self.backend.number()
        asked = Rebuild(call=call, session=self.session, exact=exact, past=tuple(past))
        return (await self.backend.ask(asked, ev.FinalizeDone)).finalized

    async def rollback(self, index: int) -> None:
        """Undo the failed unit."""
        await self.backend.ask(self._asked(ef.Rollback(index=index)), ev.RollbackDone, index)

    async def release(self) -> None:
        """Free everything at the worker, if it holds anything."""
        if self.is_held:
            with suppress(base.BackendGone):
                effect = ef.Release(lease=self.session)
                await self.backend.ask(self._asked(effect), ev.BackendReleased)

    def _asked(self, effect: ef.Effect, *, cut: Cut | None = None) -> Ask:
        call = self.backend.number()
        return Ask(call=call, session=self.session, slot=self.slot, effect=effect, cut=cut)
