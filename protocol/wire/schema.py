"""The messages of a dialect as JSON Schema (draft 07) and as examples, from the rows of its tables.

`describe` gives all messages of a dialect, for `antiphon dev schema` and docs/protocol.md. The
examples of a server's message are as its dialect writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_type_hints

import attrs

from ..values.limits import Mode
from ..values.messages import ServerMessage
from ..values.requests import Request
from ..values.state import TRANSITIONS, SessionKind, session_kind_of
from .codec import FieldType
from .dialects import DIALECTS, MODES_OF
from .table import (
    REQUIRED,
    Dialect,
    Field,
    Items,
    Object,
    ObjectType,
    Row,
    Rule,
    Table,
    TextOrArray,
    Variants,
    tables_in,
)

# -- The schema of a message, from the rows of its table (`protocol.wire`) ------------------------
#
# The description of a field is its row's, or the line of its attribute under `Attributes:` in the
# class's docstring. For several tables of one type the schema has their common part.
#
# - An explicit null counts as absent, so a client's field that may be absent may be null.
# - A field that is required under one of several names is not required under any one of them.

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
    doc = ""
    for name in path.removeprefix("^").split("."):
        if not attrs.has(cls):
            break
        text = attribute_docs(cls).get(name, "")
        doc = _CLAUSE.sub("", text[0].upper() + text[1:]) if text else doc
        hint = get_type_hints(cls).get(name)
        cls = next(filter(attrs.has, get_args(hint)), hint)
    return doc


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
    for row in rows:
        if isinstance(row, Rule):
            continue
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
    doc = doc_of(cls, at) if row.attribute else ""
    if row.kind.cls is not None:
        doc = f"{doc} {summary(row.kind.cls)}"
    if row.kind.schema.get("maxLength") == 0:
        doc = doc or "Must be empty here."
    return f"{doc} Ignored if `{row.after}` is present." if row.after else doc


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


def _kind(kind: FieldType) -> Schema:
    match kind:
        case Items(item=item, count_max=most, count_min=fewest):
            least = {"minItems": fewest} if fewest else {}
            return {"type": "array", "items": _kind(item), "maxItems": most, **least}
        case TextOrArray(string=string, items=items):
            return {"anyOf": [_kind(string), _kind(items)]}
        case ObjectType(table=table):
            return {**request_schema(table), **kind.schema}
        case Variants(tag=tag, tables=tables):
            return _of_kinds(tag, tables, {word: request_schema(it) for word, it in tables.items()})
    return dict(kind.schema)


def _of_kinds(tag: str, tables: Mapping[str, Table], kinds: Mapping[str, Schema]) -> Schema:
    """Describe an object of several kinds, each of which has its own word in a field."""
    described = []
    for word, table in tables.items():
        named = {tag: {"type": "string", "const": word}}
        properties = {**kinds[word]["properties"], **named}
        text = table.doc or summary(table.cls)
        described.append({**kinds[word], "properties": properties, "description": text})
    return {"type": "object", "oneOf": described, "x-antiphon-tag": tag}


# -- a server's message -------------------------------------------------------------------------


def answer_schema(tables: Sequence[Table]) -> Schema:
    """Describe a server's message of one type: the fields of its variants."""
    return _merge([_answered(it.shape.written, it.cls, "", _variant(it)) for it in tables])


def _variant(table: Table) -> dict[str, Schema]:
    """Describe how a server's message differs from others: by its kind, in addition to its type."""
    tags = _tags(table)
    for name, tag in tags.items():
        if name != "type":
            tag["description"] = f"`{tag['const']}`: {summary(table.cls)}"
    return tags


def _answered(
    rows: Sequence[Field | Object], cls: type, prefix: str, tags: Mapping[str, Schema]
) -> Schema:
    """Describe an object that the server sends; fields that are always present stand first."""
    always: dict[str, Schema] = dict(tags)
    at_times: dict[str, Schema] = {}
    for row in rows:
        if isinstance(row, Object):
            below = f"{prefix}{row.attr}." if row.attr else prefix
            made = _answered(row.shape.written, cls, below, {})
            text = row.doc or (doc_of(cls, f"{prefix}{row.attr}") if row.attr else "")
        else:
            made, text = _answered_value(row.kind), _meaning(row, cls, prefix)
        if text:
            made["description"] = text
        (at_times if row.omit else always)[row.name] = made
    schema: Schema = {"type": "object", "properties": {**always, **at_times}}
    return {**schema, "required": [*always]} if always else schema


def _answered_value(kind: FieldType) -> Schema:
    match kind:
        case Items(item=item):
            return {"type": "array", "items": _answered_value(item)}
        case ObjectType(table=table):
            return {**_answered(table.shape.written, table.cls, "", _tags(table)), **kind.schema}
        case Variants(tag=tag, tables=tables):
            answered = {
                word: _answered(it.shape.written, it.cls, "", {}) for word, it in tables.items()
            }
            return _of_kinds(tag, tables, answered)
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
        row.name: _example(row.shape.written) if isinstance(row, Object) else _shown_field(row)
        for row in rows
        if not (row.omit and isinstance(row, Field) and row.default is False)
    }


