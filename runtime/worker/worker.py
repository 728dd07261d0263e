"""A worker at its address: it greets gateways, and lends them the slots of one backend.

- A bad gateway costs only itself: it has `HELLO_WAIT_S` to greet. Connections that have not
  greeted have `GREETINGS_MAX` places of their own, so they keep no gateway out: a new one takes the
  place of the oldest one of the address that has most of them.
- A session holds a slot of the worker from its first call to its release: the one that the gateway
  names if it is free, else another.
- A session has one call at a time; only its release waits for it, and an interrupt comes between.
  An interrupt that overtook its unit cuts it when it has begun.
- When a gateway is lost, the calls of its sessions are cut, and the sessions are released when
  these have ended (B4, B5). A call or release that hangs withholds its slot for good.
- The worker ends, as an error, when its backend is gone, and when a call hangs and no other session
  is left: only another process can serve then. Gateways see that it is gone.
"""

from __future__ import annotations

import heapq
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import anyio
import attrs
from anyio.abc import ByteStream, Listener, SocketAttribute, TaskGroup
from anyio.streams.tls import TLSStream

from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.format.format import RecordInvalid

from ..link.link import Link, Wire, greet_gateway
from ..link.messages import (
    GREETINGS_MAX,
    HELLO_WAIT_S,
    LINKS_MAX,
    TEXT_CHARS_MAX,
    Answer,
    Ask,
    Cancel,
    Failed,
    LinkError,
    LinkLeft,
    Message,
    Rebuild,
    Speaks,
    Why,
)
from ..model.backends import base

CALL_WAIT_S: Final = 10.0
"""For a call that was cut, as a gateway waits by default; then it hangs."""
RELEASE_WAIT_S: Final = 10.0
"""A longer release hangs."""

_logger = logging.getLogger("antiphon.worker")

_LEFT: Final = (LinkLeft, anyio.EndOfStream, anyio.BrokenResourceError)
"""A health check connects and leaves, every few seconds."""
_WHYS: Final[tuple[tuple[type[base.BackendError], Why], ...]] = (
    (base.DeviceLost, "device_lost"),
    (base.BackendGone, "gone"),
    (base.BackendRefused, "refused"),
    (base.ContextFull, "context_full"),
    (base.BackendError, "error"),
)
"""From the most special class to the most general."""

Call = Ask | Rebuild | Cancel
"""A call of the model; `Cancel` is in the place of one that was cancelled before it began."""


