"""A request's body, bounded in bytes; `transport.bodies` bounds its time."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read the body; raises `HTTPException` (413) if it has more than `bytes_max` bytes."""
    said = request.headers.get("content-length", "")
    body = bytearray()
    if said.isdigit() and int(said[:18]) > bytes_max:
        raise _too_large(bytes_max)
    async for part in request.stream():
        body += part
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    return bytes(body)


def _too_large(bytes_max: int) -> HTTPException:
    text = f"the body has more than {bytes_max} bytes"
    return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
