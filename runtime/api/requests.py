"""What the routes share: parameters, bodies, concurrency, file work in threads, streams and files.

- Query parameters are parsed strictly: a misspelt one is a 400 that says what is valid.
- A body is bounded in bytes; `net.http` bounds its time.
- `ConcurrencyLimit`: a few expensive answers at once, and fewer for a client.
- Errors of file work in a thread become HTTP answers.
- A streamed answer is written until it ends or its client leaves. A writer waits until the
  connection has taken each piece: a slow client delays only its own answer. When the client leaves,
  the writer is cancelled; its resources are always closed. The end of the answer is sent after the
  wait for the client's leaving, which would cancel it.
- A file, or the requested range of it, is read piece by piece in threads. Ranges and validators are
  as in RFC 9110 (13.1.2, 13.1.5, 14), with one range of bytes. Several ranges, other units and
  invalid ranges give the whole file, as a server may; a range outside is a 416.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import Final, Protocol, TypeVar

import anyio
import anyio.to_thread
import attrs
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protocol.values.errors import FieldError, FrameError
from protocol.wire.codec import Fields, parse_frame
from recorder.format.format import RecorderError
from recorder.storage.listing import whole_bytes
from recorder.storage.remote import StoreError
from recorder.storage.store import LogInfo

from ..access.gate import principal_of
from ..access.keys import Key


class NotOnThisGateway(HTTPException):
    """A client asks for a session or recording that it cannot see here; without gateways a 404.

    Args:
        name: the id that it asked for, unchecked.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, detail)
        self.name = name


# -- file work in threads --------------------------------------------------------------------------


_logger = logging.getLogger("antiphon.server")

T = TypeVar("T")


async def in_thread(work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Work on recordings in a thread; `limiter` bounds such threads.

    `HTTPException`: one is missing (404) or unreadable (422), or the object store fails (503).
    """
    try:
        # A disk that hangs must not keep the server from ending.
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except FileNotFoundError:
        raise HTTPException(HTTPStatus.NOT_FOUND, "there is no such recording") from None
    except StoreError as error:
        _logger.warning("%s", error)
        text = "the object store of the recordings does not answer, or refuses"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text) from None
    except RecorderError:
        text = "this recording cannot be read"
        raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, text) from None


# -- query parameters ------------------------------------------------------------------------------


DIGITS_MAX: Final = 18
"""Digits of a number that fits into 63 bits."""
NAME_CHARS_MAX: Final = 32
"""Characters of an unknown parameter's name in the answer."""


def check_names(request: Request, names: Sequence[str]) -> None:
    """Refuse unknown and repeated parameters with `HTTPException`."""
    seen = set[str]()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            text = f"no parameter {name[:NAME_CHARS_MAX]!a}; there are {', '.join(names)}"
            raise HTTPException(HTTPStatus.BAD_REQUEST, text)
        if name in seen:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        seen.add(name)


def read_choice(request: Request, name: str, choices: Sequence[str]) -> str | None:
    """Read a parameter with a few choices, or None; raises `HTTPException` for another value."""
    value = request.query_params.get(name)
    if value is not None and value not in choices:
        raise wrong(name, f"one of {', '.join(choices)}")
    return value


def read_number(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """Read a whole number from `low` to `high`; raises `HTTPException` for another value."""
    text = request.query_params.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX
    if not is_number or not low <= int(text) <= high:
        raise wrong(name, f"a whole number from {low} to {high}")
    return int(text)


def wrong(name: str, wanted: str) -> HTTPException:
    """The answer to an invalid parameter."""
    return HTTPException(HTTPStatus.BAD_REQUEST, f"{name} must be {wanted}")


# -- concurrency -----------------------------------------------------------------------------------


RETRY_S: Final = 5
"""Seconds until a place may be free."""
REFUSAL: Final = "too many requests of this kind at once"


class ConcurrencyLimit:
    """Places for one kind of answer: in all, and for one key, or address without keys.

    `refusal`: the text for a client without a place.
    """

    def __init__(self, most: int, most_each: int, refusal: str = REFUSAL) -> None:
        self._most = most
        self._most_each = most_each
        self._refusal = refusal
        self._counts: Counter[str] = Counter()

    def take(self, request: Request) -> ExitStack:
        """Take a place, given back on leaving the stack; raises `HTTPException` (503) for none."""
        return self.take_for(principal_of(request), request.client.host if request.client else "")

    def take_for(self, principal: Key, host: str) -> ExitStack:
        """Take a place as `take` does, for the client at an address."""
        name = principal.name or f"@{host}"
        if self._counts.total() >= self._most or self._counts[name] >= self._most_each:
            headers = {"Retry-After": str(RETRY_S)}
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal, headers)
        self._counts[name] += 1
        place = ExitStack()
        place.callback(self._release, name)
        return place

    def _release(self, name: str) -> None:
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]


