"""A real server with keys: who sees what over HTTP, who may do what, and how it shuts down."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from runtime import RUN
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import append_frame, close_frame, init_frame

WAIT_S = 60


@attrs.frozen
class Keyed:
    """A server with one slot, and the keys to it."""

    server: LiveServer
    keys: dict[str, str]

    def ask(
        self, path: str, key: str = "", method: str = "GET", **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Ask over HTTP; returns status, body and headers (names in lower case)."""
        host, port = self.server.address
        if key:
            headers["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        url = f"http://{host}:{port}{path}"
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                body, found = answer.read(), answer
        except urllib.error.HTTPError as error:
            body, found = error.read(), error
        is_json = found.headers.get_content_type() == "application/json"
        said = json.loads(body) if is_json and body else body
        return found.status, said, {name.lower(): it for name, it in found.headers.items()}

    def connect(self, key: str, mode: str = "audio") -> ClientConnection:
        """Open a WebSocket."""
        return connect(
            f"{self.server.url}?mode={mode}",
            additional_headers={"Authorization": f"Bearer {self.keys[key]}"},
            compression=None,
        )


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """Serve with four keys: two clients, one who may little, and an operator."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    for name, options in {
        "anna": ("--sessions-max", "2"),
        "bert": (),
        "carl": ("--mode", "chat"),
        "root": ("--scope", "admin"),
    }.items():
        command = (*RUN, "keys", "add", name, "--file", str(path), *options)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        keys[name] = done.stdout.split()[-1]
    options = ("--no-record", "--slots", "1", "--keys", str(path), "--drain-s", "0", "-v")
    with live_server(*options) as server:
        yield Keyed(server, keys)
        said = server.errors.read_text()
        assert "Traceback" not in said
        assert not [name for name, key in keys.items() if key in said], "a key is in the log"


def hear(websocket: ClientConnection) -> dict[str, Any]:
    """Wait for the next event."""
    event: dict[str, Any] = json.loads(websocket.recv(timeout=WAIT_S))
    return event


@pytest.mark.parametrize("path", ["/status", "/metrics", "/api/queue", "/api/sessions", "/nothing"])
@pytest.mark.parametrize("key", ["", "wrong", "root "])
def test_without_a_key_there_is_nothing_but_health(keyed: Keyed, path: str, key: str) -> None:
    """Whoever finds the port could read who talks to it, or what paths there are."""
    status, body, headers = keyed.ask(path, key.strip() and f"x{key}")
    assert (status, body["error"]) == (401, "unauthorized")
    assert headers["www-authenticate"] == "Bearer"
    assert keyed.ask("/health")[0] == keyed.ask("/ready")[0] == 200


def test_figures_are_for_the_operator(keyed: Keyed) -> None:
    """A client could watch everybody else's sessions."""
    for path in ("/status", "/metrics"):
        assert keyed.ask(path, "anna")[0] == 403
    assert keyed.ask("/api/drain", "anna", method="POST")[0] == 403
    status, body, _ = keyed.ask("/status", "root")
    assert (status, body["readiness"], body["slots"]["slots"]) == (200, "ready", 1)
    status, body, headers = keyed.ask("/metrics", "root")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b'antiphon_slots{state="free"} 1.0' in body


def test_sessions_and_tickets_are_seen_by_their_own_key(keyed: Keyed) -> None:
    """A client could read another's session, or send it out of the queue."""
    with keyed.connect("anna") as talks, keyed.connect("bert") as waits:
        assert hear(talks)["type"] == "session.queue_done"
        ticket = hear(waits)["ticket_id"]
        (mine,) = keyed.ask("/api/sessions", "anna")[1]["sessions"]
        assert (mine["owner"], mine["state"], mine["mode"]) == ("anna", "CONNECTED", "audio")
        path = f"/api/sessions/{mine['recording_id']}"
        own, seen = (keyed.ask(path, key)[1] for key in ("anna", "root"))
        assert mine["age_s"] <= own.pop("age_s") <= seen.pop("age_s")
        assert own == seen
        assert keyed.ask(path, "bert")[0] == 404
        assert len(keyed.ask("/api/sessions", "root")[1]["sessions"]) == 2

        told = {"queue_length": 1, "tickets": [], "items": [], "running_tasks": []}
        assert keyed.ask("/api/queue", "anna")[1] == told
        (place,) = keyed.ask("/api/queue", "bert")[1]["tickets"]
        assert (place["ticket_id"], place["position"]) == (ticket, 1)
        assert keyed.ask(f"/api/queue/{ticket}", "anna")[0] == 404
        status, mine_too, _ = keyed.ask(f"/api/queue/{ticket}", "bert")
        assert (status, mine_too["ticket_id"], mine_too["position"]) == (200, ticket, 1)
        assert mine_too["estimated_wait_s"] >= 1
        told = keyed.ask("/status", "root")[1]
        assert (told["busy_workers"], told["idle_workers"], told["queue_length"]) == (1, 0, 1)
        assert [task["request_type"] for task in told["running_tasks"]] == ["audio"]
        assert keyed.ask(f"/api/queue/{ticket}", "anna", "DELETE")[0] == 404
        assert keyed.ask(f"/api/queue/{ticket}", "bert", "DELETE")[0] == 204
        with pytest.raises(ConnectionClosed) as closed:
            hear(waits)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.reason == "cancelled"
        assert keyed.ask(f"/api/queue/{ticket}", "bert", "DELETE")[0] == 404
        assert keyed.ask(f"/api/queue/{ticket}", "bert")[0] == 404


@pytest.mark.parametrize("name", ["..", "%2e%2e%2fetc%2fpasswd", "a" * 5000, "%00", "ticket_'--"])
def test_an_id_is_looked_up_and_nothing_else(keyed: Keyed, name: str) -> None:
    """A name with slashes and dots in it would become a path."""
    assert keyed.ask(f"/api/sessions/{name}", "root")[0] in {404, 400}
    for method in ("GET", "DELETE"):
        assert keyed.ask(f"/api/queue/{name}", "root", method)[0] in {404, 400, 405}


def test_a_key_has_its_limits(keyed: Keyed) -> None:
    """One client could take every place of the queue."""
    with keyed.connect("anna") as first, keyed.connect("anna") as second:
        hear(first)
        hear(second)
        with keyed.connect("anna") as third:
            assert hear(third)["error"]["code"] == "worker_busy"
            with pytest.raises(ConnectionClosed) as closed:
                hear(third)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "worker_busy")
        second.close()
        with keyed.connect("anna") as fourth:
            assert hear(fourth)["type"] == "session.queued"
    with pytest.raises(InvalidStatus) as refused, keyed.connect("carl"):
        pass
    assert refused.value.response.status_code == 403
    assert json.loads(refused.value.response.body or b"")["allowed"] == ["chat"]


