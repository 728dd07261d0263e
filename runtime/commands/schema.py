"""`antiphon dev schema`: the wire protocols as a document, for tools and for people.

The protocol reference for authors of clients is `docs/protocol.md`. All facts come from
`schema_document` and `protocol.wire.schema`, as in the AsyncAPI document, and so from the server's
own tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import click
import orjson
import yaml

from protocol.machine.kind import CLOSE_CODES
from protocol.values.errors import (
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    MEANINGS,
    LocalProtocolError,
    close_code,
    error_type,
)
from protocol.values.messages import Closed, EndReason
from protocol.values.state import SessionKind
from protocol.wire.dialects import DIALECTS as DIALECTS_SERVED
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema import Message, describe, example, session_kinds, shown

from .schema_document import (
    CHANNELS,
    DIALECTS,
    END_CLOSES,
    ENDS,
    RULES,
    SESSION_KINDS,
    Channel,
    asyncapi,
    states,
)

# -- JSON Schema as rows ---------------------------------------------------------------------------


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


# -- the protocol reference ------------------------------------------------------------------------


VERDICTS: Final[Mapping[str, str]] = {"accept": "taken", "keep": "kept for its turn"}
"""The words for the reception table's verdicts; the others are error codes."""
TITLES: Final[Mapping[SessionKind, str]] = {
    SessionKind.DUPLEX: "Full duplex",
    SessionKind.CHAT: "Chat",
    SessionKind.REQUEST: "One request",
    SessionKind.TRANSCRIPTION: "Transcription",
}

HEAD: Final = """# The wire protocols

This page is for authors of clients. `antiphon dev schema --format markdown` writes it from the
tables by which the server reads and writes messages and changes its state, and a test compares
them; do not edit it. For tools, `antiphon dev schema --format json`, or `yaml`, writes the same as
AsyncAPI 3.
"""


def reference() -> str:
    """Write the whole page."""
    parts = [HEAD, _endpoints(), "## What holds everywhere\n", _list(RULES)]
    for channel in CHANNELS:
        for name in channel.dialects:
            parts += _dialect(channel, name)
    return "\n".join([*parts, *_codes()])


def _list(lines: tuple[str, ...]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    written = [head, ("---",) * len(head), *lines]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in written)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _code(words: object) -> str:
    return f"`{words}`"


def _endpoints() -> str:
    lines = []
    for channel in CHANNELS:
        asked = [f"{key}={schema.get('const', '')}" for key, schema in channel.query.items()]
        query = f"?{'&'.join(asked)}" if asked else ""
        for name in channel.dialects:
            modes = ", ".join(map(_code, MODES_OF[name]))
            inits = (message for message in describe(name) if message.request == "init")
            lines.append(
                (
                    f"[`{name}`](#{name})",
                    _code(channel.address + query),
                    modes,
                    _first(next(inits, None)),
                    DIALECTS[name],
                )
            )
    return "## Where to connect\n\n" + _table(
        ("dialect", "endpoint", "modes", "first message", "what for"), lines
    )


def _first(message: Message | None) -> str:
    if message is None:
        return "none: the server speaks first"
    return _code(message.kind) if message.kind else "the request"


# -- a dialect ----------------------------------------------------------------------------------


def _dialect(channel: Channel, name: str) -> Iterator[str]:
    messages = describe(name)
    objects = shared_objects(messages)
    yield f"## `{name}`\n\n{DIALECTS[name]}\n\n{channel.says}\n"
    for session_kind in session_kinds(name):
        title = f"### {TITLES[session_kind]}: the order of events (`{name}`)"
        yield f"{title}\n\n{SESSION_KINDS[session_kind]}\n"
        yield from _session_kind(messages, session_kind)
    for sender, title in (("client", "What the client says"), ("server", "What the server says")):
        yield f"### {title} (`{name}`)\n"
        for message in messages:
            if message.sender == sender:
                yield from _message(message, objects)
    for title, (_, schema) in objects.items():
        yield f"#### The object `{title}` (`{name}`)\n\n{schema.get('description', '')}\n"
        yield from _fields(schema, "server", {})


def _session_kind(messages: tuple[Message, ...], session_kind: SessionKind) -> Iterator[str]:
    found = states(messages, session_kind)
    moves = [
        f"    {move['from']} --> {move['to']}: {', '.join(move['on'])}"
        for move in found["transitions"]
    ]
    begin = f"    [*] --> {found['begins']}"
    diagram = "\n".join(["stateDiagram-v2", begin, *moves, "    CLOSED --> [*]"])
    yield f"What the server says, and where it leads:\n\n```mermaid\n{diagram}\n```\n"
    reception = found["reception"]
    names = list(next(iter(reception.values())))
    table = [
        (_code(name), *(_verdict(reception[gate][name]) for gate in reception)) for name in names
    ]
    yield "What becomes of what the client says:\n\n" + _table(("message", *reception), table)


def _verdict(word: str) -> str:
    return VERDICTS.get(word) or _code(word)


# -- a message ----------------------------------------------------------------------------------


def _message(message: Message, objects: Objects) -> Iterator[str]:
    own = (
        ""
        if len(session_kinds(message.dialect)) == len(message.session_kinds)
        else message.session_kinds[0]
    )
    title = f"`{message.kind}`" if message.kind else "The request"
    place = f" ({TITLES[SessionKind(own)].lower()})" if own else ""
    yield f"#### {title}{place}\n\n{message.description}\n"
    kinds = message.schema.get("oneOf")
    if kinds:
        yield from _kinds(message, objects)
    else:
        yield from _fields(message.schema, message.sender, objects)
    if message.sender == "client":
        yield _example(example(message.schema))
    elif not kinds:
        yield _example(shown(message.examples[0], message.schema))


