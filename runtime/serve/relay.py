"""The other gateways: a client's request for what one of them has is relayed to it.

Several servers behind a balancer are given each other's addresses. A client that comes back to a
session, or asks for a recording, may reach any of them. One that does not have it asks all others
at once, with the client's own request; the one that has it answers, and the others say 421
(Misdirected Request, RFC 9110, 15.5.20). There is no list of who has what, and nothing is trusted:
the owner checks the client's key, as if the client had come to it. A request that was relayed is
not relayed again.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from recorder.format.format import is_recording_id

from ..access.origins import PORT_OF, read_origin
from ..api.requests import NotOnThisGateway, Stream, Write, read_body
from ..net.http import error_body, http_error, json_response
from ..net.listener import WebSocketRequest
from ..net.upstream import (
    SWITCHING,
    Address,
    Headers,
    Upstream,
    UpstreamError,
    UpstreamRequest,
    ask,
)
from ..settings.settings import Settings, shown

RELAYED: Final = "antiphon-relayed"
"""The header of a request that comes from another gateway. A client that sends it gains nothing."""
ASKING_MAX: Final = 64
"""Requests whose owner is looked for at once: each is a connection to every other gateway."""
BODY_BYTES_MAX: Final = 64 * 1024
"""Of a relayed request: none about one session or recording is larger."""
RETRY_S: Final = 2
"""Sent to a client whose session's gateway is away: one whose model is elsewhere is back then."""
ANSWER_BYTES_MAX: Final = 64 * 1024
"""Of an answer that refuses a WebSocket: a sentence."""
NOT_HERE: Final = HTTPStatus.MISDIRECTED_REQUEST
AWAY: Final = HTTPStatus.SERVICE_UNAVAILABLE
_ANSWER_HEADERS: Final = frozenset({"retry-after", "www-authenticate"})

_LOG: Final = logging.getLogger("antiphon.gateways")


class GatewayUnreachable(Exception):  # noqa: N818 - an answer to the client, not an error of ours
    """No gateway that answers has it, and one does not answer."""

    body = error_body("gateway_away", "the server that may have this does not answer; try again")
    headers = (("Retry-After", str(RETRY_S)),)


def read_gateway(text: str) -> tuple[str, str, int]:
    """Read a gateway's address: scheme, host, port; `ValueError` if it is no `http(s)://HOST`."""
    origin = read_origin(text)
    if origin is None or origin.port is None or origin.scheme not in PORT_OF:
        raise ValueError(f"{shown(text)} is not an address: http://HOST:PORT or https://HOST:PORT")
    return origin.scheme, origin.host, origin.port


def is_relayed(headers: Headers) -> bool:
    """Whether another gateway sent a request; names of headers are in lower case."""
    return any(name == RELAYED for name, _ in headers)