def test_a_browser_brings_its_key_as_a_subprotocol(keyed: Keyed) -> None:
    """A page could not connect: it cannot set headers."""
    offered: list[Any] = ["antiphon", f"antiphon.key.{keyed.keys['bert']}"]
    with connect(keyed.server.url, subprotocols=offered, compression=None) as websocket:
        assert websocket.subprotocol == "antiphon"
        assert hear(websocket)["type"] in {"session.queued", "session.queue_done"}


def test_a_page_of_another_site_may_not_connect(keyed: Keyed) -> None:
    """A page that somebody visits would talk to the server in his network."""
    with pytest.raises(InvalidStatus) as refused:
        connect(
            keyed.server.url,
            origin="https://evil.example",  # type: ignore[arg-type]
            additional_headers={"Authorization": f"Bearer {keyed.keys['bert']}"},
        )
    assert refused.value.response.status_code == 403
    assert keyed.ask("/api/queue", "root", "DELETE", Origin="https://evil.example")[0] == 403


# -- shutting down ---------------------------------------------------------------------------------


@contextmanager
def created(server: LiveServer) -> Iterator[ClientConnection]:
    """Open a session."""
    with connect(f"{server.url}?mode=audio", compression=None) as websocket:
        assert hear(websocket)["type"] == "session.queue_done"
        websocket.send(init_frame(notices=True))
        assert hear(websocket)["type"] == "session.created"
        yield websocket


def test_a_session_may_finish_after_sigterm(tmp_path: Path) -> None:
    """A new version of the server would cut every call off."""
    with live_server("--record", str(tmp_path), "--drain-s", "60") as server:
        with created(server) as websocket:
            server.process.send_signal(signal.SIGTERM)
            assert hear(websocket) == {"type": "session.going_away", "seconds_left": 60}
            websocket.send(append_frame())
            assert hear(websocket)["kind"] == "listen"
            websocket.send(close_frame("done"))
            assert hear(websocket)["reason"] == "done"
        assert server.process.wait(WAIT_S) == 0
    assert len(list(tmp_path.glob("*.zst"))) == 1


