"""The OpenAPI document of the site: it has the routes that there are, and what they answer."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route
from websockets.sync.client import ClientConnection, connect

from docs.site.openapi import ANSWERS, BODIES, QUERIES, openapi, requests
from runtime.net.http import WEBSOCKET_PATHS
from runtime.serve.gateway import Gateway
from runtime.settings.settings import Settings
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import WAIT_S, Answer, request
from tests.sessions.in_memory import init_frame

pytestmark = pytest.mark.slow

VOICE: Final = Path(__file__).parents[1] / "fixtures" / "speech" / "demo.wav"
NOT_ASKED: Final = {
    *("POST /api/workers", "POST /api/workers/{number}/drain", "POST /api/drain"),
    *("POST /v1/chat/completions", "POST /v1/audio/transcriptions"),
    *("POST /v1/realtime/calls", "POST /v1/live/sessions"),
}
"""The first two need workers, and answer with one, as the list does; the third ends the server; the
others need a slot (`tests/live/test_openai_http.py`), or a door (`test_webrtc.py`)."""
LAST: Final = (
    "DELETE /api/voices/{name}",
    "DELETE /api/queue/{ticket_id}",
    "GET /api/recordings/{recording_id}/live",
    "GET /api/recordings/{recording_id}/redacted",
    "GET /api/recordings/{recording_id}/replay",
    "POST /api/recordings/{recording_id}/marks",
    "GET /api/recordings/{recording_id}/marks",
    "DELETE /api/recordings/{recording_id}/marks/{number}",
    "DELETE /api/recordings/{recording_id}",
)
BY_HAND: Final = {"GET /web/{file}": "/web/antiphon.js"}


def served() -> set[str]:
    """The requests that the server's routes take."""
    app: Any = Gateway(Settings(record_to=Path("recordings"))).app()
    while not hasattr(app, "routes"):
        app = app._app  # the access middleware's
    found = set()
    for route in app.routes:
        assert isinstance(route, Route)
        if route.path in WEBSOCKET_PATHS:
            continue
        path = "/web/{file}" if route.path.startswith("/web/") else route.path
        path = path.replace(":path}", "}")
        found |= {f"{method} {path}" for method in (route.methods or set()) - {"HEAD"}}
    return found


def test_every_route_is_described() -> None:
    """A program that was generated from it would lack an address, or have one too many."""
    described = [name for name, _, _ in requests()]
    assert len(described) == len({*described})
    assert {*described} == {*ANSWERS} == served()
    assert {*BODIES} | {*QUERIES} <= {*ANSWERS}


def test_its_references_lead_somewhere() -> None:
    """A generator would stop at the first that does not; each schema is one."""
    told = openapi("1")
    text = json.dumps(told)
    schemas = told["components"]["schemas"]
    assert {*re.findall(r"#/components/schemas/(\w+)", text)} == {*schemas}
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    names = [it["operationId"] for path in told["paths"].values() for it in path.values()]
    assert len({*names}) == len(names)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a voice and one slot, which records."""
    folder = tmp_path_factory.mktemp("http")
    (folder / "voices").mkdir()
    shutil.copy(VOICE, folder / "voices" / "anna.wav")
    options = ("--voices", str(folder / "voices"), "--default-voice", "anna", "--slots", "1")
    with live_server("--record", str(folder / "recordings"), *options) as found:
        yield found


def hear(websocket: ClientConnection, kind: str) -> Any:
    """Wait for an event."""
    while (told := json.loads(websocket.recv(WAIT_S)))["type"] != kind:
        pass
    return told


def asked(server: LiveServer) -> Iterator[tuple[str, Answer]]:
    """Ask for all that the document has, of a session that runs and of one that waits."""
    url = f"{server.url}?mode=audio"
    with connect(url, compression=None) as talks, connect(url, compression=None) as waits:
        talks.send(init_frame())
        hear(talks, "session.created")
        hear(waits, "session.queued")
        tickets = request(server.address, "/api/queue", headers={}).said["tickets"]
        names = {"ticket_id": tickets[0]["ticket_id"], "name": "bert", "number": "1"}
        sessions = request(server.address, "/api/sessions", headers={}).said["sessions"]
        (running,) = (each for each in sessions if each["state"] == "ACTIVE")
        names["recording_id"] = running["recording_id"]
        bodies = {"POST /api/sessions/{recording_id}/marks": b'{"text": "here"}'}
        place = b'{"at_ms": 0, "end_ms": 0, "text": "here"}'
        bodies["POST /api/recordings/{recording_id}/marks"] = place
        bodies["PUT /api/voices/{name}"] = VOICE.read_bytes()
        bodies["POST /v1/realtime/client_secrets"] = b"{}"
        for name in (*sorted({*ANSWERS} - NOT_ASKED - {*LAST}), *LAST):
            if name == LAST[2]:
                talks.close()  # else it would never end
            method, path = name.split(" ")
            if path == "/v1/models/{name}":
                path = "/v1/models/scripted"
            path = BY_HAND.get(name, path).format_map(names)
            body = bodies.get(name)
            answer = request(server.address, path, method=method, body=body, headers={})
            give_up = time.monotonic() + WAIT_S
            while answer.status == HTTPStatus.CONFLICT and time.monotonic() < give_up:
                time.sleep(0.05)  # the recording's writer is about to let it go
                answer = request(server.address, path, method=method, body=body, headers={})
            yield name, answer


def test_a_server_answers_as_described(server: LiveServer) -> None:
    """A program that was generated from it would not read what the server sends."""
    told = openapi("1")
    for name, answer in asked(server):
        media, statuses = ANSWERS[name]
        assert str(answer.status) in statuses, (name, answer)
        if media != "application/json":
            kind = answer.headers.get("content-type", "").partition(";")[0]
            assert media in {"*/*", kind}, (name, kind)
            continue
        schema = {**statuses[str(answer.status)], "components": told["components"]}
        Draft202012Validator(schema).validate(answer.said)
    assert request(server.address, "/api/queue/none", headers={}).status == 404
