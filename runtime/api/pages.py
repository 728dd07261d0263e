"""Web pages: the console, a folder of pages (`--static`), and the demo's; errors are JSON.

The console is the page that talks to this server, its files, and facts about the server:

| path | is | for |
|---|---|---|
| `GET /` | the console; with `--static` it is that folder's page | all |
| `GET /console` | the console, in any case | all |
| `GET /web/...` | its scripts, its style, and the client for browsers (`antiphon.js`) | all |
| `GET /api/console` | what the page must know: model, key, settings with their bounds | each key |
| `POST /api/console` | a client secret that may do all that its key may, for two hours: `{"value", "expires_at"}` | each key |

The files are the same for all clients and hold no secret, so they need no key, as a browser cannot
send one for them; what they show comes from the API, which does. They are read and compressed once,
at the start. The page loads nothing from elsewhere, and its `Content-Security-Policy` allows no
inline script or style.

A folder of pages is served without a key:

- `/a/b.js` is the file `a/b.js` of the folder; a path in `/static/` is also looked up without that
  prefix, as the pages of MiniCPM-o's demo need.
- A folder shows its `index.html`. A path without a file redirects to the page of that name: `/omni`
  to `omni.html` or `omni/omni.html`.
- The server's own routes come first. Pages are public, because browsers open them without a key;
  only paths in `RESERVED` need one.
- Only regular files inside the folder are served, after links, and no name that begins with a dot.
"""  # noqa: E501 - a table

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from protocol.values.state import SessionKind
from protocol.wire.schema import describe

from ..access.gate import principal_of, require_admin
from ..access.keys import LIFETIME_S_MAX
from ..media.voices import VoiceLibrary
from ..net.http import json_response
from ..session.server import Server
from ..session.setup import VERSION, model_names
from ..settings.settings import Settings
from .openai import sign_secret
from .requests import InMemory, in_thread, send_file

# -- a folder of pages -----------------------------------------------------------------------------


RESERVED: Final = frozenset(
    {"api", "v1", "ws", "health", "ready", "status", "metrics", "workers", "sessions"}
)
"""First parts of the server's own paths, now and in later versions."""
PREFIX: Final = "static/"
PATH_CHARS_MAX: Final = 1024
"""Longer than any page's path; each folder in a path costs a system call."""
INDEX: Final = "index.html"
HEADERS: Final = {"Cache-Control": "no-cache", "Content-Security-Policy": "frame-ancestors 'self'"}
"""A browser revalidates a page at each use (304 if it is the same). Only the page's own site may
frame it: it may use the microphone."""
_SAME = {
    "application": "json pdf wasm xml",
    "audio": "ogg wav",
    "font": "otf ttf woff woff2",
    "image": "avif gif jpeg png webp",
    "text": "css csv html",
    "video": "mp4 webm",
}
TYPES: Final = {
    **{f".{name}": f"{kind}/{name}" for kind, names in _SAME.items() for name in names.split()},
    ".htm": "text/html",
    ".ico": "image/x-icon",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".m4a": "audio/mp4",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".mp3": "audio/mpeg",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".webmanifest": "application/manifest+json",
}
"""The same on every machine: browsers must not guess, and run scripts of these types only."""
OTHER_TYPE: Final = "application/octet-stream"


class Pages:
    """The pages of one folder; files may come and go while the server runs.

    `others` are answers to paths without a file.
    """

    def __init__(
        self,
        folder: Path,
        others: Mapping[str, Callable[[Request], Awaitable[Response]]] = MappingProxyType({}),
    ) -> None:
        self._folder = folder
        self._others = others
        self._files = StaticFiles(directory=folder, check_dir=False)

    def route(self) -> Route:
        """The route for `http.make_app`; it must be the last."""
        return _LastRoute("/{path:path}", self._send)

    async def _send(self, request: Request) -> Response:
        find = partial(self._find, str(request.scope["path"]).removeprefix("/"))
        found = await anyio.to_thread.run_sync(find, abandon_on_cancel=True)
        if found is None:
            other = self._others.get(str(request.scope["path"]))
            if other is not None:
                return await other(request)
            raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such page")
        if isinstance(found, str):
            query = request.scope["query_string"].decode("latin-1")
            location = f"{found}?{query}" if query else found
            return Response(status_code=HTTPStatus.FOUND, headers={"Location": location})
        with ExitStack() as opening:
            opening.callback(found.close)
            return send_file(request, found, opening, HEADERS, media_type=found.media_type)

    # -- in threads -------------------------------------------------------------------------------

    def _find(self, asked: str) -> _File | str | None:
        """The file at a path, or the relative address to redirect to."""
        if len(asked) > PATH_CHARS_MAX:
            return None
        for name in dict.fromkeys((asked, asked.removeprefix(PREFIX))):
            found = self._find_exactly(name)
            if found is not None:
                return found
        return None

    def _find_exactly(self, name: str) -> _File | str | None:
        is_folder = name == "" or name.endswith("/")
        stem = name.removesuffix("/")
        if is_folder:
            return self._open(f"{stem}/{INDEX}" if stem else INDEX)
        file = self._open(stem)
        if file is not None:
            return file
        parent, _, last = stem.rpartition("/")
        dashed = last.replace("_", "-")
        inside = (f"{last}/{INDEX}", f"{last}.html", f"{last}/{last}.html", f"{dashed}/{last}.html")
        for page in inside:
            if self._look_up(f"{parent}/{page}" if parent else page) is not None:
                return f"./{quote(page.removesuffix(INDEX))}"
        return None

    def _open(self, name: str) -> _File | None:
        path = self._look_up(name)
        try:
            return None if path is None else _File(path)
        except OSError:
            return None

    def _look_up(self, name: str) -> str | None:
        """The path of a regular file in the folder, links followed; None for none."""
        if not _is_plain(name.split("/")):
            return None
        try:
            path, found = self._files.lookup_path(name)
        except (OSError, ValueError):  # an impossible name, or a folder without access
            return None
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        below = os.path.relpath(path, os.path.realpath(self._folder))
        return path if _is_plain(below.split(os.sep)) else None


