"""A message as a table: one row a field, by which it is read, written and described. A dialect.

- Rows are read in their order, so of two mistakes the first row's is reported; they are written by
  `rank`, then in their order.
- A value goes to the attribute that its row names; a default never replaces a value.
- A field without a row is ignored, and its path is kept; in a closed object it is refused.
- A text that follows a field's row is its `doc`: its meaning.
- An explicit null counts as absent, and an absent object as one without fields.

A rule that spans fields is a function, called at the place of its `Rule` among the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Final, get_type_hints

import attrs

from ..values import behaviour
from ..values.errors import (
    ErrorCode,
    FieldError,
    LocalProtocolError,
    RemoteProtocolError,
    invalid,
    missing,
)
from ..values.limits import Mode
from ..values.messages import ServerMessage
from ..values.requests import ClientMessage, Request
from . import codec
from .codec import Context, FieldType, Json, ParseState, UserContent, Value

REQUIRED: Final = object()
"""As a default: the field is required."""
DROPPED: Final = ""
"""As an attribute: the field is checked and not kept, nor written without a `get`."""

Put = Callable[[dict[str, object], object, object], None]
"""Writes one field into a body, from the subject of its object and the message."""


def as_it_is(value: Any) -> Any:
    """Return the value unchanged."""
    return value


@attrs.frozen
class Constant:
    """A `get` that always returns the same, whose field is written once for all messages."""

    value: object

    def __call__(self, _message: object) -> object:
        """Return the constant."""
        return self.value


@attrs.frozen(kw_only=True)
class Columns:
    """The columns of every row.

    Attributes:
        omit: it is left out if it is the default, or cannot be written; an object, if empty.
        rank: fields of a lower rank are written before it.
        since: the first behaviour number whose sessions read it (`protocol.values.behaviour`).
        doc: its meaning, if the attribute's own line does not have it.
    """

    omit: bool = False
    rank: int = 0
    since: int = 0
    doc: str = ""


@attrs.frozen(kw_only=True)
class FieldColumns(Columns):
    """The other columns of a field's row.

    Attributes:
        attr: the attribute, after the object's own; after `^`, of the message; None: as the name.
        also: other names, each used if those before it are absent.
        after: another field that makes this one ignored.
        aside_in: modes in which it is known and not read, and the attribute's value there.
        code: of the error, for any mistake in it.
        get: returns the value to write from the message, if that is not an attribute.
        is_read: it is read; else only written.
        is_written: it is written; else only read.
        example: a value for the reference.
        holds: its user content, if the kind does not show it.
    """

    attr: str | None = None
    also: tuple[str, ...] = ()
    after: str | None = None
    aside_in: Mapping[Mode, object] = attrs.field(factory=dict)
    code: ErrorCode | None = None
    get: Callable[[Any], object] | None = None
    is_read: bool = True
    is_written: bool = True
    example: object = None
    holds: UserContent | None = None


@attrs.frozen
class Field(FieldColumns):
    """A field; without it, its attribute is `default`."""

    name: str
    kind: FieldType
    default: Any = REQUIRED
    names: tuple[str, ...] = attrs.field(init=False)
    attribute: str = attrs.field(init=False)
    _is_usual: bool = attrs.field(init=False, repr=False)

    @names.default
    def _names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @attribute.default
    def _attribute(self) -> str:
        return self.name if self.attr is None else self.attr

    @_is_usual.default
    def _usual(self) -> bool:
        """Whether it has one name, one meaning in all modes, and an attribute of its object."""
        is_kept = self.attribute != DROPPED and self.attribute[0] != "^"
        return is_kept and not (self.also or self.after or self.aside_in)

    # -- reading ---------------------------------------------------------------------------------

    def take(self, at: ParseState) -> None:
        """Read it; `FieldError` if it is absent and required, or wrong."""
        name, body, mode = self.name, at.body, at.context.mode
        found = body.get(name)
        if self._is_usual:
            if found is not None:
                read = self.kind.read if self.code is None else self._read
                value = Value(path=f"{at.path}.{name}", value=found)
                at.values[at.prefix + self.attribute] = read(value, at)
                return
            if self.default is not REQUIRED:
                at.values.setdefault(at.prefix + self.attribute, self.default)
                return
        if self.also or found is not None:
            given = [each for each in self.names if body.get(each) is not None]
            is_aside = mode in self.aside_in or self._is_second(body)
            at.aside += [f"{at.path}.{each}" for each in given[0 if is_aside else 1 :]]
            name = given[0] if given else name
            found = None if is_aside else body.get(name)
        if found is not None:
            made = self._read(Value(path=f"{at.path}.{name}", value=found), at)
            if self.attribute != DROPPED:
                at.values[self._key(at)] = made
            return
        default = self.aside_in.get(mode, self.default) if self.aside_in else self.default
        if default is REQUIRED:
            raise self._recoded(missing(f"{at.path}.{self.name}"))
        if self.attribute != DROPPED:
            at.values.setdefault(self._key(at), default)

    def _key(self, at: ParseState) -> str:
        attribute = self.attribute
        return attribute[1:] if attribute[0] == "^" else at.prefix + attribute

    def _is_second(self, body: Json) -> bool:
        return self.after is not None and body.get(self.after) is not None

    def _read(self, value: Value, at: ParseState) -> Any:
        if self.code is None:
            return self.kind.read(value, at)
        try:
            return self.kind.read(value, at)
        except FieldError as error:
            raise self._recoded(error) from None

    def _recoded(self, error: FieldError) -> FieldError:
        return error if self.code is None else FieldError(self.code, error.message)

    # -- writing ---------------------------------------------------------------------------------

    @property
    def is_output(self) -> bool:
        """Whether it is written."""
        return self.is_written and (self.attribute != DROPPED or self.get is not None)

    @property
    def is_plain(self) -> bool:
        """Whether an attribute of the object's subject is written."""
        return self.get is None and not self.attribute.startswith("^")

    @property
    def is_put(self) -> bool:
        """Whether it is written by its `putter`, and not copied from an attribute or a constant."""
        is_constant = isinstance(self.get, Constant) and self.kind.write is None
        return self.omit or not (self.is_plain or is_constant)

    def putter(self) -> Put:
        """Make the function that writes it in its place; a plain attribute is already there."""
        name, write, is_plain = self.name, self.kind.write, self.is_plain
        get = self.get or attrgetter(self.attribute.removeprefix("^"))

        def put(body: dict[str, object], _subject: object, message: object) -> None:
            value = body[name] if is_plain else get(message)
            if self.omit and value == self.default:
                value = None
            elif write is not None:
                value = write(value)
            if self.omit and value is None:
                del body[name]
            else:
                body[name] = value

        return put


