"""The places of a JSON text that hold values, each with its path; the rest stays unchanged.

It takes any text, JSON or not, and never fails: content in a broken frame must be found too.
Everything but punctuation, white space, `true`, `false` and `null` is in some span.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import attrs
import orjson

from protocol.values.limits import JSON_DEPTH_MAX

SpanKind = Literal["key", "text", "number", "word"]
Path: TypeAlias = "tuple[str | int, ...]"

_TOKEN: Final = re.compile(r'[{}\[\],:"]|[^\s{}\[\],:"]+')
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SAYS_NOTHING: Final = frozenset({"true", "false", "null"})


@attrs.frozen(kw_only=True)
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
            yield _string(text, at, end, levels)
            at = end + 1
        elif len(token) == 1 and token in "{}[],:":
            _punctuate(token, levels)
        elif token not in _SAYS_NOTHING:
            kind: SpanKind = "number" if _NUMBER.fullmatch(token) else "word"
            yield Span(start=start, end=at, kind=kind, path=_path(levels))


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


def _string(text: str, start: int, end: int, levels: list[_Level]) -> Span:
    if levels and levels[-1].wants_key:
        levels[-1].place = unescaped(text[start:end])
        return Span(start=start, end=end, kind="key", path=_path(levels))
    return Span(start=start, end=end, kind="text", path=_path(levels))


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
        levels.append(
            _Level(is_object=is_object, place="" if is_object else 0, wants_key=is_object)
        )
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
