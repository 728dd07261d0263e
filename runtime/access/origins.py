"""Web origins and hosts: parsing them, recognising loopback, and which pages and names are allowed.

- A request without `Origin` is allowed: browsers send it with each page's WebSocket.
- A page of the server's own host is allowed: host and port equal those of `Host`, and its scheme is
  not weaker than the server's. A missing port in `Host` is that of the page's scheme, for a proxy
  that ends TLS and passes `Host` on.
- Listed origins are allowed. `*` allows all, and needs keys: a page without a key can do nothing.
  `null` (a sandboxed frame, a file) and an invalid origin are always refused.
- DNS rebinding makes a page's own name resolve to 127.0.0.1, so that its origin equals the host.
  Against it, a loopback server without keys answers only to loopback names, addresses and the hosts
  of its listed origins. With keys the attack gains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import attrs

# -- hosts and origins as values -------------------------------------------------------------------


PORT_OF: Final = {"http": 80, "https": 443}
"""The default port of a scheme."""
HOST_CHARS_MAX: Final = 255
"""The longest DNS name."""
PORT_MAX: Final = 65_535

_AUTHORITY: Final = re.compile(
    r"(?P<host>[a-z0-9]([a-z0-9_.-]*[a-z0-9_.])?|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.ASCII
)
_ORIGIN: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/]+)", re.ASCII)


@attrs.frozen
class Authority:
    """A host (lower case, IPv6 without brackets) and a port, or None, as in the `Host` header."""

    host: str
    port: int | None


@attrs.frozen
class Origin:
    """A web page's origin, `https`, `http` or a browser extension's, with its host.

    `port` is the scheme's default where it was left out; None where it has none.
    """

    scheme: str
    host: str
    port: int | None


def read_authority(text: str) -> Authority | None:
    """Parse a `Host` header; None if it is invalid."""
    found = _AUTHORITY.fullmatch(text.lower())
    if found is None or len(text) > HOST_CHARS_MAX:
        return None
    host, port = found["host"], found["port"]
    if host.startswith("["):
        host = host[1:-1]
        if not isinstance(_address(host), IPv6Address):
            return None
    if port is not None and int(port) > PORT_MAX:
        return None
    return Authority(host.removesuffix("."), None if port is None else int(port))


def write_origin(origin: Origin) -> str:
    """Format an origin as browsers and operators write it."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    is_plain = origin.port in {None, PORT_OF.get(origin.scheme)}
    return f"{origin.scheme}://{host}" + ("" if is_plain else f":{origin.port}")


def read_origin(text: str) -> Origin | None:
    """Parse an `Origin` header; None if it is `null` or invalid."""
    found = _ORIGIN.fullmatch(text.lower())
    if found is None:
        return None
    authority = read_authority(found["authority"])
    if authority is None:
        return None
    port = PORT_OF.get(found["scheme"]) if authority.port is None else authority.port
    return Origin(found["scheme"], authority.host, port)


def is_loopback(host: str) -> bool:
    """Whether a host can only be this machine (RFC 6761, 6.3)."""
    address = _address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_address(host: str) -> bool:
    """Whether a host is an IP address."""
    return _address(host) is not None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


# -- what is allowed -------------------------------------------------------------------------------


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
            raise ValueError(f"{text!r} is not an origin: write it as in https://app.example:8443")
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
