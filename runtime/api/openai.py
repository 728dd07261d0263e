"""OpenAI's HTTP API, as far as it is served: answers, transcriptions, client secrets, calls.

| path | is | for |
|---|---|---|
| `POST /v1/chat/completions` | an answer to a conversation, whole or as a stream | each key |
| `POST /v1/audio/transcriptions` | the text of a sound file, whole or as a stream | each key |
| `POST /v1/responses` | not served (404) | each key |
| `POST /v1/audio/speech` | not served (404) | each key |
| `POST /v1/audio/translations` | not served (404) | each key |
| `POST /v1/realtime/client_secrets` | a key for a browser that begins sessions until it expires: `{"value", "expires_at", "session"}` | each key |

- An answer, and a text, is that of a session, which waits, is recorded and counts to its key as any
  other. A client that leaves ends it. `X-Request-Id` is the session's id.
- What is refused before the first piece has a status; later a stream ends with the error.
- A secret's settings are read as those of a `session.update` are, and its sessions begin with them.
- Errors have OpenAI's form (`net.http.CodedError`). Other addresses of that API are refused by name.

Calls of browsers by WebRTC, as OpenAI's APIs have them; their offers go to the door:

| path | is | for |
|---|---|---|
| `POST /v1/realtime/calls` | answers the offer of a peer connection (SDP) | each key, and secret |
| `POST /v1/live/sessions` | the same for OpenAI's Live API: `{"session", "transport": {"type": "webrtc", "sdp"}}` | each key |

The body of a call is the offer (`application/sdp`), or a form of `sdp` and `session`, its settings.
`?model=` is as that of the WebSocket. The key is judged first, then the offer is read by the door
(`antiphon door`), which begins a session with the same key.
"""  # noqa: E501 - a table

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import urlencode

import anyio
import anyio.to_thread
import attrs
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.errors import FieldError, FrameError
from protocol.values.limits import Mode
from protocol.values.requests import Request as RequestKind
from protocol.wire.audio import to_pcm16
from protocol.wire.codec import Context, Fields, as_object, parse_frame
from protocol.wire.dialects import OPENAI, OPENAI_TRANSCRIPTION
from protocol.wire.dialects.shared import SESSION_UPDATE

from ..access import keys
from ..access.gate import CALLS_PATH, principal_of
from ..access.keys import Key
from ..link.link import connect, read_address
from ..media.decoder import Client, MediaDecoder
from ..media.values import MediaError
from ..net.http import LIVE_PATH, CodedError, bad_request, error_for, json_response
from ..net.limits import LargeMessageLimiter
from ..settings.settings import MIB, Settings
from ..webrtc.offer import LINE_BYTES_MAX, OFFER_BYTES_MAX
from . import completions, transcriptions
from .adapters import RETRY, LocalClient
from .requests import ConcurrencyLimit, Stream, Write, check_names, read_body, until_gone
from .transcriptions import read_form

SECRET_BODY_BYTES_MAX: Final = 64 * 1024
"""More than fits into a secret: its error says so."""
BODY_BYTES_MAX: Final = 25 * MIB
"""OpenAI's own limit of a file."""
LARGE_BYTES: Final = 1 * MIB
CALLS_MAX: Final = 1_024
CALLS_PER_KEY_MAX: Final = 256
LARGE_CALLS_MAX: Final = 16
LARGE_CALLS_PER_KEY_MAX: Final = 4
"""Each may hold 100 MiB: its body, and what it decodes to."""
SPEECH_S_MAX: Final = 1_500
"""Of a file: its samples fit into the answer of the process that decodes it."""
BYTES_PER_S: Final = 32_000
"""Of 16-bit sound at 16 kHz."""
NOT_SERVED: Final = {
    "/v1/responses": "the Responses API is not served: use /v1/chat/completions",
    "/v1/audio/speech": "no model only reads aloud: use /v1/chat/completions with modalities",
    "/v1/audio/translations": "no model translates speech: use /v1/audio/transcriptions",
}
_OBJECT: Final = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}


def refuse(error: FieldError | FrameError) -> NoReturn:
    """Raise the answer to a body that cannot be read."""
    if isinstance(error, FrameError):
        raise bad_request("invalid_json", error.reason) from None
    path, _, _ = error.message.partition(": ")
    param = path.removeprefix("$.")
    raise bad_request(str(error.code), error.message, param) from None


def read_object(body: bytes, bytes_max: int) -> dict[str, Any]:
    """Read a body as a JSON object; raises `CodedError`."""
    try:
        return dict(parse_frame(body.decode(), bytes_max))
    except UnicodeDecodeError:
        raise bad_request("invalid_json", "this is not utf-8") from None
    except FrameError as error:
        refuse(error)


