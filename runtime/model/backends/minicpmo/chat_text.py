"""An answer's token ids to text, in whole characters.

A character may span several tokens; its bytes are held back until it is complete. Invalid bytes
become U+FFFD, in the pieces as in the whole.
"""

from __future__ import annotations

from typing import Final

import attrs

from .tokens import Tokens

BROKEN: Final = "\ufffd"
HELD_MAX: Final = 16
"""Maximum tokens held back; a character has four bytes, and most tokens have one."""


@attrs.define
class TextStream:
    """The text of one answer.

    `text`: everything returned so far; `waiting`: ids whose text is not fully returned; `given`:
    characters of that text already returned.
    """

    tokens: Tokens
    text: str = ""
    waiting: list[int] = attrs.field(factory=list)
    given: int = 0

    def add(self, index: int) -> str:
        """Take the next id; return the characters that it completes."""
        self.waiting.append(index)
        text = self.tokens.decode(self.waiting)
        if text.endswith(BROKEN) and len(self.waiting) < HELD_MAX:
            return self._give(text[:-1])
        new = self._give(text)
        self.waiting, self.given = [], 0
        return new

    def end(self) -> str:
        """Return the text held back of an incomplete character."""
        return self._give(self.tokens.decode(self.waiting))

    @property
    def held(self) -> str:
        """The text held back, as `end` would return it."""
        return self.tokens.decode(self.waiting)[self.given :]

    def _give(self, text: str) -> str:
        new, self.given = text[self.given :], max(self.given, len(text))
        self.text += new
        return new
