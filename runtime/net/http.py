"""The HTTP side of the port: a small Starlette application, and one connection that it answers.

`GET /health` says that the process is alive and whether its model speaks, `GET /ready` whether it
takes new sessions; further routes are passed in. An error is JSON: `{"error", "message"}`.

h11 reads the requests of a connection, and an ASGI application answers them in turn:

- A head is bounded in bytes, in headers and in time. An invalid one is
  answered (400, 408, 431, 505) in JSON, and the connection closed (`Refused`).
- A body is read when the application asks for it, which is the back-pressure, and has
  `BODY_WAIT_S`. A late body looks to the application like a client that has left; neither is an
  error of ours. `Expect: 100-continue` is answered when the body is first asked for.
- Once the body is whole, `receive` waits for the client's leaving, up to a pipelined request.
- After the client has left, `send` does nothing: the application learns it from `receive`.
- The connection is kept for the next request unless it asks for the end, is idle for
  `HTTP_IDLE_S`, or has sent a body that the application did not read. Its last bytes get time.
- HTTP/1 only: `Upgrade: h2c` is ignored, HTTP/2 is refused, and so are WebSockets on a used
  connection. There are no lifespan events.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

import attrs
import h11
import orjson
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message

from .link import CARRIED_BYTES, Link

# -- the application -------------------------------------------------------------------------------


WEBSOCKET_PATHS: Final = ("/v1/realtime",)
"""A plain GET here is answered with 426, not 404."""


def error_body(code: str, message: str, **more: object) -> bytes:
    """The JSON body of an HTTP error: a name for programs, text without internals for people."""
    return orjson.dumps({"error": code, "message": message, **more})


LIVE_PATH: Final = "/v1/live/sessions"
OPENAI_PATHS: Final = ("/v1/chat/", "/v1/audio/", "/v1/responses", "/v1/realtime/")
"""Addresses of OpenAI's API: the errors of these have its form."""


class CodedError(HTTPException):
    """An error with a code of its own, and the name of the parameter that is wrong, if any."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = error_body(code, message, param=param)


def bad_request(code: str, message: str, param: str | None = None) -> CodedError:
    """Make the answer to a request that is wrong."""
    return CodedError(HTTPStatus.BAD_REQUEST, code, message, param)


def error_for(path: str, status: int, body: bytes) -> bytes:
    """Write the body of an error in the form of its address."""
    if not path.startswith(OPENAI_PATHS) and path != LIVE_PATH:
        return body
    fields = orjson.loads(body)
    kind = _KINDS.get(
        status, "server_error" if status >= _SERVER_ERRORS else "invalid_request_error"
    )
    error = {"message": fields["message"], "type": kind, "param": fields.get("param")}
    return orjson.dumps({"error": {**error, "code": fields["error"]}})


_SERVER_ERRORS: Final = 500
_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""OpenAI's types of errors, by status."""


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
        state = speech()
        return json_response({"status": "alive"} | ({} if state is None else {"speech": state}))

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


async def http_error(request: Request, error: Exception) -> Response:
    """Answer an `HTTPException` with its status and JSON."""
    assert isinstance(error, HTTPException)
    return error_response(request, body_of(error), error.status_code, error.headers)


