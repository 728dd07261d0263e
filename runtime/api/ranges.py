"""The part of a file that a request asks for: all, a range, or none if the client has it.

As in RFC 9110 (13.1.2, 13.1.5, 14), with one range of bytes. Several ranges, other units and
invalid ranges give the whole file, as a server may; a range outside is a 416.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

import attrs
from starlette.datastructures import Headers

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
