"""How a client shows its key, and how it is asked for one.

- `Authorization: Bearer KEY`, over HTTP and on a WebSocket.
- The subprotocols `antiphon` and `antiphon.key.KEY`, from a browser's WebSocket, which can set no
  header; the server selects `antiphon`.
- The password of HTTP's Basic (RFC 7617), for people who look at a page with a browser, whatever
  user they name. Their browser sends it by itself from then on, also where another site's page had
  it ask. So it opens GET and HEAD, which change nothing here, and no other method; nothing that a
  browser says it asks for within another site's page; and on a WebSocket, where it would be
  whoever's page it is, it is no key at all.

A key in the address is not looked at. Nothing here knows which keys are good.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final

SUBPROTOCOL: Final = "antiphon"
"""What the server selects where a client offers it."""
KEY_SUBPROTOCOL: Final = "antiphon.key."
"""Before a browser's key; never selected, for that would say the key back."""
BEARER: Final = "bearer"
BASIC: Final = "basic"
LOOKING: Final = frozenset({"GET", "HEAD"})
"""The methods that open to Basic."""
OWN_SITE: Final = frozenset({"same-origin", "none"})
"""Who asks: a page of ours, or whoever sits before the browser."""
DOCUMENT: Final = "document"
"""The answer fills a window, and no other page sees it."""
HTML: Final = "text/html"
"""What a browser accepts that will show the answer to somebody; scripts in its pages do not."""
ASK_PROGRAM: Final = ("WWW-Authenticate", "Bearer")
ASK_PERSON: Final = ("WWW-Authenticate", 'Basic realm="Antiphon", charset="UTF-8"')
"""A browser asks whoever sits before it for a name and a password then (RFC 7617, 2)."""

Headers = Sequence[tuple[str, str]]


def values_of(headers: Headers, name: str) -> list[str]:
    """Find all values of a header.

    Args:
        headers: of the request, names in lower case.
        name: in lower case.
    """
    return [value for key, value in headers if key == name]


def shown_to_websocket(headers: Headers, offered: Sequence[str]) -> list[str]:
    """Find the keys that a client shows with a WebSocket's handshake, in whatever way.

    Args:
        headers: of the request, names in lower case.
        offered: the subprotocols.

    Returns:
        The keys; another scheme's secret is no key, but is one that was shown: an empty text.
    """
    keys = [
        subprotocol.removeprefix(KEY_SUBPROTOCOL)
        for subprotocol in offered
        if subprotocol.startswith(KEY_SUBPROTOCOL)
    ]
    sent = values_of(headers, "authorization")
    if len(sent) == 1 and _scheme(sent[0]) == BASIC:
        return keys  # Added by a browser that was given it for a page: no client means it as a key.
    return keys + _shown(headers, takes_basic=False)


def shown_over_http(method: str, headers: Headers) -> list[str]:
    """Find the keys that a client shows with any other request; likewise.

    Args:
        method: of the request.
        headers: names in lower case.
    """
    return _shown(headers, takes_basic=_is_look(method, headers))


def challenge(method: str, headers: Headers) -> tuple[str, str]:
    """Say how to ask for a key: a person who opens a page by Basic, a program by Bearer.

    Args:
        method: of the request.
        headers: names in lower case.

    Returns:
        The header of the 401.
    """
    shows = any(HTML in value for value in values_of(headers, "accept"))
    return ASK_PERSON if shows and _is_look(method, headers) else ASK_PROGRAM


def _is_look(method: str, headers: Headers) -> bool:
    """Whether somebody may be looking: no other site's page asks, but by a link to us.

    Browsers say that to servers with TLS, and on loopback (Fetch Metadata); others say nothing.
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
    """Read the password of Basic (RFC 7617, 2); empty where there is none to be read."""
    try:
        text = base64.b64decode(credentials, validate=True).decode("utf-8")
    except ValueError:
        return ""
    return text.partition(":")[2]
