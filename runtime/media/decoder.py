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
- Sessions take turns (`fair`), by the processor time that their media took. The pictures that one
  session may have waiting are bounded, in pixels.

It does not cut frames into slices nor make spectrograms: that is the model's.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Final

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from protocol.effects import DecodeMedia, MediaKind
from protocol.limits import FRAME_PIXELS_MAX, FRAMES_MAX, UNITS_PENDING_MAX

from ..voices import VoiceLibrary, no_such_voice
from .fair import Client, FairQueue, Place, TooMuchWaitingError
from .image import (
    SMALL_PIXELS,
    decode_image,
    decode_jpeg,
    needs_process,
    pixels_of,
    prove_small,
)
from .process import decode_picture, decode_video
from .sound import decode_audio, decode_wav
from .values import Decoded, MediaError
from .video import read_video

__all__ = ["Decoded", "MediaDecoder", "MediaError", "decode_at_once", "decode_jpeg", "decode_wav"]

WORKERS_MAX: Final = 2
"""Decoding takes a thread for 0.5 to 500 ms; more threads would take the cores from the model."""
PROCESSES_MAX: Final = 1
"""A video takes one for seconds; others wait their turn, while frames and sound go on."""
PIXELS_WAITING_MAX: Final = (UNITS_PENDING_MAX + 1) * FRAMES_MAX * FRAME_PIXELS_MAX
"""Of one session: the units that wait and the one that is being filled, each with the most and the
largest frames of an append."""
S_PER_PIXEL: Final = 15e-9
S_PER_BYTE: Final = 10e-9
"""What decoding takes of a processor, roughly, by a picture's head and a file's length: of what is
due at the same time, the smaller goes first."""

_threads: Final = RunVar[anyio.CapacityLimiter]("media_threads")
"""Threads that work elsewhere must not keep media from its own; a limiter lives in one event loop,
and a test has another each time."""


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
        self._work = FairQueue(WORKERS_MAX, PIXELS_WAITING_MAX)
        self._apart = FairQueue(PROCESSES_MAX)

    async def decode(self, effect: DecodeMedia, client: Client) -> Decoded:
        """Decode in one of `WORKERS_MAX` threads; all wait their turn.

        A video, and an image that may take much memory, is decoded in a process.

        A thread that has begun is not abandoned when it is cancelled: it is waited for. A process
        is killed.

        Args:
            effect: what is to be decoded, and what it is said to be.
            client: whose it is.

        Returns:
            Sound for `wav`, `voice` and `audio`, a picture for `image`, both for `video`; nothing
            for `jpeg`.

        Raises:
            MediaError: it is not what it is said to be, damaged, or outside the limits; or its
                session has too many pictures waiting.
        """
        is_image = effect.kind == "image"
        if effect.kind == "video" or (is_image and needs_process(effect.data)):
            return await self._decode_apart(effect, client)
        pixels = 0
        if effect.kind in ("jpeg", "image"):
            # A tiny one counts as more than it has: its task takes memory too.
            pixels = max(pixels_of(effect.data), SMALL_PIXELS)
        try:
            expected_s = pixels * S_PER_PIXEL + len(effect.data) * S_PER_BYTE
            async with self._work.place(client, pixels, expected_s=expected_s) as place:
                return await to_thread.run_sync(
                    self._decode_metered, effect, place, limiter=_thread_limiter()
                )
        except TooMuchWaitingError:
            most = PIXELS_WAITING_MAX // 1_000_000
            reason = f"more than {most} megapixels of this session would wait to be decoded"
            raise MediaError(reason) from None

    async def _decode_apart(self, effect: DecodeMedia, client: Client) -> Decoded:
        async with self._apart.place(client) as place:
            before_s = _children_s()
            try:
                if effect.kind == "image":
                    return await decode_picture(effect.data)
                return await decode_video(effect.data, effect.stack_frames)
            finally:
                place.used_s = _children_s() - before_s  # The only children are these.

    def _decode_metered(self, effect: DecodeMedia, place: Place) -> Decoded:
        before_s = time.thread_time()
        try:
            return self.decode_here(effect)
        finally:
            place.used_s = time.thread_time() - before_s

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


def _children_s() -> float:
    """Say the processor seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _thread_limiter() -> anyio.CapacityLimiter:
    """Give this event loop's limiter, made when it is first needed."""
    limiter = _threads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(WORKERS_MAX)
        _threads.set(limiter)
    return limiter
