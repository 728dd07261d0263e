"""What a request for a file asks for: all of it, a part, or nothing if the client has it.

As RFC 9110 has it (13.1.2, 13.1.5, 14): one range of bytes. Several at once, other units and what
is no range at all give the whole file, as a server may; a range that lies outside is 416. It reads
headers and nothing else.
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
    """What is answered.

    Attributes:
        status: 200 for all, 206 for a part, 304 or 416 for nothing.
        start: of the first byte.
        end: behind the last one.
        headers: what the answer says of it.
    """

    status: HTTPStatus
    start: int = 0
    end: int = 0
    headers: dict[str, str]


def part_of(headers: Headers, *, size: int, etag: str) -> Part:
    """Say what a GET is answered.

    Args:
        headers: of the request.
        size: of the file.
        etag: names the file's bytes, quotes included; it is a strong one.
    """
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
    """Read a range; None where it is none, and nothing between them where it lies outside."""
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
