"""The views of a recording: its page, sound, digest, replay, and redacted copies of log and page.

A view is made whole, then sent from memory or a file; not for a client that has left.

So making holds a place only as long as it lasts. The file has no name, lies in the system's
temporary folder (`TMPDIR`), and disappears with the view, even if the server is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import Any, Final, Literal, TypedDict, Unpack

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recorder.read.reader import LogReader
from recorder.read.scan import OpenSource
from recorder.storage.marks import Marks
from recorder.storage.store import LogInfo

from ..access.keys import Key
from ..settings.settings import MIB
from .requests import ConcurrencyLimit, in_thread, send_file, while_there, wrong

MAKING_MAX: Final = 2
"""Views of all kinds: making one keeps a thread busy for seconds, and takes processor time from
sessions."""
MAKING_PER_KEY_MAX: Final = 1
"""One client leaves one for the others."""
DIGESTING_MAX: Final = 1
"""Digests, which a console asks for one after the other, and which no page should wait for."""
HELD_MAX: Final = 16
"""Pages that are made or sent: each is kept until its client has it."""
HELD_PER_KEY_MAX: Final = 4
"""One slow client leaves most for the others."""
MEMORY_BYTES_MAX: Final = 2 * MIB
"""Of a view in memory: a short conversation; 40 MiB for all views."""
PAGE_BYTES_MAX: Final = 256 * MIB
"""Of a page: an hour with pictures takes less, and a browser would not show more."""
SOUNDS_MAX: Final = 4
"""Sounds that are made or sent: together as large as all pages."""
SOUNDS_PER_KEY_MAX: Final = 2
"""One slow client leaves some for the others."""
DIGEST_BYTES_MAX: Final = 4 * MIB
"""Of a digest: its words are bounded."""
SOUND_BYTES_MAX: Final = 1024 * MIB
"""Of a sound: 93 minutes of both voices, and most sessions end after an hour."""
REPLAY_BYTES_MAX: Final = MIB
"""Of a replay's findings: they are bounded."""
_ACTING: Final = "frame-ancestors 'none'"
"""The page may ask this server. Its policy allows its own script only, and no markup made of text;
a browser's own password (Basic) changes nothing here, so with keys a writer gives the key again."""
_SANDBOX: Final = f"{_ACTING}; sandbox allow-scripts allow-downloads"
"""The page is an origin of its own: a log's content cannot act on this server."""


ViewName = Literal["page", "sound", "digest", "replay", "redacted-log", "redacted-page"]


Make = Callable[..., Iterator[bytes]]
"""Makes a view in pieces, none empty, from a log's head, its items, and `ViewOptions` by name."""
Open = Callable[[], OpenSource]


class ViewOptions(TypedDict, total=False):
    """What is asked of a view besides the log.

    Attributes:
        pair: another session: what opens this log and the other, and the other's name. A page
            shows the differences too; a digest has them instead.
        later: the marks next to the log, as `page_marks` has them.
        open_: opens the log another time, for a copy without `kinds` of content; None: all kinds.
    """

    pair: tuple[Open, Open, str]
    later: Mapping[str, Any]
    open_: Open
    kinds: Collection[str] | None


@attrs.frozen(kw_only=True)
class Viewer:
    """Makes one view of a log.

    Attributes:
        head_of: the bytes that stand before the pieces, by the length of all pieces.
        media_type: of the view.
        policy: the `Content-Security-Policy` of a page; empty for other views.
        acting_policy: that of a page with marks, which may ask its server.
        refuses: raised for a session that it cannot show; the client gets their text.
        kinds: the kinds of content that it can leave out.
    """

    pieces_of: Make
    head_of: Callable[[int], bytes] = lambda _: b""
    media_type: str
    policy: str = ""
    acting_policy: str = ""
    refuses: tuple[type[Exception], ...] = ()
    kinds: Collection[str] = ()


LoadViewer = Callable[[ViewName], Viewer]
"""Loads a viewer in a thread, for its first view."""


BOUNDS: Final[Mapping[ViewName, tuple[int, int, int]]] = {
    "page": (HELD_MAX, HELD_PER_KEY_MAX, PAGE_BYTES_MAX),
    "sound": (SOUNDS_MAX, SOUNDS_PER_KEY_MAX, SOUND_BYTES_MAX),
    "digest": (HELD_MAX, HELD_PER_KEY_MAX, DIGEST_BYTES_MAX),
    "replay": (HELD_MAX, HELD_PER_KEY_MAX, REPLAY_BYTES_MAX),
    "redacted-log": (SOUNDS_MAX, SOUNDS_PER_KEY_MAX, SOUND_BYTES_MAX),
    "redacted-page": (HELD_MAX, HELD_PER_KEY_MAX, PAGE_BYTES_MAX),
}
"""Of one kind of view: those that are made or sent at once, also for one key, and their bytes."""


