"""What the tests of streaming input share: chunks, their reader, and a gate before the model."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio
import attrs
import pytest

from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import Feed, Work
from runtime.streaming import SamplingParams, StreamingInput, StreamingOutput

WAIT_S: Final = 30
"""Real seconds after which something hangs."""
Chunks = AsyncIterator[StreamingInput]


def params(max_tokens: int = 1, **what: Any) -> SamplingParams:
    """Sampling that nothing but its length ends, and that no chance decides."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **what}
    )


async def given_chunks(*chunks: StreamingInput) -> Chunks:
    """All chunks at once."""
    for chunk in chunks:
        yield chunk


async def read(outputs: AsyncIterator[StreamingOutput]) -> list[StreamingOutput]:
    """All outputs of a request that bear a token or end it, within bounded time."""
    with anyio.fail_after(WAIT_S):
        return [o async for o in outputs if o.token_ids or o.finish_reason == "context_full"]


@attrs.define
class Gate:
    """Holds the model up before it computes, and counts what it is asked."""

    opened: threading.Event = attrs.Factory(threading.Event)
    entered: threading.Semaphore = attrs.Factory(lambda: threading.Semaphore(0))
    fed: int = 0
    error: Exception | None = None

    def __call__(self, runner: ModelRunner, works: Sequence[Work]) -> list[Any]:
        self.entered.release()
        assert self.opened.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.fed += sum(isinstance(work, Feed) for work in works)
        return REAL(runner, works)

    async def reached(self) -> None:
        """Wait until the model is asked for something."""
        assert await anyio.to_thread.run_sync(lambda: self.entered.acquire(timeout=WAIT_S))


REAL: Final[Callable[[ModelRunner, Sequence[Work]], list[Any]]] = ModelRunner.compute


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before the model, shut; it is opened in the end."""
    shut = Gate()

    def compute(runner: ModelRunner, works: Sequence[Work]) -> list[Any]:
        return shut(runner, works)

    monkeypatch.setattr(ModelRunner, "compute", compute)
    yield shut
    shut.opened.set()


EXAMPLE: Final = (
    StreamingInput([1, 2, 3], params(1)),
    StreamingInput([4, 5], params(3)),
    StreamingInput([6, 7], params(2)),
)
"""The worked example of the source: three chunks, of 1, 3 and 2 tokens."""
