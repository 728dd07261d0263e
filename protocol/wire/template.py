"""Messages like an earlier one: they differ in nothing but media and names, and are not parsed.

    frame     {"type":"input.append","input":{"audio":"c29tZQ==","force_listen":false}}
    literals  {"type":"input.append","input":{"audio":"        ","force_listen":false}}

A client sends up to fifty appends a second. Where the text between its media is that of an earlier
frame, JSON gives the same object but for the media, and only their rows are read again.

Rules: `read` gives exactly what parsing would give, or None: then parse. A template is tried once,
with other words in its holes, before it is used: a hole is all of one string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any, Final, cast

import attrs

from ..values.errors import FieldError, FrameError
from ..values.requests import ClientMessage
from .codec import parse_frame
from .field import Field
from .kinds import NAMED, SEEN, SPOKEN
from .reading import Context, Json, Reading
from .table import Object, Row, Table

LITERAL_CHARS_MAX: Final = 1024
"""Kept of a frame, for each session; an append has 40 to 200 besides its media."""
NAME_CHARS_MAX: Final = 256
"""A longer name is parsed: templates need not count the commas in names."""
_TRIED_CHARS: Final = 32
"""Two strings that begin with as many equal characters are rarely in one message."""
EVENT_ID: Final = "event_id"
"""The client's own name for a message, in any dialect that has one."""


@attrs.frozen
class _Place:
    """An object in a message: the keys to it, and its path and prefix in `Reading`."""

    keys: tuple[str, ...] = ()
    path: str = "$"
    prefix: str = ""

    def of(self, row: Object) -> _Place:
        """The place of an object in this one."""
        return _Place((*self.keys, row.name), f"{self.path}.{row.name}", row.prefix_in(self.prefix))


_TOP: Final = _Place()


@attrs.frozen(kw_only=True)
class _Hole:
    """A row whose value differs: a string, or an array of `count` strings."""

    row: Field
    name: str
    place: _Place
    count: int | None
    is_name: bool

    def texts(self, body: Json) -> list[str]:
        """Return its strings in a message."""
        value = self._object_in(body)[self.name]
        return [cast("str", value)] if self.count is None else cast("list[str]", value)

    def fill(self, body: Json, texts: list[str]) -> None:
        """Replace its strings in a message."""
        self._object_in(body)[self.name] = texts[0] if self.count is None else texts

    def _object_in(self, body: Json) -> dict[str, object]:
        for key in self.place.keys:
            body = cast("Json", body[key])
        return cast("dict[str, object]", body)


@attrs.frozen
class Alike:
    """A message that was read by a template, and its `event_id`, if it has any."""

    message: ClientMessage
    event_id: object


