"""The sound of a call: packets of Opus to samples without a gap, and samples to a track.

The library's own buffer waits for a lost packet, and then leaves out five; and it hears nothing
where a microphone sends nothing in silence (DTX). Here a packet has its place by its RTP time: one
that has not come within `HOLD_S` is silence, and too late afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from fractions import Fraction
from typing import Any, Final

import attrs
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, AudioResampler, CodecContext, FFmpegError, Packet

from protocol.values.limits import MS_PER_S
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE16_BYTES

CLOCK_HZ: Final = 48_000
"""Of Opus in RTP, whatever it carries."""
RATE_HZ: Final = OUTPUT_RATE_HZ
"""Of the samples on both sides: 24 kHz, as OpenAI's sessions have them."""
HOLD_S: Final = 0.05
"""For packets that overtook each other, or were sent in bursts."""
DRIFT_S: Final = 5.0
"""After this the earliest packet of the time counts: clocks differ by some 100 ppm."""
DRIFT: Final = 1e-3
AHEAD_S: Final = 1.0
"""A packet that is more ahead of its time begins another stream; so much may be made at once."""
JUMP_S: Final = 10.0
"""So is one that is so much behind."""
HELD_MAX: Final = 200
FRAME_BYTES: Final = RATE_HZ // 50 * SAMPLE16_BYTES
"""20 ms."""
FRAME_S: Final = 0.02
VOICE_S_MAX: Final = 60
"""That waits to be played: an answer comes at about the pace of its sound."""


@attrs.define
class Losses:
    """What was not heard of a client.

    Attributes:
        packets: that came.
        late: that came when their time was over, or twice.
        filled_ms: silence in the place of what did not come, or was not sent.
    """

    packets: int = 0
    late: int = 0
    filled_ms: int = 0


