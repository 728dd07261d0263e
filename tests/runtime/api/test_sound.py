"""The sound of a recorded session over HTTP: what it is, and by which names it is found."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from protocol.values.records import session_id_of
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.export.formats import export
from replay.export.sound import STEREO_HZ
from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S, Answer, request
from tests.sessions.in_memory import append_frame, close_frame, init_frame

KEYS = {"anna": "antiphon_anna", "bert": "antiphon_bert", "root": "antiphon_root"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    """Serve with keys, and with one log that cannot be read."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = tuple(
        Key(name=name, hash=hash_key(key), scope="admin" if name == "root" else "use")
        for name, key in KEYS.items()
    )
    change_key_file(path, lambda _: keys, create=True)
    folder = tmp_path_factory.mktemp("recordings")
    Store(folder).path("junk").write_bytes(b"no log")
    with live_server("--keys", str(path), "--record", str(folder), "--slots", "4") as live:
        yield live, folder
        assert "Traceback" not in live.errors.read_text()


def ask(live: LiveServer, name: str, key: str = "anna", method: str = "GET") -> Answer:
    """Ask for the sound of a session."""
    path = f"/v1/live/sessions/{name}/content"
    return request(live.address, path, method=method, key=KEYS.get(key, ""), headers={})


def hear(websocket: Any, kind: str) -> dict[str, Any]:
    """Wait for an event of a type."""
    event: dict[str, Any] = {"type": ""}
    while kind not in (event["type"], event.get("kind")):
        event = json.loads(websocket.recv(timeout=WAIT_S))
    return event


def talk(live: LiveServer, *, units: int = 2, key: str = "anna") -> Iterator[str]:
    """Have a session: its recording's id, first while it runs, then when it is over."""
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    with connect(f"{live.url}?mode=audio", additional_headers=headers, compression=None) as it:
        hear(it, "session.queue_done")
        it.send(init_frame())
        recording_id = hear(it, "session.created")["recording_id"]
        for _ in range(units):
            it.send(append_frame())
            hear(it, "listen")
        yield recording_id
        it.send(close_frame())
        hear(it, "session.closed")
    path = f"/api/recordings/{recording_id}/live"
    request(live.address, path, key=KEYS["root"], headers={})  # It ends when the log has its end.
    yield recording_id


def seconds(body: bytes) -> float:
    """The length of a WAV of two voices."""
    with wave.open(BytesIO(body)) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, STEREO_HZ)
        return file.getnframes() / STEREO_HZ


def test_the_sound_is_that_of_the_export(server: tuple[LiveServer, Path], tmp_path: Path) -> None:
    """The operator and the client would hear different sessions."""
    live, folder = server
    running, over = talk(live)
    path = tmp_path / "a.wav"
    with LogReader(Store(folder).path(over)) as reader:
        export(reader.head.fields, reader, "wav", path)
    whole = ask(live, over)
    assert (whole.status, whole.body) == (200, path.read_bytes())
    assert whole.headers["content-type"] == "audio/wav"
    assert ask(live, session_id_of(over), "root").body == whole.body
    head = ask(live, over, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.body))
    assert head.headers["etag"] == whole.headers["etag"]
    assert seconds(whole.body) >= 2
    assert running == over


def test_a_session_that_runs_is_heard_so_far(server: tuple[LiveServer, Path]) -> None:
    """A client that waits for the end could not look into an hour of session."""
    live, _ = server
    session = talk(live)
    name = next(session)
    for _ in range(200):  # The log is written a moment later.
        if seconds((answer := ask(live, session_id_of(name))).body) >= 1:
            break
    else:
        raise AssertionError(answer)
    assert answer.status == 200
    next(session)


def test_what_is_another_s_or_unknown_is_not_there(server: tuple[LiveServer, Path]) -> None:
    """A client that guesses an id could hear another, or find out that there is one."""
    live, _ = server
    *_, name = talk(live)
    nothing = ask(live, "sess_000000000000", "bert")
    assert (nothing.status, nothing.said["error"]) == (404, "not_found")
    for theirs in (name, session_id_of(name)):
        answer = ask(live, theirs, "bert")
        assert (answer.status, answer.body) == (404, nothing.body)
        assert ask(live, theirs, "nobody").status == 401
        assert ask(live, theirs, "root").status == 200
    assert ask(live, "junk", "anna").status == 404
    unreadable = ask(live, "junk", "root")
    assert (unreadable.status, unreadable.said["error"]) == (422, "unprocessable_entity")
    assert ask(live, session_id_of("junk"), "root").status == 422


def test_a_server_that_records_nothing_has_no_sound() -> None:
    """A client would wait for a recording that was never made."""
    with live_server("--no-record") as live:
        answer = ask(live, "sess_000000000000", "nobody")
    assert (answer.status, answer.said["error"]) == (404, "not_found")
