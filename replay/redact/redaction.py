"""A log without its content: its events edited, everything else made again.

- Only events and the head are edited; effects, state hashes and `fin` follow from them.
- The session must take the same course: each effect has the class, numbers and flags of the
  recorded one. Otherwise nothing is written: the log is damaged or of another version, or our
  editing is wrong.
- A mark keeps its time; its words are text, and its author is a name. Other records that are not
  the log's own are left out, and counted.
- A run reads the log once, and holds one event and its effects in memory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import attrs

from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from recorder.format.mapping import EFFECT_KINDS, EVENT_KINDS, MappingError, event_of
from recorder.format.records import Fields, Record, Value
from recorder.read.scan import Damage
from runtime.model.models import MODELS

from ..rerun.difference import describe
from ..rerun.remake import RemakeError, Remaker
from ..shared.fields import REDACTED
from .client_frames import FrameEditor
from .event_fields import EventEditor
from .policy import TRACES, Kind, Policy, Tally
from .words import fill

_KIND_OF_MEDIA: Final[Mapping[object, Kind]] = {
    "jpeg": "video",
    "video": "video",
    "image": "image",
    "audio": "audio",
    "second": "audio",
    "wav": "voice",
    "voice": "voice",
}
"""The kind of a `DecodeMedia`."""
_SAID_AGAIN: Final[Mapping[str, str]] = {
    "chat": "a chat says again what was said",
    "transcription": "a transcription is written some time after it was said",
}
"""By mode: why content before a given end would be left."""
_LOG_S_OWN: Final = frozenset({"session", "state", "fin"})
_CLIENT_S: Final = "metadata"
"""What a frame tells the client again: its names are the client's own, and are replaced."""
_SAME_WORDS: Final = frozenset({"type", "kind", "code"})
"""Texts of an effect and a sent frame that must stay the same."""
HEAD_KEPT: Final = frozenset(
    {"recording_id", "session_id", "schema", "software", "config", "fingerprint", "seed"}
    | {"wall_ms", "parent", "redacted", "shrunk"}
)
"""The fields of a head; others are left out."""
CONFIG_KEPT: Final = frozenset({"model", "mode", "durability", "deterministic", "owner"})
MARK_KEPT: Final = frozenset({"text", "by"})
"""The fields of a mark; others are left out."""


class RedactError(ValueError):
    """The log cannot be redacted."""


class Redaction:
    """One run over a log; a rehearsal only counts. `left_out` counts records left out."""

    def __init__(self, policy: Policy, *, is_rehearsal: bool = False) -> None:
        self.tally = Tally()
        self.left_out = 0
        self._policy: Final = policy
        frames = FrameEditor(policy=policy, tally=self.tally, is_rehearsal=is_rehearsal)
        self._events: Final = EventEditor(frames=frames)
        self._remaker: Final = Remaker()
        self._due: deque[Record] = deque()

    def records(self, items: Iterable[Record | Damage]) -> Iterator[Record]:
        """The records of the redacted log, without its head, from those of the log in order.

        `RedactError`: the log is damaged, or the session takes another course.
        """
        for item in items:
            if isinstance(item, Damage):
                raise RedactError(f"damaged at byte {item.offset}: {item.detail}")
            if item.kind in EVENT_KINDS:
                yield from self._take_event(item)
            elif item.kind in EFFECT_KINDS:
                self._take_effect(item)
            elif item.kind == "fin":
                self._see_that_nothing_is_due(item)
                yield self._remaker.end()
            elif item.kind == "mark" and isinstance(item.fields.get("text"), str):
                yield self._remaker.mark(item.at_ns, self._edit_mark(item))
            elif item.kind not in _LOG_S_OWN:
                self.left_out += 1

    def _take_event(self, record: Record) -> Iterator[Record]:
        self._see_that_nothing_is_due(record)
        try:
            event = event_of(record.fields, record.at_ns)
            self._check(event)
            remade = self._remaker.step(self._events.edit(event))
        except (MappingError, RemakeError) as error:
            raise RedactError(f"record {record.seq}: {error}") from error
        except KeyError as error:
            raise RedactError(
                f"record {record.seq} has a field of unknown kind: {error}"
            ) from error
        self._due.extend(made for made in remade.records[1:] if made.kind in EFFECT_KINDS)
        yield from remade.records

    def _edit_mark(self, record: Record) -> Fields:
        """A mark without its text, and without its author's name."""
        kept = _known(record.fields, MARK_KEPT, self.tally)
        text, by = kept["text"], kept.get("by")
        assert isinstance(text, str)
        if self._policy.covers("text", "both", record.at_ns):
            kept["text"] = fill(text)
            self.tally.count("text", "both", len(text.encode(errors="replace")))
        if by is not None and self._policy.covers("name", "user", record.at_ns):
            del kept["by"]
            self.tally.count("name", "user", len(str(by)))
        return kept

    def _check(self, event: ev.Event) -> None:
        if not isinstance(event, ev.ConnectionOpened) or self._policy.to_ns is None:
            return
        if event.mode in _SAID_AGAIN:
            text = f"{_SAID_AGAIN[event.mode]}: it can only be redacted to its end"
            raise RedactError(text)

    def _take_effect(self, record: Record) -> None:
        made = self._due.popleft() if self._due else None
        try:
            is_other = made is None or _course(record.fields) != _course(made.fields)
        except (ValueError, RecursionError) as error:
            raise RedactError(f"record {record.seq}: its frame is not JSON: {error}") from error
        if made is None or is_other:
            raise _other_course(record, made)
        if made.fields["type"] == "DecodeMedia" and made.fields["data"] != record.fields["data"]:
            media = made.fields["media"]
            assert isinstance(media, int)
            self._events.media[media] = _KIND_OF_MEDIA[made.fields["kind"]]

    def _see_that_nothing_is_due(self, record: Record) -> None:
        if self._due:
            raise _other_course(record, self._due[0])


