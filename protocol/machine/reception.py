"""Judges a client's frame in the order of the wire: JSON, close, state, type, fields.

A refused frame is answered here; an accepted one becomes a checked message, which `session` hands
over. The kind decides what an unreadable frame does (`Kind.frame_refused`).

A large refused frame is shortened before it is recorded (`Reception.shortened`): a client that
sends one after the other would fill the disk.

An append like an earlier one is read by that one's template (`AppendTemplates`), also before its
step, to see whether it only brings sound to be kept (`read_ahead`):

    frame     {"type":"input.append","input":{"audio":"c29tZQ==","force_listen":false}}
    literals  {"type":"input.append","input":{"audio":"        ","force_listen":false}}

A client sends up to fifty appends a second. Where the text between their media (the *literals*) is
that of an earlier frame, JSON gives the same object but for the media (the *variables*). Only the
rows of these are read again. `Template.read` gives exactly what parsing would give, or None: then
parse. A variable is one whole string of JSON, without escapes. Before a template is used, it is
parsed once with other words in its variables, which shows that the literals are what they seem.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice, zip_longest
from typing import Any, Final, cast

import attrs

from ..values import requests as rq
from ..values.behaviour import CANCELS_TURNS, DUPLEX_TOOLS, DURING_TURNS, ONLY_MODEL
from ..values.errors import CLOSE_TOO_BIG, ErrorCode, FieldError, FrameError
from ..values.events import EVENT_IDS, FrameReceived
from ..values.frames import KEPT_CHARS, Frame, Refused, Shortened, Utf8Text, not_json
from ..values.limits import FRAMES_MAX, OF_MODE
from ..values.records import DIGEST_BYTES
from ..values.requests import Append, AppendSound, BadPicture
from ..values.state import ACCEPT, KEEP, OPENAI_GATES, Gate, Verdict, judge
from ..wire import dialects
from ..wire.codec import NAMED, SEEN, SPOKEN, Context, Json, ParseState, dump_frame, parse_frame
from ..wire.dialects.shared import OPENAI_SESSIONS, STANDALONE, TOOL_RESULT, is_openai_update
from ..wire.dialects.transcription import begins_with_create
from ..wire.table import Dialect, Field, Object, Row, Rule, Table
from .kind import Kind

SHORTENED_BYTES_MIN: Final = 4096
"""Shorter frames are recorded whole, refused or not: a longer one keeps half of this."""
WORD_CHARS_MAX: Final = 64
"""The longest type of a message has 26 characters."""
OUTLINE_FIELDS_MAX: Final = 32
"""Fields in a message's outline: no source's message has as many."""

_GATE_WORDS: Final[Mapping[Gate, str]] = {
    Gate.QUEUED: "while queued",
    Gate.WAITING: "while queued",
    Gate.KEPT: "while queued",
    Gate.CONNECTED: "before the session is set up",
    Gate.OPENING: "while the session is being set up",
    Gate.ACTIVE: "in a session that is set up",
    Gate.PAUSED: "while paused",
    Gate.TURN: "during a turn",
    Gate.UNCHOSEN: "before a model is chosen",
    Gate.TRANSCRIBING: "in a transcription",
    Gate.STEERED: "in a session that is set up",
}
"""When a client's event was refused, in the words of its error."""


_AFTERWARDS: Final[Mapping[tuple[Gate, rq.Request], str]] = {
    (Gate.WAITING, rq.Request.INIT): ": no room to keep it now, send it again after the queue",
    (Gate.KEPT, rq.Request.INIT): ": the first one is kept, and is taken after the queue",
}
"""The words for an opening message that is refused while queued."""

_SETTING_UP: Final = frozenset(
    {Gate.QUEUED, Gate.WAITING, Gate.KEPT, Gate.CONNECTED, Gate.UNCHOSEN}
)
_NESTED: Final = ("payload", "session")
"""Fields that may hold the settings of a message that sets a session up."""

_OPENAI_WORDS: Final = (
    "$.session.type: OpenAI's Realtime API is not spoken here; begin with session.init (realtime), "
    "with session.update and session.instructions but no session.type (duplex-v1), or at "
    "mode=transcription with session.update and model (transcription)"
)
"""The error of a client of OpenAI before its connection ends: it can never be right here."""


