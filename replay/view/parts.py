"""The page's data: parts, in the order in which the log gives them.

A part is a name and a plain JSON value. They are small, and there may be thousands, so that a page
is written while its log is read and neither is ever whole in memory. The page puts them together:

| part | holds |
|---|---|
| `rows` | some records, for the list: `[seq, at_ns, kind, type, fields]` each |
| `sound` | a piece of a voice: where it is heard, its samples as Opus, its peaks |
| `picture` | a picture and when it was shown |
| `story` | all else, once, at the end |

Nothing in a part exceeds the bounds below, for any log; bytes are named by their length; whole
numbers that JavaScript cannot hold are text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from recorder.format.blobs import extract
from recorder.format.records import FRAME_KINDS, Record, Value

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

TEXT_CHARS_MAX: Final = 4_000
"""Of one text: a system prompt, whole; the page folds it."""
ITEMS_MAX: Final = 64
"""Of one list or object: the codes of a second of speech, and some more."""
DEPTH_MAX: Final = 12
"""The deepest of our records, a conversation's start, nests seven levels."""
WHOLE_MAX: Final = 2**53
"""Beyond it JavaScript's numbers have gaps; seeds are larger."""
ROWS_A_PART: Final = 400


@attrs.frozen
class Part:
    """A piece of the page's data."""

    name: str
    value: Json


def row_of(record: Record, kept: str = "") -> Json:
    """Write a record for the list; `kept` describes the part kept of a refused message."""
    fields = {name: value for name, value in record.fields.items() if name != "type"}
    kind = record.fields.get("type")
    if record.kind in FRAME_KINDS and isinstance(frame := fields.get("frame"), str):
        fields["frame"] = _without_base64(frame)
    fields |= {"kept": kept} if kept else {}
    name = kind[:TEXT_CHARS_MAX] if isinstance(kind, str) else ""
    return [record.seq, record.at_ns, record.kind, name, plain(fields)]


def plain(value: Value, depth: int = 0) -> Json:
    """Shorten a value for a reader, as JSON that JavaScript can hold."""
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < WHOLE_MAX else f"{value:#x}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= DEPTH_MAX:
        return f"({len(value)} more inside)"
    if isinstance(value, Mapping):
        shown: dict[str, Json] = {
            _shorten(str(key)): plain(value[key], depth + 1) for key in list(value)[:ITEMS_MAX]
        }
        rest = len(value) - ITEMS_MAX
        return {**shown, "…": f"{rest} more"} if rest > 0 else shown
    items = [plain(item, depth + 1) for item in value[:ITEMS_MAX]]
    rest = len(value) - ITEMS_MAX
    return [*items, f"… {rest} more"] if rest > 0 else items


def _without_base64(frame: str) -> str:
    pieces = extract(frame)
    return "".join(piece if isinstance(piece, str) else f"({len(piece)} bytes)" for piece in pieces)


def _shorten(text: str) -> str:
    more = len(text) - TEXT_CHARS_MAX
    return f"{text[:TEXT_CHARS_MAX]}… {more} more characters" if more > 0 else text
