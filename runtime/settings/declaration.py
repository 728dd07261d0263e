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
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

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

_DECLARED: Final = "antiphon.setting"


@attrs.frozen(kw_only=True)
class _Declared:
    """The arguments of `setting` other than the default."""

    help: str
    group: str
    low: int | None
    high: int | None
    choices: tuple[str, ...]
    flag: str | None
    unset: str
    served: object


@attrs.frozen(kw_only=True)
class Setting:
    """One setting, as `setting` declared it; `optional`: None is a value."""

    name: str
    kind: Kind
    optional: bool
    default: object
    help: str
    group: str
    low: int | None
    high: int | None
    choices: tuple[str, ...]
    flag: str
    unset: str

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
    group: str,
    *,
    low: int | None = None,
    high: int | None = None,
    choices: tuple[str, ...] = (),
    flag: str | None = None,
    unset: str = "none",
    served: object = attrs.NOTHING,
) -> T:
    """Declare a setting, as the value of a field.

    Args:
        help: sentences, with the unit.
        group: the heading in the help.
        low, high: the bounds of a number, inclusive.
        choices: by default those of the field's `Literal`; empty allows any text.
        flag: with its dashes; by default the field's name.
        unset: the meaning of None, for people.
        served: the command line's default, if it differs from the class's.
    """
    told = _Declared(
        help=help,
        group=group,
        low=low,
        high=high,
        choices=choices,
        flag=flag,
        unset=unset,
        served=served,
    )
    field: T = attrs.field(default=default, metadata={_DECLARED: told})
    return field


@cache
def declared(owner: type) -> tuple[Setting, ...]:
    """The settings of an attrs class made by `setting`, with the command line's defaults."""
    hints = get_type_hints(owner)
    return tuple(_setting_of(field, hints[field.name]) for field in attrs.fields(owner))


def _setting_of(field: attrs.Attribute[Any], hint: object) -> Setting:
    told = field.metadata[_DECLARED]
    assert isinstance(told, _Declared)
    hint, optional = _without_none(hint)
    choices = told.choices
    if get_origin(hint) is Literal:
        choices, hint = choices or get_args(hint), str
    return Setting(
        name=field.name,
        kind=KINDS[hint],
        optional=optional,
        default=field.default if told.served is attrs.NOTHING else told.served,
        help=told.help,
        group=told.group,
        low=told.low,
        high=told.high,
        choices=choices,
        flag=told.flag or "--" + field.name.replace("_", "-"),
        unset=told.unset,
    )


def _without_none(hint: object) -> tuple[object, bool]:
    """Split None off a type; say whether it was there."""
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint, False
    (one,) = (part for part in get_args(hint) if part is not type(None))
    return one, True
