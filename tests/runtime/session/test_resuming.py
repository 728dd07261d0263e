"""A client that comes back to its session hears each frame once, and is heard once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_INTERNAL_ERROR, CLOSE_NORMAL, CLOSE_TRY_LATER
from protocol.values.limits import REBUILD_WAIT_S
from protocol.values.messages import ResumeRequest
from protocol.wire.dialects.shared import RESUMABLE, RESUME
from recorder.format.mapping import event_of
from recorder.read.reader import LogReader, read
from replay.rerun.logic import replay
from replay.story.inspect import inspect
from runtime.client.resuming import PASSING_CLOSE_CODES
from runtime.model.backends.scripted import ScriptedBackend
from runtime.session import journal
from runtime.session.journal import Journal
from runtime.session.peer import AttachedClient, EndedSession, Tokens, hash_of
from tests.sessions.in_memory import Peer, append_frame, close_frame, on_virtual_time, world


def frames(*peers: Peer) -> list[str]:
    """All numbered frames that connections got."""
    return [frame for peer in peers for frame in peer.frames if '"seq":' in frame]


def logged(folder: Path) -> list[str]:
    """The frames that the only log of a folder holds."""
    (path,) = folder.glob("*")
    return [str(record.fields["frame"]) for record in read(path) if record.kind == "tx"]


def remove_logs(folder: Path) -> None:
    """Remove the logs, as retention does."""
    for path in folder.glob("*"):
        path.unlink()


def events(folder: Path) -> list[ev.Event]:
    """The events that the only log of a folder holds."""
    (path,) = folder.glob("*")
    kinds = {"rx", "prepare", "unit", "finalize", "rollback", "turn", "chunk", "event"}
    return [event_of(it.fields, it.at_ns) for it in read(path) if it.kind in kinds]


def replays(folder: Path, count: int = 1) -> None:
    """The logs of a folder replay to the end."""
    paths = list(folder.glob("*"))
    assert len(paths) == count
    for path in paths:
        with LogReader(path) as log:
            report = replay(log)
        assert report.identical, report.divergence


async def talk(peer: Peer, seconds: int) -> None:
    """Send sound as it comes."""
    for _ in range(seconds):
        peer.send(append_frame())
        await anyio.sleep(1)


def test_who_comes_back_in_time_keeps_its_slot(tmp_path: Path) -> None:
    """A client that lost its connection for a moment lost its conversation."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            await talk(peer, 3)
            peer.vanish()
            await anyio.sleep(5)
            assert server.server.slots.free == server.server.slots.slots - 1
            again = server.come_back(*peer.way_back)
            await talk(again, 3)
            again.send(close_frame())
            await again.over()
            assert again.events[0]["ack"] == 4  # an init and three seconds
            assert peer.numbers + again.numbers == list(range(len(frames(peer, again))))
            assert frames(peer, again) == logged(tmp_path)
            assert again.events[0]["token"] != peer.events[0]["token"]

    on_virtual_time(body)
    kinds = [type(event) for event in events(tmp_path)]
    assert ev.PeerGone in kinds
    assert ev.PeerAttached in kinds
    assert ev.Rebuilt not in kinds
    replays(tmp_path)


def test_what_was_said_meanwhile_is_heard_once(tmp_path: Path) -> None:
    """Frames that were on their way when the connection broke were lost, or came twice."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            for _ in range(4):
                peer.send(append_frame())
            await peer.heard("listen")
            recording_id, token, seq, _ = peer.way_back
            peer.vanish()
            await anyio.sleep(10)
            again = server.come_back(recording_id, token, seq - 2)
            again.send(close_frame())
            await again.over()
            assert again.numbers[0] == seq - 1
            assert frames(peer)[: seq - 1] + frames(again) == logged(tmp_path)

    on_virtual_time(body)
    replays(tmp_path)


def test_frames_are_read_from_the_first_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them was left out: it stood at the very place where reading began."""
    monkeypatch.setattr(journal, "EVERY", 1)
    monkeypatch.setattr(journal, "BATCH_CHARS", 1)

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            await talk(peer, 8)
            recording_id, token, seq, _ = peer.way_back
            peer.vanish()
            for last_seq in range(-1, seq + 1):
                again = server.come_back(recording_id, token, last_seq)
                await again.greeted()
                await again.until(lambda: len(again.numbers) == seq - last_seq)  # noqa: B023
                assert frames(again) == logged(tmp_path)[last_seq + 1 : seq + 1]
                token = again.way_back[1]
            again.send(close_frame())
            await again.over()

    on_virtual_time(body)


