"""A message as a table: one row a field, by which it is read, written and described.

- Rows are read in their order, so of two mistakes the first row's is reported; they are written by
  `rank`, then in their order.
- A value goes to the attribute that its row names; a default never replaces a value.
- A field without a row is ignored, and its path is kept; in a closed object it is refused.
- An explicit null counts as absent, and an absent object as one without fields.

A rule that spans fields is a function, called at the place of its `Rule` among the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar, Final, get_type_hints

import attrs

from ..values import behaviour
from ..values.errors import ErrorCode, FieldError, LocalProtocolError
from .codec import KEY_SHOWN, Value, dump_frame, invalid
from .field import Columns, Field, Put, as_it_is
from .reading import Context, Json, Reading, as_object, missing

IGNORED_PATHS_MAX: Final = 32
"""Paths kept of ignored fields: enough to see what a client means by them."""
READER: Final = Context(mode="video")
"""The context of a server's message, which depends on nothing."""


@attrs.frozen
class Object(Columns):
    """A field that is an object.

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
    is_as_it_is: ClassVar[bool] = False

    @shape.default
    def _shape(self) -> Shape:
        return Shape(self.rows, closed=self.closed)

    @property
    def names(self) -> tuple[str, ...]:
        """Its key."""
        return (self.name,)

    @property
    def is_said(self) -> bool:
        """Whether any of its fields is written."""
        return bool(self.shape.written)

    def take(self, at: Reading) -> None:
        """Read it and its fields; `FieldError` if it is absent and required, or wrong."""
        value, path = at.body.get(self.name), f"{at.path}.{self.name}"
        if value is None and self.is_required:
            raise missing(path)
        body = {} if value is None else as_object(value, path)
        prefix = f"{at.prefix}{self.attr}." if self.attr else at.prefix
        at.below += self.shape.fill(Reading(body, path, prefix, at.context, at.values))

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

    take: Callable[[Reading], None]
    names: ClassVar[tuple[str, ...]] = ()
    is_read: ClassVar[bool] = True


Row = Field | Object | Rule


class Shape:
    """The rows of one object, prepared for reading and writing; `known` are its constant fields."""

    def __init__(
        self, rows: tuple[Row, ...], *, closed: str | bool = False, known: Json | None = None
    ) -> None:
        self.rows = rows
        self.closed = closed
        self.known = dict(known or {})
        self._plans = dict[int, tuple[tuple[Row, ...], frozenset[str]]]()
        written = [row for row in rows if not isinstance(row, Rule) and row.is_said]
        self.written = tuple(sorted(written, key=lambda row: row.rank))
        plain = [row for row in self.written if isinstance(row, Field) and row.is_plain]
        self._template: dict[str, object] = {
            **self.known,
            **dict.fromkeys(row.name for row in self.written),
        }
        self._plain = tuple(row.name for row in plain)
        self._values = _values_of(tuple(row.attribute for row in plain))
        self._others = tuple(row.putter() for row in self.written if not row.is_as_it_is)

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

    def fill(self, at: Reading) -> list[str]:
        """Read the fields of an object; returns the paths of ignored ones, here and below.

        `FieldError` if something is wrong.
        """
        rows, known = self._plan_for(at.context)
        for row in rows:
            row.take(at)
        if known.issuperset(at.body):
            return [*at.aside, *at.below]
        unknown = [
            f"{at.path}.{name if KEY_SHOWN.fullmatch(name) else '?'}"
            for name in at.body
            if name not in known
        ]
        if self.closed:
            listed = f"unknown field, known are {', '.join(sorted(known))}"
            if isinstance(self.closed, ErrorCode):
                raise FieldError(self.closed, f"{unknown[0]}: {listed}")
            raise invalid(unknown[0], listed if self.closed is True else self.closed)
        return [*at.aside, *unknown, *at.below]

    def write(self, subject: object, message: object) -> dict[str, object]:
        """Write an object from its subject: the message, or an attribute of the message."""
        body = self._template.copy()
        body.update(zip(self._plain, self._values(subject)))  # noqa: B905 - one is of the other
        for put in self._others:
            put(body, subject, message)
        return body


def _values_of(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    getters = tuple(map(attrgetter, names))
    return lambda subject: tuple(get(subject) for get in getters)


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
        closed: str | bool = False,
        doc: str = "",
    ) -> None:
        self.cls, self.doc = cls, doc
        self.classes = (cls, *others)
        self.tag: Mapping[str, str] = tag or {}
        self.shape = Shape(rows, closed=closed, known=self.tag)
        self._write = self.shape.write
        self._lacks = lacks or {}
        self._where = where
        self._make = make
        self._keeps_ignored = any(field.name == "ignored" for field in attrs.fields(cls))
        self._parts = {name: hint for name, hint in get_type_hints(cls).items() if attrs.has(hint)}

    @property
    def kind(self) -> str:
        """The wire's type; may be empty."""
        return self.tag.get("type", "")

    def parse(self, body: Json, context: Context = READER) -> Any:
        """Read a message; `FieldError` names the first field that is wrong."""
        at = Reading(body, "$", "", context, dict(self._lacks))
        ignored = self.shape.fill(at)
        if self._keeps_ignored:
            at.values["ignored"] = tuple(ignored[:IGNORED_PATHS_MAX])
        return self._build(at.values)

    def parse_below(self, value: Value, at: Reading) -> Any:
        """Read an object of an array in another object; `FieldError` as in `parse`."""
        inner = Reading(as_object(value.value, value.path), value.path, "", at.context, {})
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

    def write(self, message: object) -> dict[str, object]:
        """Write a message as an object; `LocalProtocolError` if it has a value without a field."""
        if self._where:
            for name, value in self._lacks.items():
                if attrgetter(name)(message) != value:
                    field = name.rpartition(".")[2]
                    raise LocalProtocolError(f"{field} has no field in {self._where}")
        return self.shape.write(message, message)

    def encode(self, message: object) -> str:
        """Write a message as a frame; raises as `write` does."""
        return dump_frame(self.write(message) if self._where else self._write(message, message))
