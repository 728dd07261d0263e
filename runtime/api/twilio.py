"""Calls of a telephone network, by Twilio's Media Streams.

| path | is | for |
|---|---|---|
| `GET /v1/twilio` | the instructions for a call (TwiML): connect it to the WebSocket here | all |
| `POST /v1/twilio` | the same | all |

The query of the first address has the call's settings (`PARAMETERS`), which come back with its
stream. A call is a session of OpenAI's Realtime API with the sound of a telephone, mu-law at 8 kHz:

| Twilio | the session |
|---|---|
| `start` | `session.update`, with the settings, and the call's name in `tracing` |
| `media` | `input_audio_buffer.append`; back from `response.output_audio.delta`, in pieces of 20 ms |
| `mark` | follows each fifth of a second; its return says that this was played |
| `clear` | sent when the caller speaks over the model: `conversation.item.truncate` says what was played |
| `dtmf` | `conversation.item.create`: a key that was pressed, which a duplex model does not hear |
| `connected`, `stop` | nothing |

What has no place here reaches the session as it is, which refuses it. With a token, requests and
handshakes need `X-Twilio-Signature` in place of a key, and calls belong to the key `twilio`, where
the server has keys. Else a client needs a key as for any session.
"""  # noqa: E501 - a table

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl
from xml.sax.saxutils import quoteattr

import pybase64
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.errors import FrameError
from protocol.values.frames import Received, Shortened
from protocol.wire.codec import parse_frame

from ..access.gate import AccessControl, Admitted, Denied, Headers, values_of
from .adapters import dump
from .requests import check_names, read_body

TWILIO_PATH: Final = "/v1/twilio"
PARAMETERS: Final = ("instructions", "voice", "greet")
"""`greet`: the model speaks first."""
KEY_NAME: Final = "twilio"
SIGNATURE: Final = "x-twilio-signature"
BODY_BYTES_MAX: Final = 64 * 1024
FIELDS_MAX: Final = 100
"""Of a request: Twilio sends some twenty fields."""
MESSAGE_BYTES_MAX: Final = 64 * 1024
"""Twilio's have 300; several seconds of sound fit."""
SID_CHARS_MAX: Final = 40
"""Of a call's name in the log: they have 34, and quotes."""
PIECE_BYTES: Final = 160
"""20 ms of mu-law at 8 kHz."""
BYTES_PER_MS: Final = 8
MARK_BYTES: Final = 10 * PIECE_BYTES
_PHONE: Final = {"format": {"type": "audio/pcmu"}}
_LOG: Final = logging.getLogger("antiphon.server")


# -- who calls -----------------------------------------------------------------------------------


def _fields_of(body: bytes) -> list[tuple[str, str]]:
    """Read a form; a client without the token may send any."""
    text = body.decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        raise _unsigned() from None


def signature_of(token: str, url: str, fields: Sequence[tuple[str, str]] = ()) -> str:
    """Sign a request as Twilio does: its address, and its form's fields in order of their names."""
    text = url + "".join(name + value for name, value in sorted(set(fields)))
    return base64.b64encode(hmac.digest(token.encode(), text.encode(), hashlib.sha1)).decode()


def is_signed(
    token: str, headers: Headers, target: str, fields: Sequence[tuple[str, str]] = ()
) -> bool:
    """Whether Twilio has sent a request; a proxy may end its TLS, and leave out the port."""
    given, hosts = values_of(headers, SIGNATURE), values_of(headers, "host")
    if len(given) != 1 or len(hosts) != 1:
        return False
    bare = hosts[0].removesuffix(":443").removesuffix(":80")
    names = dict.fromkeys((hosts[0], bare, f"{bare}:443"))
    urls = [
        f"{scheme}://{name}{target}{slash}"
        for scheme in ("wss", "https", "http")
        for name in names
        for slash in ("", "/")
    ]
    known = (signature_of(token, url, fields) for url in urls)
    return sum(hmac.compare_digest(given[0].encode(), it.encode()) for it in known) > 0


class Twilio:
    """The door for calls; `token` is Twilio's auth token, or empty."""

    def __init__(self, gate: AccessControl, token: str) -> None:
        self._gate = gate
        self._token = token

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [Route(TWILIO_PATH, self._answer, methods=["GET", "POST"])]

    def is_public(self, path: str) -> bool:
        """Whether a request to a path needs a signature, and no key."""
        return bool(self._token) and path == TWILIO_PATH

    def admit(
        self, headers: Headers, target: str, offered: Sequence[str], *, secure: bool
    ) -> Admitted:
        """Admit a call's WebSocket, or raise `Denied`."""
        if not self._token:
            return self._gate.admit_websocket(headers, offered, secure=secure)
        if not is_signed(self._token, headers, target):
            raise _unsigned()
        principal = self._gate.find_named(KEY_NAME)
        if principal is None:
            text = f"there is no key of the name {KEY_NAME}, to which calls belong"
            raise Denied("no_key", text)
        return Admitted(principal=principal)

    async def _answer(self, request: Request) -> Response:
        """Answer a call: connect it to the WebSocket of the same host."""
        fields: list[tuple[str, str]] = []
        if self._token:
            if request.method == "POST":
                body = await read_body(request, BODY_BYTES_MAX)
                fields = _fields_of(body)
            headers = [(name.lower(), value) for name, value in request.headers.items()]
            query = request.url.query
            target = request.scope["raw_path"].decode("ascii") + (f"?{query}" if query else "")
            if not is_signed(self._token, headers, target, fields):
                raise _unsigned()
        check_names(request, PARAMETERS)
        url = quoteattr(f"wss://{request.headers.get('host', '')}{TWILIO_PATH}")
        settings = "".join(
            f"<Parameter name={quoteattr(name)} value={quoteattr(value)}/>"
            for name, value in request.query_params.items()
        )
        stream = f"<Stream url={url}>{settings}</Stream>"
        text = f"<Response><Connect>{stream}</Connect></Response>"
        return Response(f'<?xml version="1.0" encoding="UTF-8"?>{text}', media_type="text/xml")


