"""What stands where words stood: as many characters and bytes of UTF-8, and nothing of them.

Rules:
- The fillers are put in the order of their widths: so that nobody sees where an accent was.
- In JSON each escape is replaced by one of the same length that stands for a character of the same
  width, so that both the text and what it means keep their lengths.
- A name becomes another name, the same one wherever it stands: who reads a redacted log can still
  tell which answers belong together.
- Numbers stay numbers of as many digits.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

FILLERS: Final = ("x", "\u00e9", "\u25a1", "\U0001f02b")
"""By width: of one to four bytes."""
LONE_SURROGATE: Final = "\ud800"
"""What no UTF-8 holds stays what it is: text with it is refused, or stored apart."""
_ESCAPED: Final = ("\\u0078", "\\u00e9", "\\u25a1", "\\ud83c\\udc2b")
_SHORT_ESCAPE: Final = "\\/"
_REFUSED: Final = str.maketrans(FILLERS[0], "?")
_UNIT: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
"""What one character is written as."""


def fill(text: str) -> str:
    """Replace a text."""
    if text.isascii():
        return FILLERS[0] * len(text)
    counts = Counter(_filler(char) for char in text)
    return "".join(filler * counts[filler] for filler in (*FILLERS, LONE_SURROGATE))


def fill_json(raw: str) -> str:
    """Replace what stands between the quotes of a JSON string."""
    if "\\" not in raw:
        return fill(raw)
    return "".join(sorted(map(_json_filler, _UNIT.findall(raw)), key=_width_order))


def refuse_json(raw: str) -> str:
    """Replace the same by what is neither base64 nor a name."""
    return fill_json(raw).translate(_REFUSED).replace(_SHORT_ESCAPE, "\\n").replace("0078", "003f")


def fill_number(text: str) -> str:
    """Replace a number: its sign, point and exponent stay where they are, its digits do not."""
    return re.sub("[0-9]+", lambda digits: "1" + "0" * (len(digits[0]) - 1), text)


class Pseudonyms:
    """Other names for names; equal ones get equal ones."""

    def __init__(self) -> None:
        self._numbers: Final[dict[str, int]] = {}

    def of(self, name: str) -> str:
        """Give the other name: of as many characters and bytes, as far as it has room for one."""
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