def sign_secret(key: Key, lifetime_s: int, **claims: Any) -> tuple[str, int]:
    """Make a client secret; returns it with the time of its end. Raises `CodedError`."""
    if key.name and not key.hash:
        text = "a client secret makes no other one"
        raise CodedError(HTTPStatus.FORBIDDEN, "scope_too_small", text)
    made_s = int(time.time())
    secret = keys.ClientSecret(
        key_name=key.name, made_s=made_s, expires_s=made_s + lifetime_s, **claims
    )
    try:
        return secret.sign(key), secret.expires_s
    except keys.SecretTooLongError as error:
        text = f"the session's settings do not fit: {error}"
        raise bad_request("invalid_payload", text, "session") from None


class Begin(Protocol):
    """Begins a session of a request's client."""

    def __call__(self, request: Request, client: LocalClient, mode: Mode, seed: int | None) -> None:
        """Begin it in the server's own tasks; raises `CodedError` and `Denied`."""


class OpenAIApi:
    """The routes of OpenAI's API.

    `models` returns the names of the model; `check` refuses a client that may not have a session of
    a mode now, as `begin` does.
    """

    def __init__(
        self,
        settings: Settings,
        models: Callable[[], tuple[str, ...]],
        begin: Begin,
        check: Callable[[Request, Mode], object],
        decoder: MediaDecoder,
    ) -> None:
        self._models = models
        self._begin = begin
        self._check = check
        self._decoder = decoder
        self._limiter = LargeMessageLimiter()
        self._speech_s_max = min(
            SPEECH_S_MAX, settings.transcription_buffer_mb * MIB // BYTES_PER_S
        )
        self._calls = ConcurrencyLimit(CALLS_MAX, CALLS_PER_KEY_MAX)
        self._large_calls = ConcurrencyLimit(LARGE_CALLS_MAX, LARGE_CALLS_PER_KEY_MAX)

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
            Route("/v1/realtime/client_secrets", self._make_secret, methods=["POST"]),
            *(Route(path, self._refuse, methods=["POST"]) for path in NOT_SERVED),
        ]

    async def _refuse(self, request: Request) -> Response:
        text = NOT_SERVED[request.scope["path"]]
        raise CodedError(HTTPStatus.NOT_FOUND, "not_served", text)

    # -- answers and texts ----------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        with ExitStack() as opening:
            body = read_object(await self._body(request, opening), BODY_BYTES_MAX)
            asked = completions.CompletionRequest.of(body)
            self.check_model(asked.model, "model")
            client = LocalClient(partial(completions.react, asked))
            opening.callback(client.leave)
            self._begin(request, client, "chat", asked.seed)
            if asked.is_stream:
                events = partial(completions.chunk, asked)
                return await self._stream(request, opening, client, events)
            created, done = await until_gone(request, partial(_first_and_last, client))
            make = partial(completions.whole, asked, done)
            return json_response(await anyio.to_thread.run_sync(make), headers=_id_of(created))

    async def _transcribe(self, request: Request) -> Response:
        with ExitStack() as opening:
            body = await self._body(request, opening)
            is_small = len(body) <= LARGE_BYTES
            asked = transcriptions.UploadRequest.of(request.headers.get("content-type", ""), body)
            del body
            self.check_model(asked.model, "model")
            self._check(request, "transcription")
            pcm16 = await until_gone(request, partial(self._decode, request, asked.file))
            asked = attrs.evolve(asked, file=b"")  # a whole session does not need it
            if is_small and len(pcm16) > LARGE_BYTES:  # a small file may have an hour of silence
                _enter(request, opening, self._large_calls)
            client = LocalClient(partial(transcriptions.react, asked, pcm16))
            opening.callback(client.leave)
            self._begin(request, client, "transcription", None)
            if asked.is_stream:
                return await self._stream(request, opening, client, transcriptions.events)
            created, done = await until_gone(request, partial(_first_and_last, client))
            if asked.form == "text":
                return Response(
                    f"{done['text']}\n", media_type="text/plain", headers=_id_of(created)
                )
            return json_response(transcriptions.whole(asked, done, pcm16), headers=_id_of(created))

    async def _decode(self, request: Request, file: bytes) -> bytes:
        """Decode a file to PCM16 at 16 kHz."""
        client = Client(is_live=False, owner=principal_of(request).name)
        try:
            pcm = await self._decoder.decode_speech(file, self._speech_s_max, client)
        except MediaError as error:
            raise bad_request("invalid_audio", f"file: {error.reason}", "file") from None
        return await anyio.to_thread.run_sync(to_pcm16, pcm)

    async def _body(self, request: Request, opening: ExitStack) -> bytes:
        """Read a body that may be large, with a place for it."""
        length = request.headers.get("content-length", "")
        is_small = length.isdigit() and int(length) <= LARGE_BYTES
        _enter(request, opening, self._calls)
        if not is_small:
            _enter(request, opening, self._large_calls)
        body = await read_body(request, BODY_BYTES_MAX)
        if not is_small:
            await self._limiter.wait(len(body))  # to read one holds up the event loop
        return body

    async def _stream(
        self,
        request: Request,
        opening: ExitStack,
        client: LocalClient,
        events: Callable[[dict[str, Any]], Iterator[object]],
    ) -> Response:
        """Answer by server-sent events, from the session's first word on."""

        async def first() -> list[dict[str, Any]]:
            return [await client.next(), await client.next()]

        first_messages = await until_gone(request, first)

        async def write_body(write: Write) -> None:
            messages = first_messages
            while messages:
                made = [orjson.dumps(it) for message in messages for it in events(message)]
                await write(b"".join(b"data: %b\n\n" % it for it in made))
                if _is_last(messages[-1]):
                    break
                try:
                    messages = [await client.next()]
                except CodedError as error:
                    body = error_for(request.scope["path"], error.status_code, error.body)
                    await write(b"data: %b\n\n" % body)
                    break
            await write(b"data: [DONE]\n\n")

        return Stream(
            write_body,
            opened=opening.pop_all(),
            headers=_id_of(first_messages[0]),
            media_type="text/event-stream",
        )

    # -- client secrets -------------------------------------------------------------------------

    def check_model(self, name: str, param: str) -> None:
        """Refuse the name of a model that is not here."""
        if (models := self._models()) and name not in models:
            text = f"the model {name[:64]!r} does not exist, there is {', '.join(models)}"
            raise CodedError(HTTPStatus.NOT_FOUND, "model_not_found", text, param)

    async def _make_secret(self, request: Request) -> Response:
        principal = principal_of(request)
        body = read_object(await read_body(request, SECRET_BODY_BYTES_MAX), SECRET_BODY_BYTES_MAX)
        try:
            lifetime_s, session = _read_wish(body)
        except FieldError as error:
            refuse(error)
        if "model" in session:
            self.check_model(session["model"], "session.model")
        value, expires_s = sign_secret(principal, lifetime_s, session=session or None)
        shown = {"type": "realtime", **session}
        name = hashlib.sha256(value.encode()).hexdigest()[:16]
        shown |= {"object": _OBJECT[shown["type"]], "id": f"sess_{name}", "expires_at": 0}
        return json_response({"value": value, "expires_at": expires_s, "session": shown})