@attrs.define(eq=False, kw_only=True)
class Worker:
    """Serves one backend; `tasks` are its calls and links, whose scope it cancels at its end.

    `token`: shared with gateways; empty for none. `tls`: makes the context of a new connection.
    `lost_because`: why it ended by itself, or empty.
    """

    backend: base.Backend
    tasks: TaskGroup
    token: str = ""
    tls: Callable[[], ssl.SSLContext] | None = None
    lost_because: str = ""
    _free: list[int] = attrs.field(init=False)
    _withheld: int = 0
    _links: int = 0
    _greetings: dict[anyio.CancelScope, str] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.backend.info.slots))

    async def serve(self, listener: Listener[Any]) -> None:
        """Serve gateways until cancelled."""
        await listener.serve(self._serve_connection, self.tasks)

    # -- slots ----------------------------------------------------------------------------------

    @property
    def leased(self) -> int:
        """The number of slots that sessions hold."""
        return self.backend.info.slots - len(self._free) - self._withheld

    def lease(self, wanted: int) -> int:
        """Lease a free slot, `wanted` if it is one; `BackendError` where none is free."""
        if self._withheld:
            raise base.BackendGone("a call hangs in the worker, which will end")
        if not self._free:
            raise base.BackendError("no slot of the worker is free: other gateways hold them")
        if wanted in self._free:
            self._free.remove(wanted)
            heapq.heapify(self._free)
            return wanted
        return heapq.heappop(self._free)

    def release_slot(self, slot: int, *, is_clean: bool) -> None:
        """Take a slot back; one that is not clean is never leased again."""
        if is_clean:
            heapq.heappush(self._free, slot)
        else:
            _logger.error("slot %d is withheld: its call hangs or broke", slot)
            self._withheld += 1
        if self._withheld and not self.leased:
            self._end("a call hangs in the model")

    def lost(self, error: base.BackendGone) -> None:
        """The backend is gone, with all sessions: end."""
        if not self._withheld:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self.lost_because = self.lost_because or why
        self.tasks.cancel_scope.cancel()

    # -- gateways -------------------------------------------------------------------------------

    async def _serve_connection(self, stream: ByteStream) -> None:
        """Greet a connection and serve it until it is lost."""
        try:
            gateway = await self._greet_in_place(stream)
            if gateway is None:
                return
            if self._links >= LINKS_MAX:
                _logger.warning("a gateway is refused: %d are connected", LINKS_MAX)
                return
            _logger.info("a gateway has connected")
            self._links += 1
            try:
                await gateway.link.run()
            finally:
                self._links -= 1
        finally:
            await anyio.aclose_forcefully(stream)

    async def _greet_in_place(self, stream: ByteStream) -> GatewayLink | None:
        """Greet a connection, unless newer ones need its place before it has greeted."""
        address = stream.extra(SocketAttribute.remote_address, ("", 0))
        host = str(address[0]) if isinstance(address, tuple) else ""
        if len(self._greetings) >= GREETINGS_MAX:
            ((heaviest, _),) = Counter(self._greetings.values()).most_common(1)
            oldest = next(scope for scope, of in self._greetings.items() if of == heaviest)
            del self._greetings[oldest]
            oldest.cancel()
            _logger.warning("a connection is dropped: newer ones from %s wait", heaviest)
        with anyio.CancelScope() as scope:
            self._greetings[scope] = host
            try:
                return await self._greet(stream)
            finally:
                self._greetings.pop(scope, None)
        return None

    async def _greet(self, stream: ByteStream) -> GatewayLink | None:
        try:
            with anyio.fail_after(HELLO_WAIT_S):
                if self.tls is not None:
                    stream = await TLSStream.wrap(
                        stream, server_side=True, ssl_context=self.tls(), standard_compatible=False
                    )
                wire = Wire(stream)
                info = self.backend.info
                await greet_gateway(wire, self.token, info)
                return GatewayLink(wire, self, speaks=info.speaks)
        except _LEFT:
            _logger.info("a connection was closed before its greeting")
        except TimeoutError:
            _logger.warning("a connection is dropped: no greeting within %g s", HELLO_WAIT_S)
        except (LinkError, OSError) as error:
            _logger.warning("a connection is dropped: %s", str(error) or type(error).__name__)
        except Exception:  # A bug of ours costs this connection, and no other.
            _logger.exception("a connection could not be greeted")
        return None


@attrs.define(eq=False, kw_only=True)
class Session:
    """What a gateway opened.

    Attributes:
        model: what the backend holds for it.
        call: the number of the call in flight; 0: none.
        asked: that call, until it begins.
        early: the call that an interrupt is waiting for; 0: none.
        unit: the index of its last unit.
        is_served: the task that makes its calls has begun.
        wakeup: a call was asked for, or it is over.
        idle: a call has ended.
        is_over: its slot was given back, or withheld.
    """

    number: int
    model: base.HeldModel
    call: int = 0
    asked: Call | None = None
    early: int = 0
    scope: anyio.CancelScope = attrs.Factory(anyio.CancelScope)
    wakeup: anyio.Event = attrs.Factory(anyio.Event)
    idle: anyio.Event = attrs.Factory(anyio.Event)
    unit: int = -1
    is_served: bool = False
    is_over: bool = False


