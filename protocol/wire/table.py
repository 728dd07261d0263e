"""A message as a table: a row a field, by which it is read, written and described.

Rules:
- Rows are read in their order, so that of two mistakes the first row's is told; they are written by
  `rank`, then in their order.
- What is read goes to the attribute that the row names; a default never replaces what was read.
- A field that no row names is ignored, and its path is told; in a closed object it is refused.
- An explicit null counts as absent, and an absent object as one without fields.

A rule that spans fields is a function, called where its `Rule` stands among the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Final, get_type_hints

import attrs

from ..behaviour import NEWEST
from ..codec import IGNORED_PATHS_MAX, KEY_SHOWN, Value, dump_frame, invalid, kind_of
from ..errors import ErrorCode, FieldError, LocalProtocolError
from ..messages import Mode
from .kinds import Holds, Kind
from .reading import Context, Json, Reading

REQUIRED: Final = object()
"""In place of a default: the field must be there."""
DROPPED: Final = ""
"""In place of an attribute: the field is checked and not kept, nor written without a `get`."""
READER: Final = Context(mode="video")
"""What a server's message is read with; it depends on nothing."""


def missing(path: str) -> FieldError:
    """Make the error for a field that must be there."""
    return FieldError(ErrorCode.MISSING_FIELD, f"{path}: required field is missing")


def as_object(value: object, path: str) -> Json:
    """Check that a value is an object."""
    if not isinstance(value, dict):
        raise invalid(path, f"{kind_of(value)}, an object is needed")
    return value


@attrs.frozen
class Field:
    """A field.

    Attributes:
        name: its key.
        kind: of its value.
        default: what stands in the attribute without it.
        attr: the attribute, after the object's own; after `^`, of the message; None: as the name.
        also: other names, each looked at where those before it are absent.
        after: another field, beside which this one is not looked at.
        omit: it is left out where it is the default, or cannot be written.
        rank: fields of a lower one are written before it.
        since: the behaviour from which on it is known.
        until: the behaviour from which on it is not.
        aside_in: modes in which it is known and not looked at.
        code: of the error, whatever is wrong with it.
        get: gives what is written, of the message, where that is no attribute.
        is_read: it is read; else only written.
        is_written: it is written; else only read.
        example: a value that is shown.
        holds: what is in it, where the kind does not say.
        doc: what it means, where the attribute's own line does not say.
    """

    name: str
    kind: Kind
    default: Any = REQUIRED
    attr: str | None = attrs.field(default=None, kw_only=True)
    also: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    after: str | None = attrs.field(default=None, kw_only=True)
    omit: bool = attrs.field(default=False, kw_only=True)
    rank: int = attrs.field(default=0, kw_only=True)
    since: int = attrs.field(default=0, kw_only=True)
    until: int = attrs.field(default=NEWEST + 1, kw_only=True)
    aside_in: tuple[Mode, ...] = attrs.field(default=(), kw_only=True)
    code: ErrorCode | None = attrs.field(default=None, kw_only=True)
    get: Callable[[Any], object] | None = attrs.field(default=None, kw_only=True)
    is_read: bool = attrs.field(default=True, kw_only=True)
    is_written: bool = attrs.field(default=True, kw_only=True)
    example: object = attrs.field(default=None, kw_only=True)
    holds: Holds | None = attrs.field(default=None, kw_only=True)
    doc: str = attrs.field(default="", kw_only=True)
    names: tuple[str, ...] = attrs.field(init=False)
    attribute: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "names", (self.name, *self.also))
        object.__setattr__(self, "attribute", self.name if self.attr is None else self.attr)
        if self.attribute == DROPPED and self.get is None:
            object.__setattr__(self, "is_written", False)

    @property
    def is_known(self) -> bool:
        """Whether it is known in sessions that begin now."""
        return self.since <= NEWEST < self.until

    def take(self, at: Reading) -> None:
        """Read it.

        Raises:
            FieldError: it is absent and must be there, or is wrong.
        """
        name, body = self.name, at.body
        found = body.get(name)
        if self.also or found is not None:
            said = [each for each in self.names if body.get(each) is not None]
            is_aside = at.context.mode in self.aside_in or self._is_second(body)
            at.aside += [f"{at.path}.{each}" for each in said[0 if is_aside else 1 :]]
            name = said[0] if said else name
            found = None if is_aside else body.get(name)
        attribute = self.attribute
        key = attribute[1:] if attribute.startswith("^") else at.prefix + attribute
        if found is not None:
            at.values[key] = self._read(Value(path=f"{at.path}.{name}", value=found), at)
        elif self.default is not REQUIRED:
            at.values.setdefault(key, self.default)
        else:
            raise self._recoded(missing(f"{at.path}.{self.name}"))

    def _is_second(self, body: Json) -> bool:
        return self.after is not None and body.get(self.after) is not None

    def _read(self, value: Value, at: Reading) -> Any:
        if self.code is None:
            return self.kind.read(value, at)
        try:
            return self.kind.read(value, at)
        except FieldError as error:
            raise self._recoded(error) from None

    def _recoded(self, error: FieldError) -> FieldError:
        return error if self.code is None else FieldError(self.code, error.message)

    @property
    def is_plain(self) -> bool:
        """Whether what is written is an attribute of what the object stands for."""
        return self.get is None and not self.attribute.startswith("^")

    @property
    def is_as_it_is(self) -> bool:
        """Whether nothing has to be done to an attribute to write it."""
        return self.is_plain and self.kind.write is None and not self.omit

    def put(self, body: dict[str, object], _subject: object, message: object) -> None:
        """Write it in its place, where its attribute stands by now if it is plain."""
        if self.get is not None:
            value = self.get(message)
        elif self.is_plain:
            value = body[self.name]
        else:
            value = attrgetter(self.attribute[1:])(message)
        is_left_out = self.omit and value == self.default
        if not is_left_out and self.kind.write is not None:
            value = self.kind.write(value)
            is_left_out = self.omit and value is None
        if is_left_out:
            del body[self.name]
        else:
            body[self.name] = value