def error_response(
    request: Request, body: bytes, status: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with an error, in the form of its address."""
    return json_response(error_for(request.scope["path"], status, body), status, headers)


_CODES: Final = {
    413: "request_entity_too_large",
    414: "request_uri_too_long",
    416: "requested_range_not_satisfiable",
    422: "unprocessable_entity",
}
"""Codes of errors that Python 3.13 has other names for."""


def body_of(error: HTTPException) -> bytes:
    """The JSON body of an `HTTPException`."""
    if isinstance(error, CodedError):
        return error.body
    status = HTTPStatus(error.status_code)
    message = error.detail.lower() if error.detail else status.phrase.lower()
    return error_body(_CODES.get(status, status.name.lower()), message)


async def _request_timeout(request: Request, _error: Exception) -> Response:
    """Answer a body that did not come in time; a client that left does not read it."""
    body = error_body("request_timeout", "the request's body did not come in time")
    return error_response(request, body, HTTPStatus.REQUEST_TIMEOUT)


async def _internal_error(request: Request, _error: Exception) -> Response:
    body = error_body("internal_error", "the server failed to answer")
    return error_response(request, body, HTTPStatus.INTERNAL_SERVER_ERROR)


# -- the head of a request -------------------------------------------------------------------------


HEAD_BYTES_MAX: Final = 16 * 1024
"""The head of a request; twice a browser's cookies and tokens."""
HEAD_READ_BYTES: Final = 4096
"""A head is read in few pieces, and exceeds its bound by less than one."""
HEADERS_MAX: Final = 100
"""Browsers send twenty; each costs time in later stages."""
HTTP_VERSIONS: Final = (b"1.0", b"1.1")
ANSWER_WAIT_S: Final = 2.0
"""The time for the last bytes to reach a client before the socket closes."""


class Refused(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """The request is answered at once, and the connection closed."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.body = error_body(code, message)
        self.headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())


async def read_head(
    link: Link, parser: h11.Connection, *, deadline_s: float, wait_s: float | None = None
) -> h11.Request | None:
    """Read a request's head; None if the peer left, or sent no byte.

    `deadline_s` is on the event loop's clock; `wait_s` is the limit behind it, for the answer to a
    late head. Without it, a late head gets none. Raises `Refused`.
    """
    with trio.move_on_at(deadline_s):
        try:
            while (event := parser.next_event()) is h11.NEED_DATA:
                if not (data := await link.receive_some(HEAD_READ_BYTES)):
                    return None
                parser.receive_data(data)
        except h11.RemoteProtocolError as error:
            text = "this is not an HTTP/1.1 request"
            raise Refused(error.error_status_hint, "bad_request", text) from None
        assert isinstance(event, h11.Request)
        _check(event)
        return event
    if wait_s is None or not parser.trailing_data[0]:
        return None
    raise Refused(408, "request_timeout", f"no request head within {wait_s:g} s")


def _check(request: h11.Request) -> None:
    if len(request.headers) > HEADERS_MAX:
        raise Refused(431, "bad_request", f"more than {HEADERS_MAX} headers")
    if request.http_version not in HTTP_VERSIONS:
        raise Refused(505, "http_version_not_supported", "HTTP/1.1 is spoken here")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        # A proxy may see another end of this request (RFC 9112, 6.3).
        raise Refused(400, "bad_request", "the request has two lengths")


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


# -- the last answer of a connection ---------------------------------------------------------------


async def answer(
    link: Link, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()
) -> None:
    """Send a JSON response and wait, a bounded time, until the client has taken it.

    `headers` are in addition to the type, the length and `Connection: close`.
    """
    response = h11.Response(
        status_code=status,
        reason=HTTPStatus(status).phrase,
        headers=[
            ("Connection", "close"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *headers,
        ],
    )
    writer = h11.Connection(h11.SERVER)
    parts = (writer.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage()))
    await send_last(link, b"".join(part or b"" for part in parts))


async def send_last(link: Link, data: bytes) -> None:
    """Send the last bytes of a connection and wait, a bounded time, until they are taken."""
    with trio.move_on_after(ANSWER_WAIT_S):
        await link.send_all(data)
        await link.linger()


# -- requests and answers --------------------------------------------------------------------------


BODY_WAIT_S: Final = 60.0
"""For a request's body: a voice's recording of 12 MiB over a line of 2 Mbit/s."""
HTTP_IDLE_S: Final = 10.0
"""The wait of a kept connection for its next request, head included."""
REQUESTS_MAX: Final = 1000
"""On one connection: then a load balancer may choose another server."""

_LOST: Final = (trio.BrokenResourceError, trio.ClosedResourceError)
_LOG: Final = logging.getLogger("antiphon.http")


async def serve_requests(
    app: ASGIApp, link: Link, parser: h11.Connection, request: h11.Request
) -> None:
    """Serve a request that `read_head` has read, and those that follow, to the connection's end.

    Raises `Refused` for a later request that is invalid or asks for a WebSocket.
    """
    for count in range(1, REQUESTS_MAX + 1):
        exchange = _Exchange(link, parser, request, is_last=count == REQUESTS_MAX)
        if not await exchange.run(app):
            break
        deadline_s = trio.current_time() + HTTP_IDLE_S
        if (found := await read_head(link, parser, deadline_s=deadline_s)) is None:
            break
        if wants_websocket(request := found):
            raise Refused(400, "bad_request", "a WebSocket needs a connection of its own")
    await send_last(link, b"")


@attrs.define(eq=False)
class _Exchange:
    """One request and its answer; `receive` and `send` are those of ASGI."""

    _link: Link
    _parser: h11.Connection
    _request: h11.Request
    _is_last: bool = attrs.field(kw_only=True)
    _body_deadline_s: float = math.inf
    _is_over: trio.Event = attrs.field(factory=trio.Event)

    async def run(self, app: ASGIApp) -> bool:
        """Let the application answer; an answer that it leaves out is a 500.

        Returns whether another request may follow: both sides are done, without reading more.
        """
        parser, scope = self._parser, self._scope()
        try:
            with suppress(ClientDisconnect):
                await app(scope, self.receive, self.send)
        except Exception:
            _LOG.exception("the application failed")
        if parser.our_state is h11.SEND_RESPONSE and not self._is_over.is_set():
            await self._end(500, error_body("internal_error", "the server failed to answer"))
        with suppress(h11.RemoteProtocolError):
            while parser.their_state is h11.SEND_BODY and parser.next_event() is not h11.NEED_DATA:
                pass
        if set(parser.states.values()) != {h11.DONE}:
            return False
        parser.start_next_cycle()
        return True

    def _scope(self) -> dict[str, object]:
        socket = self._link.socket
        path, _, query = self._request.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": self._request.http_version.decode("ascii"),
            "method": self._request.method.decode("ascii"),
            "scheme": "https" if self._link.is_tls else "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(self._request.headers),
            "client": socket.getpeername()[:2],
            "server": socket.getsockname()[:2],
        }

    async def receive(self) -> Message:
        """Wait for the next part of the body, or for a disconnect once it is whole."""
        if self._parser.their_state is h11.SEND_BODY and self._body_deadline_s == math.inf:
            self._body_deadline_s = trio.current_time() + BODY_WAIT_S
        event: object = None
        with trio.move_on_at(self._body_deadline_s):
            event = await self._next_event()
        if isinstance(event, h11.Data):
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        if isinstance(event, h11.EndOfMessage):
            self._body_deadline_s = math.inf
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def _next_event(self) -> object:
        """The next event of the request; None once the client has left, or the answer is over."""
        parser = self._parser
        try:
            while not self._is_over.is_set():
                event = parser.next_event()
                if event is h11.PAUSED:
                    await self._is_over.wait()
                elif event is not h11.NEED_DATA:
                    return event
                else:
                    if parser.they_are_waiting_for_100_continue:
                        await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                    parser.receive_data(await self._link.receive_some(CARRIED_BYTES))
        except h11.RemoteProtocolError as error:
            if parser.our_state is h11.SEND_RESPONSE:
                text = "the request's body is invalid, or not whole"
                await self._end(error.error_status_hint, error_body("bad_request", text))
        except _LOST:
            self._is_over.set()
        return None

    async def send(self, message: Message) -> None:
        """Send the head of the answer, or a part of its body; nothing once it is over."""
        if self._is_over.is_set():
            await trio.lowlevel.checkpoint()  # else a writer would keep the event loop from all
            return
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"date", formatdate(usegmt=True).encode())]
            if self._is_last or self._parser.they_are_waiting_for_100_continue:
                headers.append((b"connection", b"close"))
            await self._write(h11.Response(status_code=message["status"], headers=headers))
            return
        events: list[h11.Event] = []
        if message.get("body") and self._request.method != b"HEAD":
            events.append(h11.Data(data=message["body"]))
        if not message.get("more_body", False):
            events.append(h11.EndOfMessage())
        await self._write(*events)
        if self._parser.our_state is not h11.SEND_BODY:
            self._is_over.set()

    async def _write(self, *events: h11.Event) -> None:
        parts = [part for event in events if (part := self._parser.send(event))]
        try:
            await self._link.send_all(b"".join(parts))  # a single part is not copied
        except _LOST:
            self._is_over.set()
        except BaseException:
            self._link.abort()  # Half a part may be out: nothing can follow it.
            raise

    async def _end(self, status: int, body: bytes) -> None:
        """Answer for the application, as the last of the connection."""
        self._is_over.set()
        with suppress(*_LOST):
            await answer(self._link, status, body)
