"""Hosts and web origins as values: parsing `Host` and `Origin`, recognising loopback."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import attrs

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
