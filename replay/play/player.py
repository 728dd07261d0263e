"""One client of a recording: its frames are awaited, and answered, as in the recording.

- Where the recording heard a frame, the client's next one is awaited: the n-th frame is sent after
  as many of the client's as in the recording.
- No frame is sent before its time, divided by the speed. A late client sets the clock back: it is
  answered after the recorded time, not at once. At speed 0 only the client is awaited.
- A frame of another kind than the recorded one is a difference: reported, and answered anyway.
  Fields are not compared: no two clients send the same sound.
- The end is the recording's: its close, or a dropped connection. Where the client left, it has
  `LEAVE_WAIT_S` to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Final, Literal, Protocol

import anyio
import attrs
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from protocol.values.limits import NS_PER_S
from protocol.values.utf8 import Frame
from runtime.net.websocket import WebSocketClosed

from ..story.wire import Wire
from .script import Ended, Heard, Said, Step

KINDS_WAITING_MAX: Final = 64
"""Frames of a client that is ahead; more wait in its socket."""
LEAVE_WAIT_S: Final = 10.0
"""For a client to leave; longer, it waits for a frame that will not come."""
POLICY_VIOLATION: Final = 1008
"""The close code for a client with a difference, under --strict (RFC 6455, 7.4.1)."""


class Socket(Protocol):
    """The WebSocket of a client; see `runtime.net.websocket.WebSocket`."""

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
    """A difference of a client's frame, from 0: the kinds of frames, or None for none."""

    index: int
    expected: str | None
    got: str | None


class _DifferedError(Exception):
    """A difference ends it."""


@attrs.define(kw_only=True)
class Outcome:
    """The result of a client, with its awaited frames in `received`.

    `how` is `closed` or `broken` as the recording ended; `left` by the client, at any time;
    `differed` where a difference is an error.
    """

    how: Literal["closed", "left", "broken", "differed"] = "left"
    sent: int = 0
    received: int = 0
    differences: list[Difference] = attrs.field(factory=list)


class Player:
    """Plays a recording to one client.

    Args:
        websocket: open; it is closed in every case.
        steps: the next is read when it is due, which takes a millisecond or two.
        speed: 1 is the recording's own; 0 awaits only the client.
        strict: end with the first difference.
        on_step: called after each step, with the kind of the client's frame.
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
        """Pass on the kind of each of the client's frames, until it leaves."""
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
        """When a step is due, on the event loop's clock."""
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
