"""A request's body, bounded in bytes; `http.bounded` bounds its time."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from protocol.values.errors import FieldError, FrameError
from protocol.wire.codec import Fields, parse_frame

T = TypeVar("T")


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
