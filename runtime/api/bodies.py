"""A request's body, read as far as it may go; in which time it must come is `transport.bodies`'."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Read the body.

    Args:
        request: whose.
        bytes_max: the most bytes that are taken.

    Raises:
        HTTPException: it is longer, or says so (413).
    """
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
