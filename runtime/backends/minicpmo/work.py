"""What a session asks of the model, step by step: plain requests that can be computed together.

A unit, an opening or a finalize is a generator of requests (`Steps`): it yields one, is sent the
answer, and goes on. Whoever drives generators decides which requests are computed together: one at
a time, or those of many sessions as a batch (`runtime.engine`). Only requests of one `bucket` go
together. Requests can be computed again with the same result: what they write, they write to the
same places.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import attrs
from torch import Tensor

from .audio import Hearing
from .token_logits import TokenLogits
from .vocoder import Sounding

Result = TypeVar("Result")

COMPANY_MAX: Final = 128
"""Rows for the language model from which on others would only wait for them."""


@attrs.frozen(kw_only=True, eq=False)
class See:
    """One slice of a picture; the answer is its embeddings, (queries, width).

    Attributes:
        picture: (3, h, w) in [-1, 1].
        is_alone: it is computed by itself: others would only wait, as it gains nothing by company.
    """

    picture: Tensor
    is_alone: bool = True

    stage: ClassVar[int] = 0

    @property
    def bucket(self) -> Hashable:
        """Slices of one shape, where they may have company."""
        return ("see", id(self)) if self.is_alone else ("see", *self.picture.shape)


@attrs.frozen(kw_only=True, eq=False)
class Hear:
    """One unit of sound; the answer is its embeddings, (10, width)."""

    hearing: Hearing

    stage: ClassVar[int] = 1

    @property
    def bucket(self) -> Hashable:
        """All units."""
        return ("hear",)


@attrs.frozen(kw_only=True, eq=False)
class Recall:
    """Reference audio, whole; the answer is its embeddings, (10 a second, width).

    Attributes:
        pcm: (samples,), 16 kHz, at most 30 s.
    """

    pcm: Tensor

    stage: ClassVar[int] = 0

    @property
    def bucket(self) -> Hashable:
        """By itself: no other is of just this length."""
        return ("recall", id(self))


@attrs.frozen(kw_only=True, eq=False)
class Feed:
    """Rows for the language model; the answer is `Fed`.

    Attributes:
        slot: the session's.
        start: tokens that the slot holds.
        rows: embeddings, (T, width).
    """

    slot: int
    start: int
    rows: Tensor

    @property
    def stage(self) -> int:
        """Prefill, before the tokens of others are decoded."""
        return 2 if len(self.rows) > 1 else 3

    @property
    def bucket(self) -> Hashable:
        """Rows of one length; many rows go by themselves, as they gain nothing by company."""
        count = len(self.rows)
        return ("llm", count) if count < COMPANY_MAX else ("llm", count, id(self))


@attrs.frozen(kw_only=True, eq=False)
class Fed:
    """What the language model made of rows.

    Attributes:
        hidden: of the last row, (width,).
        logits: of the last row.
    """

    hidden: Tensor
    logits: TokenLogits


@attrs.frozen(kw_only=True, eq=False)
class Speak:
    """Rows for the speech decoder; the answer is its logits, float32 on the host, (codes,).

    Attributes:
        slot: the session's.
        start: positions that the slot holds.
        rows: embeddings, (T, hidden).
    """

    slot: int
    start: int
    rows: Tensor

    @property
    def stage(self) -> int:
        """What a chunk begins with, of any length, before the codes that all go on with."""
        return 4 if len(self.rows) > 1 else 5

    @property
    def bucket(self) -> Hashable:
        """Rows of one length."""
        return ("tts", len(self.rows))


@attrs.frozen(kw_only=True, eq=False)
class Sound:
    """Codes for the vocoder; the answer is its sound and state (see `Vocoder.sound`)."""

    sounding: Sounding

    stage: ClassVar[int] = 6

    @property
    def bucket(self) -> Hashable:
        """All codes."""
        return ("sound",)


Work = See | Hear | Recall | Feed | Speak | Sound
Steps = Generator[Work, Any, Result]
Compute = Callable[[Sequence[Work]], list[Any]]
"""Answers requests of one bucket, in their order."""


def alone(steps: Steps[Result], compute: Compute) -> Result:
    """Drive a generator to its end, one request at a time; it is told of those that fail.

    Args:
        steps: the generator.
        compute: answers requests of one bucket.

    Returns:
        What the generator returns.
    """
    go_on: Callable[[], Work] = partial(steps.send, None)
    try:
        while True:
            work = go_on()
            try:
                (answer,) = compute((work,))
            except Exception as error:
                go_on = partial(steps.throw, error)
            else:
                go_on = partial(steps.send, answer)
    except StopIteration as end:
        result: Result = end.value
        return result
