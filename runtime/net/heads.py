"""The head of a connection's first request: read, checked, and refused if invalid.

A head is bounded in bytes, in headers and in time. `Refused` carries the answer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

import attrs
import h11
import trio

from .http import HEAD_BYTES_MAX, HEADERS_MAX, HTTP_VERSIONS, error_body, header_tokens
from .link import Link

HEAD_READ_BYTES: Final = 4096
"""A head is read in few pieces, and exceeds its bound by less than one."""
ANSWER_WAIT_S: Final = 2.0
"""The time for a refusal to reach its client before the socket closes."""
QUERY_FIELDS_MAX: Final = 32
"""No source's URL has more than three."""

WEBSOCKET_KEY_BYTES: Final = 16


class Refused(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """The request is answered at once, and the connection closed."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.body = error_body(code, message)
        self.headers = tuple((name.replace("_", "-"), value) for name, value in headers.items())


@attrs.frozen(kw_only=True)
class Head:
    """A request's head: parsed, as it came, and the bytes after it."""

    request: h11.Request
    raw: bytes
    trailing: bytes


class Target(NamedTuple):
    """A request's decoded path, and each query name's values in order."""

    path: str
    query: Mapping[str, tuple[str, ...]]


async def read_head(link: Link, *, deadline_s: float, wait_s: float) -> Head | None:
    """Read the first request's head; None if the peer left, or sent no byte.

    `deadline_s` is on the event loop's clock; `wait_s` is the limit behind it, for the answer of
    `Refused`: the head is invalid, not supported, or late.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
    raw = bytearray()
    with trio.move_on_at(deadline_s):
        while data := await link.receive_some(HEAD_READ_BYTES):
            raw += data
            parser.receive_data(data)
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                raise Refused(status, "bad_request", "this is no HTTP/1.1 request") from None
            if isinstance(event, h11.Request):
                _check(event)
                return Head(request=event, raw=bytes(raw), trailing=parser.trailing_data[0])
        return None
    if not raw:
        return None
    raise Refused(408, "request_timeout", f"no request head within {wait_s:g} s")


def _check(request: h11.Request) -> None:
    if len(request.headers) > HEADERS_MAX:
        raise Refused(431, "bad_request", f"more than {HEADERS_MAX} headers")
    if request.http_version not in HTTP_VERSIONS:
        raise Refused(505, "http_version_not_supported", "HTTP/1.1 is spoken here")


def parse_target(head: h11.Request) -> Target:
    """Parse a request's target; raises `Refused` for an invalid path or a long query."""
    path, _, query = head.target.decode("ascii").partition("?")
    if not path.startswith("/"):
        raise Refused(400, "bad_request", "the request's target is no path")
    values: dict[str, tuple[str, ...]] = {}
    try:
        for name, value in parse_qsl(
            query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX
        ):
            values[name] = (*values.get(name, ()), value)
    except ValueError:
        text = f"the query has more than {QUERY_FIELDS_MAX} fields"
        raise Refused(400, "bad_request", text) from None
    return Target(unquote(path), values)


def check_handshake(head: h11.Request) -> str:
    """Check a request by RFC 6455, 4.2.1, and return its key; raises `Refused`."""
    names = [name for name, _ in head.headers]
    if head.http_version != b"1.1" or b"content-length" in names or b"transfer-encoding" in names:
        raise Refused(400, "bad_request", "a WebSocket request is HTTP/1.1 without a body")
    if header_tokens(head, b"sec-websocket-version") != ("13",):
        text = "the WebSocket version must be 13"
        raise Refused(426, "upgrade_required", text, Sec_WebSocket_Version="13")
    keys = header_tokens(head, b"sec-websocket-key")
    if len(keys) == 1:
        try:
            if len(base64.b64decode(keys[0], validate=True)) == WEBSOCKET_KEY_BYTES:
                return keys[0]
        except (ValueError, binascii.Error):
            pass
    raise Refused(400, "bad_request", "sec-websocket-key must be 16 bytes in base64, once")


async def answer(
    link: Link, status: int, body: bytes, headers: Sequence[tuple[str, str]] = ()
) -> None:
    """Send a JSON response and wait, a bounded time, until the client has taken it.

    `headers` are in addition to the type, the length and `Connection: close`.
    """
    response = h11.Response(
        status_code=status,
        reason=HTTPStatus(status).phrase,
        headers=[
            ("Connection", "close"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *headers,
        ],
    )
    writer = h11.Connection(h11.SERVER)
    parts = (writer.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage()))
    await say_last(link, b"".join(part or b"" for part in parts))


async def say_last(link: Link, data: bytes) -> None:
    """Send the last bytes of a connection and wait, a bounded time, until they are taken."""
    with trio.move_on_after(ANSWER_WAIT_S):
        await link.send_all(data)
        await link.linger()
