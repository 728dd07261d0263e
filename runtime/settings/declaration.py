"""A setting, declared once: its name, its values and its help.

- `setting` makes a field of an attrs class. From it and its type `declared` reads all that flags,
  files, variables, printed configurations and documents need.
- A field `queue_max` is `queue_max` in a file, `ANTIPHON_QUEUE_MAX` as a variable and `--queue-max`
  as a flag, unless its declaration names another flag.
- The types are whole numbers, booleans, texts, choices, paths and lists of texts. Numbers, texts
  and paths may be `None`, written as an empty text.
"""

from __future__ import annotations

import types
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from .bounds import COUNT_MAX, SECONDS_MAX

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
