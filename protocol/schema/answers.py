"""The server's messages of a dialect, described by running its writer and its reader.

What is sent is found by writing every canonical message in all its kinds: which fields there are,
which of them always, which may be null, and, by what each attribute moves, what they mean. Types
and limits are those that the client's end of the dialect reads by; where it reads less than is
sent, they are those of what was seen.

Frames of one type may be of several kinds, such as the deltas of 001: a text that no attribute
moves and that differs between them tells the kinds apart, and each is described by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations
from typing import Any, Final, cast, get_args, get_type_hints

import attrs

from ..codec import parse_frame
from ..dialects import Dialect
from ..errors import LocalProtocolError, RemoteProtocolError
from ..messages import Mode, ServerMessage
from ..state import TRANSITIONS, Course
from .meaning import Step, Steps, difference, explain, explain_class, explain_object, summary
from .samples import bare, representative, variations
from .sketch import Sketch
from .values import Run, Schema

Body = Mapping[str, object]
Path = tuple[str, ...]

SERVER_CLASSES: Final[tuple[type, ...]] = get_args(ServerMessage)
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
)


@attrs.frozen(kw_only=True)
class Frame:
    """A frame that was written.

    Attributes:
        body: what it says.
        cls: the message it was written for.
        is_example: it is the first of its kind.
        is_usual: it was written for the message as it usually is, not for a special case of it.
    """

    body: Body
    cls: type
    is_example: bool
    is_usual: bool


@attrs.frozen(kw_only=True)
class Move:
    """A value that a field took when an attribute was changed."""

    steps: Steps
    value: object


Moved = Mapping[Path, Sequence[Move]]
"""By path, what moves a field of a type of frames."""


@attrs.define
class Written:
    """All that was written: the frames, and what moves their fields, by type and path."""

    frames: list[Frame] = attrs.field(factory=list)
    moved: dict[tuple[str, Path], list[Move]] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Answer:
    """A type of frame that the server sends.

    Attributes:
        kind: the frame's type.
        canonical: the messages that it is written for.
        schema: of its body.
        examples: bodies, one of each kind.
    """

    kind: str
    canonical: tuple[type, ...]
    schema: Schema
    examples: tuple[Body, ...]


def describe_answers(dialect: Dialect, course: Course, mode: Mode) -> tuple[Answer, ...]:
    """Describe all that a server sends in a course, in the order of `ServerMessage`.

    Args:
        dialect: the dialect.
        course: which messages may be sent (`state.TRANSITIONS`).
        mode: of the session, for reading.

    Returns:
        A description for each type of frame.
    """
    triggers = {trigger for row in TRANSITIONS[course].values() for trigger in row}
    written = Written()
    for cls in SERVER_CLASSES:
        if cls in triggers:
            _write(dialect, cls, {"is_chat": course is Course.CHAT}, written)
    kinds = dict.fromkeys(_kind_of(frame) for frame in written.frames)
    return tuple(
        _describe(
            dialect,
            mode,
            [frame for frame in written.frames if _kind_of(frame) == kind],
            {path: moves for (name, path), moves in written.moved.items() if name == kind},
        )
        for kind in kinds
    )


def _kind_of(frame: Frame) -> str:
    return str(frame.body["type"])


# -- what is written ----------------------------------------------------------------------------


def _write(dialect: Dialect, cls: type, known: Mapping[str, object], written: Written) -> None:
    """Write a message in all its kinds; note the frames, and which attribute moves what in them."""
    fixed = {name: value for name, value in known.items() if hasattr(cls, name)}
    first: dict[tuple[int, int, object], tuple[object, Body]] = {}
    usual, *others = variations(cls)
    for sample in (usual, *others, *_pairs(usual, others), attrs.evolve(bare(cls), **_empty(cls))):
        message = attrs.evolve(sample, **fixed)
        try:
            bodies = [parse_frame(text) for text in dialect.encode(message)]
        except LocalProtocolError:
            continue
        for index, body in enumerate(bodies):
            place = (len(bodies), index, body["type"])
            is_example = place not in first
            frame = Frame(body=body, cls=cls, is_example=is_example, is_usual=sample is usual)
            written.frames.append(frame)
            one, other = first.setdefault(place, (message, body))
            if _is_one_apart(one, message):
                for path, value in _moved(other, body):
                    move = Move(steps=difference(one, message), value=value)
                    written.moved.setdefault((str(body["type"]), path), []).append(move)


def _pairs(usual: object, others: Sequence[object]) -> Iterator[object]:
    """Make messages that differ from the usual one in two attributes, each by itself tried before.

    A field may depend on two: the last delta of a turn is the one that says so, whichever that is.
    """
    changes = [
        (way[0][1], getattr(other, way[0][1]))
        for other in others
        if len(way := difference(usual, other)) == 1
    ]
    for (name, value), (second, other) in combinations(changes, 2):
        if name != second:
            yield attrs.evolve(cast("Any", usual), **{name: value, second: other})


def _is_one_apart(one: object, other: object) -> bool:
    """Whether two messages of a class differ in one attribute, so that it is what moves a field."""
    fields = attrs.fields(type(cast("attrs.AttrsInstance", one)))
    differing = [
        field for field in fields if getattr(one, field.name) != getattr(other, field.name)
    ]
    return len(differing) == 1


def _empty(cls: type) -> dict[str, object]:
    """Empty every text and all samples: what is left out or null then may be absent at all."""
    empties: dict[type, object] = {str: "", bytes: b""}
    made = representative(cls)
    return {
        field.name: empties[type(getattr(made, field.name))]
        for field in attrs.fields(cls)
        if type(getattr(made, field.name)) in empties
    }


def _moved(one: object, other: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Name the paths at which two bodies differ, and what the other has there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            yield from _moved(one.get(name), other.get(name), (*path, name))
    elif one != other:
        yield path, other


# -- what is described --------------------------------------------------------------------------


def _describe(dialect: Dialect, mode: Mode, frames: Sequence[Frame], moved: Moved) -> Answer:
    kind, tag = _kind_of(frames[0]), _find_tag(frames, moved)
    groups: dict[str, list[Frame]] = {}
    for frame in frames:
        groups.setdefault(str(frame.body[tag]) if tag else "", []).append(frame)
    schemas = []
    for text, group in groups.items():
        fixed = {"type": kind, **({tag: text} if tag else {})}
        schema = _merge([frame.body for frame in group], _read(dialect, fixed, mode), moved, ())
        for name, value in fixed.items():
            schema["properties"][name] = {"type": "string", "const": value}
        if tag:
            classes = dict.fromkeys(frame.cls for frame in _usual(group))
            schema["description"] = " ".join(summary(cls) for cls in classes)
        _tell_classes_apart(schema, group, moved)
        schemas.append(schema)
    examples = (
        next((frame for frame in group if frame.is_example), group[0]) for group in groups.values()
    )
    return Answer(
        kind=kind,
        canonical=tuple(dict.fromkeys(frame.cls for frame in _usual(frames))),
        schema={"type": "object", "oneOf": schemas, "x-tag": tag} if tag else schemas[0],
        examples=tuple(frame.body for frame in examples),
    )


def _usual(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Leave out what only announces something else: in 002 an `error` may come before the end."""
    return [frame for frame in frames if frame.is_usual] or frames


