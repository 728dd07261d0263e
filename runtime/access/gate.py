"""Admission of a client: the name it uses for the server, its page, its key, and its key's quota.

- The checks run in that order, before the rest of a request is read, so that a denied client learns
  nothing. An admitted one keeps its rights; `watch` follows the key file for others.
- With keys, a client presents exactly one. A missing or invalid key, or more than one, is a 401
  with always the same text. Keys are never logged or sent in an answer.
- Without keys every client is `ANYONE`, and keys are ignored.

How a client presents its key:

- `Authorization: Bearer KEY`, over HTTP and on a WebSocket; never in the address.
- The subprotocols `antiphon` and `antiphon.key.KEY`: a browser's WebSocket cannot set headers. The
  server selects `antiphon`. A browser's client of OpenAI's Realtime API offers `realtime` and
  `openai-insecure-api-key.KEY` for the same.
- The password of HTTP Basic (RFC 7617), with any user name, for pages in a browser. The browser
  then sends it by itself, also for another site's page. So Basic is valid only for GET and HEAD,
  which change nothing here, not for requests within another site's page, and not on a WebSocket.
- A client secret (`keys.ClientSecret`) in the place of a key: its client is its key's, without the
  scope `admin`, and only begins sessions. Without keys an invalid one is ignored, as a key is.

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

`AccessMiddleware` (ASGI) is the gate for all HTTP requests, and sets headers of all answers:

- `/health` and `/ready` are open: an orchestrator has no key and uses another name.
- Public paths (the pages of `--static`) need no key; foreign pages and names are refused.
- All other requests pass the gate; `scope["principal"]` is the admitted client.
- Listed origins get CORS headers; preflights are answered here, because they carry no key. Other
  `OPTIONS` requests go to the application.
- `answer_denied` handles a `Denied` of the application. All denials are counted in `denials`.
- By default answers forbid type sniffing, framing, caching, and use by another site's page; the
  application's own headers win.
"""

from __future__ import annotations

import base64
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Literal, cast

import anyio
import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.values.limits import Mode

from ..net.http import LIVE_PATH, error_body, error_for, json_response
from ..settings.settings import Settings
from .keys import ANYONE, ClientSecret, Key, KeyRing, read_secret
from .origins import Origins, flag_for, read_origins

# -- credentials -----------------------------------------------------------------------------------


SUBPROTOCOL: Final = "antiphon"
OPENAI_SUBPROTOCOL: Final = "realtime"
SUBPROTOCOLS: Final = (SUBPROTOCOL, OPENAI_SUBPROTOCOL)
"""The subprotocols of which the server selects the first that a client offers."""
KEY_SUBPROTOCOL: Final = "antiphon.key."
KEY_SUBPROTOCOLS: Final = (KEY_SUBPROTOCOL, "openai-insecure-api-key.")
"""Prefixes of a browser's key; never selected: that would send the key back."""
BEARER: Final = "bearer"
BASIC: Final = "basic"
LOOKING: Final = frozenset({"GET", "HEAD"})
"""The methods for which Basic is valid."""
OWN_SITE: Final = frozenset({"same-origin", "none"})
"""Requests of our own pages, or of the browser's user."""
DOCUMENT: Final = "document"
"""The answer fills a window; no other page sees it."""
HTML: Final = "text/html"
"""Accepted by a browser that shows the answer; requests of scripts do not accept it."""
ASK_PROGRAM: Final = ("WWW-Authenticate", "Bearer")
ASK_PERSON: Final = ("WWW-Authenticate", 'Basic realm="Antiphon", charset="UTF-8"')
"""It makes a browser ask its user for a name and a password (RFC 7617, 2)."""

Headers = Sequence[tuple[str, str]]


def values_of(headers: Headers, name: str) -> list[str]:
    """All values of a header; names in lower case."""
    return [value for key, value in headers if key == name]


def shown_to_websocket(headers: Headers, offered: Sequence[str]) -> list[str]:
    """The keys in a WebSocket's handshake; another scheme's secret is an empty text."""
    keys = [
        subprotocol.removeprefix(prefix)
        for subprotocol in offered
        for prefix in KEY_SUBPROTOCOLS
        if subprotocol.startswith(prefix)
    ]
    sent = values_of(headers, "authorization")
    if len(sent) == 1 and _scheme(sent[0]) == BASIC:
        return keys  # A browser added it, because a page uses it; it is not meant as a key.
    return keys + _shown(headers, takes_basic=False)


