"""One client of a recording: what it sends is awaited as it was, and answered as it was.

- The steps of the recording are taken one by one. Where it heard a frame, the client's next one is
  awaited; so the n-th frame goes out after as many of the client's as in the recording.
- No frame goes out before its time, the recording's divided by the speed. A client that is later
  than the recorded one sets the clock back by that: it is answered after as long as in the
  recording, not at once. At speed 0 nothing is waited for but the client.
- A frame of another kind than the recorded one is a difference: it is told, and answered all the
  same. Fields are not compared, for no two clients say the same sound.
- The end is the recording's: its close, or a dropped connection. Where the client left, it has
  `LEAVE_WAIT_S` to do so.

It runs on any event loop, and opens no port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Final, Literal, Protocol

import anyio
import attrs
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from protocol.limits import NS_PER_S
from protocol.utf8 import Frame
from runtime.websocket import WebSocketClosed

from ..wire import Wire
from .script import Ended, Heard, Said, Step

KINDS_WAITING_MAX: Final = 64
"""Frames of a client that is ahead; more of them wait in its socket."""
LEAVE_WAIT_S: Final = 10.0
"""A client that was to leave, and stays: it waits for something that will not come."""
POLICY_VIOLATION: Final = 1008
"""What a client is told that must do as the recorded one did (RFC 6455, 7.4.1)."""


class Socket(Protocol):
    """What is needed of a WebSocket; see `runtime.websocket.WebSocket`."""

    async def receive(self) -> Frame:
        """Wait for a message. Raises `WebSocketClosed`."""

    async def send(self, frame: str) -> None:
        """Send a text message. Raises `WebSocketClosed`."""

    async def close(self, code: int, reason: str) -> None:
        """Close."""

    async def abort(self) -> None:
        """Drop the connection."""


@attrs.frozen(kw_only=True)
class Difference:
    """Where a client did otherwise than the recorded one.

    Attributes:
        index: of its frame, from 0.
        expected: the kind of the recorded frame; None where there was none.
        got: the kind of its own; None where it left instead.
    """

    index: int
    expected: str | None
    got: str | None


class _DifferedError(Exception):
    """A difference ends it."""


@attrs.define(kw_only=True)
class Outcome:
    """What became of a client.

    Attributes:
        how: `closed` or `broken` as the recording ended; `left` where the client did, be it as in
            the recording or before its end; `differed` where that was an error.
        sent: frames sent to it.
        received: frames that it sent and that were awaited.
        differences: in order.
    """

    how: Literal["closed", "left", "broken", "differed"] = "left"
    sent: int = 0
    received: int = 0
    differences: list[Difference] = attrs.field(factory=list)


class Player:
    """Plays a recording to one client.

    Args:
        websocket: open; it is closed in every case.
        steps: of the recording; the next is read when it is due, which takes a millisecond or two.
        wire: of this client.
        speed: 1 is the recording's own; 0 waits for the client alone.
        strict: end with the first difference.
        on_step: told of each step once it is done, with the kind of the client's frame.
    """

    def __init__(
        self,
        websocket: Socket,
        steps: Iterator[Step],
        wire: Wire,
        *,
        speed: float = 1.0,
        strict: bool = False,
        on_step: Callable[[Step, str], None] = lambda _step, _kind: None,
    ) -> None:
        self._websocket = websocket
        self._steps = steps
        self._wire = wire
        self._speed = speed
        self._strict = strict
        self._on_step = on_step
        self._began_s = 0.0
        self._outcome = Outcome()

    async def run(self) -> Outcome:
        """Play it to its end, or the client's."""
        sending, kinds = anyio.create_memory_object_stream[str](KINDS_WAITING_MAX)
        try:
            async with anyio.create_task_group() as tasks, kinds:
                tasks.start_soon(self._read, sending)
                await self._play(kinds)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._websocket.abort()
        return self._outcome

    async def _read(self, kinds: MemoryObjectSendStream[str]) -> None:
        """Say of what kind each frame of the client's is, until it leaves."""
        async with kinds:
            try:
                while True:
                    await kinds.send(self._wire.kind(await self._websocket.receive()))
            except (WebSocketClosed, anyio.BrokenResourceError):
                pass

    async def _play(self, kinds: MemoryObjectReceiveStream[str]) -> None:
        self._began_s = anyio.current_time()
        try:
            while True:
                step = next(self._steps)
                kind = ""
                match step:
                    case Heard():
                        kind = await self._hear(step, kinds)
                    case Said(frame=frame):
                        await self._wait_until(step.at_ns)
                        await self._websocket.send(frame)
                        self._outcome.sent += 1
                    case Ended():
                        await self._end(step, kinds)
                self._on_step(step, kind)
                if isinstance(step, Ended):
                    return
        except (WebSocketClosed, anyio.EndOfStream):
            self._outcome.how = "left"
        except _DifferedError as error:
            self._outcome.how = "differed"
            await self._websocket.close(POLICY_VIOLATION, str(error))

    async def _hear(self, step: Heard, kinds: MemoryObjectReceiveStream[str]) -> str:
        """Await a frame of the client's; a late one sets the clock back."""
        try:
            kind = await kinds.receive()
        except anyio.EndOfStream:
            self._differ(step.kind, None)
            raise
        self._outcome.received += 1
        if kind != step.kind:
            self._differ(step.kind, kind)
        if self._speed:
            self._began_s += max(0.0, anyio.current_time() - self._due_s(step.at_ns))
        return kind

    def _differ(self, expected: str | None, got: str | None) -> None:
        index = self._outcome.received - (got is not None)
        self._outcome.differences.append(Difference(index=index, expected=expected, got=got))
        if self._strict and got is not None:
            raise _DifferedError(f"frame {index} is {got}, recorded was {expected or 'nothing'}")

    async def _wait_until(self, at_ns: int) -> None:
        await anyio.sleep_until(self._due_s(at_ns))

    def _due_s(self, at_ns: int) -> float:
        """When something is due on the event loop's clock."""
        return self._began_s + at_ns / NS_PER_S / self._speed if self._speed else -inf

    async def _end(self, step: Ended, kinds: MemoryObjectReceiveStream[str]) -> None:
        self._outcome.how = step.how
        if step.how == "left":
            with anyio.move_on_after(LEAVE_WAIT_S):
                async for kind in kinds:
                    self._outcome.received += 1
                    self._differ(None, kind)
            await self._websocket.close(step.code, step.reason)
            return
        await self._wait_until(step.at_ns)
        if step.how == "closed":
            await self._websocket.close(step.code, step.reason)
