"""A folder of web pages, served without a key (`--static`); errors are JSON.

- `/a/b.js` is the file `a/b.js` of the folder; a path in `/static/` is also looked up without that
  prefix, as the pages of MiniCPM-o's demo need.
- A folder shows its `index.html`. A path without a file redirects to the page of that name: `/omni`
  to `omni.html` or `omni/omni.html`.
- The server's own routes come first. Pages are public, because browsers open them without a key;
  only paths in `RESERVED` need one.
- Only regular files inside the folder are served, after links, and no name that begins with a dot.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from io import FileIO
from pathlib import Path
from typing import Final
from urllib.parse import quote

import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from .files import send_file

RESERVED: Final = frozenset({"api", "v1", "ws", "health", "ready", "status", "metrics"})
"""First parts of the server's own paths, now and in later versions."""
PREFIX: Final = "static/"
PATH_CHARS_MAX: Final = 1024
"""Longer than any page's path; each folder in a path costs a system call."""
INDEX: Final = "index.html"
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'self'",
}
"""A browser revalidates a page at each use (304 if it is the same). Only the page's own site may
frame it: it may use the microphone."""
TYPES: Final = {
    ".avif": "image/avif",
    ".css": "text/css",
    ".csv": "text/csv",
    ".gif": "image/gif",
    ".htm": "text/html",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".js": "text/javascript",
    ".json": "application/json",
    ".m4a": "audio/mp4",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".mp3": "audio/mpeg",
    ".mp4": "video/mp4",
    ".ogg": "audio/ogg",
    ".otf": "font/otf",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".ttf": "font/ttf",
    ".txt": "text/plain",
    ".wasm": "application/wasm",
    ".wav": "audio/wav",
    ".webm": "video/webm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".xml": "application/xml",
}
"""The same on every machine: browsers must not guess, and run scripts of these types only."""
OTHER_TYPE: Final = "application/octet-stream"


class Pages:
    """The pages of one folder; files may come and go while the server runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = StaticFiles(directory=folder, check_dir=False)

    def route(self) -> Route:
        """The route for `http.make_app`; it must be the last."""
        return _LastRoute("/{path:path}", self._send)

    async def _send(self, request: Request) -> Response:
        find = partial(self._find, str(request.scope["path"]).removeprefix("/"))
        found = await anyio.to_thread.run_sync(find, abandon_on_cancel=True)
        if found is None:
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
        for page in _pages_of(last):
            if self._is_there(f"{parent}/{page}" if parent else page):
                return f"./{quote(page.removesuffix(INDEX))}"
        return None

    def _open(self, name: str) -> _File | None:
        path = self._look_up(name)
        try:
            return None if path is None else _File(path)
        except OSError:
            return None

    def _is_there(self, name: str) -> bool:
        return self._look_up(name) is not None

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


def _pages_of(name: str) -> Iterator[str]:
    yield f"{name}/{INDEX}"
    yield f"{name}.html"
    yield f"{name}/{name}.html"
    yield f"{name.replace('_', '-')}/{name}.html"


def _is_plain(names: Sequence[str]) -> bool:
    """Whether no name is empty, hidden, or `..`."""
    return all(name and not name.startswith(".") for name in names)
