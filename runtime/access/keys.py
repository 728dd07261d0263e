"""API keys as values: making one, hashing it, and the text of the key file.

A key is 256 random bits as text; the file holds its SHA-256. A slow hash (scrypt, argon2) is for
passwords; 2^256 keys cannot be guessed, and a slow hash would let any client keep the server busy.

The file is TOML, a table `[[key]]` for each; unknown fields are errors, which show no hash:

| field | is |
|---|---|
| `name` | recordings, tickets and sessions belong to the name |
| `hash` | `sha256:` and 64 hex digits |
| `scope` | `use` (the default), or `admin`, which sees those of all |
| `sessions_max` | its sessions at once; default: as many as the server takes |
| `sessions_per_hour` | its sessions that may begin within any hour |
| `modes` | its modes; default: all |
| `record_always` | `true`: its clients cannot opt out of the recording |
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from protocol.values.modes import MODES, Mode

Scope = Literal["use", "admin"]

SCOPES: Final[tuple[Scope, ...]] = ("use", "admin")
KEYS_MAX: Final = 1_000
"""A key is compared with each; for more clients use a proxy that knows users."""
SESSIONS_MAX: Final = 100_000
"""Start times of a key's sessions are kept for an hour: 800 kB at most."""
KEY_BYTES: Final = 32
"""256 bits cannot be guessed."""
KEY_PREFIX: Final = "antiphon_"
"""People and secret scanners recognise it."""
KEY_CHARS_MAX: Final = 256
"""A key has 52; a longer text is not hashed."""
HASH_PREFIX: Final = "sha256:"
HEADER: Final = """\
# API keys of an Antiphon server: hashes, not the keys. `antiphon keys` rewrites this file, and
# the server reads it when it changes.
"""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}", re.ASCII)
_HASH: Final = re.compile(rf"{HASH_PREFIX}[0-9a-f]{{64}}", re.ASCII)


class KeysWrongError(ValueError):
    """The text is no valid key file; the message says where and why, without a hash."""


@attrs.frozen(kw_only=True)
class Key:
    """An entry of the key file, as above, and what its client may do; None: a field is missing.

    A client keeps the key with which it was admitted: a change affects new connections.
    """

    name: str
    hash: str = attrs.field(default="", repr=False)
    scope: Scope = "use"
    sessions_max: int | None = None
    sessions_per_hour: int | None = None
    modes: tuple[Mode, ...] | None = None
    record_always: bool | None = None

    @property
    def is_admin(self) -> bool:
        """Whether it may see and change what belongs to others."""
        return self.scope == "admin"

    def may_see(self, owner: str) -> bool:
        """Whether it may see what belongs to the key `owner` (empty: to none)."""
        return self.is_admin or (owner != "" and owner == self.name)

    def may_use(self, mode: Mode) -> bool:
        """Whether it may have a session of the mode."""
        return self.modes is None or mode in self.modes


ANYONE: Final = Key(name="", scope="admin")
"""Any client of a server without keys; all of them share everything."""


def new_key() -> str:
    """A new random key, valid in a header and as a WebSocket subprotocol."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """Hash a key as in the file; any text is accepted."""
    return HASH_PREFIX + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def is_name(text: str) -> bool:
    """Whether a text is a valid name: 1 to 64 letters, digits and `_.@-`, letter or digit first."""
    return _NAME.fullmatch(text) is not None


def parse_keys(text: str) -> tuple[Key, ...]:
    """Parse a key file into its keys, in order; raises `KeysWrongError`."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise KeysWrongError(f"is no TOML: {error}") from error
    for name in document:
        if name != "key":
            raise KeysWrongError("holds something that is no [[key]]")
    tables = document.get("key", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise KeysWrongError("a key begins with a line [[key]]")
    if len(tables) > KEYS_MAX:
        raise KeysWrongError(f"has {len(tables)} keys: at most {KEYS_MAX}")
    keys = tuple(_key(number, table) for number, table in enumerate(tables, start=1))
    for what in ("name", "hash"):
        if len({getattr(key, what) for key in keys}) != len(keys):
            raise KeysWrongError(f"two keys have the same {what}")
    return keys


def format_keys(keys: Sequence[Key]) -> str:
    """Format a key file; the inverse of `parse_keys`."""
    return HEADER + "".join(f"\n[[key]]\n{''.join(_lines(key))}" for key in keys)


# -- one key ------------------------------------------------------------------------------------


def _key(number: int, table: Mapping[str, object]) -> Key:
    """Parse one table; unknown fields are errors."""
    where = f"key {number}"
    name = table.get("name")
    if not isinstance(name, str) or not is_name(name):
        raise KeysWrongError(f"{where}: name must be 1 to 64 letters, digits and _.@-")
    where = f"key {number} ({name})"
    unknown = len(table.keys() - {field.name for field in attrs.fields(Key)})
    if unknown:
        known = ", ".join(field.name for field in attrs.fields(Key))
        raise KeysWrongError(f"{where}: has {unknown} unknown fields; there are {known}")
    hash_ = table.get("hash")
    if not isinstance(hash_, str) or not _HASH.fullmatch(hash_):
        raise KeysWrongError(f"{where}: hash must be {HASH_PREFIX} and 64 hex digits")
    scope = table.get("scope", "use")
    if scope not in SCOPES:
        raise KeysWrongError(f"{where}: scope must be {' or '.join(SCOPES)}")
    return Key(
        name=name,
        hash=hash_,
        scope=scope,
        sessions_max=_count(where, table, "sessions_max"),
        sessions_per_hour=_count(where, table, "sessions_per_hour"),
        modes=_modes(where, table.get("modes")),
        record_always=_flag(where, table, "record_always"),
    )


def _flag(where: str, table: Mapping[str, object], name: str) -> bool | None:
    value = table.get(name)
    if value is not None and not isinstance(value, bool):
        raise KeysWrongError(f"{where}: {name} must be true or false")
    return value


def _count(where: str, table: Mapping[str, object], name: str) -> int | None:
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= SESSIONS_MAX:
        raise KeysWrongError(f"{where}: {name} must be a whole number from 0 to {SESSIONS_MAX}")
    return value


def _modes(where: str, value: object) -> tuple[Mode, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(mode in MODES for mode in value):
        raise KeysWrongError(f"{where}: modes must be a list of some of {', '.join(MODES)}")
    modes: list[Any] = value
    return tuple(modes)


def _lines(key: Key) -> Iterator[str]:
    for name, value in attrs.asdict(key).items():
        if value is not None:
            # JSON and TOML write the texts, numbers and lists of a key alike.
            yield f"{name} = {json.dumps(value)}\n"
