"""The workers of a server over HTTP: which there are, and how they are exchanged. For `admin`.

| path | is |
|---|---|
| `GET /api/workers` | `{"workers": [...]}`, each with the fields of `WorkerStatus` |
| `POST /api/workers` | `{"address": "tcp:HOST:PORT"}` or `unix:PATH`: add a worker (201) |
| `POST /api/workers/{number}/drain` | lease no more of its slots, have its sessions move (202) |

Both changes are answered with the worker. A drained worker leaves the list when its last session
has left it; its place is not replaced. Workers can be added where the settings name addresses of
workers: a server without them connects nowhere. Addresses are as safe as those of the settings:
another machine needs the token, and TLS.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.errors import LocalProtocolError

from ..access.gate import require_admin
from ..access.middleware import principal_of
from ..model.backends.base import BackendError
from ..net.http import json_response
from ..session.server import Server
from ..settings.values import TEXT_CHARS_MAX
from ..slots.workers import UnknownWorkerError, WorkersDifferError, WorkerStatus
from .bodies import read_body, read_text

BODY_BYTES_MAX: Final = 16 * 1024
"""The longest address fits."""
NUMBER_DIGITS_MAX: Final = 9
"""A server does not count as many workers."""


class WorkersApi:
    """The routes of one server's workers; `server` returns None while the model loads."""

    def __init__(self, server: Callable[[], Server | None]) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [
            Route("/api/workers", self._list),
            Route("/api/workers", self._add, methods=["POST"]),
            Route("/api/workers/{number}/drain", self._drain, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        require_admin(principal_of(request))
        server = self._server()
        workers = () if server is None else server.workers.roster()
        return json_response({"workers": list(map(worker_json, workers))})

    async def _add(self, request: Request) -> Response:
        server = self._changed_by(request)
        address = read_text(await read_body(request, BODY_BYTES_MAX), "address", TEXT_CHARS_MAX)
        try:
            number = await server.workers.add(address)
        except (LocalProtocolError, WorkersDifferError) as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from None
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"address: {error}") from None
        except BackendError as error:
            raise HTTPException(HTTPStatus.BAD_GATEWAY, str(error)) from None
        server.admission.review()  # sessions may wait for its slots
        return _answer(server, number, HTTPStatus.CREATED)

    async def _drain(self, request: Request) -> Response:
        server, text = self._changed_by(request), request.path_params["number"]
        if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX):
            raise HTTPException(HTTPStatus.NOT_FOUND, "a worker is named by its number")
        try:
            server.workers.drain(int(text))
        except UnknownWorkerError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, str(error)) from None
        except LocalProtocolError as error:
            raise HTTPException(HTTPStatus.CONFLICT, str(error)) from None
        return _answer(server, int(text), HTTPStatus.ACCEPTED)

    def _changed_by(self, request: Request) -> Server:
        """The server, for a client that may change its workers."""
        require_admin(principal_of(request))
        server = self._server()
        if server is None:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the model is being loaded")
        return server


def worker_json(worker: WorkerStatus) -> dict[str, Any]:
    """One worker's status as plain values for JSON."""
    age_s = None if worker.age_s is None else round(worker.age_s, 1)
    return attrs.asdict(worker) | {"age_s": age_s}


def _answer(server: Server, number: int, status: HTTPStatus) -> Response:
    """Answer with one worker, before it can be gone: nothing was awaited since it was there."""
    (found,) = (worker for worker in server.workers.roster() if worker.number == number)
    return json_response(worker_json(found), status)
