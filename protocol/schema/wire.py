"""All that crosses the wire in the dialects that are served, as JSON Schema (draft 07).

`describe` runs every dialect's parser (`requests`) and writer (`answers`) in each course and mode
that it has. What is the same in several courses is one message.

Beside JSON Schema's own keys there are, all of them for people and tools that want more:
`x-antiphon-media` (what base64 may hold), `x-antiphon-tag` (the field that says which of `oneOf` an
object is), `x-antiphon-same` (the field of which this is another name), `x-antiphon-after` (the
field beside which this one is not looked at) and `x-antiphon-ignored-in` (modes in which a field is
known and not looked at).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

import attrs

from ..codec import parse_frame
from ..dialects import DIALECTS, Dialect
from ..dialects.base import Context, Tables
from ..errors import FieldError, LocalProtocolError
from ..messages import Mode
from ..model import SlidingWindow
from ..requests import ClientMessage, Request
from ..state import TRANSITIONS, Course, course_of
from .answers import Body, describe_answers
from .meaning import summary
from .requests import describe_body
from .rows import answer_example, answer_schema, request_schema
from .samples import bare, variations
from .sketch import Sketch
from .tidy import tidy
from .values import Schema

CLIENT_CLASSES: Final[tuple[type, ...]] = get_args(ClientMessage)
MODES: Final[Mapping[str, tuple[Mode, ...]]] = {
    "realtime": ("video", "audio", "chat"),
    "duplex-v1": ("video", "audio"),
    "legacy-duplex": ("video", "audio"),
    "legacy-chat": ("chat",),
    "transcription": ("transcription",),
    "transcription-responses": ("transcription",),
}
"""The modes that a dialect has; the first of a course is described, others by their difference."""
REQUEST_DIALECT: Final = "legacy-chat"
"""Of this one a connection is one request, and its only message has no type."""


@attrs.frozen(kw_only=True)
class Message:
    """A message of a dialect.

    Attributes:
        dialect: the dialect's name.
        sender: who sends it.
        kind: the wire's type; empty where it has none.
        courses: in which it may be sent; it may differ in others.
        canonical: what it is, whatever the dialect.
        request: what the reception table knows a client's message as.
        schema: of the body.
        examples: bodies of a server's message, as they are sent; audio is silence.
    """

    dialect: str
    sender: Literal["client", "server"]
    kind: str
    courses: tuple[Course, ...]
    canonical: tuple[type, ...]
    request: Request | None = None
    schema: Schema
    examples: tuple[Body, ...] = ()

    @property
    def description(self) -> str:
        """What it says, in the words of what it is."""
        return " ".join(dict.fromkeys(summary(cls) for cls in self.canonical))


def describe(name: str) -> tuple[Message, ...]:
    """Describe all messages of a dialect: the client's, then the server's, course by course."""
    found: list[Message] = []
    for course in Course:
        modes = tuple(mode for mode in MODES[name] if course is _course(name, mode))
        dialect = DIALECTS[name]
        if modes and isinstance(dialect, Tables):
            found += _of_tables(dialect, course, modes[0])
        elif modes:
            found += _client_messages(DIALECTS[name], course, modes)
            found += _server_messages(DIALECTS[name], course, modes[0])
    return tuple(_join(found))


def courses(name: str) -> tuple[Course, ...]:
    """Name the courses that a dialect has."""
    return tuple(dict.fromkeys(_course(name, mode) for mode in MODES[name]))


def senders(messages: tuple[Message, ...], course: Course) -> Mapping[type, tuple[str, ...]]:
    """Say which types of frames a server's message has in a course, by its class."""
    frames: dict[type, tuple[str, ...]] = {}
    for trigger in dict.fromkeys(
        trigger for row in TRANSITIONS[course].values() for trigger in row
    ):
        own = [
            message.kind
            for message in messages
            if message.sender == "server" and course in message.courses
            if trigger in message.canonical
        ]
        frames[trigger] = tuple(dict.fromkeys(own))
    return frames


