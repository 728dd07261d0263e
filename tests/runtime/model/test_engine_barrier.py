"""Sessions that wait for each other: full batches, in step, and none held up for good."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from protocol.values.model import UNIT_BYTES, Unit
from runtime.model.engine.backend import EngineBackend, EngineSession
from tests.runtime.model.test_engine import Ask, FakeModel, opening

UNITS = 4
pytestmark = pytest.mark.anyio


class Batches(FakeModel):
    """It notes the sizes of its batches, by what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def compute(self, works: Sequence[Ask]) -> list[str]:
        kinds = {work.what.split()[1] for work in works}
        self.sizes.append((",".join(sorted(kinds)), len(works)))
        return super().compute(works)


async def talk(backend: EngineBackend, slot: int, *, pause_s: float = 0) -> None:
    """Run a session, whose client is slow."""
    session = await backend.open(opening(str(slot)), slot=slot)
    for index in range(UNITS):
        await anyio.sleep(pause_s)
        await run(session, index)
    await session.release()


async def run(session: EngineSession, index: int) -> None:
    await session.run(Unit(index=index, pcm=bytes(UNIT_BYTES)))
    await session.finalize(index, interrupted=False)


async def test_sessions_run_in_step() -> None:
    """All units go together, and so does all that closes them, however slow a client is."""
    model = Batches()
    backend = EngineBackend(model, is_live=False)
    async with anyio.create_task_group() as group:
        for slot in range(3):
            group.start_soon(lambda slot=slot: talk(backend, slot, pause_s=0.01 * slot))
    await backend.aclose()
    assert [size for kind, size in model.sizes if kind == "unit"] == [3] * UNITS
    assert [size for kind, size in model.sizes if kind == "finalize"] == [3] * UNITS


async def test_a_session_that_comes_later_falls_into_step() -> None:
    """Its opening goes before the units that wait for it; a released one is not waited for."""
    model = Batches()
    backend = EngineBackend(model, is_live=False)
    async with anyio.create_task_group() as group:
        first = await backend.open(opening("0"), slot=0)
        await run(first, 0)
        group.start_soon(talk, backend, 1)
        for index in range(1, UNITS + 3):
            await run(first, index)
        await first.release()
    await backend.aclose()
    sizes = [size for kind, size in model.sizes if kind == "unit"]
    assert (sorted(sizes), sum(sizes)) == ([1, 1, 1, *[2] * UNITS], 2 * UNITS + 3)


async def test_an_idle_session_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for no longer than `BARRIER_S`."""
    monkeypatch.setattr("runtime.model.engine.backend.BARRIER_S", 0.02)
    backend = EngineBackend(Batches(), is_live=False)
    idle = await backend.open(opening("0"), slot=0)
    with anyio.fail_after(60):
        await talk(backend, 1)
        await idle.release()
    await backend.aclose()


async def test_a_session_that_is_not_opened_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an opening that failed the others go on at once."""
    monkeypatch.setattr("runtime.model.engine.backend.BARRIER_S", 600.0)
    model = Batches()
    backend = EngineBackend(model, is_live=False)
    model.error = RuntimeError("broken")
    with pytest.raises(Exception, match="open failed"):
        await backend.open(opening("0"), slot=0)
    model.error = None
    with anyio.fail_after(60):
        await talk(backend, 1)
    await backend.aclose()
