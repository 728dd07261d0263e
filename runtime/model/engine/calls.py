"""Awaiting a model's calls on an engine; each waits in its own thread.

Rules: cancelling waits for a running call. Pieces of an answer reach the event loop in order,
through the waiting thread; if the waiting task is cancelled, the answer is cut. An unexpected
exception of a model is logged and becomes a `BackendError` without its text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import wait
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import anyio
from anyio import from_thread, to_thread

from ..backends.base import BackendError, BackendInfo
from .engine import Engine
from .gathering import Gathering
from .scheduler import BACKGROUND

Result = TypeVar("Result")
Piece = TypeVar("Piece")

DUE_NS: Final = 1_000_000_000
"""A unit is due when the next second of sound has come."""
THREADS_A_SLOT: Final = 2
"""Concurrent calls of a session: one, and a waiting release."""

_log = logging.getLogger("antiphon.model")


def _at_once(call: Callable[[], Result]) -> Generator[Any, Any, Result]:
    """A call without requests, as a generator."""
    return call()
    yield


class EngineCalls:
    """The calls of all sessions of one engine; `info` is the model's."""

    def __init__(
        self, engine: Engine, info: BackendInfo, gathering: Gathering | None = None
    ) -> None:
        self.info = info
        self._engine, self._gathering = engine, gathering
        self._threads = anyio.CapacityLimiter(THREADS_A_SLOT * info.slots)

    def opened(self) -> None:
        """Note that a session is about to be opened."""
        if self._gathering is not None:
            self._gathering.opened()

    def released(self) -> None:
        """Note that a session is released, or was not opened."""
        if self._gathering is not None:
            self._gathering.released()

    async def call(
        self,
        name: str,
        steps: Callable[[], Generator[Any, Any, Result]],
        *,
        due_ns: float = DUE_NS,
    ) -> Result:
        """Run the generator that `steps` makes in its own thread, due in `due_ns` or `BACKGROUND`.

        `BackendError` is the model's own, or in place of an unexpected exception of `name`.
        """
        if self._gathering is not None:
            await self._gathering.turn(name)
            due_ns = BACKGROUND
        return await self.work(name, lambda: self._engine.submit(steps(), due_ns=due_ns).result())

    async def at_once(self, name: str, call: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread, between batches; it raises as `call` does."""
        return await self.call(name, lambda: _at_once(call))

    async def tell(
        self,
        name: str,
        steps: Callable[[Callable[[Piece], None]], Generator[Any, Any, Result]],
        emit: Callable[[Piece], None],
        interrupt: Callable[[], None],
        *,
        due_ns: float = BACKGROUND,
    ) -> Result:
        """Run a generator that emits pieces, and pass these to the event loop; see `call`.

        `steps` gets the taker of pieces; `interrupt` follows cancelling or a failed `emit`.
        """

        def tell() -> Result:
            pieces: SimpleQueue[Piece | None] = SimpleQueue()
            future = self._engine.submit(steps(pieces.put), due_ns=due_ns)
            future.add_done_callback(lambda _: pieces.put(None))
            try:
                while (piece := pieces.get()) is not None:
                    from_thread.run_sync(emit, piece)
                    from_thread.check_cancelled()
            except BaseException:  # Cancelled, by the event loop's own exception, or `emit` failed.
                interrupt()
                wait((future,))
                raise
            return future.result()

        return await self.work(name, tell)

    async def work(self, name: str, work: Callable[[], Result]) -> Result:
        """Run a function in its own thread; cancelling waits for it. It raises as `call` does."""
        try:
            return await to_thread.run_sync(work, limiter=self._threads)
        except BackendError:
            raise
        except Exception as mistake:
            _log.exception("the model's %s failed", name)
            raise BackendError(f"{name} failed") from mistake
