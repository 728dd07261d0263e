"""Results of decoding: the sound and the pictures of media, or the error that refuses it."""

from __future__ import annotations

from typing import Final

import attrs

WORDS: Final = {"image": "image", "audio": "audio", "wav": "audio", "speech": "audio"}
"""By argument of a process that decodes a file, the word for that; a video's is a number."""


class MediaError(Exception):
    """Media is invalid; `reason` is for the client: the fault and the limit, no library's text."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@attrs.frozen(kw_only=True)
class Decoded:
    """Decoded media, as in `events.MediaDecoded`.

    Attributes:
        pcm: float32 LE, 16 kHz mono; empty for no sound.
        pictures: JPEG files: an image by itself, a video's first of each second.
        stacked: JPEG files: the others of each second side by side; the last second may have none.
    """

    pcm: bytes = b""
    pictures: tuple[bytes, ...] = ()
    stacked: tuple[bytes, ...] = ()
