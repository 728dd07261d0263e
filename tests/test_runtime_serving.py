"""A server's life, in the test's own process: what it does to the process itself."""

from __future__ import annotations

import gc
import signal
from functools import partial

import anyio
import pytest

from runtime.backends.scripted import ScriptedBackend
from runtime.serving import _reload, run
from runtime.settings import Settings


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.mark.anyio
async def test_what_was_loaded_is_not_looked_through_while_sessions_run() -> None:
    """All sessions would be held up for 0.2 s at a time by a search for garbage in torch."""
    seen = []

    def ready() -> None:
        seen.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGTERM)

    before = gc.get_freeze_count()
    with anyio.fail_after(20):
        await run(Settings(port=0, model="scripted", drain_s=0), on_ready=ready)
    assert len(seen) == 1
    assert seen[0] > before + 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.anyio
async def test_a_model_that_is_replaced_can_be_collected() -> None:
    """A worker that hung would keep its memory, until there is none for the next one."""

    async def load(backend: ScriptedBackend) -> ScriptedBackend:
        return backend

    backend = ScriptedBackend()
    gc.freeze()
    try:
        assert await _reload([partial(load, backend)], 0) is backend
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()
