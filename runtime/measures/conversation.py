"""A conversation as intervals of time: plain values, from which the measures are computed.

Times are ticks of 1/48000 s since the session's start: a sample of the user (16 kHz) is three of
them and a sample of the model (24 kHz) two, so nothing is rounded. Intervals are half open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from protocol.values.limits import MS_PER_S, NS_PER_S

from .placing import RATE_HZ, Voice

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


@attrs.frozen
class Text:
    """Words of the model, counted, at the tick at which their sound begins."""

    begin: int
    words: int


@attrs.frozen(kw_only=True)
class Conversation:
    """Both voices of a duplex session; spans are in order and do not touch.

    Attributes:
        user: stretches of the user's speech.
        model: stretches of the model's sound, as it was played.
        texts: the model's words that were heard.
        stops: when the client asked the model to stop (`force_listen`).
        pauses: when the client paused the session.
        end: the end of the session.
    """

    user: tuple[Span, ...] = ()
    model: tuple[Span, ...] = ()
    texts: tuple[Text, ...] = ()
    stops: tuple[int, ...] = ()
    pauses: tuple[int, ...] = ()
    end: int = 0

    @property
    def is_written(self) -> bool:
        """Whether the model has no voice, so that its turns cannot be measured."""
        return bool(self.texts) and not self.model

    @property
    def ticks(self) -> int:
        """From the first sound of either voice to the last."""
        spans = (*self.user, *self.model)
        if not spans:
            return 0
        return max(span.end for span in spans) - min(span.begin for span in spans)


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
