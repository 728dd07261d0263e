"""Keys and origins at a real server, over real sockets: what clients get with and without a key."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server

KEYS = {"anna": "antiphon_anna", "bert": "antiphon_bert", "root": "antiphon_root"}
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with three keys and a page elsewhere that may use it."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = (
        Key(name="anna", hash=hash_key(KEYS["anna"]), modes=("audio",), sessions_max=1),
        Key(name="bert", hash=hash_key(KEYS["bert"])),
        Key(name="root", hash=hash_key(KEYS["root"]), scope="admin"),
    )
    change_key_file(folder / "keys.toml", lambda _: keys, create=True)
    record = str(folder / "recordings")
    flags = ("--keys", str(folder / "keys.toml"), "--origin", PAGE, "--record", record, "-v")
    with live_server(*flags) as live:
        yield live


def open_socket(server: LiveServer, mode: str = "audio", **options: Any) -> ClientConnection:
    """Open a WebSocket, with a key in the header if one is named."""
    name = options.pop("key", None)
    headers = {} if name is None else {"Authorization": f"Bearer {KEYS.get(name, name)}"}
    return connect(f"{server.url}?mode={mode}", additional_headers=headers, **options)


def refused(server: LiveServer, mode: str = "audio", **options: Any) -> tuple[int, str]:
    """Be refused; the status and the code."""
    with pytest.raises(InvalidStatus) as error:
        open_socket(server, mode, **options)
    response = error.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"]


def get(server: LiveServer, path: str, key: str | None = None) -> tuple[int, Any]:
    """Ask over HTTP; the status, and the headers."""
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}{path}")
    if key is not None:
        request.add_header("Authorization", f"Bearer {KEYS[key]}")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


def first(socket: ClientConnection) -> str:
    """The type of the first event."""
    return str(json.loads(socket.recv())["type"])


def test_a_key_in_the_header_opens(server: LiveServer) -> None:
    """No client could connect."""
    with open_socket(server, key="bert") as socket:
        assert first(socket) == "session.queue_done"
        assert socket.subprotocol is None


def test_a_browser_s_key_opens_and_is_not_said_back(server: LiveServer) -> None:
    """No page could connect; or a proxy's log would have its key."""
    offered = [Subprotocol("antiphon"), Subprotocol(f"antiphon.key.{KEYS['bert']}")]
    with open_socket(server, subprotocols=offered, origin=Origin(PAGE)) as socket:
        assert first(socket) == "session.queue_done"
        assert socket.subprotocol == "antiphon"


@pytest.mark.parametrize(
    "path",
    ["/v1/realtime?mode=audio", "/ws/chat", "/ws/duplex/a", "/nothing", "/v1/realtime?mode=x"],
)
def test_without_a_key_nothing_is_there(server: LiveServer, path: str) -> None:
    """Somebody without a key would have a session, or learn what there is."""
    host, port = server.address
    with pytest.raises(InvalidStatus) as error:
        connect(f"ws://{host}:{port}{path}")
    assert error.value.response.status_code == 401
    assert error.value.response.headers["WWW-Authenticate"] == "Bearer"


def test_a_wrong_key_and_a_wrong_mode_are_refused(server: LiveServer) -> None:
    """A key would open more than it is for."""
    assert refused(server, key="nobody") == (401, "unauthorized")
    assert refused(server, key="anna", mode="video") == (403, "mode_not_allowed")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://app.example"])
def test_a_page_from_elsewhere_is_refused(server: LiveServer, origin: str) -> None:
    """Any page could use the server through its visitor's browser."""
    assert refused(server, key="bert", origin=Origin(origin)) == (403, "origin_not_allowed")


def test_a_page_of_the_server_is_at_home(server: LiveServer) -> None:
    """The server's own page could not connect."""
    host, port = server.address
    with open_socket(server, key="bert", origin=Origin(f"http://{host}:{port}")) as socket:
        assert first(socket) == "session.queue_done"


def test_a_second_session_of_a_key_with_one_is_busy_and_a_third_is_served(
    server: LiveServer,
) -> None:
    """One client could take every slot; or one that hung up could never come back."""
    with open_socket(server, key="anna") as socket:
        assert first(socket) == "session.queue_done"
        with open_socket(server, key="anna") as second:
            assert json.loads(second.recv())["error"]["code"] == "worker_busy"
            with pytest.raises(ConnectionClosed):
                second.recv()
            assert second.close_code == 1013
        socket.send('{"type":"session.close"}')
        assert list(socket) == []  # It is over, and politely.
    for _ in range(100):  # The place is free once the server has cleaned up after the session.
        with open_socket(server, key="anna") as third:
            if first(third) == "session.queue_done":
                break
    else:
        pytest.fail("the place was not given back")


def test_http_needs_a_key_but_for_health(server: LiveServer) -> None:
    """Somebody without a key would see who talks to the server."""
    for path in ("/health", "/ready"):
        status, headers = get(server, path)
        assert status == 200
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/status", "/metrics", "/api/sessions", "/api/console", "/nothing"):
        assert get(server, path)[0] == 401
    assert get(server, "/status", key="root")[0] == 200
    assert get(server, "/api/sessions", key="anna")[0] == 200
    assert get(server, "/nothing", key="anna")[0] == 404


