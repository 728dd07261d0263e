"""Records, events and effects in words: one bounded line each, for reports."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.record_names import record_name
from protocol.values.utf8 import Shortened
from recorder.format.mapping import effect_record, event_record
from recorder.format.records import Fields, Record, Value

from ..shared.recordings import show_bytes
from .difference import label, show
from .report import Cause


@attrs.frozen(kw_only=True)
class Step:
    """An event that was stepped, and its effects."""

    record: Record
    event: ev.Event
    effects: tuple[ef.Effect, ...]


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


def cause_of(step: Step) -> Cause:
    """Describe an event as the cause of something."""
    _, fields = event_record(step.event)
    return Cause(
        seq=step.record.seq,
        kind=record_name(step.event),
        summary=show(_without_type(fields)),
    )


def show_shortened(short: Shortened) -> str:
    """Describe a refused message, and the part that is kept."""
    is_kept = bool(short.head or short.unreadable)
    kept = "first 1 KiB kept" if is_kept else "its start left out"
    return f"{show_bytes(short.size_bytes)}, {kept}, blake2b {label(short.blake2b)}"


def _without_type(fields: Fields) -> Mapping[str, Value]:
    return {name: value for name, value in fields.items() if name != "type"}
