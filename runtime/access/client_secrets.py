"""Client secrets: short-lived keys for browsers, made with a key and counted to it.

A secret is `ek_` and, in base64 for addresses, its claims as JSON and their HMAC. So the server
keeps nothing, and any gateway with the same key file accepts it:

- It is signed with the hash of its key in the key file. A key that is removed or renewed takes its
  secrets with it, and who can read the file could make secrets.
- A secret begins sessions, as its key may, and nothing else. It may hold settings, which are the
  session's first message. The console's own (`is_whole`) may do all that its key may.
- No secret makes another one. Lifetimes are judged by the wall clock of each gateway.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Final

import attrs
import orjson

from .keys import Key

SECRET_PREFIX: Final = "ek_"
"""OpenAI's packages take no other key in a browser."""
LIFETIME_S_MIN: Final = 10
LIFETIME_S_MAX: Final = 7_200
LIFETIME_S: Final = 600
SKEW_S: Final = 60
"""The clock of the gateway that made a secret may be ahead by so much."""
SECRET_CHARS_MAX: Final = 6_144
"""Proxies take 8 KiB in a header's line; 4 KiB are left for settings."""
_MAC_BYTES: Final = 32
_PURPOSE: Final = b"antiphon client secret "


class SecretTooLongError(ValueError):
    """The settings do not fit into a secret."""


@attrs.frozen(kw_only=True)
class ClientSecret:
    """The claims of a secret.

    Attributes:
        key_name: of its key; empty on a server without keys.
        made_s, expires_s: Unix time.
        session: the settings that its sessions begin with, as of a `session.update`; None: any.
        is_whole: it may do all that its key may.
    """

    key_name: str
    made_s: int
    expires_s: int
    session: dict[str, Any] | None = None
    is_whole: bool = False

    def sign(self, key: Key) -> str:
        """Write the secret; raises `SecretTooLongError`."""
        claims = orjson.dumps([*attrs.astuple(self, recurse=False)])
        text = base64.urlsafe_b64encode(claims + _mac(key, claims)).decode().rstrip("=")
        if len(SECRET_PREFIX) + len(text) > SECRET_CHARS_MAX:
            raise SecretTooLongError(f"over {SECRET_CHARS_MAX} characters with these settings")
        return SECRET_PREFIX + text


def read_secret(
    text: str, key_of: Callable[[str], Key | None], now_s: float
) -> tuple[Key, ClientSecret] | None:
    """Read a secret that is valid now, with its key; None for any other text.

    `key_of` returns the key of a name, None for an unknown one.
    """
    if not text.startswith(SECRET_PREFIX) or len(text) > SECRET_CHARS_MAX:
        return None
    try:
        encoded = text.removeprefix(SECRET_PREFIX).encode("ascii")
        data = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), b"-_", validate=True)
        if base64.urlsafe_b64encode(data).rstrip(b"=") != encoded:  # one secret has one text
            return None
        claims, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        secret = ClientSecret(**dict(zip(_FIELDS, orjson.loads(claims), strict=True)))
        key = key_of(secret.key_name)
        is_right = key is not None and hmac.compare_digest(mac, _mac(key, claims))
    except (ValueError, TypeError):
        return None
    if key is None or not is_right:
        return None
    is_now = secret.made_s - SKEW_S <= now_s < secret.expires_s
    return (key, secret) if is_now else None


def _mac(key: Key, claims: bytes) -> bytes:
    return hmac.digest(key.hash.encode(), _PURPOSE + claims, hashlib.sha256)


_FIELDS: Final = tuple(field.name for field in attrs.fields(ClientSecret))
