"""ASGI middleware: the gate for all HTTP requests, and headers for all answers.

- `/health` and `/ready` are open: an orchestrator has no key and uses another name.
- Public paths (the pages of `--static`) need no key; foreign pages and names are refused.
- All other requests pass the gate; `scope["principal"]` is the admitted client.
- Listed origins get CORS headers; preflights are answered here, because they carry no key. Other
  `OPTIONS` requests go to the application.
- `answer_denied` handles a `Denied` of the application. All denials are counted in `denials`.
- By default answers forbid type sniffing, framing, caching, and use by another site's page; the
  application's own headers win.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..net.http import LIVE_PATH, error_for, json_response
from .gate import AccessControl, Denials, Denied, Headers
from .keys import Key

CALLS_PATH: Final = "/v1/realtime/calls"
"""It takes a client secret as a WebSocket does, and so does `LIVE_PATH`."""
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Default headers of every answer."""
STRICT_TRANSPORT: Final = ("Strict-Transport-Security", "max-age=2592000")
"""A month: a returning browser insists on TLS, and a change back is possible."""
CORS_METHODS: Final = "GET, HEAD, POST, PUT, DELETE"
CORS_REQUEST_HEADERS: Final = (
    "Authorization, Content-Type, If-None-Match, If-Range, Last-Event-ID, Range"
)
CORS_ANSWER_HEADERS: Final = (
    "Accept-Ranges, Content-Disposition, Content-Range, ETag, Location, Retry-After"
)
CORS_AGE_S: Final = 600
"""The longest time that every browser caches a preflight's answer."""
PRINCIPAL: Final = "principal"
DENIALS: Final = "denials"


@attrs.define(eq=False)
class AccessMiddleware:
    """An application behind the gate; `secure`: TLS ends here; `is_public` paths need no key."""

    _app: ASGIApp
    _gate: AccessControl
    _secure: bool = attrs.field(default=False, kw_only=True)
    _is_public: Callable[[str], bool] = attrs.field(default=lambda _: False, kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the application refuses other scopes than HTTP."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [(key.decode("latin-1"), it.decode("latin-1")) for key, it in scope["headers"]]
        cors = self._cors(headers)
        defaults = (*HEADERS, STRICT_TRANSPORT) if self._secure else HEADERS

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _completed(message, defaults, cors)}
            await send(message)

        scope = {**scope, DENIALS: self._gate.denials}
        app = _preflight() if cors and _is_preflight(scope, headers) else self._app
        if app is self._app and scope["path"] not in OPEN_PATHS:
            try:
                scope = self._admitted(scope, headers)
            except Denied as denied:
                app = _answer(denied, scope)
        await app(scope, receive, send_on)

    def _admitted(self, scope: Scope, headers: Headers) -> Scope:
        """Admit a request, with its principal in the scope unless the path is public."""
        if self._is_public(scope["path"]):
            self._gate.admit_page(headers, secure=self._secure)
            return scope
        begins = scope["path"] in (CALLS_PATH, LIVE_PATH)
        principal = self._gate.admit_request(
            scope["method"], headers, secure=self._secure, begins=begins
        )
        return {**scope, PRINCIPAL: principal}

    def _cors(self, headers: Headers) -> tuple[tuple[str, str], ...]:
        """The CORS headers for a listed origin's page; none for others."""
        found = [value for name, value in headers if name == "origin"]
        if len(found) != 1 or not self._gate.origins.lists(found[0]):
            return ()
        return (
            ("Access-Control-Allow-Origin", found[0]),
            ("Access-Control-Expose-Headers", CORS_ANSWER_HEADERS),
        )


def principal_of(request: Request) -> Key:
    """The principal of a request that came through the middleware."""
    return cast(Key, request.scope[PRINCIPAL])


async def answer_denied(request: Request, error: Exception) -> Response:
    """Answer a `Denied` of an endpoint; for `exception_handlers={Denied: answer_denied}`."""
    assert isinstance(error, Denied)
    return _answer(error, request.scope)


def _answer(denied: Denied, scope: Scope) -> Response:
    peer, denials = scope.get("client"), cast(Denials, scope[DENIALS])
    host = "unknown address" if peer is None else peer[0]
    denials.note(denied.reason, peer=host, asked="HTTP", name=denied.name, flag=denied.flag)
    body = error_for(scope["path"], denied.status, denied.body)
    return json_response(body, denied.status, dict(denied.headers))


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    names = {name for name, _ in headers}
    return scope["method"] == "OPTIONS" and "access-control-request-method" in names


def _preflight() -> Response:
    allowed = {
        "Access-Control-Allow-Methods": CORS_METHODS,
        "Access-Control-Allow-Headers": CORS_REQUEST_HEADERS,
        "Access-Control-Max-Age": str(CORS_AGE_S),
    }
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=allowed)


def _completed(message: Message, defaults: Headers, cors: Headers) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
    names = {name.lower() for name, _ in headers}
    # A cached answer must not be shown to another origin.
    added = (*defaults, *cors, ("Vary", "Origin"))
    for name, value in added:
        key = name.lower().encode("ascii")
        if key == b"vary" or key not in names:
            headers.append((key, value.encode("latin-1")))
    return headers
