"""The console: the web page that talks to this server, its files, and facts about the server.

| path | is | for |
|---|---|---|
| `GET /` | the console; with `--static` it is that folder's page | all |
| `GET /console` | the console, in any case | all |
| `GET /web/...` | its scripts, its style, and the client for browsers (`antiphon.js`) | all |
| `GET /api/console` | what the page must know: model, key, settings with their bounds | each key |

The files are the same for all clients and hold no secret, so they need no key, as a browser cannot
send one for them; what they show comes from the API, which does. They are read and compressed once,
at the start. The page loads nothing from elsewhere, and its `Content-Security-Policy` allows no
inline script or style.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.state import Course
from protocol.wire.schema.wire import describe

from ..access.middleware import principal_of
from ..net.http import json_response
from ..session.server import Server
from ..session.setup import VERSION, model_names
from ..settings.settings import Settings
from .files import InMemory, send_file
from .pages import HEADERS, TYPES

FOLDER: Final = Path(__file__).parent.parent / "web"
PAGE: Final = "console/index.html"
ADDRESS: Final = "/console"
PREFIX: Final = "/web/"
SHOWN: Final = frozenset({".css", ".html", ".js", ".svg"})
"""Endings of the files that are served; the others are for those who build pages."""
PAGE_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "media-src 'self' blob:; connect-src 'self'; worker-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The `Content-Security-Policy` of the page."""


class Console:
    """The routes of the console; `server` returns None while the model loads.

    Args:
        has_views: whether the server shows recordings as pages.
    """

    def __init__(
        self, settings: Settings, server: Callable[[], Server | None], *, has_views: bool
    ) -> None:
        self._settings = settings
        self._server = server
        self._has_views = has_views
        self._files = _load() if settings.pages else {}
        self._pages = {ADDRESS} if settings.static is not None else {ADDRESS, "/"}

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`; none if the settings turn the pages off."""
        if not self._files:
            return []
        return [
            *(Route(path, self._send_page) for path in sorted(self._pages)),
            *(Route(path, self._send_file) for path in self._files),
            Route("/api/console", self._tell),
        ]

    def is_public(self, path: str) -> bool:
        """Whether a path is a file of the console, which needs no key."""
        return bool(self._files) and (path in self._pages or path in self._files)

    async def _send_page(self, request: Request) -> Response:
        return _answer(request, self._files[PREFIX + PAGE])

    async def _send_file(self, request: Request) -> Response:
        return _answer(request, self._files[request.scope["path"]])

    async def _tell(self, request: Request) -> Response:
        principal, settings, server = principal_of(request), self._settings, self._server()
        info = None if server is None else server.workers.info
        told = {
            "version": VERSION,
            "readiness": "loading" if server is None else server.readiness,
            "models": [] if info is None else model_names(settings, info),
            "modes": [] if server is None else [*filter(principal.may_use, server.modes)],
            "speech": None if server is None else server.speech,
            "drain_s": settings.drain_s,
            "context_limit": None if info is None else info.context_limit,
            "sliding_windows": [] if info is None else info.sliding_windows,
            "key": {
                "is_needed": settings.keys is not None,
                "name": principal.name,
                "is_admin": principal.is_admin,
            },
            "recording": {
                "is_on": settings.record_to is not None,
                "is_always": principal.record_always or settings.record_always,
                "notice": settings.recording_notice or "",
                "has_views": self._has_views,
            },
            "settings": {"duplex": _settings("duplex"), "chat": _settings("chat")},
        }
        return json_response(told)


_SETTINGS: Final = {
    "duplex": ("session.init", ("payload", "config")),
    "chat": ("input.append", ("input", "generation")),
}
"""By course: the message that holds the inference settings, and where in it."""


@cache
def _settings(course: str) -> object:
    """The schemas of the inference settings of a session or a turn, by their names."""
    kind, path = _SETTINGS[course]
    messages = (it for it in describe("realtime") if it.kind == kind)
    schema = next(it.schema for it in messages if it.courses == (Course(course),))
    for name in path:
        schema = schema["properties"][name]
    return schema["properties"]


# -- the files ------------------------------------------------------------------------------------


@attrs.frozen
class _Shown:
    """A file as it is, and for clients that take it compressed."""

    plain: InMemory
    packed: InMemory


def _load() -> dict[str, _Shown]:
    """All files, by their paths on the server."""
    return {PREFIX + str(name): _read(name) for name in sorted(_names())}


def _names() -> Iterator[PurePosixPath]:
    for folder in (FOLDER, FOLDER / "console"):
        for path in folder.iterdir():
            if path.suffix in SHOWN:
                yield PurePosixPath(path.relative_to(FOLDER).as_posix())


def _read(name: PurePosixPath) -> _Shown:
    data, media_type = (FOLDER / name).read_bytes(), TYPES[name.suffix]
    packed = gzip.compress(data, mtime=0)
    return _Shown(InMemory(data, media_type), InMemory(packed, media_type, "gzip"))


def _answer(request: Request, shown: _Shown) -> Response:
    accepted = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
    file = shown.packed if "gzip" in accepted else shown.plain
    encoding = {"Content-Encoding": file.encoding} if file.encoding else {}
    told = {"Content-Security-Policy": PAGE_CSP, "Vary": "Accept-Encoding", **encoding}
    with ExitStack() as opening:
        return send_file(request, file, opening, HEADERS | told, media_type=file.media_type)
