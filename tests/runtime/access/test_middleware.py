"""HTTP behind the gate: what needs a key, what every answer bears, and what pages may read."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runtime.access.gate import (
    HEADERS,
    OPEN_PATHS,
    AccessMiddleware,
    Denied,
    answer_denied,
    open_gate,
    principal_of,
    require_admin,
)
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.net.http import make_app
from runtime.settings.settings import Settings

pytestmark = pytest.mark.anyio

KEYS = {"anna": "antiphon_anna", "root": "antiphon_root"}
PAGE = "https://app.example"
HOST = {"host": "127.0.0.1:8006"}


async def whoami(request: Request) -> Response:
    return JSONResponse({"name": principal_of(request).name, "method": request.method})


async def admins(request: Request) -> Response:
    require_admin(principal_of(request))
    return JSONResponse({})


async def page(_request: Request) -> Response:
    headers = {"Content-Security-Policy": "default-src 'self'", "cache-control": "max-age=60"}
    return HTMLResponse("<p>", headers=headers | {"Vary": "Accept"})


async def stream(_request: Request) -> Response:
    async def pieces() -> Any:
        for piece in (b"a", b"b"):
            yield piece

    return StreamingResponse(pieces())


async def broken(_request: Request) -> Response:
    raise ZeroDivisionError


def application() -> Starlette:
    """What is served: the server's own application with endpoints of a test."""
    routes = [
        Route("/whoami", whoami, methods=["GET", "DELETE", "OPTIONS"]),
        Route("/admins", admins),
        Route("/page", page),
        Route("/stream", stream),
        Route("/broken", broken),
    ]
    app = make_app(lambda: "ready", routes)
    app.add_exception_handler(Denied, answer_denied)
    return app


@attrs.frozen
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any, path: str, method: str = "GET", key: str | None = None, **headers: str
) -> Answer:
    """Send a request to the application, as the listener does."""
    sent: list[Any] = []
    bearing = {} if key is None else {"authorization": f"Bearer {key}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("192.0.2.7", 40_000),
        "headers": [
            (name.encode(), value.encode()) for name, value in (HOST | bearing | named).items()
        ],
    }

    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return requests.pop() if requests else await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    with suppress(ZeroDivisionError):  # Starlette answers 500 and raises on, for the log.
        await app(scope, receive, send)
    names = [name.decode() for name, _ in sent[0]["headers"]]
    assert len(set(names) - {"vary"}) == len([name for name in names if name != "vary"])
    merged: dict[str, str] = {}
    for name, value in sent[0]["headers"]:
        told = merged.get(name.decode())
        merged[name.decode()] = value.decode() if told is None else f"{told}, {value.decode()}"
    return Answer(sent[0]["status"], merged, b"".join(it.get("body", b"") for it in sent[1:]))


@pytest.fixture
def keyed(tmp_path: Path) -> AccessMiddleware:
    """The application behind keys, with a page elsewhere that may use it."""
    path = tmp_path / "keys.toml"
    anna = Key(name="anna", hash=hash_key(KEYS["anna"]))
    root = Key(name="root", hash=hash_key(KEYS["root"]), scope="admin")
    change_key_file(path, lambda _: (anna, root), create=True)
    return AccessMiddleware(application(), open_gate(Settings(keys=path, origins=(PAGE,))))


def unkeyed(secure: bool = False) -> AccessMiddleware:
    """The application for everybody."""
    return AccessMiddleware(application(), open_gate(Settings()), secure=secure)


async def test_nothing_but_health_is_served_without_a_key(keyed: AccessMiddleware) -> None:
    """Somebody without a key would see who talks to the server, or use it."""
    for path in OPEN_PATHS:
        assert (await ask(keyed, path)).status == 200
        assert (
            await ask(keyed, path, host="10.1.2.3", origin="https://evil.example")
        ).status == 200
    for path in ("/whoami", "/", "/nothing", "/v1/realtime", "/health/", "/ready/x", "//health"):
        answer = await ask(keyed, path)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"] == "unauthorized"
    for method in ("DELETE", "OPTIONS", "POST", "HEAD"):
        assert (await ask(keyed, "/whoami", method)).status == 401


async def test_a_key_is_somebody(keyed: AccessMiddleware) -> None:
    """An endpoint could not tell whose recordings to show."""
    for name, key in KEYS.items():
        assert (await ask(keyed, "/whoami", key=key)).json["name"] == name
    assert (await ask(keyed, "/nothing", key=KEYS["anna"])).status == 404
    assert (await ask(unkeyed(), "/whoami")).json["name"] == ""


async def test_an_endpoint_may_want_an_admin(keyed: AccessMiddleware) -> None:
    """A client could do what only an operator should."""
    assert (await ask(keyed, "/admins", key=KEYS["root"])).status == 200
    refused = await ask(keyed, "/admins", key=KEYS["anna"])
    assert (refused.status, refused.json["error"]) == (403, "scope_too_small")