def optional(name: str, kind: FieldType, attr: str | None = None, **more: Any) -> Field:
    """Make the row of a field that may be absent: its attribute is None then."""
    return Field(name, kind, None, attr=attr, omit=True, **more)


def checked(name: str, kind: FieldType, doc: str = "", **more: Any) -> Field:
    """Make the row of a field that is checked and not kept."""
    return Field(name, kind, None, attr=DROPPED, doc=doc, **more)


def computed(name: str, kind: FieldType, get: Callable[[Any], object], **more: Any) -> Field:
    """Make the row of a field that is written from its message by `get`, and has no attribute."""
    return checked(name, kind, get=get, **more)


def fixed(name: str, word: str) -> Field:
    """Make the row of a field that is always the same word."""
    const = FieldType(read=lambda value, _: value.text(), schema={"type": "string", "const": word})
    return computed(name, const, Constant(word), doc="Always this.")


IGNORED_PATHS_MAX: Final = 32
"""Paths kept of ignored fields: enough to see what a client means by them."""
READER: Final = Context(mode="video")
"""The context of a server's message, which depends on nothing."""


@attrs.frozen(init=False)
class Object(Columns):
    """A field that is an object, of these rows.

    Attributes:
        attr: the attribute to which its fields belong; empty for the message itself.
        closed: refuses other fields, with this text at the end of the error; True lists the fields,
            and so does an error code, which becomes the error's.
        when: whether a message has it.
        none: written if the attribute is None.
    """

    name: str
    rows: tuple[Row, ...]
    attr: str = attrs.field(default="", kw_only=True)
    is_required: bool = attrs.field(default=False, kw_only=True)
    closed: str | bool = attrs.field(default=False, kw_only=True)
    when: Callable[[Any], bool] | None = attrs.field(default=None, kw_only=True)
    none: Mapping[str, object] | None = attrs.field(default=None, kw_only=True)
    shape: Shape = attrs.field(init=False, eq=False, repr=False)
    is_read: ClassVar[bool] = True
    is_put: ClassVar[bool] = True

    def __init__(self, name: str, *rows: Row | str, **columns: Any) -> None:
        self.__attrs_init__(name, described(rows), **columns)

    @shape.default
    def _shape(self) -> Shape:
        return Shape(self.rows, closed=self.closed)

    @property
    def names(self) -> tuple[str, ...]:
        """Its key."""
        return (self.name,)

    @property
    def is_output(self) -> bool:
        """Whether any of its fields is written."""
        return bool(self.shape.written)

    def take(self, at: ParseState) -> None:
        """Read it and its fields; `FieldError` if it is absent and required, or wrong."""
        value, path = at.body.get(self.name), f"{at.path}.{self.name}"
        if value is None and self.is_required:
            raise missing(path)
        body = {} if value is None else codec.as_object(value, path)
        prefix = f"{at.prefix}{self.attr}." if self.attr else at.prefix
        at.below += self.shape.fill(ParseState(body, path, prefix, at.context, at.values))

    def putter(self) -> Put:
        """Make the function that writes it in its place."""
        name, write = self.name, self.shape.write
        get = attrgetter(self.attr) if self.attr else as_it_is

        if not self.omit and self.when is None and self.none is None:

            def convert(body: dict[str, object], subject: object, message: object) -> None:
                body[name] = write(get(subject), message)

            return convert

        def put(body: dict[str, object], subject: object, message: object) -> None:
            inner = get(subject)
            made = self.none if inner is None else write(inner, message)
            if (self.omit and not made) or (self.when is not None and not self.when(message)):
                del body[name]
            else:
                body[name] = made

        return put