def _kinds(message: Message, objects: Objects) -> Iterator[str]:
    """Write the common part of all kinds once, and then each kind's own."""
    tag, kinds = message.schema["x-antiphon-tag"], message.schema["oneOf"]
    first, *others = (kind["properties"] for kind in kinds)
    common = {
        name: below
        for name, below in first.items()
        if all(other.get(name) == below for other in others)
    }
    required = [name for name in common if all(name in kind["required"] for kind in kinds)]
    shared = {"properties": common, "required": required}
    words = ", ".join(_code(kind["properties"][tag]["const"]) for kind in kinds)
    yield f"`{tag}` says which kind it is: {words}. All of them have:\n"
    yield from _fields(shared, message.sender, objects)
    for kind, body in zip(kinds, message.examples, strict=True):
        word = kind["properties"][tag]["const"]
        own = {
            name: below
            for name, below in kind["properties"].items()
            if name not in common and name != tag
        }
        yield f"{_code(word)}: {kind.get('description', '')}\n"
        yield from _fields({**kind, "properties": own}, message.sender, objects)
        yield _example(shown(body, kind))


def _fields(schema: Json, sender: str, objects: Objects) -> Iterator[str]:
    """Write the table of an object's fields, if it has any."""
    columns = ("type", "default", "meaning") if sender == "client" else ("type", "meaning")
    lines = [
        (_code(row.name), *(getattr(row, column) for column in columns))
        for row in rows(schema, sender=sender, objects=objects)
    ]
    if lines:
        yield _table(("field", *columns), lines)


def _example(body: Json) -> str:
    """Write a body with a line for each of its fields, so that long ones do not hide the others."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    return "```json\n{\n" + ",\n".join(lines) + "\n}\n```\n"


# -- codes --------------------------------------------------------------------------------------


def _ends() -> str:
    names = [name for name in MODES_OF if SessionKind.REQUEST not in session_kinds(name)]
    lines = [
        (
            *(_ending(name, reason) for name in names),
            _close(reason),
            text,
        )
        for reason, text in ENDS.items()
    ]
    return _table((*map(_code, names), "close", "meaning"), lines)


def _close(reason: EndReason) -> str:
    codes = END_CLOSES.get(reason, (CLOSE_CODES.get(reason, CLOSE_NORMAL),))
    return ", ".join(map(str, codes))


def _ending(name: str, reason: EndReason) -> str:
    try:
        frames = DIALECTS_SERVED[name].encode(Closed(session_id="", reason=reason))
    except LocalProtocolError:
        return ""
    bodies = [json.loads(frame) for frame in frames]
    words = [body.get("reason") or body.get("code") for body in bodies]
    return ", ".join(
        f"`{body['type']}`" + (f": `{word}`" if word else "")
        for body, word in zip(bodies, words, strict=True)
    )


def _codes() -> Iterator[str]:
    errors: list[tuple[str, ...]] = []
    for code, meaning in MEANINGS.items():
        closes = close_code(code)
        after = "stays" if closes is None else f"closes with {closes}"
        errors.append((_code(code), error_type(code), after, meaning))
    yield "## Error codes\n"
    yield (
        "An `error` bears one of these. Where the connection stays, the client can go on; in "
        "`legacy-chat` every error ends it. Those from `model_not_validated` on are a "
        "transcription's; what is beyond repair elsewhere is such an error there.\n"
    )
    yield _table(("code", "type", "connection", "meaning"), errors)
    yield "## How a session ends\n"
    yield (
        "A session that was set up gets the reason of its end, in the words of its dialect; an end "
        "without words does not occur in that dialect. `legacy-chat` ends without a message. "
        "Before a session is set up, only the close code and its reason say why it ends.\n"
    )
    yield _ends()
    yield "## Close codes\n"
    yield (
        "The server closes the WebSocket with one of these. The reason next to it is a "
        "word such as `stopped`, `timeout` or an error code, or says what is wrong with a frame.\n"
    )
    yield _table(("code", "meaning"), [(str(code), text) for code, text in CLOSE_MEANINGS.items()])


# -- the command -----------------------------------------------------------------------------------


def _as_json() -> str:
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(asyncapi(), option=options).decode()


def _as_yaml() -> str:
    # Through JSON: plain values, none of them twice the same object, which would become an anchor.
    document = orjson.loads(_as_json())
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text


FORMATS: Final[Mapping[str, Callable[[], str]]] = {
    "json": _as_json,
    "yaml": _as_yaml,
    "markdown": reference,
}


@click.command("schema")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="json",
    show_default=True,
    help="json and yaml: an AsyncAPI 3 document, for tools. markdown: a reference, for people.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write [default: standard output].",
)
def schema_command(*, form: str, output: Path | None) -> None:
    """Describe the wire protocols of all dialects: every message, field, state and error.

    Messages and fields are those of the tables by which the server itself reads and writes, so they
    are those of the version that prints them.

    \b
    Examples:
      antiphon dev schema --output antiphon.json
      antiphon dev schema --format yaml | less
      antiphon dev schema --format markdown --output docs/protocol.md
    """  # noqa: D301 - click takes a backspace to keep the lines
    text = FORMATS[form]()
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {output}: {error.strerror}") from None