def _find_tag(frames: Sequence[Frame], moved: Moved) -> str:
    """Find the field that tells kinds of frames apart, beside the type; empty where none does."""
    for name in frames[0].body:
        values = {frame.body.get(name) for frame in frames if isinstance(frame.body.get(name), str)}
        is_always = all(isinstance(frame.body.get(name), str) for frame in frames)
        if name != "type" and is_always and len(values) > 1 and (name,) not in moved:
            return name
    return ""


def _tell_classes_apart(schema: Schema, frames: Sequence[Frame], moved: Moved) -> None:
    """Describe a field by the messages, where nothing moves it and each message has its own."""
    for name, below in schema["properties"].items():
        by_value: dict[object, list[type]] = {}
        for frame in frames:
            value = frame.body.get(name)
            if isinstance(value, bool | str) and frame.cls not in by_value.setdefault(value, []):
                by_value[value].append(frame.cls)
        classes = [cls for found in by_value.values() for cls in found]
        if (name,) in moved or len(by_value) < 2 or len(set(classes)) < len(classes):
            continue
        texts = [f"{_json(value)}: {summary(found[0])}" for value, found in by_value.items()]
        below.setdefault("description", " ".join(texts))


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(dialect: Dialect, fixed: Mapping[str, str], mode: Mode) -> Schema:
    """Describe what the client's end reads of a frame."""
    sketch = Sketch(Run(), fixed)
    try:
        dialect.decode(sketch, mode)
    except RemoteProtocolError:
        return {}
    return sketch.schema


