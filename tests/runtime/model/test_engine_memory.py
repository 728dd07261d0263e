"""Memory over many sessions, in a process of its own; a thousand in `make soak`."""

from __future__ import annotations

import ctypes
import gc
import resource
import subprocess
import sys
from itertools import count
from pathlib import Path

import anyio
import pytest

from protocol.values.model import Voice
from runtime.model.engine.backend import EngineBackend
from tests.models import random_model
from tests.models.random_model import opening, picture, sound, unit
from tests.project.sampling import sample

ROOT = Path(__file__).parents[3]
SLOTS = 4
SESSIONS = sample(1000, 250)
FIRST = sample(10, 50)
GROWTH_MAX = sample(0.02, 0.01)
PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Memory of this process that is in RAM and not merely kept by the allocator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return PAGE_BYTES * int(Path("/proc/self/statm").read_text().split()[1])


async def talk(backend: EngineBackend, number: int, slot: int) -> None:
    """One session: its opening, a unit or two, its end."""
    voice = Voice(llm_pcm=sound(number % 5, 8000) if number % 7 == 0 else b"")
    speaks = number % 8 == 0
    what = opening(number, voice, generate_audio=speaks, max_new_speak_tokens_per_chunk=4)
    session = await backend.open(what, slot=slot)
    for index in range(1 + speaks):
        frames = (picture(number % 3),) if number % 5 == 0 else ()
        result = await session.run(unit(index, number % 5, frames=frames))
        if number % 11 == 0:
            await session.rollback(index)
        else:
            await session.finalize(index, interrupted=result.cut is not None)
    await session.release()


def measure(folder: str, sessions: int) -> None:
    """Run the sessions; prints the memory after the first ones and at the end."""
    backend = EngineBackend(random_model.load(Path(folder), random_model.SMALL, slots=SLOTS))
    numbers = count()

    async def client(slot: int, end: int) -> None:
        while (number := next(numbers)) < end:
            await talk(backend, number, slot)

    async def all_of(end: int) -> None:
        async with anyio.create_task_group() as tasks:
            for slot in range(SLOTS):
                tasks.start_soon(client, slot, end)

    async def main() -> None:
        nonlocal numbers
        await all_of(FIRST)
        first = resident_bytes()
        numbers = count(FIRST)
        await all_of(sessions)
        print(first, resident_bytes())

    anyio.run(main, backend="trio")


@pytest.mark.soak
def test_many_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    """A server would run out of memory after a day."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "import tests.runtime.model.test_engine_memory as t\n"
    code += f"t.measure({str(tmp_path)!r}, {SESSIONS})"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    first, last = map(int, process.stdout.split())
    print(first, last, last / first)
    assert last <= first * (1 + GROWTH_MAX), (first, last)
