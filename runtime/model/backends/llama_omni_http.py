"""A remote backend's address, and single HTTP requests to it.

A request has its own connection, is bounded in time and bytes, and is not retried.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import ssl
from contextlib import aclosing
from typing import Final
from urllib.parse import quote, urlsplit

import anyio
import attrs
import httpcore2
from anyio.abc import ByteStream

from .base import BackendError, BackendGone

READ_BYTES: Final = 262_144
"""A second of speech in one read (design.md, "Transport facts"), which bounds the queue."""
BODY_BYTES_MAX: Final = 64 * 1024
"""Answers of `/health` and a close fit in a line."""


@attrs.frozen(kw_only=True)
class Address:
    """A remote backend's address; `base` precedes every path, and is usually empty."""

    host: str
    port: int
    is_tls: bool
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `ws://host:port` or `wss://host:port`, perhaps with a path; else `ValueError`."""
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "wss" else 80)
            is_address = parts.scheme in ("ws", "wss") and parts.port != 0 and url.isascii()
            has_more = "@" in parts.netloc or bool(parts.query or parts.fragment)
        except ValueError:
            is_address = has_more = False
        if not is_address or has_more or parts.hostname is None:
            raise ValueError("the remote's address is not like ws://127.0.0.1:22500")
        base = quote(parts.path.rstrip("/"), safe="/%")
        return cls(host=parts.hostname, port=port, is_tls=parts.scheme == "wss", base=base)

    @property
    def netloc(self) -> str:
        """Host and port, as in a `Host` header."""
        return f"[{self.host}]:{self.port}" if _is_ipv6(self.host) else f"{self.host}:{self.port}"

    async def dial(self) -> ByteStream:
        """Open a connection, which the caller closes; `BackendGone` if there is no server."""
        try:
            if self.is_tls:
                return await anyio.connect_tcp(
                    self.host, self.port, tls=True, tls_standard_compatible=False
                )
            return await anyio.connect_tcp(self.host, self.port)
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise BackendGone(f"cannot connect to {self.netloc}: {_reason_of(error)}") from None


async def request(address: Address, method: str, path: str, *, wait_s: float) -> tuple[int, bytes]:
    """Make one HTTP request on its own connection; return status and body.

    `method` is `GET`, or `POST` with an empty JSON object; `path` is percent-encoded.
    `BackendGone`: there is no answer in time; `BackendError`: the peer does not speak HTTP, or
    sends too much.
    """
    scheme, target = "https" if address.is_tls else "http", address.base + path
    url = httpcore2.URL(scheme=scheme, host=address.host, port=address.port, target=target)
    body = b"{}" if method == "POST" else b""
    headers = [("Host", address.netloc), ("Connection", "close")]
    headers.append(("Content-Type", "application/json"))
    tls = ssl.create_default_context() if address.is_tls else None
    received = bytearray()
    try:
        with anyio.fail_after(wait_s):
            async with (
                httpcore2.AsyncConnectionPool(tls) as pool,
                pool.stream(method, url, headers=headers, content=body) as answer,
                aclosing(answer.aiter_stream()) as parts,
            ):
                async for part in parts:
                    received += part
                    if len(received) > BODY_BYTES_MAX:
                        raise BackendError(f"expected at most {BODY_BYTES_MAX} bytes, got more")
                return answer.status, bytes(received)
    except TimeoutError:
        raise BackendGone(f"expected an answer in {wait_s:g} s, got none") from None
    except httpcore2.ConnectError as error:
        raise BackendGone(f"cannot connect to {address.netloc}: {_reason_of(error)}") from None
    except httpcore2.NetworkError:
        raise BackendGone("the connection was lost before its answer") from None
    except httpcore2.RemoteProtocolError:
        what = f"{method} {path.partition('?')[0]}"
        raise BackendError(f"expected HTTP to {what}, got something else") from None


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _reason_of(error: Exception) -> str:
    """Describe an error in the system's words, unwrapping AnyIO's."""
    cause: BaseException = error
    inner: BaseException | None = error
    while inner is not None:  # httpcore's pool raises without a cause
        cause = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLError):  # its errno is not the system's
        return (cause.reason or "no TLS there").replace("_", " ").lower()
    number = cause.errno if isinstance(cause, OSError) else None
    if number is not None and number in errno.errorcode:
        return os.strerror(number).lower()
    return (str(error) or "no TLS there").lower()