def test_a_second_signal_ends_sessions_at_once_and_cleanly(tmp_path: Path) -> None:
    """An operator in a hurry would have to kill the server, and lose the ends of logs."""
    with live_server("--record", str(tmp_path), "--drain-s", "600") as server:
        with created(server) as websocket:
            server.process.send_signal(signal.SIGTERM)
            assert hear(websocket)["type"] == "session.going_away"
            server.process.send_signal(signal.SIGTERM)
            assert hear(websocket)["reason"] == "server_shutdown"
            with pytest.raises(ConnectionClosed) as closed:
                hear(websocket)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
        assert server.process.wait(WAIT_S) == 0
    (log,) = tmp_path.glob("*.zst")
    verified = subprocess.run(
        [*RUN, "recordings", "verify", str(log), "--json"], capture_output=True, check=True
    )
    assert json.loads(verified.stdout)["state"] == "finished"


def test_a_closed_terminal_ends_a_server_as_a_signal_does(tmp_path: Path) -> None:
    """Whoever closes the window would cut everybody off, and leave logs without an end."""
    with live_server("--record", str(tmp_path), "--drain-s", "0") as server:
        with created(server) as websocket:
            server.process.send_signal(signal.SIGHUP)
            assert hear(websocket)["reason"] == "server_shutdown"
        assert server.process.wait(WAIT_S) == 0
    (log,) = tmp_path.glob("*.zst")
    verified = subprocess.run(
        [*RUN, "recordings", "verify", str(log), "--json"], capture_output=True, check=True
    )
    assert json.loads(verified.stdout)["state"] == "finished"


def test_two_signals_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    """Ctrl-C that a supervisor sees too would break the server amid its sessions."""
    with live_server("--record", str(tmp_path), "--drain-s", "600") as server:
        with created(server) as websocket:
            server.process.send_signal(signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGCONT)
            kinds = [hear(websocket)["type"]]
            if kinds == ["session.going_away"]:
                kinds.append(hear(websocket)["type"])
            assert kinds[-1] == "session.closed"
        assert server.process.wait(WAIT_S) == 0
        assert "Traceback" not in server.errors.read_text()


def test_whoever_comes_while_the_server_drains_is_sent_away_without_a_session(
    tmp_path: Path,
) -> None:
    """A crowd that comes back would hold the server up, and leave a recording each."""
    with live_server("--record", str(tmp_path), "--drain-s", "600") as server:
        with created(server) as websocket:
            server.process.send_signal(signal.SIGTERM)
            assert hear(websocket)["type"] == "session.going_away"
            for path in ("?mode=audio", "?mode=chat"):
                with connect(f"{server.url}{path}", compression=None) as late:
                    assert hear(late)["error"]["code"] == "service_unavailable"
                    with pytest.raises(ConnectionClosed) as closed:
                        hear(late)
                    assert closed.value.rcvd is not None
                    assert closed.value.rcvd.code == 1013
            websocket.send(close_frame())
            assert hear(websocket)["type"] == "session.closed"
        assert server.process.wait(WAIT_S) == 0
    assert len(list(tmp_path.glob("*.zst"))) == 1


def test_json_logging_leaves_no_plain_line(tmp_path: Path) -> None:
    """What collects the lines of a container would stumble over those of the start and the end."""
    options = ("--host", "0.0.0.0", "--insecure", "--no-record", "--log-format", "json")
    worker = ("workers", "start", "--listen", f"unix:{tmp_path}/w", "--log-format", "json")
    for words in (("serve", "--port", "0", *options), worker):
        process = subprocess.Popen(
            (*RUN, *words, "--model", "scripted"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(json.loads(line))
                if said[-1]["event"] == "ready":
                    process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        events = [line["event"] for line in said]
        assert {"loading scripted", "ready", "stopped"} <= set(events)
        assert all({"timestamp", "level", "logger"} <= line.keys() for line in said)


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    """Every session would go unrecorded, and nobody would know before it matters."""
    command = (*RUN, "serve", "--port", "0", "--model", "scripted", "--record", "/proc/1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot record to /proc/1" in done.stderr
