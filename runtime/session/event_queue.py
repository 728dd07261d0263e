"""The events of one session that wait to be stepped, and the wait of its driver for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio

from protocol.values import events as ev


class EventQueue:
    """Events in order: those that were posted, behind those that the last step has found.

    `frame_bytes`: the bytes of the client's messages in it.
    """

    def __init__(self) -> None:
        self.frame_bytes = 0
        self._posted: deque[ev.Event] = deque()
        self._found: deque[ev.Event] = deque()
        self._arrival = anyio.Event()
        self._is_waited_for = False
        self._is_emptied = False

    def __bool__(self) -> bool:
        return bool(self._posted or self._found)

    @property
    def is_idle(self) -> bool:
        """Whether the driver's task waits, and nothing has woken it."""
        return self._is_waited_for and not self._is_emptied and not self._arrival.is_set()

    @property
    def first_ns(self) -> int | None:
        """When the first posted event came; None without one."""
        return self._posted[0].at_ns if self._posted else None

    @property
    def has_more_than_a_frame(self) -> bool:
        """Whether a client's message is next, and something behind it."""
        is_frame = not self._found and isinstance(self._posted[0], ev.FrameReceived)
        return is_frame and len(self._posted) > 1

    def post(self, event: ev.Event) -> None:
        """Add an event, and wake the driver's task; from the event loop only."""
        if isinstance(event, ev.FrameReceived):
            self.frame_bytes += len(event.frame or b"")
        self._posted.append(event)
        if not self._is_emptied:
            self._arrival.set()

    def put_first(self, found: Iterable[ev.Event]) -> None:
        """Add what a step has found, before all that were posted."""
        self._found.extend(found)

    def take(self) -> ev.Event:
        """Take the next event; there is one."""
        event = self._found.popleft() if self._found else self._posted.popleft()
        if isinstance(event, ev.FrameReceived):
            self.frame_bytes -= len(event.frame or b"")
        return event

    async def wait(self) -> None:
        """Wait, in the driver's task, until an event is posted or `wake` is called."""
        self._arrival = anyio.Event()
        self._is_waited_for = True
        try:
            await self._arrival.wait()
        finally:
            self._is_waited_for = False

    def wake(self) -> None:
        """Let the driver's task look around."""
        self._arrival.set()

    def begin_emptying(self) -> None:
        """Let the driver's task sleep on: who posts now takes it from here again."""
        self._is_emptied = True

    def end_emptying(self) -> None:
        """Wake the driver's task for what is left."""
        self._is_emptied = False
        if self:
            self._arrival.set()
