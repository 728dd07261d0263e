"""What forks may cost a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from recorder.storage.store import Store
from runtime.session import journal
from runtime.session.forking import AT_ONCE, WAITING_MAX, ForkQueue, ForkRefused
from runtime.session.setup import SessionSpec
from tests.golden.forking import APPEND, begin, log_of
from tests.golden.openai import LOUD, say, speak
from tests.sessions.in_memory import Peer, on_virtual_time, world

MORE = 5


def test_forks_that_wait_to_be_written_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that were gone filled the disk with copies of a recording."""
    codes: list[str] = []

    async def slowly(work: Callable[[], Any]) -> Any:
        await anyio.sleep(1)
        return work()

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            parent = log_of(server, await begin(server, model="scripted"), 0)
            monkeypatch.setattr(journal, "in_thread", slowly)

            arrival = SessionSpec(mode="audio", endpoint="live", parent=parent)

            async def fork() -> None:
                peer = Peer("audio")
                try:
                    await server.server.handle(peer.server_end, arrival)
                except ForkRefused as refused:
                    codes.append(refused.code)

            async with anyio.create_task_group() as tasks:
                for _ in range(AT_ONCE + WAITING_MAX + MORE):
                    tasks.start_soon(fork)
                await anyio.sleep(0.5)
                tasks.cancel_scope.cancel()

    on_virtual_time(body)
    assert codes == ["queue_full"] * MORE


def test_parties_have_turns_and_none_fills_the_queue() -> None:
    """Of 13 honest forks 12 were refused, as one client's 61 were in line before them."""
    written, refused = list[str](), list[str]()

    async def body() -> None:
        queue = ForkQueue(1 << 40)

        async def fork(party: str) -> None:
            try:
                async with queue.turn(party):
                    await anyio.sleep(1)
                    written.append(party)
            except ForkRefused:
                refused.append(party)

        async with anyio.create_task_group() as tasks:
            for _ in range(61):
                tasks.start_soon(fork, "greedy")
            await anyio.sleep(0.5)
            for number in range(13):
                tasks.start_soon(fork, f"honest {number}")

    on_virtual_time(body)
    assert set(refused) == {"greedy"}
    assert written[:AT_ONCE] == ["greedy"] * AT_ONCE
    honest = {f"honest {number}" for number in range(13)}
    assert set(written[AT_ONCE : AT_ONCE + 14]) >= honest, "they wait for none of the rest"
    assert len(written) == AT_ONCE + WAITING_MAX


def test_what_the_forks_of_a_party_copy_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """61 forks of a recording of 40 seconds took 360 MB of the disk in 20 s."""
    words: list[str] = []
    copied: list[tuple[str, int]] = []

    async def body() -> None:
        async with world(record_to=tmp_path, fork_mb=1) as server:
            parent = log_of(server, await begin(server, model="scripted"), 0)
            forks, bytes_max = server.server._logs._forks, 1 << 20
            forks.copied("10.0.0.1", bytes_max + 1)
            monkeypatch.setattr(forks, "copied", lambda *fork: copied.append(fork))
            for address in ("10.0.0.1", "10.0.0.2"):
                arrival = SessionSpec(mode="audio", endpoint="live", parent=parent, address=address)
                peer = Peer("audio")
                peer.vanish()
                try:
                    await server.server.handle(peer.server_end, arrival)
                except ForkRefused as refused:
                    words.append(refused.message)
            await anyio.sleep(2)
            async with forks.turn("10.0.0.1"):
                pass

    on_virtual_time(body)
    assert words == ["the forks of this client have copied as much as they may; again in 1 s"]
    ((party, size_bytes),) = copied
    assert party == "10.0.0.2"
    assert size_bytes > 1000


def test_a_fork_that_leaves_the_queue_gives_its_turn_on() -> None:
    """A client that is gone would hold up all others for ever."""

    async def body() -> None:
        queue = ForkQueue(1)
        async with anyio.create_task_group() as tasks:

            async def fork() -> None:
                async with queue.turn("a"):
                    await anyio.sleep_forever()

            for _ in range(AT_ONCE + 3):
                tasks.start_soon(fork)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        async with queue.turn("b"), queue.turn("c"):
            pass

    on_virtual_time(body)


def test_a_fork_that_is_cut_off_while_it_is_written_leaves_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends would leave a copy of a conversation, as if it had crashed."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            parent = log_of(server, await begin(server, model="scripted"), 0)
            arrival = SessionSpec(mode="audio", endpoint="live", parent=parent)

            async with anyio.create_task_group() as tasks:

                async def at_the_end(work: Callable[[], Any]) -> Any:
                    tasks.cancel_scope.cancel()
                    return work()

                monkeypatch.setattr(journal, "in_thread", at_the_end)
                tasks.start_soon(server.server.handle, Peer("audio").server_end, arrival)

    on_virtual_time(body)
    assert len(list(tmp_path.glob("*.zst"))) == 1


def test_the_log_of_a_fork_is_kept_once_it_is_set_up(tmp_path: Path) -> None:
    """Whoever looked at the form of a fork and left filled the disk, or lost what was said."""

    async def body() -> None:
        async with world(record_to=tmp_path, record_refused=False) as server:
            parent = log_of(server, await begin(server, model="scripted"), 0)
            gone = server.connect("audio", endpoint="live", parent=parent)
            await gone.heard("info")
            gone.vanish()
            fork = await begin(server, parent)
            await speak(fork, APPEND, LOUD)
            await fork.heard("session.output_audio.delta")
            say(fork, "session.close")
            await fork.over()
            kept.update((parent.info.recording_id, fork.way_back[0]))

    kept = set[str]()
    on_virtual_time(body)
    assert {info.recording_id for info in Store(tmp_path).logs()} == kept
