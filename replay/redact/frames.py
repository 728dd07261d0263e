"""What a client's frames hold, field by field, and the same frames without it.

- `spans` finds the places of a text that hold values, each with its path. It takes any text, be it
  JSON or not, and never fails: content in a broken frame must be found too. Everything but
  punctuation, white space, `true`, `false` and `null` is in some span.
- `HOLDS` names every field that a dialect reads, and what its row says that it holds. What has no
  name there is a client's own text, its key too: it may hold anything.
- A frame is changed where it holds something to be taken out, and nowhere else.
- A value that is refused is replaced by one that is refused; so is a frame. A number is a setting
  only where a row takes it: any other may be a telephone number.

It knows nothing of sessions: the same frame is the same wherever it comes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, Literal, TypeAlias

import attrs
import orjson
import pybase64

from protocol.values.errors import FrameError
from protocol.values.frames import Frame, Utf8Text
from protocol.values.limits import CHAT_FRAME_BYTES_MAX, JSON_DEPTH_MAX, NS_PER_MS
from protocol.wire import codec as c
from protocol.wire.codec import DATA_URL, FieldType, parse_frame
from protocol.wire.dialects import DIALECTS
from protocol.wire.dialects.realtime import FULL_DUPLEX, TURN_BASED
from protocol.wire.dialects.shared import OPENAI_SESSIONS
from protocol.wire.table import Field, Object, Table, tables_in, walk

from . import content
from .content import Kind, Policy, Pseudonyms, Side, Tally

# -- the places that hold values -------------------------------------------------------------------


SpanKind = Literal["key", "text", "number", "word"]
Path: TypeAlias = "tuple[str | int, ...]"

_TOKEN: Final = re.compile(r'[{}\[\],:"]|[^\s{}\[\],:"]+')
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SAYS_NOTHING: Final = frozenset({"true", "false", "null"})


@attrs.frozen
class Span:
    """A place in a text.

    `start`, `end`: of a string, between its quotes. `kind`: `word` is not JSON. `path`: keys and
    indices, its own last; empty where a text nests deeper than a frame may.
    """

    start: int
    end: int
    kind: SpanKind
    path: Path


@attrs.define
class _Level:
    """An open object or array, with its current key or index."""

    is_object: bool
    place: str | int
    wants_key: bool


def spans(text: str) -> Iterator[Span]:
    """The spans of a text, in order, without overlaps."""
    levels: list[_Level] = []
    at = 0
    while (found := _TOKEN.search(text, at)) is not None:
        token, start, at = found[0], found.start(), found.end()
        if token == '"':
            end = _string_end(text, at)
            is_key = bool(levels) and levels[-1].wants_key
            if is_key:
                levels[-1].place = unescaped(text[at:end])
            yield Span(at, end, "key" if is_key else "text", _path(levels))
            at = end + 1
        elif len(token) == 1 and token in "{}[],:":
            _punctuate(token, levels)
        elif token not in _SAYS_NOTHING:
            kind: SpanKind = "number" if _NUMBER.fullmatch(token) else "word"
            yield Span(start, at, kind, _path(levels))


def replaced(text: str, changes: list[tuple[Span, str]]) -> str:
    """A text with some of its spans, in order, replaced."""
    pieces, at = [], 0
    for span, instead in changes:
        pieces += [text[at : span.start], instead]
        at = span.end
    return "".join([*pieces, text[at:]])


def unescaped(raw: str) -> str:
    """The value of a string's raw text; invalid JSON is unchanged."""
    if "\\" not in raw:
        return raw
    try:
        return str(orjson.loads(f'"{raw}"'))
    except orjson.JSONDecodeError:
        return raw


def _string_end(text: str, start: int) -> int:
    """The quote that ends a string: an even number of backslashes precedes it."""
    end = text.find('"', start)
    while end >= 0:
        escapes = end
        while escapes > start and text[escapes - 1] == "\\":
            escapes -= 1
        if (end - escapes) % 2 == 0:
            return end
        end = text.find('"', end + 1)
    return len(text)


