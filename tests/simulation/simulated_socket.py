"""A WebSocket between a simulated client and the server, without a network.

What one end sends reaches the other after a latency, in order; a lost packet is a longer latency,
for TCP sends it again. What the server sends and the client has not read is bounded, as a kernel's
buffers are: then `send` waits. A client may close, stop sending (half-close), be reset, or read no
more.

Each call of the server's is an await at which something can go wrong: `Trap` names one by its
number, and what happens in it. The server is held to `WebSocket`'s rules: one task receives, one
sends, and a send that is cancelled drops the connection.

It knows no frames' contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NoReturn

import anyio
import anyio.lowlevel
import attrs

from runtime.net.connection import OnMessages, WebSocketClosed, WebSocketStalled
from runtime.net.websocket import ABNORMAL_CLOSURE, CLOSE_WAIT_S
from tests.sessions.in_memory import is_small

Accident = Literal["reset", "half_close", "leave", "cancel"]
"""The connection is reset, the client stops sending, closes, or the server's task is cancelled."""
NO_STATUS: Final = 1005
"""A close without a code (RFC 6455, 7.4.1)."""


@attrs.frozen(kw_only=True)
class Trap:
    """What goes wrong in the server's `number`-th call of the socket, from 1."""

    number: int
    accident: Accident


@attrs.frozen(kw_only=True)
class LinkPlan:
    """How a connection is.

    Attributes:
        latency_s: one way, of each message by its number, over and over.
        buffer_bytes: sent and not read yet, at most; one message always fits.
        answers_close: the client answers the server's close at once.
        stall_s: after so long in which the client takes nothing the WebSocket itself drops it.
        trap: what goes wrong at an await of the server's.
    """

    latency_s: tuple[float, ...] = (0.0,)
    buffer_bytes: int = 1 << 20
    answers_close: bool = True
    stall_s: float = float("inf")
    trap: Trap | None = None


@attrs.frozen
class _Closing:
    """The end of what comes from one side."""

    code: int
    reason: str


class _Pipe:
    """One direction: messages, each with the moment at which it arrives."""

    def __init__(self, latency_s: tuple[float, ...]) -> None:
        self._latency_s = latency_s
        self._sent = 0
        self._arrives_s = 0.0
        self.items: deque[tuple[float, str | bytes | _Closing | None]] = deque()

    def put(self, item: str | bytes | _Closing | None) -> None:
        delay_s = self._latency_s[self._sent % len(self._latency_s)]
        self._sent += 1
        self._arrives_s = max(self._arrives_s, anyio.current_time() + delay_s)
        self.items.append((self._arrives_s, item))

    @property
    def next_s(self) -> float:
        """When the next one arrives; never, where there is none."""
        return self.items[0][0] if self.items else float("inf")