class _LastRoute(Route):
    """Matches the paths of no other route, and no other methods."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        matched, child = super().matches(scope)
        return (matched, child) if matched == Match.FULL else (Match.NONE, {})


class _File:
    def __init__(self, path: str) -> None:
        self._file = FileIO(path, opener=_open_plainly)
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise FileNotFoundError(path)
        self.size = found.st_size
        self.etag = f'"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"'
        self.media_type = TYPES.get(os.path.splitext(path)[1].lower(), OTHER_TYPE)

    def read(self, start: int, count: int) -> bytes:
        data = os.pread(self._file.fileno(), count, start)
        if len(data) != count:
            raise OSError("a page became shorter while it was sent")
        return data

    def close(self) -> None:
        self._file.close()


def _open_plainly(path: str, flags: int) -> int:
    """Open a resolved path: do not follow a new link, and do not wait."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_public(path: str) -> bool:
    """Whether a percent-decoded path is a page's, which needs no key."""
    return path.isprintable() and path[1:].partition("/")[0] not in RESERVED


def _is_plain(names: Sequence[str]) -> bool:
    """Whether no name is empty, hidden, or `..`."""
    return all(name and not name.startswith(".") for name in names)


# -- the console -----------------------------------------------------------------------------------


FOLDER: Final = Path(__file__).parent.parent / "web"
PAGE: Final = "console/index.html"
ADDRESS: Final = "/console"
WEB_PREFIX: Final = "/web/"
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
            *(Route(path, self._send) for path in sorted({*self._pages, *self._files})),
            Route("/api/console", self._show),
            Route("/api/console", self._sign_in, methods=["POST"]),
        ]

    def is_public(self, path: str) -> bool:
        """Whether a path is a file of the console, which needs no key."""
        return bool(self._files) and (path in self._pages or path in self._files)

    async def _send(self, request: Request) -> Response:
        page = self._files[WEB_PREFIX + PAGE]
        plain, packed = self._files.get(request.scope["path"], page)
        accepted = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
        file = packed if "gzip" in accepted else plain
        encoding = {"Content-Encoding": "gzip"} if file is packed else {}
        sent = {"Content-Security-Policy": PAGE_CSP, "Vary": "Accept-Encoding", **encoding}
        with ExitStack() as opening:
            return send_file(request, file, opening, HEADERS | sent, media_type=file.media_type)

    async def _show(self, request: Request) -> Response:
        principal, settings, server = principal_of(request), self._settings, self._server()
        info = None if server is None else server.workers.info
        body = {
            "version": VERSION,
            "readiness": "loading" if server is None else server.readiness,
            "models": [] if info is None else model_names(settings, info),
            "modes": [] if server is None else [*filter(principal.may_use, server.modes)],
            "transcriber": settings.transcriber and Path(settings.transcriber).name,
            "speech": None if server is None else server.speech,
            "drain_s": settings.drain_s,
            "context_limit": None if info is None else info.context_limit,
            "voices": [] if info is None else info.voices,
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
        return json_response(body)

    async def _sign_in(self, request: Request) -> Response:
        value, expires_s = sign_secret(principal_of(request), LIFETIME_S_MAX, is_whole=True)
        return json_response({"value": value, "expires_at": expires_s})


_SETTINGS: Final = {
    "duplex": ("session.init", ("payload", "config")),
    "chat": ("input.append", ("input", "generation")),
}
"""By session kind: the message that holds the inference settings, and where in it."""


@cache
def _settings(session_kind: str) -> object:
    """The schemas of the inference settings of a session or a turn, by their names."""
    kind, path = _SETTINGS[session_kind]
    messages = (it for it in describe("realtime") if it.kind == kind)
    schema = next(it.schema for it in messages if it.session_kinds == (SessionKind(session_kind),))
    for name in path:
        schema = schema["properties"][name]
    return schema["properties"]


def _load() -> dict[str, tuple[InMemory, InMemory]]:
    """All files by their paths on the server, as they are and compressed."""
    files = {}
    for path in (*FOLDER.iterdir(), *(FOLDER / "console").iterdir()):
        if path.suffix in SHOWN:
            data, media_type = path.read_bytes(), TYPES[path.suffix]
            packed = InMemory(gzip.compress(data, mtime=0), media_type)
            name = WEB_PREFIX + path.relative_to(FOLDER).as_posix()
            files[name] = InMemory(data, media_type), packed
    return files


# -- the demo's pages ------------------------------------------------------------------------------

APPS: Final = (
    ("turnbased", "/turnbased", "Turn-based Chat"),
    ("half_duplex_audio", "/half_duplex", "Half-Duplex Audio"),
    ("omni", "/omni", "Omni Full-Duplex"),
    ("audio_duplex", "/audio_duplex", "Audio Full-Duplex"),
)
"""The pages; one that is not listed leads to the start page."""
ETA_S: Final = {f"eta_{name}_s": 0 for name in ("chat", "streaming", "half_duplex")} | {
    f"eta_{name}_duplex_s": 0 for name in ("audio", "omni")
}
Answer = Callable[[Request], Awaitable[Response]]


def queue_of(tickets: Sequence[Mapping[str, Any]], now: datetime) -> list[dict[str, Any]]:
    """The waiting tickets as the page of operators reads them."""
    return [
        {
            "ticket_id": it["ticket_id"],
            "position": it["position"],
            "request_type": it["mode"],
            "session_id": None,
            "estimated_wait_s": it["estimated_wait_s"],
            "wait_elapsed_s": it["waited_s"],
            "enqueued_at": (now - timedelta(seconds=it["waited_s"])).isoformat(),
        }
        for it in tickets
    ]


class DemoPages:
    """What the pages of MiniCPM-o's demo ask for (`--static`); `server` is None while the model loads.

    | path | is | for |
    |---|---|---|
    | `GET /workers` | the slots, each as one of the demo's workers | `admin` |
    | `GET /sessions` | the running sessions | each key its own, `admin` all |
    | `GET /api/apps` | the pages that work here, for the menu | each key |
    | `GET /api/admin/apps` | the same for the page of operators | `admin` |
    | `GET /api/presets` | prompts to choose from: none, so the pages show no choice | each key |
    | `GET /api/frontend_defaults` | settings of pages: none, so they have their own | each key |
    | `GET /api/assets/ref_audio` | the library of voices | each key |
    | `GET /api/config/eta` | times by which the demo estimates a wait; here it is measured | `admin` |

    Only reading is offered: what these pages change is changed by a server's settings, `/api/voices`
    and `/api/queue`.
    """  # noqa: E501 - a table

    def __init__(self, server: Callable[[], Server | None], voices: VoiceLibrary | None) -> None:
        self._server = server
        self._voices = voices

    def answers(self) -> Mapping[str, Answer]:
        """The answers by their paths; a file of the folder comes before its path's."""
        apps = [{"app_id": it, "name": name, "route": route} for it, route, name in APPS]
        return {
            "/workers": self._list_workers,
            "/sessions": self._list_sessions,
            "/api/assets/ref_audio": self._list_voices,
            "/api/apps": _always({"apps": apps}),
            "/api/admin/apps": _always({"apps": [it | {"enabled": True} for it in apps]}, "admin"),
            "/api/presets": _always({}),
            "/api/frontend_defaults": _always({}),
            "/api/config/eta": _always({"config": ETA_S, "ema_alpha": 0}, "admin"),
        }

    async def _list_workers(self, request: Request) -> Response:
        require_admin(principal_of(request))
        server = self._server()
        roster = () if server is None else server.workers.roster()
        workers = [
            {
                "worker_id": f"{it.number}.{slot}",
                "host": it.where,
                "port": 0,
                "gpu_id": 0,
                "status": "idle"
                if slot < it.free
                else "busy"
                if it.state == "serving"
                else it.state,
                "current_session_id": None,
                "total_requests": 0,
            }
            for it in roster
            for slot in range(it.slots)
        ]
        return json_response({"total": len(workers), "workers": workers})

    async def _list_sessions(self, request: Request) -> Response:
        principal, server = principal_of(request), self._server()
        now = datetime.now(UTC)
        sessions = [
            {
                "session_id": it.session_id,
                "worker_id": it.mode,
                "messages_hash": it.recording_id,
                "last_active": now.isoformat(),
            }
            for it in (() if server is None else server.roster(lambda _: 0))
            if principal.may_see(it.owner)
        ]
        return json_response({"total": len(sessions), "sessions": sessions})

    async def _list_voices(self, _request: Request) -> Response:
        sizes = {} if self._voices is None else await in_thread(self._voices.sizes)
        epoch = datetime.fromtimestamp(0, UTC).isoformat()
        voices = [
            {"id": it, "name": it, "source_type": "voice", "duration_ms": None, "created_at": epoch}
            for it in sorted(sizes)
        ]
        return json_response({"total": len(voices), "ref_audios": voices})


def _always(body: dict[str, Any], scope: str = "") -> Answer:
    async def answer(request: Request) -> Response:
        if scope:
            require_admin(principal_of(request))
        return json_response(body)

    return answer
