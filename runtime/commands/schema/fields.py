"""JSON Schema as the rows of a table: one for each field, with its path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from protocol.wire.schema.wire import Message

Json = Mapping[str, Any]

Objects = Mapping[str, tuple[str, Json]]
"""Objects that are written by themselves, by their name: where, and their schema."""

SHARED_FIELDS_MIN: Final = 6
"""An object of fewer fields is written in place, however often it occurs."""


@attrs.frozen(kw_only=True)
class Row:
    """A field: its path from the message, its type with its limits, its default, its meaning."""

    name: str
    type: str
    default: str
    meaning: str


def shared_objects(messages: tuple[Message, ...]) -> Objects:
    """Find the server's objects that occur in several messages, to be written once."""
    seen: list[tuple[str, Json]] = []
    for message in messages:
        if message.sender == "server":
            for kind in message.schema.get("oneOf", [message.schema]):
                seen += [
                    (name, below)
                    for name, below in kind["properties"].items()
                    if len(below.get("properties", ())) >= SHARED_FIELDS_MIN
                ]
    dialect = messages[0].dialect
    return {
        name: (f"the-object-{name}-{dialect}", schema)
        for name, schema in seen
        if seen.count((name, schema)) > 1
    }


def rows(schema: Json, *, sender: str, objects: Objects, at: str = "") -> Iterator[Row]:
    """Write the fields of an object that stands `at` a path, and of the objects in it.

    `sender` is the message's: the server keeps the limits, so they are left out of its own
    messages. `objects` are those that are written elsewhere.
    """
    required = schema.get("required", ())
    group = [each["required"][0] for each in schema.get("anyOf", ()) if "required" in each]
    for name, below in schema["properties"].items():
        if "const" in below and name == "type" and not at:
            continue
        is_elsewhere = name in objects and objects[name][1] == below
        yield Row(
            name=f"{at}{name}",
            type=_type(below, sender),
            default=_default(below, name, required, group),
            meaning=_meaning(
                below, objects[name][0] if is_elsewhere else "", name in required, sender
            ),
        )
        if not is_elsewhere:
            yield from _below(below, sender, objects, f"{at}{name}")


def _below(schema: Json, sender: str, objects: Objects, at: str) -> Iterator[Row]:
    """Write the contents of a field: an object, or the objects of an array, one kind or several."""
    for kind in schema.get("anyOf", ()):
        yield from _below(kind, sender, objects, at)
    if "items" in schema:
        yield from _below(schema["items"], sender, objects, f"{at}[]")
    for kind in schema.get("oneOf", ()):
        tag = schema["x-antiphon-tag"]
        word = kind["properties"][tag]["const"]
        own = {name: below for name, below in kind["properties"].items() if name != tag}
        meaning = kind.get("description", "")
        word = f"`{json.dumps(word)}`"
        yield Row(name=f"{at}.{tag}", type=word, default="required", meaning=meaning)
        yield from rows({**kind, "properties": own}, sender=sender, objects=objects, at=f"{at}.")
    if "properties" in schema:
        yield from rows(schema, sender=sender, objects=objects, at=f"{at}.")


def _default(schema: Json, name: str, required: Sequence[str], group: Sequence[str]) -> str:
    if name in required:
        return "required"
    if name in group:
        return "required" if name == group[0] else f"in place of `{group[0]}`"
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _meaning(schema: Json, elsewhere: str, is_required: bool, sender: str) -> str:
    text = str(schema.get("description", ""))
    if elsewhere:
        text = f"{text} See [its fields](#{elsewhere})."
    if modes := schema.get("x-antiphon-ignored-in"):
        text += f" Not looked at in {', '.join(f'`mode={mode}`' for mode in modes)}."
    if sender == "server" and not is_required:
        text += " Not always there."
    if schema.get("additionalProperties") is False:
        has_fields = bool(schema["properties"])
        text += " Other fields are refused." if has_fields else " Must be empty here."
    if not text and _single(schema) is not None:
        text = "Always this." if sender == "server" else "There is no other value; it may be said."
    return text.strip()


def _single(schema: Json) -> Any:
    if "const" in schema:
        return schema["const"]
    values = [value for value in schema.get("enum", ()) if value is not None]
    return values[0] if len(values) == 1 else None


def _type(schema: Json, sender: str) -> str:
    single = _single(schema)
    if single is not None:
        return f"`{json.dumps(single)}`"
    if "anyOf" in schema and "properties" not in schema:
        kinds = [_type(kind, sender) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(word)}`" for word in schema["enum"] if word is not None)
    kinds = schema.get("type", "any")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    text = _plain(schema, next((kind for kind in kinds if kind != "null"), "null"), sender)
    return f"{text} or null" if sender == "server" and "null" in kinds[1:] else text


def _plain(schema: Json, kind: str, sender: str) -> str:
    if "contentEncoding" in schema:
        return "base64 of " + " or ".join(schema.get("x-antiphon-media", ["bytes"]))
    if kind == "array":
        bounds = ""
        if "maxItems" in schema:
            bounds = f" of {schema.get('minItems', 0)} to {schema['maxItems']}"
        return f"array{bounds}: {_type(schema['items'], sender)}"
    if sender == "server" and "examples" in schema:
        return f"{kind}, such as " + ", ".join(
            f"`{json.dumps(word)}`" for word in schema["examples"]
        )
    if sender == "server" or kind not in {"string", "integer", "number"}:
        return kind
    return f"{kind}{_limits(schema)}"


def _limits(schema: Json) -> str:
    if "maxLength" in schema:
        if schema["maxLength"] == 0:
            return ", empty"
        low = f"{schema['minLength']} to" if "minLength" in schema else "up to"
        return f", {low} {schema['maxLength']} characters"
    high = schema.get("maximum")
    if "exclusiveMinimum" in schema:
        return f", above {schema['exclusiveMinimum']:g} up to {high:g}"
    if "minimum" in schema:
        low = schema["minimum"]
        return f", {low:g} and more" if high is None else f", {low:g} to {high:g}"
    return ""