@attrs.frozen
class Rule(Columns):
    """A rule that spans fields, called in its place.

    `take` raises `FieldError`, or changes the values read so far.
    """

    take: Callable[[ParseState], None]
    names: ClassVar[tuple[str, ...]] = ()
    is_read: ClassVar[bool] = True


Row = Field | Object | Rule


def described(rows: Iterable[Row | str]) -> tuple[Row, ...]:
    """Give each field the meaning that follows its row."""
    found = list[Row]()
    for row in rows:
        if not isinstance(row, str):
            found.append(row)
            continue
        field = found.pop()
        assert isinstance(field, Field)
        found.append(attrs.evolve(field, doc=row))
    return tuple(found)


class Shape:
    """The rows of one object, prepared for reading and writing; `known` are its constant fields."""

    def __init__(
        self, rows: tuple[Row, ...], *, closed: str | bool = False, known: Json | None = None
    ) -> None:
        self.rows = rows
        self.closed = closed
        self.known = dict(known or {})
        self._plans = dict[int, tuple[tuple[Row, ...], frozenset[str]]]()
        written = [row for row in rows if not isinstance(row, Rule) and row.is_output]
        self.written = tuple(sorted(written, key=lambda row: row.rank))
        plain = [row for row in self.written if isinstance(row, Field) and row.is_plain]
        self._template: dict[str, object] = {
            **self.known,
            **{row.name: _constant_of(row) for row in self.written},
        }
        self._plain = tuple(row.name for row in plain)
        names = [row.attribute for row in plain]
        # One name more, for of a single one a getter makes no tuple.
        self._values = attrgetter(*names, names[-1]) if names else None
        copied = ((row.name, row.kind.write) for row in plain if not row.omit)
        self._converted = tuple((name, write) for name, write in copied if write is not None)
        self._others = tuple(row.putter() for row in self.written if row.is_put)

    def _plan_for(self, context: Context) -> tuple[tuple[Row, ...], frozenset[str]]:
        """The rows that a session's behaviour reads, and the names that it knows."""
        number = min(context.behaviour, behaviour.NEWEST)
        found = self._plans.get(number)
        if found is None:
            rows = tuple(row for row in self.rows if row.is_read and row.since <= number)
            names = (name for row in rows for name in row.names)
            found = self._plans[number] = rows, frozenset([*self.known, *names])
        return found

    def rows_for(self, context: Context) -> tuple[Row, ...]:
        """List the rows that are read in a context."""
        return self._plan_for(context)[0]

    def fill(self, at: ParseState) -> list[str]:
        """Read the fields of an object; returns the paths of ignored ones, here and below.

        `FieldError` if something is wrong.
        """
        rows, known = self._plan_for(at.context)
        for row in rows:
            row.take(at)
        if known.issuperset(at.body):
            return [*at.aside, *at.below]
        unknown = [
            f"{at.path}.{name if codec.KEY_SHOWN.fullmatch(name) else '?'}"
            for name in at.body
            if name not in known
        ]
        if self.closed:
            listed = f"unknown field, known are {', '.join(sorted(known))}"
            if isinstance(self.closed, ErrorCode):
                raise FieldError(self.closed, f"{unknown[0]}: {listed}")
            raise invalid(unknown[0], listed if self.closed is True else self.closed)
        return [*at.aside, *unknown, *at.below]

    def write(self, subject: object, message: object = None) -> dict[str, object]:
        """Write an object from its subject: the message (then None), or one of its attributes."""
        message = subject if message is None else message
        body = self._template.copy()
        if self._values is not None:
            body.update(zip(self._plain, self._values(subject)))  # noqa: B905 - one is of the other
        for name, convert in self._converted:
            body[name] = convert(body[name])
        for put in self._others:
            put(body, subject, message)
        return body