def _course(name: str, mode: Mode) -> Course:
    return course_of(mode, is_request=name == REQUEST_DIALECT)


def _join(messages: list[Message]) -> list[Message]:
    """Make one of messages that are the same in several courses."""
    joined: list[Message] = []
    for message in messages:
        for index, other in enumerate(joined):
            if attrs.evolve(message, courses=other.courses, examples=other.examples) == other:
                both = (*other.courses, *message.courses)
                joined[index] = attrs.evolve(other, courses=both)
                break
        else:
            joined.append(message)
    return joined


def _of_tables(dialect: Tables, course: Course, mode: Mode) -> Iterator[Message]:
    """Describe the messages of a dialect that is tables."""
    for request, table in dialect.requests(mode):
        yield Message(
            dialect=dialect.name,
            sender="client",
            kind=table.kind,
            courses=(course,),
            canonical=table.classes,
            request=request,
            schema=request_schema(table),
        )
    triggers = {trigger for row in TRANSITIONS[course].values() for trigger in row}
    answers = [table for table in dialect.answers(mode) if triggers.intersection(table.classes)]
    for kind in dict.fromkeys(table.kind for table in answers):
        tables = [table for table in answers if table.kind == kind]
        yield Message(
            dialect=dialect.name,
            sender="server",
            kind=kind,
            courses=(course,),
            canonical=tuple(dict.fromkeys(cls for table in tables for cls in table.classes)),
            schema=answer_schema(tables),
            examples=tuple(map(answer_example, tables)),
        )


# -- the client's -------------------------------------------------------------------------------


def _client_messages(dialect: Dialect, course: Course, modes: tuple[Mode, ...]) -> list[Message]:
    found = []
    for kind, request in _kinds(dialect).items():
        described = [_describe_request(dialect, kind, request, mode) for mode in modes]
        first = described[0]
        if first is None:
            continue
        schema, canonical = first
        for mode, other in zip(modes[1:], described[1:], strict=True):
            _note_ignored(schema, other[0] if other else {}, mode)
        found.append(
            Message(
                dialect=dialect.name,
                sender="client",
                kind=kind,
                courses=(course,),
                canonical=(canonical,),
                request=request,
                schema=tidy(schema, gaps_are_null=True),
            )
        )
    return found


def _kinds(dialect: Dialect) -> Mapping[str, Request]:
    """Find the types of a client's messages, by writing each that the dialect can write."""
    kinds: dict[str, Request] = {}
    for cls in CLIENT_CLASSES:
        for message in (bare(cls), *variations(cls)):
            try:
                body = parse_frame(dialect.encode_request(message))
            except LocalProtocolError:
                continue
            kinds[str(body.get("type", ""))] = dialect.classify(body)
    return kinds


def _describe_request(
    dialect: Dialect, kind: str, request: Request, mode: Mode
) -> tuple[Schema, type] | None:
    """Describe a client's message; None where it has no place in the mode."""
    context = Context(mode=mode, sliding_windows=get_args(SlidingWindow))

    def parse(body: Sketch) -> ClientMessage:
        return dialect.parse(request, body, context)

    try:
        found = describe_body(parse, {"type": kind} if kind else {})
    except FieldError:
        return None
    return found.schema, type(found.value)


def _note_ignored(schema: Schema, other: Schema, mode: Mode) -> None:
    """Note which fields are known and not looked at in another mode; all else must be the same."""
    for name, below in schema.get("properties", {}).items():
        ours = other["properties"].get(name, {})
        if ours.get("x-ignored"):
            below.setdefault("x-ignored-in", []).append(mode)
        else:
            _note_ignored(below, ours, mode)


# -- the server's -------------------------------------------------------------------------------


def _server_messages(dialect: Dialect, course: Course, mode: Mode) -> list[Message]:
    return [
        Message(
            dialect=dialect.name,
            sender="server",
            kind=answer.kind,
            courses=(course,),
            canonical=answer.canonical,
            schema=tidy(answer.schema, gaps_are_null=False),
            examples=answer.examples,
        )
        for answer in describe_answers(dialect, course, mode)
    ]
