"""One session of a gateway at a worker, and the task that makes its calls in turn.

A task for each call would cost a unit more than its messages do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import attrs

from protocol.values import events as ev

from ..model.backends.base import (
    BackendError,
    BackendSession,
    ModelSession,
    TranscriptSession,
    TurnSession,
)

Work = Callable[[], Awaitable[ev.Event]]
"""A call of the model, to be awaited once."""


@attrs.define(eq=False, kw_only=True)
class Session:
    """What a gateway opened.

    Attributes:
        call: the call in flight; 0: none.
        work: what it does, until it begins.
        early: the call that an interrupt is waiting for; 0: none.
        opened, turn, transcript: what the backend holds, one of them, once it does.
        unit: the index of its last unit.
        is_served: the task that makes its calls has begun.
        asked: a call was asked for, or it is over.
        idle: a call has ended.
        is_over: its slot was given back, or withheld.
    """

    number: int
    slot: int
    call: int = 0
    work: Work | None = None
    early: int = 0
    opened: BackendSession | None = None
    turn: TurnSession | None = None
    transcript: TranscriptSession | None = None
    scope: anyio.CancelScope = attrs.Factory(anyio.CancelScope)
    asked: anyio.Event = attrs.Factory(anyio.Event)
    idle: anyio.Event = attrs.Factory(anyio.Event)
    unit: int = -1
    is_served: bool = False
    is_over: bool = False

    @property
    def held(self) -> ModelSession | None:
        """What must be released."""
        return self.opened or self.turn or self.transcript

    def cancel(self) -> None:
        """Cancel the call in flight, begun or not."""
        if self.work is None:
            self.scope.cancel()
        else:
            self.work = _cancelled

    def cut(self) -> None:
        """Cut the call in flight."""
        if self.turn is not None:
            self.turn.interrupt()
        if self.opened is not None and self.call:
            self.opened.interrupt(self.unit)

    def ask(self, call: int, work: Work) -> bool:
        """Take a call, while none is in flight; True: `make_calls` must be run, by a task."""
        self.call, self.work = call, work
        self.asked.set()
        is_first, self.is_served = not self.is_served, True
        return is_first

    async def make_calls(self, run: Callable[[Session, int, Work], Awaitable[None]]) -> None:
        """Have each call run until the session is over; a cancelled one ends only itself."""
        while not self.is_over:
            with anyio.CancelScope() as self.scope:
                while not self.is_over:
                    work, self.work = self.work, None
                    if work is None:
                        self.asked = anyio.Event()
                        await self.asked.wait()
                    else:
                        await run(self, self.call, work)

    def end(self) -> None:
        """It is over: its slot was given back, or withheld."""
        self.is_over = True
        self.asked.set()


async def _cancelled() -> ev.Event:
    raise BackendError("it was cancelled")
