"""Marks: remarks on a running session, written into its log.

`POST /api/sessions/{recording_id}/marks` takes `{"text": "..."}` from the session's own key and
from `admin`. The answer is 201 with the mark's place, once it is in the log. A session that the key
may not see is a 404, like an unknown one; an ended session a 409.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.limits import NS_PER_MS

from ..access.middleware import principal_of
from ..net.http import json_response
from ..session.journal import MARKS_MAX, MarkRefusal, MarkRefused
from ..session.server import Server
from .bodies import read_body, read_text
from .places import RETRY_S
from .recordings import Recordings

TEXT_CHARS_MAX: Final = 1000
"""A remark, not a report."""
BODY_BYTES_MAX: Final = 16 * 1024
"""The longest text fits, even with each character escaped twice."""

_REFUSALS: Final[Mapping[MarkRefusal, tuple[HTTPStatus, str]]] = MappingProxyType(
    {
        "over": (HTTPStatus.CONFLICT, "this session is over"),
        "not_recorded": (HTTPStatus.CONFLICT, "this session is not recorded"),
        "too_many": (
            HTTPStatus.TOO_MANY_REQUESTS,
            f"this session has its {MARKS_MAX} marks already",
        ),
        "behind": (
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the recorder is behind, and it is not known whether the mark will be there",
        ),
    }
)


class Marks:
    """The route of one server's marks; `server` returns None while the model loads."""

    def __init__(self, server: Callable[[], Server | None], recordings: Recordings) -> None:
        self._server = server
        self._recordings = recordings

    def routes(self) -> list[Route]:
        """The route, for `http.make_app`."""
        return [Route("/api/sessions/{recording_id}/marks", self._add, methods=["POST"])]

    async def _add(self, request: Request) -> Response:
        principal, recording_id = principal_of(request), request.path_params["recording_id"]
        server = self._server()
        session = None if server is None else server.running(recording_id)
        if server is None or session is None or not principal.may_see(session.owner):
            await self._recordings.check(request)
            raise _refused("over")
        text = read_text(await read_body(request, BODY_BYTES_MAX), "text", TEXT_CHARS_MAX)
        said = {"text": text} | ({"by": principal.name} if principal.name else {})
        try:
            seq, at_ns = await server.mark(recording_id, said)
        except MarkRefused as refused:
            raise _refused(refused.reason) from None
        where = {"recording_id": recording_id, "seq": seq, "at_ms": round(at_ns / NS_PER_MS, 3)}
        return json_response(where, HTTPStatus.CREATED)


def _refused(reason: MarkRefusal) -> HTTPException:
    status, text = _REFUSALS[reason]
    return HTTPException(status, text, {"Retry-After": str(RETRY_S)} if reason == "behind" else {})
