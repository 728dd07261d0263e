"""The schema of a message, from the rows of its table (`protocol.wire`).

The description of a field is its row's, or the line of its attribute under `Attributes:` in the
class's docstring. For several tables of one type the schema has their common part.

- An explicit null counts as absent, so a client's field that may be absent may be null.
- A field that is required under one of several names is not required under any one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args, get_type_hints

import attrs

from ..field import REQUIRED, Field
from ..kinds import Kind
from ..nested import Either, Items, One, Variants, tables_in
from ..table import Object, Row, Table

Schema = dict[str, Any]

SHOWN: Final[Mapping[str, str]] = {
    "session_id": "sess_5f1d0c6a9b27",
    "response_id": "resp_0c9e41d7a355",
    "input_id": "input_a41be2f7708d",
    "ticket_id": "ticket_3d8a60c1e94f",
    "recording_id": "20260101T090000-1f6c2a",
    "client_reason": "user_stop",
    "text": "Hello",
    "instructions": "You are a helpful assistant.",
    "model": "tiny",
    "message": "$.input.audio: required field is missing",
}
"""Example texts by attribute; other attributes show their own name."""
_SILENCE: Final = "AAAAAAAAAAAAAAAAAAAAAA=="


_ATTRIBUTE: Final = re.compile(r"(\w+): (.+)")
_SECTION: Final = "Attributes:"
_CLAUSE: Final = re.compile(r" \((?:\d{3}|B\d+|`protocol)[^)]*\)")
"""The source of a rule: for readers of the code, not for a client's author."""


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
    """Return a class's docstring up to its attributes, on one line."""
    text = (cls.__doc__ or "").partition(_SECTION)[0]
    return _CLAUSE.sub("", " ".join(text.split()))


def doc_of(cls: Any, path: str) -> str:
    """Return an attribute's description: its own line, or that of the containing attribute."""
    said = ""
    for name in path.removeprefix("^").split("."):
        if not attrs.has(cls):
            break
        text = attribute_docs(cls).get(name, "")
        said = _CLAUSE.sub("", text[0].upper() + text[1:]) if text else said
        hint = get_type_hints(cls).get(name)
        cls = next(filter(attrs.has, get_args(hint)), hint)
    return said


# -- a client's message -------------------------------------------------------------------------


def request_schema(table: Table) -> Schema:
    """Describe a client's message."""
    return _asked(table.shape.rows, table.cls, "", _tags(table), is_closed=bool(table.shape.closed))


def _tags(table: Table) -> dict[str, Schema]:
    return {name: {"type": "string", "const": word} for name, word in table.tag.items()}


def _asked(
    rows: Sequence[Row], cls: type, prefix: str, tags: Mapping[str, Schema], *, is_closed: bool
) -> Schema:
    """Describe an object that clients send; required fields stand first."""
    first: dict[str, Schema] = dict(tags)
    then: dict[str, Schema] = {}
    required = [*tags]
    group: list[str] = []
    for row in newest(rows):
        if isinstance(row, Object):
            below = f"{prefix}{row.attr}." if row.attr else prefix
            made = _asked(row.rows, cls, below, {}, is_closed=bool(row.closed))
            text = row.doc or (doc_of(cls, f"{prefix}{row.attr}") if row.attr else "")
            is_required = row.is_required
        else:
            made, text = _asked_value(row), _meaning(row, cls, prefix)
            is_required = row.default is REQUIRED
        if text:
            made["description"] = text
        required += [row.name] if is_required and len(row.names) == 1 else []
        group += row.names if is_required and len(row.names) > 1 else ()
        for name in row.names:
            one = _second(made, row.name) if name != row.name else made
            (first if is_required else then)[name] = (
                one if is_required and len(row.names) == 1 else _or_null(one)
            )
    schema: Schema = {"type": "object", "properties": {**first, **then}}
    if required:
        schema["required"] = required
    if group:
        schema["anyOf"] = [{"required": [name]} for name in group]
    if is_closed:
        schema["additionalProperties"] = False
    return schema


def newest(rows: Iterable[Row]) -> Iterator[Field | Object]:
    """List the fields of a session that begins now."""
    for row in rows:
        if isinstance(row, Field | Object):
            yield row


def _asked_value(row: Field) -> Schema:
    made = _kind(row.kind)
    attribute = row.attribute.rpartition(".")[2].removeprefix("^")
    if type(row.default) in {bool, int, float} or isinstance(row.default, str):
        made["default"] = row.default
    is_words = made.get("type") == "string" and not {"enum", "contentEncoding"} & made.keys()
    if row.example is not None:
        made["examples"] = [row.example]
    elif is_words and attribute in SHOWN:
        made["examples"] = [SHOWN[attribute]]
    if row.aside_in:
        made["x-antiphon-ignored-in"] = list(row.aside_in)
    if row.after is not None:
        made["x-antiphon-after"] = row.after
    return made


