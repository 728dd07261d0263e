"""Clients that leave, or send what is refused: one client's do not cost another one anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.values.errors import CLOSE_NORMAL
from runtime.model.backends.scripted import ScriptedBackend
from runtime.net.websocket import MESSAGES_A_READ
from runtime.session import journal, peer
from runtime.session.driver import ERROR_PAUSE_S, Driver
from runtime.session.peer import EndedSession, EndedSessions, Tokens
from runtime.session.server import Server
from tests.sessions.in_memory import (
    Peer,
    World,
    append_frame,
    close_frame,
    init_frame,
    on_virtual_time,
    world,
)


async def prepared(server: World, address: str) -> Peer:
    """A chat that is set up."""
    chat = server.connect("chat", resumable=True, address=address)
    chat.send(init_frame())
    await chat.heard("session.created")
    return chat


@pytest.mark.parametrize("resumable", [False, True])
def test_thousands_that_leave_at_once_are_not_searched_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, resumable: bool
) -> None:
    """4,096 chats that left took a minute of the event loop."""
    searches = list[Server]()
    search = Server._without_client

    def counted(server: Server) -> list[Driver]:
        searches.append(server)
        return search(server)

    async def body() -> None:
        async with world(ScriptedBackend(), record_to=tmp_path, detached_max=4) as server:
            crowd = [server.connect("chat", resumable=resumable) for _ in range(8)]
            for one in crowd:
                one.send(init_frame())
                await one.heard("session.created")
            monkeypatch.setattr(Server, "_without_client", counted)
            for one in crowd:
                one.vanish()
            await anyio.sleep(0.1)
            assert server.server.sessions == (4 if resumable else 0)
            assert len(searches) == (2 if resumable else 0)

    on_virtual_time(body)


@pytest.mark.parametrize("sends", [[], ["{}"], [append_frame()]])
def test_a_session_that_was_never_set_up_ends_with_its_connection(
    tmp_path: Path, sends: list[str]
) -> None:
    """Handshakes filled all slots and the queue for as long as clients may be away."""

    async def body() -> None:
        backend = ScriptedBackend(slots=1)
        async with world(backend, record_to=tmp_path, queue_max=2) as server:
            flood = [server.connect("audio", resumable=True) for _ in range(3)]
            await flood[0].heard("session.queue_done")
            for one in flood:
                for frame in sends:
                    one.send(frame)
                await anyio.sleep(0.1)
                one.vanish()
            await anyio.sleep(0.1)
            assert server.server.sessions <= 1  # its first message may be lost with its connection
            await anyio.sleep(14)
            assert server.server.sessions == 0
            assert server.server.slots.free == 1

    on_virtual_time(body)


def test_an_init_in_the_queue_keeps_the_place(tmp_path: Path) -> None:
    """A client whose connection broke while it waited had to wait again."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), record_to=tmp_path) as server:
            holder = await server.activate("audio")
            waiting = server.connect("audio", resumable=True)
            await waiting.heard("session.queued")
            waiting.send('{"type":"session.init","payload":{"system_prompt":"be brief"}}')
            await anyio.sleep(0.1)
            waiting.vanish()
            await anyio.sleep(0.1)
            again = server.come_back(*waiting.way_back)
            holder.send(close_frame())
            await again.heard("session.created")

    on_virtual_time(body)


def test_the_heaviest_party_loses_its_absences_first(tmp_path: Path) -> None:
    """A client that left many sessions ended another one's, which was away for a moment longer."""

    async def body() -> None:
        async with world(record_to=tmp_path, detached_max=3) as server:
            honest = await prepared(server, "honest")
            honest.vanish()
            for _ in range(6):
                await anyio.sleep(1)
                (await prepared(server, "flooder")).vanish()
            await anyio.sleep(1)
            assert server.server.sessions == 3
            again = server.come_back(*honest.way_back)
            await again.heard("session.resumable")

    on_virtual_time(body)


def test_a_chat_whose_client_is_away_holds_no_place(tmp_path: Path) -> None:
    """Chats that one client had left kept all others out for ten minutes."""

    async def body() -> None:
        async with world(record_to=tmp_path, chats_max=2) as server:
            for _ in range(4):
                (await prepared(server, "flooder")).vanish()
                await anyio.sleep(0.1)
            connected = [await prepared(server, "honest") for _ in range(2)]
            late = server.connect("chat")
            late.send(init_frame())
            await late.heard("error")
            assert late.events[-1]["error"]["code"] == "queue_full"
            assert all(one.closed is None for one in connected)

    on_virtual_time(body)


