"""What the duplex courses of OpenAI's dialects share: sound in pieces of any size.

Sound is 16-bit, and is cut into seconds as it came. A second at another rate than the model's is
resampled outside, with the end of the one before it, and comes back by its number. So the units do
not depend on how the sound was split, and joined they are the whole resampled.
"""

from __future__ import annotations

from collections import deque

import attrs

from ..values import events as ev
from ..values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, UNIT_BYTES
from ..values.requests import Append, AppendSound, ClientMessage
from ..values.sound import Coding, rate_of
from ..values.utf8 import Refused
from ..wire.rates import DOWN, HISTORY_BYTES, LIVE_RATE_HZ, resample, to_float32, to_pcm16
from .duplex import Duplex
from .event_ids import EventIds, size_refusal


@attrs.define
class Second:
    """A second of the client's sound: the number of its decoding, and its float32 once decoded."""

    media: int
    pcm: bytes | None = None


@attrs.define(kw_only=True, eq=False)
class Pieces(EventIds, Duplex):
    """State of such a session between events.

    Attributes:
        unheard: the client's sound that does not fill a second yet: PCM16.
        before: the end of the second before it, as the resampler needs it.
        resampling: seconds that are being resampled, oldest first.
        spoken: the end of the model's speech before, as the resampler needs it: PCM16, 24 kHz.
    """

    unheard: bytearray = attrs.Factory(bytearray)
    before: bytes = bytes(HISTORY_BYTES)
    resampling: deque[Second] = attrs.Factory(deque)
    spoken: bytes = bytes(HISTORY_BYTES)

    @property
    def coding(self) -> Coding:
        """How the client's sound is written."""
        raise NotImplementedError

    @property
    def rate_hz(self) -> int:
        """Of the client's sound."""
        return rate_of(self.coding)

    @property
    def second_bytes(self) -> int:
        """A second of the client's sound, as 16-bit samples."""
        return self.rate_hz * SAMPLE16_BYTES

    def forget_client(self) -> None:
        """Forget sound that fills no second, or is being resampled."""
        super().forget_client()
        self.unheard, self.before = bytearray(), bytes(HISTORY_BYTES)
        self.resampling.clear()

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse half a sample, and more sound at once than may wait."""
        if isinstance(message, AppendSound):
            refused = size_refusal(message, self.coding, self.rate_hz)
            if refused is not None:
                return refused
        return super().refused(message)

    def take_sound(self, pcm16: bytes) -> None:
        """Take sound, and have each second that is full run."""
        self.unheard += pcm16
        while len(self.unheard) >= self.second_bytes and not self.is_closed:
            second = bytes(self.unheard[: self.second_bytes])
            del self.unheard[: self.second_bytes]
            self.hear(second)

    def hear(self, second: bytes) -> None:
        """Take a second of sound."""
        if self.rate_hz != INPUT_RATE_HZ:
            rate = {} if self.rate_hz == LIVE_RATE_HZ else {"rate_hz": self.rate_hz}
            media = self.decode("second", self.before + second, **rate)
            self.before = second[-HISTORY_BYTES:]
            self.resampling.append(Second(media))
        else:
            self.append(Append(pcm=to_float32(second)))

    def resampled(self, pcm: bytes, rate_hz: int) -> bytes:
        """Resample the model's next speech from 24 kHz; both float32 LE."""
        if rate_hz == LIVE_RATE_HZ:
            return pcm
        pcm16 = to_pcm16(pcm)
        pcm16 += bytes(-len(pcm16) % (DOWN * SAMPLE16_BYTES))
        sound, self.spoken = self.spoken + pcm16, (self.spoken + pcm16)[-HISTORY_BYTES:]
        return resample(sound, LIVE_RATE_HZ, rate_hz)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a second that was resampled; they go on in order."""
        super().media_decoded(event)
        self._resampled(event.media, event.pcm)

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Take a second that could not be resampled as silence."""
        super().media_rejected(event)
        self._resampled(event.media, b"")

    def _resampled(self, media: int, pcm: bytes) -> None:
        for second in self.resampling:
            if second.media == media:
                second.pcm = pcm[:UNIT_BYTES].ljust(UNIT_BYTES, b"\0")
        while self.resampling and not self.is_closed:
            first = self.resampling[0].pcm
            if first is None:
                return
            self.resampling.popleft()
            self.append(Append(pcm=first))
