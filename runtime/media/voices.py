"""The server's library of voices: WAV files that clients name instead of sending one.

A voice is a file `<name>.wav` in the folder itself. A name is never a path: it is checked before
the disk is used. Files may come and go while the server runs; a new one gets its name when it is
whole. No decoding here; all calls block on the disk.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path
from typing import Final, Literal

from protocol.values.limits import VOICE_NAME_CHARS_MAX, WAV_BYTES_MAX

from .values import MediaError

VOICES_MAX: Final = 1_000
"""Listed names; a larger folder is a mistake."""
VOICES_BYTES_MAX: Final = 1 << 30
"""All files together, checked when one is added: some 700 voices of 30 s at 24 kHz."""
SUFFIX: Final = ".wav"
NAME_RULE: Final = f"1 to {VOICE_NAME_CHARS_MAX} letters, digits, _, - and ., no dot at the front"
"""The rule for names, for people."""
NO_VOICE: Final = "there is no voice of that name"

VoiceRefusal = Literal["name", "exists", "full"]

_NAME: Final = re.compile(rf"(?!\.)[A-Za-z0-9_.-]{{1,{VOICE_NAME_CHARS_MAX}}}", re.ASCII)


class VoiceRefused(Exception):  # noqa: N818 - a fact about the request, not a fault
    """A voice is not added: `name` is invalid, it `exists`, or the library is `full`."""

    def __init__(self, reason: VoiceRefusal) -> None:
        super().__init__(reason)
        self.reason: VoiceRefusal = reason


class VoiceLibrary:
    """The voices in a folder; a missing folder holds none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_changing = threading.Lock()

    def sizes(self) -> dict[str, int]:
        """The bytes of each voice's file, by name, sorted; `VOICES_MAX` at most."""
        try:
            found = {
                path.name.removesuffix(SUFFIX): path.stat().st_size
                for path in self._folder.iterdir()
                if path.name.endswith(SUFFIX) and path.is_file()
            }
        except OSError:
            return {}
        names = sorted(name for name in found if is_voice_name(name))
        return {name: found[name] for name in names[:VOICES_MAX]}

    def read(self, name: str) -> bytes:
        """Read a voice's file, not decoded; `MediaError` if it is missing or too large."""
        try:
            with self._path(name).open("rb") as file:
                data = file.read(WAV_BYTES_MAX + 1)
        except OSError:
            raise no_such_voice() from None
        if len(data) > WAV_BYTES_MAX:
            raise MediaError(f"the voice has more than {WAV_BYTES_MAX} bytes")
        return data

    def stamp(self, name: str) -> tuple[int, int, int]:
        """Inode, bytes and mtime (ns) of a voice's file; `MediaError` if it is missing."""
        try:
            found = self._path(name).stat()
        except OSError:
            raise no_such_voice() from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def add(self, name: str, data: bytes, *, replace: bool = False) -> bool:
        """Add a voice, a WAV file decoded before; it is on the device on return.

        Returns whether the name is new. `VoiceRefused`: the name is invalid or taken, or the
        library is full; `OSError`: the file cannot be written.
        """
        if not is_voice_name(name):
            raise VoiceRefused("name")
        path = self._path(name)
        with self._is_changing:
            is_new = not os.path.lexists(path)
            if not is_new and not replace:
                raise VoiceRefused("exists")
            self._check_room(path, len(data))
            self._write(path, data, replace=replace)
        return is_new

    def remove(self, name: str) -> None:
        """Remove a voice; `MediaError` if it is missing, `OSError` if it cannot be removed."""
        path = self._path(name)
        with self._is_changing:
            if not path.is_file():
                raise no_such_voice()
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not is_voice_name(name):
            raise no_such_voice()
        return self._folder / f"{name}{SUFFIX}"

    def _check_room(self, path: Path, added_bytes: int) -> None:
        others = [
            it.lstat().st_size
            for it in self._folder.iterdir()
            if it.name.endswith(SUFFIX) and it != path
        ]
        if len(others) >= VOICES_MAX or sum(others) + added_bytes > VOICES_BYTES_MAX:
            raise VoiceRefused("full")

    def _write(self, path: Path, data: bytes, *, replace: bool) -> None:
        part = self._folder / f".{path.name}.{secrets.token_hex(8)}"
        try:
            with part.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                part.replace(path)
            else:
                path.hardlink_to(part)  # fails where another process was quicker
        except FileExistsError:
            raise VoiceRefused("exists") from None
        finally:
            part.unlink(missing_ok=True)


def is_voice_name(text: str) -> bool:
    """Whether a text can be the name of a voice."""
    return _NAME.fullmatch(text) is not None


def no_such_voice() -> MediaError:
    """The error for a name that no voice has."""
    return MediaError(NO_VOICE)
