"""What happens on the time line of a session: plain values, the same for every format.

Times are nanoseconds of the session's clock, 0 at its start. Sound is placed on the grid of its own
rate: sample `n` of a voice is heard `n / rate` after the start, and a sound that came at `at_ns` is
never before it. PCM is float32 LE, mono.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.limits import NS_PER_S
from protocol.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES

Voice = Literal["user", "model"]
VOICES: Final[tuple[Voice, ...]] = ("user", "model")
RATE_HZ: Final[Mapping[Voice, int]] = MappingProxyType(
    {"user": INPUT_RATE_HZ, "model": OUTPUT_RATE_HZ}
)


def sample_at(voice: Voice, at_ns: int) -> int:
    """Name the first sample of a voice that is not before a time."""
    return -(-at_ns * RATE_HZ[voice] // NS_PER_S)


def time_of(voice: Voice, sample: int) -> int:
    """Say when a sample is heard; never before what `sample_at` made it of."""
    return sample * NS_PER_S // RATE_HZ[voice]


@attrs.frozen(kw_only=True)
class Sound:
    """Something that is heard.

    Attributes:
        voice: whose.
        at_ns: when it arrived from the user, or was sent to them.
        begin: its first sample, counted from the session's start at the voice's rate.
        pcm: float32 LE, mono, at the voice's rate.
    """

    voice: Voice
    at_ns: int
    begin: int
    pcm: bytes

    @property
    def end(self) -> int:
        """The sample after its last."""
        return self.begin + len(self.pcm) // SAMPLE_BYTES

    @property
    def begin_ns(self) -> int:
        """When it is first heard."""
        return time_of(self.voice, self.begin)

    @property
    def end_ns(self) -> int:
        """When it is over."""
        return time_of(self.voice, self.end)


@attrs.frozen(kw_only=True)
class Words:
    """Text.

    Attributes:
        voice: whose.
        at_ns: when it arrived from the user, or was sent to them.
        begin_ns: when the sound begins that says it; without one, `at_ns`.
        end_ns: when that sound is over; None without one.
        text: as it came, spaces included.
        response_id: the model's turn; pieces of one turn are joined without more.
    """

    voice: Voice
    at_ns: int
    begin_ns: int
    end_ns: int | None
    text: str
    response_id: str = ""


@attrs.frozen(kw_only=True)
class Picture:
    """Something that the user shows: a JPEG file, from `begin_ns` until the next."""

    begin_ns: int
    jpeg: bytes


NoteKind = Literal[
    "queued",
    "queue_update",
    "queue_done",
    "created",
    "listen",
    "paused",
    "resumed",
    "interrupted",
    "going_away",
    "prefilled",
    "response",
    "error",
    "closed",
    "force_listen",
    "dropped",
    "unheard",
    "close",
    "damage",
]
"""Those up to `closed` are what the server said; see `protocol.messages`.

`force_listen`: the user cuts the model short; `dropped`: a second of input was lost to newer input;
`unheard`: words that were sent and, cut short, not heard; `close`: the WebSocket was closed;
`damage`: some of the log is lost here.
"""


@attrs.frozen(kw_only=True)
class Note:
    """Something else that is worth telling, with what there is to say of it."""

    begin_ns: int
    kind: NoteKind
    text: str = ""


Moment = Sound | Words | Picture | Note