def _punctuate(token: str, levels: list[_Level]) -> None:
    if token in "{[":
        is_object = token == "{"
        levels.append(_Level(is_object, "" if is_object else 0, is_object))
    elif not levels:
        return
    elif token in "}]":
        levels.pop()
    elif token == ":":
        levels[-1].wants_key = False
    elif isinstance(levels[-1].place, int):
        levels[-1].place += 1
    else:
        levels[-1].wants_key = levels[-1].is_object


def _path(levels: list[_Level]) -> Path:
    return tuple(level.place for level in levels) if len(levels) <= JSON_DEPTH_MAX else ()


# -- what the fields hold --------------------------------------------------------------------------


SETTING: Final = None
"""What a field holds that holds nothing personal: a number, a switch, a word, or other fields."""
TEXT: Final = c.USER_TEXT
_PLAYED: Final = "played_ms"
"""A time since the session began: one that is still to come says something else."""
_CALL: Final = frozenset({"id", "tool_call_id", "call_id"})
_CALL_ID: Final = re.compile(r"call_[0-9a-f]{12}")
"""An id of a call that a session made: it says nothing, and its result must find it."""
_PART: Final = "data"
"""The one field whose key has several meanings: of a part of a message, told by its `type`."""


def _tables() -> Iterator[Table]:
    """List the tables of all requests, and those of the objects in them."""
    requests = [dialect.requests("video") for dialect in DIALECTS.values()]
    for _, table in chain(*requests, DIALECTS["realtime"].requests("chat")):
        yield table
        for row in walk(table.shape.rows):
            yield from tables_in(row.kind) if isinstance(row, Field) else ()


def _fields(tables: Iterable[Table]) -> tuple[Field, ...]:
    rows = (row for table in tables for row in walk(table.shape.rows))
    return tuple(row for row in rows if isinstance(row, Field))


def held(tables: Iterable[Table]) -> Mapping[str, c.UserContent | None]:
    """Say what each field holds by its key, wherever it stands, as its row says."""
    found: dict[str, c.UserContent | None] = {}
    for table in tables:
        found |= dict.fromkeys(table.tag, SETTING)
        for row in walk(table.shape.rows):
            holds = (row.holds or row.kind.holds) if isinstance(row, Field) else SETTING
            for name in row.names:
                found[name] = found.get(name) or holds
    return found


_TABLES: Final = tuple(_tables())
_FIELDS: Final = _fields(_TABLES)
HOLDS: Final[Mapping[str, c.UserContent | None]] = {**held(_TABLES), _PART: TEXT}
"""What each field holds; `data`, where no other field says what it is, may be any text."""
_PARTS: Final[Mapping[str, c.UserContent]] = {
    table.tag["type"]: row.kind.holds
    for table in _TABLES
    for row in table.shape.rows
    if isinstance(row, Field) and row.name == _PART and row.kind.holds is not None
}
"""The content of `data`, by its part's `type`."""
_KINDS: Final[Mapping[str, tuple[FieldType, ...]]] = {
    name: tuple(row.kind for row in _FIELDS if name in row.names)
    for name in {name for row in _FIELDS for name in row.names}
}
"""The kinds of value that a key has, in all dialects."""
_OPAQUE: Final = frozenset(
    row.name
    for row in _FIELDS
    if row.kind.schema.get("type") == "object" and not tables_in(row.kind)
) - {row.name for table in _TABLES for row in walk(table.shape.rows) if isinstance(row, Object)}
"""Not read below in any dialect: all keys are the client's own."""
WORDS: Final = frozenset(
    (
        *(word for table in _TABLES for word in table.tag.values()),
        *(word for row in _FIELDS for word in row.kind.schema.get("enum", ()) if word),
        *(word for row in _FIELDS if isinstance(word := row.kind.schema.get("const"), str)),
        *(FULL_DUPLEX, TURN_BASED, *OPENAI_SESSIONS),
    )
)
"""Values of settings: the words of the protocols."""


_LINE_BREAK: Final = re.compile(r"\\[nr]|\\u000[aAdD]")
"""As JSON escapes it in a string."""


# -- frames without content ------------------------------------------------------------------------