_WITHOUT_CONTENT: Final = Refused(
    code=ErrorCode.INVALID_PAYLOAD, message="this message was recorded without its content"
)
"""The answer to such a message in a fork, where it would be accepted now."""


# -- templates of appends -----------------------------------------------------------------------

LITERAL_CHARS_MAX: Final = 1024
"""Kept of a frame, for each session; an append has 40 to 200 besides its media."""
NAME_CHARS_MAX: Final = 256
"""A message with a longer name is parsed, which bounds its commas and brackets."""
_TRIED_CHARS: Final = 32
"""A string is found by its beginning: to search for 85 kB takes longer than to parse them."""
EVENT_ID: Final = "event_id"
"""The client's own name for a message, in any dialect that has one."""


@attrs.frozen(kw_only=True)
class _Variable:
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
        """Take its strings off those of this variable and all later ones."""
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
class TemplateMatch:
    """A message that was read by a template, and its `event_id`, if it has any."""

    message: Append | AppendSound
    event_id: object


@attrs.frozen(kw_only=True)
class Template:
    """What such messages have in common.

    Attributes:
        literals: the text before, between and after the variables.
        event_id: of all of them; None if it is a variable.
    """

    literals: tuple[str, ...]
    _cls: type[Append] | type[AppendSound]
    _context: Context
    _fields: tuple[_Variable, ...]
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
        fields = tuple(field for field, _ in found)
        if not _is_right(body, literals, fields):
            return None
        varied = {field.row.attribute for field in fields}
        names = (field.name for field in attrs.fields(type(message)))
        is_named = any(field.is_event_id for field in fields)
        return cls(
            literals=literals,
            cls=type(message),
            context=context,
            fields=fields,
            are_names=tuple(field.is_name for field in fields for _ in field.texts(body)),
            values={name: getattr(message, name) for name in names if name not in varied},
            event_id=None if is_named else body.get(EVENT_ID),
        )

    def read(self, frame: str) -> TemplateMatch | None:
        """Read a frame like the first; None: it is to be parsed."""
        texts = self._cut(frame)
        if texts is None:
            return None
        values, event_id, left = dict(self._values), self._event_id, iter(texts)
        for field in self._fields:
            here = field.first(left)
            body: Json = {field.name: here[0] if field.count is None else here}
            try:
                field.row.take(ParseState(body, field.path, "", self._context, values))
            except FieldError:
                return None
            if field.is_event_id:
                event_id = here[0]
        frames = values.get("frames")
        if frames and any(isinstance(each, BadPicture) for each in frames):
            return None  # what is not base64 may not be JSON either
        return TemplateMatch(self._cls(**values), event_id)

    def _cut(self, frame: str) -> list[str] | None:
        """Return the variables' strings; None if the frame is another, or has escapes in them."""
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
) -> list[tuple[_Variable, list[tuple[int, int]]]]:
    """Find a frame's variables and the places of their strings, in order; empty if not sure."""
    found = []
    for field in _fields(rows, body, context):
        spots = list[tuple[int, int]]()
        for text in field.texts(body):
            after = spots[-1][1] if spots else 0  # pictures of one camera begin alike
            start = frame.find(f'"{text[:_TRIED_CHARS]}', after) + 1
            if not (start and frame.startswith(f'{text}"', start)):
                return []
            spots.append((start, start + len(text)))
        found.append((field, spots))
    return sorted(found, key=lambda one: one[1])


def _fields(
    rows: tuple[Row, ...], body: Json, context: Context, keys: tuple[str, ...] = ()
) -> Iterator[_Variable]:
    """List the rows of an object that were given media or a plain name."""
    if any(isinstance(row, Rule) for row in rows):
        return  # A rule may read any field.
    for row in rows:
        if isinstance(row, Object):
            inner = body.get(row.name)
            if isinstance(inner, dict) and not row.attr:
                yield from _fields(row.shape.rows_for(context), inner, context, (*keys, row.name))
        elif isinstance(row, Field) and not row.after and context.mode not in row.aside_in:
            given = [name for name in row.names if body.get(name) is not None]
            if len(given) == 1:
                yield from _variable(row, given[0], body[given[0]], keys)


