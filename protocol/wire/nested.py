"""Kinds of value with values in them: arrays, objects of several kinds, text or an array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from ..values.errors import LocalProtocolError
from .codec import Value
from .field import Field
from .kinds import Kind
from .reading import Reading, as_object, missing
from .table import Object, Row, Rule, Table


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


def tables_in(kind: Kind) -> tuple[Table, ...]:
    """List the tables of the objects that a value may be or contain."""
    match kind:
        case Items(item=item):
            return tables_in(item)
        case Either(items=array):
            return tables_in(array)
        case One(table=table):
            return (table,)
        case Variants(tables=tables):
            return tuple(tables.values())
    return ()


@attrs.frozen(kw_only=True)
class Items(Kind):
    """An array of `count_min` to `count_max` items."""

    item: Kind
    count_max: int
    count_min: int


@attrs.frozen(kw_only=True)
class Variants(Kind):
    """An object of several kinds: the value of its field `tag` selects the table of the others."""

    tag: str
    tables: Mapping[str, Table]


@attrs.frozen(kw_only=True)
class One(Kind):
    """An object of an array, of one kind."""

    table: Table


@attrs.frozen(kw_only=True)
class Either(Kind):
    """A string or an array."""

    string: Kind
    items: Items


def items(item: Kind, count_max: int, count_min: int = 0) -> Items:
    """An array of `count_min` to `count_max` items, read as a tuple."""

    def read(value: Value, at: Reading) -> tuple[Any, ...]:
        found = value.items(count_max, count_min)
        if isinstance(item, One | Variants):
            for each in found:
                as_object(each.value, each.path)
        return tuple(item.read(each, at) for each in found)

    def write(values: tuple[Any, ...]) -> list[object]:
        return [item.write(value) if item.write else value for value in values]

    return Items(
        read=read,
        write=write,
        schema={},
        holds=item.holds,
        item=item,
        count_max=count_max,
        count_min=count_min,
    )


def one(table: Table) -> One:
    """An object that a table describes."""
    return One(read=table.parse_below, write=table.write, schema={}, table=table)


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

    def read(value: Value, at: Reading) -> Any:
        body = as_object(value.value, value.path)
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


def either(string: Kind, array: Items, write: Callable[[Any], object]) -> Either:
    """A string, or an array; both are read as the same."""

    def read(value: Value, at: Reading) -> Any:
        return (array if isinstance(value.value, list) else string).read(value, at)

    return Either(read=read, write=write, schema={}, string=string, items=array)