@attrs.frozen
class Object:
    """A field that is an object.

    Attributes:
        name: its key.
        rows: its fields.
        attr: the attribute that its fields are attributes of; empty where they are the message's.
        is_required: it must be there.
        closed: why it may have no other fields: a text that the error ends with, or True for the
            list of those that it may have.
        omit: it is left out where it would be empty.
        when: says of a message whether it is there.
        none: what is written where the attribute is None.
        rank: as of `Field`, and so `since`, `until` and `doc`.
    """

    name: str
    rows: tuple[Row, ...]
    attr: str = attrs.field(default="", kw_only=True)
    is_required: bool = attrs.field(default=False, kw_only=True)
    closed: str | bool = attrs.field(default=False, kw_only=True)
    omit: bool = attrs.field(default=False, kw_only=True)
    when: Callable[[Any], bool] | None = attrs.field(default=None, kw_only=True)
    none: Mapping[str, object] | None = attrs.field(default=None, kw_only=True)
    rank: int = attrs.field(default=0, kw_only=True)
    since: int = attrs.field(default=0, kw_only=True)
    until: int = attrs.field(default=NEWEST + 1, kw_only=True)
    doc: str = attrs.field(default="", kw_only=True)
    shape: Shape = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "shape", Shape(self.rows, closed=self.closed))

    @property
    def names(self) -> tuple[str, ...]:
        """Its key."""
        return (self.name,)

    @property
    def is_written(self) -> bool:
        """Whether any of its fields is written."""
        return bool(self.shape.written)

    @property
    def is_known(self) -> bool:
        """Whether it is known in sessions that begin now."""
        return self.since <= NEWEST < self.until

    is_plain: ClassVar[bool] = False
    is_as_it_is: ClassVar[bool] = False

    def take(self, at: Reading) -> None:
        """Read it, and what stands in it.

        Raises:
            FieldError: it is absent and must be there, or something is wrong.
        """
        value, path = at.body.get(self.name), f"{at.path}.{self.name}"
        if value is None and self.is_required:
            raise missing(path)
        body = {} if value is None else as_object(value, path)
        prefix = f"{at.prefix}{self.attr}." if self.attr else at.prefix
        at.below += self.shape.fill(Reading(body, path, prefix, at.context, at.values))

    def put(self, body: dict[str, object], subject: object, message: object) -> None:
        """Write it in its place."""
        inner = attrgetter(self.attr)(subject) if self.attr else subject
        made = self.none if inner is None else self.shape.write(inner, message)
        is_left_out = self.omit and not made
        if is_left_out or (self.when is not None and not self.when(message)):
            del body[self.name]
        else:
            body[self.name] = made


@attrs.frozen
class Rule:
    """What spans fields: a function over what was read so far, called in its place.

    Attributes:
        check: raises FieldError, or changes what was read.
    """

    check: Callable[[Reading], None]
    names: tuple[str, ...] = ()
    since: int = 0
    until: int = NEWEST + 1

    def take(self, at: Reading) -> None:
        """Check what was read."""
        self.check(at)


Row = Field | Object | Rule


