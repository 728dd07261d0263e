"""A client that comes back to its session on another connection."""

from __future__ import annotations

from typing import Final

import anyio

from protocol.values.errors import CLOSE_POLICY, CLOSE_RESTART, FieldError, FrameError
from protocol.values.resuming import ComeBack
from protocol.wire.codec import parse_frame
from protocol.wire.dialects.resuming import RESUME, SESSION_RESUME

from ..net.websocket import WebSocket
from ..session.server import Server
from .routing import Route

HELLO_S: Final = 10.0
"""For the client's first message: it has all that it needs to send it at once."""
HELLO_BYTES_MAX: Final = 4096
"""It is a token and a number."""


async def come_back(server: Server, websocket: WebSocket, to: Route, owner: str) -> None:
    """Let a client go on with its session, or close with 1008 and the reason."""
    asked = await _asked(websocket)
    if isinstance(asked, ComeBack):
        refusal = await server.resume(websocket, to.resume, to.mode, owner, asked)
    else:
        refusal = asked
    if refusal:
        is_open = server.admission.state == "open"
        await websocket.close(CLOSE_POLICY if is_open else CLOSE_RESTART, refusal)


async def _asked(websocket: WebSocket) -> ComeBack | str:
    """Read the first message, or say what is wrong with it; `WebSocketClosed` if none comes."""
    frame = None
    with anyio.move_on_after(HELLO_S):
        frame = await websocket.receive()
    try:
        body = parse_frame(frame, HELLO_BYTES_MAX)
        if body.get("type") != SESSION_RESUME:
            return f"the first message here is {SESSION_RESUME}"
        asked: ComeBack = RESUME.parse(body)
    except FrameError as error:
        return error.reason
    except FieldError as error:
        return error.message
    return asked