# -- bodies ----------------------------------------------------------------------------------------


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read the body; raises `HTTPException` (413) if it has more than `bytes_max` bytes."""
    length = request.headers.get("content-length", "")
    body = bytearray()
    if length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    async for part in request.stream():
        body += part
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    return bytes(body)


def read_fields(body: bytes, read: Callable[[Fields], T]) -> T:
    """Read a JSON object by `read`; raises `HTTPException` (400) for another body."""
    try:
        fields = Fields(parse_frame(body.decode()))
        found = read(fields)
        fields.refuse_unknown()
    except UnicodeDecodeError:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "$: this is not utf-8") from None
    except FrameError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"$: {error.reason}") from None
    except FieldError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, error.message) from None
    return found


def read_text(body: bytes, name: str, chars_max: int) -> str:
    """Read a JSON object of one text, not empty; raises as `read_fields` does."""
    return read_fields(
        body, lambda fields: fields.required(name, lambda value: value.text(chars_max, 1))
    )


def _too_large(bytes_max: int) -> HTTPException:
    text = f"the body has more than {bytes_max} bytes"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)


# -- answers written piece by piece ----------------------------------------------------------------


Write = Callable[[bytes], Awaitable[None]]
"""Sends a piece of the body, and waits until it was taken."""
WriteBody = Callable[[Write], Awaitable[None]]


@asynccontextmanager
async def _watching(receive: Receive, on_leave: Callable[[], object]) -> AsyncIterator[None]:
    """Call `on_leave` if the client leaves during the block, whose error is raised as it is."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_leave()

    failure = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            yield
        except Exception as error:
            failure = error  # a task group would raise it in a group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def while_there(request: Request, step: Callable[[], Awaitable[bool]]) -> None:
    """Take steps, the last of which is False, until the client leaves: `ClientDisconnect`.

    A step is never cut off: its thread would go on, and no place would be counted for it.
    """
    left = anyio.Event()
    async with _watching(request.receive, left.set):
        while not left.is_set() and await step():
            pass
    if left.is_set():
        raise ClientDisconnect