def test_a_greeting_is_in_the_log_before_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed then knows nothing of the token that its client has."""
    written = Journal._written

    async def body() -> None:
        disk = anyio.Event()

        async def slowly(self: Journal, log: Any, seq: int) -> None:
            await disk.wait()
            await written(self, log, seq)

        async with world(record_to=tmp_path) as server:
            monkeypatch.setattr(Journal, "_written", slowly)
            peer = server.connect("audio", resumable=True)
            await anyio.sleep(1)
            assert peer.frames == []
            disk.set()
            await peer.greeted()
            way_back, disk = peer.way_back, anyio.Event()
            peer.vanish()
            again = server.come_back(*way_back)
            await anyio.sleep(1)
            assert again.frames == []
            disk.set()
            await again.greeted()
            again.vanish()

    on_virtual_time(body)


class Line:
    """A connection that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, frame: str, _ready: Any) -> None:
        self.sent.append(frame)


def test_only_a_greeting_takes_a_token() -> None:
    """A frame that was sent before it took the token, and the client was never greeted."""
    line, others = Line(), ['{"type":"error"}', '{"type":"session.created","text":"$token"}']
    client = AttachedClient("right", lambda *_: None)  # type: ignore[arg-type, return-value]
    client.first(line)  # type: ignore[arg-type]
    for frame in others:
        line.send(client.with_token(frame), journal.ready_now)
    client.greet(ef.Attach(frame='{"token":"$token"}', after=-1, before=0), journal.ready_now)
    assert line.sent == [*others, '{"token":"right"}']


def test_who_is_long_gone_gives_its_slot_back_and_is_rebuilt(tmp_path: Path) -> None:
    """A slot was held for a client in a tunnel, or its conversation was forgotten."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            await talk(peer, 4)
            peer.vanish()
            await anyio.sleep(40)
            assert server.server.slots.free == server.server.slots.slots
            assert server.server.sessions == 1
            again = server.come_back(*peer.way_back)
            await talk(again, 4)
            again.send(close_frame())
            await again.over()
            assert frames(peer, again) == logged(tmp_path)

    on_virtual_time(body)
    (rebuilt,) = [event for event in events(tmp_path) if isinstance(event, ev.Rebuilt)]
    assert rebuilt.steps == 4
    replays(tmp_path)


def test_who_comes_back_to_a_full_server_waits(tmp_path: Path) -> None:
    """A client that came back was turned away, after a while too, or waited behind new ones."""

    async def body() -> None:
        async with world(ScriptedBackend(slots=1), record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            await talk(peer, 2)
            peer.vanish()
            await anyio.sleep(40)
            other = await server.activate("audio")
            again = server.come_back(*peer.way_back)
            third = server.connect("audio")
            await third.heard("session.queued")
            await anyio.sleep(REBUILD_WAIT_S + 10)
            other.send(close_frame())
            await talk(again, 2)
            await again.heard("audio")
            again.send(close_frame())
            await third.heard("session.queue_done")

    on_virtual_time(body)
    replays(tmp_path, 3)


def test_who_does_not_come_back_ends(tmp_path: Path) -> None:
    """Sessions without a client piled up."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.vanish()
            await anyio.sleep(601)
            assert server.server.sessions == 0
            again = server.come_back(*peer.way_back)
            await again.over()
            assert again.kinds == ["session.resumable", "session.closed"]
            assert again.closed == (1000, "timeout")
            assert frames(peer, again) == logged(tmp_path)
            await anyio.sleep(601)
            late = server.come_back(*peer.way_back)
            await late.over()
            assert late.closed == (1008, "there is no such session, or this is not its token")

    on_virtual_time(body)
    replays(tmp_path)


def test_who_comes_back_to_a_log_that_was_removed_hears_that_there_is_no_session(
    tmp_path: Path,
) -> None:
    """Its connection broke with an error of the server, again and again."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.vanish()
            await anyio.sleep(601)
            remove_logs(tmp_path)
            broken = server.come_back(*peer.way_back)
            await broken.over()
            assert broken.closed is None
            late = server.come_back(*peer.way_back)
            await late.over()
            assert late.closed == (1008, "there is no such session, or this is not its token")

    on_virtual_time(body)


def test_a_right_token_takes_over_a_session_that_is_alive(tmp_path: Path) -> None:
    """A half-open connection kept its client out."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            await talk(peer, 2)
            again = server.come_back(*peer.way_back)
            await peer.over()
            assert peer.events[-1] == {"type": "session.replaced"}
            assert peer.closed == (1000, "replaced")
            peer.send(append_frame())
            await talk(again, 2)
            again.send(close_frame())
            await again.over()
            assert again.events[0]["ack"] == 3
            assert frames(peer, again) == logged(tmp_path)

    on_virtual_time(body)
    assert ev.PeerGone not in [type(event) for event in events(tmp_path)]
    replays(tmp_path)


