"""A real server's memory, as the system sees it, after many clients have left it at once."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest

from runtime.net.limits import RECEIVING_BYTES_MAX
from tests.fairness.adversaries import ended_session
from tests.live.servers import live_server
from tests.soak.server import handshake

CLIENTS: Final = 480
SENT_BYTES: Final = 1_000_000
"""Of one message, which is small as messages go, and never ends; all are twice the room."""
MANY: Final = (
    *("--no-record", "--chats-max", str(CLIENTS), "--init-wait-s", "600"),
    *("--connections-per-address-max", str(CLIENTS + 10)),
    *("--connections-per-address-per-s-max", "10000"),
)
ROOM_MB: Final = RECEIVING_BYTES_MAX >> 20
SENDING_S: Final = 8.0
WAIT_S: Final = 30.0
STATUS: Final = Path("/proc/self/status")


def resident_mb(process: int) -> int:
    """What a process has in memory, in MiB."""
    text = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) // 1024


@pytest.mark.soak
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells what a process has in memory")
def test_what_clients_leave_behind_is_bounded_and_goes_back() -> None:
    """Filled once, a server would be the system's largest process until its end."""
    head = bytes([0x81, 0xFF]) + (SENT_BYTES + 1000).to_bytes(8, "big") + bytes(4)
    with live_server(*MANY) as server, ExitStack() as clients:
        rest_mb = resident_mb(server.process.pid)
        host, port = server.address
        unsent = dict[socket.socket, bytes]()
        for _ in range(CLIENTS):
            client = clients.enter_context(socket.create_connection((host, port), WAIT_S))
            client.sendall(handshake(f"{host}:{port}", "/v1/realtime?mode=chat"))
            assert client.recv(4096).startswith(b"HTTP/1.1 101")
            client.setblocking(False)
            unsent[client] = head + b"A" * SENT_BYTES
        until_s = time.monotonic() + SENDING_S
        while time.monotonic() < until_s:
            for client, data in unsent.items():
                with suppress(BlockingIOError):
                    unsent[client] = data[client.send(data) :]
            time.sleep(0.02)
        full_mb = resident_mb(server.process.pid)
        assert rest_mb + ROOM_MB / 2 < full_mb < rest_mb + 1.75 * ROOM_MB
        unsent.clear()
        clients.close()
        until_s = time.monotonic() + WAIT_S
        while (left_mb := resident_mb(server.process.pid)) > rest_mb + ROOM_MB / 2:
            assert time.monotonic() < until_s, f"{rest_mb}, {full_mb}, then {left_mb} MiB"
            time.sleep(0.2)


STALLED: Final = 200
STALLED_MB_MAX: Final = 25
"""Of 500 below 50."""


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells what a process has in memory")
def test_stalled_clients_of_an_ended_session_take_little_memory(tmp_path: Path) -> None:
    """500 that asked for its frames, and read none, took 2.2 GB."""
    with live_server("--record", str(tmp_path)) as server, ExitStack() as clients:
        name, token = asyncio.run(ended_session(server.url))
        rest_mb = resident_mb(server.process.pid)
        host, port = server.address
        hello = json.dumps({"type": "session.resume", "token": token, "last_seq": -1}).encode()
        assert len(hello) < 126
        for _ in range(STALLED):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(WAIT_S)
            client.connect((host, port))
            client.sendall(handshake(f"{host}:{port}", f"/v1/realtime?mode=audio&resume={name}"))
            assert client.recv(16).startswith(b"HTTP/1.1 101")
            client.sendall(bytes([0x81, 0x80 | len(hello)]) + bytes(4) + hello)
        peak_mb = 0
        for _ in range(10):
            time.sleep(0.2)
            peak_mb = max(peak_mb, resident_mb(server.process.pid))
        assert peak_mb < rest_mb + STALLED_MB_MAX