async def until_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Do work, and cancel it when the client leaves: `ClientDisconnect`."""
    with anyio.CancelScope() as scope:
        async with _watching(request.receive, scope.cancel):
            return await work()
    raise ClientDisconnect


class Stream(Response):
    """An answer that `write_body` writes while it is sent.

    `opened` has its resources, entered before; left when the answer is over, in every case.
    """

    def __init__(
        self,
        write_body: WriteBody,
        *,
        opened: AbstractContextManager[object],
        status: int = HTTPStatus.OK,
        headers: Mapping[str, str],
        media_type: str,
    ) -> None:
        self._write_body = write_body
        self._opened = opened
        self.status_code = status
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def write(piece: bytes) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

        start = {"status": self.status_code, "headers": self.raw_headers}
        with self._opened, anyio.CancelScope() as sending:
            async with _watching(receive, sending.cancel):
                await send({"type": "http.response.start", **start})
                if scope["method"] != "HEAD":
                    await self._write_body(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# -- files -----------------------------------------------------------------------------------------


# -- ranges ----------------------------------------------------------------------------------------


_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


@attrs.frozen(kw_only=True)
class Part:
    """The answer: bytes `start` to `end` (exclusive), headers, and 200, 206, 304 or 416."""

    status: HTTPStatus
    start: int = 0
    end: int = 0
    headers: dict[str, str]


def part_of(headers: Headers, *, size: int, etag: str) -> Part:
    """Choose the part of a file for a GET; `etag` is a strong one, quotes included."""
    fields = {"ETag": etag, "Accept-Ranges": "bytes"}
    known = headers.get("if-none-match", "").split(",")
    if not {"*", etag}.isdisjoint(tag.strip().removeprefix("W/") for tag in known):
        return Part(status=HTTPStatus.NOT_MODIFIED, headers=fields)
    is_same = headers.get("if-range", etag) == etag
    bounds = _bounds(headers.get("range", ""), size) if is_same else None
    start, end = bounds or (0, size)
    if bounds is None:
        status = HTTPStatus.OK
    elif start < end:
        status = HTTPStatus.PARTIAL_CONTENT
        fields["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    else:
        status, start, end = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
        fields["Content-Range"] = f"bytes */{size}"
    fields["Content-Length"] = str(end - start)
    return Part(status=status, start=start, end=end, headers=fields)


def _bounds(asked: str, size: int) -> tuple[int, int] | None:
    """Parse a range; None for an invalid one, an empty span for one outside."""
    found = _RANGE.fullmatch(asked.replace(" ", ""))
    if found is None or found[1] == found[2] == "":
        return None
    first, last = found[1], found[2]
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(size, int(last) + 1) if last else size


# -- files -----------------------------------------------------------------------------------------


PIECE_BYTES: Final = 128 * 1024
"""Bytes read and sent at once: some tens of microseconds of the event loop."""


class File(Protocol):
    """A file that is open for reading; `etag` names its `size` bytes, quotes included."""

    size: int
    etag: str

    def read(self, start: int, count: int) -> bytes:
        """Read exactly `count` bytes, blocking; raises `OSError` if they are gone."""
        ...


def send_file(
    request: Request, file: File, opening: ExitStack, headers: Mapping[str, str], *, media_type: str
) -> Response:
    """Answer a GET or a HEAD with an open file and more headers.

    `opening` closes the file, and is taken over if it is read later.
    """
    part = part_of(request.headers, size=file.size, etag=file.etag)
    sent = {**part.headers, **headers}
    if part.start == part.end:
        type_sent = media_type if part.status == HTTPStatus.OK else None
        return Response(status_code=part.status, headers=sent, media_type=type_sent)

    async def write_body(write: Write) -> None:
        for start in range(part.start, part.end, PIECE_BYTES):
            read = partial(file.read, start, min(PIECE_BYTES, part.end - start))
            # A disk that hangs must not keep the server from ending.
            await write(await anyio.to_thread.run_sync(read, abandon_on_cancel=True))

    return Stream(
        write_body,
        opened=opening.pop_all(),
        status=part.status,
        headers=sent,
        media_type=media_type,
    )


class LogFile:
    """The bytes of an open log at this time; `etag` names them, because a log only grows."""

    def __init__(self, info: LogInfo, *, is_open: bool) -> None:
        self._source = info.open()
        try:
            size = whole_bytes(self._source) if is_open else self._source.size()
            self.size = size
            self.etag = f'"{info.inode:x}-{size:x}"'
        except BaseException:
            self.close()
            raise

    def read(self, start: int, count: int) -> bytes:
        """Read exactly `count` bytes, blocking."""
        data = self._source.read(start, count)
        if len(data) != count:
            raise OSError("a log became shorter while it was sent")
        return data

    def close(self) -> None:
        """Close the file."""
        self._source.close()


class InMemory:
    """A file in memory, as `File`."""

    def __init__(self, data: bytes, media_type: str) -> None:
        self._data = data
        self.media_type = media_type
        self.size = len(data)
        self.etag = f'"{sha256(data).hexdigest()[:32]}"'

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes."""
        return self._data[start : start + count]
