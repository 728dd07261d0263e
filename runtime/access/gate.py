"""Admission of a client: the name it uses for the server, its page, its key, and its key's quota.

- The checks run in that order, before the rest of a request is read, so that a denied client learns
  nothing. An admitted one keeps its rights; `watch` follows the key file for others.
- With keys, a client presents exactly one (see `credentials`). A missing or invalid key, or more
  than one, is a 401 with always the same text. Keys are never logged or sent in an answer.
- Without keys every client is `ANYONE`, and keys are ignored.

Denials are counted by reason, and logged at a bounded rate:

- A log line names the client's address, its request and, if known, its key's name; never a key, and
  of the client's own text only a page's origin.
- A refused page is a warning with the flag that would allow it: browsers hide the reason from the
  page, so only the operator can see it.
- After `LINES_MAX` lines in a window, denials are only counted; the next window's first line says
  how many lines were left out.

Quotas limit a key's sessions at once, and those started within any hour. A refused session does not
count. The hour slides from each session's start. Counts belong to the key's name, so a renewed key
keeps them; a restarted server starts at zero.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Literal

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
from .keys import ANYONE, Key, KeyRing
from .origins import Origins, flag_for, read_origins

# -- denials ---------------------------------------------------------------------------------------


Reason = Literal["host", "origin", "no_key", "wrong_key", "mode", "scope"]
"""The server's name in `Host`, the page, no key, a wrong key or several; or a valid key without
that mode or without the scope admin. A label of a metric."""

LINES_MAX: Final = 30
"""Lines in a window: enough to identify a client, and for log alerts."""
WINDOW_S: Final = 60.0

_LOG: Final = logging.getLogger("antiphon.access")


class Denials:
    """The denials of one server; `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[Reason] = Counter()
        self._window_s = -WINDOW_S
        self._lines = 0

    @property
    def counts(self) -> Mapping[Reason, int]:
        """Denials by reason; a reason that never occurred is absent."""
        return MappingProxyType(dict(self._counts))

    def note(
        self, reason: Reason, *, peer: str, asked: str, name: str = "", flag: str = ""
    ) -> None:
        """Count a denial, and log it if there is room.

        `asked` is `WebSocket` or `HTTP`, `name` that of a valid key or empty, `flag` the server's
        flag that would allow it, or empty.
        """
        self._counts[reason] += 1
        if self._clock() - self._window_s >= WINDOW_S:
            if self._lines > LINES_MAX:
                _LOG.info("%d denials more were not told", self._lines - LINES_MAX)
            self._window_s, self._lines = self._clock(), 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            key = f" (key {name})" if name else ""
            told = f"{reason}; {flag} would allow it" if flag else reason
            level = logging.WARNING if reason == "origin" else logging.INFO
            _LOG.log(level, "denied %s to %s%s: %s", asked, peer, key, told)


# -- quotas ----------------------------------------------------------------------------------------


HOUR_S: Final = 3_600.0
PLACE_WAIT_S: Final = 2.5
"""The time in which an ending session sends its last frames and closes."""
PLACE_LOOK_S: Final = 0.1


@attrs.define
class _Used:
    now: int = 0
    begun: deque[float] = attrs.field(factory=deque)


class Pass:
    """One session's place in its key's quota."""

    def __init__(self, on_leave: Callable[[bool], None]) -> None:
        self._on_leave: Callable[[bool], None] | None = on_leave

    def leave(self, *, is_refund: bool = False) -> None:
        """Give the place back; a second call does nothing. A refund takes it off the hour too."""
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave(is_refund)


class Quotas:
    """The sessions of all keys; `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    def enter(self, principal: Key) -> Pass | None:
        """Take a place for a session; None where the key has reached a limit."""
        self._forget()
        used = self._used.get(principal.name, _Used())
        if principal.sessions_max is not None and used.now >= principal.sessions_max:
            return None
        per_hour = principal.sessions_per_hour
        if per_hour is not None and len(used.begun) >= per_hour:
            return None
        self._used[principal.name] = used
        used.now += 1
        begun_s = self._clock()
        if per_hour is not None:
            used.begun.append(begun_s)

        def leave(is_refund: bool) -> None:
            used.now -= 1
            assert used.now >= 0
            if is_refund and begun_s in used.begun:
                used.begun.remove(begun_s)

        return Pass(leave)

    async def enter_soon(self, principal: Key) -> Pass | None:
        """As `enter`, but wait briefly: after a reconnect the old session may still end."""
        place = self.enter(principal)
        with anyio.move_on_after(PLACE_WAIT_S):
            while place is None:
                await anyio.sleep(PLACE_LOOK_S)
                place = self.enter(principal)
        return place

    def _forget(self) -> None:
        """Drop starts older than an hour, and keys without counts."""
        hour_ago = self._clock() - HOUR_S
        for name, used in list(self._used.items()):
            while used.begun and used.begun[0] <= hour_ago:
                used.begun.popleft()
            if used.now == 0 and not used.begun:
                del self._used[name]


# -- admission -------------------------------------------------------------------------------------


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
