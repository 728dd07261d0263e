"""The HTTP side of the port: a small Starlette application; `http1` serves it.

`GET /health` says that the process is alive and whether its model speaks, `GET /ready` whether it
takes new sessions; further routes are passed in. An error is JSON: `{"error", "message"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

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