class Shape:
    """The rows of one object, made ready to read and to write.

    Args:
        rows: its fields.
        closed: as of `Object`.
        known: fields that are always the same, by their keys.
    """

    def __init__(
        self, rows: tuple[Row, ...], *, closed: str | bool = False, known: Json | None = None
    ) -> None:
        self.rows = rows
        self.closed = closed
        self.known = dict(known or {})
        read = [row for row in rows if not isinstance(row, Field) or row.is_read]
        self._plans = tuple(
            self._plan([row for row in read if row.since <= number < row.until])
            for number in range(NEWEST + 1)
        )
        written = [row for row in rows if not isinstance(row, Rule) and row.is_written]
        self.written = tuple(sorted(written, key=lambda row: row.rank))
        plain = [row for row in self.written if isinstance(row, Field) and row.is_plain]
        self._template: dict[str, object] = {
            **self.known,
            **dict.fromkeys(row.name for row in self.written),
        }
        self._plain = tuple(row.name for row in plain)
        self._values = _values_of(tuple(row.attribute for row in plain))
        self._others = tuple(row for row in self.written if not row.is_as_it_is)

    def _plan(self, rows: list[Row]) -> tuple[tuple[Row, ...], frozenset[str]]:
        return tuple(rows), frozenset([*self.known, *(name for row in rows for name in row.names)])

    def fill(self, at: Reading) -> list[str]:
        """Read the fields of an object.

        Returns:
            The paths of what was ignored, here and below.

        Raises:
            FieldError: something is wrong.
        """
        rows, known = self._plans[min(at.context.behaviour, NEWEST)]
        for row in rows:
            row.take(at)
        unknown = [
            f"{at.path}.{name if KEY_SHOWN.fullmatch(name) else '?'}"
            for name in at.body
            if name not in known
        ]
        if unknown and self.closed:
            listed = f"unknown field, known are {', '.join(sorted(known))}"
            raise invalid(unknown[0], listed if self.closed is True else self.closed)
        return [*at.aside, *unknown, *at.below]

    def write(self, subject: object, message: object) -> dict[str, object]:
        """Write an object.

        Args:
            subject: what the object stands for: the message, or an attribute of it.
            message: the message.
        """
        body = self._template.copy()
        body.update(zip(self._plain, self._values(subject), strict=True))
        for row in self._others:
            row.put(body, subject, message)
        return body


def _values_of(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    """Make what gets several attributes at once."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda subject: tuple(attrgetter(name)(subject) for name in names)


class Table:
    """A message, or an object of an array.

    Args:
        cls: the class that it is read as and written from.
        rows: its fields.
        tag: fields that say which message it is.
        lacks: attributes that it does not say, and what they are where it is read.
        where: of a client's message: what it is, to say that it has no field for such an attribute.
        make: makes the value of what was read, by attribute, where that is not all for its class.
        others: classes that it may be read as, beside.
    """

    def __init__(
        self,
        cls: type,
        *rows: Row,
        tag: Mapping[str, str] | None = None,
        lacks: Mapping[str, object] | None = None,
        where: str = "",
        make: Callable[[dict[str, Any]], Any] | None = None,
        others: tuple[type, ...] = (),
    ) -> None:
        self.cls = cls
        self.classes = (cls, *others)
        self.tag: Mapping[str, str] = tag or {}
        self.shape = Shape(rows, known=self.tag)
        self._lacks = lacks or {}
        self._where = where
        self._make = make
        self._keeps_ignored = any(field.name == "ignored" for field in attrs.fields(cls))
        self._parts = {name: hint for name, hint in get_type_hints(cls).items() if attrs.has(hint)}

    @property
    def kind(self) -> str:
        """The wire's type; empty where it has none."""
        return self.tag.get("type", "")

    def parse(self, body: Json, context: Context = READER) -> Any:
        """Read a message.

        Raises:
            FieldError: naming the first field that is wrong.
        """
        at = Reading(body, "$", "", context, dict(self._lacks))
        ignored = self.shape.fill(at)
        if self._keeps_ignored:
            at.values["ignored"] = tuple(ignored[:IGNORED_PATHS_MAX])
        return self._build(at.values)

    def parse_below(self, value: Value, at: Reading) -> Any:
        """Read an object of an array that stands in another object.

        Raises:
            FieldError: naming the first field that is wrong.
        """
        inner = Reading(as_object(value.value, value.path), value.path, "", at.context, {})
        at.below += self.shape.fill(inner)
        return self._build(inner.values)

    def _build(self, values: dict[str, Any]) -> Any:
        if self._make is not None:
            return self._make(values)
        made: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            first, _, rest = key.partition(".")
            if rest:
                parts.setdefault(first, {})[rest] = value
            elif first == key != DROPPED:
                made[key] = value
        for name, part in parts.items():
            made[name] = self._parts[name](**part)
        return self.cls(**made)

    def write(self, message: object) -> dict[str, object]:
        """Write a message as an object.

        Raises:
            LocalProtocolError: it has a value for which there is no field.
        """
        if self._where:
            for name, value in self._lacks.items():
                if attrgetter(name)(message) != value:
                    field = name.rpartition(".")[2]
                    raise LocalProtocolError(f"{field} has no field in {self._where}")
        return self.shape.write(message, message)

    def encode(self, message: object) -> str:
        """Write a message as a frame; raises as `write` does."""
        return dump_frame(self.write(message))
