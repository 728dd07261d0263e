"""How a client presents its key, and how the server asks for one; `gate` checks it.

- `Authorization: Bearer KEY`, over HTTP and on a WebSocket; never in the address.
- The subprotocols `antiphon` and `antiphon.key.KEY`: a browser's WebSocket cannot set headers. The
  server selects `antiphon`. A browser's client of OpenAI's Realtime API offers `realtime` and
  `openai-insecure-api-key.KEY` for the same.
- The password of HTTP Basic (RFC 7617), with any user name, for pages in a browser. The browser
  then sends it by itself, also for another site's page. So Basic is valid only for GET and HEAD,
  which change nothing here, not for requests within another site's page, and not on a WebSocket.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

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