def _other_course(record: Record, made: Record | None) -> RedactError:
    came_out = "nothing" if made is None else describe(made)
    return RedactError(
        f"the session would take another course: record {record.seq} is"
        f" {describe(record)}, and {came_out} came out; see `antiphon replay`"
    )


def _course(fields: Fields) -> Any:
    """The parts of an effect that must not change: numbers, flags and classes."""
    frame = fields.get("frame")
    if not isinstance(frame, str):
        return _without_content(fields)
    return fields.get("ordinal"), _without_content(json.loads(frame))


def _without_content(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {
            name: _without_content(below, name)
            for name, below in value.items()
            if name not in ("blake2b", _CLIENT_S)
        }
    if isinstance(value, list | tuple):
        return [_without_content(below) for below in value]
    return None if isinstance(value, str) and key not in _SAME_WORDS else value


# -- the head -------------------------------------------------------------------------------------


def redacted_head(head: Fields, policy: Policy, tally: Tally) -> Fields:
    """The head of the redacted log, without names; `tally` is a rehearsal's, and counts them."""
    kept = _known(head, HEAD_KEPT, tally)
    config = kept.get("config")
    if isinstance(config, Mapping):
        kept["config"] = known = _known(config, CONFIG_KEPT, tally)
        if policy.covers("name", "user", 0):
            for name in _names_in(known):
                tally.count("name", "user", len(str(known.pop(name))))
    before = head.get(REDACTED)
    kept[REDACTED] = [
        *(before if isinstance(before, list | tuple) else ()),
        {**to_json(policy), "removed": tally.to_json()},
    ]
    return kept


def _known(fields: Fields, names: frozenset[str], tally: Tally) -> dict[str, Value]:
    """Keep the known fields; others may be hashes of content."""
    for name in fields.keys() - names:
        tally.count(TRACES, "both", len(str(fields[name])))
    return {name: fields[name] for name in fields if name in names}


def _names_in(config: Fields) -> list[str]:
    """The entries with names; a model that is not ours is a folder, or an address."""
    names = ["owner"] if "owner" in config else []
    return names if config.get("model", MODELS[0]) in MODELS else [*names, "model"]


def to_json(policy: Policy) -> dict[str, Value]:
    """A policy as JSON."""
    return {
        "side": policy.side,
        "kinds": sorted(policy.kinds),
        "from_s": policy.from_ns / NS_PER_S,
        "to_s": None if policy.to_ns is None else policy.to_ns / NS_PER_S,
        "pictures": policy.pictures,
    }


@attrs.frozen(kw_only=True)
class Redacted:
    """The results for a log; `records` counts the head too."""

    head: Fields
    tally: Tally
    records: int
    left_out: int


def rehearse(head: Fields, items: Iterable[Record | Damage], policy: Policy) -> Redacted:
    """Count the content, and check the session's course; `RedactError` if it changes."""
    run = Redaction(policy, is_rehearsal=True)
    records = 1 + sum(1 for _ in run.records(items))
    made = redacted_head(head, policy, run.tally)
    return Redacted(head=made, tally=run.tally, records=records, left_out=run.left_out)
