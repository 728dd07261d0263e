"""API keys: making and hashing one, the key file, and the lookup of a client's key.

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

The file is read whole and replaced atomically; these calls block:

- A new version is written to the same folder, synced, and renamed over the old one. Only its owner
  can read it, and its group if it could before (a server may run as another user).
- A file that others can read, or that others than its owner can write, gets a warning: it shows
  names, and a writer can make keys.
- Commands lock the folder: two at once would lose a change.

`KeyRing` has the keys of a running server:

- A key is compared with every entry in constant time: timing tells neither a match's length nor its
  entry.
- The file is read every few seconds. An invalid or missing file is logged and leaves the keys as
  they are; an error never ends the server.
- A removed key is refused from then on; its running sessions go on while they are connected.

Client secrets are short-lived keys for browsers, made with a key and counted to it. A secret is
`ek_` and, in base64 for addresses, its claims as JSON and their HMAC. So the server keeps nothing,
and any gateway with the same key file accepts it:

- It is signed with the hash of its key in the key file. A key that is removed or renewed takes its
  secrets with it, and who can read the file could make secrets.
- A secret begins sessions, as its key may, and nothing else. It may hold settings, which are the
  session's first message. The console's own (`is_whole`) may do all that its key may.
- No secret makes another one. Lifetimes are judged by the wall clock of each gateway.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
import attrs
import orjson

from protocol.values.limits import MODES, Mode
from recorder.write.files import Disk, new_file

# -- keys as values --------------------------------------------------------------------------------


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
    """The text is not a valid key file; the message says where and why, without a hash."""


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
        raise KeysWrongError(f"is not TOML: {error}") from error
    for name in document:
        if name != "key":
            raise KeysWrongError("holds something that is not a [[key]]")
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


_RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "name": (lambda it: isinstance(it, str) and is_name(it), "1 to 64 letters, digits and _.@-"),
    "hash": (
        lambda it: isinstance(it, str) and _HASH.fullmatch(it) is not None,
        f"{HASH_PREFIX} and 64 hex digits",
    ),
    "scope": (SCOPES.__contains__, " or ".join(SCOPES)),
    **dict.fromkeys(
        ("sessions_max", "sessions_per_hour"),
        (
            lambda it: type(it) is int and 0 <= it <= SESSIONS_MAX,
            f"a whole number from 0 to {SESSIONS_MAX}",
        ),
    ),
    "modes": (
        lambda it: isinstance(it, list) and len(it) > 0 and all(mode in MODES for mode in it),
        f"a list of some of {', '.join(MODES)}",
    ),
    "record_always": (lambda it: isinstance(it, bool), "true or false"),
}
"""For each field of a key: whether a value is valid, and what it must be."""
_REQUIRED: Final = ("name", "hash")


def _key(number: int, table: Mapping[str, Any]) -> Key:
    """Read one; an error does not show a value, which may be a key."""
    where = f"key {number}"
    for name, (is_right, wanted) in _RULES.items():
        if (name in table or name in _REQUIRED) and not is_right(table.get(name)):
            raise KeysWrongError(f"{where}: {name} must be {wanted}")
        where = f"key {number} ({table['name']})"
    if unknown := len(table.keys() - _RULES.keys()):
        known = ", ".join(_RULES)
        raise KeysWrongError(f"{where}: has {unknown} unknown fields; there are {known}")
    modes = {"modes": tuple(table["modes"])} if "modes" in table else {}
    return Key(**{**table, **modes})


def _lines(key: Key) -> Iterator[str]:
    for name, value in attrs.asdict(key).items():
        if value is not None:
            # JSON and TOML write the texts, numbers and lists of a key alike.
            yield f"{name} = {json.dumps(value)}\n"


# -- the key file ----------------------------------------------------------------------------------


FILE_BYTES_MAX: Final = 1 << 20
"""A thousand keys with all their fields take 250 kB."""
OWNER_ONLY: Final = 0o600


class KeyFileError(Exception):
    """The file is unreadable, unwritable or invalid; the text says why, in one line."""


@attrs.frozen(kw_only=True)
class KeyFile:
    """A key file as it was read, with its bytes to detect a change, and its permissions."""

    keys: tuple[Key, ...]
    data: bytes = attrs.field(repr=False)
    mode: int

    @property
    def warning(self) -> str | None:
        """The problem with its permissions, or None."""
        if self.mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"others than its owner can write it (mode {self.mode:03o}): chmod 600"
        if self.mode & stat.S_IROTH:
            return f"others can read it (mode {self.mode:03o}): chmod 600"
        return None


def read_key_file(path: Path, before: KeyFile | None = None) -> KeyFile:
    """Read a key file, or return `before` where it is the same.

    `KeyFileError`: it is missing, unreadable, too large or invalid.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise KeyFileError(f"{path}: more than {FILE_BYTES_MAX} bytes")
        if before is not None and (data, mode) == (before.data, before.mode):
            return before
        return KeyFile(keys=parse_keys(data.decode("utf-8")), data=data, mode=mode)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: is not UTF-8") from error
    except KeysWrongError as error:
        raise KeyFileError(f"{path}: {error}") from error