def _meaning(row: Field, cls: type, prefix: str) -> str:
    if row.doc:
        return row.doc
    at = row.attribute if row.attribute.startswith("^") else prefix + row.attribute
    said = doc_of(cls, at) if row.attribute else ""
    if row.kind.cls is not None:
        said = f"{said} {summary(row.kind.cls)}"
    if row.kind.schema.get("maxLength") == 0:
        said = said or "Must be empty here."
    return f"{said} Ignored if `{row.after}` is present." if row.after else said


def _second(schema: Schema, first: str) -> Schema:
    text = f"Another name of `{first}`, which wins."
    return {**schema, "x-antiphon-same": first, "description": text}


def _or_null(schema: Schema) -> Schema:
    made = dict(schema)
    if isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    if "enum" in made:
        made["enum"] = [*made["enum"], None]
    if "const" in made:
        made["enum"] = [made.pop("const"), None]
    if "anyOf" in made and "properties" not in made:
        made["anyOf"] = [*made["anyOf"], {"type": "null"}]
    return made


def _kind(kind: Kind) -> Schema:
    match kind:
        case Items(item=item, count_max=most, count_min=fewest):
            least = {"minItems": fewest} if fewest else {}
            return {"type": "array", "items": _kind(item), "maxItems": most, **least}
        case Either(string=string, items=items):
            return {"anyOf": [_kind(string), _kind(items)]}
        case One(table=table):
            return {**request_schema(table), **kind.schema}
        case Variants(tag=tag, tables=tables):
            kinds = [
                {**request_schema(table), "description": table.doc or summary(table.cls)}
                for table in tables.values()
            ]
            return {"type": "object", "oneOf": kinds, "x-antiphon-tag": tag}
    return dict(kind.schema)


# -- a server's message -------------------------------------------------------------------------


def answer_schema(tables: Sequence[Table]) -> Schema:
    """Describe a server's message of one type: the fields of its variants."""
    return _merge([_said(table.shape.written, table.cls, "", _variant(table)) for table in tables])


def _variant(table: Table) -> dict[str, Schema]:
    """Describe how a server's message differs from others: by its kind, in addition to its type."""
    tags = _tags(table)
    for name, tag in tags.items():
        if name != "type":
            tag["description"] = f"`{tag['const']}`: {summary(table.cls)}"
    return tags


def _said(
    rows: Sequence[Field | Object], cls: type, prefix: str, tags: Mapping[str, Schema]
) -> Schema:
    """Describe an object that the server sends; fields that are always present stand first."""
    always: dict[str, Schema] = dict(tags)
    at_times: dict[str, Schema] = {}
    for row in rows:
        if isinstance(row, Object):
            below = f"{prefix}{row.attr}." if row.attr else prefix
            made = _said(row.shape.written, cls, below, {})
            text = row.doc or (doc_of(cls, f"{prefix}{row.attr}") if row.attr else "")
        else:
            made, text = _told(row.kind), _meaning(row, cls, prefix)
        if text:
            made["description"] = text
        (at_times if row.omit else always)[row.name] = made
    schema: Schema = {"type": "object", "properties": {**always, **at_times}}
    return {**schema, "required": [*always]} if always else schema


def _told(kind: Kind) -> Schema:
    match kind:
        case Items(item=item):
            return {"type": "array", "items": _told(item)}
        case One(table=table):
            return {**_said(table.shape.written, table.cls, "", _tags(table)), **kind.schema}
    return dict(kind.schema)


def _merge(schemas: Sequence[Schema]) -> Schema:
    if len(schemas) == 1:
        return schemas[0]
    names = dict.fromkeys(name for schema in schemas for name in schema["properties"])
    required = [name for name in names if all(name in schema["required"] for schema in schemas)]
    properties = {}
    for name in (*required, *(name for name in names if name not in required)):
        found = [schema["properties"][name] for schema in schemas if name in schema["properties"]]
        words = {one["const"]: one.get("description", "") for one in found if "const" in one}
        properties[name] = found[0]
        if len(words) > 1:
            text = " ".join(words.values())
            properties[name] = {"type": "string", "enum": [*words], "description": text}
    return {"type": "object", "properties": properties, "required": required}


def answer_example(table: Table) -> dict[str, Any]:
    """Make a body of a server's message; its sound is silence."""
    return {**table.tag, **_example(table.shape.written)}


def _example(rows: Sequence[Field | Object]) -> dict[str, Any]:
    return {
        row.name: _example(row.shape.written) if isinstance(row, Object) else _shown(row)
        for row in rows
        if not (row.omit and isinstance(row, Field) and row.default is False)
    }


def _shown(row: Field) -> Any:
    schema = row.kind.schema
    if row.example is not None:
        return row.example
    if isinstance(row.kind, One):
        return _example(row.kind.table.shape.written)
    if isinstance(row.kind, Items):
        return [answer_example(table) for table in tables_in(row.kind)]
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    name = row.attribute.rpartition(".")[2].removeprefix("^")
    kind = schema.get("type")
    kinds = {"boolean": False, "integer": 1, "number": 1.5, "object": {}, "array": [], "null": None}
    if "contentEncoding" in schema:
        return _SILENCE
    kind = kind[0] if isinstance(kind, list) else kind
    return kinds[kind] if kind in kinds else SHOWN.get(name, name)
