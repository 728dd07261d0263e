"""The page of a recording: made whole, then sent from memory or from a file.

So making holds a place only as long as it lasts. The file has no name, lies in the system's
temporary folder (`TMPDIR`), and disappears with the page, even if the server is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from tempfile import SpooledTemporaryFile
from typing import Final

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recorder.format.records import Fields, Record
from recorder.keep.store import LogInfo
from recorder.read.reader import LogReader
from recorder.read.scan import Damage

from ..settings.bounds import MIB
from .files import send_file
from .places import Places
from .threads import in_thread

MAKING_MAX: Final = 2
"""Making a page keeps a thread busy for seconds, and takes processor time from sessions."""
MAKING_PER_KEY_MAX: Final = 1
"""One client leaves one for the others."""
HELD_MAX: Final = 16
"""Pages that are made or sent: each is kept until its client has it."""
HELD_PER_KEY_MAX: Final = 4
"""One slow client leaves most for the others."""
MEMORY_BYTES_MAX: Final = 2 * MIB
"""Of a page in memory: a short conversation; 32 MiB for all pages."""
PAGE_BYTES_MAX: Final = 256 * MIB
"""Of a page: an hour with pictures takes less, and a browser would not show more."""
_SANDBOX: Final = "frame-ancestors 'none'; sandbox allow-scripts allow-downloads"
"""The page is an origin of its own: a log's content cannot act on this server."""


@attrs.frozen(kw_only=True)
class Viewer:
    """Shows a log as one HTML page in parts, UTF-8, under a `Content-Security-Policy`."""

    page_of: Callable[[Fields, Iterable[Record | Damage]], Iterator[bytes]]
    policy: str


LoadViewer = Callable[[], Viewer]
"""Loads the viewer in a thread, for the first page."""


class Views:
    """Answers requests with pages; `load_viewer` loads the viewer."""

    def __init__(self, load_viewer: LoadViewer) -> None:
        self._load_viewer = load_viewer
        self._making = Places(MAKING_MAX, MAKING_PER_KEY_MAX)
        self._held = Places(HELD_MAX, HELD_PER_KEY_MAX)

    async def answer(self, request: Request, info: LogInfo) -> Response:
        """Make the page of a log, and an answer that sends it.

        `HTTPException`: there is no place (503) or no room (507) now; or the log cannot be read, or
        its page is too large (422).
        """
        with ExitStack() as opening:
            opening.enter_context(self._held.take(request))
            page = _Page()
            opening.callback(page.close)
            with self._making.take(request):
                viewer = await in_thread(self._load_viewer)
                with await in_thread(lambda: LogReader(info.open())) as reader:
                    pieces = viewer.page_of(reader.head.fields, reader)
                    # A step at a time, so that it can be cancelled.
                    while await in_thread(partial(page.take_from, pieces)):
                        pass
            headers = {"Content-Security-Policy": f"{viewer.policy}; {_SANDBOX}"}
            return send_file(request, page, opening, headers, media_type="text/html")


class _Page:
    """A page, first written, then sent as a `files.File`. The caller closes it."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115 - the caller closes it
        self._hash = sha256()
        self.size = 0
        self.etag = ""

    def take_from(self, pieces: Iterator[bytes]) -> bool:
        """Write the next piece, blocking; False after the last."""
        piece = next(pieces, b"")
        self._hash.update(piece)
        self.size += len(piece)
        if self.size > PAGE_BYTES_MAX:
            text = f"its page would have more than {PAGE_BYTES_MAX} bytes; take the log"
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text)
        try:
            self._file.write(piece)
            self._file.flush()
        except OSError:
            text = "the server has no room for its page now"
            raise HTTPException(HTTPStatus.INSUFFICIENT_STORAGE, text) from None
        self.etag = f'"{self._hash.hexdigest()}"'
        return bool(piece)

    def read(self, start: int, count: int) -> bytes:
        self._file.seek(start)
        return self._file.read(count)

    def close(self) -> None:
        self._file.close()
