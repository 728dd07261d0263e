"""Opening messages that are kept for clients in the queue take a bounded part of the memory."""

from __future__ import annotations

import pytest

import runtime.session.server
from runtime.model.backends.scripted import ScriptedBackend
from tests.sessions.in_memory import Peer, World, init_frame, on_virtual_time, world

SIZE = 10_000


def opening() -> str:
    """An opening message of a known size."""
    frame = init_frame(system_prompt="")
    return init_frame(system_prompt="x" * (SIZE - len(frame)))


async def queued(server: World) -> Peer:
    """A client that waits and has said how it wants its session."""
    peer = server.connect("audio")
    await peer.heard("session.queued")
    peer.send(opening())
    return peer


def test_they_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of a thousand with voices takes the server's memory."""
    monkeypatch.setattr(runtime.session.server, "EARLY_SUM_BYTES_MAX", 2 * SIZE)
    monkeypatch.setattr(runtime.session.server, "EARLY_BYTES_UNCOUNTED", 0)
    assert len(opening()) == SIZE

    async def body() -> None:
        async with world(ScriptedBackend(slots=1)) as server:
            first = await server.activate("audio")
            kept = [await queued(server) for _ in range(2)]
            refused = await queued(server)
            error = (await refused.heard("error"))["error"]
            assert error["code"] == "not_ready"
            assert "send it again after the queue" in error["message"]
            first.vanish()
            await kept[0].heard("session.created")
            refused.send(opening())
            await kept[1].heard("session.queue_update")
            assert not kept[1].all("error")
            assert len(refused.all("error")) == 1
            for peer in (*kept, refused):
                peer.vanish()
            await server.quiet()

    on_virtual_time(body)


def test_small_ones_are_kept_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client with voices keeps all others without from waiting in peace."""
    monkeypatch.setattr(runtime.session.server, "EARLY_SUM_BYTES_MAX", 0)

    async def body() -> None:
        async with world(ScriptedBackend(slots=1)) as server:
            first = await server.activate("audio")
            peer = await queued(server)
            first.vanish()
            await peer.heard("session.created")
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)
