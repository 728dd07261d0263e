"""The recorded sessions over HTTP: a list, a summary, the log itself, its live tail, and a page.

| path | is |
|---|---|
| `GET /api/recordings` | a page of the list, newest first; `?mode=&owner=&state=&reason=&session=&since_ms=&limit=&after=` |
| `GET /api/recordings/{recording_id}` | the list's entry |
| `DELETE /api/recordings/{recording_id}` | remove one that is not being written, here and in the store; for `admin` |
| `GET /api/recordings/{recording_id}/log` | the log, or a range; of an open log its whole blocks |
| `GET /api/recordings/{recording_id}/live` | its records, as they are written (`tail`); `?from_seq=&blobs=1` |
| `GET /api/recordings/{recording_id}/view` | the session as an HTML page, if there is a viewer; `?diff=` marks where another recording differs, `?to=previous`, `next` lead to the sessions around it, `?to=talk&unit=` to the console, where it is talked on from, `?to=list` to its list |
| `GET /api/recordings/{recording_id}/digest` | what was said, and the measures of `antiphon eval`; `?diff=`: where another recording first differs |
| `GET /api/recordings/{recording_id}/replay` | what `antiphon replay` finds without the model; of no open log |
| `GET /api/recordings/{recording_id}/redacted` | a copy of the log without `?kinds=`, or `?as=page` its page; of no open log |
| `GET /api/sessions/{recording_id}/recording` | the log, by session |
| `GET /api/sessions/{recording_id}/view` | the page, by session |
| `GET /v1/live/sessions/{recording_id}/content` | a WAV of both voices, as OpenAI's Live API names it |

The id of a session names its recording too. A key sees the recordings of its own name, `admin` all;
others are a 404. A client's id is checked before it is used as a file name; the owner is read from
the log. Only an operator removes: a leaked key must not destroy its traces.

With an object store, the recordings in it are served as those of the folder are, each once.

Files are read in threads. A list is made again only after ten times as long as it took.

Marks are annotations of a session, in its log while it runs, and next to the log of one that ended:

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast, get_args

import anyio
import anyio.to_thread
import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from protocol.values.limits import MODES, MS_PER_S, NS_PER_MS
from protocol.values.records import is_session_id, session_id_of
from protocol.wire.codec import Fields
from recorder.format.format import SUFFIX
from recorder.storage import marks
from recorder.storage.listing import Index, Listing, LogFilter, State, Summary, page_of
from recorder.storage.marks import MARKS_MAX as LATER_MARKS_MAX
from recorder.storage.marks import marks_path, read_marks
from recorder.storage.remote import RemoteStore, StoredLog, logs_of
from recorder.storage.store import WITH_STORE_NAME, LogInfo, Logs, Store

from ..access.gate import principal_of, require_admin
from ..access.keys import Key
from ..net.http import json_response
from ..session.journal import MARKS_MAX, MarkRefusal, MarkRefused
from ..session.server import Server
from ..session.setup import VERSION
from . import requests as rq
from . import views as vw
from .requests import RETRY_S, in_thread, read_body, read_fields, read_text
from .tail import TailFormat, send_log


def page_json(
    summaries: Sequence[Summary], principal: Key, query: LogFilter, *, limit: int, after: str | None
) -> dict[str, object]:
    """A page of the recordings that a key may see; `ValueError`: `after` is not a page's end."""
    seen = [it for it in summaries if principal.may_see(it.owner)]
    page, following = page_of(seen, query, limit=limit, after=after)
    return {"recordings": [attrs.asdict(it) for it in page], "next": following}


def around(summaries: Sequence[Summary], principal: Key, summary: Summary, direction: str) -> str:
    """Find the readable recording before or after another in time, of those that a key may see."""
    own = (-summary.listed_ms, summary.recording_id)
    seen = [
        (-it.listed_ms, it.recording_id)
        for it in summaries
        if principal.may_see(it.owner) and it.state != "unreadable"
    ]
    is_next = direction == "next"
    places = [place for place in seen if (place < own if is_next else place > own)]
    if not places:
        text = f"there is no session {'after' if is_next else 'before'} this one"
        raise HTTPException(HTTPStatus.NOT_FOUND, text)
    return (max(places) if is_next else min(places))[1]


