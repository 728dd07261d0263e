"""Calls of a model on an engine, awaited on the event loop: each waits in a thread of its own.

A call that has begun is never abandoned: cancelling waits for it. Pieces of an answer cross from
the engine's thread to the event loop in their order, through the thread that waits for the answer;
where the task that waits is cancelled, the answer is cut. What a model raises by mistake is logged
here and becomes a `BackendError` without its text.
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
from .scheduler import BACKGROUND

Result = TypeVar("Result")
Piece = TypeVar("Piece")

DUE_NS: Final = 1_000_000_000
"""A unit is due when the next second of sound has come."""
THREADS_A_SLOT: Final = 2
"""Calls of a session that wait at once: one, and a release that waits behind it."""

_log = logging.getLogger("antiphon.model")


def _at_once(call: Callable[[], Result]) -> Generator[Any, Any, Result]:
    """A call without requests, as a generator."""
    return call()
    yield


class EngineCalls:
    """The calls of all sessions of one engine.

    Args:
        engine: runs them.
        info: of the model.

    Attributes:
        info: as given.
    """

    def __init__(self, engine: Engine, info: BackendInfo) -> None:
        self.info = info
        self._engine = engine
        self._threads = anyio.CapacityLimiter(THREADS_A_SLOT * info.slots)

    async def call(
        self,
        name: str,
        steps: Callable[[], Generator[Any, Any, Result]],
        *,
        due_ns: float = DUE_NS,
    ) -> Result:
        """Run a generator on the engine.

        Args:
            name: of the call, for the log and the error.
            steps: makes the generator, in a thread of its own.
            due_ns: nanoseconds until its result is due, or `BACKGROUND`.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """
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
        """Run a generator that tells pieces as it goes, and hand these to the event loop.

        Args:
            name: of the call, for the log and the error.
            steps: makes the generator, in a thread of its own; it is given whom to tell.
            emit: told each piece, in order, from the event loop.
            interrupt: cuts the generator: where this is cancelled, or `emit` fails.
            due_ns: as of `call`.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
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
        """Run a function in a thread of its own; cancelling waits for it.

        Args:
            name: of the call, for the log and the error.
            work: the function.

        Raises:
            BackendError: it failed: as the model raised it, or in place of its mistake.
        """
        try:
            return await to_thread.run_sync(work, limiter=self._threads)
        except BackendError:
            raise
        except Exception as mistake:
            _log.exception("the model's %s failed", name)
            raise BackendError(f"{name} failed") from mistake
