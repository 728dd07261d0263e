"""OpenAI's HTTP API, as far as it is served: client secrets.

| path | is | for |
|---|---|---|
| `POST /v1/realtime/client_secrets` | a key for a browser that begins sessions until it expires: `{"value", "expires_at", "session"}` | each key |

A secret's settings are read as those of a `session.update` are, and its sessions begin with them.
Errors have OpenAI's form (`net.http.CodedError`).
"""  # noqa: E501 - a table

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.errors import FieldError, FrameError
from protocol.values.requests import Request as Asked
from protocol.wire.codec import Context, Fields, as_object, parse_frame
from protocol.wire.dialects import OPENAI, OPENAI_TRANSCRIPTION
from protocol.wire.dialects.shared import SESSION_UPDATE

from ..access.client_secrets import (
    LIFETIME_S,
    LIFETIME_S_MAX,
    LIFETIME_S_MIN,
    ClientSecret,
    SecretTooLongError,
)
from ..access.keys import Key
from ..access.middleware import principal_of
from ..net.http import CodedError, json_response
from .requests import read_body

SECRET_BODY_BYTES_MAX: Final = 64 * 1024
"""More than fits into a secret: its error says so."""
_OBJECT: Final = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}


def refuse(error: FieldError | FrameError) -> NoReturn:
    """Raise the answer to a body that cannot be read."""
    if isinstance(error, FrameError):
        raise CodedError(HTTPStatus.BAD_REQUEST, "invalid_json", error.reason) from None
    path, _, _ = error.message.partition(": ")
    param = path.removeprefix("$.")
    raise CodedError(HTTPStatus.BAD_REQUEST, str(error.code), error.message, param) from None


def read_object(body: bytes, bytes_max: int) -> dict[str, Any]:
    """Read a body as a JSON object; raises `CodedError`."""
    try:
        return dict(parse_frame(body.decode(), bytes_max))
    except UnicodeDecodeError:
        raise CodedError(HTTPStatus.BAD_REQUEST, "invalid_json", "this is not utf-8") from None
    except FrameError as error:
        refuse(error)


def sign_secret(key: Key, lifetime_s: int, **claims: Any) -> tuple[str, int]:
    """Make a client secret; returns it with the time of its end. Raises `CodedError`."""
    if key.name and not key.hash:
        text = "a client secret makes no other one"
        raise CodedError(HTTPStatus.FORBIDDEN, "scope_too_small", text)
    made_s = int(time.time())
    secret = ClientSecret(key_name=key.name, made_s=made_s, expires_s=made_s + lifetime_s, **claims)
    try:
        return secret.sign(key), secret.expires_s
    except SecretTooLongError as error:
        text = f"the session's settings do not fit: {error}"
        raise CodedError(HTTPStatus.BAD_REQUEST, "invalid_payload", text, "session") from None


class OpenAIApi:
    """The routes of OpenAI's API; `models` returns the names of the model."""

    def __init__(self, models: Callable[[], tuple[str, ...]]) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        return [Route("/v1/realtime/client_secrets", self._make_secret, methods=["POST"])]

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


def _read_wish(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Read the lifetime and the settings of a secret, which may be empty; raises `FieldError`."""
    lifetime_s, session = LIFETIME_S, dict[str, Any]()
    for name in body.keys() - {"expires_after", "session"}:
        Fields({name: None}).refuse_unknown()
    if body.get("expires_after") is not None:
        after = as_object(body["expires_after"], "$.expires_after")
        read = Fields({"anchor": "created_at", **after}, "$.expires_after")
        read.required("anchor", lambda value: value.choice(("created_at",)))
        bounds = LIFETIME_S_MIN, LIFETIME_S_MAX
        lifetime_s = read.required("seconds", lambda value: value.integer(*bounds))
        read.refuse_unknown()
    if body.get("session") is not None:
        session = dict(as_object(body["session"], "$.session"))
        types = tuple(_OBJECT)
        kind = Fields(session, "$.session").required("type", lambda value: value.choice(types))
        dialect = OPENAI if kind == "realtime" else OPENAI_TRANSCRIPTION
        update = {"type": SESSION_UPDATE, "session": session}
        dialect.parse(Asked.UPDATE, update, Context(mode="audio"))
    return lifetime_s, session