def _constant_of(row: Field | Object) -> object:
    if isinstance(row, Field) and isinstance(row.get, Constant):
        return row.get.value
    return None


class Table:
    """A message, or an object of an array.

    Args:
        cls: the class that it is read as and written from.
        tag: fields that say which message it is.
        lacks: attributes without a field, and their values when it is read.
        where: a client's message by name, for the error that it has no field for such an attribute.
        make: makes the value from attributes, if the class needs more than these.
        others: further classes that it may be read as.
        closed: as in `Object`.
        doc: its meaning, if the class has another.

    Attributes:
        write: writes a message as an object; `LocalProtocolError` if it has a value without a
            field.
    """

    def __init__(
        self,
        cls: type,
        *rows: Row | str,
        tag: Mapping[str, str] | None = None,
        lacks: Mapping[str, object] | None = None,
        where: str = "",
        make: Callable[[dict[str, Any]], Any] | None = None,
        others: tuple[type, ...] = (),
        closed: str | bool = False,
        doc: str = "",
    ) -> None:
        self.cls, self.doc = cls, doc
        self.classes = (cls, *others)
        self.tag: Mapping[str, str] = tag or {}
        self.shape = Shape(described(rows), closed=closed, known=self.tag)
        self.write = self._write_whole if where else self.shape.write
        self._lacks = lacks or {}
        self._where = where
        self._make = make
        self._keeps_ignored = any(field.name == "ignored" for field in attrs.fields(cls))
        self._parts = {name: hint for name, hint in get_type_hints(cls).items() if attrs.has(hint)}

    def with_rows(self, *rows: Row | str, tag: Mapping[str, str] | None = None) -> Table:
        """Make the same message with more fields, before its own, and maybe another tag."""
        rows = (*rows, *self.shape.rows)
        return Table(self.cls, *rows, tag=tag or self.tag, lacks=self._lacks, make=self._make)

    @property
    def kind(self) -> str:
        """The wire's type; may be empty."""
        return self.tag.get("type", "")

    def parse(self, body: Json, context: Context = READER) -> Any:
        """Read a message; `FieldError` names the first field that is wrong."""
        at = ParseState(body, "$", "", context, dict(self._lacks))
        ignored = self.shape.fill(at)
        if self._keeps_ignored:
            at.values["ignored"] = tuple(ignored[:IGNORED_PATHS_MAX])
        return self._build(at.values)

    def parse_below(self, value: Value, at: ParseState) -> Any:
        """Read an object of an array in another object; `FieldError` as in `parse`."""
        inner = ParseState(codec.as_object(value.value, value.path), value.path, "", at.context, {})
        at.below += self.shape.fill(inner)
        return self._build(inner.values)

    def _build(self, values: dict[str, Any]) -> Any:
        if self._make is not None:
            return self._make(values)
        if not self._parts:
            return self.cls(**values)
        made: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            first, _, rest = key.partition(".")
            if rest:
                parts.setdefault(first, {})[rest] = value
            else:
                made[key] = value
        for name, part in parts.items():
            made[name] = self._parts[name](**part)
        return self.cls(**made)

    def _write_whole(self, message: object) -> dict[str, object]:
        for name, value in self._lacks.items():
            if attrgetter(name)(message) != value:
                field = name.rpartition(".")[2]
                raise LocalProtocolError(f"{field} has no field in {self._where}")
        return self.shape.write(message)

    def encode(self, message: object) -> str:
        """Write a message as a frame; raises as `write` does."""
        return codec.dump_frame(self.write(message))


