"""Forks of live sessions over real sockets: how they begin, go on, and what their logs hold."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import pytest
from click.testing import CliRunner
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import antiphon
from protocol.values import events as ev
from recorder.format.format import Record, Unreadable, recording_id_of
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader
from recorder.repair import verify
from recorder.write.files import is_held
from replay.rerun.environment import Loading
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from runtime.cli import main
from runtime.session.peer import hash_of
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S
from tests.sessions.in_memory import init_frame
from tests.sessions.outliving import seconds_of_speech

SECONDS: Final = 8
"""Of the parent."""
AT: Final = 5
RATE: Final = {"audio": {"format": {"type": "audio/pcm", "rate": 16_000}}}


@attrs.frozen
class Place:
    """A server, and its folder of recordings."""

    server: LiveServer
    folder: Path
    model: str

    @contextmanager
    def parent(self, **more: Any) -> Iterator[tuple[ClientConnection, str]]:
        """Have a session that has begun, with its id."""
        with self.connect("live/sessions") as it:
            start(it, model=self.model, **RATE, **more)
            yield it, until(it, "session.started")["session"]["id"]

    @contextmanager
    def fork(
        self, name: str, query: str = "", **session: Any
    ) -> Iterator[tuple[ClientConnection, dict[str, Any]]]:
        """Have a fork that has begun, with what it was told of its session."""
        with self.connect(f"live/sessions/{name}/fork{query}") as it:
            start(it, **session)
            yield it, until(it, "session.started")["session"]

    def connect(self, path: str) -> ClientConnection:
        """Open a WebSocket."""
        host, port = self.server.address
        return connect(f"ws://{host}:{port}/v1/{path}", compression=None)

    def status_of(self, path: str) -> tuple[int, str]:
        """The answer to a client whose handshake is refused."""
        with pytest.raises(InvalidStatus) as refused:
            self.connect(path)
        body = json.loads(refused.value.response.body)
        return refused.value.response.status_code, body["message"]

    def refused(self, name: str, query: str = "") -> tuple[str, str, int]:
        """The code and the words with which a fork is refused, and the close."""
        with self.connect(f"live/sessions/{name}/fork{query}") as it:
            return refusal(it)

    def log_of(self, session_id: str) -> Path:
        """The log of a session."""
        for path in self.folder.glob("*.zst"):
            with suppress(Unreadable), LogReader(path) as reader:  # a fork's may just begin
                if reader.head.fields["session_id"] == session_id:
                    return path
        raise AssertionError(session_id)


def start(socket: ClientConnection, **session: Any) -> None:
    """Begin a session."""
    socket.send(json.dumps({"type": "session.start", "session": session}))


def until(socket: ClientConnection, kind: str) -> Any:
    """Wait for an event of a type; what comes before is lost."""
    while (event := json.loads(socket.recv(timeout=WAIT_S)))["type"] != kind:
        assert event["type"] != "error", event
    return event


def sounds() -> list[str]:
    """The seconds that a user says: PCM16 in base64, at 16 kHz."""
    floats = [np.frombuffer(second, "<f4") for second in seconds_of_speech()]
    return [base64.b64encode((it * 32767).astype("<i2").tobytes()).decode() for it in floats]


def say(socket: ClientConnection, seconds: list[str]) -> list[tuple[str, str]]:
    """Say seconds one by one; the text and the sound of each answer."""
    heard = []
    for second in seconds:
        socket.send(json.dumps({"type": "session.input_audio.append", "audio": second}))
        text = ""
        while (event := json.loads(socket.recv(timeout=WAIT_S)))["type"] != (
            "session.output_audio.delta"
        ):
            text += event.get("delta", "") if "transcript" in event["type"] else ""
        heard.append((text, event["delta"]))
    return heard


def leave(socket: ClientConnection) -> None:
    """End a session, and see that it ended."""
    socket.send('{"type": "session.close"}')
    until(socket, "session.closed")
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=WAIT_S)


def wait_until_closed(log: Path) -> None:
    """Wait until its server is done with a log: the client is told of the end before that."""
    give_up = time.monotonic() + WAIT_S
    while is_held(log):
        assert time.monotonic() < give_up, "the log is still written"
        time.sleep(0.02)


def refusal(socket: ClientConnection) -> tuple[str, str, int]:
    """The code and the words of a refusal, and the close."""
    error = json.loads(socket.recv(timeout=WAIT_S))
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    return error["error"]["code"], error["error"]["message"], closed.value.rcvd.code


def events_of(log: Path) -> list[ev.Event]:
    """The events of a log."""
    with LogReader(log) as reader:
        items = [it for it in reader if isinstance(it, Record) and it.kind in EVENT_KINDS]
    return [event_of(it.fields, it.at_ns) for it in items]


def results_of(log: Path) -> list[ev.UnitDone]:
    """The results of a log's units, without what was measured."""
    return [it for it in events_of(log) if isinstance(it, ev.UnitDone)]