def _variable(row: Field, name: str, value: object, keys: tuple[str, ...]) -> Iterator[_Variable]:
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
        yield _Variable(
            row=row, name=name, keys=keys, count=count, is_name=is_name, is_event_id=is_event_id
        )


def _is_right(body: Json, literals: tuple[str, ...], fields: tuple[_Variable, ...]) -> bool:
    """Whether the literals, parsed with other words in place, are the message but for these."""
    words = [f"~{number}~" for number in range(len(literals) - 1)]
    given, before = "".join(literals), [text for field in fields for text in field.texts(body)]
    if any(word in given or word in before for word in words):
        return False
    text = "".join(chain.from_iterable(zip_longest(literals, words, fillvalue="")))
    try:
        parsed = parse_frame(text)
    except FrameError:
        return False
    left = iter(words)
    for field in fields:
        try:
            texts = field.texts(parsed)
        except (KeyError, TypeError):
            return False
        if texts != field.first(left):
            return False
        field.fill(parsed, field.texts(body))
    return parsed == body


def _is_plain(name: str) -> bool:
    """Whether a name is written in JSON as it is."""
    is_short = len(name) <= NAME_CHARS_MAX
    return is_short and name.isascii() and name.isprintable() and not {"\\", '"'} & set(name)


TEMPLATE_TRIES: Final = 8
"""Appends of which a template may be made; each append that a template reads gives one try back.
Where all appends of a client differ, they soon cost no more than their parsing."""
TEMPLATES: Final = 2
"""Kept for each session: one piece of each second may differ from the rest."""