@pytest.mark.parametrize("fails", ["it is half open", "it is lost", "its reader breaks"])
def test_the_end_of_a_connection_that_was_replaced_is_no_end(tmp_path: Path, fails: str) -> None:
    """The session took its client for gone, which was there, and waited for it without a slot."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.stall()
            await talk(peer, 2)
            again = server.come_back(*peer.way_back)
            await again.greeted()
            if fails == "it is lost":
                peer.vanish()
            elif fails == "its reader breaks":
                peer.break_down()
            await talk(again, 60)
            again.send(close_frame())
            await again.over()

    on_virtual_time(body)
    happened = [type(event) for event in events(tmp_path)]
    assert not {ev.PeerGone, ev.SendFailed, ev.Rebuilt} & set(happened)
    replays(tmp_path)


@pytest.mark.parametrize("which", ["wrong", "old", "other", "ahead", "nothing", "mode"])
def test_a_wrong_token_harms_nothing(tmp_path: Path, which: str) -> None:
    """Somebody else got into a conversation, or broke it."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            stranger = await server.activate("audio", resumable=True)
            first = peer.way_back
            peer.vanish()
            peer = server.come_back(*peer.way_back)
            await peer.until(lambda: bool(peer.events))
            await talk(peer, 1)
            recording_id, token, seq, _ = peer.way_back
            tried: dict[str, Any] = {
                "wrong": (recording_id, "x" * 43, seq),
                "old": first,
                "other": (recording_id, stranger.events[0]["token"], seq),
                "ahead": (recording_id, token, seq + 1),
                "nothing": ("no-such-recording", token, seq),
                "mode": (recording_id, token, seq, "video"),
            }
            thief = server.come_back(*tried[which])
            await thief.over()
            assert thief.closed is not None
            assert thief.closed[0] == 1008
            assert not thief.events
            peer.send(append_frame())
            await peer.heard("listen", 2)
            assert not peer.is_over

    on_virtual_time(body)


def test_a_token_whose_successor_was_lost_is_still_right(tmp_path: Path) -> None:
    """A connection that broke before its greeting arrived left the client without a token."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            known = peer.way_back
            peer.vanish()
            for _ in range(3):
                again = server.come_back(*known)
                await again.until(lambda: bool(again.events))  # noqa: B023 - awaited here
                again.vanish()
                await anyio.sleep(1)
            again = server.come_back(*known)
            await talk(again, 2)
            again.send(close_frame())
            await again.over()
            assert frames(peer, again) == logged(tmp_path)

    on_virtual_time(body)
    replays(tmp_path)


def test_the_log_holds_no_token(tmp_path: Path) -> None:
    """Who can read a recording could take its session over."""
    tokens = list[str]()

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.vanish()
            again = server.come_back(*peer.way_back)
            again.send(close_frame())
            await again.over()
            tokens.extend([peer.events[0]["token"], again.events[0]["token"]])

    on_virtual_time(body)
    (path,) = tmp_path.glob("*")
    said = json.dumps([dict(it.fields) for it in read(path)], default=repr)
    assert tokens
    assert not [token for token in tokens if token in said]


def test_a_client_that_says_that_it_leaves_has_left(tmp_path: Path) -> None:
    """A client that closed its connection in order left a slot behind for a while."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio", resumable=True)
            peer.leave(1000)
            await server.quiet()
            assert server.server.slots.free == server.server.slots.slots

    on_virtual_time(body)


def test_who_stops_the_recording_cannot_come_back(tmp_path: Path) -> None:
    """A client was promised what only a recording can give."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = server.connect("audio", resumable=True)
            await peer.heard("session.queue_done")
            init: dict[str, Any] = {"system_prompt": "", "record": False}
            peer.send(json.dumps({"type": "session.init", "payload": init}))
            await peer.heard("session.created")
            told = peer.all("session.resumable")
            assert [one["token"] != "" for one in told] == [True, False]
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)


def test_who_comes_back_to_what_is_not_recorded_holds_nothing_up(tmp_path: Path) -> None:
    """A connection for which no frames could be read broke, and its session stayed."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = server.connect("audio", resumable=True)
            await peer.heard("session.queue_done")
            recording_id, token, *_ = peer.way_back
            init: dict[str, Any] = {"system_prompt": "", "record": False}
            peer.send(json.dumps({"type": "session.init", "payload": init}))
            await peer.heard("session.created")
            again = server.come_back(recording_id, token, -1)
            await again.over()
            await peer.over()
            with anyio.fail_after(20):
                await server.quiet()
            assert server.server.slots.free == server.server.slots.slots

    on_virtual_time(body)


