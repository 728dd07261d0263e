"""What a field means: found by trying what it changes, and told by the classes' own docstrings.

Two messages that differ in one field of the wire differ in one attribute; its line under
`Attributes:` is the field's description. So a field cannot be described without a meaning, nor be
given another one than its reader gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, cast

import attrs

Step = tuple[type, str]
"""A class, and one of its attributes."""
Steps = tuple[Step, ...]
"""The way from a message to the attribute that a field is."""

_ATTRIBUTE: Final = re.compile(r"(\w+): (.+)")
_SECTION: Final = "Attributes:"
_CLAUSE: Final = re.compile(r" \((?:\d{3}|B\d+|`protocol)[^)]*\)")
"""Where a rule comes from: of use to whoever changes the code, not to a client's author."""


def attribute_docs(cls: type) -> Mapping[str, str]:
    """Read the lines under `Attributes:` in a class's docstring, each joined to one line."""
    _, _, section = (cls.__doc__ or "").partition(_SECTION)
    docs: dict[str, str] = {}
    name, indent = "", 0
    for line in section.splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        found = _ATTRIBUTE.fullmatch(text)
        if found and (not docs or depth <= indent):
            name, indent = found[1], depth
            docs[name] = found[2]
        elif text and name:
            docs[name] += f" {text}"
    return docs


def summary(cls: type) -> str:
    """Give a class's docstring up to its attributes, on one line."""
    text = (cls.__doc__ or "").partition(_SECTION)[0]
    return _CLAUSE.sub("", " ".join(text.split()))


def clean(text: str) -> str:
    """Leave out where a rule comes from."""
    return _CLAUSE.sub("", text)


def difference(one: object, other: object) -> Steps:
    """Find the first attribute in which two values of the same class differ, as deep as it goes.

    Returns:
        The way to it; empty where they are equal or no attrs instances of one class.
    """
    if type(one) is not type(other):
        return ()
    if attrs.has(type(one)):
        instance = cast("attrs.AttrsInstance", one)
        for field in attrs.fields(type(instance)):
            ours, theirs = getattr(one, field.name), getattr(other, field.name)
            if ours != theirs:
                return ((type(one), field.name), *difference(ours, theirs))
    elif isinstance(one, tuple):
        for ours, theirs in zip(one, cast("Sequence[object]", other), strict=False):
            if ours != theirs:
                return difference(ours, theirs)
    return ()


def common(ways: Iterable[Steps]) -> Steps:
    """Give the part that several ways begin with."""
    shared: list[Step] = []
    for steps in zip(*ways, strict=False):
        if len(set(steps)) > 1:
            break
        shared.append(steps[0])
    return tuple(shared)


def explain(steps: Steps) -> str:
    """Say what an attribute means: in its own words, or by what it is a part of and what it is."""
    for cls, name in reversed(steps):
        if text := attribute_docs(cls).get(name):
            said = _CLAUSE.sub("", text[0].upper() + text[1:])
            return said if (cls, name) == steps[-1] else f"{said} {summary(steps[-1][0])}"
    return ""


def locate(value: object, name: str, said: object) -> Steps:
    """Find the attribute of a name that holds a value, as deep as it may be.

    It is for fields that cannot be tried with another value. Empty where there is none.
    """
    if isinstance(value, tuple):
        return next((way for item in value if (way := locate(item, name, said))), ())
    if not attrs.has(type(value)):
        return ()
    for field in attrs.fields(type(cast("attrs.AttrsInstance", value))):
        below = getattr(value, field.name)
        if field.name == name and below == said:
            return ((type(value), name),)
        if way := locate(below, name, said):
            return ((type(value), field.name), *way)
    return ()


def explain_object(ways: Iterable[Steps]) -> str:
    """Say what an object means: by the attribute that all its fields are parts of, if there is one.

    Beside them may stand fields that are attributes of the message itself.
    """
    return explain(common(_parts(ways)))


def explain_class(ways: Iterable[Steps]) -> str:
    """Say what an object means: by the class that all its fields are attributes of."""
    classes = {way[-1][0] for way in _parts(ways)}
    return summary(classes.pop()) if len(classes) == 1 else ""


def _parts(ways: Iterable[Steps]) -> list[Steps]:
    found = [way for way in ways if way]
    return [way for way in found if len(way) > 1] or found
