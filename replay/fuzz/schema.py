"""Whether a server's message is one that the wire protocols describe.

The description is `protocol.wire.schema`, which reads the dialects' own tables. Here it is closed:
a message has the fields that are described and no others, so that nothing is sent that no reader
can know of. Only what the server's schemas use of JSON Schema is looked at; a test holds this to a
full validator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final

from protocol.values.state import Course
from protocol.wire.schema.wire import Message, describe

Json = Mapping[str, Any]

_KINDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


@cache
def described(dialect: str) -> tuple[Message, ...]:
    """A dialect's description, made once because it is slow."""
    return describe(dialect)


def problem(dialect: str, course: Course, body: Json) -> str:
    """The first undocumented part of a server's message, with its path, or empty."""
    found = "$.type: no such message of the server"
    for message in described(dialect):
        if message.sender != "server" or course not in message.courses:
            continue
        if message.kind == body.get("type"):
            found = next(violations(message.schema, body, "$"), "")
            if not found:
                return ""
    return found


def violations(schema: Json, value: Any, path: str) -> Iterator[str]:
    """The differences of a value at `path` from a schema of `protocol.wire.schema`."""
    if "oneOf" in schema:
        found = [list(violations(below, value, path)) for below in schema["oneOf"]]
        if all(found):
            yield min(found, key=len)[0]
        return
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_KINDS[kind](value) for kind in kinds):
        yield f"{path}: not of type {' or '.join(kinds)}"
        return
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{path}: not the one value that it can have"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{path}: not one of the values that it can have"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _range(schema, value, path)
    if isinstance(value, dict) and "properties" in schema:
        yield from _fields(schema, value, path)


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def _range(schema: Json, value: float, path: str) -> Iterator[str]:
    low, high, above = (schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    too_low = low is not None and value < low
    if too_low or (high is not None and value > high) or (above is not None and value <= above):
        yield f"{path}: out of its range"


def _fields(schema: Json, value: Json, path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: missing"
    for name, below in value.items():
        if name not in schema["properties"]:
            yield f"{path}.{name[:64]}: not described"
        else:
            yield from violations(schema["properties"][name], below, f"{path}.{name}")
