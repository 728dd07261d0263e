"""The server's library of voices: a folder of WAV files that clients name instead of sending one.

A voice is a file `<name>.wav` in the folder itself. A name is never a path: it is held to a few
characters before the disk is looked at, so that no client reads anything but a voice. Files may
come and go while the server runs. Nothing is decoded here; all calls block on the disk.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from protocol.limits import VOICE_NAME_CHARS_MAX, WAV_BYTES_MAX

from .media.values import MediaError

VOICES_MAX: Final = 1_000
"""Names that are listed; a folder of more was surely not meant."""
SUFFIX: Final = ".wav"

_NAME: Final = re.compile(rf"(?!\.)[A-Za-z0-9_.-]{{1,{VOICE_NAME_CHARS_MAX}}}", re.ASCII)


class VoiceLibrary:
    """The voices in a folder.

    Args:
        folder: holds the files; one that is missing holds none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self) -> tuple[str, ...]:
        """Name the voices.

        Returns:
            The names, sorted, the first `VOICES_MAX` of them.
        """
        try:
            names = sorted(
                path.name.removesuffix(SUFFIX)
                for path in self._folder.iterdir()
                if path.name.endswith(SUFFIX) and path.is_file()
            )
        except OSError:
            return ()
        return tuple(name for name in names if _NAME.fullmatch(name))[:VOICES_MAX]

    def read(self, name: str) -> bytes:
        """Read a voice.

        Args:
            name: its name; a client's own text.

        Returns:
            The file, not decoded.

        Raises:
            MediaError: there is no voice of that name, or its file has more bytes than a voice may.
        """
        if not _NAME.fullmatch(name):
            raise no_such_voice()
        try:
            with (self._folder / f"{name}{SUFFIX}").open("rb") as file:
                data = file.read(WAV_BYTES_MAX + 1)
        except OSError:
            raise no_such_voice() from None
        if len(data) > WAV_BYTES_MAX:
            raise MediaError(f"the voice has more than {WAV_BYTES_MAX} bytes")
        return data


def no_such_voice() -> MediaError:
    """Make the error for a name that no voice has."""
    return MediaError("there is no voice of that name")
