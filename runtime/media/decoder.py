"""Full decoding of clients' media, off the event loop and within bounds.

- `protocol/` has checked headers and sizes; this proves the rest. A camera's frame is only proven;
  sound becomes the model's input format, images become JPEG files, a video both.
- A fault is a `MediaError` whose reason the client may read: the fault and the limit, never a
  library's text or the client's bytes.
- Sizes are checked before memory is allocated for them; the same bytes give the same answer.
- A camera's frame that is proven sooner than a thread wakes up is proven on the event loop.
- Sessions share the decoder by processor time (`fair`). A session's waiting pictures are bounded,
  in pixels.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Final

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from protocol.values.effects import DecodeMedia, MediaKind
from protocol.values.limits import FRAME_PIXELS_MAX, FRAMES_MAX, UNITS_PENDING_MAX
from protocol.values.model import INPUT_RATE_HZ
from protocol.wire.rates import LIVE_RATE_HZ, resample

from .fair import Client, FairQueue, Place, TooMuchWaitingError
from .image import (
    SMALL_PIXELS,
    decode_image,
    decode_jpeg,
    needs_process,
    pixels_of,
    prove_small,
)
from .process import decode_apart
from .sound import decode_audio, decode_wav
from .values import IMAGE, Decoded, MediaError
from .video import read_video
from .voices import VoiceLibrary, no_such_voice

__all__ = ["Decoded", "MediaDecoder", "MediaError", "decode_at_once", "decode_jpeg", "decode_wav"]

WORKERS_MAX: Final = 2
"""Decoding takes a thread for 0.5 to 500 ms; more threads would take cores from the model."""
PROCESSES_MAX: Final = 1
"""A video takes one for seconds; other videos wait, while frames and sound go on."""
PIXELS_WAITING_MAX: Final = (UNITS_PENDING_MAX + 1) * FRAMES_MAX * FRAME_PIXELS_MAX
"""For one session: the waiting units and the one being filled, each with the most and largest
frames of an append."""
S_PER_PIXEL: Final = 15e-9
S_PER_BYTE: Final = 10e-9
"""Rough processor time, from a picture's head and a file's length: among equals the smaller goes
first."""

_threads: Final = RunVar[anyio.CapacityLimiter]("media_threads")
"""Media has threads of its own. A limiter belongs to one event loop, and each test has another."""


def decode_at_once(effect: DecodeMedia) -> Decoded | None:
    """Decode media that takes no longer than waking a thread; None: `MediaDecoder.decode` must.

    `MediaError`: the media is damaged.
    """
    if effect.kind == "jpeg" and prove_small(effect.data):
        return Decoded()
    return None


class MediaDecoder:
    """Decodes clients' media; `voices` is the library that they may name, or None."""

    def __init__(self, voices: VoiceLibrary | None = None) -> None:
        self._voices = voices
        self._work = FairQueue(WORKERS_MAX, PIXELS_WAITING_MAX)
        self._apart = FairQueue(PROCESSES_MAX)

    async def decode(self, effect: DecodeMedia, client: Client) -> Decoded:
        """Decode in a thread, or a video and a large image in a process, in fair turns.

        Cancelled, it waits for a running thread and kills a process. The result is sound for `wav`,
        `voice`, `audio` and `second`, a picture for `image`, both for `video`; nothing for `jpeg`.
        `MediaError`: the media is of another kind, damaged, or outside the limits; or its session
        has too many pictures waiting.
        """
        is_image = effect.kind == "image"
        if effect.kind == "video" or (is_image and needs_process(effect.data)):
            return await self._decode_apart(effect, client)
        pixels = 0
        if effect.kind in ("jpeg", "image"):
            # The least for a tiny one: its task takes memory too.
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
                argument = IMAGE if effect.kind == "image" else str(effect.stack_frames)
                return await decode_apart(effect.data, argument)
            finally:
                place.used_s = _children_s() - before_s  # These are the only children.

    def _decode_metered(self, effect: DecodeMedia, place: Place) -> Decoded:
        before_s = time.thread_time()
        try:
            return self.decode_here(effect)
        finally:
            place.used_s = time.thread_time() - before_s

    def decode_here(self, effect: DecodeMedia) -> Decoded:
        """As `decode`, but in the calling thread, blocking; a video has no process's bounds."""
        data, rate_hz = effect.data, effect.rate_hz or LIVE_RATE_HZ
        decoders: dict[MediaKind, Callable[[], Decoded]] = {
            "jpeg": lambda: Decoded(pcm=decode_jpeg(data)),
            "wav": lambda: Decoded(pcm=decode_wav(data)),
            "voice": lambda: Decoded(pcm=decode_wav(self._read_voice(data))),
            "image": lambda: Decoded(pictures=(decode_image(data),)),
            "audio": lambda: Decoded(pcm=decode_audio(data, effect.rate_hz)),
            "video": lambda: read_video(data, effect.stack_frames),
            "second": lambda: Decoded(pcm=resample(data, rate_hz, INPUT_RATE_HZ)),
        }
        return decoders[effect.kind]()

    def _read_voice(self, name: bytes) -> bytes:
        if self._voices is None:
            raise no_such_voice()
        return self._voices.read(name.decode("utf-8", "replace"))


def _children_s() -> float:
    """Processor seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _thread_limiter() -> anyio.CapacityLimiter:
    """This event loop's limiter, made on first use."""
    limiter = _threads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(WORKERS_MAX)
        _threads.set(limiter)
    return limiter