def page_marks(found: Marks, principal: Key, *, is_open: bool) -> dict[str, Any]:
    """Return the marks next to a log for a page, and what its user may do: plain JSON.

    `writes`: where a new mark goes; `asks_key`: whether that takes a key.
    """
    return {
        "marks": [
            {**attrs.asdict(mark), "is_removable": principal.may_see(mark.by)}
            for mark in found.marks
        ],
        "damaged": found.damaged,
        "writes": "log" if is_open else "file",
        "asks_key": bool(principal.name),
    }


class Views:
    """Answers requests with views; `load_viewer` loads their viewers."""

    def __init__(self, load_viewer: LoadViewer) -> None:
        self._load_viewer = load_viewer
        making = ConcurrencyLimit(MAKING_MAX, MAKING_PER_KEY_MAX)
        digesting = ConcurrencyLimit(DIGESTING_MAX, 1)
        self._making = {name: digesting if name == "digest" else making for name in BOUNDS}
        self._held = {
            name: ConcurrencyLimit(most, each) for name, (most, each, _) in BOUNDS.items()
        }

    async def answer(
        self,
        request: Request,
        info: LogInfo,
        name: ViewName,
        headers: Mapping[str, str] = MappingProxyType({}),
        keep: Callable[[bytes], object] | None = None,
        **options: Unpack[ViewOptions],
    ) -> Response:
        """Make a view of a log, and an answer that sends it, with more headers.

        `keep` is called in a thread with a view that is whole.

        `HTTPException`: unknown kinds (400); there is no place (503) or no room (507) now; or the
        log cannot be read, or its view is too large (422).
        """
        with ExitStack() as opening:
            opening.enter_context(self._held[name].take(request))
            view = _View(name)
            opening.callback(view.close)
            with self._making[name].take(request):
                viewer = await in_thread(partial(self._load_viewer, name))
                if not set(options.get("kinds") or ()) <= set(viewer.kinds):
                    raise wrong("kinds", f"some of {','.join(viewer.kinds)}")
                with await in_thread(lambda: LogReader(info.open())) as reader:
                    pieces = viewer.pieces_of(reader.head.fields, reader, **options)
                    pieces = pieces if keep is None else _kept(pieces, keep)
                    take = partial(view.take_from, pieces, viewer.refuses)
                    await while_there(request, partial(in_thread, take))
            view.begin_with(viewer.head_of(view.size))
            if viewer.policy:
                acts = "later" in options
                own, sandbox = (
                    (viewer.acting_policy, _ACTING) if acts else (viewer.policy, _SANDBOX)
                )
                headers = {**headers, "Content-Security-Policy": f"{own}; {sandbox}"}
            return send_file(request, view, opening, headers, media_type=viewer.media_type)


def _kept(pieces: Iterator[bytes], keep: Callable[[bytes], object]) -> Iterator[bytes]:
    whole = b"".join(pieces)
    keep(whole)  # also for a client that left meanwhile, and asks again
    yield whole


class _View:
    """A view, first written, then sent as a `requests.File`. The caller closes it."""

    def __init__(self, name: ViewName) -> None:
        self._name = name
        *_, self._bytes_max = BOUNDS[name]
        self._file = SpooledTemporaryFile(MEMORY_BYTES_MAX)  # noqa: SIM115 - the caller closes it
        self._hash = sha256()
        self._head = b""
        self.size = 0
        self.etag = ""

    def take_from(self, pieces: Iterator[bytes], refuses: tuple[type[Exception], ...]) -> bool:
        """Write the next piece, blocking; False after the last."""
        try:
            piece = next(pieces, b"")
        except refuses as error:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
        self._hash.update(piece)
        self.size += len(piece)
        if self.size > self._bytes_max:
            text = f"its {self._name} would have more than {self._bytes_max} bytes; take the log"
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text)
        try:
            self._file.write(piece)
            self._file.flush()
        except OSError:
            text = f"the server has no room for its {self._name} at the moment"
            raise HTTPException(HTTPStatus.INSUFFICIENT_STORAGE, text) from None
        self.etag = f'"{self._hash.hexdigest()[:32]}"'
        return bool(piece)

    def begin_with(self, head: bytes) -> None:
        """Put bytes before all that is written."""
        self._head = head
        self.size += len(head)

    def read(self, start: int, count: int) -> bytes:
        head = self._head[start : start + count]
        self._file.seek(max(0, start - len(self._head)))
        return head + self._file.read(count - len(head))

    def close(self) -> None:
        self._file.close()
