"""The HTTP side of the port: a small Starlette application, with Hypercorn under it.

`GET /health` says that the process is alive and whether its model speaks, `GET /ready` whether it
takes new sessions; further routes are passed in. An error is JSON: `{"error", "message"}`.
`HttpServer` serves an application on one connection, in HTTP/1 only: `Upgrade: h2c` is ignored,
HTTP/2 and WebSockets are refused (the listener takes WebSockets). It sends no ASGI lifespan events.

A slow client must not hold a handler up: `bounded` limits the time for a request's body. To the
application a late body looks like a client that has left; neither is an error of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, cast

import anyio
import h11
import orjson
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# -- the time for a request's body -----------------------------------------------------------------


BODY_WAIT_S: Final = 60.0
"""A voice's recording of 12 MiB over a line of 2 Mbit/s."""


def bounded(app: ASGIApp) -> ASGIApp:
    """Give each request's body `BODY_WAIT_S`, from its first read."""

    async def bounded_app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, _Body(receive).receive, send)
        except ClientDisconnect:
            return

    return bounded_app


class _Body:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._deadline_s: float | None = None
        self._is_whole = False

    async def receive(self) -> Message:
        """Wait for the next part of the body, or for a disconnect once it is whole."""
        if self._is_whole:
            return await self._receive()
        if self._deadline_s is None:
            self._deadline_s = anyio.current_time() + BODY_WAIT_S
        with anyio.CancelScope(deadline=self._deadline_s):
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        return {"type": "http.disconnect"}


# -- the application -------------------------------------------------------------------------------


HEAD_BYTES_MAX: Final = 16 * 1024
"""The head of a request; twice a browser's cookies and tokens."""
HTTP_IDLE_S: Final = 10.0
"""The wait of a kept connection for its next request, head included."""
HEADERS_MAX: Final = 100
"""Browsers send twenty; each costs time in later stages."""
HTTP_VERSIONS: Final = (b"1.0", b"1.1")

WEBSOCKET_PATHS: Final = ("/v1/realtime",)
"""A plain GET here is answered with 426, not 404."""


def error_body(code: str, message: str, **more: object) -> bytes:
    """The JSON body of an HTTP error: a name for programs, text without internals for people."""
    return orjson.dumps({"error": code, "message": message, **more})


def make_app(
    readiness: Callable[[], str],
    routes: Sequence[BaseRoute] = (),
    *,
    speech: Callable[[], str | None] = lambda: None,
    handlers: Mapping[type[Exception], Callable[..., Any]] = MappingProxyType({}),
) -> Starlette:
    """Make the ASGI application for `listener.serve`; `readiness` and `speech` must not block.

    Args:
        readiness: for each `/ready`: `ready`, or the reason of a 503 (`loading`, `full`,
            `draining`) that sends load balancers elsewhere.
        routes: further routes; those made here come first.
        speech: for each `/health`: `on`, or `off` for text only; None while unknown.
        handlers: answer the exceptions that routes raise on purpose.
    """

    async def health(_request: Request) -> Response:
        said = speech()
        return json_response({"status": "alive"} | ({} if said is None else {"speech": said}))

    async def ready(_request: Request) -> Response:
        status = readiness()
        return json_response(
            {"status": status}, HTTPStatus.OK if status == "ready" else _UNAVAILABLE
        )

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            *(Route(path, _upgrade_required) for path in WEBSOCKET_PATHS),
            *routes,
        ],
        exception_handlers={
            HTTPException: http_error,
            ClientDisconnect: _request_timeout,
            Exception: _internal_error,
            **handlers,
        },
    )
    app.router.redirect_slashes = False  # A redirect names our scheme; a proxy may have changed it.
    return app


_UNAVAILABLE: Final = HTTPStatus.SERVICE_UNAVAILABLE


