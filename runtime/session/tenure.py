"""One lease of a session: the backend's session, and the task that makes its calls.

The machine never asks for two calls at once (B1, B4), so one task makes all calls of a lease in
turn. It runs in the server's nursery: a hung call must not keep its session from ending. An
exception other than `BackendError` is a bug of the backend: it ends that session, not the server.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef

from ..model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    BackendSession,
    TranscriptSession,
    TurnSession,
)
from ..slots.pool import Lease
from ..telemetry.logs import name_unit

Asked = TypeVar("Asked")

_logger = logging.getLogger("antiphon.session")


@attrs.define(eq=False, kw_only=True)
class Tenure:
    """One lease, from its `SlotLeased` to its `BackendReleased`.

    Attributes:
        tasks: the server's nursery for model calls.
        on_lost: called when the backend is gone, or broke.
        on_failed: called with the effect of a call that failed; False: the backend broke in it.
        held, turn, transcript: the backend's session, turn or transcription; None before it is
            opened.
        is_cut: the turn is not wanted any more, whether it began or not.
        is_lost: the backend reported that it is gone.
        is_over: set when opening must not be retried.
    """

    lease: Lease
    backend: Backend
    tasks: TaskGroup
    on_lost: Callable[[Tenure], None]
    on_failed: Callable[[Tenure, object, BackendError], bool]
    held: BackendSession | None = None
    turn: TurnSession | None = None
    transcript: TranscriptSession | None = None
    is_cut: bool = False
    is_lost: bool = False
    is_releasing: bool = False
    is_over: anyio.Event = attrs.Factory(anyio.Event)
    _asked: deque[tuple[Callable[[Tenure, Any], Awaitable[None]], object]] = attrs.field(
        factory=deque, init=False
    )
    _wakeup: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _settled: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _scope: anyio.CancelScope | None = attrs.field(default=None, init=False)

    def ask(
        self,
        call: Callable[[Tenure, Asked], Awaitable[None]],
        effect: Asked,
        *,
        shield: bool = False,
    ) -> None:
        """Make a call after those that were asked for before.

        With `shield`, and as the task's first call, a server's shutdown does not cancel it.
        """
        self._asked.append((call, effect))
        self._wakeup.set()
        if self._scope is None:
            self._scope = anyio.CancelScope(shield=shield)
            self.tasks.start_soon(self._make_calls, self._scope)

    async def settle(self) -> None:
        """Wait until no call is in flight."""
        while self._asked:
            self._settled = anyio.Event()
            await self._settled.wait()

    def cancel(self) -> None:
        """End the task that makes the calls; the next call begins another."""
        if self._scope is not None:
            self._scope.cancel()
        self._scope = None

    async def _make_calls(self, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                while not self._asked:
                    self._wakeup = anyio.Event()
                    await self._wakeup.wait()
                call, effect = self._asked[0]
                name_unit(_unit_of(effect))
                try:
                    await call(self, effect)
                except BackendGone as error:
                    _logger.warning("the worker is gone in %s: %s", call.__name__, error)
                    self.is_lost = True
                    self.on_lost(self)
                except Exception as error:
                    if not isinstance(error, BackendError) or not self.on_failed(
                        self, effect, error
                    ):
                        _logger.exception("the backend broke in %s", call.__name__)
                        self.on_lost(self)
                finally:
                    self._asked.popleft()
                    if not self._asked:
                        self._settled.set()


def _unit_of(effect: object) -> int | None:
    """The index of the unit that a call is about; None for other calls."""
    match effect:
        case ef.StartUnit():
            return effect.unit.index
        case ef.StartFinalize() | ef.Rollback():
            return effect.index
    return None
