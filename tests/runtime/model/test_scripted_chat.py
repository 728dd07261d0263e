"""Turns by script: an interrupt is honoured as a real model honours it."""

from __future__ import annotations

import anyio
import pytest

from runtime.model.backends.base import BackendError
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.backends.scripted_chat import POLL_S, Answer
from tests.runtime.model.test_minicpmo_chat import ask
from tests.sessions.in_memory import on_virtual_time

SLOW = Answer(tokens=("a ", "b ", "c "), prefill_s=30.0, token_s=1.0)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 12.34, 29.95])
def test_an_interrupt_cuts_the_prefill(after_s: float) -> None:
    """Tests would let a server pass that keeps a slot for a client that has left."""

    async def body() -> None:
        backend = ScriptedBackend(chat=lambda _: SLOW)
        session = await backend.chat(slot=0)

        async def cut() -> None:
            await anyio.sleep(after_s)
            session.interrupt()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut)
            with pytest.raises(BackendError, match="the turn was cut"):
                await session.run(ask())
        assert after_s <= anyio.current_time() <= after_s + POLL_S + 1e-6
        await session.release()
        assert backend.held_slots == set()

    on_virtual_time(body)


def test_a_turn_that_was_cut_feeds_nothing() -> None:
    """A turn that nobody wants any more would take its prefill's time first."""

    async def body() -> None:
        session = await ScriptedBackend(chat=lambda _: SLOW).chat(slot=0)
        session.interrupt()
        with pytest.raises(BackendError, match="the turn was cut"):
            await session.run(ask())
        assert anyio.current_time() == 0

    on_virtual_time(body)


def test_a_prefill_takes_the_time_that_the_script_says() -> None:
    """Times that tests rely on would drift with every look at the interrupt."""

    async def body() -> None:
        session = await ScriptedBackend(chat=lambda _: SLOW).chat(slot=0)
        times = list[float]()
        await session.run(ask(), emit=lambda _: times.append(anyio.current_time()))
        assert times == pytest.approx([30.0, 31.0, 32.0, 33.0])

    on_virtual_time(body)
