"""Parsing one value of a setting, from text or from TOML, with the same bounds.

No coercion: a number in a file is a TOML number, not a text of digits, and `true` is no number. An
error names the value and the limit, in one line without control characters.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .declaration import Kind, Setting

TEXT_CHARS_MAX: Final = 4_096
"""The longest path of a kernel."""
TEXTS_MAX: Final = 64
"""Origins or workers of one server; more are a mistake."""
SHOWN_CHARS_MAX: Final = 60
"""Enough of a wrong value to find it."""
TRUE: Final = frozenset({"1", "true", "yes", "on"})
FALSE: Final = frozenset({"0", "false", "no", "off"})

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class ValueWrongError(ValueError):
    """The value is not allowed for this setting; the text says which limit it breaks."""


def from_text(setting: Setting, text: str) -> object:
    """Parse a flag's or a variable's text, lists with commas; raises `ValueWrongError`."""
    if setting.kind == "texts":
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        return _texts(setting, parts)
    if setting.kind == "truth":
        if text.lower() not in TRUE | FALSE:
            raise ValueWrongError(f"{shown(text)} is neither true nor false")
        return text.lower() in TRUE
    if setting.kind == "number" and text:
        if not _NUMBER.fullmatch(text):
            raise ValueWrongError(f"{shown(text)} is no whole number")
        return _number(setting, int(text))
    return _READERS[setting.kind](setting, text)


def from_toml(setting: Setting, value: object) -> object:
    """Check a value that `tomllib` read; raises `ValueWrongError`."""
    return _READERS[setting.kind](setting, value)


def plain(value: object) -> str:
    """Check a text for a path, address or name; `ValueWrongError` if it is invalid.

    Empty and too long texts, and control characters, are invalid.
    """
    if not isinstance(value, str):
        raise ValueWrongError(f"{shown(value)} is no text")
    if not value:
        raise ValueWrongError("an empty text says nothing here")
    if len(value) > TEXT_CHARS_MAX:
        raise ValueWrongError(f"a text of {len(value)} characters: at most {TEXT_CHARS_MAX}")
    if any(char < " " or char == "\x7f" for char in value):
        raise ValueWrongError(f"{shown(value)} has a control character")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueWrongError(f"{shown(value)} is not UTF-8")
    return value


def shown(value: object) -> str:
    """A wrong value on one line: short, without control characters."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The end of a message that suggests the nearest word, or empty."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _number(setting: Setting, value: object) -> object:
    if value == "" and setting.optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueWrongError(f"{shown(value)} is no whole number")
    if setting.low is not None and value < setting.low:
        raise ValueWrongError(f"{shown(value)} is too small: {setting.allowed}")
    if setting.high is not None and value > setting.high:
        raise ValueWrongError(f"{shown(value)} is too large: {setting.allowed}")
    return value


def _truth(_setting: Setting, value: object) -> object:
    if not isinstance(value, bool):
        raise ValueWrongError(f"{shown(value)} is neither true nor false")
    return value


def _text(setting: Setting, value: object) -> object:
    if value == "" and setting.optional:
        return None
    text = plain(value)
    if setting.choices and text not in setting.choices:
        meant = nearest(text, setting.choices)
        raise ValueWrongError(f"{shown(text)} is not one of {setting.allowed}{meant}")
    return text


def _path(setting: Setting, value: object) -> object:
    text = _text(setting, value)
    return None if text is None else Path(str(text))


def _texts(_setting: Setting, value: object) -> object:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueWrongError(f"{shown(value)} is no list of texts")
    if len(value) > TEXTS_MAX:
        raise ValueWrongError(f"a list of {len(value)} is too long: at most {TEXTS_MAX}")
    return tuple(plain(item) for item in value)


_READERS: Final[Mapping[Kind, Callable[[Setting, object], object]]] = MappingProxyType(
    {"number": _number, "truth": _truth, "text": _text, "path": _path, "texts": _texts}
)
