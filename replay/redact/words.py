"""Replacements for words: as many characters and UTF-8 bytes, without content.

- The fillers are ordered by width, so that the place of an accent is not visible.
- In JSON an escape becomes one of the same length, for a character of the same width.
- A name becomes another name, the same one everywhere: answers that belong together stay
  recognisable.
- Numbers stay numbers of as many digits.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

FILLERS: Final = ("x", "\u00e9", "\u25a1", "\U0001f02b")
"""By width: of one to four bytes."""
LONE_SURROGATE: Final = "\ud800"
"""Not in UTF-8, and stays: a text with it is refused, or stored differently."""
_ESCAPED: Final = ("\\u0078", "\\u00e9", "\\u25a1", "\\ud83c\\udc2b")
_SHORT_ESCAPE: Final = "\\/"
_REFUSED: Final = str.maketrans(FILLERS[0], "?")
_UNIT: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""One character or escape."""


def fill(text: str) -> str:
    """Replace a text."""
    if text.isascii():
        return FILLERS[0] * len(text)
    counts = Counter(_filler(char) for char in text)
    return "".join(filler * counts[filler] for filler in (*FILLERS, LONE_SURROGATE))


def fill_json(raw: str) -> str:
    """Replace the raw text of a JSON string."""
    if "\\" not in raw:
        return fill(raw)
    return "".join(sorted(map(_json_filler, _UNIT.findall(raw)), key=_width_order))


def refuse_json(raw: str) -> str:
    """Replace the raw text of a JSON string by neither base64 nor a name."""
    return fill_json(raw).translate(_REFUSED).replace(_SHORT_ESCAPE, "\\n").replace("0078", "003f")


def fill_number(text: str) -> str:
    """Replace the digits of a number; its sign, point and exponent stay."""
    return re.sub("[0-9]+", lambda digits: "1" + "0" * (len(digits[0]) - 1), text)


class Pseudonyms:
    """Replacements for names; equal names get equal ones."""

    def __init__(self) -> None:
        self._numbers: Final[dict[str, int]] = {}

    def of(self, name: str) -> str:
        """The replacement: as many characters and bytes, numbered as far as there is room."""
        number = str(self._numbers.setdefault(name, len(self._numbers)))
        filled = fill(name)
        room = filled.count(FILLERS[0])
        return number[-room:].rjust(room, FILLERS[0]) + filled[room:] if room else filled


def _filler(char: str) -> str:
    if "\ud800" <= char <= "\udfff":
        return LONE_SURROGATE
    return FILLERS[len(char.encode()) - 1]


def _json_filler(unit: str) -> str:
    if len(unit) == 1:
        return _filler(unit)
    if len(unit) == 2:
        return _SHORT_ESCAPE
    if len(unit) > 6:
        return _ESCAPED[3]
    filler = _filler(chr(int(unit[2:], 16)))
    return f"\\u{ord(filler):04x}"


def _width_order(filler: str) -> tuple[int, str]:
    return len(filler), filler
