"""The server's current keys, and the lookup of a client's key.

- A key is compared with every entry in constant time: timing tells neither a match's length nor its
  entry.
- The file is read every few seconds. An invalid or missing file is logged and leaves the keys as
  they are; an error never ends the server.
- A removed key is refused from then on; its running sessions go on while they are connected.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from .keyfile import KeyFile, KeyFileError, parse_key_file, read_bytes, read_key_file
from .keys import KEY_CHARS_MAX, Key, hash_key

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

    def has(self, name: str) -> bool:
        """Whether there is a key of this name."""
        return any(key.name == name for key in self.keys)

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
            file = await anyio.to_thread.run_sync(self._read, abandon_on_cancel=True)
            if file is not None:
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

    def _read(self) -> KeyFile | None:
        """Read the file in a thread; None if it did not change."""
        data, mode = read_bytes(self._path)
        if (data, mode) == (self._file.data, self._file.mode):
            return None
        return parse_key_file(self._path, data, mode)

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