@attrs.define(kw_only=True)
class FrameEditor:
    """Takes a policy's content out of frames.

    Attributes:
        is_rehearsal: do not draw pictures: the frames are discarded.
        is_shorter: remove words instead of replacing them.
        is_pcm16: sound is 16-bit samples: of a transcription, or of `events.EVENT_IDS`.
        has_line_breaks: base64 of sound may have line breaks.
        known_words: further values of settings: the server's names of its model.
        changed: the kinds that were taken out of some frame.
        names: what replaces names, the same in events.
    """

    policy: Policy
    tally: Tally
    is_rehearsal: bool = False
    is_shorter: bool = False
    is_pcm16: bool = False
    has_line_breaks: bool = False
    known_words: frozenset[str] = frozenset()
    changed: set[Kind] = attrs.Factory(set)
    names: Pseudonyms = attrs.field(factory=Pseudonyms, init=False)

    def edit(self, frame: Frame, at_ns: int) -> Frame:
        """The frame without content, at its time in nanoseconds."""
        if isinstance(frame, Utf8Text):
            frame = frame.data.decode()
        if isinstance(frame, str):
            return self._edit_text(frame, at_ns)
        if frame and self.policy.covers("text", "user", at_ns):
            self.tally.count("text", "user", len(frame))
            return bytes(len(frame))
        return frame

    def hide(self, picture: bytes) -> bytes:
        """Replace a picture; counts one that could not be drawn."""
        if self.is_rehearsal:
            return content.header_only(picture)
        hidden = content.hide_picture(picture)
        self.tally.headers_only += any(hidden) and not content.is_whole(hidden)
        return hidden

    def _edit_text(self, frame: str, at_ns: int) -> str:
        body, keys = _body(frame), Pseudonyms()
        changes: list[tuple[Span, str]] = []
        for span in spans(frame):
            side, holds = _judge(span, frame, body, self.known_words, at_ns)
            if self.is_shorter and span.kind != "text":
                continue
            if holds is None or not self.policy.covers(holds.kind, side, at_ns):
                continue
            old = frame[span.start : span.end]
            new = keys.of(old) if span.kind == "key" else self._replace(span, old, holds)
            if new != old:
                changes.append((span, new))
                self.changed.add(holds.kind)
                self.tally.count(holds.kind, side, _size_bytes(old, holds))
        edited = replaced(frame, changes)
        if changes and _is_refused(frame) and not _is_refused(edited):
            return content.fill(frame)
        return edited

    def _replace(self, span: Span, old: str, holds: c.UserContent) -> str:
        if span.kind == "number":
            accepted, like = _accepted(span, old), content.numbers(old)
            return next((new for new in like if _accepted(span, new) == accepted), like[0])
        if span.kind == "word":
            return content.fill(old)
        if holds.form == "words":
            return "" if self.is_shorter else content.fill_json(old)
        if holds.pattern is not None and not holds.pattern.fullmatch(unescaped(old)):
            return content.refuse_json(old)
        if holds.form == "name":
            return content.fill_json(old) if "\\" in old else self.names.of(old)
        return self._replace_file(old, holds.form)

    def _replace_file(self, old: str, form: str) -> str:
        if form == "pcm" and self.has_line_breaks and _LINE_BREAK.search(old):
            return _with_line_breaks_of(old, self._replace_file(_LINE_BREAK.sub("", old), form))
        text = unescaped(old)
        url = DATA_URL.match(text)
        known = next(filter(text.startswith, c.IMAGE_URL_HEADS.values()), "")
        # The media type in a data URL may be any words.
        unnamed = f"data:{'x' * (url.end() - len('data:;base64,'))};base64," if url else ""
        head = known or unnamed
        try:
            data = pybase64.b64decode(text[url.end() :] if url else text, validate=True)
        except ValueError:
            return head + content.refuse_json(old.removeprefix(url[0] if url else ""))
        hide: Mapping[str, Callable[[bytes], bytes]] = {
            "pcm": content.mute16 if self.is_pcm16 else content.mute,
            "sound": content.mute_file,
            "picture": self.hide,
            "video": content.hide_video,
        }
        return head + pybase64.b64encode_as_string(hide[form](data))


