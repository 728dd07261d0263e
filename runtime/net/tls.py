"""TLS on the server's port: the certificate, read again when its files change.

- TLS 1.2 and later, HTTP/1.1 by ALPN, no client certificates.
- A connection keeps its certificate. A new pair of files is taken once two looks found it the same
  (they are written one after the other); an invalid pair is logged, and the old one stays.
- A client that speaks plain HTTP to a TLS port gets a plain-text error.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

RELOAD_S: Final = 5.0
"""Between looks at the files: a renewal comes weeks before the old one ends."""
ALPN: Final = ("http/1.1",)
"""No WebSockets over HTTP/2: a client that offers it chooses 1.1."""
TLS_HANDSHAKE: Final = 0x16
"""The first byte of a ClientHello (RFC 8446, 5.1)."""
NO_TLS_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 49\r\n\r\nthis port speaks TLS: use https:// or wss:// here"
)

_LOG: Final = logging.getLogger("antiphon.tls")

_State = tuple[tuple[int, int, int], ...]


class CertificateError(Exception):
    """The certificate or its key is unusable; the text says which and why, in one line."""


class Certificate:
    """A PEM chain, its own certificate first, and its key in PEM, without a password.

    `CertificateError`: they are unreadable, or do not fit together.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        self._used = self._state()
        self.context = self._load()

    async def watch(self) -> None:
        """Take new files as they come, until cancelled; `context` is for new connections."""
        seen = self._used
        while True:
            await anyio.sleep(RELOAD_S)
            try:
                before, seen = seen, await anyio.to_thread.run_sync(self._state)
                if seen == self._used or seen != before:
                    continue
                self.context = await anyio.to_thread.run_sync(self._load)
            except CertificateError as error:
                self._used = seen
                _LOG.error("the new certificate is not taken, the old one stays: %s", error)
            except Exception:  # no thread is available, or a bug of ours: sessions go on
                _LOG.exception("the certificate cannot be looked at, the old one stays")
            else:
                self._used = seen
                _LOG.info("a new certificate is used: %s", self._cert)

    def _state(self) -> _State:
        """A stamp of both files' versions; zeros for a missing file."""
        states = []
        for path in (self._cert, self._key):
            try:
                found = path.stat()
                states.append((found.st_mtime_ns, found.st_size, found.st_ino))
            except OSError:
                states.append((0, 0, 0))
        return tuple(states)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(list(ALPN))
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
            names = f"{self._cert} with key {self._key}"
            raise CertificateError(f"cannot use the certificate {names}: {why}") from error
        return context


def _no_password() -> str:
    """Refuse; otherwise OpenSSL would wait for a password on the terminal."""
    raise ValueError("the key is protected by a password")