def states_of(log: Path) -> list[tuple[Any, ...]]:
    """What the model decided and was fed in each unit, and its context after it."""
    return [
        (it.result.decided_ids, it.result.codec_ids, it.result.fed_ids, it.result.kv_length,
         it.result.input_hash, it.result.logits_hash, it.result.pcm)
        for it in results_of(log)
    ]  # fmt: skip


def check_log(log: Path) -> None:
    """See that a log is whole and replays, without the model and with it."""
    until_s = time.monotonic() + WAIT_S
    while verify(log).state != "finished":
        assert time.monotonic() < until_s
        time.sleep(0.05)
    with LogReader(log) as reader:
        report = replay(reader)
    assert report.identical, report
    with LogReader(log) as reader:
        full = asyncio.run(replay_fully(reader.head.fields, reader, load=Loading.load))
    assert full.identical, full
    assert full.compared


@contextmanager
def serving(folder: Path, *options: str, model: str = "scripted") -> Iterator[Place]:
    """Serve a model, and see that the server broke nowhere."""
    with live_server("--record", str(folder), *options, model=model) as server:
        yield Place(server, folder, model)
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture(scope="module", params=["scripted", "tiny"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Serve a model."""
    folder = tmp_path_factory.mktemp("recordings")
    with serving(folder, "--slots", "2", model=request.param) as place:
        yield place


def test_a_fork_goes_on_as_its_parent_did(place: Place) -> None:
    """A fork would be another conversation: the model forgot it, or draws other words."""
    said = sounds()
    with place.parent() as (parent, name):
        told = say(parent, said[:SECONDS])
        leave(parent)
    with place.fork(name, f"?at={AT}") as (fork, session):
        assert session["id"] != name
        assert session["audio"]["format"] == RATE["audio"]["format"]
        again = say(fork, said[AT:SECONDS])
        leave(fork)
    assert again == told[AT:]
    log = place.log_of(session["id"])
    assert states_of(log) == states_of(place.log_of(name))
    check_log(log)
    with LogReader(log) as reader:
        parent_of = reader.head.fields["parent"]
    assert isinstance(parent_of, dict)
    assert parent_of["recording"] == recording_id_of(place.log_of(name))
    assert parent_of["unit"] == AT


def hear(socket: ClientConnection, seconds: list[bytes]) -> None:
    """Say seconds in `realtime`, and hear each answered."""
    for number, second in enumerate(seconds):
        sound = {"audio": base64.b64encode(second).decode()}
        body = {"type": "input.append", "input": sound, "input_id": f"in_{number}"}
        socket.send(json.dumps(body))
        while until(socket, "response.output.delta")["input_id"] != body["input_id"]:
            pass


def test_a_session_of_realtime_has_forks(place: Place) -> None:
    """What a person talked with the console could not be gone on with."""
    said = seconds_of_speech()
    with place.connect("realtime?mode=video") as parent:
        parent.send(init_frame())
        name = until(parent, "session.created")["recording_id"]
        hear(parent, said[:SECONDS])
        leave(parent)
    with place.connect(f"realtime?mode=video&fork={name}&at={AT}") as fork:
        for more in ({"system_prompt": "x"}, {"config": {"top_k": 3}}):
            fork.send(json.dumps({"type": "session.init", "payload": more}))
            while (error := json.loads(fork.recv(timeout=WAIT_S)))["type"] != "error":
                pass
            assert "a fork keeps the prompt" in error["error"]["message"]
        fork.send('{"type": "session.init", "payload": {}}')
        created = until(fork, "session.created")
        hear(fork, said[AT:SECONDS])
        leave(fork)
    assert created["recording_id"] != name
    check_log(log := place.folder / f"{created['recording_id']}.session.zst")
    assert states_of(log) == states_of(place.folder / f"{name}.session.zst")


def test_a_fork_of_a_running_session_is_another_one(place: Place) -> None:
    """The session itself would stop or change, or its fork end with it."""
    said = sounds()
    with place.parent() as (parent, name):
        told = say(parent, said[:4])
        with place.fork(name) as (fork, session):
            told += say(parent, said[4:6])
            again = say(fork, said[4:6])
            leave(parent)
            place.log_of(name).unlink()
            with place.fork(session["id"]) as (second, other):  # a fork of a fork
                again += say(second, said[6:7])
                leave(second)
            say(fork, said[6:7])
            leave(fork)
    assert again[:2] == told[4:]
    for it in (session, other):
        check_log(place.log_of(it["id"]))
    assert states_of(place.log_of(other["id"])) == states_of(place.log_of(session["id"]))


def test_a_fork_begins_after_any_unit(place: Place) -> None:
    """Only the end of a recording could be talked on from."""
    said = sounds()
    with place.parent(instructions="Be brief.") as (parent, name):
        told = say(parent, said[:4])
        leave(parent)
    for at in (0, 1, 4):
        with place.fork(name, f"?at={at}") as (fork, session):
            again = say(fork, said[at:4])
            leave(fork)
        assert session["instructions"] == "Be brief."
        assert again == told[at:]
        check_log(place.log_of(session["id"]))


def test_a_recording_that_ends_amid_a_unit_is_forked_before_it(tmp_path: Path) -> None:
    """The default would be a unit whose answer no client heard, or none."""
    said = sounds()
    with serving(tmp_path) as place:
        with place.parent() as (parent, name):
            say(parent, said[:2])
            for second in said[2:4]:
                parent.send(json.dumps({"type": "session.input_audio.append", "audio": second}))
            leave(parent)
        check_log(place.log_of(name))
        units = sum(isinstance(it, ev.FinalizeDone) for it in events_of(place.log_of(name)))
        with place.fork(name) as (fork, session):
            leave(fork)
        check_log(log := place.log_of(session["id"]))
        assert len(results_of(log)) in (units, units + 1)


def test_a_fork_may_have_another_format(place: Place) -> None:
    """A telephone could not go on with what a browser began."""
    with place.parent() as (parent, name):
        say(parent, sounds()[:3])
        leave(parent)
    law = {"type": "audio/pcmu", "rate": 8000}
    with place.fork(name, audio={"format": law}) as (fork, session):
        assert session["audio"]["format"] == law
        ((_, sound),) = say(fork, [base64.b64encode(b"\xff" * 8000).decode()])
        assert len(base64.b64decode(sound)) == 8000
        leave(fork)
    check_log(place.log_of(session["id"]))


def test_what_cannot_be_forked_is_refused_by_its_reason(tmp_path: Path) -> None:
    """A client would wait for a session, or hold a slot, that can never be right."""
    with serving(tmp_path, "--slots", "1") as place:
        with place.parent() as (parent, name):
            say(parent, sounds()[:3])
            leave(parent)
        log = place.log_of(name)
        wait_until_closed(log)
        assert place.status_of("live/sessions/sess_0123456789ab/fork")[0] == 404
        for at in ("-1", "x", "1.0", "", "1&at=2", "9" * 10):
            found = place.status_of(f"live/sessions/{name}/fork?at={at}")
            assert found == (400, "at is the number of a unit, from 0")
        code, text, close = place.refused(name, "?at=4")
        assert (code, close) == ("invalid_payload", 1000)
        assert text == "at: no unit ends before unit 4, the last one that does is before 3"
        data = log.read_bytes()
        log.write_bytes(data[: len(data) // 3] + b"\0" * 64 + data[len(data) // 3 + 64 :])
        assert place.refused(name)[:2] == (
            "unsupported",
            "this recording cannot be forked: it is damaged",
        )
        log.write_bytes(data)
        redacted = tmp_path / "redacted.session.zst"
        ran = CliRunner().invoke(
            main, ["recordings", "redact", str(log), "--output", str(redacted)]
        )
        assert ran.exit_code == 0, ran.output
        assert "it is redacted" in place.refused("redacted")[1]
        host, port = place.server.address
        with connect(f"ws://{host}:{port}/v1/realtime?mode=audio") as other:
            other.send(init_frame())
            recording = until(other, "session.created")["recording_id"]
            assert "one of realtime" in place.refused(recording)[1]
        with place.connect(f"realtime?mode=audio&fork={name}") as other:
            assert "one of live" in refusal(other)[1]
        openai = ("model=scripted&fork=x", "intent=transcription&fork=x")
        for query in ("mode=chat&fork=x", "mode=audio&fork=", "mode=audio&fork=x&at=y", *openai):
            assert place.status_of(f"realtime?{query}")[0] == 400
        assert place.status_of("realtime?mode=audio&fork=rec-0")[0] == 404
        assert len(list(tmp_path.glob("*.zst"))) == 3, "a fork that was refused left a log"
        with place.fork(name) as (fork, _):
            leave(fork)


def test_a_client_that_leaves_before_its_fork_is_refused_is_no_error(tmp_path: Path) -> None:
    """Anyone could fill the server's log with tracebacks."""
    with serving(tmp_path, "--resumable") as place:
        with place.parent() as (parent, name):
            say(parent, sounds()[:2])
            leave(parent)
        for _ in range(5):
            it = place.connect(f"live/sessions/{name}/fork?at=9&resumable=1")
            reset = struct.pack("ii", 1, 0)
            with suppress(OSError):  # the refusal was faster
                it.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            it.close_socket()
        assert place.refused(name, "?at=9")[0] == "invalid_payload"


def test_a_client_that_leaves_before_its_fork_is_set_up_leaves_no_log(tmp_path: Path) -> None:
    """Each connection would cost the disk as much as an hour of sound."""
    with serving(tmp_path, "--slots", "1") as place:
        with place.parent() as (parent, name):
            say(parent, sounds()[:2])
            with place.connect(f"live/sessions/{name}/fork") as waits:
                assert json.loads(waits.recv(timeout=WAIT_S))["code"] == "session_queued"
            leave(parent)
        with place.connect(f"live/sessions/{name}/fork?at=1"):
            pass
        until_s = time.monotonic() + WAIT_S
        while list(tmp_path.glob("*.zst")) != [place.log_of(name)]:
            assert time.monotonic() < until_s, "the log of a fork that never was is left"
            time.sleep(0.02)


def test_only_its_format_and_what_is_delegated_may_change(tmp_path: Path) -> None:
    """A client would take other instructions for being in force."""
    with serving(tmp_path) as place, place.parent() as (parent, name):
        say(parent, sounds()[:2])
        with place.connect(f"live/sessions/{name}/fork") as fork:
            for session, told in (
                ({"instructions": "x"}, "$.session.instructions: unknown field"),
                ({"model": "other"}, "$.session.model: there is no model 'other' here"),
                ({"store": False}, "$.session.store"),
                ({"audio": {"format": {"type": "audio/pcm", "rate": 8000}}}, "8000 Hz"),
            ):
                start(fork, **session)
                while (error := json.loads(fork.recv(timeout=WAIT_S)))["type"] != "error":
                    assert error["type"] == "info"
                assert told in error["error"]["message"]
            start(fork, model="scripted", audio={"format": {"rate": 24_000}})
            format_ = until(fork, "session.started")["session"]["audio"]["format"]
            assert format_ == {"type": "audio/pcm", "rate": 24_000}


def test_a_fork_waits_for_its_turn_like_any_session(tmp_path: Path) -> None:
    """Forks would go before those who wait, or overrun the queue."""
    options = ("--slots", "1", "--queue-max", "1")
    with serving(tmp_path, *options) as place, place.parent() as (parent, name):
        say(parent, sounds()[:2])
        with place.connect(f"live/sessions/{name}/fork") as fork:
            start(fork)
            assert json.loads(fork.recv(timeout=WAIT_S))["code"] == "session_queued"
            logs = len(list(tmp_path.glob("*.zst")))
            code, _, close = place.refused(name)
            assert (code, close) == ("queue_full", 1013)
            assert len(list(tmp_path.glob("*.zst"))) == logs
            leave(parent)
            assert until(fork, "session.started")["session"]["id"] != name
            leave(fork)
        host, port = place.server.address
        with urllib.request.urlopen(f"http://{host}:{port}/metrics") as metrics:
            assert b'antiphon_sessions_forked_total{mode="audio"} 1.0' in metrics.read()
        assert "warning" not in place.server.errors.read_text(), (
            "a session that moved lost its worker"
        )


def test_an_attached_client_hears_only_the_fork(tmp_path: Path) -> None:
    """It would be told that a session started which is another one, or twice."""
    with serving(tmp_path) as place, place.parent() as (parent, name):
        say(parent, sounds()[:3])
        with place.fork(name) as (fork, session):
            say(fork, sounds()[3:4])
            with place.connect(f"live/sessions/{session['id']}/attach") as attached:
                first = json.loads(attached.recv(timeout=WAIT_S))
                say(fork, sounds()[4:5])
                second = until(attached, "session.output_audio.delta")
                leave(fork)
                told = [json.loads(it) for it in attached]
    assert first["type"] == "session.started"
    assert first["session"] == session
    assert (second["start_ms"], second["end_ms"]) == (4000, 5000)
    assert not any(it["type"] == "session.started" for it in told)


def test_a_fork_outlives_its_server(tmp_path: Path) -> None:
    """What was forked would be lost with the server, as its parent was not."""
    said = sounds()
    with serving(tmp_path, "--resumable", model="tiny") as place:
        with place.parent() as (parent, name):
            told = say(parent, said[:SECONDS])
            leave(parent)
        with place.connect(f"live/sessions/{name}/fork?at={AT}&resumable=1") as fork:
            hello = until(fork, "session.resumable")
            start(fork)
            id_ = until(fork, "session.started")["session"]["id"]
            again = say(fork, said[AT : AT + 2])
            place.server.kill()
    with (
        serving(tmp_path, "--resumable", model="tiny") as place,
        place.connect(f"live/sessions?resume={hello['recording_id']}") as fork,
    ):
        last = hello["next_seq"] + 1
        come_back = {"type": "session.resume", "token": hello["token"], "last_seq": last}
        fork.send(json.dumps(come_back))
        assert until(fork, "session.resumable")["next_seq"] == last + 1
        missed = sum(1 for _, sound in again if until(fork, "session.output_audio.delta"))
        assert missed == 2
        again += say(fork, said[AT + 2 : SECONDS])
        leave(fork)
    assert again == told[AT:]
    check_log(place.log_of(id_))


def test_the_tokens_of_the_parent_are_not_those_of_the_fork(tmp_path: Path) -> None:
    """A client could come back into a session that is not its own."""
    with (
        serving(tmp_path, "--resumable") as place,
        place.connect("live/sessions?resumable=1") as parent,
    ):
        hello = until(parent, "session.resumable")
        start(parent, model="scripted")
        name = until(parent, "session.started")["session"]["id"]
        say(parent, [base64.b64encode(bytes(48_000)).decode()])
        for query in ("", "&resumable=1"):
            with place.connect(f"live/sessions/{name}/fork?at=1{query}") as fork:
                start(fork)
                id_ = until(fork, "session.started")["session"]["id"]
                log = place.log_of(id_)
                with place.connect(f"live/sessions?resume={recording_id_of(log)}") as other:
                    asked = {"type": "session.resume", "token": hello["token"], "last_seq": 0}
                    other.send(json.dumps(asked))
                    with pytest.raises(ConnectionClosed) as closed:
                        other.recv(timeout=WAIT_S)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1008
                text = " ".join(map(str, events_of(log)))
                assert hash_of(hello["token"]) not in text


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_the_clients_of_the_api_and_ours_fork_a_session(tmp_path: Path) -> None:
    """A client would need code of its own for what its package has."""
    silence = base64.b64encode(bytes(48_000)).decode()
    with serving(tmp_path) as place, place.parent() as (parent, name):
        say(parent, sounds()[:3])
        host, port = place.server.address
        client = OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none")
        with client.live.forks.connect(session_id=name, extra_query={"at": 2}) as fork:
            fork.session.start(session={"audio": {"format": {"type": "audio/pcm", "rate": 24_000}}})
            for event in fork:
                match event.type:
                    case "session.started":
                        assert event.session.id != name
                        fork.session.input_audio.append(audio=silence)
                    case "session.output_audio.delta":
                        fork.session.close()
                    case "session.closed":
                        assert event.usage.seconds == 3

        async def ours() -> Any:
            url = f"ws://{host}:{port}/v1/live/sessions/{name}/fork"
            async with antiphon.connect(
                url, mode="audio", dialect="live", model="scripted"
            ) as session:
                await session.append(np.zeros(16_000, "<f4"))
                return await anext(session)

        assert isinstance(asyncio.run(ours()), antiphon.Listen | antiphon.Speech)


def test_a_fork_is_shown_exported_and_redacted(tmp_path: Path) -> None:
    """A tool would take it for damaged, or show the words of its parent after a redaction."""
    with serving(tmp_path) as place, place.parent(instructions="secret") as (parent, name):
        say(parent, sounds()[:3])
        with place.fork(name) as (fork, session):
            say(fork, sounds()[3:5])
            leave(fork)
        check_log(log := place.log_of(session["id"]))
    redacted = tmp_path / "redacted.session.zst"
    for words in (
        ("recordings", "inspect", log),
        ("recordings", "view", log, "--output", tmp_path / "view.html"),
        ("export", log, "--output", tmp_path / "both.wav"),
        ("recordings", "redact", log, "--output", redacted),
        ("fork", log, "--at", 4, "--out", tmp_path),
        ("fork", log, "--at", 1, "--out", tmp_path),
    ):
        ran = CliRunner().invoke(main, [str(it) for it in words])
        assert ran.exit_code == 0, (words, ran.output)
    assert '"forked"' in (tmp_path / "view.html").read_text()
    with LogReader(redacted) as reader:
        assert replay(reader).identical
    assert "secret" not in " ".join(map(str, events_of(redacted)))
