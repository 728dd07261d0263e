"""WebSocket servers that do what a test says, in a thread: for clients on any event loop."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simplejpeg
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve
from websockets.utils import accept_key

WAIT_S = 30
"""A test that waits longer hangs."""
JPEG = simplejpeg.encode_jpeg(np.zeros((32, 32, 3), np.uint8))
"""A black picture."""


@contextmanager
def peer(
    answer: Callable[[ServerConnection], object], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve WebSockets; `answer` holds each of them, and may let it close under its hands."""

    def handle(websocket: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            answer(websocket)

    with serve(
        handle, "127.0.0.1", 0, ssl=tls, ping_interval=None, compression=None, max_size=None
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            host, port = server.socket.getsockname()[:2]
            yield f"ws://{host}:{port}"
        finally:
            server.shutdown()
            thread.join(WAIT_S)


@contextmanager
def raw_peer(answer: Callable[[socket.socket], object], *, opens: bool = True) -> Iterator[str]:
    """Serve one TCP connection; `opens`: a WebSocket's handshake is answered before `answer`."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(WAIT_S)

    def handle() -> None:
        with contextlib.suppress(OSError), listening:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(WAIT_S)
                if opens:
                    _open(connection)
                answer(connection)

    thread = threading.Thread(target=handle)
    thread.start()
    try:
        host, port = listening.getsockname()
        yield f"ws://{host}:{port}"
    finally:
        thread.join(WAIT_S)
        listening.close()


def _open(connection: socket.socket) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    key = next(
        line.split(":", 1)[1].strip()
        for line in head.decode().splitlines()
        if line.lower().startswith("sec-websocket-key:")
    )
    answer = (
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n"
    )
    connection.sendall(answer.encode())


def reset(connection: socket.socket) -> None:
    """Drop a connection as a crashed machine does, without a goodbye of TCP."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- a server of 001, said by hand ---------------------------------------------------------------

METRICS = {"kv_cache_length": 10}


def say(websocket: ServerConnection, event: str, **fields: object) -> None:
    """Send an event."""
    websocket.send(json.dumps({"type": event, **fields}))


def hear(websocket: ServerConnection) -> dict[str, Any]:
    """Wait for an event."""
    body: dict[str, Any] = json.loads(websocket.recv(WAIT_S))
    return body


def create(websocket: ServerConnection, mode: str = "full_duplex") -> dict[str, Any]:
    """Let a client set up its session at once; returns its init."""
    say(websocket, "session.queue_done")
    init = hear(websocket)
    created = {"session_id": "sess_1", "mode": mode, "metrics": {}, "recording": "off"}
    say(websocket, "session.created", prompt_length=3, **created)
    return init


def report(websocket: ServerConnection, code: str, message: str = "no") -> None:
    """Send an `error`."""
    kind = "server_error" if code.endswith(("full", "busy", "inference_error")) else "client_error"
    say(websocket, "error", error={"code": code, "message": message, "type": kind})


def refuse(websocket: ServerConnection, code: str = "queue_full") -> None:
    """Have no place for a session."""
    report(websocket, code)
    websocket.close(1013, code)


def end(websocket: ServerConnection, reason: str) -> None:
    """End a session in order."""
    say(websocket, "session.closed", session_id="sess_1", reason=reason)
    websocket.close(1000)


def place(position: int) -> dict[str, Any]:
    """Say where in the queue."""
    where = {"estimated_wait_s": 5, "ticket_id": "ticket_1", "queue_length": 3}
    return {"position": position, **where}


def delta(websocket: ServerConnection, kind: str, **fields: object) -> None:
    """Send a piece of an answer."""
    names = {"session_id": "sess_1", "response_id": "resp_1", "input_id": "input_1"}
    say(websocket, "response.output.delta", kind=kind, metrics=METRICS, **names, **fields)


def done(websocket: ServerConnection, text: str, reason: str = "turn_end", **more: object) -> None:
    """End an answer."""
    names = {"session_id": "sess_1", "response_id": "resp_1", "input_id": "input_1"}
    metrics = {**METRICS, "input_tokens": 7, "generated_tokens": 2}
    fields = {**names, "text": text, "reason": reason, "metrics": metrics, **more}
    say(websocket, "response.done", **fields)
