"""Where a voice's sound is heard: on the session's clock, to the sample.

Rules:
- Sample `n` of a voice stands `n / rate` after the session's start, so sounds lie on one grid and
  two of a voice never overlap.
- A microphone's sound was heard before it came. A sound of `n` samples that came at `t` ends at
  `t`, or follows the sound before if that is not over: if a client sends faster than real time, its
  sound is heard later than it came.
- What a model says is heard as much later than it was sent as its unit was begun before the unit's
  sound could have been spoken (`Lead`). A client that sends a file at once is answered in a moment;
  heard like that, the answers would stand in the middle of the question.
- Sound that a network held up comes at once, and was heard in the gap before: the stretch that
  begins after a gap is moved back into it, while sound comes that would otherwise be late.
- Played sound begins when it came, or after the sound that still plays: the model's sound, as a
  client plays it, and the sound of a chat's question, which is a file.
- A sound that is cut off ends there, and the next may begin there.

All that shows, exports or measures a session uses this, so that a page, a file and a metric agree.
A line holds no sound.

Intervals (`Span`) are half open, and in ticks of 1/48000 s since the session's start: a sample of
the user (16 kHz) is three of them and a sample of the model (24 kHz) two, so nothing is rounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal

import attrs

from protocol.values.limits import APPEND_SAMPLES_MAX, MS_PER_S, NS_PER_MS, NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES

Voice = Literal["user", "model"]
VOICES: Final[tuple[Voice, ...]] = ("user", "model")
RATE_HZ: Final[Mapping[Voice, int]] = MappingProxyType(
    {"user": INPUT_RATE_HZ, "model": OUTPUT_RATE_HZ}
)
CAPTURED_NS_MAX: Final = (APPEND_SAMPLES_MAX + 1) * NS_PER_S // INPUT_RATE_HZ
"""How long before it came sound was heard at most: the most a dialect takes, plus one sample."""
JITTER_MS: Final = 40
"""A shorter gap is the jitter of a network, and nothing is moved into it."""
HELD_UP_S_MAX: Final = 10
"""A network that is silent for longer has lost the connection."""
BURST_NS_MAX: Final = 2 * NS_PER_S
"""Sound that was held up comes within this time; no microphone sends too fast for longer."""
SETTLED_NS: Final = CAPTURED_NS_MAX + HELD_UP_S_MAX * NS_PER_S + BURST_NS_MAX
"""Sound this long before the last that came moves no more."""


POSITIONS_MAX: Final = 4096
"""Pieces of sound whose place is known: 80 s of 20 ms each, and words come sooner."""


class Positions:
    """Where the user's sound stands on the session's clock, by its own milliseconds."""

    def __init__(self) -> None:
        self._pieces = deque[tuple[int, int]](maxlen=POSITIONS_MAX)
        self._samples = 0

    def add(self, samples: int, begin_ns: int) -> None:
        """Take the place of the next sound."""
        self._pieces.append((self._samples, begin_ns))
        self._samples += samples

    def span(self, start_ms: int, end_ms: int, now_ns: int) -> tuple[int, int]:
        """Return when a part of the sound was heard; `now_ns` where that is unknown, or later."""
        begin_ns, end_ns = (min(self._at_ns(at_ms, now_ns), now_ns) for at_ms in (start_ms, end_ms))
        return begin_ns, max(begin_ns, end_ns)

    def _at_ns(self, at_ms: int, now_ns: int) -> int:
        sample = at_ms * INPUT_RATE_HZ // MS_PER_S
        for first, begin_ns in reversed(self._pieces):
            if first <= sample:
                return begin_ns + time_of("user", sample - first)
        return now_ns


def sample_at(voice: Voice, at_ns: int) -> int:
    """Return the first sample of a voice at or after a time."""
    return -(-at_ns * RATE_HZ[voice] // NS_PER_S)


def time_of(voice: Voice, sample: int) -> int:
    """Return when a sample is heard; never before the time that `sample_at` was given."""
    return sample * NS_PER_S // RATE_HZ[voice]


class Lead:
    """How far the model is ahead of the clock: it hears sound before that can have been spoken.

    `ns` is 0 with a microphone; a shorter lead is the jitter of a network.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._last_ns = 0

    def begin(self, at_ns: int, user: Line, samples_waiting: int) -> None:
        """Take a unit that begins; the model does not have the last samples of the user."""
        self.ns = ahead_ns(time_of(user.voice, max(user.end - samples_waiting, 0)), at_ns)

    def at(self, at_ns: int) -> int:
        """When it is heard what a unit says, sent at a time, which does not decrease."""
        self._last_ns = max(self._last_ns, at_ns + self.ns)
        return self._last_ns

    def after(self, at_ns: int) -> int:
        """When it happens what else the server does at a time: not before what was said."""
        return max(self._last_ns, at_ns)


def ahead_ns(end_ns: int, at_ns: int) -> int:
    """How long before its end sound came, at a time."""
    return end_ns - at_ns if end_ns - at_ns > JITTER_MS * NS_PER_MS else 0