LIMIT: Final = 100
LIMIT_MAX: Final = 1000
"""Recordings on a page: 300 kB of JSON."""
LISTING_REST: Final = 10
"""Making lists takes at most a tenth of a thread's time."""
ASKING_MAX: Final = 8
"""Threads that list and find: an object store that hangs must leave others to the server."""
NAMING_MAX: Final = 1
"""Threads that look for the recording of a session: each looks at all names of the folder."""
LISTING_REST_S_MAX: Final = 60.0
"""A list that an object store held up is not for long."""
STORED_MAX: Final = 12
"""Stored logs that are sent at once: each holds up to a mebibyte, and a thread that waits."""
STORED_PER_KEY_MAX: Final = 3
"""One client leaves most for the others."""
TAILS_MAX: Final = 16
"""Each may hold 16 MiB of its log, and takes part of a thread."""
TAILS_PER_KEY_MAX: Final = 4
"""One client leaves some for the others."""
NUMBER_MAX: Final = 10**15
"""Unix milliseconds of more than 30,000 years, and more records than a log has."""
NO_RECORDING: Final = "there is no such recording"
DIRECTIONS: Final = ("previous", "next", "talk", "list")
"""The first two in time; those are in a list after and before it."""
VIEW_PARAMETERS: Final = ("to", "unit", "diff")
DIGEST_PARAMETERS: Final = ("diff",)
REDACTED_PARAMETERS: Final = ("kinds", "as")
LIVE_PARAMETERS: Final = ("from_seq", "blobs")
PARAMETERS: Final = (
    *("mode", "owner", "state", "reason", "session", "since_ms", "limit", "after"),
)


