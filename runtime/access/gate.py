"""Whether a client may come in: its page, the name that it calls the server by, and its key.

They are asked in that order, before anything else of a request is looked at, so that whoever is not
welcome learns nothing of what there is.

- With keys, a client shows exactly one (`credentials` says how). No key, two, or a wrong one is
  401, and always the same words.
- A key is never logged and never in an answer; that somebody was denied is (`denials`).
- Without keys everybody is `ANYONE`, and a key that is shown is not looked at.

Who was admitted keeps what it has; `watch` follows the file of keys for those who come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

import anyio
import attrs

from protocol.messages import Mode

from ..http import error_body
from ..settings import Settings
from .credentials import (
    ASK_PROGRAM,
    KEY_SUBPROTOCOL,
    SUBPROTOCOL,
    Headers,
    challenge,
    shown_over_http,
    shown_to_websocket,
    values_of,
)
from .denials import Denials, Reason
from .origins import Origins, flag_for, read_origins
from .principal import ANYONE, Principal, principal_of
from .quotas import Quotas
from .ring import KeyRing


class Denied(Exception):  # noqa: N818 - an answer to the peer, not an error of ours
    """The client may not; what to answer with.

    Args:
        reason: for the server's operator.
        status: of HTTP.
        code: short, for programs.
        message: one line, for people.
        headers: more headers of the answer.
        name: of the client's key; empty where it has no good one.
        flag: of the server, which would have let it in; told to the operator only.
        details: more fields of the body.
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
        clock: of the quotas and the denials, in seconds.

    Attributes:
        quotas: what each key has used.
        denials: what was denied; whoever answers `Denied` notes it there.
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
        """Admit a client that asks for a WebSocket.

        Args:
            headers: of the request, names in lower case.
            offered_subprotocols: in the client's order.
            secure: it came over TLS that ends here.

        Raises:
            Denied: it may not come in.
        """
        shown = shown_to_websocket(headers, offered_subprotocols)
        principal = self._admit(headers, shown, ASK_PROGRAM, secure=secure)
        selected = SUBPROTOCOL if SUBPROTOCOL in offered_subprotocols else None
        return Admitted(principal=principal, subprotocol=selected)

    def admit_request(self, method: str, headers: Headers, *, secure: bool) -> Principal:
        """Admit a client that asks for anything else over HTTP.

        Args:
            method: of the request.
            headers: of the request, names in lower case.
            secure: it came over TLS that ends here.

        Raises:
            Denied: it may not come in.
        """
        shown = shown_over_http(method, headers)
        return self._admit(headers, shown, challenge(method, headers), secure=secure)

    def admit_page(self, headers: Headers, *, secure: bool) -> None:
        """Admit a client that asks for what is public: no key is looked at.

        Args:
            headers: of the request, names in lower case.
            secure: it came over TLS that ends here.

        Raises:
            Denied: its page, or the name that it calls the server by, is not welcome.
        """
        self._check_source(headers, secure=secure)

    def check_mode(self, principal: Principal, mode: Mode) -> None:
        """Hold a client to the modes of its key.

        Raises:
            Denied: the mode is none of them.
        """
        if not principal.may_use(mode):
            raise Denied(
                "mode",
                HTTPStatus.FORBIDDEN,
                "mode_not_allowed",
                f"this key may not use {mode}",
                name=principal.name,
                allowed=list(principal.modes or ()),
            )

    async def watch(self) -> None:
        """Follow the file of keys; runs until cancelled."""
        if self._keys is not None:
            await self._keys.watch()

    def _check_source(self, headers: Headers, *, secure: bool) -> None:
        hosts = values_of(headers, "host")
        if not self.origins.answers_to(hosts):
            raise Denied(
                "host",
                HTTPStatus.FORBIDDEN,
                "host_not_allowed",
                "this server answers to names of its own machine alone",
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
    ) -> Principal:
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
        return principal_of(key)


def open_gate(settings: Settings, *, clock: Callable[[], float] = anyio.current_time) -> Gate:
    """Make the gate that the settings ask for; the file of keys is read.

    Args:
        settings: the operator's.
        clock: of the quotas and the denials, in seconds.

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
        raise Denied(
            "scope",
            HTTPStatus.FORBIDDEN,
            "scope_too_small",
            "this needs a key of the scope admin",
            name=principal.name,
        )