def _merge(bodies: Sequence[Body], read: Schema, moved: Moved, path: Path) -> Schema:
    """Describe an object: the fields that were seen, with the limits by which they are read."""
    names = dict.fromkeys(name for body in bodies for name in body)
    properties: Schema = {}
    for name in names:
        values = [body[name] for body in bodies if name in body]
        below = read.get("properties", {}).get(name, {})
        properties[name] = _field(values, below, moved, (*path, name))
    always = [name for name in names if all(name in body for body in bodies)]
    return {"type": "object", "properties": properties, "required": always}


def _field(values: Sequence[object], read: Schema, moved: Moved, path: Path) -> Schema:
    said = [value for value in values if value is not None]
    if any(isinstance(value, dict) for value in said):
        schema = _merge([cast("Body", value) for value in said], read, moved, path)
        inside = (moves for below, moves in moved.items() if below[: len(path)] == path)
        ways = [move.steps for moves in inside for move in moves]
        text = (
            explain_object(ways) or (explain_class(ways) if len(ways[0]) > 1 else "")
            if ways
            else ""
        )
    else:
        moves = moved.get(path, ())
        schema = {key: value for key, value in read.items() if key != "default"} or _seen(said)
        if not moves and len(set(map(repr, values))) == 1:
            schema = {"type": schema["type"], "const": values[0]}
        elif schema.get("type") == "string" and "enum" not in schema:
            _note_words(schema, moves, said)
        text = _explain(moves)
    if text:
        schema["description"] = text
    if len(said) < len(values):
        schema["x-null"] = True
    return schema


def _explain(moves: Sequence[Move]) -> str:
    """Say what a field means: in the words of the attributes of the first message that moves it."""
    texts: dict[type, list[str]] = {}
    for move in moves:
        if text := explain(move.steps):
            texts.setdefault(move.steps[0][0], []).append(text)
    return " ".join(dict.fromkeys(next(iter(texts.values()), ())))


def _seen(values: Sequence[object]) -> Schema:
    """Describe a field that the client's end does not read, by what was seen of it."""
    for kind, name in _KINDS:
        if values and all(type(value) is kind for value in values):
            return {"type": name}
    return {}


def _note_words(schema: Schema, moves: Sequence[Move], values: Sequence[object]) -> None:
    """List what a text may be, or, where it may also be another, some of what it may be."""
    listed = [move for move in moves if _is_listed(move.steps[-1])]
    if listed and len(listed) == len(moves):
        schema["enum"] = list(dict.fromkeys(values))
    elif listed:
        schema["examples"] = list(dict.fromkeys(move.value for move in listed))


def _is_listed(step: Step) -> bool:
    """Whether an attribute has a list of values that it may have, all of which were tried."""
    cls, name = step
    values: tuple[Any, ...] = variations(get_type_hints(cls)[name], name)
    return "" not in values and all(isinstance(value, Enum | str) for value in values)
