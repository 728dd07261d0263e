"""Admission of a client: the name it uses for the server, its page, and its key.

- The checks run in that order, before the rest of a request is read, so that a denied client learns
  nothing. An admitted one keeps its rights; `watch` follows the key file for others.
- With keys, a client presents exactly one (see `credentials`). A missing or invalid key, or more
  than one, is a 401 with always the same text. Keys are never logged or sent in an answer.
- Without keys every client is `ANYONE`, and keys are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import anyio
import attrs

from protocol.values.modes import Mode

from ..net.http import error_body
from ..settings.settings import Settings
from .credentials import (
    ASK_PROGRAM,
    KEY_SUBPROTOCOL,
    SUBPROTOCOL,
    SUBPROTOCOLS,
    Headers,
    challenge,
    shown_over_http,
    shown_to_websocket,
    values_of,
)
from .denials import Denials, Reason
from .keys import ANYONE, Key
from .origins import Origins, flag_for, read_origins
from .quotas import Quotas
from .ring import KeyRing


class Denied(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """A client is denied; with the answer.

    Args:
        code, message: for programs and in one line for people; `details` are more fields.
        name: of the client's valid key, or empty.
        flag: the server's flag that would allow it; only for the operator.
    """

    def __init__(
        self,
        reason: Reason,
        status: HTTPStatus,
        code: str,
        message: str,
        *,
        headers: Headers = (),
        name: str = "",
        flag: str = "",
        **details: object,
    ) -> None:
        super().__init__(f"{status.value} {code}: {message}")
        self.reason = reason
        self.status = status.value
        self.body = error_body(code, message, **details)
        self.headers = tuple(headers)
        self.name = name
        self.flag = flag


@attrs.frozen(kw_only=True)
class Admitted:
    """An admitted client; `subprotocol` is to be selected in the handshake, or None."""

    principal: Key
    subprotocol: str | None = None


class Gate:
    """The checks of one server; `keys` of None asks for no key.

    `clock` gives seconds. The handler of a `Denied` notes it in `denials`.
    """

    def __init__(
        self, keys: KeyRing | None, origins: Origins, *, clock: Callable[[], float]
    ) -> None:
        self._keys = keys
        self.origins = origins
        self.quotas = Quotas(clock)
        self.denials = Denials(clock)

    def admit_websocket(
        self, headers: Headers, offered_subprotocols: Sequence[str], *, secure: bool
    ) -> Admitted:
        """Admit a client that asks for a WebSocket, or raise `Denied`.

        Header names are in lower case; `secure`: it came over TLS that ends here.
        """
        shown = shown_to_websocket(headers, offered_subprotocols)
        principal = self._admit(headers, shown, ASK_PROGRAM, secure=secure)
        selected = next((it for it in SUBPROTOCOLS if it in offered_subprotocols), None)
        return Admitted(principal=principal, subprotocol=selected)

    def admit_request(self, method: str, headers: Headers, *, secure: bool) -> Key:
        """Admit any other request, or raise `Denied`; arguments as of `admit_websocket`."""
        shown = shown_over_http(method, headers)
        return self._admit(headers, shown, challenge(method, headers), secure=secure)

    def admit_page(self, headers: Headers, *, secure: bool) -> None:
        """Admit a request for a public page, without a key; `Denied` by host or origin."""
        self._check_source(headers, secure=secure)

    def check_mode(self, principal: Key, mode: Mode) -> None:
        """Raise `Denied` if the key does not allow the mode."""
        if not principal.may_use(mode):
            raise Denied(
                "mode",
                HTTPStatus.FORBIDDEN,
                "mode_not_allowed",
                f"this key may not use {mode}",
                name=principal.name,
                allowed=list(principal.modes or ()),
            )

    def has_key(self, name: str) -> bool:
        """Whether a client of this name may still connect."""
        return self._keys is None or self._keys.has(name)

    async def watch(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the key file, and call `on_change` after each change; runs until cancelled."""
        if self._keys is not None:
            await self._keys.watch(on_change)

    def _check_source(self, headers: Headers, *, secure: bool) -> None:
        hosts = values_of(headers, "host")
        if not self.origins.answers_to(hosts):
            raise Denied(
                "host",
                HTTPStatus.FORBIDDEN,
                "host_not_allowed",
                "this server answers only to names of its own machine",
            )
        origins = values_of(headers, "origin")
        if not self.origins.welcomes(origins, hosts, secure=secure):
            raise Denied(
                "origin",
                HTTPStatus.FORBIDDEN,
                "origin_not_allowed",
                "pages of this origin may not use this server",
                flag=flag_for(origins),
            )

    def _admit(
        self, headers: Headers, shown: Sequence[str], ask: tuple[str, str], *, secure: bool
    ) -> Key:
        self._check_source(headers, secure=secure)
        if self._keys is None:
            return ANYONE
        key = self._keys.find(shown[0]) if len(shown) == 1 else None
        if key is None:
            raise Denied(
                "wrong_key" if shown else "no_key",
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "this server wants a valid key, once: authorization: bearer KEY, or the "
                f"subprotocols {SUBPROTOCOL} and {KEY_SUBPROTOCOL}KEY",
                headers=[ask],
            )
        return key


def open_gate(settings: Settings, *, clock: Callable[[], float] = anyio.current_time) -> Gate:
    """Make the gate of the settings; reads the key file. `clock` gives seconds.

    `KeyFileError`: the keys cannot be read; `ValueError`: an origin is invalid.
    """
    keys = None if settings.keys is None else KeyRing(settings.keys)
    origins = read_origins(settings.origins, has_keys=keys is not None, host=settings.host)
    return Gate(keys, origins, clock=clock)


def require_admin(principal: Key) -> None:
    """Raise `Denied` if the key has not the scope `admin`."""
    if not principal.is_admin:
        raise Denied(
            "scope",
            HTTPStatus.FORBIDDEN,
            "scope_too_small",
            "this needs a key of the scope admin",
            name=principal.name,
        )
