"""The protocol reference for authors of clients: `python -m docs.site.protocol` writes the page.

All facts come from `runtime.commands.schema` and `protocol.wire.schema`, as in the AsyncAPI
document, and so from the server's own tables. `tests/runtime/commands/test_schema_command.py` holds
the page to them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Final

import attrs

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
from protocol.wire.schema import Message, describe, session_kinds
from runtime.commands.schema import (
    CHANNELS,
    DIALECTS,
    END_CLOSES,
    ENDS,
    RULES,
    SESSION_KINDS,
    states,
)

from .staging import ROOT

PAGE: Final = ROOT / "docs" / "protocol.md"

# -- JSON Schema as rows ---------------------------------------------------------------------------


Json = Mapping[str, Any]

Objects = dict[str, tuple[str, str, Json]]
"""Objects that are written by themselves, by `_identity`: title, sender and schema."""

SHARED_FIELDS_MIN: Final = 3
"""An object of fewer fields is written in place, however often it occurs."""


@attrs.frozen(kw_only=True)
class Row:
    """A field: its path from the message, its type with limits and default, its meaning."""

    name: str
    type: str
    meaning: str


def _identity(schema: Json, sender: str) -> str:
    """Tell objects apart by what is in them, not by the field that they stand in."""
    return sender + json.dumps({k: v for k, v in schema.items() if k != "description"})


def _below(schema: Json, name: str) -> Iterator[tuple[str, Json]]:
    """Yield the objects of a field: itself, that of an array, or one of several kinds."""
    if "properties" in schema or "oneOf" in schema:
        yield name, schema
    else:
        for each in schema.get("anyOf", ()):
            yield from _below(each, name)
        if "items" in schema:
            yield from _below(schema["items"], f"{name}[]")


def shared_objects(messages: Iterable[Message]) -> Objects:
    """Find the objects that occur more than once, to be written once."""
    count: Counter[str] = Counter()
    found: Objects = {}

    def look(schema: Json, message: Message) -> None:
        fields = (each for kind in schema.get("oneOf", [schema]) for each in _items(kind))
        for name, below in (each for field, value in fields for each in _below(value, field)):
            key = _identity(below, message.sender)
            count[key] += 1
            if count[key] == 1:
                title = f"`{name.replace('[]', '')}` ({message.sender}, `{message.dialect}`"
                found[key] = (title, message.sender, below)
                look(below, message)

    for message in messages:
        look(message.schema, message)
    titles: Counter[str] = Counter()
    shared: Objects = {}
    for key, (title, sender, schema) in found.items():
        if count[key] > 1 and ("oneOf" in schema or len(_items(schema)) >= SHARED_FIELDS_MIN):
            titles[title] += 1
            number = f", {titles[title]})" if titles[title] > 1 else ")"
            shared[key] = (title + number, sender, schema)
    return shared


def _items(schema: Json) -> list[tuple[str, Json]]:
    return list(schema["properties"].items())


def anchor(title: str) -> str:
    """Name the heading of a title as GitHub does."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def rows(schema: Json, *, sender: str, objects: Objects, at: str = "") -> Iterator[Row]:
    """Write the fields of an object that stands `at` a path, and of the objects in it.

    `sender` is the message's: the server keeps the limits, so they are left out of its own
    messages. `objects` are those that are written elsewhere.
    """
    if "oneOf" in schema:
        yield from _rows_of_kinds(schema, sender, objects, at)
        return
    required = schema.get("required", ())
    group = [each["required"][0] for each in schema.get("anyOf", ()) if "required" in each]
    for name, value in schema["properties"].items():
        if "const" in value and name == "type" and not at:
            continue
        within = list(_below(value, name))
        links = [objects.get(_identity(below, sender), ("",))[0] for _, below in within]
        need = _default(value, name, required, group) if sender == "client" else ""
        yield Row(
            name=f"{at}{name}",
            type=f"{_type(value, sender)}{need}",
            meaning=_meaning(value, [link for link in links if link], name in required, sender),
        )
        for (path, below), link in zip(within, links, strict=True):
            if not link:
                yield from rows(below, sender=sender, objects=objects, at=f"{at}{path}.")