class Relay:
    """The other gateways of the settings; none: nothing is relayed.

    `ValueError`: the certificates of `gateway_ca` cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._all = tuple(_address(it, settings.gateway_ca) for it in settings.gateways)
        self._away: set[Address] = set()
        self._asking = 0

    async def relay_websocket(self, request: WebSocketRequest, name: str) -> bool:
        """Give a WebSocket's client to the gateway that has the session `name`.

        Returns:
            Whether the request is answered; False where no gateway has it.
        """
        if not self._all or not is_recording_id(name):
            return False
        asked = UpstreamRequest(
            method="GET", target=request.target, headers=request.headers, is_websocket=True
        )
        try:
            async with self._owner(asked) as owner:
                if owner is None:
                    return False
                if owner.status == SWITCHING:
                    await request.relay(owner)
                else:
                    headers = [it for it in owner.headers if it[0] in _ANSWER_HEADERS]
                    await request.reject(owner.status, await _whole(owner), headers)
        except GatewayUnreachable as error:
            await request.reject(AWAY, error.body, error.headers)
        return True

    async def relay_http(self, request: Request, error: Exception) -> Response:
        """Answer a request for what is not here: by the gateway that has it, or with a 404."""
        assert isinstance(error, NotOnThisGateway)
        if RELAYED in request.headers:
            return json_response(error_body("not_here", error.detail), NOT_HERE)
        missing = await http_error(request, error)
        if not self._all or not is_recording_id(error.name):
            return missing
        query = request.scope["query_string"].decode("ascii")
        asked = UpstreamRequest(
            method=request.method,
            target=request.scope["raw_path"].decode("ascii") + (f"?{query}" if query else ""),
            headers=tuple(request.headers.items()),
            body=await read_body(request, BODY_BYTES_MAX),
        )
        return _RelayedResponse(self, asked, missing)

    async def answer(
        self, asked: UpstreamRequest, missing: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the owner's answer to a request, or `missing` where there is no owner."""
        response = missing
        try:
            async with self._owner(asked) as owner:
                if owner is not None:
                    response = Stream(
                        partial(_write, owner),
                        opened=nullcontext(),
                        status=owner.status,
                        headers=dict(owner.headers),
                        media_type="application/octet-stream",
                    )
                await response(scope, receive, send)
        except GatewayUnreachable as error:
            await json_response(error.body, AWAY, dict(error.headers))(scope, receive, send)

    @asynccontextmanager
    async def _owner(self, asked: UpstreamRequest) -> AsyncIterator[Upstream | None]:
        """The answer of the gateway that has it; None: no one has it. `GatewayUnreachable`."""
        owner = await self._ask_all(asked)
        try:
            yield owner
        finally:
            if owner is not None:
                with anyio.CancelScope(shield=True):
                    await owner.aclose()

    async def _ask_all(self, asked: UpstreamRequest) -> Upstream | None:
        if self._asking >= ASKING_MAX:
            raise GatewayUnreachable
        owners, is_away = list[Upstream](), False

        async def ask_one(address: Address) -> None:
            nonlocal is_away
            answer = await self._ask_one(address, asked)
            if answer is None or answer.status == AWAY:
                is_away = True
            if answer is not None and (owners or answer.status in (NOT_HERE, AWAY)):
                await answer.aclose()
            elif answer is not None:
                owners.append(answer)
                tasks.cancel_scope.cancel()

        self._asking += 1
        try:
            async with anyio.create_task_group() as tasks:
                for address in self._all:
                    tasks.start_soon(ask_one, address)
        finally:
            self._asking -= 1
        if is_away and not owners:
            raise GatewayUnreachable
        return owners[0] if owners else None

    async def _ask_one(self, address: Address, asked: UpstreamRequest) -> Upstream | None:
        """Ask a gateway; None if it does not answer, which is logged once."""
        try:
            answer = await ask(address, asked, ((RELAYED, "1"),))
        except UpstreamError as error:
            if address not in self._away:
                _LOG.warning("a gateway is away: %s", error)
            self._away.add(address)
            return None
        self._away.discard(address)
        return answer


class _RelayedResponse(Response):
    """Another gateway's answer; it is asked for when this one is sent."""

    def __init__(self, gateways: Relay, asked: UpstreamRequest, missing: Response) -> None:
        super().__init__()
        self._answer = partial(gateways.answer, asked, missing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await self._answer(scope, receive, send)


async def _write(owner: Upstream, write: Write) -> None:
    async with aclosing(owner.body()) as pieces:
        async for piece in pieces:
            await write(piece)


async def _whole(owner: Upstream) -> bytes:
    """The body of a refusal, cut at `ANSWER_BYTES_MAX`."""
    body = b""
    async with aclosing(owner.body()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) >= ANSWER_BYTES_MAX:
                break
    return body[:ANSWER_BYTES_MAX]


def _address(text: str, ca: Path | None) -> Address:
    scheme, host, port = read_gateway(text)
    if scheme == "http":
        return Address(host=host, port=port)
    try:
        return Address(host=host, port=port, tls=ssl.create_default_context(cafile=ca))
    except OSError as error:
        raise ValueError(f"{ca}: holds no certificates: {error}") from error