def _unsigned() -> Denied:
    return Denied("wrong_key", "this address takes requests with Twilio's signature only")


# -- a call ----------------------------------------------------------------------------------------


class Call:
    """The `Translation` of a call, whose session speaks `openai`."""

    def __init__(self) -> None:
        self.due: list[str] = []
        self._stream = ""
        self._is_open = False
        self._greets = False
        self._item = ""
        self._sent_bytes = 0
        self._played_bytes = 0
        self._is_answering = False
        self._cut: dict[str, Any] | None = None
        self._silenced = ""

    def received(self, message: Received) -> list[Received]:
        """As `Translation`; what has no place here reaches the session, which refuses it."""
        if isinstance(message, Shortened):
            return [message]
        try:
            body = parse_frame(message, MESSAGE_BYTES_MAX)
        except FrameError:
            return [message]
        match body:
            case {"event": "media", "media": {"payload": payload, "track": "inbound"}}:
                return [dump(type="input_audio_buffer.append", audio=payload)]
            case {"event": "media", "media": {"track": "outbound"}}:
                return []
            case {"event": "start", "streamSid": str(stream), "start": dict(start)}:
                self._stream = stream
                settings = self._settings(start)
                self._greet()
                return [settings]
            case {"event": "mark", "mark": {"name": str(name)}}:
                self._note_played(name)
                return []
            case {"event": "dtmf", "dtmf": {"digit": str(digit)}}:
                part = {"type": "input_text", "text": f"[key {digit}]"}
                item = {"type": "message", "role": "user", "content": [part]}
                return [dump(type="conversation.item.create", item=item)]
            case {"event": "connected" | "stop"}:
                return []
        return [message]

    def _settings(self, start: Mapping[str, Any]) -> str:
        given = start.get("customParameters")
        wanted = given if isinstance(given, dict) else {}
        self._greets = str(wanted.get("greet", "")).lower() in {"1", "true", "yes", "on"}
        _LOG.info("a call: %s", ascii(start.get("callSid"))[:SID_CHARS_MAX])
        voice = {"voice": wanted["voice"]} if wanted.get("voice") else {}
        session = {
            "type": "realtime",
            "audio": {"input": _PHONE, "output": {**_PHONE, **voice}},
            "tracing": {"workflow_name": "twilio", "group_id": start.get("callSid")},
        }
        if wanted.get("instructions"):
            session["instructions"] = wanted["instructions"]
        return dump(type="session.update", session=session)

    def _greet(self) -> None:
        """Have the model speak first, once the session and its settings are there."""
        if self._is_open and self._greets:
            self._greets = False
            self.due.append(dump(type="response.create"))

    def _note_played(self, name: str) -> None:
        item, _, end = name.partition(":")
        if item == self._item and end.isascii() and end.isdigit() and len(end) <= 12:
            self._played_bytes = min(max(self._played_bytes, int(end)), self._sent_bytes)

    def sent(self, body: dict[str, Any]) -> Iterator[str]:
        """As `Translation`."""
        match body["type"]:
            case "session.created":
                self._is_open = True
                self._greet()
            case "response.created":
                self._is_answering = True
            case "response.output_audio.delta" if body["item_id"] != self._silenced:
                yield from self._speak(body["item_id"], pybase64.b64decode(body["delta"]))
            case "input_audio_buffer.speech_started" if self._played_bytes < self._sent_bytes:
                yield dump(event="clear", streamSid=self._stream)
                self._cut_off()
            case "response.done":
                self._is_answering = False
            case "error":
                _LOG.info("a call's session: %s", body["error"].get("code"))
        if self._cut is not None and not self._is_answering:
            self.due.append(dump(**self._cut))
            self._cut = None

    def _speak(self, item: str, sound: bytes) -> Iterator[str]:
        if item != self._item:
            self._item, self._sent_bytes, self._played_bytes = item, 0, 0
        for at in range(0, len(sound), PIECE_BYTES):
            piece = sound[at : at + PIECE_BYTES]
            payload = pybase64.b64encode(piece).decode()
            yield dump(event="media", streamSid=self._stream, media={"payload": payload})
            self._sent_bytes += len(piece)
            if self._sent_bytes % MARK_BYTES == 0 or at + PIECE_BYTES >= len(sound):
                mark = {"name": f"{item}:{self._sent_bytes}"}
                yield dump(event="mark", streamSid=self._stream, mark=mark)

    def _cut_off(self) -> None:
        """Have the session forget what was not played, once the response is over.

        Twilio returns the marks that it clears as if they had been played: they count no more.
        """
        self._cut = {
            "type": "conversation.item.truncate",
            "item_id": self._item,
            "content_index": 0,
            "audio_end_ms": self._played_bytes // BYTES_PER_MS,
        }
        self._silenced, self._item = self._item, ""
        self._sent_bytes = self._played_bytes = 0
