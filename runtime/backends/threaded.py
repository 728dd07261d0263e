"""A blocking model as an async `Backend`: all its calls on one thread at a time.

The model's code (`runtime.backends.minicpmo`) knows nothing of event loops; this runs it beside
one.

Rules:

- One call computes at a time, whatever session it is for; the call asked for first goes first.
  Two at once would only share the same cores, and make each unit later.
- `interrupt` does not queue. Where it comes while its unit still waits for the thread, the unit is
  cut before its first step, as the log can then tell and a replay repeat (B6).
- A call that has begun is never abandoned: cancelling waits for it, so that nothing of it can run
  beside what comes next (B4). One that never ends is its worker's end: the driver condemns it.
- What a model raises by mistake is logged here and becomes a `BackendError` without its text.

It does not batch sessions, and does not replace a thread that hangs (later issues).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar

import anyio
import attrs
from anyio import to_thread

from protocol.errors import LocalProtocolError
from protocol.model import Cut, Finalized, Opened, Opening, Unit, UnitResult

from .base import BackendError, BackendGone, BackendInfo

Result = TypeVar("Result")

THREADS: Final = 1
"""A model's own kernels use every core already; a second call would slow the first."""
CUT_AT_ONCE: Final = Cut(stage="llm", step=0)
"""After prefill, before anything is generated: what an early interrupt leads to as well."""

_log = logging.getLogger(__name__)


class BlockingSession(Protocol):
    """One session's state on a blocking model; see `BackendSession` for what the calls do."""

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        ...

    def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit."""
        ...

    def interrupt(self, index: int) -> None:
        """Cut unit `index`; called from another thread while `run_unit` runs.

        It must also hold where it comes just before `run_unit(index)` begins.
        """
        ...

    def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Feed the terminator and `</unit>`, then slide the window."""
        ...

    def rollback(self, index: int) -> None:
        """Restore the state from before unit `index`."""
        ...

    def release(self) -> None:
        """Give back everything the session holds."""
        ...


class BlockingModel(Protocol):
    """A model whose calls block; none of them overlap, but for `interrupt`."""

    @property
    def info(self) -> BackendInfo:
        """What it is; constant while it runs."""
        ...

    def open(self, opening: Opening) -> BlockingSession:
        """Open a session and prefill its prompt."""
        ...


class ModelThread:
    """Runs a model's calls one after the other, first come, first served."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(THREADS)

    async def call(self, name: str, function: Callable[[], Result]) -> Result:
        """Run a blocking call in its turn.

        Cancelling it while it waits takes it out of the line; once it runs, it is waited for.

        Args:
            name: of the call, for the log and the error.
            function: the call.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """
        try:
            return await to_thread.run_sync(function, limiter=self._limiter)
        except BackendError:
            raise
        except Exception as mistake:
            _log.exception("the model's %s failed", name)
            raise BackendError(f"{name} failed") from mistake


class ThreadedBackend:
    """A blocking model behind the `Backend` protocol.

    Args:
        model: shared by all sessions.
        slots: sessions at once; None takes the model's own number.
    """

    def __init__(self, model: BlockingModel, *, slots: int | None = None) -> None:
        self._model = model
        self._info = model.info if slots is None else attrs.evolve(model.info, slots=slots)
        self._thread = ModelThread()

    @property
    def info(self) -> BackendInfo:
        """What it is; constant while it runs."""
        return self._info

    async def open(self, opening: Opening, *, slot: int) -> ThreadedSession:
        """Open a session, as `Backend.open` says.

        Cancelled while the model opens it, it is opened nevertheless, returned, and the caller's.
        """
        if not 0 <= slot < self._info.slots:
            raise LocalProtocolError(f"slot {slot} of {self._info.slots}")
        session = await self._thread.call("open", partial(self._model.open, opening))
        return ThreadedSession(session, self._thread)


class ThreadedSession:
    """One session of a blocking model; its calls wait their turn among all sessions' calls."""

    def __init__(self, session: BlockingSession, thread: ModelThread) -> None:
        self._session = session
        self._thread = thread
        self._interrupted_index: int | None = None

    @property
    def opened(self) -> Opened:
        """What opening gave."""
        return self._session.opened

    async def run_unit(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Prefill and generate one unit, as `BackendSession.run_unit` says."""

        def work() -> UnitResult:
            if cut is None and self._interrupted_index == unit.index:
                return self._session.run_unit(unit, CUT_AT_ONCE)
            return self._session.run_unit(unit, cut)

        return await self._thread.call("run_unit", work)

    def interrupt(self, index: int) -> None:
        """Cut unit `index`, whether it runs or waits for the thread; never blocks for long."""
        self._interrupted_index = index
        self._session.interrupt(index)

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit, as `BackendSession.finalize` says."""
        work = partial(self._session.finalize, index, interrupted=interrupted)
        return await self._thread.call("finalize", work)

    async def rollback(self, index: int) -> None:
        """Undo the failed unit, as `BackendSession.rollback` says."""
        await self._thread.call("rollback", partial(self._session.rollback, index))

    async def release(self) -> None:
        """Give back everything the session holds; a session that is lost holds nothing.

        Raises:
            BackendError: it failed; what it held may still be held, so the slot is not safe to use.
        """
        try:
            await self._thread.call("release", self._session.release)
        except BackendGone:
            _log.warning("a session was released after its backend was lost")
