"""An answer's token ids to text, piece by piece: whole characters alone.

A character may be spread over several tokens; its bytes are held back until it is whole. Bytes that
are no character become U+FFFD, in the pieces as in the whole.
"""

from __future__ import annotations

from typing import Final

import attrs

from .tokens import Tokens

BROKEN: Final = "\ufffd"
HELD_MAX: Final = 16
"""Tokens whose text is held back, at most; a character has four bytes, and most tokens have one."""


@attrs.define
class TextStream:
    """The text of one answer.

    Attributes:
        tokens: the tokenizer; shared.
        text: all that was given so far.
        waiting: ids whose text was not all given.
        given: characters of their text that were.
    """

    tokens: Tokens
    text: str = ""
    waiting: list[int] = attrs.field(factory=list)
    given: int = 0

    def add(self, index: int) -> str:
        """Take the next id; gives the whole characters that it completes."""
        self.waiting.append(index)
        text = self.tokens.decode(self.waiting)
        if text.endswith(BROKEN) and len(self.waiting) < HELD_MAX:
            return self._give(text[:-1])
        new = self._give(text)
        self.waiting, self.given = [], 0
        return new

    def end(self) -> str:
        """Give what was held back: a character that never became whole."""
        return self._give(self.tokens.decode(self.waiting))

    @property
    def held(self) -> str:
        """What is held back: `end` would give it."""
        return self.tokens.decode(self.waiting)[self.given :]

    def _give(self, text: str) -> str:
        new, self.given = text[self.given :], max(self.given, len(text))
        self.text += new
        return new