def json_response(
    value: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with JSON; bytes are JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(body, status, headers, media_type="application/json")


async def _upgrade_required(_request: Request) -> Response:
    body = error_body("websocket_required", "this path speaks WebSocket (RFC 6455), version 13")
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    return json_response(body, HTTPStatus.UPGRADE_REQUIRED, headers)


async def http_error(_request: Request, error: Exception) -> Response:
    """Answer an `HTTPException` with its status and JSON."""
    assert isinstance(error, HTTPException)
    return json_response(body_of(error), error.status_code, error.headers)


def body_of(error: HTTPException) -> bytes:
    """The JSON body of an `HTTPException`."""
    status = HTTPStatus(error.status_code)
    message = error.detail.lower() if error.detail else status.phrase.lower()
    return error_body(status.name.lower(), message)


async def _request_timeout(_request: Request, _error: Exception) -> Response:
    """Answer a body that did not come in time; a client that left does not read it."""
    body = error_body("request_timeout", "the request's body did not come in time")
    return json_response(body, HTTPStatus.REQUEST_TIMEOUT)


async def _internal_error(_request: Request, _error: Exception) -> Response:
    body = error_body("internal_error", "the server failed to answer")
    return json_response(body, HTTPStatus.INTERNAL_SERVER_ERROR)


# -- the server of one connection ---------------------------------------------------------------


def header_tokens(request: h11.Request, name: bytes, *, lower: bool = False) -> tuple[str, ...]:
    """A header's comma-separated values, over all of its lines."""
    values = [value.decode("latin-1") for key, value in request.headers if key == name]
    tokens = (token.strip() for value in values for token in value.split(","))
    return tuple(token.lower() if lower else token for token in tokens if token)


def wants_websocket(request: h11.Request) -> bool:
    """Whether a request asks for a WebSocket (RFC 6455, 4.2.1)."""
    return (
        request.method == b"GET"
        and "upgrade" in header_tokens(request, b"connection", lower=True)
        and "websocket" in header_tokens(request, b"upgrade", lower=True)
    )


class HttpServer(TCPServer):
    """Hypercorn's server of one connection, pinned below 0.19: the class is internal to it.

    `stream` has a `socket` and `is_tls`, and is closed at the end. Its sends raise when it is
    closed, because Hypercorn shields them from cancellation.
    """

    def __init__(self, app: ASGIApp, stream: object) -> None:
        super().__init__(
            ASGIWrapper(cast(Any, bounded(app))),
            _config(),
            WorkerContext(None),
            {},
            cast(Any, stream),
        )

    async def run(self) -> None:
        """Serve until closed or idle; `OSError`: the peer left, or its request is unsupported."""
        stream = cast(Any, self.stream)
        local, peer = stream.socket.getsockname()[:2], stream.socket.getpeername()[:2]
        try:
            async with TaskGroup() as tasks:
                self._task_group = tasks
                http = _Http1(
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState({}),
                    stream.is_tls,
                    peer,
                    local,
                    self.protocol_send,
                )
                self.protocol = cast(Any, http)
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
                # Nothing more will come: do not wait for `HTTP_IDLE_S`.
                await self.context.terminated.set()
        finally:
            await self._close()


class _Http1(H11Protocol):
    """Hypercorn's HTTP/1 without its upgrades to HTTP/2 and WebSockets."""

    async def _check_protocol(self, event: h11.Request) -> None:
        if len(event.headers) > HEADERS_MAX:
            await self._send_error_response(431)
            raise ConnectionAbortedError("a client sent too many headers")
        if event.http_version not in HTTP_VERSIONS:
            await self._send_error_response(505)
            raise ConnectionAbortedError("a client changed to another version of HTTP")
        if wants_websocket(event):
            await self._send_error_response(400)
            raise ConnectionAbortedError("a client asked for a WebSocket on a used connection")
        names = {name for name, _ in event.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # A proxy may see another end of this request (RFC 9112, 6.3).
            await self._send_error_response(400)
            raise ConnectionAbortedError("a client told two lengths of a request")


def _config() -> Config:
    config = Config()
    config.errorlog = logging.getLogger("antiphon.http")
    config.accesslog = None
    config.include_server_header = False
    config.keep_alive_timeout = HTTP_IDLE_S
    config.h11_max_incomplete_size = HEAD_BYTES_MAX
    return config
