"""What a comparison of two sessions found: plain values, the same for text, JSON and tests.

Rules: times are nanoseconds of each session's own clock, 0 at its start. `a` and `b` are the two
sessions in the order in which they were named. Nothing here decides what a difference is.
"""

from __future__ import annotations

from typing import Literal

import attrs

What = Literal["opening", "unit", "turn", "chunk", "end"]


@attrs.frozen(kw_only=True)
class Side:
    """One session's part of an exchange that differs.

    Attributes:
        outcome: its outcome.
        text: what was said, shortened.
        audio_ms: how much of it was sound.
        took_ns: from the question to the answer; None where there is none.
    """

    outcome: str
    text: str
    audio_ms: int
    took_ns: int | None


@attrs.frozen(kw_only=True)
class Parting:
    """A place at which two sessions differ.

    Attributes:
        what: how the model was opened, a unit, a turn of chat, or how the session ended.
        index: of the unit or turn; None for the others.
        fields: all that differs there, nearest to the cause first.
        path: where in the first of these.
        in_a: what stands there, shortened.
        in_b: the same of `b`.
        snr_db: of sound that differs: the level of `a` relative to the difference; None if it is
            equal or cannot be measured.
        a: the exchange in `a`; None where it is not there, or for an opening or an end.
        b: the exchange in `b`, in the same way.
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
    """How long the model took to answer, in milliseconds; None where it never did."""

    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None


@attrs.frozen(kw_only=True)
class SessionFacts:
    """One of the sessions.

    Attributes:
        recording_id: its name.
        model: the model's name.
        mode: what it carried.
        seed: of its random choices.
        span_ns: from its start to its last record.
        exchanges: units or turns.
        drops: seconds of input that were lost.
        shortened: refused messages of which the log keeps length, hash and start.
        shortened_bytes: of all of them, as they came.
        end_reason: why it ended; None where its log has no end.
        latency: of its exchanges.
        damage_count: of its log; what is told has gaps then.
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
    """Something that the sessions were given and that differs; it is no difference of theirs."""

    name: str
    in_a: str
    in_b: str


@attrs.frozen(kw_only=True)
class DiffReport:
    """Two sessions compared.

    Attributes:
        a: the first.
        b: the second.
        setup: what they were given that differs, seed and settings among it.
        compared: exchanges that both have.
        same: those of them that are the same.
        only_a: exchanges that `b` does not have.
        only_b: exchanges that `a` does not have.
        first: the first difference; None where there is none.
        partings: the differences in order, that one among them, up to a bound.
        parting_count: all of them.
        logits_changed: the first exchange whose first logits differ, even where its tokens do not;
            it is no difference.
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
        """Whether a log is damaged, so that what is found may be for want of what was lost."""
        return bool(self.a.damage_count or self.b.damage_count)
