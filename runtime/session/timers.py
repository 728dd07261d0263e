"""The timers of one session: `SetTimer` -> `TimerFired`; a cancelled one posts nothing."""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup

from protocol.values import effects as ef
from protocol.values import events as ev

from .calls import Inbox


class Timers:
    """Sleeps until the times that the session set."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._scopes: dict[str, anyio.CancelScope] = {}

    def set(self, effect: ef.SetTimer, tasks: TaskGroup) -> None:
        """Set a timer; one that is due fires at once."""
        assert effect.name not in self._scopes, "a timer is cancelled before it is set again"
        scope = anyio.CancelScope()
        self._scopes[effect.name] = scope
        tasks.start_soon(self._run, effect, scope)

    def cancel(self, effect: ef.CancelTimer) -> None:
        """Cancel a timer, unless it has fired: the machine ignores it by its generation."""
        scope = self._scopes.pop(effect.name, None)
        if scope is not None:
            scope.cancel()

    async def _run(self, effect: ef.SetTimer, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep(max(0, effect.at_ns - self._inbox.now_ns()) / 1e9)
            if self._scopes.get(effect.name) is not scope:
                return  # it was cancelled just as it fired
            del self._scopes[effect.name]
            now_ns, generation = self._inbox.now_ns(), effect.generation
            self._inbox.post(ev.TimerFired(at_ns=now_ns, name=effect.name, generation=generation))