def shown_over_http(method: str, headers: Headers) -> list[str]:
    """The keys in any other request; another scheme's secret is an empty text."""
    return _shown(headers, takes_basic=_is_look(method, headers))


def challenge(method: str, headers: Headers) -> tuple[str, str]:
    """The header of a 401: Basic for a person who opens a page, Bearer for a program."""
    shows = any(HTML in value for value in values_of(headers, "accept"))
    return ASK_PERSON if shows and _is_look(method, headers) else ASK_PROGRAM


def _is_look(method: str, headers: Headers) -> bool:
    """Whether a person may read the answer: no other site's page asks, except by a link to us.

    Browsers report that under TLS and on loopback (Fetch Metadata).
    """
    site, shown_as = values_of(headers, "sec-fetch-site"), values_of(headers, "sec-fetch-dest")
    is_own = all(value in OWN_SITE for value in site)
    return method in LOOKING and (is_own or shown_as == [DOCUMENT])


def _shown(headers: Headers, *, takes_basic: bool) -> list[str]:
    shown = []
    for value in values_of(headers, "authorization"):
        scheme, secret = _scheme(value), value.partition(" ")[2].strip()
        if scheme == BASIC and takes_basic:
            shown.append(_password(secret))
        else:
            shown.append(secret if scheme == BEARER else "")
    return shown


def _scheme(value: str) -> str:
    return value.partition(" ")[0].lower()


def _password(credentials: str) -> str:
    """The password of Basic (RFC 7617, 2); empty where it is invalid."""
    try:
        text = base64.b64decode(credentials, validate=True).decode("utf-8")
    except ValueError:
        return ""
    return text.partition(":")[2]


# -- denials ---------------------------------------------------------------------------------------


Reason = Literal["host", "origin", "no_key", "wrong_key", "mode", "scope"]
"""The server's name in `Host`, the page, no key, a wrong key or several; or a valid key without
that mode or without the scope admin. A label of a metric."""

ANSWERS: Final[Mapping[Reason, tuple[HTTPStatus, str]]] = {
    "host": (HTTPStatus.FORBIDDEN, "host_not_allowed"),
    "origin": (HTTPStatus.FORBIDDEN, "origin_not_allowed"),
    "no_key": (HTTPStatus.UNAUTHORIZED, "unauthorized"),
    "wrong_key": (HTTPStatus.UNAUTHORIZED, "unauthorized"),
    "mode": (HTTPStatus.FORBIDDEN, "mode_not_allowed"),
    "scope": (HTTPStatus.FORBIDDEN, "scope_too_small"),
}
"""The status and the code of each."""
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
                _LOG.info("%d further denials were not logged", self._lines - LINES_MAX)
            self._window_s, self._lines = self._clock(), 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            key = f" (key {name})" if name else ""
            text = f"{reason}; {flag} would allow it" if flag else reason
            level = logging.WARNING if reason == "origin" else logging.INFO
            _LOG.log(level, "denied %s to %s%s: %s", asked, peer, key, text)


# -- quotas ----------------------------------------------------------------------------------------


HOUR_S: Final = 3_600.0
PLACE_WAIT_S: Final = 2.5
"""The time in which an ending session sends its last frames and closes."""
PLACE_LOOK_S: Final = 0.1


@attrs.define
class _KeyUsage:
    now: int = 0
    begun: deque[float] = attrs.field(factory=deque)


class QuotaPlace:
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
        self._used: dict[str, _KeyUsage] = {}

    def enter(self, principal: Key) -> QuotaPlace | None:
        """Take a place for a session; None where the key has reached a limit."""
        self._forget()
        used = self._used.get(principal.name, _KeyUsage())
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

        return QuotaPlace(leave)

    async def enter_soon(self, principal: Key) -> QuotaPlace | None:
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
        message: in one line for people; `details` are more fields for programs.
        name: of the client's valid key, or empty.
        flag: the server's flag that would allow it; only for the operator.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        headers: Headers = (),
        name: str = "",
        flag: str = "",
        **details: object,
    ) -> None:
        status, code = ANSWERS[reason]
        super().__init__(f"{status.value} {code}: {message}")
        self.reason = reason
        self.status = status.value
        self.body = error_body(code, message, **details)
        self.headers = tuple(headers)
        self.name = name
        self.flag = flag


