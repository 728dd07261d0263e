"""Requests of a session to the model, which can be computed in batches.

A unit, an opening or a finalize is a generator of requests (`Steps`), computed one at a time, or
with those of other sessions as a batch of one `bucket` (`runtime.model.engine`). Requests are
repeatable: they write the same values to the same places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, ClassVar, Final, TypeVar

import attrs
from torch import Tensor

from .audio import EncodeAudio
from .logits import CodeChoice, TokenLogits
from .vocoder import Prepare, Vocode

Result = TypeVar("Result")

COMPANY_MAX: Final = 128
"""Rows for the language model from which on batching gains nothing."""


@attrs.frozen(kw_only=True, eq=False)
class EncodeImage:
    """A slice of a picture, (3, h, w) in [-1, 1], answered by its embeddings, (queries, width).

    If `is_alone`, it is not batched, which would gain nothing.
    """

    picture: Tensor
    is_alone: bool = True

    stage: ClassVar[int] = 0

    @property
    def bucket(self) -> Hashable:
        """Slices of one shape, unless `is_alone`."""
        return ("see", id(self)) if self.is_alone else ("see", *self.picture.shape)


@attrs.frozen(kw_only=True, eq=False)
class EncodeReference:
    """Reference audio, (samples,), 16 kHz, at most 30 s; answered by (10 a second, width)."""

    pcm: Tensor

    stage: ClassVar[int] = 0

    @property
    def bucket(self) -> Hashable:
        """Never batched: lengths differ."""
        return ("recall", id(self))


@attrs.frozen(kw_only=True, eq=False)
class Feed:
    """Rows (T, width) for the language model, after `start` tokens; answered by `LlmOutput`."""

    slot: int
    start: int
    rows: Tensor

    @property
    def stage(self) -> int:
        """Prefill, before the tokens of others are decoded."""
        return 2 if len(self.rows) > 1 else 3

    @property
    def bucket(self) -> Hashable:
        """Rows of one length; many rows are not batched, which would gain nothing."""
        count = len(self.rows)
        return ("llm", count) if count < COMPANY_MAX else ("llm", count, id(self))


@attrs.frozen(kw_only=True, eq=False)
class LlmOutput:
    """The language model's output for the last row: `hidden` (width,), and logits."""

    hidden: Tensor
    logits: TokenLogits


@attrs.frozen(kw_only=True, eq=False)
class Speak:
    """Rows (T, hidden) for the speech decoder; answered by `CodeLogits`, with `choice`'s code."""

    slot: int
    start: int
    rows: Tensor
    choice: CodeChoice | None = None

    @property
    def stage(self) -> int:
        """A chunk's first rows, of any length, before single codes."""
        return 4 if len(self.rows) > 1 else 5

    @property
    def bucket(self) -> Hashable:
        """Codes; a chunk's first rows, whose numbers differ little, are batched with others."""
        return ("tts", len(self.rows) > 1)


@attrs.frozen(kw_only=True, eq=False)
class KnownRows:
    """Requests of a session, one row each, in turn: `Feed` or `Speak`; answered by their answers.

    All rows are known, so they run as one batch. Each has the same bits as by itself: it sees the
    keys and values of those before it, which every layer writes before it attends.
    """

    works: Sequence[Feed | Speak]

    @property
    def stage(self) -> int:
        """That of its requests."""
        return self.works[0].stage

    @property
    def bucket(self) -> Hashable:
        """With other such requests of its kind."""
        return ("in turn", type(self.works[0]))


Work = EncodeImage | EncodeAudio | EncodeReference | Feed | Speak | KnownRows | Prepare | Vocode
Steps = Generator[Work, Any, Result]
Compute = Callable[[Sequence[Work]], list[Any]]
"""Answers requests of one bucket, in their order."""


# -- ids that are known -------------------------------------------------------------------------


@attrs.define
class KnownIds:
    """The ids that a unit that is run again is known to feed one by one, and the answers to them.

    They are fed at once (`KnownRows`): an exact rebuild of a speaking session takes 40 to 67% of
    the time (39 and 25 seconds of it per second of CPU, not 26 and 10).

    Attributes:
        ids: in their order.
        work: the request for the id at an index.
        most: ids that a unit can feed.
    """

    ids: Sequence[int]
    work: Callable[[int], Feed | Speak]
    most: int
    _answers: deque[Any] = attrs.field(factory=deque, init=False)
    _count: int = attrs.field(default=0, init=False)

    def ask(self, index: int) -> Steps[Any]:
        """The answer to the next id; `ValueError` if it is another one, or they are too many."""
        at = self._count
        if not at < len(self.ids) <= self.most or self.ids[at] != index:
            raise ValueError("it feeds other ids than recorded")
        if not at:
            self._answers.extend((yield KnownRows(works=[*map(self.work, range(len(self.ids)))])))
        self._count += 1
        return self._answers.popleft()
