"""What decoding gives: the sound and the pictures of media, or the error that refuses it."""

from __future__ import annotations

from typing import Final

import attrs

IMAGE: Final = "image"
"""The argument of a process that decodes a picture; of one that decodes a video it is a number."""


class MediaError(Exception):
    """Media is damaged, or not what it said.

    Args:
        reason: short, for the client: what is wrong and the limit, never a library's text.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@attrs.frozen(kw_only=True)
class Decoded:
    """What media became, as `events.MediaDecoded` tells it.

    Attributes:
        pcm: its sound, float32 LE, 16 kHz mono; empty where it has none.
        pictures: JPEG files: an image by itself, a video's first of each second.
        stacked: JPEG files: the other pictures of each second of a video, side by side; the last
            second may have none.
    """

    pcm: bytes = b""
    pictures: tuple[bytes, ...] = ()
    stacked: tuple[bytes, ...] = ()