def _rows_of_kinds(schema: Json, sender: str, objects: Objects, at: str) -> Iterator[Row]:
    tag = schema["x-antiphon-tag"]
    for kind in schema["oneOf"]:
        word = kind["properties"][tag]["const"]
        own = {name: below for name, below in kind["properties"].items() if name != tag}
        yield Row(
            name=f"{at}{tag}", type=f"`{json.dumps(word)}`", meaning=kind.get("description", "")
        )
        yield from rows({**kind, "properties": own}, sender=sender, objects=objects, at=at)


def joined(fields: Iterable[Row]) -> Iterator[Row]:
    """Write fields that follow each other as one, where all that is said of them is the same."""
    for meaning, alike in groupby(fields, lambda row: row.meaning or row):
        each = list(alike)
        kinds = list(dict.fromkeys(row.type for row in each))
        if len(kinds) > 1 and meaning != ONLY_VALUE:
            yield from (attrs.evolve(row, name=_code(row.name)) for row in each)
        else:
            names = ", ".join(_code(row.name) for row in each)
            yield Row(name=names, type=", ".join(kinds), meaning=each[0].meaning)


def _default(schema: Json, name: str, required: Sequence[str], group: Sequence[str]) -> str:
    if name in required or name in group[:1]:
        return "; required"
    if name in group:
        return f"; in place of `{group[0]}`"
    return f"; default `{json.dumps(schema['default'])}`" if "default" in schema else ""


ONLY_VALUE: Final = "The only value allowed."


def _meaning(schema: Json, elsewhere: Sequence[str], is_required: bool, sender: str) -> str:
    text = str(schema.get("description", ""))
    for title in elsewhere:
        text += f" See [its fields](#{anchor(title)})."
    if modes := schema.get("x-antiphon-ignored-in"):
        text += f" Ignored in {', '.join(f'`mode={mode}`' for mode in modes)}."
    if sender == "server" and not is_required:
        text += " Optional."
    if schema.get("additionalProperties") is False:
        has_fields = bool(schema["properties"])
        text += " Other fields are refused." if has_fields else " Must be empty."
    if not text and _single(schema) is not None:
        text = "Always this." if sender == "server" else ONLY_VALUE
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
        return f", above {schema['exclusiveMinimum']:.10g} up to {high:.10g}"
    if "minimum" in schema:
        low = schema["minimum"]
        return f", {low:.10g} and more" if high is None else f", {low:.10g} to {high:.16g}"
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

