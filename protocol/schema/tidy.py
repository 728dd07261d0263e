"""From what the describing runs noted to a JSON Schema that can be published.

- An explicit null counts as absent, so a client's field that may be absent may be null.
- A field that must be there under one of several names is not required under any one of them.
- What objects of all kinds have stands in each kind, so that each can be read by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .values import Schema

_RENAMED: Final[Mapping[str, str]] = {
    "x-media": "x-antiphon-media",
    "x-tag": "x-antiphon-tag",
    "x-ignored-in": "x-antiphon-ignored-in",
}
_NOTES: Final = frozenset({"x-aliases", "x-ignored", "x-null"})
_LISTS: Final = ("anyOf", "oneOf")


def tidy(schema: Schema, *, gaps_are_null: bool) -> Schema:
    """Make a schema of the notes.

    Args:
        schema: with the notes of `sketch` and `answers` in it; it is not changed.
        gaps_are_null: whether null stands for a field that is absent.

    Returns:
        The schema, in draft 07.
    """
    made = {_RENAMED.get(key, key): value for key, value in schema.items() if key not in _NOTES}
    if "x-tag" in schema:
        return _tidy_kinds(made, gaps_are_null=gaps_are_null)
    if "items" in made:
        made["items"] = tidy(made["items"], gaps_are_null=gaps_are_null)
    for name in _LISTS:
        if name in made:
            made[name] = [tidy(below, gaps_are_null=gaps_are_null) for below in made[name]]
    if made.get("minimum") is not None and made.get("minimum") == made.get("maximum"):
        made["const"] = made.pop("minimum")
        del made["maximum"]
    if schema.get("maxLength") == 0:
        made.setdefault("description", "Must be empty here.")
    if schema.get("x-ignored"):
        made["description"] = "Known, and not looked at."
    if "properties" in made:
        _tidy_object(made, gaps_are_null=gaps_are_null)
    return made


def _tidy_object(schema: Schema, *, gaps_are_null: bool) -> None:
    required = set(schema.pop("required"))
    properties: dict[str, Schema] = {}
    groups: list[list[str]] = []
    for name, below in schema["properties"].items():
        names = below.get("x-aliases", [name])
        if required.intersection(names) and len(names) > 1 and names not in groups:
            groups.append(names)
        properties[name] = tidy(below, gaps_are_null=gaps_are_null)
        _note_alias(name, names, schema["properties"], properties[name])
        is_gap = gaps_are_null and not (name in required and len(names) == 1)
        if is_gap or below.get("x-null"):
            _allow_null(properties[name])
    first = sorted(properties, key=lambda name: not (name in required or _is_grouped(name, groups)))
    alone = [name for name in properties if name in required and not _is_grouped(name, groups)]
    schema["properties"] = {name: properties[name] for name in first}
    if alone:
        schema["required"] = alone
    if groups:
        choices = [[{"required": [name]} for name in names] for names in groups]
        schema["anyOf" if len(groups) == 1 else "allOf"] = (
            choices[0] if len(groups) == 1 else [{"anyOf": choice} for choice in choices]
        )


def _is_grouped(name: str, groups: list[list[str]]) -> bool:
    return any(name in names for names in groups)


def _note_alias(name: str, names: list[str], notes: Mapping[str, Schema], made: Schema) -> None:
    """Say of a field which other it is, or which other comes before it."""
    first = names[0]
    if name == first:
        return
    if notes[name] == notes[first]:
        made["x-antiphon-same"] = first
        made["description"] = f"Another name of `{first}`, which wins."
    else:
        made["x-antiphon-after"] = first
        made["description"] = (
            f"{made.get('description', '')} Not looked at beside `{first}`.".strip()
        )


def _tidy_kinds(schema: Schema, *, gaps_are_null: bool) -> Schema:
    shared = schema.pop("properties", {})
    required = schema.pop("required", [])
    kinds = []
    for kind in schema["oneOf"]:
        tag = schema["x-antiphon-tag"]
        whole: dict[str, Any] = {
            **kind,
            "properties": {tag: kind["properties"][tag], **shared, **kind["properties"]},
            "required": list(dict.fromkeys([*required, *kind["required"]])),
        }
        kinds.append(tidy(whole, gaps_are_null=gaps_are_null))
    return {**schema, "oneOf": kinds}


def _allow_null(schema: Schema) -> None:
    if "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    if "const" in schema:
        schema["enum"] = [schema.pop("const"), None]
    if "anyOf" in schema and "properties" not in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
