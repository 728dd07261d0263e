"""Messages like an earlier one: they differ in nothing but media and names, and are not parsed.

    frame     {"type":"input.append","input":{"audio":"c29tZQ==","force_listen":false}}
    literals  {"type":"input.append","input":{"audio":"        ","force_listen":false}}

A client sends up to fifty appends a second. Where the text between their media (the *literals*) is
that of an earlier frame, JSON gives the same object but for the media, the *holes*, and only the
rows of these are read again.

Rules: `read` gives exactly what parsing would give, or None: then parse. A hole is one whole string
of JSON, without escapes. Before a template is used, it is parsed once with other words in its
holes, which shows that the literals are what they seem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import Any, Final, cast

import attrs

from ..values.errors import FieldError, FrameError
from ..values.limits import FRAMES_MAX
from ..values.requests import Append, AppendSound, BadPicture
from .codec import Context, Json, Reading, parse_frame
from .kinds import NAMED, SEEN, SPOKEN
from .table import Field, Object, Row, Rule, Table

LITERAL_CHARS_MAX: Final = 1024
"""Kept of a frame, for each session; an append has 40 to 200 besides its media."""
NAME_CHARS_MAX: Final = 256
"""A message with a longer name is parsed, which bounds its commas and brackets."""
_TRIED_CHARS: Final = 32
"""A string is found by its beginning: to search for 85 kB takes longer than to parse them."""
EVENT_ID: Final = "event_id"
"""The client's own name for a message, in any dialect that has one."""


@attrs.frozen(kw_only=True)
class _Hole:
    """A row whose value differs: a string, or an array of `count` strings; `keys` lead to it."""

    row: Field
    name: str
    keys: tuple[str, ...]
    count: int | None
    is_name: bool
    is_event_id: bool
    path: str = attrs.field(init=False)

    @path.default
    def _path(self) -> str:
        return ".".join(("$", *self.keys))

    def first(self, texts: Iterator[str]) -> list[str]:
        """Take its strings off those of this hole and all later ones."""
        return list(islice(texts, self.count or 1))

    def texts(self, body: Json) -> list[str]:
        """Return its strings in a message."""
        value = self._object_in(body)[self.name]
        return [cast("str", value)] if self.count is None else cast("list[str]", value)

    def fill(self, body: Json, texts: list[str]) -> None:
        """Replace its strings in a message."""
        self._object_in(body)[self.name] = texts[0] if self.count is None else texts

    def _object_in(self, body: Json) -> dict[str, object]:
        for key in self.keys:
            body = cast("Json", body[key])
        return cast("dict[str, object]", body)


@attrs.frozen
class Alike:
    """A message that was read by a template, and its `event_id`, if it has any."""

    message: Append | AppendSound
    event_id: object


@attrs.frozen(kw_only=True)
class Template:
    """What such messages have in common.

    Attributes:
        literals: the text before, between and after the holes.
        event_id: of all of them; None if it is a hole.
    """

    literals: tuple[str, ...]
    _cls: type[Append] | type[AppendSound]
    _context: Context
    _holes: tuple[_Hole, ...]
    _are_names: tuple[bool, ...]
    _values: Mapping[str, Any]
    _event_id: object

    @classmethod
    def of(
        cls, frame: str, body: Json, message: Append | AppendSound, table: Table, context: Context
    ) -> Template | None:
        """Make the template of a message that the table has read; None if it is not possible."""
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
        if not _is_right(body, literals, holes):
            return None
        varied = {hole.row.attribute for hole in holes}
        names = (field.name for field in attrs.fields(type(message)))
        is_named = any(hole.is_event_id for hole in holes)
        return cls(
            literals=literals,
            cls=type(message),
            context=context,
            holes=holes,
            are_names=tuple(hole.is_name for hole in holes for _ in hole.texts(body)),
            values={name: getattr(message, name) for name in names if name not in varied},
            event_id=None if is_named else body.get(EVENT_ID),
        )

    def read(self, frame: str) -> Alike | None:
        """Read a frame like the first; None: it is to be parsed."""
        texts = self._cut(frame)
        if texts is None:
            return None
        values, event_id, left = dict(self._values), self._event_id, iter(texts)
        for hole in self._holes:
            here = hole.first(left)
            body: Json = {hole.name: here[0] if hole.count is None else here}
            try:
                hole.row.take(Reading(body, hole.path, "", self._context, values))
            except FieldError:
                return None
            if hole.is_event_id:
                event_id = here[0]
        frames = values.get("frames")
        if frames and any(isinstance(each, BadPicture) for each in frames):
            return None  # what is not base64 may not be JSON either
        return Alike(self._cls(**values), event_id)

    def _cut(self, frame: str) -> list[str] | None:
        """Return what is in the holes; None if the frame is another, or has escapes in them."""
        texts, at = list[str](), 0
        for literal, is_name in zip(self.literals, self._are_names, strict=False):
            if not frame.startswith(literal, at):
                return None
            start = at + len(literal)
            at = frame.find('"', start)
            if at < 0:
                return None
            text = frame[start:at]
            # Base64 is read strictly, but for line breaks, which JSON has only as escapes.
            if "\n" in text or "\r" in text or (is_name and not _is_plain(text)):
                return None
            texts.append(text)
        rest = self.literals[-1]
        return texts if frame.endswith(rest) and at + len(rest) == len(frame) else None


