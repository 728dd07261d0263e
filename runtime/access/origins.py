"""The web pages that may connect, and the names by which the server may be addressed.

- A request without `Origin` is allowed: browsers send it with each page's WebSocket.
- A page of the server's own host is allowed: host and port equal those of `Host`, and its scheme is
  no weaker than the server's. A missing port in `Host` is that of the page's scheme, for a proxy
  that ends TLS and passes `Host` on.
- Listed origins are allowed. `*` allows all, and needs keys: a page without a key can do nothing.
  `null` (a sandboxed frame, a file) and an invalid origin are always refused.
- DNS rebinding makes a page's own name resolve to 127.0.0.1, so that its origin equals the host.
  Against it, a loopback server without keys answers only to loopback names, addresses and the hosts
  of its listed origins. With keys the attack gains nothing.
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
"""Every origin except `null`."""


@attrs.frozen(kw_only=True)
class Origins:
    """The allowed pages and names; `listed` is in addition to the server's own origin."""

    listed: frozenset[Origin] = frozenset()
    any_origin: bool = False
    loopback_only: bool = False

    def welcomes(self, origins: Sequence[str], hosts: Sequence[str], *, secure: bool) -> bool:
        """Whether a request's `Origin` headers are allowed, by its `Host` headers and its TLS."""
        if not origins:
            return True
        if len(origins) != 1:
            return False
        return self.lists(origins[0]) or _is_own(read_origin(origins[0]), hosts, secure=secure)

    def lists(self, text: str) -> bool:
        """Whether an `Origin` header is a listed origin."""
        origin = read_origin(text)
        return origin is not None and (self.any_origin or origin in self.listed)

    def answers_to(self, hosts: Sequence[str]) -> bool:
        """Whether the server may be addressed by these `Host` headers; browsers send just one."""
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
    """The flag of `antiphon serve` that would allow refused `Origin` headers, or empty."""
    origin = read_origin(texts[0]) if len(texts) == 1 else None
    return "" if origin is None else f"--origin {write_origin(origin)}"


def read_origins(texts: Sequence[str], *, has_keys: bool, host: str) -> Origins:
    """Parse the operator's origins; `host` is the server's address.

    `ValueError`: an origin is invalid, or `*` is used without keys.
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
