"""Example bodies: the client's made from its schema, the server's as it wrote them.

Base64 is shown by its content, `<base64 image/jpeg>`: real files would hide the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def example(schema: Json) -> dict[str, Any]:
    """Make a body of a client's message from its schema: required fields, and telling defaults.

    Its base64 is replaced by a name.
    """
    required = _required(schema)
    made: dict[str, Any] = {}
    for name, below in schema["properties"].items():
        is_shown = name in required or _says_something(below)
        if is_shown and "x-antiphon-same" not in below and "x-antiphon-after" not in below:
            made[name] = _value(below)
    return made


def _required(schema: Json) -> frozenset[str]:
    first = [group["required"][0] for group in schema.get("anyOf", ())[:1] if "required" in group]
    return frozenset((*schema.get("required", ()), *first))


def _says_something(schema: Json) -> bool:
    """Whether a field that may be absent is worth showing."""
    if "properties" in schema:
        return any(map(_says_something, schema["properties"].values()))
    return bool({"default", "contentEncoding", "examples", "items"} & schema.keys())


def _value(schema: Json) -> Any:
    if "const" in schema:
        return schema["const"]
    if "contentEncoding" in schema:
        return _named(schema)
    if "examples" in schema:
        return schema["examples"][0]
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if "oneOf" in schema:
        return _value(schema["oneOf"][0])
    if "properties" in schema:
        return example(schema)
    if "anyOf" in schema:
        return _value(schema["anyOf"][0])
    if "items" in schema:
        return [_value(schema["items"])]
    return schema.get("minimum", 1)


def shown(body: Json, schema: Json) -> dict[str, Any]:
    """Show a written body, with names for its base64."""
    return {name: _shown(value, schema["properties"].get(name, {})) for name, value in body.items()}


def _shown(value: Any, schema: Json) -> Any:
    if isinstance(value, dict):
        return shown(value, {"properties": {}, **schema})
    return _named(schema) if value and "contentEncoding" in schema else value


def _named(schema: Json) -> str:
    return f"<base64 {schema.get('x-antiphon-media', ['bytes'])[0]}>"