def _find(
    frame: str, body: Json, rows: tuple[Row, ...], context: Context
) -> list[tuple[_Hole, list[tuple[int, int]]]]:
    """Find the holes of a frame and the places of their strings, in order; empty if not sure."""
    found = []
    for hole in _holes(rows, body, context):
        spots = list[tuple[int, int]]()
        for text in hole.texts(body):
            after = spots[-1][1] if spots else 0  # pictures of one camera begin alike
            start = frame.find(f'"{text[:_TRIED_CHARS]}', after) + 1
            if not (start and frame.startswith(f'{text}"', start)):
                return []
            spots.append((start, start + len(text)))
        found.append((hole, spots))
    return sorted(found, key=lambda one: one[1])


def _holes(
    rows: tuple[Row, ...], body: Json, context: Context, keys: tuple[str, ...] = ()
) -> Iterator[_Hole]:
    """List the rows of an object that were given media or a plain name."""
    if any(isinstance(row, Rule) for row in rows):
        return  # A rule may read any field.
    for row in rows:
        if isinstance(row, Object):
            inner = body.get(row.name)
            if isinstance(inner, dict) and not row.attr:
                yield from _holes(row.shape.rows_for(context), inner, context, (*keys, row.name))
        elif isinstance(row, Field) and not row.after and context.mode not in row.aside_in:
            given = [name for name in row.names if body.get(name) is not None]
            if len(given) == 1:
                yield from _hole(row, given[0], body[given[0]], keys)


def _hole(row: Field, name: str, value: object, keys: tuple[str, ...]) -> Iterator[_Hole]:
    is_media = row.kind.holds in (SPOKEN, SEEN)
    is_name = row.kind.holds is NAMED or (row.name == EVENT_ID and not keys)
    count = None
    if is_name:
        is_hole = isinstance(value, str) and _is_plain(value)
    elif is_media and isinstance(value, list):
        count = len(value)
        is_hole = 0 < count <= FRAMES_MAX and all(isinstance(text, str) for text in value)
    else:
        is_hole = is_media and isinstance(value, str)
    if is_hole:
        is_event_id = name == EVENT_ID and not keys
        yield _Hole(
            row=row, name=name, keys=keys, count=count, is_name=is_name, is_event_id=is_event_id
        )


def _is_right(body: Json, literals: tuple[str, ...], holes: tuple[_Hole, ...]) -> bool:
    """Whether the literals, parsed with other words in the holes, are the message but for these."""
    words = [f"~{number}~" for number in range(len(literals) - 1)]
    given, before = "".join(literals), [text for hole in holes for text in hole.texts(body)]
    if any(word in given or word in before for word in words):
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
        if texts != hole.first(left):
            return False
        hole.fill(parsed, hole.texts(body))
    return parsed == body


def _is_plain(name: str) -> bool:
    """Whether a name is written in JSON as it is."""
    is_short = len(name) <= NAME_CHARS_MAX
    return is_short and name.isascii() and name.isprintable() and not {"\\", '"'} & set(name)