async def _first_and_last(client: LocalClient) -> tuple[dict[str, Any], dict[str, Any]]:
    """The beginning of a session, and its answer."""
    created = last = await client.next()
    while not _is_last(last):
        last = await client.next()
    return created, last


def _enter(request: Request, opening: ExitStack, places: ConcurrencyLimit) -> None:
    """Take a place until the answer; raises `CodedError` (429) if all are taken."""
    try:
        opening.enter_context(places.take(request))
    except HTTPException as full:
        status = HTTPStatus.TOO_MANY_REQUESTS
        raise CodedError(status, "too_many_requests", full.detail, headers=RETRY) from None


def _is_last(message: dict[str, Any]) -> bool:
    return message["type"] in ("response.done", "transcription.done")


def _id_of(created: dict[str, Any]) -> dict[str, str]:
    """Name the session in the headers of an answer."""
    return {"X-Request-Id": str(created.get("session_id") or created["id"])}


def _read_wish(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Read the lifetime and the settings of a secret, which may be empty; raises `FieldError`."""
    lifetime_s, session = keys.LIFETIME_S, dict[str, Any]()
    for name in body.keys() - {"expires_after", "session"}:
        Fields({name: None}).refuse_unknown()
    if body.get("expires_after") is not None:
        after = as_object(body["expires_after"], "$.expires_after")
        read = Fields({"anchor": "created_at", **after}, "$.expires_after")
        read.required("anchor", lambda value: value.choice(("created_at",)))
        bounds = keys.LIFETIME_S_MIN, keys.LIFETIME_S_MAX
        lifetime_s = read.required("seconds", lambda value: value.integer(*bounds))
        read.refuse_unknown()
    if body.get("session") is not None:
        session = dict(as_object(body["session"], "$.session"))
        types = tuple(_OBJECT)
        kind = Fields(session, "$.session").required("type", lambda value: value.choice(types))
        dialect = OPENAI if kind == "realtime" else OPENAI_TRANSCRIPTION
        update = {"type": SESSION_UPDATE, "session": session}
        dialect.parse(RequestKind.UPDATE, update, Context(mode="audio"))
    return lifetime_s, session


# -- calls by WebRTC -------------------------------------------------------------------------------

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
