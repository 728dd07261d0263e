"""The state of one session as an explicit value, and how it goes back to a unit's start.

Everything but the two caches is immutable and replaced as the session goes on; the caches only
grow, so their lengths restore them. A turn that starts gets a cache of its own, so the one before
is still whole when a unit is rolled back across the border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from torch import Tensor

from .audio import AudioCarry
from .config import TtsConfig
from .layers import KvCache
from .llm import LanguageModel
from .vocoder import Pcm


@attrs.frozen(kw_only=True)
class Speech:
    """The speaking side of a turn; a turn that has not spoken has none of it.

    Attributes:
        cache: the speech decoder's, made when the turn first speaks.
        length: of that cache.
        codes: the turn's codes so far.
        tail: what the vocoder keeps.
    """

    cache: KvCache | None = None
    length: int = 0
    codes: tuple[int, ...] = ()
    tail: Pcm | None = attrs.field(default=None, eq=False)

    def begun(self, config: TtsConfig) -> Speech:
        """The same, with a cache to speak into."""
        return self if self.cache is not None else Speech(cache=KvCache(config.tower))

    def after(self, codes: Sequence[int], tail: Pcm | None) -> Speech:
        """What it is once more codes were spoken into its cache."""
        assert self.cache is not None
        return Speech(
            cache=self.cache,
            length=self.cache.length,
            codes=(*self.codes, *codes),
            tail=tail,
        )


@attrs.frozen(kw_only=True)
class SessionState:
    """A session between two steps.

    Attributes:
        audio: the encoder's carry.
        cache: the language model's.
        length: of that cache.
        history: decided ids, for the repetition penalty.
        turn_open: the model has begun a turn and not ended it.
        speech: the turn's speaking side.
    """

    audio: AudioCarry
    cache: KvCache
    length: int
    history: tuple[int, ...] = ()
    turn_open: bool = False
    speech: Speech = Speech()

    def but(self, **changes: Any) -> SessionState:
        """The same state with some attributes replaced."""
        return attrs.evolve(self, **changes)

    def restore(self) -> None:
        """Set the caches back to this state's lengths."""
        self.cache.truncate(self.length)
        if self.speech.cache is not None:
            self.speech.cache.truncate(self.speech.length)


def feed(
    llm: LanguageModel, state: SessionState, embeddings: Tensor
) -> tuple[SessionState, Tensor]:
    """Feed the language model.

    Args:
        llm: the weights.
        state: the session's.
        embeddings: (T, width).

    Returns:
        The state after it, and the hidden states (T, width).
    """
    hidden = llm.feed(embeddings, state.cache)
    return state.but(length=state.cache.length), hidden