class GatewayLink:
    """The worker's end of one gateway's link: its sessions, and their calls on the backend.

    `speaks` is as the gateway was told.
    """

    def __init__(self, wire: Wire, worker: Worker, *, speaks: bool) -> None:
        self._worker = worker
        self._sessions: dict[int, Session] = {}
        self._speaks = speaks
        self.link = Link(wire, self._received, self._lost, self._send_speaks)

    # -- messages -------------------------------------------------------------------------------

    def _received(self, message: Message) -> None:
        if not isinstance(message, Call):
            raise LinkError(f"a {type(message).__name__} from a gateway")
        session = self._sessions.get(message.session)
        match message:
            case Cancel():
                if session is not None and session.call == message.call:
                    _cancel(session, message)
            case Ask(effect=ef.Release()):
                self._ask_release(session, message)
            case Ask(effect=ef.Interrupt(index=index)):
                self._interrupt(session, message.call, index)
            case Ask(effect=ef.OpenBackend() | ef.StartTurn()) if session is not None:
                raise LinkError(f"session {message.session} is opened twice")
            case Ask(effect=ef.OpenBackend() | ef.StartTurn() | ef.RunChunk()) if session is None:
                self._open(message)
            case Ask(effect=effect) if type(effect) not in base.OPENED_BY:
                raise LinkError(f"a {type(effect).__name__} is not a call of a model")
            case _ if session is None:
                raise LinkError(f"there is no session {message.session}")
            case Ask() | Rebuild():
                self._start(session, message)

    def _open(self, message: Ask) -> None:
        """Give a session its slot, and begin its first call."""
        try:
            slot = self._worker.lease(message.slot)
        except base.BackendError as error:
            self._send_failed(message.call, message.session, error)
            return
        model = base.HeldModel(backend=self._worker.backend, slot=slot, now_ns=lambda: 0)
        session = self._sessions[message.session] = Session(number=message.session, model=model)
        self._start(session, message)

    def _interrupt(self, session: Session | None, call: int, index: int) -> None:
        """Cut a turn, or unit `index`, which may be on its way; one that has ended is not cut."""
        if session is not None and session.call == call:
            session.model.cut(index if session.model.opened is not None else None)
        elif session is not None:
            session.early = call

    def _ask_release(self, session: Session | None, message: Ask) -> None:
        if session is None:
            self._send_released(message)
        else:
            del self._sessions[session.number]
            self._worker.tasks.start_soon(self._release, session, message)

    # -- calls ----------------------------------------------------------------------------------

    def _start(self, session: Session, message: Ask | Rebuild) -> None:
        """Have the session's task make a call; a task for each would cost more than a message."""
        if not message.call:
            raise LinkError("a call without a number")
        if session.call:
            raise LinkError(f"two calls at once on session {session.number}")
        session.call, session.asked = message.call, message
        session.wakeup.set()
        if not session.is_served:
            session.is_served = True
            self._worker.tasks.start_soon(self._make_calls, session)

    async def _make_calls(self, session: Session) -> None:
        """Make each call until the session is over; a cancelled one ends only itself."""
        while not session.is_over:
            with anyio.CancelScope() as session.scope:
                while not session.is_over:
                    message, session.asked = session.asked, None
                    if message is None:
                        session.wakeup = anyio.Event()
                        await session.wakeup.wait()
                    else:
                        await self._make(session, message)

    async def _make(self, session: Session, message: Call) -> None:
        done: ev.Event | Exception
        try:
            done = await self._perform(session, message)
        except base.BackendError as error:
            done = error
        except Exception as error:
            _logger.exception("the backend broke")
            done = error
        except anyio.get_cancelled_exc_class():
            self._ended(session)
            if session.scope.cancel_called:
                cancelled = base.BackendError("it was cancelled")
                self._send_failed(message.call, session.number, cancelled)
            raise
        self._ended(session)
        if isinstance(done, Exception):
            self._send_failed(message.call, session.number, done)
        else:
            self._send_done(message, done)

    def _ended(self, session: Session) -> None:
        """A session's call has ended."""
        session.call = 0
        session.idle.set()
        if session.model.held is None:  # it was not opened, so the backend left the slot empty
            if self._sessions.get(session.number) is session:
                del self._sessions[session.number]
            self._release_slot(session, is_clean=True)

    async def _perform(self, session: Session, message: Call) -> ev.Event:
        model = session.model
        match message:
            case Cancel():
                raise base.BackendError("it was cancelled")
            case Rebuild():
                if not isinstance(model.opened, base.Rebuilds):
                    raise base.BackendError(
                        f"model {model.backend.info.name} cannot rebuild a session"
                    )
                done = await model.opened.rebuild(message.past, exact=message.exact)
                return ev.FinalizeDone(at_ns=0, finalized=done)
            case Ask(effect=ef.StartUnit(unit=unit)):
                session.unit = unit.index
        if isinstance(message, Ask) and session.early == message.call and session.unit >= 0:
            self._worker.tasks.start_soon(_cut_soon, session)
        return await model.call(
            message.effect, message.cut, lambda progress: self._send_done(message, progress)
        )

    async def _release(self, session: Session, message: Ask | None = None) -> None:
        """Release a session when its call has ended, and answer; both waits are bounded."""
        failure: Exception | None = base.BackendError("its call or its release hangs")
        is_clean = False
        try:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(CALL_WAIT_S):
                    while session.call:
                        session.idle = anyio.Event()
                        await session.idle.wait()
                if not session.call:
                    with anyio.move_on_after(RELEASE_WAIT_S):
                        await session.model.release()
                        is_clean, failure = True, None
        except Exception as error:
            _logger.exception("a session could not be released")
            failure = error
        self._release_slot(session, is_clean=is_clean)
        if message is None:
            return
        if failure is None:
            self._send_released(message)
        else:
            self._send_failed(message.call, message.session, failure)

    def _release_slot(self, session: Session, *, is_clean: bool) -> None:
        """Give a session's slot back, once: a call that hung may still end."""
        if not session.is_over:
            session.is_over = True
            session.wakeup.set()
            self._worker.release_slot(session.model.slot, is_clean=is_clean)

    def _lost(self, reason: str) -> None:
        """The gateway is gone: cut what runs, and release all."""
        sessions, self._sessions = list(self._sessions.values()), {}
        level = logging.WARNING if sessions else logging.INFO
        _logger.log(level, "a gateway with %d sessions has disconnected: %s", len(sessions), reason)
        for session in sessions:
            is_in_unit = session.call and session.model.opened is not None
            session.model.cut(session.unit if is_in_unit else None)
            self._worker.tasks.start_soon(self._release, session)

    # -- answers --------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        try:
            self.link.send(message)
        except LinkError:
            return  # The gateway is gone, and so are its sessions.
        except RecordInvalid as error:
            assert isinstance(message, Answer)
            too_large = base.BackendError(f"the answer is too large for one message: {error}")
            self._send_failed(message.call, message.session, too_large)

    def _send_done(self, message: Call, event: ev.Event) -> None:
        self._send(Answer(call=message.call, session=message.session, event=event))

    def _send_released(self, message: Ask) -> None:
        self._send_done(message, ev.BackendReleased(at_ns=0, lease=message.session))

    def _send_failed(self, call: int, session: int, error: Exception) -> None:
        why: Why = next((why for kind, why in _WHYS if isinstance(error, kind)), "broke")
        text = str(error)[:TEXT_CHARS_MAX] if why != "broke" else type(error).__name__
        self._send(Failed(call=call, session=session, why=why, text=text))
        if isinstance(error, base.BackendGone):
            self._worker.lost(error)

    def _send_speaks(self) -> None:
        speaks = self._worker.backend.info.speaks
        if speaks != self._speaks:
            self._speaks = speaks
            self._send(Speaks(speaks=speaks))


def _cancel(session: Session, message: Cancel) -> None:
    """Cancel the call in flight, begun or not."""
    if session.asked is None:
        session.scope.cancel()
    else:
        session.asked = message


async def _cut_soon(session: Session) -> None:
    """Cut a unit whose call began before this task did."""
    session.model.cut(session.unit)
