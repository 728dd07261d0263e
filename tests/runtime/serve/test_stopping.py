"""How a server comes to its end, by signals: how long it waits, and what its exit code says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from recorder.read.reader import LogReader
from runtime.model.backends.scripted import Call, ScriptedBackend
from runtime.net.connection import CLOSE_FLUSH_S
from runtime.serve.serve_command import EXIT_WAIT_S
from runtime.serve.serving import CUT_OFF_S, LAST_WAIT_S, Shutdown, shut_down, shutdown_wait_s
from runtime.session.journal import FIN_WAIT_S
from runtime.session.model_calls import RELEASE_WAIT_S
from runtime.settings.settings import Settings
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request
from tests.sessions.in_memory import init_frame, on_virtual_time, world

WAIT_S = 20


class DeafClient:
    """A client that reads what comes and answers no close, so that the server waits for it."""

    def __init__(self, url: str, connection: socket.socket) -> None:
        self._socket = connection
        self._protocol = ClientProtocol(parse_uri(f"{url}?mode=audio"))
        self._protocol.send_request(self._protocol.connect())
        self._send()
        while self._protocol.state is State.CONNECTING:
            self._receive()

    def say(self, text: str) -> None:
        """Send a message."""
        self._protocol.send_text(text.encode())
        self._send()

    def hear(self, kind: str) -> None:
        """Wait until the server has said so."""
        while f'"{kind}"'.encode() not in self._heard():
            self._receive()

    def _heard(self) -> bytes:
        frames = self._protocol.events_received()
        return b"".join(
            frame.data for frame in frames if getattr(frame, "opcode", None) is Opcode.TEXT
        )

    def _receive(self) -> None:
        data = self._socket.recv(65_536)
        assert data, "the server has hung up"
        self._protocol.receive_data(data)

    def _send(self) -> None:
        for data in self._protocol.data_to_send():
            self._socket.sendall(data)


@contextmanager
def deaf_client(server: LiveServer) -> Iterator[DeafClient]:
    """Open a session."""
    with socket.create_connection(server.address, timeout=WAIT_S) as connection:
        client = DeafClient(server.url, connection)
        client.hear("session.queue_done")
        client.say(init_frame(notices=True))
        client.hear("session.created")
        yield client


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_the_third_signal_waits_for_nobody_and_says_so(
    tmp_path: Path, last: signal.Signals
) -> None:
    """Whoever watches the server would take one that cut its sessions off for one that ended."""
    with live_server("--record", str(tmp_path), "--drain-s", "600") as server:
        with deaf_client(server) as client:
            server.process.send_signal(signal.SIGTERM)
            client.hear("session.going_away")
            server.process.send_signal(signal.SIGTERM)
            client.hear("session.closed")  # A close follows, and is not answered.
            server.process.send_signal(last)
            assert server.process.wait(WAIT_S) == 128 + last
        said = server.errors.read_text()
        assert f"{last.name}: 1 sessions are cut off" in said
        assert "Traceback" not in said
    (log,) = tmp_path.glob("*.zst")
    with LogReader(log) as reader:
        assert list(reader)[-1].kind == "fin"


@pytest.mark.parametrize(("cut_by", "code"), [("signal.SIGTERM", 143), ("None", 1)])
def test_a_call_that_hangs_at_the_end_is_not_waited_for(cut_by: str, code: int) -> None:
    """A server would hang for ever, or its exit code hide that it was cut off."""
    script = (
        "import signal, threading, runtime.serve.serve_command as command; "
        "command.EXIT_WAIT_S = 0.01; "
        f"command._exit_soon({cut_by}); threading.Event().wait({WAIT_S})"
    )
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=False, timeout=WAIT_S)
    assert done.returncode == code


@pytest.mark.parametrize(
    "settings",
    [{}, {"cleanup_wait_s": 1}, {"cleanup_wait_s": 300}, {"stall_s": 600}, {"drain_s": 0}],
    ids=str,
)
def test_sessions_are_waited_for_longer_than_they_may_take(settings: dict[str, int]) -> None:
    """A setting would promise a session time that the end of the server does not leave it."""
    made = Settings(**settings)  # type: ignore[arg-type]
    wait_s = shutdown_wait_s(made)
    assert wait_s > made.cleanup_wait_s + RELEASE_WAIT_S + FIN_WAIT_S
    assert wait_s > made.stall_s + CLOSE_FLUSH_S


def test_the_process_is_waited_for_longer_than_its_last_steps_take() -> None:
    """Logs would lack their end, or spans not be sent, where the disk or the network is slow."""
    assert EXIT_WAIT_S > CUT_OFF_S + LAST_WAIT_S


def test_a_call_that_takes_its_time_is_let_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who gives calls two minutes would have them cut off after 40 seconds."""
    took_s, stopped = 110.0, []

    async def body() -> None:
        backend = ScriptedBackend(opening=lambda _: Call(duration_s=took_s))
        settings = Settings(cleanup_wait_s=120, drain_s=0)
        async with world(backend, record_to=tmp_path, cleanup_wait_s=120) as server:
            peer = server.connect()
            await peer.heard("session.queue_done")
            peer.send(init_frame())
            await anyio.sleep(1)
            async with anyio.create_task_group() as tasks:
                await shut_down(server.server, Shutdown(settings, tasks, stopped.append))
            assert anyio.current_time() >= took_s
            assert server.server.slots.condemned == 0

    on_virtual_time(body)
    assert stopped == [None]
    assert "did not end" not in caplog.text


def test_who_ended_an_idle_server_over_http_is_known() -> None:
    """An operator would look for a crash, and not for the key that was used."""
    with live_server() as server:
        assert request(server.address, "/api/drain", method="POST", headers={}).status == 202
        assert server.process.wait(WAIT_S) == 0
        assert "drain over HTTP: 0 sessions" in server.errors.read_text()