def typed(cls: type, kind: str, *rows: Row | str, **columns: Any) -> Table:
    """Make the table of a message, or an object, by its type."""
    return Table(cls, *rows, tag={"type": kind}, **columns)


# -- A dialect: the tables of both ends -----------------------------------------------------------
#
# A frame is judged in this order: it must be a JSON object (`codec.parse_frame`), `classify` gives
# the kind of request, the state decides whether that is allowed now (`state.RECEPTION`), and only
# then `parse` reads its fields. No session logic is here.


def no_frame(dialect: Dialect, message: ClientMessage | ServerMessage) -> LocalProtocolError:
    """Make the error for a message without a frame in a dialect."""
    return LocalProtocolError(f"no frame for {type(message).__name__} in {dialect.name}")


def refusal(request: Request, body: Json) -> FieldError:
    """Make the error for a MISPLACED or UNKNOWN message."""
    try:
        name = codec.Fields(body).required("type", Value.text)
    except FieldError as error:
        return error
    if request is Request.MISPLACED:
        return FieldError(ErrorCode.INVALID_EVENT, "$.type: an event that has no place here")
    return FieldError(ErrorCode.UNKNOWN_EVENT, f"$.type: {codec.kind_of(name)} that names no event")


class Dialect:
    """One wire protocol, both ends, read and written by its tables.

    Args:
        name: of the dialect, as in the log.
        requests: the client's messages.
        answers: the server's; of several with one class or type the first is used.
        types: other types of client messages, and their kinds of request.
        more: messages that only other servers send.
        choose: how the tables of a message are chosen, of a class that has several, or none.
        unserved: types of messages that are not offered, and what their error says of them.
    """

    def __init__(
        self,
        name: str,
        requests: Mapping[Request, Table],
        answers: tuple[Table, ...],
        *,
        types: Mapping[str, Request] | None = None,
        more: tuple[Table, ...] = (),
        choose: Mapping[type, Callable[[Any], Sequence[Table]]] | None = None,
        unserved: Mapping[str, str] | None = None,
    ) -> None:
        self.name: Final = name
        own = {table.kind: request for request, table in requests.items() if table.kind}
        self.types: Final[Mapping[str, Request]] = {**own, **(types or {})}
        self._requests = requests
        self._answers = answers
        self._choose, self._unserved = choose or {}, unserved or {}
        written = (*answers[::-1], *requests.values())
        self._written = {cls: table for table in written for cls in table.classes}
        self._read = {table.kind: table for table in (*more, *answers[::-1])}

    @property
    def has_close(self) -> bool:
        """Whether a client can ask for the end, and does not only close the connection."""
        return Request.CLOSE in self._requests

    def requests(self, _mode: Mode) -> tuple[tuple[Request, Table], ...]:
        """List the client's messages with their kinds of request."""
        return tuple(self._requests.items())

    def table(self, request: Request, cls: type) -> Table | None:
        """Return the table that reads a kind of request as this class; None if there is no such."""
        table = self._requests.get(request)
        return table if table is not None and table.cls is cls else None

    def answers(self, _mode: Mode) -> tuple[Table, ...]:
        """List the server's messages; several of one type are its variants."""
        return self._answers

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message; never raises."""
        kind = body.get("type")
        return self.types.get(kind, Request.UNKNOWN) if isinstance(kind, str) else Request.UNKNOWN

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message of the kind that `classify` returned.

        `FieldError` names the path, the value's kind and the limit.
        """
        if request not in self._requests:
            kind = body.get("type")
            if isinstance(kind, str) and kind in self._unserved:
                raise FieldError(ErrorCode.UNSUPPORTED, f"$.type: {kind}{self._unserved[kind]}")
            raise refusal(request, body)
        message: ClientMessage = self._requests[request].parse(body, context)
        return message

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames, in order; `LocalProtocolError` if it has none."""
        choose = self._choose.get(type(message))
        if choose is not None:
            return tuple(table.encode(message) for table in choose(message))
        return (self._table_of(message).encode(message),)

    def encode_request(self, message: ClientMessage) -> str:
        """Write a client's message as a frame.

        `LocalProtocolError` if the dialect has no frame for it, or no field for a part.
        """
        return self._table_of(message).encode(message)

    def _table_of(self, message: ClientMessage | ServerMessage) -> Table:
        table = self._written.get(type(message))
        if table is None:
            raise no_frame(self, message)
        return table

    def decode(self, body: Json, _mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; a speaking unit may come as several.

        In chat a delta is a part of a turn's answer, else a unit's speech. `RemoteProtocolError`
        for a message that this dialect does not have.
        """
        kind = codec.Fields(body).required("type", Value.text)
        if kind not in self._read:
            raise RemoteProtocolError(
                f"$.type: {codec.kind_of(kind)} that is no event of the server"
            )
        return (self._read[kind].parse(body),)


