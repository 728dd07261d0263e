"""The findings of a comparison of two sessions, `a` and `b`, as named: plain values.

Times are nanoseconds of each session's own clock, 0 at its start.
"""

from __future__ import annotations

from typing import Literal

import attrs

What = Literal["opening", "unit", "turn", "chunk", "end"]


@attrs.frozen(kw_only=True)
class Side:
    """One session's part of an exchange that differs: shortened text, and time to answer."""

    outcome: str
    text: str
    audio_ms: int
    took_ns: int | None


@attrs.frozen(kw_only=True)
class Parting:
    """A place at which two sessions differ; values are shortened.

    Attributes:
        index: of the unit or turn; None for an opening or an end, which have no `a` and `b` either.
        fields: all that differ, nearest to the cause first.
        path: in the first of these.
        snr_db: of sound that differs: `a` relative to the difference; None if not measured.
    """

    what: What
    index: int | None
    fields: tuple[str, ...]
    path: str
    in_a: str
    in_b: str
    snr_db: float | None = None
    a: Side | None = None
    b: Side | None = None


@attrs.frozen(kw_only=True)
class Latency:
    """The model's times to answer, in milliseconds; None if it never did."""

    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None


@attrs.frozen(kw_only=True)
class SessionFacts:
    """One of the sessions.

    Attributes:
        span_ns: from its start to its last record.
        exchanges: units or turns.
        drops: seconds of input that were lost.
        shortened: refused messages of which the log keeps length, hash and start.
        shortened_bytes: of all of them, as they came.
        end_reason: None if its log has no end.
        damage_count: of its log; with damage the values have gaps.
    """

    recording_id: str | None
    model: str | None
    mode: str | None
    seed: int | None
    span_ns: int
    exchanges: int
    drops: int
    shortened: int
    shortened_bytes: int
    end_reason: str | None
    latency: Latency
    damage_count: int


@attrs.frozen(kw_only=True)
class SetupLine:
    """A setting of the sessions that differs; it does not count as a difference."""

    name: str
    in_a: str
    in_b: str


@attrs.frozen(kw_only=True)
class DiffReport:
    """Two sessions compared.

    Attributes:
        setup: settings that differ, the seed included.
        compared: exchanges that both have.
        only_a: exchanges that `b` does not have.
        partings: the differences in order, the first included, up to a bound.
        parting_count: all of them.
        logits_changed: the first exchange whose first logits differ, even if its tokens do not.
    """

    a: SessionFacts
    b: SessionFacts
    setup: tuple[SetupLine, ...]
    compared: int
    same: int
    only_a: int
    only_b: int
    first: Parting | None
    partings: tuple[Parting, ...]
    parting_count: int
    logits_changed: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether a log is damaged, so that a difference may come from lost records."""
        return bool(self.a.damage_count or self.b.damage_count)
