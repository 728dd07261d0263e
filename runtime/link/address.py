"""Where a worker listens: `unix:PATH` or `tcp:HOST:PORT`; connecting there."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import anyio
import attrs
from anyio.abc import ByteStream

from ..access.origins import is_loopback, read_authority
from ..settings.settings import shown

UNIX_PATH_BYTES_MAX: Final = 100
"""The system's own bound is 107 on Linux and 103 elsewhere."""


@attrs.frozen
class UnixAddress:
    """A socket in the file system."""

    path: Path

    is_local = True

    def __str__(self) -> str:
        return f"unix:{self.path}"


@attrs.frozen
class TcpAddress:
    """A host (IPv6 without brackets) and a port."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """No other machine can reach it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


WorkerAddress = UnixAddress | TcpAddress


def read_address(text: str) -> WorkerAddress:
    """Parse an address; `ValueError` if it is of neither kind."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            raise ValueError(f"a path of more than {UNIX_PATH_BYTES_MAX} bytes is not a socket's")
        return UnixAddress(Path(rest))
    if kind == "tcp" and (found := read_authority(rest)) is not None and found.port is not None:
        return TcpAddress(found.host, found.port)
    raise ValueError(f"{shown(text)} is not an address: unix:PATH or tcp:HOST:PORT")


async def connect(address: WorkerAddress, tls: ssl.SSLContext | None) -> ByteStream:
    """Connect to a worker; `OSError` if nothing listens there, or TLS fails."""
    if isinstance(address, UnixAddress):
        return await anyio.connect_unix(address.path)
    if tls is None:
        return await anyio.connect_tcp(address.host, address.port)
    try:
        return await anyio.connect_tcp(
            address.host, address.port, ssl_context=tls, tls_standard_compatible=False
        )
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise OSError(f"no TLS at {address}") from error