class AppendTemplates:
    """The templates by which a session's appends are read without parsing, where they are alike."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Final = kind
        self._templates: deque[Template] = deque(maxlen=TEMPLATES)
        self._made_in: tuple[Dialect, Context] | None = None
        self._tries = TEMPLATE_TRIES

    def learn(self, reading: JudgedFrame, context: Context) -> None:
        """Make the template of appends like one that had to be parsed."""
        message, frame, dialect = reading.message, reading.frame, reading.dialect
        if not (isinstance(message, rq.Append | rq.AppendSound) and isinstance(frame, str)):
            return
        if self._made_in != (dialect, context):
            self._made_in, self._tries = (dialect, context), TEMPLATE_TRIES
            self._templates.clear()
        table = dialect.table(rq.Request.APPEND, type(message))
        if table is None or not self._tries:
            return
        self._tries -= 1
        template = Template.of(frame, reading.body, message, table, context)
        known = [it.literals for it in self._templates]
        if template is not None and template.literals not in known:
            self._templates.append(template)

    def read(self, gate: Gate, frame: Frame, context: Context) -> TemplateMatch | None:
        """Read a frame like an earlier append; None: it is to be parsed."""
        if (
            not isinstance(frame, str)
            or self._made_in != (self._kind.peer.dialect, context)
            or judge(gate, rq.Request.APPEND) != ACCEPT
            or len(frame) > OF_MODE[self._kind.step.opened.mode].frame_bytes_max
        ):
            return None
        for template in self._templates:
            alike = template.read(frame)
            if alike is not None:
                self._tries = min(self._tries + 1, TEMPLATE_TRIES)
                return alike
        return None


# -- judging a frame ------------------------------------------------------------------------------


@attrs.define(kw_only=True)
class JudgedFrame:
    """A frame as it was read and judged: once, for its record and for its step.

    Attributes:
        dialect: the session's from here on.
        cause: the client's own name for the message.
        message: what was read; it is accepted unless it is refused.
        refused: the answer to a frame that is refused.
        unreadable: it is not a message.
        is_foreign: a client of OpenAI sent it, and can never be right here.
        is_unrecorded: it asks not to be recorded; also where it is refused, or has to wait.
        is_kept: it is an opening message, and is read after the queue.
        body, request: None of a frame that a template read.
    """

    frame: Frame
    dialect: Dialect
    cause: str = ""
    message: rq.ClientMessage | None = None
    refused: Refused | None = None
    unreadable: FrameError | None = None
    is_foreign: bool = False
    is_unrecorded: bool = False
    is_kept: bool = False
    body: Json = attrs.Factory(dict)
    request: rq.Request | None = None


class Reception:
    """Reads the frames of one session."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Final = kind
        self._opened, self._made = kind.step.opened, _context(kind)
        self._reading: JudgedFrame | None = None
        self._templates: Final = AppendTemplates(kind)

    @property
    def _context(self) -> Context:
        """What reading depends on; only a fork changes it."""
        step = self._kind.step
        if step.opened is not self._opened or step.is_forking != self._made.is_fork:
            self._opened, self._made = step.opened, _context(self._kind)
        return self._made

    def read(self, event: FrameReceived) -> rq.ClientMessage | None:
        """Read a frame in a session that is not CLOSED; None if it was answered, or is kept."""
        kind, peer = self._kind, self._kind.peer
        reading, self._reading = self._reading, None
        if reading is None or reading.frame is not event.frame:
            reading = self._judge(kind.gate, event)
        if reading.unreadable is not None:
            is_binary = isinstance(event.frame, bytes)
            code = ErrorCode.INVALID_FRAME if is_binary else ErrorCode.INVALID_JSON
            kind.frame_refused(reading.unreadable, code)
            return None
        peer.cause = reading.cause
        if reading.is_foreign:
            kind.send_error(ErrorCode.INVALID_EVENT, _OPENAI_WORDS)
            kind.end("rejected", words=ErrorCode.INVALID_EVENT)
            return None
        if reading.is_unrecorded:
            kind.forget_recording()
        if reading.is_kept:
            peer.early = event.frame
            return None
        peer.dialect = reading.dialect
        if isinstance(reading.message, rq.Init):
            peer.wants_notices = reading.message.notices
        if reading.refused is not None:
            kind.reject(reading.refused)
            return None
        return reading.message

    def read_ahead(self, gate: Gate, frame: Frame) -> rq.ClientMessage | None:
        """Read an append like an earlier one, before its step; None for any other frame."""
        reading = self._reading = self._read_like(gate, frame)
        return None if reading is None else reading.message

    def forget_ahead(self) -> None:
        """Forget a frame that was read before its step: it is taken already."""
        self._reading = None

    def _read_like(self, gate: Gate, frame: Frame) -> JudgedFrame | None:
        """Read an append like an earlier one; None: it is to be parsed, or refused."""
        kind = self._kind
        like = self._templates.read(gate, frame, self._context)
        if like is None or kind.refusal(like.message) is not None:
            return None
        cause = _cause_of(kind, like.event_id)
        return JudgedFrame(
            frame=frame, dialect=kind.peer.dialect, cause=cause, message=like.message
        )

    def shortened(self, event: FrameReceived) -> FrameReceived:
        """Return a large frame, or its outline if it is refused; the session is not CLOSED.

        The outline is refused in the same words as the frame; if it would not be, the answer goes
        along. An opening message that is kept while queued stays whole: it is read later.
        """
        if event.frame is None:
            return event
        if self._reading is not None and self._reading.frame is event.frame:
            return event  # it was read ahead, and is accepted
        gate = self._kind.gate
        reading = self._reading = self._judge(gate, event)
        if reading.unreadable is not None:
            error, self._reading = reading.unreadable, None
            if error.close_code == CLOSE_TOO_BIG:
                return shorten(event, None)
            return shorten(event, _start_of(event.frame), unreadable=error.reason)
        refused = reading.refused
        if refused is None and not reading.is_foreign:
            return event
        kind, outline, request = self._kind, _outline(reading.body), reading.request
        if request is None or _classified(kind, outline) is not request:
            return event
        self._reading = None  # the outline is read
        if refused is None or _refusal(kind, gate, request, outline) == refused:
            return shorten(event, dump_frame(outline))
        return shorten(event, dump_frame(outline), refused=refused)

    def _judge(self, gate: Gate, event: FrameReceived) -> JudgedFrame:
        """Read and judge a frame, changing nothing in the session."""
        kind, frame, is_whole = self._kind, event.frame, event.shortened is None
        like = self._read_like(gate, frame) if is_whole else None
        if like is not None:
            return like
        reading = JudgedFrame(frame=frame, dialect=kind.peer.dialect)
        try:
            body = reading.body = self._body_of(event)
        except FrameError as error:
            reading.unreadable = error
            return reading
        reading.cause = _cause_of(kind, body.get(EVENT_ID))
        request = reading.request = _classified(kind, body)
        if _is_openai(kind, gate, body):
            reading.is_foreign = True
            return reading
        is_init = request is rq.Request.INIT and gate in _SETTING_UP
        reading.is_unrecorded = is_init and _is_unrecorded(kind, body)
        if is_whole and event.has_room and judge(gate, request) == KEEP:
            reading.is_kept = True
            return reading
        reading.refused = _refusal(kind, gate, request, body)
        is_as_before = event.shortened is not None and event.shortened.refused is None
        if reading.refused is None and not is_as_before:
            reading.dialect = _dialect_after(kind.peer.dialect, gate, request, body)
            if is_whole:
                self._parse(reading, request)
        if event.shortened is not None:
            reading.refused = event.shortened.refused or reading.refused or _WITHOUT_CONTENT
        return reading

    def _parse(self, reading: JudgedFrame, request: rq.Request) -> None:
        """Read the fields of a message that the session's state allows."""
        context = self._context
        try:
            message = reading.dialect.parse(request, reading.body, context)
        except FieldError as error:
            reading.refused = Refused(code=error.code, message=error.message)
            return
        reading.message = message
        if not isinstance(message, rq.CloseRequest | rq.Report | rq.Played):
            reading.refused = self._kind.refusal(message)
        self._templates.learn(reading, context)

    def _body_of(self, event: FrameReceived) -> Json:
        """Read a frame as a JSON object; `FrameError` if it is not one."""
        if event.shortened is not None and event.shortened.unreadable:
            raise not_json(event.shortened.unreadable)
        return parse_frame(event.frame, OF_MODE[self._kind.step.opened.mode].frame_bytes_max)


