"""Full decoding of what clients send, off the event loop and within bounds.

`protocol/` has checked headers and sizes; this finds out whether the rest is what they promise.
A frame of a camera is only proven. Sound becomes what the model hears, images become JPEG files, a
video becomes both. Each kind has a file of its own; here it is decided who decodes what, and when.

Rules:

- Whatever is wrong with media is a `MediaError` whose reason can be shown to the client: what is
  wrong and the limit, never a library's text or the client's bytes.
- Sizes are checked before anything is allocated by them.
- The same bytes give the same answer on the same machine.
- A camera's frame that is proven sooner than a thread wakes up is proven on the event loop.

It does not cut frames into slices nor make spectrograms: that is the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from protocol.effects import DecodeMedia, MediaKind

from ..voices import VoiceLibrary, no_such_voice
from .image import decode_image, decode_jpeg, prove_small
from .process import decode_video
from .sound import decode_audio, decode_wav
from .values import Decoded, MediaError
from .video import read_video

__all__ = ["Decoded", "MediaDecoder", "MediaError", "decode_at_once", "decode_jpeg", "decode_wav"]

WORKERS_MAX: Final = 2
"""Decoding takes a thread for 0.5 to 500 ms; more threads would take the cores from the model."""
VIDEOS_MAX: Final = 1
"""Each takes a process for seconds; others wait their turn, while frames and sound go on."""

_workers: Final = RunVar[anyio.CapacityLimiter]("media_workers")
_videos: Final = RunVar[anyio.CapacityLimiter]("media_videos")
"""A limiter lives in one event loop; a test has another each time."""


def decode_at_once(effect: DecodeMedia) -> Decoded | None:
    """Decode in the calling thread what takes no longer than handing it to another one.

    Args:
        effect: what is to be decoded, and what it is said to be.

    Returns:
        What `MediaDecoder.decode` would; None: that is to be asked.

    Raises:
        MediaError: it is damaged.
    """
    if effect.kind == "jpeg" and prove_small(effect.data):
        return Decoded()
    return None


class MediaDecoder:
    """Decodes what clients send.

    Args:
        voices: the voices that they may name; None: there are none.
    """

    def __init__(self, voices: VoiceLibrary | None = None) -> None:
        self._voices = voices

    async def decode(self, effect: DecodeMedia) -> Decoded:
        """Decode in one of `WORKERS_MAX` threads, a video in a process; all wait their turn.

        A thread that has begun is not abandoned when it is cancelled: it is waited for. A process
        is killed.

        Args:
            effect: what is to be decoded, and what it is said to be.

        Returns:
            Sound for `wav`, `voice` and `audio`, a picture for `image`, both for `video`; nothing
            for `jpeg`.

        Raises:
            MediaError: it is not what it is said to be, damaged, or outside the limits.
        """
        if effect.kind == "video":
            async with _limiter(_videos, VIDEOS_MAX):
                return await decode_video(effect.data, effect.stack_frames)
        work = partial(self.decode_here, effect)
        return await to_thread.run_sync(work, limiter=_limiter(_workers, WORKERS_MAX))

    def decode_here(self, effect: DecodeMedia) -> Decoded:
        """Decode in the calling thread, blocking; a video too, without a process's bounds.

        Args:
            effect: as above.

        Returns:
            As above.

        Raises:
            MediaError: as above.
        """
        data = effect.data
        decoders: dict[MediaKind, Callable[[], Decoded]] = {
            "jpeg": lambda: Decoded(pcm=decode_jpeg(data)),
            "wav": lambda: Decoded(pcm=decode_wav(data)),
            "voice": lambda: Decoded(pcm=decode_wav(self._read_voice(data))),
            "image": lambda: Decoded(pictures=(decode_image(data),)),
            "audio": lambda: Decoded(pcm=decode_audio(data, effect.rate_hz)),
            "video": lambda: read_video(data, effect.stack_frames),
        }
        return decoders[effect.kind]()

    def _read_voice(self, name: bytes) -> bytes:
        if self._voices is None:
            raise no_such_voice()
        return self._voices.read(name.decode("utf-8", "replace"))


def _limiter(variable: RunVar[anyio.CapacityLimiter], most: int) -> anyio.CapacityLimiter:
    """Give this event loop's limiter, made when it is first needed."""
    limiter = variable.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(most)
        variable.set(limiter)
    return limiter