@attrs.frozen(kw_only=True)
class Sound:
    """A sound that arrived from the user, or was sent to them, at `at_ns`.

    `begin` (from the session's start) and `pcm` (float32 LE, mono) are at the voice's rate;
    `response_id` is the model's turn.
    """

    voice: Voice
    at_ns: int
    begin: int
    pcm: bytes
    response_id: str = ""

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


@attrs.define(eq=False)
class Stretch:
    """Sound without a gap; it was moved back by `moved` samples in all, and begins at `begin`."""

    begin: int
    moved: int = 0


class Line:
    """One voice's line, placed up to `end`.

    `begin` is the first sample of the current stretch, after the last gap; the last call of `place`
    moved that stretch back by `moved` samples. `stretch` is that stretch.
    """

    def __init__(self, voice: Voice) -> None:
        self.voice: Final[Voice] = voice
        self.end = self.begin = self.moved = 0
        self.stretch = Stretch(0)
        self._floor = 0
        self._came_ns = 0

    def place(self, at_ns: int, samples: int, *, is_captured: bool) -> int:
        """Place samples that came at `at_ns` after all placed before; return the first one's place.

        Captured sound is a microphone's, heard before it came, and earlier sound of the stretch may
        have `moved`; other sound is played from now on.
        """
        rate_hz = RATE_HZ[self.voice]
        if is_captured:
            wanted = at_ns * rate_hz // NS_PER_S - samples
        else:
            wanted = sample_at(self.voice, at_ns)
        self.moved = 0
        if wanted - self.end > JITTER_MS * rate_hz // 1000:
            self._floor = max(self.end, wanted - HELD_UP_S_MAX * rate_hz)
            self.begin, self._came_ns = wanted, at_ns
        elif is_captured and at_ns - self._came_ns <= BURST_NS_MAX:
            self.moved = max(0, min(self.end - wanted, self.begin - self._floor))
            self.begin -= self.moved
        begin = max(wanted, self.end - self.moved)
        self.end = begin + samples
        if self.moved:
            self.stretch.moved += self.moved
            self.stretch.begin = self.begin
        elif self.begin != self.stretch.begin:
            self.stretch = Stretch(self.begin)
        return begin

    def cut(self, at_ns: int) -> int:
        """End the placed sound at a time, if it is not over by then; return the line's end."""
        self.end = min(self.end, sample_at(self.voice, at_ns))
        return self.end

    @property
    def is_settled(self) -> bool:
        """Whether nothing placed moves any more: the stretch lies at the sound before."""
        return self.begin <= self._floor

    def settled_ns(self, now_ns: int) -> int:
        """The time before which sound that comes from now on moves and places nothing."""
        can_move = now_ns - self._came_ns <= BURST_NS_MAX
        return time_of(self.voice, min(self._floor, self.end) if can_move else self.end)


# -- intervals -------------------------------------------------------------------------------------


TICK_HZ: Final = 48_000
TICKS_PER_MS: Final = TICK_HZ // MS_PER_S
TICKS_PER_SAMPLE: Final[Mapping[Voice, int]] = MappingProxyType(
    {voice: TICK_HZ // rate_hz for voice, rate_hz in RATE_HZ.items()}
)


@attrs.frozen(order=True)
class Span:
    """A stretch of time in which one voice is heard, from `begin` until before `end`."""

    begin: int
    end: int

    @property
    def ticks(self) -> int:
        """Its length."""
        return self.end - self.begin

    def overlap(self, other: Span) -> int:
        """Count the ticks that it shares with another."""
        return max(0, min(self.end, other.end) - max(self.begin, other.begin))


def ticks_of(at_ns: int) -> int:
    """Return the tick at a time, or the last one before."""
    return at_ns * TICK_HZ // NS_PER_S


def ns_of(ticks: int) -> int:
    """Return a length in nanoseconds, without its fraction."""
    return ticks * NS_PER_S // TICK_HZ


def join(spans: list[Span], span: Span, gap: int) -> None:
    """Add a span after all others; with less than `gap` between them, the last one grows."""
    if span.ticks <= 0:
        return
    if spans and span.begin - spans[-1].end < gap:
        spans[-1] = Span(spans[-1].begin, max(spans[-1].end, span.end))
    else:
        spans.append(span)


def shared(one: Iterable[Span], other: Iterable[Span]) -> Iterator[Span]:
    """Yield where two voices are heard at once; spans of a voice are in order, and apart."""
    others = iter(other)
    current = next(others, None)
    for span in one:
        while current is not None:
            if span.overlap(current):
                yield Span(max(span.begin, current.begin), min(span.end, current.end))
            if current.end > span.end:
                break
            current = next(others, None)


def joined(spans: Iterable[Span], gap: int) -> tuple[Span, ...]:
    """Sort spans, and join those with less than `gap` between them; empty ones are left out."""
    found: list[Span] = []
    for span in sorted(spans):
        join(found, span, gap)
    return tuple(found)