def shorten(
    event: FrameReceived, frame: Frame, *, unreadable: str = "", refused: Refused | None = None
) -> FrameReceived:
    """Replace a frame by its first part, with a description of the original."""
    whole = event.frame
    assert whole is not None
    data = whole.data if isinstance(whole, Utf8Text) else whole
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    start = _start_of(whole)
    head = start.decode(errors="replace") if isinstance(start, bytes) else start
    shortened = Shortened(
        size_bytes=len(data),
        blake2b=hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest(),
        head="" if unreadable else head,
        unreadable=unreadable,
        refused=refused,
    )
    return attrs.evolve(event, frame=frame, shortened=shortened)


def _start_of(frame: str | bytes | Utf8Text) -> str | bytes:
    if isinstance(frame, Utf8Text):
        return frame.data[:KEPT_CHARS].decode(errors="ignore")
    return frame[:KEPT_CHARS]


_DECIDING: Final = ("type", "session", "payload", "record", "model")
"""The fields that decide what a message is (`classify`); they stand first in its outline."""
_OUTLINES: Final[Mapping[type, object]] = {str: "", int: 0, float: 0.0, list: [], dict: {}}


def _cause_of(kind: Kind, name: object) -> str:
    """The client's own name for its message, where its dialect has one."""
    if kind.step.opened.endpoint not in EVENT_IDS:
        return ""
    return name if isinstance(name, str) and len(name) <= WORD_CHARS_MAX else ""


def _classified(kind: Kind, body: Json) -> rq.Request:
    """Return the kind of request of a message, as the session's behaviour and mode know it."""
    request = kind.peer.dialect.classify(body)
    is_chat, is_known = kind.step.opened.mode == "chat", True
    if body.get("type") in (TOOL_RESULT, STANDALONE):
        is_known = not is_chat and kind.step.behaves(DUPLEX_TOOLS)
    elif kind.peer.dialect is dialects.LIVE and request in (
        rq.Request.TOOL_RESULT,
        rq.Request.RESPOND,
    ):
        is_known = kind.step.behaves(DUPLEX_TOOLS)
    elif request is rq.Request.CANCEL and kind.peer.dialect is dialects.REALTIME:
        is_known = is_chat and kind.step.behaves(CANCELS_TURNS)
    return request if is_known else rq.Request.UNKNOWN