def _shown_field(row: Field) -> Any:
    schema = row.kind.schema
    if row.example is not None:
        return row.example
    if isinstance(row.kind, ObjectType | Variants):
        return answer_example(tables_in(row.kind)[0])
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


# -- All messages of the served dialects, as JSON Schema (draft 07) -------------------------------
#
# `describe` reads the tables of a dialect (`protocol.wire`) for each kind of session; a message
# that is the same in several kinds is one.
#
# Keys in addition to JSON Schema's own: `x-antiphon-media` (the content of base64),
# `x-antiphon-tag` (the field that says which of `oneOf` an object is), `x-antiphon-same` (the
# field of which this is another name), `x-antiphon-after` (the field that, if present, makes this
# one ignored), `x-antiphon-ignored-in` (modes in which a field is known and ignored).

_SERVER_CLASSES: Final[tuple[type, ...]] = get_args(ServerMessage)
REQUEST_DIALECT: Final = "legacy-chat"
"""A connection of this dialect is one request, and its only message has no type."""


@attrs.frozen(kw_only=True)
class Message:
    """A message of a dialect.

    Attributes:
        kind: the wire's type; empty without one.
        session_kinds: in which it may be sent; it may differ in others.
        canonical: the class of the message in every dialect.
        request: the key of a client's message in the reception table.
        schema: of the body.
        examples: bodies of a server's message, as they are sent; audio is silence.
    """

    dialect: str
    sender: Literal["client", "server"]
    kind: str
    session_kinds: tuple[SessionKind, ...]
    canonical: tuple[type, ...]
    request: Request | None = None
    schema: Schema
    examples: tuple[Mapping[str, object], ...] = ()

    @property
    def description(self) -> str:
        """The description of its canonical class."""
        return " ".join(dict.fromkeys(summary(cls) for cls in self.canonical))


def describe(name: str) -> tuple[Message, ...]:
    """Describe all messages of a dialect: the client's, then the server's, kind by kind."""
    found: list[Message] = []
    for session_kind in SessionKind:
        modes = [mode for mode in MODES_OF[name] if session_kind is _session_kind(name, mode)]
        if modes:
            found += _messages(DIALECTS[name], session_kind, modes[0])
    return tuple(_join(found))


def session_kinds(name: str) -> tuple[SessionKind, ...]:
    """List the session kinds of a dialect."""
    return tuple(dict.fromkeys(_session_kind(name, mode) for mode in MODES_OF[name]))


def senders(
    messages: tuple[Message, ...], session_kind: SessionKind
) -> Mapping[type, tuple[str, ...]]:
    """Return the frame types of each server's message in a session kind, by its class."""
    frames: dict[type, tuple[str, ...]] = {}
    for trigger in dict.fromkeys(
        trigger for row in TRANSITIONS[session_kind].values() for trigger in row
    ):
        own = [
            message.kind
            for message in messages
            if message.sender == "server" and session_kind in message.session_kinds
            if trigger in message.canonical
        ]
        frames[trigger] = tuple(dict.fromkeys(own))
    return frames


def _session_kind(name: str, mode: Mode) -> SessionKind:
    return session_kind_of(mode, is_request=name == REQUEST_DIALECT)


def _join(messages: list[Message]) -> list[Message]:
    """Join messages that are the same in several session kinds."""
    joined: list[Message] = []
    for message in messages:
        for index, other in enumerate(joined):
            if (
                attrs.evolve(message, session_kinds=other.session_kinds, examples=other.examples)
                == other
            ):
                both = (*other.session_kinds, *message.session_kinds)
                joined[index] = attrs.evolve(other, session_kinds=both)
                break
        else:
            joined.append(message)
    return joined


def _messages(dialect: Dialect, session_kind: SessionKind, mode: Mode) -> Iterator[Message]:
    for request, table in dialect.requests(mode):
        yield Message(
            dialect=dialect.name,
            sender="client",
            kind=table.kind,
            session_kinds=(session_kind,),
            canonical=table.classes,
            request=request,
            schema=request_schema(table),
        )
    triggers = {trigger for row in TRANSITIONS[session_kind].values() for trigger in row}
    answers = sorted(
        (table for table in dialect.answers(mode) if triggers.intersection(table.classes)),
        key=lambda table: _SERVER_CLASSES.index(table.cls),
    )
    for kind in dict.fromkeys(table.kind for table in answers):
        tables = [table for table in answers if table.kind == kind]
        yield Message(
            dialect=dialect.name,
            sender="server",
            kind=kind,
            session_kinds=(session_kind,),
            canonical=tuple(
                cls for cls in _SERVER_CLASSES if any(cls in table.classes for table in tables)
            ),
            schema=answer_schema(tables),
            examples=tuple(map(answer_example, tables)),
        )