class JitterBuffer:
    """The packets of one client's stream, as samples: int16 LE mono at `RATE_HZ`."""

    def __init__(self) -> None:
        self.losses = Losses()
        self._decoder: Any = CodecContext.create("libopus", "r")
        self._resampler = AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
        self._held: dict[int, bytes] = {}
        self._next: int | None = None
        self._last = 0
        self._offset_s = self._window_s = 0.0
        self._window_ends_s = 0.0
        self._began_s = self._made_s = 0.0

    def add(self, timestamp: int, payload: bytes, now_s: float) -> None:
        """Take a packet of a 32-bit RTP time, which came now."""
        self.losses.packets += 1
        half, whole = 1 << 31, 1 << 32
        step = (timestamp - self._last + half) % whole - half
        at = self._last + step
        offset_s = now_s - at / CLOCK_HZ
        is_ahead = self._next is not None and self._offset_s - offset_s > AHEAD_S
        if self._next is None or is_ahead or step < -JUMP_S * CLOCK_HZ:
            at = timestamp
            self._held.clear()
            self._next = at
            self._offset_s = self._window_s = now_s - at / CLOCK_HZ
            self._window_ends_s = now_s + DRIFT_S
        elif now_s >= self._window_ends_s:
            self._offset_s, self._window_s = self._window_s, offset_s
            self._window_ends_s = now_s + DRIFT_S
        else:
            self._window_s = min(self._window_s, offset_s)
            self._offset_s = min(self._offset_s, offset_s)
        self._last = at
        self._began_s = self._began_s or now_s
        if at < self._next or at in self._held or len(self._held) >= HELD_MAX:
            self.losses.late += 1
        else:
            self._held[at] = payload

    def take(self, now_s: float) -> bytes:
        """Take the samples whose time has come: no more than time has passed, and `AHEAD_S`."""
        if self._next is None:
            return b""
        due = int((now_s - self._offset_s - HOLD_S) * CLOCK_HZ)
        left = (now_s - self._began_s) * (1 + DRIFT) + AHEAD_S - self._made_s
        made = bytearray()
        while self._next < due and len(made) < left * RATE_HZ * SAMPLE16_BYTES:
            payload = self._held.pop(self._next, None)
            if payload is None:
                follows = min((at for at in self._held if at > self._next), default=due)
                made += self._silence(min(follows, due) - self._next)
            else:
                made += self._decode(payload)
        for at in [at for at in self._held if at < self._next]:
            del self._held[at]
            self.losses.late += 1
        self._made_s += len(made) / (RATE_HZ * SAMPLE16_BYTES)
        return bytes(made)

    def _silence(self, length: int) -> bytes:
        """Fill a gap, given in samples of the RTP time."""
        assert self._next is not None
        self._next += length
        self.losses.filled_ms += length * MS_PER_S // CLOCK_HZ
        return bytes(length * RATE_HZ // CLOCK_HZ * SAMPLE16_BYTES)

    def _decode(self, payload: bytes) -> bytes:
        assert self._next is not None
        try:
            frames = self._decoder.decode(Packet(payload))
        except FFmpegError:  # not Opus: its client gets no error
            return self._silence(CLOCK_HZ // 50)
        length = sum(frame.samples * CLOCK_HZ // frame.sample_rate for frame in frames)
        if not length:
            return self._silence(CLOCK_HZ // 50)
        self._next += length
        made = [it for frame in frames for it in self._resampler.resample(frame)]
        return b"".join(bytes(it.planes[0])[: it.samples * SAMPLE16_BYTES] for it in made)


@attrs.define
class _QueuedSpeech:
    item: str
    response: str
    pcm16: bytearray = attrs.Factory(bytearray)
    played: int = 0


class Playout(MediaStreamTrack):  # type: ignore[misc]
    """The track of the model's sound, played in real time; silence where there is none."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._spoken: deque[_QueuedSpeech] = deque()
        self._began_s = 0.0
        self._frames = 0

    @property
    def response(self) -> str:
        """The response that is played; empty if nothing waits."""
        return next((it.response for it in self._spoken if it.pcm16), "")

    @property
    def waiting_s(self) -> float:
        """How much waits to be played."""
        return sum(len(it.pcm16) for it in self._spoken) / (RATE_HZ * SAMPLE16_BYTES)

    def play(self, item: str, response: str, pcm16: bytes) -> None:
        """Play the next sound of an item, after all that waits."""
        if not self._spoken or self._spoken[-1].item != item:
            self._spoken.append(_QueuedSpeech(item, response))
        self._spoken[-1].pcm16 += pcm16

    def cut(self) -> list[tuple[str, int]]:
        """Play nothing more; returns the items that waited, and how many ms of each were played."""
        cut = [it for it in self._spoken if it.pcm16]
        self._spoken.clear()
        per_ms = RATE_HZ * SAMPLE16_BYTES // MS_PER_S
        return [(it.item, it.played // per_ms) for it in cut]

    async def recv(self) -> AudioFrame:
        """As the library: the next 20 ms, when it is their time."""
        if self.readyState != "live":
            raise MediaStreamError
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        due_s = self._began_s + self._frames * FRAME_S
        if now_s - due_s > 1:  # the process was stopped: go on from now
            self._began_s += now_s - due_s
        elif due_s > now_s:
            await asyncio.sleep(due_s - now_s)
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME_BYTES // SAMPLE16_BYTES)
        frame.planes[0].update(self._piece())
        frame.sample_rate = RATE_HZ
        frame.pts = self._frames * frame.samples
        frame.time_base = Fraction(1, RATE_HZ)
        self._frames += 1
        return frame

    def _piece(self) -> bytes:
        piece = bytearray()
        while len(piece) < FRAME_BYTES and self._spoken:
            first = self._spoken[0]
            part = first.pcm16[: FRAME_BYTES - len(piece)]
            del first.pcm16[: len(part)]
            first.played += len(part)
            piece += part
            if first.pcm16 or len(self._spoken) == 1:  # more of the last one may come
                break
            self._spoken.popleft()
        return bytes(piece).ljust(FRAME_BYTES, b"\0")
