"""Marks: annotations of a session, in its log while it runs, and next to the log of one that has ended.

| path | is | for |
|---|---|---|
| `POST /api/sessions/{recording_id}/marks` | write `{"text": "..."}` into the log of a running session; 201 with the mark's place, once it is in the log | the session's own key and `admin` |
| `GET /api/recordings/{recording_id}/marks` | the marks next to the log, by their places; `damaged` counts lines that cannot be read | as above |
| `POST /api/recordings/{recording_id}/marks` | write `{"at_ms", "end_ms", "text"}` next to the log of an ended session; both times are the same for one moment (201) | as above |
| `DELETE /api/recordings/{recording_id}/marks/{number}` | remove a mark next to the log | its author and `admin` |

A session or recording that the key may not see is a 404, like an unknown one. A log that has ended
is never changed, so `POST /api/sessions/...` is then a 409; so is the other address while a session
runs.
"""  # noqa: E501 - a table

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, TypeVar

import anyio
import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.limits import MS_PER_S, NS_PER_MS
from protocol.wire.codec import Fields
from recorder.storage import marks
from recorder.storage.marks import MARKS_MAX as LATER_MARKS_MAX

from ..access.gate import require_admin
from ..access.keys import Key
from ..access.middleware import principal_of
from ..net.http import json_response
from ..session.journal import MARKS_MAX, MarkRefusal, MarkRefused
from ..session.server import Server
from .recordings import NO_RECORDING, Recordings
from .requests import RETRY_S, in_thread, read_body, read_fields, read_text

T = TypeVar("T")

BODY_BYTES_MAX: Final = 16 * 1024
"""The longest text fits, even with each character escaped twice."""
WRITING_MAX: Final = 2
"""Threads that write next to logs: one that waits for a file's lock leaves others to the server."""
NO_MARK: Final = "there is no such mark"

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
    """The routes of one server's marks; `server` returns None while the model loads."""

    def __init__(self, server: Callable[[], Server | None], recordings: Recordings) -> None:
        self._server = server
        self._recordings = recordings
        self._writing = anyio.CapacityLimiter(WRITING_MAX)

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        later = "/api/recordings/{recording_id}/marks"
        return [
            Route("/api/sessions/{recording_id}/marks", self._add, methods=["POST"]),
            Route(later, self._list),
            Route(later, self._write, methods=["POST"]),
            Route(f"{later}/{{number}}", self._remove, methods=["DELETE"]),
        ]

    # -- in a log -------------------------------------------------------------------------------

    async def _add(self, request: Request) -> Response:
        principal, recording_id = principal_of(request), request.path_params["recording_id"]
        server = self._server()
        session = None if server is None else server.running(recording_id)
        if server is None or session is None or not principal.may_see(session.owner):
            await self._recordings.check(request)
            raise _refused("over")
        text = read_text(await read_body(request, BODY_BYTES_MAX), "text", marks.TEXT_CHARS_MAX)
        fields = {"text": text} | ({"by": principal.name} if principal.name else {})
        try:
            seq, at_ns = await server.mark(recording_id, fields)
        except MarkRefused as refused:
            raise _refused(refused.reason) from None
        where = {"recording_id": recording_id, "seq": seq, "at_ms": round(at_ns / NS_PER_MS, 3)}
        return json_response(where, HTTPStatus.CREATED)

    # -- next to a log --------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        _, info = await self._recordings.found(request)
        found = await in_thread(partial(marks.read_marks, self._recordings.marks_path(info)))
        return _json({"marks": [*map(attrs.asdict, found.marks)], "damaged": found.damaged})

    async def _write(self, request: Request) -> Response:
        summary, info = await self._recordings.found(request)
        if summary.state == "open":
            text = "this session runs: write into its log, at /api/sessions/{recording_id}/marks"
            raise HTTPException(HTTPStatus.CONFLICT, text)
        fields = read_fields(await read_body(request, BODY_BYTES_MAX), _place_and_text)
        path, principal = self._recordings.marks_path(info), principal_of(request)
        made = await self._changed(principal, partial(marks.add_mark, path, **fields))
        if await self._recordings.find(info.recording_id, principal) is None:
            # It was removed meanwhile, and its marks go with it.
            await in_thread(partial(path.unlink, missing_ok=True))
            raise HTTPException(HTTPStatus.NOT_FOUND, NO_RECORDING)
        return _json(attrs.asdict(made), HTTPStatus.CREATED)

    async def _remove(self, request: Request) -> Response:
        _, info = await self._recordings.found(request)
        path, principal = self._recordings.marks_path(info), principal_of(request)
        number = request.path_params["number"]
        is_number = number.isascii() and number.isdigit() and len(number) <= 9
        found = await in_thread(partial(marks.read_marks, path))
        mark = found.of(int(number)) if is_number else None
        if mark is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, NO_MARK)
        if not principal.may_see(mark.by):
            require_admin(principal)
        if not await self._changed(principal, partial(marks.remove_mark, path, mark.number)):
            raise HTTPException(HTTPStatus.NOT_FOUND, NO_MARK)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _changed(self, principal: Key, change: Callable[..., T]) -> T:
        """Have a key change a file of marks now, in a thread.

        `HTTPException`: it is full, or the disk refuses.
        """
        now_ms = int(time.time() * MS_PER_S)
        try:
            return await in_thread(partial(change, by=principal.name, now_ms=now_ms), self._writing)
        except marks.TooManyMarks:
            text = f"this recording has had its {LATER_MARKS_MAX} marks already"
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, text) from None
        except OSError:
            text = "the server cannot keep the mark now"
            raise HTTPException(HTTPStatus.INSUFFICIENT_STORAGE, text) from None


def _place_and_text(fields: Fields) -> dict[str, Any]:
    at_ms = fields.required("at_ms", lambda value: value.integer(0, marks.AT_MS_MAX))
    return {
        "at_ms": at_ms,
        "end_ms": fields.required("end_ms", lambda value: value.integer(at_ms, marks.AT_MS_MAX)),
        "text": fields.required("text", lambda value: value.text(marks.TEXT_CHARS_MAX, 1)),
    }


def _json(body: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Answer with JSON in ASCII: a text can have lone surrogates."""
    return json_response(json.dumps(body).encode(), status)


def _refused(reason: MarkRefusal) -> HTTPException:
    status, text = _REFUSALS[reason]
    return HTTPException(status, text, {"Retry-After": str(RETRY_S)} if reason == "behind" else {})