def change_key_file(
    path: Path, change: Callable[[tuple[Key, ...]], tuple[Key, ...]], *, create: bool = False
) -> None:
    """Change the keys of a file; with `create` a missing file has none.

    If `change` raises, the file stays. `KeyFileError`: it is unreadable, unwritable, invalid or
    locked.
    """
    real = Path(os.path.realpath(path))  # A link's target is replaced, not the link.
    with _locked(real.parent):
        keys = () if create and not real.exists() else read_key_file(real).keys
        _write(real, format_keys(change(keys)))


# -- writing ------------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder, or fail at once."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeyFileError(f"{folder}: cannot be opened: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise KeyFileError(f"{folder}: another command is changing keys here") from error
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, text: str) -> None:
    try:
        with new_file(path, replaces=True) as part:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
            with os.fdopen(descriptor, "wb") as file:
                _copy_owner(path, descriptor)
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(descriptor)
        Disk().sync_directory(path.parent)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be written: {error.strerror}") from error


def _copy_owner(path: Path, descriptor: int) -> None:
    """Copy the owner, the group and the group's read permission of the old file."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return
    mine = os.fstat(descriptor)
    if (before.st_uid, before.st_gid) != (mine.st_uid, mine.st_gid):
        # A failure is an error: the server could not read the new file.
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, OWNER_ONLY | (before.st_mode & stat.S_IRGRP))


# -- the server's current keys ---------------------------------------------------------------------


POLL_S: Final = 2.0
"""Short enough to lock out a leaked key quickly."""

_LOG: Final = logging.getLogger("antiphon.access")


class KeyRing:
    """The keys of a file; raises `KeyFileError` if it is unreadable or invalid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = read_key_file(path)
        self._failure: str | None = None
        self._warn()

    @property
    def keys(self) -> tuple[Key, ...]:
        """The current keys."""
        return self._file.keys

    def find(self, key: str) -> Key | None:
        """Find the entry of a client's key; None for an unknown one."""
        if len(key) > KEY_CHARS_MAX:
            return None
        digest = hash_key(key)
        found: Key | None = None
        for known in self._file.keys:
            if hmac.compare_digest(digest, known.hash):
                found = known
        return found

    def named(self, name: str) -> Key | None:
        """Find the key of this name."""
        return next((key for key in self.keys if key.name == name), None)

    async def watch(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the file, and call `on_change` after each change; runs until cancelled."""
        while True:
            await anyio.sleep(POLL_S)
            before = self._file
            await self.refresh()
            if self._file is not before:
                on_change()

    async def refresh(self) -> None:
        """Take the file's keys if it changed; log an error once."""
        try:
            # A disk that hangs must not keep the server from ending.
            read = partial(read_key_file, self._path, self._file)
            file = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
            if file is not self._file:
                self._take(file)
            self._failure = None
        except KeyFileError as error:
            self._keep(str(error))
        except Exception as error:  # no thread is available, or a bug of ours
            self._keep(f"{self._path}: cannot be read: {type(error).__name__}: {error}")

    def _keep(self, failure: str) -> None:
        if failure != self._failure:
            _LOG.error("%s; the keys stay as they were", failure)
        self._failure = failure

    def _take(self, file: KeyFile) -> None:
        before, self._file = self._file, file
        if file.keys != before.keys:
            _LOG.info("%s: read again, %d keys", self._path, len(file.keys))
        self._warn()

    def _warn(self) -> None:
        if self._file.warning is not None:
            _LOG.warning("%s: %s", self._path, self._file.warning)
        if not self._file.keys:
            _LOG.warning("%s: it holds no key: no client can connect", self._path)


# -- client secrets --------------------------------------------------------------------------------

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