def _outline(body: Json) -> Json:
    """Reduce a message to its short words, which show its type."""
    keys = [*(key for key in _DECIDING if key in body), *islice(body, OUTLINE_FIELDS_MAX)]
    return {key: _outline_of(key, body[key]) for key in keys if len(key) <= WORD_CHARS_MAX}


def _outline_of(key: str, value: object) -> object:
    if isinstance(value, str) and len(value) <= WORD_CHARS_MAX:
        return value
    if key in _NESTED and isinstance(value, dict):
        is_openai = key == "session" and value.get("type") in OPENAI_SESSIONS
        kept = {"type": value["type"]} if is_openai else {}
        return kept | {name: False for name in ("record", "store") if value.get(name) is False}
    return _OUTLINES.get(type(value), value)


def _is_unrecorded(kind: Kind, body: Json) -> bool:
    if kind.step.opened.must_record:
        return False
    places = (body, *(body.get(name) for name in _NESTED))
    name = "store" if kind.step.opened.endpoint == "live" else "record"
    return any(isinstance(place, Mapping) and place.get(name) is False for place in places)


def _refusal(kind: Kind, gate: Gate, request: rq.Request, body: Json) -> Refused | None:
    """Return why a message is refused before its fields are read; None accepts it."""
    verdict = judge(gate, request)
    is_commit = gate is Gate.UNCHOSEN and request is rq.Request.COMMIT
    if is_commit and not kind.step.behaves(ONLY_MODEL):
        verdict = ErrorCode.MODEL_NOT_VALIDATED
    if verdict == ACCEPT and request is rq.Request.UNKNOWN:  # whose parsing says what is wrong
        try:
            kind.peer.dialect.parse(request, body, _context(kind))
        except FieldError as error:
            return Refused(code=error.code, message=error.message)
    if verdict == ACCEPT:
        return None
    code = ErrorCode.NOT_READY if verdict == KEEP else ErrorCode(verdict)
    return Refused(code=code, message=_words_of_refusal(kind, gate, request, body, verdict))


def _context(kind: Kind) -> Context:
    limits = kind.step.opened.limits
    return Context(
        mode=kind.step.opened.mode,
        sliding_windows=limits.sliding_windows,
        behaviour=kind.step.opened.behaviour,
        must_record=kind.step.opened.must_record,
        is_fork=kind.step.is_forking,
    )


def _is_openai(kind: Kind, gate: Gate, body: Json) -> bool:
    is_here = gate in OPENAI_GATES and kind.step.opened.endpoint == "realtime"
    return is_here and is_openai_update(body)


def _words_of_refusal(
    kind: Kind, gate: Gate, request: rq.Request, body: Json, verdict: Verdict
) -> str:
    """Describe the refused message in the client's own words, and when."""
    name = body.get("type")
    if request is rq.Request.UNKNOWN:
        name = "an event of no known type"
    elif not isinstance(name, str) or kind.peer.dialect is dialects.LEGACY_CHAT:
        name = "a message"
    if request is rq.Request.MISPLACED and verdict == ErrorCode.INVALID_EVENT:
        return f"{name} has no place in this session"
    is_old = gate is Gate.TURN and not kind.step.behaves(DURING_TURNS)
    when = "amid a turn" if is_old else _GATE_WORDS[gate]
    return f"{name} {when}" + _AFTERWARDS.get((gate, request), "")


def _dialect_after(dialect: Dialect, gate: Gate, request: rq.Request, body: Json) -> Dialect:
    """Return the dialect from now on; a client picks it by its first message, and it stays."""
    if dialect is dialects.OPENING:
        return dialects.choose(body) or dialects.OPENING
    if gate is Gate.UNCHOSEN and request in (rq.Request.INIT, rq.Request.COMMIT):
        return (
            dialects.TRANSCRIPTION_RESPONSES if begins_with_create(body) else dialects.TRANSCRIPTION
        )
    return dialect
