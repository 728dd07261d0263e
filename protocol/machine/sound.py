"""What the kinds of OpenAI's APIs share: sound in pieces of any size, and settings.

Sound is 16-bit, and is cut into seconds as it came. A second at another rate than the model's is
resampled outside, with the end of the one before it, and comes back by its number. So the units do
not depend on how the sound was split, and joined they are the whole resampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from ..values.behaviour import KEEPS_SOUND, LATE_FORMATS, SOUND_FILES, WHOLE_PARTS
from ..values.errors import CLOSE_POLICY, ErrorCode
from ..values.limits import APPEND_BYTES_MAX, APPEND_S_MAX, MODEL_CHARS_SHOWN, MS_PER_S, NS_PER_S
from ..values.messages import EndReason
from ..values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, UNIT_BYTES, Coding, rate_of
from ..values.openai import Configure, InputStep, Item, OpenAISession, Part
from ..values.requests import AppendSound, ClientMessage
from ..values.utf8 import Refused
from ..wire.audio import DOWN, HISTORY_BYTES, LIVE_RATE_HZ, resample, to_float32, to_pcm16
from ..wire.codec import looks_float32
from .core import Step
from .kind import Kind
from .peer import Peer

AWAY_NS: Final = 3 * NS_PER_S // 2
"""A client that sends no sound for so long has stopped: pieces of a second may be a little late."""
SOUND_PARTS: Final = (Part(kind="input_audio"),)
"""The content of an item that is the client's sound."""
UPDATES_MAX: Final = 16
"""Changes that are sent one by one when the session is there: no client sets itself up in more."""


@attrs.define
class Second:
    """A second of the client's sound: the number of its decoding, and its float32 once decoded."""

    media: int
    pcm: bytes | None = None


@attrs.define(eq=False)
class SoundPieces:
    """The client's sound on its way to units, and the model's on its way to the client.

    Attributes:
        take_second: takes a second of the client's sound: float32 LE, 16 kHz.
        coding, rate_hz, second_bytes: of the client's sound; a second is of 16-bit samples.
        rest: the client's sound that does not fill a second yet: PCM16.
        before: the end of the second before it, as the resampler needs it.
        resampling: seconds that are being resampled, oldest first.
        spoken: the end of the model's speech before, as the resampler needs it: PCM16, 24 kHz.
    """

    step: Step
    peer: Peer
    take_second: Callable[[bytes], None] = lambda _: None
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATE_HZ
    second_bytes: int = LIVE_RATE_HZ * SAMPLE16_BYTES
    rest: bytearray = attrs.Factory(bytearray)
    before: bytes = bytes(HISTORY_BYTES)
    resampling: deque[Second] = attrs.Factory(deque)
    spoken: bytes = bytes(HISTORY_BYTES)

    def set_format(self, coding: Coding, rate_hz: int) -> None:
        """Set how the client's sound is written."""
        self.coding, self.rate_hz = coding, rate_hz
        self.second_bytes = rate_hz * SAMPLE16_BYTES

    @property
    def samples_waiting(self) -> int:
        """Samples, at the model's rate, of sound on its way to a unit."""
        rest = len(self.rest) // SAMPLE16_BYTES * INPUT_RATE_HZ // self.rate_hz
        return len(self.resampling) * INPUT_RATE_HZ + rest

    def forget(self) -> None:
        """Forget sound that fills no second, or is being resampled."""
        self.rest, self.before = bytearray(), bytes(HISTORY_BYTES)
        self.resampling.clear()

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse half a sample, and more sound at once than may wait."""
        if isinstance(message, AppendSound):
            return size_refusal(self.step, message, self.coding, self.rate_hz)
        return None

    def cut(self, pcm16: bytes) -> Iterator[bytes]:
        """Take sound; gives each second that is full."""
        self.rest += pcm16
        while len(self.rest) >= self.second_bytes and not self.peer.is_closed:
            yield self.next_second()

    def next_second(self) -> bytes:
        """Take the oldest second of the sound that is kept."""
        second = bytes(self.rest[: self.second_bytes])
        del self.rest[: self.second_bytes]
        return second

    def convert(self, second: bytes) -> None:
        """Bring a second to the model's rate."""
        if self.rate_hz == INPUT_RATE_HZ:
            self.take_second(to_float32(second))
            return
        rate = {} if self.rate_hz == LIVE_RATE_HZ else {"rate_hz": self.rate_hz}
        media = self.step.decode("second", self.before + second, **rate)
        self.before = second[-HISTORY_BYTES:]
        self.resampling.append(Second(media))

    def resampled(self, media: int, pcm: bytes) -> None:
        """Take a second that was resampled, or silence for one that could not be; in order."""
        for second in self.resampling:
            if second.media == media:
                second.pcm = pcm[:UNIT_BYTES].ljust(UNIT_BYTES, b"\0")
        while self.resampling and not self.peer.is_closed:
            first = self.resampling[0].pcm
            if first is None:
                return
            self.resampling.popleft()
            self.take_second(first)

    def to_rate(self, pcm: bytes, rate_hz: int) -> bytes:
        """Resample the model's next speech from 24 kHz; both float32 LE."""
        if rate_hz == LIVE_RATE_HZ:
            return pcm
        pcm16 = to_pcm16(pcm)
        pcm16 += bytes(-len(pcm16) % (DOWN * SAMPLE16_BYTES))
        sound, self.spoken = self.spoken + pcm16, (self.spoken + pcm16)[-HISTORY_BYTES:]
        return resample(sound, LIVE_RATE_HZ, rate_hz)


