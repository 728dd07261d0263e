"""Whether a client may come in: its page, the name that it calls the server by, and its key.

They are asked in that order, before anything else of a request is looked at, so that whoever is not
welcome learns nothing of what there is.

- With keys, a client shows exactly one: `Authorization: Bearer KEY`, or, from a browser's WebSocket
  (which can set no header), the subprotocols `antiphon` and `antiphon.key.KEY`, of which the server
  selects `antiphon`. A key in the address is not looked at.
- No key, two, or a wrong one is 401, and always the same words.
- A key is never logged and never in an answer.
- Without keys everybody is `ANYONE`, and a key that is shown is not looked at.

Who was admitted keeps what it has; `watch` follows the file of keys for those who come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final

import anyio
import attrs

from protocol.messages import Mode

from ..http import error_body
from ..settings import Settings
from .origins import Origins, read_origins
from .principal import ANYONE, Principal, principal_of
from .quotas import Quotas
from .ring import KeyRing

SUBPROTOCOL: Final = "antiphon"
"""What the server selects where a client offers it."""
KEY_SUBPROTOCOL: Final = "antiphon.key."
"""Before a browser's key; never selected, for that would say the key back."""
BEARER: Final = "bearer"

Headers = Sequence[tuple[str, str]]


class Denied(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """The client may not; what to answer with.

    Args:
        status: of HTTP.
        code: short, for programs.
        message: one line, for people.
        headers: more headers of the answer.
        details: more fields of the body.
    """

    def __init__(
        self, status: HTTPStatus, code: str, message: str, headers: Headers = (), **details: object
    ) -> None:
        super().__init__(f"{status.value} {code}: {message}")
        self.status = status.value
        self.body = error_body(code, message, **details)
        self.headers = tuple(headers)


@attrs.frozen(kw_only=True)
class Admitted:
    """A client that may come in.

    Attributes:
        principal: who it is.
        subprotocol: to select in the WebSocket's handshake, or None.
    """

    principal: Principal
    subprotocol: str | None = None


class Gate:
    """What stands between a server and its clients.

    Args:
        keys: those that are known; None asks nobody for one.
        origins: the pages and names that are welcome.
        clock: of the quotas, in seconds.
    """

    def __init__(
        self, keys: KeyRing | None, origins: Origins, *, clock: Callable[[], float]
    ) -> None:
        self._keys = keys
        self.origins = origins
        self.quotas = Quotas(clock)

    def admit_websocket(
        self, headers: Headers, offered_subprotocols: Sequence[str], *, secure: bool
    ) -> Admitted:
        """Admit a client that asks for a WebSocket.

        Args:
            headers: of the request, names in lower case.
            offered_subprotocols: in the client's order.
            secure: it came over TLS that ends here.

        Raises:
            Denied: it may not come in.
        """
        principal = self._admit(headers, offered_subprotocols, secure=secure)
        selected = SUBPROTOCOL if SUBPROTOCOL in offered_subprotocols else None
        return Admitted(principal=principal, subprotocol=selected)

    def admit_request(self, headers: Headers, *, secure: bool) -> Principal:
        """Admit a client that asks for anything else over HTTP.

        Args:
            headers: of the request, names in lower case.
            secure: it came over TLS that ends here.

        Raises:
            Denied: it may not come in.
        """
        return self._admit(headers, (), secure=secure)

    def check_mode(self, principal: Principal, mode: Mode) -> None:
        """Hold a client to the modes of its key.

        Raises:
            Denied: the mode is none of them.
        """
        if not principal.may_use(mode):
            raise Denied(
                HTTPStatus.FORBIDDEN,
                "mode_not_allowed",
                f"this key may not use {mode}",
                allowed=list(principal.modes or ()),
            )

    async def watch(self) -> None:
        """Follow the file of keys; runs until cancelled."""
        if self._keys is not None:
            await self._keys.watch()

    def _admit(self, headers: Headers, offered: Sequence[str], *, secure: bool) -> Principal:
        hosts = _values(headers, "host")
        if not self.origins.answers_to(hosts):
            raise Denied(
                HTTPStatus.FORBIDDEN,
                "host_not_allowed",
                "this server answers to names of its own machine alone",
            )
        if not self.origins.welcomes(_values(headers, "origin"), hosts, secure=secure):
            raise Denied(
                HTTPStatus.FORBIDDEN,
                "origin_not_allowed",
                "pages of this origin may not use this server",
            )
        if self._keys is None:
            return ANYONE
        shown = _shown_keys(headers, offered)
        key = self._keys.find(shown[0]) if len(shown) == 1 else None
        if key is None:
            raise Denied(
                HTTPStatus.UNAUTHORIZED,
                "unauthorized",
                "this server wants a valid key, once: authorization: bearer KEY, or the "
                f"subprotocols {SUBPROTOCOL} and {KEY_SUBPROTOCOL}KEY",
                [("WWW-Authenticate", "Bearer")],
            )
        return principal_of(key)


def open_gate(settings: Settings, *, clock: Callable[[], float] = anyio.current_time) -> Gate:
    """Make the gate that the settings ask for; the file of keys is read.

    Args:
        settings: the operator's.
        clock: of the quotas, in seconds.

    Raises:
        KeyFileError: there are no keys to be had where the settings say.
        ValueError: an origin is none.
    """
    keys = None if settings.keys is None else KeyRing(settings.keys)
    origins = read_origins(settings.origins, has_keys=keys is not None, host=settings.host)
    return Gate(keys, origins, clock=clock)


def require_admin(principal: Principal) -> None:
    """Hold a client to the scope `admin`.

    Raises:
        Denied: its key has another.
    """
    if not principal.is_admin:
        raise Denied(HTTPStatus.FORBIDDEN, "scope_too_small", "this needs a key of the scope admin")


def _values(headers: Headers, name: str) -> list[str]:
    return [value for key, value in headers if key == name]


def _shown_keys(headers: Headers, offered: Sequence[str]) -> list[str]:
    """Find the keys that a client shows, in whatever way; another scheme's secret is no key."""
    shown = [
        subprotocol.removeprefix(KEY_SUBPROTOCOL)
        for subprotocol in offered
        if subprotocol.startswith(KEY_SUBPROTOCOL)
    ]
    for value in _values(headers, "authorization"):
        scheme, _, key = value.partition(" ")
        shown.append(key.strip() if scheme.lower() == BEARER else "")
    return shown