async def test_whoever_is_denied_is_counted(
    keyed: AccessMiddleware, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator would not see who tries, nor that a client has an old key."""
    caplog.set_level(0)
    await ask(keyed, "/whoami")
    await ask(keyed, "/nothing", key="antiphon_almost")
    await ask(keyed, "/admins", key=KEYS["anna"])
    await ask(keyed, "/whoami", origin="https://evil.example", key=KEYS["anna"])
    await ask(keyed, "/whoami", key=KEYS["anna"])
    await ask(keyed, "/health")
    denied = {"no_key": 1, "wrong_key": 1, "scope": 1, "origin": 1}
    assert keyed._gate.denials.counts == denied
    assert "denied HTTP to 192.0.2.7 (key anna): scope" in caplog.messages
    assert "antiphon_a" not in caplog.text


async def test_a_browser_is_asked_for_a_password_where_it_shows_a_page(
    keyed: AccessMiddleware,
) -> None:
    """An operator would see an error and no way to say who he is."""
    asked = await ask(keyed, "/admins", accept="text/html")
    assert asked.status == 401
    assert asked.headers["www-authenticate"].startswith("Basic ")
    password = b64encode(f"ops:{KEYS['root']}".encode()).decode()
    shown = await ask(keyed, "/admins", accept="text/html", authorization=f"Basic {password}")
    assert shown.status == 200
    changes = await ask(keyed, "/whoami", "DELETE", authorization=f"Basic {password}")
    assert (changes.status, changes.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("path", ["/whoami", "/health", "/nothing", "/stream", "/broken"])
async def test_every_answer_tells_browsers_to_do_nothing_clever(path: str) -> None:
    """An answer could be framed, sniffed for a script, kept by a cache, or be a referrer."""
    answer = await ask(unkeyed(), path)
    assert answer.status == {"/nothing": 404, "/broken": 500}.get(path, 200)
    for name, value in HEADERS:
        assert answer.headers[name.lower()] == value
    assert "origin" in answer.headers["vary"].lower()
    assert "strict-transport-security" not in answer.headers


async def test_a_refusal_bears_the_same_headers(keyed: AccessMiddleware) -> None:
    """A refusal with a client's name in it could be read by a frame around it."""
    answer = await ask(keyed, "/whoami", origin="https://evil.example")
    assert (answer.status, answer.json["error"]) == (403, "origin_not_allowed")
    assert {name.lower() for name, _ in HEADERS} <= answer.headers.keys()


async def test_an_endpoint_s_own_headers_stand() -> None:
    """A page of the server's could not load its own style, or be cached."""
    answer = await ask(unkeyed(), "/page")
    assert answer.headers["content-security-policy"] == "default-src 'self'"
    assert answer.headers["cache-control"] == "max-age=60"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["vary"] == "Accept, Origin"


async def test_a_browser_is_told_to_keep_to_tls_under_tls_alone() -> None:
    """A server without TLS would lock browsers out of its whole host for a month."""
    answer = await ask(unkeyed(secure=True), "/whoami")
    assert answer.headers["strict-transport-security"] == "max-age=2592000"


async def test_a_stream_passes_through_piece_by_piece() -> None:
    """A download would be held in memory first."""
    assert (await ask(unkeyed(), "/stream")).body == b"ab"


async def test_a_listed_page_may_ask_and_read(keyed: AccessMiddleware) -> None:
    """An application elsewhere could not show its user's recordings."""
    preflight = await ask(
        keyed,
        "/whoami",
        "OPTIONS",
        origin=PAGE,
        access_control_request_method="DELETE",
        access_control_request_headers="authorization",
    )
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "DELETE" in preflight.headers["access-control-allow-methods"]
    assert "Authorization" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in preflight.headers
    answer = await ask(keyed, "/whoami", "DELETE", key=KEYS["anna"], origin=PAGE)
    assert answer.json == {"name": "anna", "method": "DELETE"}
    assert answer.headers["access-control-allow-origin"] == PAGE
    refused = await ask(keyed, "/whoami", origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://app.example"])
async def test_another_page_may_neither_ask_nor_read(keyed: AccessMiddleware, origin: str) -> None:
    """Any page could do what its visitor may."""
    preflight = await ask(
        keyed, "/whoami", "OPTIONS", origin=origin, access_control_request_method="DELETE"
    )
    answer = await ask(keyed, "/whoami", "DELETE", key=KEYS["anna"], origin=origin)
    for refused in (preflight, answer):
        assert refused.status == 403
        assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in (await ask(keyed, "/health", origin=origin)).headers


async def test_options_without_a_preflight_need_a_key(keyed: AccessMiddleware) -> None:
    """A request that only looks like a browser's question would reach an endpoint."""
    assert (await ask(keyed, "/whoami", "OPTIONS", origin=PAGE)).status == 401
    answer = await ask(keyed, "/whoami", "OPTIONS", key=KEYS["anna"], origin=PAGE)
    assert answer.json["method"] == "OPTIONS"


async def test_a_name_that_was_made_to_point_here_gets_nothing() -> None:
    """DNS rebinding: a page could read what a server on its visitor's machine serves."""
    answer = await ask(unkeyed(), "/whoami", host="evil.example:8006")
    assert (answer.status, answer.json["error"]) == (403, "host_not_allowed")


async def test_what_is_no_http_goes_on_untouched() -> None:
    """The application would not be told that the server starts."""
    seen: list[str] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        await anyio.lowlevel.checkpoint()
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    await AccessMiddleware(app, open_gate(Settings()))({"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]