def test_an_operator_opens_the_status_in_a_browser(server: LiveServer) -> None:
    """It could not be opened by any once there are keys."""
    host, port = server.address
    password = base64.b64encode(f"ops:{KEYS['root']}".encode()).decode()
    connection = http.client.HTTPConnection(host, port)
    with closing(connection):
        for headers, status in (({}, 401), ({"Authorization": f"Basic {password}"}, 200)):
            connection.request("GET", "/status", headers={"Accept": "text/html"} | headers)
            with connection.getresponse() as answer:
                body = answer.read()
                assert answer.status == status
                asks = answer.headers.get("WWW-Authenticate", "")
                assert asks.startswith("Basic realm=") is (status == 401)
        assert json.loads(body)["readiness"] == "ready"
    basic = {"Authorization": f"Basic {password}"}
    with pytest.raises(InvalidStatus) as error:
        connect(f"{server.url}?mode=audio", additional_headers=basic)
    assert error.value.response.status_code == 401


def test_whoever_is_denied_shows_in_the_metrics_and_in_the_log(server: LiveServer) -> None:
    """An operator would not see that a client has an old key, or that somebody guesses."""
    before = denied(server)
    refused(server, key="antiphon_almost")
    refused(server)
    refused(server, key="anna", mode="video")
    refused(server, key="bert", origin=Origin("null"))
    assert get(server, "/status", key="bert")[0] == 403
    after = denied(server)
    rose = {reason: after[reason] - before[reason] for reason in after}
    reasons = {"wrong_key": 1, "no_key": 1, "mode": 1, "origin": 1, "scope": 1, "host": 0}
    assert rose == reasons
    log = Path(server.errors).read_text()
    assert "denied WebSocket to 127.0.0.1: wrong_key" in log
    assert "denied WebSocket to 127.0.0.1 (key anna): mode" in log
    assert "denied HTTP to 127.0.0.1 (key bert): scope" in log


def denied(server: LiveServer) -> dict[str, float]:
    """What the metrics say of requests that were denied, by reason."""
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}/metrics")
    request.add_header("Authorization", f"Bearer {KEYS['root']}")
    with urllib.request.urlopen(request) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    (family,) = (it for it in families if it.name == "antiphon_requests_denied")
    return {sample.labels["reason"]: sample.value for sample in family.samples}


def test_no_key_stands_in_the_log(server: LiveServer) -> None:
    """Whoever reads the log could use the server."""
    refused(server, key="antiphon_almost")
    with open_socket(server, key="bert") as socket:
        first(socket)
    log = Path(server.errors).read_text()
    assert log
    assert "antiphon_" not in log


def test_a_name_that_was_made_to_point_here_gets_nothing() -> None:
    """DNS rebinding: any page could use a server that only its own machine should reach."""
    with live_server("--no-record") as live:
        port = live.address[1]
        name = f"evil.example:{port}"
        with pytest.raises(InvalidStatus) as error:
            # The page's own origin is the host that it talks to; its name resolves to loopback.
            connect(
                f"ws://{name}/v1/realtime?mode=audio",
                address=live.address,
                origin=Origin(f"http://{name}"),
            )
        assert json.loads(error.value.response.body or b"")["error"] == "host_not_allowed"


def test_a_server_with_a_certificate_speaks_tls_alone(tmp_path: Path) -> None:
    """Keys would cross the network in the clear where the operator gave a certificate."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    flags = ("--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key"))
    with live_server("--no-record", *flags) as live:
        assert live.url.startswith("wss://127.0.0.1:")
        page = Origin(live.url.replace("wss", "https").removesuffix("/v1/realtime"))
        with connect(f"{live.url}?mode=audio", ssl=trusting, origin=page) as socket:
            assert first(socket) == "session.queue_done"
        with urllib.request.urlopen(f"{page}/health", context=trusting) as answer:
            assert answer.headers["Strict-Transport-Security"] == "max-age=2592000"
        plain = Origin(page.replace("https", "http"))
        with pytest.raises(InvalidStatus) as error:
            connect(f"{live.url}?mode=audio", ssl=trusting, origin=plain)
        assert error.value.response.status_code == 403


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ("https://App.example:8443", "origin; --origin https://app.example:8443 would allow it"),
        ("http://[::2]", "origin; --origin http://[::2] would allow it"),
        ("null", "origin"),
        ("https://a.example/page", "origin"),
    ],
)
def test_an_operator_is_told_how_to_welcome_a_page(origin: str, told: str) -> None:
    """A page that may not connect learns no reason, and nobody else would."""
    with live_server("--no-record") as server:

        def said() -> str:
            return server.errors.read_text().splitlines()[-1]

        refused(server, origin=Origin(origin))
        assert said().endswith(f"denied WebSocket to 127.0.0.1: {told}")
        url = server.url.replace("ws:", "http:").replace("/v1/realtime", "/status")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, headers={"Origin": origin}))
        assert said().endswith(f"denied HTTP to 127.0.0.1: {told}")
        assert "warning" in said().lower()