@attrs.frozen(kw_only=True)
class Template:
    """What the messages have in common: the text around the holes, and the values of other rows.

    `event_id` is that of all of them, if it is no hole.
    """

    _table: Table
    _context: Context
    _literals: tuple[str, ...]
    _holes: tuple[_Hole, ...]
    _values: Mapping[str, Any]
    _event_id: object

    @classmethod
    def of(cls, frame: str, body: Json, table: Table, context: Context) -> Template | None:
        """Make the template of a frame that the table has read; None where that is not possible."""
        found = _find(frame, body, table.shape.rows_for(context), context)
        if not found:
            return None
        spots = [spot for _, spots in found for spot in spots]
        ends = [0, *(end for _, end in spots)]
        starts = [*(start for start, _ in spots), len(frame)]
        literals = tuple(frame[end:start] for end, start in zip(ends, starts, strict=True))
        if sum(map(len, literals)) > LITERAL_CHARS_MAX or starts != sorted(starts):
            return None
        holes = tuple(hole for hole, _ in found)
        if not _is_right(frame, body, literals, holes):
            return None
        varied = {hole.place.prefix + hole.row.attribute for hole in holes}
        values = table.values(body, context)
        return cls(
            table=table,
            context=context,
            literals=literals,
            holes=holes,
            values={key: value for key, value in values.items() if key not in varied},
            event_id=body.get(EVENT_ID),
        )

    def read(self, frame: str) -> Alike | None:
        """Read a frame like the first; None: it is to be parsed."""
        texts = self._cut(frame)
        if texts is None:
            return None
        values, event_id, start = dict(self._values), self._event_id, 0
        for hole in self._holes:
            here = texts[start : start + (hole.count or 1)]
            start += len(here)
            if hole.is_name and not all(map(_is_plain, here)):
                return None
            body: Json = {hole.name: here[0] if hole.count is None else here}
            try:
                at = hole.place
                hole.row.take(Reading(body, at.path, at.prefix, self._context, values))
            except FieldError:
                return None
            if hole.name == EVENT_ID:
                event_id = here[0]
        return Alike(self._table.build(values), event_id)

    def _cut(self, frame: str) -> list[str] | None:
        """Return what is in the holes; None if the frame is another or its strings have breaks."""
        texts, at = [], 0
        for literal in self._literals[:-1]:
            if not frame.startswith(literal, at):
                return None
            start = at + len(literal)
            at = frame.find('"', start)
            if at < 0:
                return None
            texts.append(frame[start:at])
        is_same = frame.endswith(self._literals[-1]) and at + len(self._literals[-1]) == len(frame)
        # JSON has no line breaks in a string; base64 may have them, behind a backslash.
        return texts if is_same and "\n" not in frame and "\r" not in frame else None


def _find(
    frame: str, body: Json, rows: Iterable[Row], context: Context
) -> list[tuple[_Hole, list[tuple[int, int]]]]:
    """Find the holes of a frame and the places of their strings, in order; empty if not sure."""
    found = []
    for hole in _holes(rows, body, context):
        spots = []
        for text in hole.texts(body):
            start = frame.find(f'"{text[:_TRIED_CHARS]}') + 1
            if not (start and frame.startswith(f'{text}"', start)):
                return []
            spots.append((start, start + len(text)))
        found.append((hole, spots))
    return sorted(found, key=lambda one: one[1])


def _holes(
    rows: Iterable[Row], body: Json, context: Context, place: _Place = _TOP
) -> Iterator[_Hole]:
    """List the rows of an object that were given media or a name."""
    for row in rows:
        if isinstance(row, Object):
            inner = body.get(row.name)
            if isinstance(inner, dict):
                yield from _holes(row.shape.rows_for(context), inner, context, place.of(row))
        elif isinstance(row, Field) and not row.after and context.mode not in row.aside_in:
            is_name = row.kind.holds is NAMED or row.name == EVENT_ID
            said = [name for name in row.names if body.get(name) is not None]
            if len(said) == 1 and (is_name or row.kind.holds in (SPOKEN, SEEN)):
                value = body[said[0]]
                is_array = isinstance(value, list)
                texts = cast("list[object]", value) if is_array else [value]
                if texts and all(isinstance(text, str) for text in texts):
                    count = len(texts) if is_array else None
                    yield _Hole(row=row, name=said[0], place=place, count=count, is_name=is_name)


def _is_right(frame: str, body: Json, literals: tuple[str, ...], holes: tuple[_Hole, ...]) -> bool:
    """Whether other words in the holes give the same message with these words."""
    words = [f"~{number}~" for number in range(len(literals) - 1)]
    if any(word in frame for word in words):
        return False
    text = "".join(chain.from_iterable(zip_longest(literals, words, fillvalue="")))
    try:
        parsed = parse_frame(text)
    except FrameError:
        return False
    left = iter(words)
    for hole in holes:
        try:
            texts = hole.texts(parsed)
        except (KeyError, TypeError):
            return False
        if texts != [next(left) for _ in range(hole.count or 1)]:
            return False
        hole.fill(parsed, hole.texts(body))
    return parsed == body


def _is_plain(name: str) -> bool:
    """Whether a string is written in JSON as it is."""
    is_short = len(name) <= NAME_CHARS_MAX
    return is_short and name.isascii() and name.isprintable() and "\\" not in name
