"""A setting, declared once: what it is called everywhere, what it may be, and what it is for.

`setting` makes a field of an attrs class, with its default, its help and its bounds beside it. From
that, and from the field's type, `declared` reads all that flags, files, variables, printed
configurations and documents need; so a setting is added in one place.

- A field `queue_max` is `queue_max` in a file, `ANTIPHON_QUEUE_MAX` as a variable and `--queue-max`
  as a flag, unless its declaration names another flag.
- The types are whole numbers, truth values, texts, texts of a few choices, paths and lists of
  texts. Numbers, texts and paths may have None beside them, which is written as an empty text.

It reads no value and knows no setting.
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
"""What the variables of all settings begin with."""
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
    """What `setting` was told beside the default."""

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
    """One setting.

    Attributes:
        name: of the attribute, and of the key in a file.
        kind: what its values are.
        optional: None is one of them.
        default: where nothing else is said.
        help: what it is for, as sentences.
        group: under which heading it is shown.
        low: the least number, or None.
        high: the greatest number, or None.
        choices: all texts that it may be; empty where any will do.
        flag: on the command line, with its dashes.
        unset: what None stands for, for people.
    """

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
        """What it may be, in a few words; empty where any value of its kind will do."""
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
        default: of the attribute.
        help: what it is for, as sentences, with its unit.
        group: under which heading it is shown.
        low: the least number that is taken.
        high: the greatest.
        choices: the texts that are taken; by default those of the field's `Literal`, if it is one.
        flag: with its dashes; by default the field's name with dashes.
        unset: what None stands for, for people.
        served: the default of the command line, where it is another than that of the class.
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
    """Read the settings of a class, in their order.

    Args:
        owner: an attrs class, each field of it made by `setting`.

    Returns:
        The settings; the default of each is that of the command line.
    """
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
    """Split a type into what it is beside None, and whether None is in it."""
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint, False
    (one,) = (part for part in get_args(hint) if part is not type(None))
    return one, True