For authors of clients: every message, field, limit, state and error of each dialect. Generated by
`python -m docs.site.protocol`; do not edit. `antiphon dev schema` prints the same as AsyncAPI 3,
with an example of each message; `fixtures/wire/` has whole conversations, and
[states.md](states.md) a diagram for each kind of session.
"""


def reference() -> str:
    """Write the whole page."""
    objects = shared_objects(each for name in MODES_OF for each in describe(name))
    parts = [HEAD, _endpoints(), "## What holds everywhere\n", _list(RULES), "## Sessions\n"]
    for session_kind, text in SESSION_KINDS.items():
        parts.append(f"### {TITLES[session_kind]}\n\n{text}\n")
    parts.append("## Fields in many messages\n\nMessages name these, and say no more about them.\n")
    parts.append(_list([_field(attrs.evolve(row, name=_code(row.name))) for row in _usual()]))
    written: dict[str, str] = {}
    for name in (name for channel in CHANNELS for name in channel.dialects):
        parts += _dialect(name, objects, written)
    parts.append(
        "## Objects\n\nOf several messages, by sender and the first dialect that has them.\n"
    )
    for title, sender, schema in objects.values():
        parts += [f"### {title}\n", *_list_of(rows(schema, sender=sender, objects=objects))]
    return "\n".join([*parts, *_codes()])


def _list(lines: Sequence[str]) -> str:
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
    notes = [f"{', '.join(map(_code, channel.dialects))}: {channel.says}" for channel in CHANNELS]
    head = ("dialect", "endpoint", "modes", "first message", "purpose")
    return "\n".join(["## Where to connect\n", _table(head, lines), _list(notes)])


def _first(message: Message | None) -> str:
    if message is None:
        return "none: the server speaks first"
    return _code(message.kind) if message.kind else "the request"


# -- a dialect ----------------------------------------------------------------------------------


def _dialect(name: str, objects: Objects, written: dict[str, str]) -> Iterator[str]:
    messages = describe(name)
    yield f"## `{name}`\n"
    for session_kind in session_kinds(name):
        title = TITLES[session_kind]
        yield f"### {title}: states (`{name}`)\n\nSee [{title}](#{anchor(title)}).\n"
        yield from _session_kind(messages, session_kind)
    for sender, title in (("client", "Sent by the client"), ("server", "Sent by the server")):
        heading = f"{title} (`{name}`)"
        yield f"### {heading}\n"
        own = [message for message in messages if message.sender == sender]
        yield from _messages(own, objects, written, f"[`{name}`](#{anchor(heading)})")


def _messages(
    messages: Sequence[Message], objects: Objects, written: dict[str, str], here: str
) -> Iterator[str]:
    """Write messages; those with the same fields together, and a repeated one as a link.

    `written` has the headings of those before, by their text, and gets these; `here` links to them.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    repeated: dict[str, list[str]] = {}
    for message in messages:
        text = "\n".join(_fields_of(message, objects))
        whole = f"{message.sender}{message.kind}{message.description}{text}"
        if whole in written and text:
            repeated.setdefault(written[whole], []).append(_heading(message))
            continue
        written[whole] = here
        groups.setdefault(text, []).append((_heading(message), message.description))
    for text, group in groups.items():
        if len(group) == 1 or len({says for _, says in group}) == 1:
            yield f"#### {', '.join(title for title, _ in group)}\n\n{group[0][1]}\n"
        else:
            heading = ", ".join(title for title, _ in group) if text else "Without fields"
            yield f"#### {heading}\n\n{' '.join(f'{title}: {says}' for title, says in group)}\n"
        if text:
            yield text
    for there, names in repeated.items():
        yield f"As in {there}: {', '.join(names)}.\n"


def _heading(message: Message) -> str:
    title = _code(message.kind) if message.kind else "The request"
    if len(session_kinds(message.dialect)) == len(message.session_kinds):
        return title
    return f"{title} ({TITLES[message.session_kinds[0]].lower()})"


