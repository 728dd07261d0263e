"""An HTTP answer with a file, or the requested range of it, read piece by piece in threads.

Ranges and validators are as in RFC 9110 (13.1.2, 13.1.5, 14), with one range of bytes. Several
ranges, other units and invalid ranges give the whole file, as a server may; a range outside is a
416.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import Final, Protocol

import anyio.to_thread
import attrs
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from recorder.keep.store import LogInfo
from recorder.keep.summary import whole_bytes

from .requests import Stream, Write

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
    said = {"ETag": etag, "Accept-Ranges": "bytes"}
    if _has_it(headers.get("if-none-match", ""), etag):
        return Part(status=HTTPStatus.NOT_MODIFIED, headers=said)
    is_same = headers.get("if-range", etag) == etag
    bounds = _bounds(headers.get("range", ""), size) if is_same else None
    start, end = bounds or (0, size)
    if bounds is None:
        status = HTTPStatus.OK
    elif start < end:
        status = HTTPStatus.PARTIAL_CONTENT
        said["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    else:
        status, start, end = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
        said["Content-Range"] = f"bytes */{size}"
    said["Content-Length"] = str(end - start)
    return Part(status=status, start=start, end=end, headers=said)


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


def _has_it(if_none_match: str, etag: str) -> bool:
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return "*" in tags or etag in tags


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
    told = {**part.headers, **headers}
    if part.start == part.end:
        type_told = media_type if part.status == HTTPStatus.OK else None
        return Response(status_code=part.status, headers=told, media_type=type_told)

    async def write_body(write: Write) -> None:
        for start in range(part.start, part.end, PIECE_BYTES):
            read = partial(file.read, start, min(PIECE_BYTES, part.end - start))
            # A disk that hangs must not keep the server from ending.
            await write(await anyio.to_thread.run_sync(read, abandon_on_cancel=True))

    return Stream(
        write_body,
        opened=opening.pop_all(),
        status=part.status,
        headers=told,
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
    """A file in memory, as `File`; `encoding` is how its data is compressed."""

    def __init__(self, data: bytes, media_type: str, encoding: str = "") -> None:
        self._data = data
        self.media_type = media_type
        self.encoding = encoding
        self.size = len(data)
        self.etag = f'"{sha256(data).hexdigest()[:32]}"'

    def read(self, start: int, count: int) -> bytes:
        """Return `count` bytes."""
        return self._data[start : start + count]
