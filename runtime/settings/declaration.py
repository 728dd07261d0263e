"""A setting, declared once: its name, its values and its help; and the parsing of one value.

- `setting` makes a field of an attrs class. From it and its type `declared` reads all that flags,
  files, variables, printed configurations and documents need.
- A field `queue_max` is `queue_max` in a file, `ANTIPHON_QUEUE_MAX` as a variable and `--queue-max`
  as a flag, unless its declaration names another flag.
- The types are whole numbers, booleans, texts, choices, paths and lists of texts. Numbers, texts
  and paths may be `None`, written as an empty text.
- A value is parsed from text or from TOML, with the same bounds and without coercion: a number in a
  file is a TOML number, not a text of digits, and `true` is no number. An error names the value and
  the limit, in one line without control characters.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

SECONDS_MAX: Final = 31_536_000
"""A year, against typing errors; its nanoseconds fit into 64 bits."""
COUNT_MAX: Final = 1_000_000
"""More sockets, chats or queue places than a process can hold."""

T = TypeVar("T")
Kind = Literal["number", "truth", "text", "path", "texts"]

PREFIX: Final = "ANTIPHON_"
"""Prefix of all variables."""
KINDS: Final[dict[object, Kind]] = {
    int: "number",
    bool: "truth",
    str: "text",
    Path: "path",
    tuple[str, ...]: "texts",
}


@attrs.frozen(kw_only=True)
class Setting:
    """One setting, as `setting` declared it; `optional`: None is a value."""

    name: str
    kind: Kind
    optional: bool
    default: object
    help: str
    heading: str
    low: int | None
    high: int | None
    choices: tuple[str, ...]
    named_flag: str
    unset: str

    @property
    def flag(self) -> str:
        """Its flag, with the dashes."""
        return self.named_flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values in a few words; empty where any value is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{self.low} to {self.high}"
        return "" if self.low is None else f"at least {self.low}"


def setting(
    default: T,
    help: str,  # noqa: A002 - what click and argparse call it
    *,
    heading: str = "",
    low: int | None = None,
    high: int | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    unset: str = "none",
    served: object = attrs.NOTHING,
) -> T:
    """Declare a setting, as the value of a field.

    Args:
        help: sentences, with the unit.
        heading: of this setting and the following ones in the help; by default the last one's.
        low, high: the bounds of a number, inclusive.
        choices: by default those of the field's `Literal`; empty allows any text.
        flag: with its dashes; by default the field's name.
        unset: the meaning of None, for people.
        served: the command line's default, if it differs from the class's.
    """
    made = partial(
        Setting,
        default=default if served is attrs.NOTHING else served,
        help=help,
        low=low,
        high=high,
        named_flag=flag,
        unset=unset,
    )
    told = {"made": made, "heading": heading, "choices": choices}
    field: T = attrs.field(default=default, metadata=told)
    return field


def seconds(
    default: int,
    help: str,  # noqa: A002 - as of `setting`
    *,
    heading: str = "",
    low: int = 1,
    flag: str = "",
) -> int:
    """Declare a time in seconds, as `setting`."""
    return setting(default, help, heading=heading, low=low, high=SECONDS_MAX, flag=flag)


def count(
    default: int,
    help: str,  # noqa: A002 - as of `setting`
    *,
    heading: str = "",
    low: int = 1,
) -> int:
    """Declare a number of connections, sessions or messages, as `setting`."""
    return setting(default, help, heading=heading, low=low, high=COUNT_MAX)


@cache
def declared(owner: type) -> tuple[Setting, ...]:
    """The settings of an attrs class made by `setting`, with the command line's defaults."""
    hints, heading, found = get_type_hints(owner), "", list[Setting]()
    for field in attrs.fields(owner):
        told = field.metadata
        heading = told["heading"] or heading
        hint, optional = _without_none(hints[field.name])
        choices = told["choices"]
        if get_origin(hint) is Literal:
            choices, hint = choices or get_args(hint), str
        kind = KINDS[hint]
        found.append(
            told["made"](
                name=field.name, kind=kind, optional=optional, choices=choices, heading=heading
            )
        )
    return tuple(found)


def _without_none(hint: object) -> tuple[object, bool]:
    """Split None off a type; say whether it was there."""
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint, False
    (one,) = (part for part in get_args(hint) if part is not type(None))
    return one, True


# -- parsing a value -------------------------------------------------------------------------------


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