class Link:
    """Both ends of a connection.

    Args:
        plan: how it is.
        complain: told what the server does against the rules of a `WebSocket`.

    Attributes:
        closed: the code and reason with which the server closed, once the client has seen it.
        aborted: the server dropped the connection.
        stalled_s_max: the longest that a send waited.
        calls: the calls of the server's so far.
    """

    def __init__(self, plan: LinkPlan, complain: Callable[[str], None]) -> None:
        self._plan = plan
        self._complain = complain
        self._up, self._down = _Pipe(plan.latency_s), _Pipe(plan.latency_s)
        self._down_bytes = 0
        self._read_s = 0.0
        self._dead = False
        self._stalled = False
        self._told_too_big = False
        self._said_close = False
        self._sent_close = False
        self._closing_done = False
        self._changed = anyio.Event()
        self._running: set[str] = set()
        self.on_cancel: Callable[[], None] = lambda: None
        self.closed: tuple[int, str] | None = None
        self.aborted = False
        self.stalled_s_max = 0.0
        self.calls = 0

    # -- the client's end -----------------------------------------------------------------------

    def say(self, *frames: str | bytes | None) -> None:
        """Send messages; None stands for one that is too big."""
        if not self._dead and not self._said_close:
            for frame in frames:
                self._up.put(frame)
            self._notify()

    def leave(self, code: int = NO_STATUS) -> None:
        """Close, after what was said."""
        if not self._said_close:
            self._up.put(_Closing(code, ""))
            self._said_close = True
            self._notify()

    def half_close(self) -> None:
        """Say no more, without a close; what comes is still read."""
        self.leave(ABNORMAL_CLOSURE)

    def reset(self) -> None:
        """Be gone at once, with all that is under way."""
        self._dead = True
        self._up.items.clear()
        self._down.items.clear()
        self._notify()

    async def hear(self) -> str | None:
        """Wait for a frame of the server's; None at the end."""
        while True:
            if self._dead or self.closed is not None:
                return None
            if self._down.next_s <= anyio.current_time():
                _, item = self._down.items.popleft()
                self._notify()
                if isinstance(item, _Closing):
                    self.closed = (item.code, item.reason)
                    if self._plan.answers_close:
                        self.leave(item.code)
                        self._notify()
                    return None
                assert isinstance(item, str)
                self._down_bytes -= len(item)
                self._read_s = anyio.current_time()
                return item
            await self._wait(self._down.next_s)

    @property
    def is_over(self) -> bool:
        """The client hears no more."""
        return self._dead or self.closed is not None

    @property
    def is_let_go(self) -> bool:
        """The server has nothing to do with it any more: it closed, or the connection is dead."""
        return self._dead or self._closing_done

    async def until_let_go(self) -> None:
        """Wait, for a client that reads nothing, until the server has let it go."""
        while not self.is_let_go:
            await self._wait(float("inf"))

    # -- the server's end -----------------------------------------------------------------------

    async def deliver(self, on_messages: OnMessages) -> NoReturn:
        """Give the server messages, small ones that are there together, as a read brings them."""
        while True:
            messages = [await self.receive()]
            while is_small(messages[-1]) and self._up.next_s <= anyio.current_time():
                item = self._up.items[0][1]
                if not is_small(item):
                    break
                self._up.items.popleft()
                messages.append(item)
            waits = on_messages(*messages)
            if waits is not None:
                await waits

    async def receive(self) -> str | bytes | None:
        """Give the server the next message."""
        await self._begin("receive")
        try:
            while True:
                self._raise_if_dead()
                if self._up.next_s <= anyio.current_time():
                    item = self._up.items[0][1]
                    if isinstance(item, _Closing):
                        raise WebSocketClosed(item.code, item.reason)
                    self._up.items.popleft()
                    if not self._told_too_big:
                        self._told_too_big = item is None
                        return item
                    continue  # nothing comes after one that was too big, but for the end
                if self._sent_close:
                    raise WebSocketClosed(ABNORMAL_CLOSURE, "")
                await self._wait(self._up.next_s)
        finally:
            self._running.discard("receive")

    async def send(self, *frames: str) -> None:
        """Take frames from the server, each once there is room."""
        for frame in frames:
            await self._take(frame)

    async def _take(self, frame: str) -> None:
        began_s = anyio.current_time()
        await self._begin("send")
        try:
            while True:
                self._raise_if_dead()
                if self._sent_close or self._peer_has_closed:
                    raise WebSocketClosed(ABNORMAL_CLOSURE, "")
                if not self._down_bytes or self._down_bytes + len(frame) <= self._plan.buffer_bytes:
                    break
                stalled_s = max(began_s, self._read_s) + self._plan.stall_s
                if stalled_s <= anyio.current_time():
                    self._stalled = True
                    self._drop()
                    continue
                await self._wait(stalled_s)
        except anyio.get_cancelled_exc_class():
            self._drop()  # half a frame may be out
            raise
        finally:
            self._running.discard("send")
            self.stalled_s_max = max(self.stalled_s_max, anyio.current_time() - began_s)
        self._down_bytes += len(frame)
        self._down.put(frame)
        self._notify()

    async def close(self, code: int, reason: str) -> None:
        """Take the server's close, and wait a bounded time for the client's."""
        await self._begin("close")
        try:
            if self._dead or self._sent_close:
                return
            self._sent_close = True
            self._down.put(_Closing(code, reason))
            self._notify()
            with anyio.move_on_after(CLOSE_WAIT_S):
                while not (self._dead or self._peer_has_closed):
                    while self._up.next_s <= anyio.current_time():
                        self._up.items.popleft()  # it is read, and thrown away
                    await self._wait(self._up.next_s)
        finally:
            self._closing_done = self._closing_done or self._sent_close
            self._running.discard("close")
            self._notify()

    async def abort(self) -> None:
        """Be dropped; what a clean close has sent is still delivered."""
        await anyio.lowlevel.checkpoint()
        if not self._sent_close:
            self._drop()

    @property
    def _peer_has_closed(self) -> bool:
        """The client's close has arrived, whether or not it was received."""
        if not self._said_close:
            return False
        return all(arrives_s <= anyio.current_time() for arrives_s, _ in self._up.items)

    def _raise_if_dead(self) -> None:
        if self._stalled:
            raise WebSocketStalled(ABNORMAL_CLOSURE, "")
        if self._dead:
            raise WebSocketClosed(ABNORMAL_CLOSURE, "")

    def _drop(self) -> None:
        if not self._dead:
            self.aborted = True
            self.reset()

    async def _begin(self, name: str) -> None:
        self.calls += 1
        if name in self._running:
            self._complain(f"two tasks {name} at once")
        self._running.add(name)
        trap = self._plan.trap
        if trap is not None and trap.number == self.calls:
            self._spring(trap.accident)
        try:
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class():
            self._running.discard(name)
            if name == "send":
                self._drop()
            raise

    def _spring(self, accident: Accident) -> None:
        match accident:
            case "reset":
                self.reset()
            case "half_close":
                self.half_close()
            case "leave":
                self.leave()
            case "cancel":
                self.on_cancel()

    async def _wait(self, until_s: float) -> None:
        """Wait until something changes, or for a moment."""
        changed = self._changed
        with anyio.CancelScope(deadline=until_s):
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
