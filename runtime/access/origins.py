"""Which web pages may connect, and under which names the server may be addressed.

A browser lets any page open a WebSocket to any address, and says in `Origin` which page it is. What
is no browser sends none. The rules:

- No `Origin` is welcome: no page can leave it out.
- A page of the server's own host is welcome: host and port are those of `Host`, and its scheme is
  no weaker than the server's. Where `Host` leaves the port out, it is that of the page's scheme, so
  that a page over TLS is at home behind a proxy that ends TLS and passes `Host` on.
- Listed origins are welcome, exactly as they are. `*` welcomes all, and is for servers with keys:
  there a page that has no key can do nothing.
- `null` (a sandboxed frame, a file) and what is no origin is refused, whatever is listed.

Against DNS rebinding (a page's own name is made to resolve to 127.0.0.1, so that its origin *is*
the host it talks to) a server that listens on loopback without keys answers to loopback names, to
addresses and to the hosts of its listed origins alone. With keys that attack gains nothing; on
another address without keys the operator has said that whoever comes may use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from .hosts import (
    PORT_OF,
    Authority,
    Origin,
    is_address,
    is_loopback,
    read_authority,
    read_origin,
    write_origin,
)

ANY: Final = "*"
"""Every origin but `null`."""


@attrs.frozen(kw_only=True)
class Origins:
    """The pages and names that are welcome.

    Attributes:
        listed: origins beside the server's own.
        any_origin: every origin is welcome.
        loopback_only: answer to names of this machine alone.
    """

    listed: frozenset[Origin] = frozenset()
    any_origin: bool = False
    loopback_only: bool = False

    def welcomes(self, origins: Sequence[str], hosts: Sequence[str], *, secure: bool) -> bool:
        """Whether a request may come from where it says.

        Args:
            origins: its `Origin` headers.
            hosts: its `Host` headers.
            secure: it came over TLS that ends here.
        """
        if not origins:
            return True
        if len(origins) != 1:
            return False
        return self.lists(origins[0]) or _is_own(read_origin(origins[0]), hosts, secure=secure)

    def lists(self, text: str) -> bool:
        """Whether an `Origin` header is one of those that are welcome from elsewhere."""
        origin = read_origin(text)
        return origin is not None and (self.any_origin or origin in self.listed)

    def answers_to(self, hosts: Sequence[str]) -> bool:
        """Whether the server may be addressed by that name; only browsers are held to it.

        Args:
            hosts: the `Host` headers of a request; a browser sends exactly one.
        """
        if not self.loopback_only or not hosts:
            return True
        authority = read_authority(hosts[0]) if len(hosts) == 1 else None
        if authority is None:
            return False
        host = authority.host
        return (
            is_loopback(host)
            or is_address(host)
            or any(origin.host == host for origin in self.listed)
        )


def flag_for(texts: Sequence[str]) -> str:
    """Say which flag of `antiphon serve` would welcome a page; nothing where none would.

    Args:
        texts: the `Origin` headers of a request that was refused for them.
    """
    origin = read_origin(texts[0]) if len(texts) == 1 else None
    return "" if origin is None else f"--origin {write_origin(origin)}"


def read_origins(texts: Sequence[str], *, has_keys: bool, host: str) -> Origins:
    """Make the rules of a server.

    Args:
        texts: origins as an operator lists them, or `*`.
        has_keys: whether clients need keys.
        host: the address that is listened on.

    Raises:
        ValueError: one is no origin, or `*` without keys.
    """
    listed = set()
    for text in texts:
        if text == ANY:
            if not has_keys:
                raise ValueError("the origin * needs keys: any page could use the server")
            continue
        origin = read_origin(text)
        if origin is None:
            raise ValueError(f"{text!r} is no origin: write it as in https://app.example:8443")
        listed.add(origin)
    return Origins(
        listed=frozenset(listed),
        any_origin=ANY in texts,
        loopback_only=not has_keys and is_loopback(host),
    )


def _is_own(origin: Origin | None, hosts: Sequence[str], *, secure: bool) -> bool:
    if origin is None or origin.scheme not in ({"https"} if secure else PORT_OF):
        return False
    authority = read_authority(hosts[0]) if len(hosts) == 1 else None
    return (
        authority is not None
        and _port(authority, origin) == origin.port
        and (authority.host == origin.host)
    )


def _port(authority: Authority, origin: Origin) -> int | None:
    return PORT_OF[origin.scheme] if authority.port is None else authority.port