# -- Kinds of value with values in them: arrays, objects of several kinds, text or an array -------


def walk(rows: Iterable[Row]) -> Iterator[Field | Object]:
    """List the fields of some rows, and all fields in them."""
    for row in rows:
        if isinstance(row, Rule):
            continue
        yield row
        if isinstance(row, Object):
            yield from walk(row.rows)
        else:
            for table in tables_in(row.kind):
                yield from walk(table.shape.rows)


def tables_in(kind: FieldType) -> tuple[Table, ...]:
    """List the tables of the objects that a value may be or contain."""
    match kind:
        case Items(item=item):
            return tables_in(item)
        case TextOrArray(items=array):
            return tables_in(array)
        case ObjectType(table=table):
            return (table,)
        case Variants(tables=tables):
            return tuple(tables.values())
    return ()


@attrs.frozen(kw_only=True)
class Items(FieldType):
    """An array of `count_min` to `count_max` items."""

    item: FieldType
    count_max: int
    count_min: int


@attrs.frozen(kw_only=True)
class Variants(FieldType):
    """An object of several kinds: the value of its field `tag` selects the table of the others."""

    tag: str
    tables: Mapping[str, Table]


@attrs.frozen(kw_only=True)
class ObjectType(FieldType):
    """An object of an array, of one kind."""

    table: Table


@attrs.frozen(kw_only=True)
class TextOrArray(FieldType):
    """A string or an array."""

    string: FieldType
    items: Items


def items(item: FieldType, count_max: int, count_min: int = 0) -> Items:
    """An array of `count_min` to `count_max` items, read as a tuple."""

    def read(value: Value, at: ParseState) -> tuple[Any, ...]:
        found = value.items(count_max, count_min)
        if isinstance(item, ObjectType | Variants):
            for each in found:
                codec.as_object(each.value, each.path)
        return tuple(item.read(each, at) for each in found)

    def write(values: tuple[Any, ...]) -> list[object]:
        return list(map(item.write, values) if item.write else values)

    return Items(
        read=read,
        write=write,
        schema={},
        holds=item.holds,
        item=item,
        count_max=count_max,
        count_min=count_min,
    )


def one(table: Table) -> ObjectType:
    """An object that a table describes."""
    return ObjectType(read=table.parse_below, write=table.write, schema={}, table=table)


def variants(tag: str, *tables: Table, write: Callable[[Any], str] | None = None) -> Variants:
    """An object whose kind its field `tag` names; `write` names it of a value, else its class."""
    by_word = {table.tag[tag]: table for table in tables}
    by_class = {table.cls: table for table in tables}
    words = tuple(by_word)

    def table_of(value: Any) -> Table:
        if write is None:
            return by_class[type(value)]
        word = write(value)
        if word not in by_word:
            raise LocalProtocolError(f"a {tag} that is not allowed; allowed is {', '.join(words)}")
        return by_word[word]

    def read(value: Value, at: ParseState) -> Any:
        body = codec.as_object(value.value, value.path)
        path = f"{value.path}.{tag}"
        if body.get(tag) is None:
            raise missing(path)
        word = Value(path=path, value=body[tag]).choice(words)
        return by_word[word].parse_below(value, at)

    return Variants(
        read=read,
        write=lambda value: table_of(value).write(value),
        schema={},
        tag=tag,
        tables=by_word,
    )


def text_or_array(string: FieldType, array: Items, write: Callable[[Any], object]) -> TextOrArray:
    """A string, or an array; both are read as the same."""

    def read(value: Value, at: ParseState) -> Any:
        return (array if isinstance(value.value, list) else string).read(value, at)

    return TextOrArray(read=read, write=write, schema={}, string=string, items=array)