def size_refusal(step: Step, message: AppendSound, coding: Coding, rate_hz: int) -> Refused | None:
    """Refuse half a sample, another format, and more at once than may wait; None accepts it."""
    size, width = len(message.pcm16), SAMPLE16_BYTES if coding == "audio/pcm" else 1
    most, text = APPEND_S_MAX * rate_hz, ""
    if step.opened.endpoint == "openai" and step.behaves(KEEPS_SOUND):
        most = APPEND_BYTES_MAX // width
    if size % width:
        text = f"{size} bytes, a multiple of {width} is needed (int16)"
    elif size > most * width:
        text = f"{size // width} samples, at most {most} are allowed"
    elif coding == "audio/pcm" and step.behaves(SOUND_FILES) and looks_float32(message.pcm16):
        text = "samples that look like float32, int16 are needed"
    return Refused(code=ErrorCode.INVALID_PAYLOAD, message=f"$.audio: {text}") if text else None


def other_formats(message: Configure, now: OpenAISession) -> str:
    """Where a change of settings has another form of sound than that in force; empty if nowhere."""
    if message.input_format not in (None, now.input_format):
        return "input"
    return "output" if message.output_format not in (None, now.output_format) else ""


def format_refusal(
    step: Step, message: ClientMessage, now: OpenAISession, samples: int
) -> Refused | None:
    """Refuse another form of the sound once there were so many samples; None accepts it."""
    is_late = step.behaves(LATE_FORMATS) and samples >= rate_of(now.input_format)
    where = other_formats(message, now) if is_late and isinstance(message, Configure) else ""
    text = f"$.session.audio.{where}.format: a second of sound came in {now.input_format} already"
    ignored = len(getattr(message, "ignored", ()))
    code = ErrorCode.INVALID_PAYLOAD
    return Refused(code=code, message=text, ignored=ignored) if where else None


def first_settings(peer: Peer) -> OpenAISession:
    """The settings in the Realtime API of a client that has sent nothing but its address."""
    opened, limits = peer.step.opened, peer.step.limits
    return OpenAISession(
        id=peer.session_id,
        model=opened.label or next(iter(limits.models), ""),
        expires_at=opened.created_ms // MS_PER_S + limits.session_s,
    )


def whole(step: Step, item: Item) -> Item:
    """Have the parts of an item sent with their text, also where it is empty."""
    parts = tuple(attrs.evolve(it, is_whole=step.behaves(WHOLE_PARTS)) for it in item.parts)
    return attrs.evolve(item, parts=parts)


def never_written(item_id: str) -> InputStep:
    """The failure of an item whose words come too late."""
    code, text = ErrorCode.SESSION_EXPIRED, "the session is over"
    return InputStep(kind="transcript_failed", item_id=item_id, fault=code, text=text)


def expired(kind: Kind, reason: EndReason) -> None:
    """Tell a client that its session ends because its time is over."""
    if kind.has_own_time and kind.peer.is_active and reason in ("timeout", "idle"):
        limits = kind.step.limits
        text = f"its limit is {limits.session_s} s"
        if reason == "idle":
            text = f"nothing was heard for {limits.idle_s} s"
        kind.peer.cause = ""
        kind.peer.send_error(ErrorCode.SESSION_EXPIRED, f"the session is over: {text}")


def own_time(kind: Kind, settings: OpenAISession) -> OpenAISession:
    """Have a session's time begin with its slot; returns its settings, which tell the end."""
    if not kind.has_own_time:
        return settings
    kind.timers.set("session", kind.step.limits.session_s)
    waited_s = kind.step.now_ns // NS_PER_S
    return attrs.evolve(settings, expires_at=settings.expires_at + waited_s)


def no_model(name: str) -> str:
    """The words for a model that is not served."""
    return f"there is no model {name[:MODEL_CHARS_SHOWN]!r} here"


def is_served(kind: Kind, name: str) -> bool:
    """Whether a session's model is served; one that is not ends the session."""
    if name in kind.step.limits.models:
        return True
    kind.refuse(ErrorCode.MODEL_NOT_FOUND, no_model(name), close_code=CLOSE_POLICY)
    return False
