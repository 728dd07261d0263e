"""The protocol reference for authors of clients: it writes `docs/protocol.md`.

All facts come from `document` and `protocol.wire.schema`, as in the AsyncAPI document, and so from
the server's own tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from protocol.machine.core import CLOSE_CODES
from protocol.values.errors import (
    CLOSE_MEANINGS,
    CLOSE_NORMAL,
    MEANINGS,
    LocalProtocolError,
    close_code,
    error_type,
)
from protocol.values.messages import Closed, EndReason
from protocol.values.state import Course
from protocol.wire.dialects import DIALECTS as DIALECTS_SERVED
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema.example import example, shown
from protocol.wire.schema.wire import Message, courses, describe

from .document import states
from .fields import Objects, rows, shared_objects
from .notes import CHANNELS, COURSES, DIALECTS, END_CLOSES, ENDS, RULES, Channel

Json = Mapping[str, Any]

VERDICTS: Final[Mapping[str, str]] = {"accept": "taken", "keep": "kept for its turn"}
"""The words for the reception table's verdicts; the others are error codes."""
TITLES: Final[Mapping[Course, str]] = {
    Course.DUPLEX: "Full duplex",
    Course.CHAT: "Chat",
    Course.REQUEST: "One request",
    Course.TRANSCRIPTION: "Transcription",
}

HEAD: Final = """# The wire protocols

This page is for authors of clients. `antiphon schema --format markdown` writes it from the tables
by which the server reads and writes messages and changes its state, and a test compares them; do
not edit it. For tools, `antiphon schema --format json`, or `yaml`, writes the same as AsyncAPI 3.
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
    for course in courses(name):
        yield f"### {TITLES[course]}: the order of events (`{name}`)\n\n{COURSES[course]}\n"
        yield from _course(messages, course)
    for sender, title in (("client", "What the client says"), ("server", "What the server says")):
        yield f"### {title} (`{name}`)\n"
        for message in messages:
            if message.sender == sender:
                yield from _message(message, objects)
    for title, (_, schema) in objects.items():
        yield f"#### The object `{title}` (`{name}`)\n\n{schema.get('description', '')}\n"
        yield from _fields(schema, "server", {})


def _course(messages: tuple[Message, ...], course: Course) -> Iterator[str]:
    found = states(messages, course)
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
    own = "" if len(courses(message.dialect)) == len(message.courses) else message.courses[0]
    title = f"`{message.kind}`" if message.kind else "The request"
    place = f" ({TITLES[Course(own)].lower()})" if own else ""
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
    names = [name for name in MODES_OF if Course.REQUEST not in courses(name)]
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
    said = [
        f"`{body['type']}`" + (f": `{word}`" if word else "")
        for body, word in zip(bodies, words, strict=True)
    ]
    return ", ".join(said)


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