@attrs.frozen(kw_only=True)
class Admitted:
    """An admitted client.

    Attributes:
        subprotocol: to be selected in the handshake, or None.
        secret: with which it came, if that only begins sessions.
    """

    principal: Key
    subprotocol: str | None = None
    secret: ClientSecret | None = None

    def require_key(self) -> Key:
        """Its key, for more than to begin a session; raises `Denied` for a client secret."""
        if self.secret is not None:
            raise Denied(
                "scope",
                "a client secret only begins sessions, with its settings",
                name=self.principal.name,
            )
        return self.principal


class AccessControl:
    """The checks of one server; `keys` of None asks for no key.

    `clock` gives seconds, `wall_clock` Unix time. The handler of a `Denied` notes it in `denials`.
    """

    def __init__(
        self,
        keys: KeyRing | None,
        origins: Origins,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._wall_clock = wall_clock
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
        admitted = self._admit(headers, shown, ASK_PROGRAM, secure=secure)
        selected = next((it for it in SUBPROTOCOLS if it in offered_subprotocols), None)
        return attrs.evolve(admitted, subprotocol=selected)

    def admit_request(
        self, method: str, headers: Headers, *, secure: bool, begins: bool = False
    ) -> Key:
        """Admit any other request, or raise `Denied`; arguments as of `admit_websocket`.

        `begins`: it begins a session, whose own WebSocket is judged again.
        """
        shown = shown_over_http(method, headers)
        admitted = self._admit(headers, shown, challenge(method, headers), secure=secure)
        return admitted.principal if begins else admitted.require_key()

    def admit_page(self, headers: Headers, *, secure: bool) -> None:
        """Admit a request for a public page, without a key; `Denied` by host or origin."""
        self._check_source(headers, secure=secure)

    def check_mode(self, principal: Key, mode: Mode) -> None:
        """Raise `Denied` if the key does not allow the mode."""
        if not principal.may_use(mode):
            raise Denied(
                "mode",
                f"this key may not use {mode}",
                name=principal.name,
                allowed=list(principal.modes or ()),
            )

    def find_named(self, name: str) -> Key | None:
        """Find the key of a name; on a server without keys each name is `ANYONE`."""
        return ANYONE if self._keys is None else self._keys.named(name)

    def has_key(self, name: str) -> bool:
        """Whether a client of this name may still connect."""
        return self.find_named(name) is not None

    async def watch(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the key file, and call `on_change` after each change; runs until cancelled."""
        if self._keys is not None:
            await self._keys.watch(on_change)

    def _check_source(self, headers: Headers, *, secure: bool) -> None:
        hosts = values_of(headers, "host")
        if not self.origins.answers_to(hosts):
            raise Denied("host", "this server answers only to names of its own machine")
        origins = values_of(headers, "origin")
        if not self.origins.welcomes(origins, hosts, secure=secure):
            raise Denied(
                "origin", "pages of this origin may not use this server", flag=flag_for(origins)
            )

    def _admit(
        self, headers: Headers, shown: Sequence[str], ask: tuple[str, str], *, secure: bool
    ) -> Admitted:
        self._check_source(headers, secure=secure)
        if len(shown) == 1 and (found := read_secret(shown[0], self._named, self._wall_clock())):
            parent, secret = attrs.evolve(found[0], hash=""), found[1]  # it signs no other one
            if secret.is_whole:
                return Admitted(principal=parent)
            return Admitted(principal=attrs.evolve(parent, scope="use"), secret=secret)
        if self._keys is None:
            return Admitted(principal=ANYONE)
        key = self._keys.find(shown[0]) if len(shown) == 1 else None
        if key is None:
            raise Denied(
                "wrong_key" if shown else "no_key",
                "this server needs one valid key: the header Authorization: Bearer KEY, or the "
                f"subprotocols {SUBPROTOCOL} and {KEY_SUBPROTOCOL}KEY",
                headers=[ask],
            )
        return Admitted(principal=key)

    def _named(self, name: str) -> Key | None:
        return None if name and self._keys is None else self.find_named(name)


def open_gate(
    settings: Settings, *, clock: Callable[[], float] = anyio.current_time
) -> AccessControl:
    """Make the gate of the settings; reads the key file. `clock` gives seconds.

    `KeyFileError`: the keys cannot be read; `ValueError`: an origin is invalid.
    """
    keys = None if settings.keys is None else KeyRing(settings.keys)
    origins = read_origins(settings.origins, has_keys=keys is not None, host=settings.host)
    return AccessControl(keys, origins, clock=clock)


def require_admin(principal: Key) -> None:
    """Raise `Denied` if the key has not the scope `admin`."""
    if not principal.is_admin:
        raise Denied("scope", "this needs a key of the scope admin", name=principal.name)


# -- the middleware --------------------------------------------------------------------------------

CALLS_PATH: Final = "/v1/realtime/calls"
"""It takes a client secret as a WebSocket does, and so does `LIVE_PATH`."""
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Default headers of every answer."""
STRICT_TRANSPORT: Final = ("Strict-Transport-Security", "max-age=2592000")
"""A month: a returning browser insists on TLS, and a change back is possible."""
CORS_METHODS: Final = "GET, HEAD, POST, PUT, DELETE"
CORS_REQUEST_HEADERS: Final = (
    "Authorization, Content-Type, If-None-Match, If-Range, Last-Event-ID, Range"
)
CORS_ANSWER_HEADERS: Final = (
    "Accept-Ranges, Content-Disposition, Content-Range, ETag, Location, Retry-After"
)
CORS_AGE_S: Final = 600
"""The longest time that every browser caches a preflight's answer."""
PRINCIPAL: Final = "principal"
DENIALS: Final = "denials"


@attrs.define(eq=False)
class AccessMiddleware:
    """An application behind the gate; `secure`: TLS ends here; `is_public` paths need no key."""

    _app: ASGIApp
    _gate: AccessControl
    _secure: bool = attrs.field(default=False, kw_only=True)
    _is_public: Callable[[str], bool] = attrs.field(default=lambda _: False, kw_only=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the application refuses other scopes than HTTP."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [(key.decode("latin-1"), it.decode("latin-1")) for key, it in scope["headers"]]
        cors = self._cors(headers)
        defaults = (*HEADERS, STRICT_TRANSPORT) if self._secure else HEADERS

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _completed(message, defaults, cors)}
            await send(message)

        scope = {**scope, DENIALS: self._gate.denials}
        app = _preflight() if cors and _is_preflight(scope, headers) else self._app
        if app is self._app and scope["path"] not in OPEN_PATHS:
            try:
                scope = self._admitted(scope, headers)
            except Denied as denied:
                app = _answer(denied, scope)
        await app(scope, receive, send_on)

    def _admitted(self, scope: Scope, headers: Headers) -> Scope:
        """Admit a request, with its principal in the scope unless the path is public."""
        if self._is_public(scope["path"]):
            self._gate.admit_page(headers, secure=self._secure)
            return scope
        begins = scope["path"] in (CALLS_PATH, LIVE_PATH)
        principal = self._gate.admit_request(
            scope["method"], headers, secure=self._secure, begins=begins
        )
        return {**scope, PRINCIPAL: principal}

    def _cors(self, headers: Headers) -> tuple[tuple[str, str], ...]:
        """The CORS headers for a listed origin's page; none for others."""
        found = [value for name, value in headers if name == "origin"]
        if len(found) != 1 or not self._gate.origins.lists(found[0]):
            return ()
        return (
            ("Access-Control-Allow-Origin", found[0]),
            ("Access-Control-Expose-Headers", CORS_ANSWER_HEADERS),
        )


def principal_of(request: Request) -> Key:
    """The principal of a request that came through the middleware."""
    return cast(Key, request.scope[PRINCIPAL])


async def answer_denied(request: Request, error: Exception) -> Response:
    """Answer a `Denied` of an endpoint; for `exception_handlers={Denied: answer_denied}`."""
    assert isinstance(error, Denied)
    return _answer(error, request.scope)


def _answer(denied: Denied, scope: Scope) -> Response:
    peer, denials = scope.get("client"), cast(Denials, scope[DENIALS])
    host = "unknown address" if peer is None else peer[0]
    denials.note(denied.reason, peer=host, asked="HTTP", name=denied.name, flag=denied.flag)
    body = error_for(scope["path"], denied.status, denied.body)
    return json_response(body, denied.status, dict(denied.headers))


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    names = {name for name, _ in headers}
    return scope["method"] == "OPTIONS" and "access-control-request-method" in names


def _preflight() -> Response:
    allowed = {
        "Access-Control-Allow-Methods": CORS_METHODS,
        "Access-Control-Allow-Headers": CORS_REQUEST_HEADERS,
        "Access-Control-Max-Age": str(CORS_AGE_S),
    }
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=allowed)


def _completed(message: Message, defaults: Headers, cors: Headers) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
    names = {name.lower() for name, _ in headers}
    # A cached answer must not be shown to another origin.
    added = (*defaults, *cors, ("Vary", "Origin"))
    for name, value in added:
        key = name.lower().encode("ascii")
        if key == b"vary" or key not in names:
            headers.append((key, value.encode("latin-1")))
    return headers