def test_who_comes_back_as_the_session_ends_is_not_left_waiting(tmp_path: Path) -> None:
    """A connection that came while the session ended was neither greeted nor closed.

    After one step at least, the session has been told to close.
    """

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            for steps in range(1, 41):
                peer = await server.activate("audio", resumable=True)
                recording_id, token, seq, _ = peer.way_back
                peer.send(close_frame())
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                again = server.come_back(recording_id, token, seq)
                with anyio.fail_after(20):
                    await again.over()
                if again.closed is None or again.closed[0] != 1000:
                    assert again.closed in (None, (1011, "")), "it is broken off: come again"
                    again = server.come_back(recording_id, token, seq)
                    await again.over()
                assert again.kinds[-1] == "session.closed"

    on_virtual_time(body)


def test_who_does_not_ask_sees_nothing_of_it(tmp_path: Path) -> None:
    """Clients that know nothing of it got fields and frames that they do not know."""

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = await server.activate("audio")
            await talk(peer, 1)
            assert "session.resumable" not in peer.kinds
            assert peer.numbers == []
            peer.vanish()
            await server.quiet()

    on_virtual_time(body)
    assert [it.code for it in events(tmp_path) if isinstance(it, ev.PeerGone)] == [1006]


def test_an_answer_goes_on_while_nobody_listens(tmp_path: Path) -> None:
    """The answer of a chat was lost with the connection on which it was asked."""
    asked = {"messages": [{"role": "user", "content": "one two three four five six seven"}]}

    async def body() -> None:
        async with world(record_to=tmp_path) as server:
            peer = server.connect("chat", resumable=True)
            await peer.heard("session.queue_done")
            peer.send('{"type": "session.init", "payload": {}}')
            await peer.heard("session.created")
            peer.send(json.dumps({"type": "input.append", "input": asked}))
            await peer.heard("text")
            peer.vanish()
            await anyio.sleep(100)
            again = server.come_back(*peer.way_back)
            await again.heard("response.done")
            again.send(close_frame())
            await again.over()
            assert frames(peer, again) == logged(tmp_path)

    on_virtual_time(body)
    replays(tmp_path)


def test_the_oldest_of_too_many_ends(tmp_path: Path) -> None:
    """Clients that never come back filled the server."""

    async def body() -> None:
        async with world(record_to=tmp_path, detached_max=2) as server:
            peers = []
            for _ in range(4):
                peers.append(await server.activate("audio", resumable=True))
                peers[-1].vanish()
                await anyio.sleep(1)
            assert server.server.sessions == 2
            for peer in peers[2:]:
                again = server.come_back(*peer.way_back)
                assert (await again.greeted())["token"]
                again.send(close_frame())
            gone = server.come_back(*peers[0].way_back)
            await gone.over()
            assert gone.closed == (1000, "")

    on_virtual_time(body)
    replays(tmp_path, 4)


def test_the_page_shows_what_crosses() -> None:
    """Who writes a client by the page wrote one that the server refuses."""
    page = (Path(__file__).parents[3] / "docs" / "resume.md").read_text("utf-8")
    greeting, asked = (json.loads(it) for it in re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    assert json.loads(RESUMABLE.encode(RESUMABLE.parse(greeting))) == greeting
    assert json.loads(RESUME.encode(RESUME.parse(asked))) == asked
    told = set(re.findall(r"\b1\d{3}\b", re.findall(r"\| (1001.*?) \|", page)[0]))
    assert told == {str(code) for code in PASSING_CLOSE_CODES - {CLOSE_TRY_LATER}}


def test_a_session_that_slept_says_so() -> None:
    """Nobody saw in a recording why a session was silent."""
    path = Path(__file__).parents[3] / "fixtures/logs/v1-resume.session.zst"
    with LogReader(path) as log:
        inspection = inspect(log.head.fields, log)
    first, second = inspection.absences
    assert (first.slept, first.steps) == (False, 0)
    assert (second.slept, second.steps) == (True, 11)
    assert second.to_ns == second.at_ns + 45_000_000_000
    assert not inspection.moves


def test_a_session_that_broke_is_over_for_a_client_that_comes_late() -> None:
    """A client came back to a session that its model had ended, again and again."""

    async def body() -> None:
        ended = EndedSession(
            recording_id="rec-1",
            mode="chat",
            owner="",
            tokens=Tokens([hash_of("right")]),
            path=Path("nowhere"),
            frames_sent=1,
            frames_received=1,
            close=(CLOSE_INTERNAL_ERROR, "backend_error"),
            resume_s=600,
            ended_ns=0,
        )
        peer = Peer("chat")
        await ended.send_rest(peer.server_end, ResumeRequest(token="right", last_seq=0), stall_s=10)
        assert peer.kinds == ["session.resumable"]
        assert peer.closed == (CLOSE_NORMAL, "backend_error")
        assert CLOSE_NORMAL not in PASSING_CLOSE_CODES

    on_virtual_time(body)