def _with_line_breaks_of(old: str, new: str) -> str:
    """Insert the line breaks of one JSON string into another at the same places."""
    pieces, at, behind = list[str](), 0, 0
    for found in _LINE_BREAK.finditer(old):
        end = at + found.start() - behind
        pieces += [new[at:end], found[0]]
        at, behind = end, found.end()
    return "".join([*pieces, new[at:]])


def _fits(schema: c.Schema, number: float) -> bool:
    """Whether a number is a value that a schema describes, in any context."""
    kinds = schema.get("type")
    wanted = {"number", "integer"} if isinstance(number, int) else {"number"}
    if wanted.isdisjoint(kinds if isinstance(kinds, list) else [kinds]):
        return False
    is_named = number in schema.get("enum", [schema.get("const", number)])
    low, high = schema.get("minimum", number), schema.get("maximum", number)
    return is_named and low <= number <= high and number > schema.get("exclusiveMinimum", -math.inf)


def _accepted(span: Span, text: str) -> list[bool] | None:
    """Which of the rows for a key accept a number as its value; None: it is not JSON."""
    key = span.path[-1] if span.path else 0
    kinds = _KINDS.get(key, ()) if isinstance(key, str) else ()
    try:
        number = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return [_fits(kind.schema, number) for kind in kinds]


def _judge(
    span: Span, frame: str, body: object, known_words: frozenset[str], at_ns: int
) -> tuple[Side, c.UserContent | None]:
    """The side and content of a span; None for no content."""
    key = next((place for place in reversed(span.path) if isinstance(place, str)), None)
    if key is None or not _OPAQUE.isdisjoint(span.path[:-1]) or key not in HOLDS:
        return "user", TEXT
    if span.kind == "key":
        return "user", None
    holds, word = HOLDS[key], frame[span.start : span.end]
    if key in _CALL and _CALL_ID.fullmatch(word):
        return "user", None
    if span.kind == "number" and any(_accepted(span, word) or ()):
        is_to_come = span.path[-1] == _PLAYED and orjson.loads(word) > at_ns // NS_PER_MS
        if not is_to_come:
            return "user", None
    if holds is SETTING and span.kind == "number":
        return "user", TEXT
    if holds is SETTING:
        is_known = word in WORDS or unescaped(word) in known_words
        return "user", None if is_known else TEXT
    if holds is c.VOICE_NAMED and unescaped(word) in c.STOCK_VOICES:
        return "user", None
    if key == _PART:
        part = _at(body, span.path[:-1])
        kind = part.get("type") if isinstance(part, dict) else None
        holds = _PARTS.get(kind, TEXT) if isinstance(kind, str) else TEXT
    return _in_conversation(span, body, holds)


def _in_conversation(span: Span, body: object, holds: c.UserContent) -> tuple[Side, c.UserContent]:
    """The side and content of a part of a conversation; elsewhere the client's."""
    if "messages" not in span.path:
        return "user", holds
    message = _at(body, span.path[: span.path.index("messages") + 2])
    role = message.get("role") if isinstance(message, dict) else None
    if role == "system" and holds is TEXT:
        return "user", c.PROMPTED
    return ("model" if role == "assistant" else "user"), holds


def _at(body: object, path: tuple[str | int, ...]) -> object:
    for place in path:
        if isinstance(body, dict) and isinstance(place, str):
            body = body.get(place)
        elif isinstance(body, list) and isinstance(place, int) and place < len(body):
            body = body[place]
        else:
            return None
    return body


def _body(frame: str) -> object:
    try:
        return orjson.loads(frame)
    except orjson.JSONDecodeError:
        return None


def _is_refused(frame: str) -> bool:
    try:
        parse_frame(frame, CHAT_FRAME_BYTES_MAX)
    except FrameError:
        return True
    return False


def _size_bytes(old: str, holds: c.UserContent) -> int:
    """The bytes taken out; of a file those of its base64."""
    if holds.form in {"words", "name"}:
        return len(old.encode("utf-8", "surrogatepass"))
    return len(old.rstrip("=")) * 3 // 4
