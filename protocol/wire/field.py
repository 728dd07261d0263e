"""A field of a message as a row: its names, kind and place, and how it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import attrs

from ..values.errors import ErrorCode, FieldError
from ..values.modes import Mode
from .codec import Value
from .kinds import Holds, Kind
from .reading import Json, Reading, missing

REQUIRED: Final = object()
"""As a default: the field is required."""
DROPPED: Final = ""
"""As an attribute: the field is checked and not kept, nor written without a `get`."""

Put = Callable[[dict[str, object], object, object], None]
"""Writes one field into a body, from the subject of its object and the message."""


def as_it_is(value: Any) -> Any:
    """Return the value unchanged."""
    return value


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
        get: returns the value to write from the message, if that is no attribute.
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
    holds: Holds | None = None


@attrs.frozen
class Field(FieldColumns):
    """A field; without it, its attribute is `default`."""

    name: str
    kind: Kind
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

    def take(self, at: Reading) -> None:
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
            said = [each for each in self.names if body.get(each) is not None]
            is_aside = mode in self.aside_in or self._is_second(body)
            at.aside += [f"{at.path}.{each}" for each in said[0 if is_aside else 1 :]]
            name = said[0] if said else name
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

    def _key(self, at: Reading) -> str:
        attribute = self.attribute
        return attribute[1:] if attribute[0] == "^" else at.prefix + attribute

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

    # -- writing ---------------------------------------------------------------------------------

    @property
    def is_said(self) -> bool:
        """Whether it is written."""
        return self.is_written and (self.attribute != DROPPED or self.get is not None)

    @property
    def is_plain(self) -> bool:
        """Whether an attribute of the object's subject is written."""
        return self.get is None and not self.attribute.startswith("^")

    @property
    def is_as_it_is(self) -> bool:
        """Whether the attribute is written unchanged."""
        return self.is_plain and self.kind.write is None and not self.omit

    def putter(self) -> Put:
        """Make the function that writes it in its place; a plain attribute is already there."""
        name, write, is_plain = self.name, self.kind.write or as_it_is, self.is_plain
        if is_plain and not self.omit:

            def convert(body: dict[str, object], _subject: object, _message: object) -> None:
                body[name] = write(body[name])

            return convert
        get = self.get or attrgetter(self.attribute.removeprefix("^"))

        def put(body: dict[str, object], _subject: object, message: object) -> None:
            value = body[name] if is_plain else get(message)
            written = None if self.omit and value == self.default else write(value)
            if self.omit and written is None:
                del body[name]
            else:
                body[name] = written

        return put
