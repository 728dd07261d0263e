"""Finds where two plain values differ, and shows the difference in a line.

Values are equal only if they have the same type at every level: `1`, `1.0` and `True` are three
values, and `0.0` is not `-0.0`. Output is bounded: text around its first differing character, bytes
by length and digest, the rest cut short. Records, events and effects are one line each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.records import digest, record_name
from recorder.format.format import Fields, Record, Value
from recorder.format.mapping import effect_record, event_record

from .report import Cause

SHOWN_CHARS_MAX: Final = 160
"""A value on one line of a terminal, wrapped twice."""
CONTEXT_CHARS: Final = 60
"""Shown before and after the character at which two texts differ."""
LABEL_CHARS_MAX: Final = 64
"""A digest, an id or a name."""
SHOWN_ITEMS_MAX: Final = 8
"""Items of a list or mapping that are shown; the rest is counted."""
NOTHING: Final = "nothing"


@attrs.frozen
class Difference:
    """The first place at which two values differ; both are shortened.

    `path` is such as `frame[1042]` or `unit.index`; empty for the whole value.
    """

    path: str
    recorded: str
    came_out: str


def first_difference(recorded: Value, came_out: Value, path: str = "") -> Difference | None:
    """Find where two values differ; None if they are equal."""
    if isinstance(recorded, str) and isinstance(came_out, str):
        if recorded == came_out:
            return None
        at = _first_differing(recorded, came_out)
        return Difference(f"{path}[{at}]", _around(recorded, at), _around(came_out, at))
    if isinstance(recorded, Mapping) and isinstance(came_out, Mapping):
        found = _mapping_difference(recorded, came_out, path)
        if found is not None and _is_hash(recorded):
            return Difference(path, show(recorded), show(came_out))
        return found
    if isinstance(recorded, list | tuple) and isinstance(came_out, list | tuple):
        return _list_difference(recorded, came_out, path)
    # By repr as well, for True == 1 == 1.0 and 0.0 == -0.0.
    if recorded == came_out and repr(recorded) == repr(came_out):
        return None
    return Difference(path, show(recorded), show(came_out))


def show(value: object) -> str:
    """Write a value in at most about `SHOWN_CHARS_MAX` characters."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes, blake2b {digest(value)}"
    if isinstance(value, Mapping):
        if _is_hash(value):
            return f"{show(value['bytes'])} bytes, blake2b {label(value['blake2b'])}"
        pairs = [f"{label(key)}: {show(value[key])}" for key in list(value)[:SHOWN_ITEMS_MAX]]
        return _shorten("{" + ", ".join(pairs + _rest(len(value))) + "}")
    if isinstance(value, str):
        return repr(value[:SHOWN_CHARS_MAX]) + _more(len(value) - SHOWN_CHARS_MAX)
    if isinstance(value, Sequence):
        items = [show(item) for item in value[:SHOWN_ITEMS_MAX]]
        return _shorten("[" + ", ".join(items + _rest(len(value))) + "]")
    return _shorten(repr(value))


def label(value: object) -> str:
    """Write a short, printable text as it is, anything else as `show` does."""
    if isinstance(value, str) and value.isprintable() and len(value) <= LABEL_CHARS_MAX:
        return value
    return show(value)


def _first_differing(first: str, second: str) -> int:
    """Return the index of the first character that differs; by halves, for frames are long."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _around(text: str, at: int) -> str:
    start, stop = max(0, at - CONTEXT_CHARS), at + CONTEXT_CHARS
    before = "…" if start else ""
    return before + repr(text[start:stop]) + _more(len(text) - stop)


def _mapping_difference(
    recorded: Mapping[str, Value], came_out: Mapping[str, Value], path: str
) -> Difference | None:
    for key in [*recorded, *(key for key in came_out if key not in recorded)]:
        place = f"{path}.{label(key)}" if path else label(key)
        if key not in came_out:
            return Difference(place, show(recorded[key]), NOTHING)
        if key not in recorded:
            return Difference(place, NOTHING, show(came_out[key]))
        found = first_difference(recorded[key], came_out[key], place)
        if found is not None:
            return found
    return None


def _list_difference(
    recorded: Sequence[Value], came_out: Sequence[Value], path: str
) -> Difference | None:
    for index, (first, second) in enumerate(zip(recorded, came_out, strict=False)):
        found = first_difference(first, second, f"{path}[{index}]")
        if found is not None:
            return found
    if len(recorded) == len(came_out):
        return None
    at = min(len(recorded), len(came_out))
    shown = (show(it[at]) if len(it) > at else NOTHING for it in (recorded, came_out))
    return Difference(f"{path}[{at}]", *shown)


def _is_hash(value: Mapping[str, Value]) -> bool:
    """Whether a mapping stands for bytes, as `recorder.format.mapping` writes them in effects."""
    return value.keys() == {"bytes", "blake2b"}


def _rest(count: int) -> list[str]:
    return [f"… {count - SHOWN_ITEMS_MAX} more"] if count > SHOWN_ITEMS_MAX else []


def _more(chars: int) -> str:
    return f"… {chars} more" if chars > 0 else ""


def _shorten(text: str) -> str:
    return text[:SHOWN_CHARS_MAX] + _more(len(text) - SHOWN_CHARS_MAX)


def name_of(record: Record) -> str:
    """Name a record by its kind and content, such as `effect StartUnit`."""
    name = record.fields.get("type")
    return f"{record.kind} {label(name)}" if isinstance(name, str) else record.kind


def describe(record: Record) -> str:
    """Write a record in a line."""
    return f"{name_of(record)} {show(_without_type(record.fields))}"


def show_effect(effect: ef.Effect) -> str:
    """Write an effect in a line."""
    kind, fields = effect_record(effect)
    return f"{kind} {record_name(effect)} {show(_without_type(fields))}"


def cause_of(record: Record, event: ev.Event) -> Cause:
    """Describe the event of a record as the cause of something."""
    _, fields = event_record(event)
    return Cause(seq=record.seq, kind=record_name(event), summary=show(_without_type(fields)))


def _without_type(fields: Fields) -> Mapping[str, Value]:
    return {name: value for name, value in fields.items() if name != "type"}
