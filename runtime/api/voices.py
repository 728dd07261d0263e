"""The library of voices over HTTP, and the default voice of pages.

| path | is | for |
|---|---|---|
| `GET /api/voices` | `{"voices": [{"name", "bytes"}], "default"}`, sorted by name | each key |
| `PUT /api/voices/{name}` | add a sound file as a voice; `?replace=1` may replace one | `admin` |
| `DELETE /api/voices/{name}` | remove a voice | `admin` |
| `GET /api/default_ref_audio` | the default voice as samples, for pages to send | each key |

A voice has the limits of reference audio (`media.sound`) and is kept unchanged. A taken name is a
409, a full library a 507. A change affects the next session that names the voice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, TypeVar

import anyio
import anyio.to_thread
import orjson
import pybase64
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protocol.values.limits import WAV_BYTES_MAX
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.media import sound_kind

from ..access.gate import principal_of, require_admin
from ..media.sound import as_wav, decode_voice
from ..media.values import MediaError
from ..media.voices import NAME_RULE, VoiceLibrary, VoiceRefusal, VoiceRefused, is_voice_name
from ..net.http import json_response
from .requests import ConcurrencyLimit, check_names, read_body, read_number

UPLOADS_MAX: Final = 2
"""Each holds 12 MiB and, while it is decoded, a thread and four times that."""

_REFUSALS: Final[Mapping[VoiceRefusal, tuple[HTTPStatus, str]]] = MappingProxyType(
    {
        "name": (HTTPStatus.BAD_REQUEST, f"a voice's name has {NAME_RULE}"),
        "exists": (HTTPStatus.CONFLICT, "there is a voice of that name; replace=1 replaces it"),
        "full": (HTTPStatus.INSUFFICIENT_STORAGE, "the library is full; remove a voice"),
    }
)

T = TypeVar("T")


class Voices:
    """The routes of one server's voices; `default` names the default voice."""

    def __init__(self, library: VoiceLibrary | None, default: str | None) -> None:
        self._library = library
        self._default = default
        self._uploads = ConcurrencyLimit(
            UPLOADS_MAX, UPLOADS_MAX, "too many voices are being added"
        )
        self._is_decoding = anyio.Lock()
        self._decoded: tuple[object, bytes] | None = None

    def routes(self) -> list[Route]:
        """The routes, for `http.make_app`."""
        one = "/api/voices/{name}"
        return [
            Route("/api/voices", self._list),
            Route(one, self._add, methods=["PUT"]),
            Route(one, self._remove, methods=["DELETE"]),
            Route("/api/default_ref_audio", self._show_default),
        ]

    async def _list(self, _request: Request) -> Response:
        sizes = {} if self._library is None else await _in_thread(self._library.sizes)
        voices = [{"name": name, "bytes": size} for name, size in sizes.items()]
        default = self._default if self._default in sizes else None
        return json_response({"voices": voices, "default": default})

    # -- for admins -------------------------------------------------------------------------------

    async def _add(self, request: Request) -> Response:
        library, name = self._changed_by(request), request.path_params["name"]
        check_names(request, ["replace"])
        replace = read_number(request, "replace", 0, low=0, high=1) == 1
        if not is_voice_name(name):
            raise _refused("name")
        with self._uploads.take(request):
            data = await read_body(request, WAV_BYTES_MAX)
            data = await _in_thread(partial(_as_kept, data))
            try:
                is_new = await _in_thread(partial(library.add, name, data, replace=replace))
            except VoiceRefused as refused:
                raise _refused(refused.reason) from None
        status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
        return json_response({"name": name, "bytes": len(data)}, status)

    async def _remove(self, request: Request) -> Response:
        library = self._changed_by(request)
        await _in_thread(partial(library.remove, request.path_params["name"]), _NOT_FOUND)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _changed_by(self, request: Request) -> VoiceLibrary:
        """The library, for a client that may change it."""
        require_admin(principal_of(request))
        if self._library is None:
            raise HTTPException(_NOT_FOUND, "this server has no library of voices (--voices)")
        return self._library

    # -- for pages --------------------------------------------------------------------------------

    async def _show_default(self, _request: Request) -> Response:
        if self._library is None or self._default is None:
            raise HTTPException(_NOT_FOUND, "this server has no default voice")
        stamp = await _in_thread(partial(self._library.stamp, self._default), _NOT_FOUND)
        async with self._is_decoding:  # the same voice is decoded once
            if self._decoded is None or self._decoded[0] != stamp:
                read = partial(_decode, self._library, self._default)
                self._decoded = stamp, await _in_thread(read, HTTPStatus.UNPROCESSABLE_ENTITY)
            body = self._decoded[1]
        return json_response(body)


_NOT_FOUND: Final = HTTPStatus.NOT_FOUND
_UNAVAILABLE: Final = HTTPStatus.SERVICE_UNAVAILABLE


def _refused(reason: VoiceRefusal) -> HTTPException:
    return HTTPException(*_REFUSALS[reason])


# -- in threads -----------------------------------------------------------------------------------


async def _in_thread(work: Callable[[], T], wrong: HTTPStatus = HTTPStatus.BAD_REQUEST) -> T:
    """Work on voices in a thread; an invalid voice is answered with `wrong`."""
    try:
        # A disk that hangs must not keep the server from ending.
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
    except MediaError as error:
        raise HTTPException(wrong, error.reason) from None
    except OSError:
        text = "the library of voices cannot be changed"
        raise HTTPException(_UNAVAILABLE, text) from None


def _as_kept(data: bytes) -> bytes:
    """A sound file that was proven, as a WAV."""
    pcm = decode_voice(data)
    return data if sound_kind(data) == "WAV" else as_wav(pcm)


def _decode(library: VoiceLibrary, name: str) -> bytes:
    """A voice as JSON for the pages of MiniCPM-o's demo."""
    pcm = decode_voice(library.read(name))
    samples = len(pcm) // SAMPLE_BYTES
    return orjson.dumps(
        {
            "name": name,
            "duration": round(samples / INPUT_RATE_HZ, 3),
            "sample_rate": INPUT_RATE_HZ,
            "samples": samples,
            "base64": pybase64.b64encode(pcm).decode("ascii"),
        }
    )
