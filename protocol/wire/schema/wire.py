"""All messages of the served dialects, as JSON Schema (draft 07).

`describe` reads the tables of a dialect (`protocol.wire`) in each of its courses; a message that is
the same in several courses is one.

Keys in addition to JSON Schema's own: `x-antiphon-media` (the content of base64), `x-antiphon-tag`
(the field that says which of `oneOf` an object is), `x-antiphon-same` (the field of which this is
another name), `x-antiphon-after` (the field that, if present, makes this one ignored),
`x-antiphon-ignored-in` (modes in which a field is known and ignored).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

import attrs

from ...values.messages import ServerMessage
from ...values.modes import Mode
from ...values.requests import Request
from ...values.state import TRANSITIONS, Course, course_of
from ..dialects import DIALECTS, MODES_OF
from ..dialects.base import Dialect
from .rows import Schema, answer_example, answer_schema, request_schema, summary

_SERVER_CLASSES: Final[tuple[type, ...]] = get_args(ServerMessage)
REQUEST_DIALECT: Final = "legacy-chat"
"""A connection of this dialect is one request, and its only message has no type."""


@attrs.frozen(kw_only=True)
class Message:
    """A message of a dialect.

    Attributes:
        kind: the wire's type; empty without one.
        courses: in which it may be sent; it may differ in others.
        canonical: the class of the message in every dialect.
        request: the key of a client's message in the reception table.
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
    examples: tuple[Mapping[str, object], ...] = ()

    @property
    def description(self) -> str:
        """The description of its canonical class."""
        return " ".join(dict.fromkeys(summary(cls) for cls in self.canonical))


def describe(name: str) -> tuple[Message, ...]:
    """Describe all messages of a dialect: the client's, then the server's, course by course."""
    found: list[Message] = []
    for course in Course:
        modes = [mode for mode in MODES_OF[name] if course is _course(name, mode)]
        if modes:
            found += _messages(DIALECTS[name], course, modes[0])
    return tuple(_join(found))


def courses(name: str) -> tuple[Course, ...]:
    """List the courses of a dialect."""
    return tuple(dict.fromkeys(_course(name, mode) for mode in MODES_OF[name]))


def senders(messages: tuple[Message, ...], course: Course) -> Mapping[type, tuple[str, ...]]:
    """Return the frame types of each server's message in a course, by its class."""
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
    """Join messages that are the same in several courses."""
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


def _messages(dialect: Dialect, course: Course, mode: Mode) -> Iterator[Message]:
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
            courses=(course,),
            canonical=tuple(
                cls for cls in _SERVER_CLASSES if any(cls in table.classes for table in tables)
            ),
            schema=answer_schema(tables),
            examples=tuple(map(answer_example, tables)),
        )