def _session_kind(messages: tuple[Message, ...], session_kind: SessionKind) -> Iterator[str]:
    reception = states(messages, session_kind)["reception"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in next(iter(reception.values())):
        verdicts = tuple(_verdict(reception[gate][name]) for gate in reception)
        alike.setdefault(verdicts, []).append(_code(name))
    table = [(", ".join(names), *verdicts) for verdicts, names in alike.items()]
    yield "What the server does with a message:\n\n" + _table(("message", *reception), table)


def _verdict(word: str) -> str:
    return VERDICTS.get(word) or _code(word)


# -- a message ----------------------------------------------------------------------------------


def _fields_of(message: Message, objects: Objects) -> Iterator[str]:
    """Write a message's fields, and the client's nested ones as an example too."""
    kinds = message.schema.get("oneOf")
    if kinds:
        yield from _kinds(message, objects)
        return
    fields = list(rows(message.schema, sender=message.sender, objects=objects))
    yield from _list_of(fields)
    if message.sender == "client" and any("." in row.name for row in fields):
        yield _example(example(message.schema))


def _kinds(message: Message, objects: Objects) -> Iterator[str]:
    """Write the common part of all kinds once, and then each kind's own."""
    tag, kinds = message.schema["x-antiphon-tag"], message.schema["oneOf"]
    words = [_code(kind["properties"][tag]["const"]) for kind in kinds]
    fields = [list(rows(kind, sender=message.sender, objects=objects)) for kind in kinds]
    shared = [row for row in fields[0] if all(row in others for others in fields)]
    yield f"`{tag}` is the kind: {', '.join(words)}. All have:\n"
    yield from _list_of(shared)
    for word, kind, own in zip(words, kinds, fields, strict=True):
        yield f"{word}: {kind.get('description', '')}\n"
        yield from _list_of(row for row in own if row not in shared and row.name != tag)


def _list_of(fields: Iterable[Row]) -> Iterator[str]:
    """Write an object's fields as a list; those that many messages have by their names, at last."""
    others: list[Row] = []
    known: list[Row] = []
    for row in fields:
        (known if row in _usual() else others).append(row)
    lines = [_field(row) for row in joined(others)]
    if known:
        lines.append(f"{'also ' if lines else ''}{', '.join(_code(row.name) for row in known)}")
    if lines:
        yield _list(lines)


def _field(row: Row) -> str:
    return f"{row.name} ({row.type}){f': {row.meaning}' if row.meaning else ''}"


USUAL_MIN: Final = 5
"""A field that so many messages have is described once."""


@cache
def _usual() -> tuple[Row, ...]:
    """Find the fields that many messages have, of each name the most frequent kind."""
    count = Counter(
        row
        for name in MODES_OF
        for message in describe(name)
        for kind in message.schema.get("oneOf", [message.schema])
        for row in rows(kind, sender=message.sender, objects={})
        if "." not in row.name and "object" not in row.type
    )
    found: dict[str, Row] = {}
    for row, times in count.most_common():
        if times >= USUAL_MIN and row.meaning:
            found.setdefault(row.name, row)
    return tuple(found[name] for name in sorted(found))


def example(schema: Json) -> dict[str, Any]:
    """Make a body of a client's message from its schema: required fields, and telling defaults.

    Its base64 is replaced by a name.
    """
    required = _required_in(schema)
    made: dict[str, Any] = {}
    for name, below in schema["properties"].items():
        is_shown = name in required or _says_something(below)
        if is_shown and "x-antiphon-same" not in below and "x-antiphon-after" not in below:
            made[name] = _shown_value(below)
    return made


def _required_in(schema: Json) -> frozenset[str]:
    first = [group["required"][0] for group in schema.get("anyOf", ())[:1] if "required" in group]
    return frozenset((*schema.get("required", ()), *first))


def _says_something(schema: Json) -> bool:
    """Whether a field that may be absent is worth showing."""
    if "properties" in schema:
        return any(map(_says_something, schema["properties"].values()))
    return bool({"default", "contentEncoding", "examples", "items"} & schema.keys())


def _shown_value(schema: Json) -> Any:
    if "const" in schema:
        return schema["const"]
    if "contentEncoding" in schema:
        return f"<base64 {schema.get('x-antiphon-media', ['bytes'])[0]}>"
    if "examples" in schema:
        return schema["examples"][0]
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    if "oneOf" in schema:
        return _shown_value(schema["oneOf"][0])
    if "properties" in schema:
        return example(schema)
    if "anyOf" in schema:
        return _shown_value(schema["anyOf"][0])
    if "items" in schema:
        return [_shown_value(schema["items"])]
    return schema.get("minimum", 1)


def _example(body: Json) -> str:
    """Write a body with a line for each of its fields, so that long ones do not hide the others."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()]
    return "```json\n{\n" + ",\n".join(lines) + "\n}\n```\n"


# -- codes --------------------------------------------------------------------------------------


def _ends() -> str:
    names = [name for name in MODES_OF if SessionKind.REQUEST not in session_kinds(name)]
    lines = [
        (*(_ending(name, reason) for name in names), _close(reason), text)
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
        "An `error` has one of these codes. Where the connection stays, the client can go on; in "
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


if __name__ == "__main__":
    PAGE.write_text(reference(), "utf-8")