def test_a_chat_that_is_away_takes_no_slot_from_its_owner(tmp_path: Path) -> None:
    """Who was away from a chat and a conversation lost the conversation's slot to who waited."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), record_to=tmp_path) as server:
            talker = await server.activate("audio", resumable=True, address="honest")
            talker.vanish()
            await anyio.sleep(0.1)
            (await prepared(server, "honest")).vanish()
            waiting = server.connect("audio")
            await anyio.sleep(20)
            assert "session.queue_done" not in waiting.kinds
            await anyio.sleep(20)
            assert "session.queue_done" in waiting.kinds

    on_virtual_time(body)


def test_while_clients_wait_a_party_keeps_one_slot_for_its_absences(tmp_path: Path) -> None:
    """All slots were kept for clients that had gone, while others waited half a minute."""

    async def body() -> None:
        backend = ScriptedBackend(slots=4)
        async with world(backend, record_to=tmp_path) as server:
            honest = await server.activate("audio", resumable=True, address="honest")
            honest.vanish()
            flood = list[Peer]()
            for _ in range(3):
                await anyio.sleep(0.1)
                flood.append(await server.activate("audio", resumable=True, address="flooder"))
                flood[-1].vanish()
            waiting = [server.connect("audio") for _ in range(3)]
            await anyio.sleep(4)
            served = [one for one in waiting if one.kinds[-1] == "session.queue_done"]
            assert len(served) == 2
            for one in waiting:
                one.vanish()
            await anyio.sleep(1)
            for one in (honest, *flood):  # those without their slots wait for another one
                again = server.come_back(*one.way_back)
                again.send(append_frame())
                await again.heard("listen")

    on_virtual_time(body)


def ended_of(number: int, party: str) -> EndedSession:
    """A session that is over."""
    return EndedSession(
        recording_id=f"rec-{number}",
        mode="audio",
        owner="",
        party=party,
        tokens=Tokens([]),
        path=Path("nowhere"),
        frames_sent=1,
        frames_received=1,
        close=(CLOSE_NORMAL, ""),
        resume_s=600,
        ended_ns=number,
    )


def test_the_heaviest_party_loses_its_ended_sessions_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that were opened and closed at once pushed others' last frames out."""
    monkeypatch.setattr(peer, "ENDED_MAX", 4)
    ended = EndedSessions(600)
    ended.add(ended_of(0, "honest"))
    for number in range(1, 8):
        ended.add(ended_of(number, "flooder"))
    kept = [number for number in range(8) if ended.get(f"rec-{number}", 9) is not None]
    assert kept == [0, 5, 6, 7]


def test_an_ended_session_is_read_by_the_last_that_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred connections with one token read its log a hundred times at once."""
    read = list[tuple[int, int]]()

    def counted(path: Path, from_seq: int, first: int, until: int) -> Any:
        found = journal_read(path, from_seq, first, until)
        read.append((len(found[0]), sum(map(len, found[0]))))
        return found

    journal_read = journal._read_frames
    monkeypatch.setattr(journal, "_read_frames", counted)

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            first = await server.activate("audio", resumable=True)
            for _ in range(20):
                first.send(append_frame())
                await anyio.sleep(1)
            recording_id, token, seq, _ = first.way_back
            first.vanish()
            await anyio.sleep(700)
            assert server.server.sessions == 0
            stalled = list[Peer]()
            for _ in range(10):
                stalled.append(server.come_back(recording_id, token, 0))
                stalled[-1].stall()
                await anyio.sleep(0.01)
            again = server.come_back(recording_id, token, 0)
            await again.over()
            assert again.numbers == list(range(1, seq + 2))  # and the session's end
            assert all(one.closed is None for one in stalled)

    on_virtual_time(body)
    assert max(size for count, size in read if count > 1) < 2 * journal.BATCH_CHARS


def test_refused_messages_are_read_slowly(tmp_path: Path) -> None:
    """A client of many small invalid messages made the server work for it alone."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            chat = server.connect("chat")
            await chat.heard("session.queue_done")
            for _ in range(1000):
                chat.send("{}")
            await anyio.sleep(5)
            answered = len(chat.all("error"))
            assert 5 / ERROR_PAUSE_S <= answered <= 5 / ERROR_PAUSE_S + MESSAGES_A_READ
            chat.send(close_frame())
            chat.vanish()

    on_virtual_time(body)
