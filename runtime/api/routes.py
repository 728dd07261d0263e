"""The server's status, live sessions and workers over HTTP, apart from `/health` and `/ready`.

| path | is | for |
|---|---|---|
| `GET /status` | the server's status | `admin` |
| `GET /metrics` | the metrics, for Prometheus | `admin` |
| `POST /api/drain` | end the server, as the first SIGTERM does (202) | `admin` |
| `GET /api/queue` | the waiting tickets | each key its own, `admin` all |
| `GET /api/queue/{ticket_id}` | one ticket | as above |
| `DELETE /api/queue/{ticket_id}` | cancel a ticket | as above |
| `POST /api/streaming/stop` | end the answers of `/ws/chat` that the same key, or address, waits for | each key |
| `GET /api/sessions` | the running sessions | as above |
| `GET /api/sessions/{recording_id}` | one session | as above |
| `GET /v1/models` | the names of the model, as OpenAI's API lists them | each key |
| `GET /v1/models/{name}` | one of them | each key |
| `GET /api/workers` | `{"workers": [...]}`, each with the fields of `WorkerStatus` | `admin` |
| `POST /api/workers` | `{"address": "tcp:HOST:PORT"}` or `unix:PATH`: add a worker (201) | `admin` |
| `POST /api/workers/{number}/drain` | lease no more of its slots, have its sessions move (202) | `admin` |

Without keys every client sees all. An entry that a key may not see is a 404, so that ids cannot be
probed. While the model loads there are no tickets and no sessions.

Both changes of workers are answered with the worker. A drained worker leaves the list when its last
session has left it; its place is not replaced. Workers can be added where the settings name
addresses of workers: a server without them connects nowhere. Addresses are as safe as those of the
settings: another machine needs the token, and TLS.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import attrs
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.errors import LocalProtocolError

from ..access.gate import principal_of, require_admin
from ..access.keys import Key
from ..model.backends.base import BackendError
from ..net.http import json_response
from ..net.limits import origin_of
from ..session.server import Server
from ..settings.settings import TEXT_CHARS_MAX
from ..slots.admission import TicketStatus
from ..slots.workers import UnknownWorkerError, WorkersDifferError, WorkerStatus
from ..telemetry.metrics import Metrics
from ..telemetry.watching import ServerStatus, SessionStatus, session_json, status_json
from .pages import queue_of
from .requests import NotOnThisGateway, read_body, read_text

# -- workers ---------------------------------------------------------------------------------------


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


# -- status, queue and sessions --------------------------------------------------------------------


NO_TICKET: Final = "no session waits with that ticket"


@attrs.define(eq=False)
class Api:
    """The routes of one server; `server` returns None while the model loads."""

    _server: Callable[[], Server | None]
    _status: Callable[[], ServerStatus]
    _metrics: Metrics
    _models: Callable[[], tuple[str, ...]]
    _drain: Callable[[Server, str], None]

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [
            Route("/status", self._show_status),
            Route("/metrics", self._show_metrics),
            Route("/api/drain", self._begin_drain, methods=["POST"]),
            Route("/api/queue", self._list_queue),
            Route("/api/queue/{ticket_id}", self._show_ticket),
            Route("/api/queue/{ticket_id}", self._cancel, methods=["DELETE"]),
            Route("/api/streaming/stop", self._cancel_answers, methods=["POST"]),
            Route("/api/sessions", self._list_sessions),
            Route("/api/sessions/{recording_id}", self._show_session),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
        ]

    # -- for operators --------------------------------------------------------------------------

    async def _show_status(self, request: Request) -> Response:
        require_admin(principal_of(request))
        return json_response(status_json(self._status()))

    async def _show_metrics(self, request: Request) -> Response:
        require_admin(principal_of(request))
        body, content_type = self._metrics.text(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def _begin_drain(self, request: Request) -> Response:
        principal, server = principal_of(request), self._server()
        require_admin(principal)
        if server is None:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the model is being loaded")
        if server.readiness == "draining":
            raise HTTPException(HTTPStatus.CONFLICT, "the server is already draining")
        asked_by = f"drain by key {principal.name}" if principal.name else "drain over HTTP"

        async def begin() -> None:
            self._drain(server, asked_by)

        response = json_response({"sessions": server.sessions}, HTTPStatus.ACCEPTED)
        response.background = BackgroundTask(begin)  # a server without sessions ends at once
        return response

    # -- for each key, its own ------------------------------------------------------------------

    async def _list_queue(self, request: Request) -> Response:
        principal = principal_of(request)
        tickets = [_ticket_json(ticket) for ticket in self._tickets(principal)]
        items = queue_of(tickets, datetime.now(UTC))
        tasks = status_json(self._status())["running_tasks"] if principal.is_admin else []
        server = self._server()
        length = 0 if server is None else server.admission.queue_length
        body = {"queue_length": length, "tickets": tickets}
        return json_response(body | {"items": items, "running_tasks": tasks})

    async def _show_ticket(self, request: Request) -> Response:
        for status in self._tickets(principal_of(request)):
            if status.ticket.ticket_id == request.path_params["ticket_id"]:
                return json_response(_ticket_json(status))
        raise HTTPException(HTTPStatus.NOT_FOUND, NO_TICKET)

    async def _cancel(self, request: Request) -> Response:
        ticket_id, server = request.path_params["ticket_id"], self._server()
        seen = (status.ticket.ticket_id for status in self._tickets(principal_of(request)))
        if server is None or ticket_id not in seen or not server.admission.cancel(ticket_id):
            raise HTTPException(HTTPStatus.NOT_FOUND, NO_TICKET)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _cancel_answers(self, request: Request) -> Response:
        host = request.client.host if request.client else ""
        party, server = principal_of(request).name or origin_of(host), self._server()
        stopped = 0 if server is None else server.cancel_answers(party)
        return json_response({"success": stopped > 0, "message": f"answers that end: {stopped}"})

    async def _list_sessions(self, request: Request) -> Response:
        sessions = [session_json(session) for session in self._sessions(principal_of(request))]
        return json_response({"sessions": sessions})

    async def _show_session(self, request: Request) -> Response:
        asked = request.path_params["recording_id"]
        for session in self._sessions(principal_of(request)):
            if asked in {session.recording_id, session.session_id}:
                return json_response(session_json(session))
        raise NotOnThisGateway(asked, "no session of that name runs")

    async def _list_models(self, _request: Request) -> Response:
        return json_response({"object": "list", "data": [*map(_model_json, self._models())]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._models():
            raise HTTPException(HTTPStatus.NOT_FOUND, "there is no model of that name here")
        return json_response(_model_json(name))

    # -- what a client may see ------------------------------------------------------------------

    def _tickets(self, principal: Key) -> list[TicketStatus]:
        server = self._server()
        if server is None:
            return []
        tickets = server.admission.tickets()
        return [status for status in tickets if principal.may_see(status.ticket.owner)]

    def _sessions(self, principal: Key) -> list[SessionStatus]:
        server = self._server()
        if server is None:
            return []
        sessions = server.roster(self._metrics.kv_tokens)
        return [session for session in sessions if principal.may_see(session.owner)]


def _model_json(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "antiphon"}


def _ticket_json(status: TicketStatus) -> dict[str, Any]:
    ticket, place = status.ticket, status.place
    return {
        "ticket_id": ticket.ticket_id,
        "position": place.position,
        "estimated_wait_s": place.estimated_wait_s,
        "waited_s": status.waited_s,
        "mode": ticket.mode,
        "owner": ticket.owner,
    }
