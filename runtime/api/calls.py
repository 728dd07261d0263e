"""Calls of browsers by WebRTC, as OpenAI's APIs have them: offers go to the door.

| path | is | for |
|---|---|---|
| `POST /v1/realtime/calls` | answers the offer of a peer connection (SDP) | each key, and secret |
| `POST /v1/live/sessions` | the same for OpenAI's Live API: `{"session", "transport": {"type": "webrtc", "sdp"}}` | each key |

The body is the offer (`application/sdp`), or a form of `sdp` and `session`, its settings.
`?model=` is as that of the WebSocket. The key is judged first, then the offer is read by the door
(`antiphon door`), which begins a session with the same key.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlencode

import anyio
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.limits import Mode

from ..access.middleware import CALLS_PATH, principal_of
from ..link.address import connect, read_address
from ..net.http import LIVE_PATH, CodedError, bad_request, json_response
from ..webrtc.offer import LINE_BYTES_MAX, OFFER_BYTES_MAX
from .local_client import RETRY
from .openai import read_object
from .requests import ConcurrencyLimit, check_names, read_body
from .transcriptions import read_form

ANSWER_WAIT_S: Final = 20.0
OFFERS_MAX: Final = 64
OFFERS_PER_KEY_MAX: Final = 8
_LOST: Final = (
    *(OSError, TimeoutError, anyio.EndOfStream, anyio.IncompleteRead),
    *(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.DelimiterNotFound),
)
_SENT_ON: Final = ("authorization", "openai-safety-identifier")


class Calls:
    """The route to the door at an address, as for a worker; None for none.

    `check` refuses a client that may not have a session of a mode now.
    """

    def __init__(self, door: str | None, check: Callable[[Request, Mode], object]) -> None:
        self._door = read_address(door) if door else None
        self._check = check
        self._offers = ConcurrencyLimit(OFFERS_MAX, OFFERS_PER_KEY_MAX)

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [
            Route(CALLS_PATH, self._begin, methods=["POST"]),
            Route(LIVE_PATH, self._begin_live, methods=["POST"]),
        ]

    async def _begin_live(self, request: Request) -> Response:
        self._check(request, "audio")
        check_names(request, ())
        with self._offers.take(request):
            body = read_object(await read_body(request, OFFER_BYTES_MAX), OFFER_BYTES_MAX)
            match body:
                case {"session": dict(session), "transport": {"type": "webrtc", "sdp": str(sdp)}}:
                    answer = await self._ask(request, sdp.encode(), session, is_live=True)
                case _:
                    text = "session and transport are needed, the transport is webrtc with an sdp"
                    raise bad_request("invalid_payload", text, "transport")
        transport = {"type": "webrtc", "sdp": _sdp_of(answer)}
        return json_response({"session": {"id": answer["call"]}, "transport": transport})

    async def _begin(self, request: Request) -> Response:
        self._check(request, "audio")
        check_names(request, ("model",))
        with self._offers.take(request):
            body = await read_body(request, OFFER_BYTES_MAX)
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            session = None
            if kind != "application/sdp":
                fields = read_form(request.headers.get("content-type", ""), body)
                body = fields.get("sdp", b"")
                if "session" in fields:
                    session = read_object(fields["session"], OFFER_BYTES_MAX)
            answer = await self._ask(request, body, session)
        return Response(
            _sdp_of(answer),
            HTTPStatus.CREATED,
            {"Location": f"{CALLS_PATH}/{answer['call']}"},
            "application/sdp",
        )

    async def _ask(
        self,
        request: Request,
        offer: bytes,
        session: Mapping[str, Any] | None,
        *,
        is_live: bool = False,
    ) -> dict[str, Any]:
        """Ask the door for an answer; raises `CodedError`."""
        if self._door is None:
            text = "WebRTC is not served here: connect by WebSocket"
            raise CodedError(HTTPStatus.NOT_FOUND, "not_served", text)
        query = urlencode({"model": (session or {}).get("model", ""), **request.query_params})
        asked = {
            "sdp": offer.decode("utf-8", "replace"),
            "target": LIVE_PATH if is_live else f"/v1/realtime?{query}",
            "is_live": is_live,
            "party": principal_of(request).name or (request.client.host if request.client else ""),
            "headers": {it: request.headers[it] for it in _SENT_ON if it in request.headers},
            "session": session,
        }
        try:
            with anyio.fail_after(ANSWER_WAIT_S):
                async with await connect(self._door, None) as stream:
                    await stream.send(orjson.dumps(asked) + b"\n")
                    lines = BufferedByteReceiveStream(stream)
                    line = await lines.receive_until(b"\n", LINE_BYTES_MAX)
        except _LOST as error:
            text = "the door for WebRTC does not answer, try again later"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise CodedError(status, "service_unavailable", text, headers=RETRY) from error
        return dict(orjson.loads(line))


def _sdp_of(answer: Mapping[str, Any]) -> str:
    """Return the SDP that the door answered with; raises `CodedError` if it refused."""
    if "sdp" not in answer:
        status = answer["status"]
        headers = RETRY if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        raise CodedError(status, answer["code"], answer["message"], headers=headers)
    return str(answer["sdp"])
