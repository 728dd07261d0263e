"""Client secrets at a real server, made and used by OpenAI's own package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from openai import BadRequestError, NotFoundError, OpenAI, PermissionDeniedError
from openai.types.realtime.client_secret_create_response import ClientSecretCreateResponse
from pydantic import TypeAdapter
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request

KEY: Final = "antiphon_of_anna"
ANSWER: Final = TypeAdapter(ClientSecretCreateResponse)
SESSION: Final[dict[str, Any]] = {
    "type": "realtime",
    "model": "scripted",
    "instructions": "Answer like a pirate.",
    "audio": {"output": {"voice": "marin"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    anna = Key(name="anna", hash=hash_key(KEY), scope="admin", sessions_max=1)
    change_key_file(folder / "keys.toml", lambda _: (anna,), create=True)
    options = ("--keys", str(folder / "keys.toml"), "--record", str(folder / "recordings"))
    with live_server(*options) as live:
        yield live
        assert "Traceback" not in live.errors.read_text()


def client_of(server: LiveServer, key: str = KEY) -> OpenAI:
    host, port = server.address
    return OpenAI(api_key=key, base_url=f"http://{host}:{port}/v1", max_retries=0)


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_page_s_session_begins_with_its_settings(server: LiveServer, folder: Path) -> None:
    """A page gets the server's key to talk; or its instructions are the page's to choose."""
    with client_of(server) as client:
        made = client.realtime.client_secrets.create(
            session=SESSION, expires_after={"anchor": "created_at", "seconds": 60}
        )
    ANSWER.validate_python(made.model_dump(exclude_unset=True), strict=True)
    assert made.value.startswith("ek_")
    with client_of(server, made.value) as page, page.realtime.connect() as connection:
        created = connection.recv()
        assert created.type == "session.created"
        assert created.session.instructions == SESSION["instructions"]
        assert created.session.model == "scripted"
        offered = [Subprotocol("antiphon"), Subprotocol(f"antiphon.key.{KEY}")]
        with connect(
            f"{server.url}?mode=audio", subprotocols=offered
        ) as busy:  # its key may have one session
            assert json.loads(busy.recv())["error"]["code"] == "worker_busy"
    (log,) = (it for it in folder.rglob("*.session.zst") if SESSION["instructions"] in text_of(it))
    with LogReader(log) as items:
        assert replay(items).identical


def text_of(log: Path) -> str:
    with LogReader(log) as items:
        return str([*items])


def refused(server: LiveServer, secret: str, address: str) -> int:
    """Open a WebSocket in vain; its status."""
    host, port = server.address
    header = {"Authorization": f"Bearer {secret}"}
    with pytest.raises(InvalidStatus) as error:
        connect(f"ws://{host}:{port}{address}", additional_headers=header)
    return error.value.response.status_code


def test_a_secret_opens_only_what_it_is_for(server: LiveServer) -> None:
    """A page listens to other sessions of its key, or reads them, or makes secrets for ever."""
    with client_of(server) as client:
        secret = client.realtime.client_secrets.create(session=SESSION).value
        plain = client.realtime.client_secrets.create().value
    for address in (
        *("/v1/realtime?mode=audio", "/v1/live/sessions", "/v1/realtime?model=other"),
        *("/v1/realtime?intent=transcription", "/v1/realtime?model=scripted&resumable=1"),
    ):
        assert refused(server, secret, address) == 403, address
    for text in (secret, plain):
        assert refused(server, text, "/v1/live/sessions/x/attach") == 403
        assert refused(server, text, "/v1/live/sessions/x/fork") == 403
        for path in ("/api/recordings", "/status", "/v1/models"):
            assert request(server.address, path, key=text, headers={}).status == 403
        with client_of(server, text) as page, pytest.raises(PermissionDeniedError):
            page.realtime.client_secrets.create()
    other = plain[:-1] + ("A" if plain[-1] != "A" else "B")
    assert refused(server, other, "/v1/live/sessions") == 401


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_one_without_settings_begins_a_session_of_any_api(server: LiveServer) -> None:
    """The package makes no secret for the Live API, and a page of it needs the key."""
    with client_of(server) as client:
        secret = client.realtime.client_secrets.create().value
    with client_of(server, secret) as page, page.live.connect() as connection:
        connection.send({"type": "session.start", "session": {"model": "scripted"}})
        assert connection.recv().type in ("info", "session.started")


def test_what_cannot_be_in_a_secret_is_named(server: LiveServer) -> None:
    """A page's first session fails, far from the program that made the secret."""
    with client_of(server) as client:
        make: Any = client.realtime.client_secrets.create
        for session, param in (
            ({"type": "realtime", "instructions": 1}, "session.instructions"),
            ({"type": "other"}, "session.type"),
            ({"type": "realtime", "colour": 1}, "session.colour"),
            ({"type": "realtime", "instructions": "a" * 6_000}, "session"),
        ):
            with pytest.raises(BadRequestError) as error:
                make(session=session)
            assert error.value.param == param
        for seconds in (9, 7_201):
            with pytest.raises(BadRequestError) as error:
                make(expires_after={"anchor": "created_at", "seconds": seconds})
            assert error.value.param == "expires_after.seconds"
        with pytest.raises(NotFoundError) as missing:
            make(session={"type": "realtime", "model": "gpt-realtime"})
        assert (missing.value.code, missing.value.param) == ("model_not_found", "session.model")


def test_the_console_keeps_one_in_place_of_the_key(server: LiveServer) -> None:
    """The page's storage has a key that is valid for ever."""
    answer = request(server.address, "/api/console", method="POST", key=KEY, headers={})
    secret = answer.said["value"]
    facts = request(server.address, "/api/console", key=secret, headers={}).said
    assert facts["key"] == {"is_needed": True, "name": "anna", "is_admin": True}
    again = request(server.address, "/api/console", method="POST", key=secret, headers={})
    assert again.status == 403