class Recordings:
    """The routes of one server's recordings.

    Args:
        directory: None: nothing is recorded.
        load_viewer: loads what makes the views of a recording; None for no views.
        remote: the object store that also holds them; None for no store.
        console: the path of the console; empty for none.
    """

    def __init__(
        self,
        directory: Path | None,
        load_viewer: vw.LoadViewer | None = None,
        remote: RemoteStore | None = None,
        console: str = "",
    ) -> None:
        self._logs: Logs | None = None
        self._listing: Listing | None = None
        if directory is not None:
            self._local = Store(directory)
            self._logs = logs_of(self._local, remote)
            self._listing = Listing(self._logs, Index(directory, WITH_STORE_NAME))
        self._has_store = remote is not None
        self._console = console
        self._views = None if load_viewer is None else vw.Views(load_viewer)
        self._listed: tuple[Summary, ...] = ()
        self._listed_until_s = -1.0
        self._is_listing = anyio.Lock()
        self._asking = anyio.CapacityLimiter(ASKING_MAX)
        self._naming = anyio.CapacityLimiter(NAMING_MAX)
        self._tails = rq.ConcurrencyLimit(TAILS_MAX, TAILS_PER_KEY_MAX)
        self._stored = rq.ConcurrencyLimit(STORED_MAX, STORED_PER_KEY_MAX)

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        if self._logs is None:
            return []
        one = "/api/recordings/{recording_id}"
        return [
            Route("/api/recordings", self._list),
            Route(one, self._show),
            Route(one, self._remove, methods=["DELETE"]),
            Route(f"{one}/log", self._send_log),
            Route(f"{one}/live", self._send_live),
            Route(f"{one}/view", self._send_view),
            Route(f"{one}/digest", self._send_digest),
            Route(f"{one}/replay", self._send_replay),
            Route(f"{one}/redacted", self._send_redacted),
            Route("/api/sessions/{recording_id}/recording", self._send_log),
            Route("/api/sessions/{recording_id}/view", self._send_view),
            Route("/v1/live/sessions/{recording_id}/content", self._send_sound),
        ]

    # -- what there is ----------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        page = partial(
            page_json,
            await self._all(),
            principal_of(request),
            _log_filter(request),
            limit=rq.read_number(request, "limit", LIMIT, low=1, high=LIMIT_MAX),
            after=request.query_params.get("after"),
        )
        try:
            return json_response(await rq.in_thread(page))  # a list of thousands takes a while
        except ValueError:
            raise rq.wrong("after", "the next of another page") from None

    async def _all(self) -> tuple[Summary, ...]:
        assert self._listing is not None
        async with self._is_listing:
            began_s = anyio.current_time()
            if began_s >= self._listed_until_s:
                self._listed = await rq.in_thread(self._listing.refresh, self._asking)
                now_s = anyio.current_time()
                rest_s = min(LISTING_REST * (now_s - began_s), LISTING_REST_S_MAX)
                self._listed_until_s = now_s + rest_s
            return self._listed

    async def _show(self, request: Request) -> Response:
        return json_response(attrs.asdict((await self.found(request))[0]))

    async def check(self, request: Request) -> None:
        """Raise `NotOnThisGateway` unless the client may see the recording in the path."""
        if self._logs is None:
            name = request.path_params["recording_id"]
            raise rq.NotOnThisGateway(name, "no session of that name runs")
        await self.found(request)

    async def written(self, recording_id: str) -> LogInfo | None:
        """The log of a session that runs; None if it is not recorded (any more)."""
        if self._listing is None:
            return None
        found = await rq.in_thread(partial(self._listing.find, recording_id), self._asking)
        return found.info if found is not None and found.summary.state == "open" else None

    async def found(self, request: Request) -> tuple[Summary, LogInfo]:
        """The recording in the path, if the client may see it."""
        asked = request.path_params["recording_id"]
        found = await self.find(asked, principal_of(request))
        if found is None:
            raise rq.NotOnThisGateway(asked, NO_RECORDING)
        return found

    async def _ended(self, request: Request) -> LogInfo:
        """The log in the path, if the client may see it and it is not being written."""
        summary, info = await self.found(request)
        if summary.state == "open":
            raise HTTPException(HTTPStatus.CONFLICT, "this recording is being written")
        return info

    async def find(self, asked: str, principal: Key) -> tuple[Summary, LogInfo] | None:
        """The recording of a name, its own or its session's, if the client may see it."""
        if self._listing is None:
            return None
        found = await rq.in_thread(partial(self._listing.find, asked), self._asking)
        if found is None and is_session_id(asked):
            named = await self._recording_of(asked)
            if named is not None:
                found = await rq.in_thread(partial(self._listing.find, named), self._asking)
        if found is None or not principal.may_see(found.summary.owner):
            return None
        return found.summary, found.info

    def marks_path(self, info: LogInfo) -> Path:
        """Where the marks next to a log are: in the folder, also for a log of the store."""
        return marks_path(self._local.path(info.recording_id))

    async def _recording_of(self, session_id: str) -> str | None:
        """Find the recording of a session; a new one is in the folder before it is in the list."""
        find = partial(self._local.recording_of, session_id)
        found = await rq.in_thread(find, self._naming)
        if found is not None or not self._has_store:
            return found
        names = (it.recording_id for it in await self._all())
        return next((it for it in names if session_id_of(it) == session_id), None)

    async def _remove(self, request: Request) -> Response:
        assert self._logs is not None
        _, info = await self.found(request)
        require_admin(principal_of(request))
        if not await rq.in_thread(partial(_remove, self._logs, info), self._asking):
            raise HTTPException(HTTPStatus.CONFLICT, "this recording is being written")
        self._listed_until_s = -1.0
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # -- the log ----------------------------------------------------------------------------------

    async def _send_log(self, request: Request) -> Response:
        summary, info = await self.found(request)
        with ExitStack() as opening:
            opening.enter_context(self._place(request, info))
            file = await rq.in_thread(partial(rq.LogFile, info, is_open=summary.state == "open"))
            opening.callback(file.close)
            name = f'attachment; filename="{info.recording_id}{SUFFIX}"'
            headers = {"Content-Disposition": name}
            return rq.send_file(request, file, opening, headers, media_type="application/zstd")

    async def _send_live(self, request: Request) -> Response:
        rq.check_names(request, LIVE_PARAMETERS)
        _, info = await self.found(request)
        last_seen = request.headers.get("last-event-id", "")
        follows = int(last_seen[:18]) + 1 if last_seen.isascii() and last_seen.isdigit() else 0
        form = TailFormat(
            from_seq=rq.read_number(request, "from_seq", follows, low=0, high=NUMBER_MAX),
            with_blobs=rq.read_number(request, "blobs", 0, low=0, high=1) == 1,
            as_events="text/event-stream" in request.headers.get("accept", ""),
        )
        with ExitStack() as opening:
            opening.enter_context(self._tails.take(request))
            opening.enter_context(self._place(request, info))
            return rq.Stream(
                partial(send_log, info, form),
                opened=opening.pop_all(),
                headers={"X-Accel-Buffering": "no"},  # a proxy would buffer the answer
                media_type=form.media_type,
            )

    def _place(self, request: Request, info: LogInfo) -> ExitStack:
        """Take a place for reading a stored log; local logs need none."""
        return self._stored.take(request) if isinstance(info, StoredLog) else ExitStack()

    async def _send_view(self, request: Request) -> Response:
        rq.check_names(request, VIEW_PARAMETERS)
        summary, info = await self.found(request)
        direction = rq.read_choice(request, "to", DIRECTIONS)
        if direction in ("talk", "list"):
            return self._lead_to_console(request, info, direction)
        if direction is not None:
            following = around(await self._all(), principal_of(request), summary, direction)
            return RedirectResponse(f"/api/recordings/{following}/view", HTTPStatus.SEE_OTHER)
        views, pair = self._views_here(), await self._pair(request, info)
        if pair is not None:
            return await views.answer(request, info, "page", pair=pair)
        marks = await rq.in_thread(partial(read_marks, self.marks_path(info)))
        shown = vw.page_marks(marks, principal_of(request), is_open=summary.state == "open")
        return await views.answer(request, info, "page", later=shown)

    def _lead_to_console(self, request: Request, info: LogInfo, direction: str) -> Response:
        """Lead to the console's list, or where a conversation begins from a unit of this one."""
        if not self._console:
            raise HTTPException(HTTPStatus.NOT_FOUND, "this server shows no console")
        unit = rq.read_number(request, "unit", -1, low=0, high=NUMBER_MAX)
        before = "" if unit < 0 else f"/{unit}"
        place = "recordings" if direction == "list" else f"talk/{info.recording_id}{before}"
        return RedirectResponse(f"{self._console}#{place}", HTTPStatus.SEE_OTHER)

    async def _pair(self, request: Request, info: LogInfo) -> tuple[vw.Open, vw.Open, str] | None:
        """The log, and the one that `?diff=` names; None where it names none."""
        other = request.query_params.get("diff")
        if other is None:
            return None
        found = await self.find(other, principal_of(request))
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"{NO_RECORDING} to compare with")
        return info.open, found[1].open, found[1].recording_id

    async def _send_digest(self, request: Request) -> Response:
        rq.check_names(request, DIGEST_PARAMETERS)
        _, info = await self.found(request)
        pair = await self._pair(request, info)
        if pair is not None:
            return await self._views_here().answer(request, info, "digest", pair=pair)
        index = None if self._listing is None else self._listing.index
        assert index is not None
        views, known = (
            self._views_here(),
            await rq.in_thread(partial(index.digest_of, info, VERSION)),
        )
        if known is None:
            keep = partial(index.keep_digest, info, VERSION)
            return await views.answer(request, info, "digest", keep=keep)
        with ExitStack() as opening:
            file = rq.InMemory(known, "application/json")
            return rq.send_file(request, file, opening, {}, media_type=file.media_type)

    async def _send_replay(self, request: Request) -> Response:
        info = await self._ended(request)
        return await self._views_here().answer(request, info, "replay")

    async def _send_redacted(self, request: Request) -> Response:
        rq.check_names(request, REDACTED_PARAMETERS)
        info = await self._ended(request)
        is_page = rq.read_choice(request, "as", ("log", "page")) == "page"
        kinds = request.query_params.get("kinds")
        name = f"{info.recording_id}.redacted{'.html' if is_page else SUFFIX}"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        view: vw.ViewName = "redacted-page" if is_page else "redacted-log"
        chosen = None if kinds is None else kinds.split(",")
        without: vw.ViewOptions = {"open_": info.open, "kinds": chosen}
        return await self._views_here().answer(request, info, view, headers, **without)

    async def _send_sound(self, request: Request) -> Response:
        _, info = await self.found(request)
        headers = {"Content-Disposition": f'attachment; filename="{info.recording_id}.wav"'}
        return await self._views_here().answer(request, info, "sound", headers)

    def _views_here(self) -> vw.Views:
        if self._views is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "this server has no viewer")
        return self._views


# -- in threads ---------------------------------------------------------------------------------


def _remove(logs: Logs, info: LogInfo) -> bool:
    """Remove a log, unless it is being written."""
    if info.is_held():
        return False
    logs.remove(info)
    return True


# -- what a client asks for ---------------------------------------------------------------------


def _log_filter(request: Request) -> LogFilter:
    rq.check_names(request, PARAMETERS)
    query = request.query_params
    state = cast("State | None", rq.read_choice(request, "state", get_args(State)))
    return LogFilter(
        since_ms=rq.read_number(request, "since_ms", 0, low=0, high=NUMBER_MAX),
        mode=rq.read_choice(request, "mode", MODES),
        owner=query.get("owner"),
        state=state,
        reason=query.get("reason"),
        session=query.get("session"),
    )


# -- marks -----------------------------------------------------------------------------------------

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
