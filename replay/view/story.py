"""A session's story for the page: what `replay.inspect` tells, and where on the clock it stands.

    narrator = Narrator()
    for item in reader: parts = narrator.tell(item)
    parts = narrator.conclude(head)

Rules: what was recorded is told. When a unit's input had come, and how many waited, is known from
stepping the session, so it is missing from where the machine parts from its log. Memory holds what
the last part needs: some numbers a unit, words, errors.

Frames and media are `exchange`'s; nothing here is text for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import attrs

from protocol import events as ev
from protocol.dialects import DIALECTS, REALTIME, Dialect
from protocol.dialects.opening import OPENING
from protocol.messages import Mode
from recorder.mapping import EVENT_KINDS, MappingError, event_of
from recorder.records import Fields, Record, Value
from recorder.scan import Damage

from ..inspect import Inspector
from ..inspection import to_json
from ..wire import requests_taken, was_taken
from .exchange import Exchange
from .findings import Comparison, finding_of
from .parts import ROWS_A_PART, Json, Part, plain, row_of

POINTS_MAX: Final = 50_000
"""Of one line, and of one kind of mark: a longest session has a few thousand."""


@attrs.define(kw_only=True)
class _UnitPlace:
    """Where a unit stands in the log, and what only stepping tells of it."""

    seq: int
    arrived_ns: int | None
    undone_ns: int | None = None


class Narrator(Inspector):
    """Tells a session record by record; what `Inspector` collects comes with the last part."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange: Final = Exchange()
        self._rows: list[Json] = []
        self._places: dict[int, _UnitPlace] = {}
        self._arrived: deque[int] = deque()
        self._kinds: dict[int, str] = {}
        self._waiting: list[Json] = []
        self._queue: list[Json] = []
        self._kv: list[Json] = []
        self._happenings: list[Json] = []
        self._error_seqs: list[int] = []
        self._drop_seqs: list[int] = []
        self._damages: list[Json] = []
        self._instructions: str | None = None

    def tell(self, item: Record | Damage) -> list[Part]:
        """Take the next record, or damage; give what the page is told by now."""
        before, taken = self._counts(), requests_taken(self.session)
        step = self.feed(item)
        if isinstance(item, Damage):
            self._damages.append([item.first_seq, item.records, item.reason, plain(item.detail)])
            return []
        self._rows.append(row_of(item))
        parts = self._flush() if len(self._rows) >= ROWS_A_PART else []
        self._note_arrivals(item, before)
        return [*parts, *self._note(item, is_taken=was_taken(step, taken, self.session))]

    def conclude(
        self, head: Fields, *, replayed: bool = False, comparison: Comparison | None = None
    ) -> list[Part]:
        """Give what is left.

        Args:
            head: the fields of the log's `session` record.
            replayed: say what logic replay found, also where that is nothing.
            comparison: what came of comparing the session with another.
        """
        parts = [*self._flush(), *self.exchange.end()]
        told = to_json(self.inspection(head))
        divergence = self.replayed().divergence
        found = [] if divergence is None else [finding_of(divergence)]
        found += comparison.findings if comparison is not None else ()
        story: dict[str, Json] = {
            **{name: plain(value) for name, value in told.items() if name not in _RESHAPED},
            "units": [self._unit(unit) for unit in _mappings(told["units"])],
            "turns": [plain(turn) for turn in _mappings(told["turns"])],
            "states": [[span["state"], span["at_ns"]] for span in _mappings(told["states"])],
            "drops": [
                {**drop, "seq": seq}
                for drop, seq in zip(_mappings(told["drops"]), self._drop_seqs, strict=True)
            ][:POINTS_MAX],
            "errors": [
                {**plain_fields(error), "seq": seq}
                for error, seq in zip(_mappings(told["errors"]), self._error_seqs, strict=True)
            ][:POINTS_MAX],
            "shortened": [plain_fields(it) for it in _mappings(told["shortened"])][:POINTS_MAX],
            "said": self.exchange.said,
            "pauses": self.exchange.pauses,
            "waiting": self._waiting,
            "queue": self._queue,
            "kv": self._kv,
            "marks": self._happenings,
            "damages": self._damages[:POINTS_MAX],
            "findings": [plain(attrs.asdict(finding)) for finding in found],
            "verdict": self._verdict() if replayed else None,
            "compared": None
            if comparison is None
            else {"name": plain(comparison.name), "differences": len(comparison.findings)},
            "instructions": plain(self._instructions),
            "context_tokens": self.opened.limits.context_tokens if self.opened else None,
            "pictures_left_out": self.exchange.pictures.left_out,
            "sound_left_out_s": self.exchange.user.left_out_s + self.exchange.model.left_out_s,
        }
        return [*parts, Part("story", story)]

    def _verdict(self) -> str:
        report = self.replayed()
        if report.damage_count:
            return "damaged"
        return "diverged" if report.divergence is not None else "identical"

    def _flush(self) -> list[Part]:
        rows, self._rows = self._rows, []
        return [Part("rows", rows)] if rows else []

    def _unit(self, unit: Mapping[str, Value]) -> Json:
        index = unit["index"]
        place = self._places.get(index) if isinstance(index, int) else None
        return {**plain_fields(unit), **({} if place is None else attrs.asdict(place))}

    # -- what only stepping tells ---------------------------------------------------------------

    def _counts(self) -> Mapping[str, int]:
        session = self.session
        return {} if session is None else session.counts

    def _note_arrivals(self, record: Record, before: Mapping[str, int]) -> None:
        """Follow the seconds of input that wait: those that came, and those that were dropped."""
        session = self.session
        if session is None or self.is_parted:
            self._arrived.clear()
            return
        after = self._counts()
        gone = sum(after[name] - before.get(name, 0) for name in ("units", "units_dropped"))
        waited = len(self._arrived)
        came = session.units_waiting + gone - waited
        self._arrived.extend([record.at_ns] * came)
        for _ in range(min(len(self._arrived), gone) - (after["units"] - before.get("units", 0))):
            self._arrived.popleft()
        if after["units"] > before.get("units", 0) and self._arrived:
            place = _UnitPlace(seq=record.seq, arrived_ns=self._arrived.popleft())
            self._places[after["units"] - 1] = place
        if session.units_waiting != waited and len(self._waiting) < POINTS_MAX:
            self._waiting.append([record.at_ns, session.units_waiting])

    # -- what was recorded ----------------------------------------------------------------------

    def _note(self, record: Record, *, is_taken: bool) -> list[Part]:
        if len(self.errors) > len(self._error_seqs):
            self._error_seqs.append(record.seq)
        if len(self.drops) > len(self._drop_seqs):
            self._drop_seqs.append(record.seq)
        dialect, mode = self._spoken()
        if record.kind == "rx":
            receive = self.exchange.receive
            is_whole = "shortened" not in record.fields
            return receive(record, dialect, mode, self.session) if is_taken and is_whole else []
        if record.kind == "tx":
            return self.exchange.send(record, dialect, mode)
        if record.kind == "mark":
            self._mark(record.at_ns, "mark", record.seq, record.fields)
        elif record.kind == "effect":
            self._note_effects(record)
        elif record.kind in EVENT_KINDS:
            return self._note_events(record)
        return []

    def _spoken(self) -> tuple[Dialect, Mode]:
        session = self.session
        name = "" if session is None else session.dialect_name
        opened = self.opened
        dialect = OPENING if name == OPENING.name else DIALECTS.get(name, REALTIME)
        return dialect, "audio" if opened is None else opened.mode

    def _note_events(self, record: Record) -> list[Part]:
        at_ns = record.at_ns
        try:
            event = event_of(record.fields, at_ns)
        except MappingError:
            return []
        match event:
            case ev.TicketMoved(place=place):
                self._point(self._queue, at_ns, place.position, place.queue_length)
            case ev.SlotLeased() | ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                self._point(self._queue, at_ns, 0, 0)
            case ev.BackendOpened(opened=opened):
                self._point(self._kv, at_ns, opened.prompt_length)
            case ev.UnitDone(result=result):
                self._point(self._kv, at_ns, result.kv_length)
            case ev.FinalizeDone(finalized=finalized):
                self._point(self._kv, at_ns, finalized.kv_length)
            case ev.TurnPrefilled(prefill=prefill):
                self._point(self._kv, at_ns, prefill.input_tokens)
            case ev.TurnDone(result=turn):
                self._point(self._kv, at_ns, turn.kv_length)
            case ev.ChunkDone(result=heard):
                self._point(self._kv, at_ns, heard.kv_length)
            case ev.BackendReleased():
                self._point(self._kv, at_ns, 0)
            case ev.RollbackDone(index=index) if index in self._places:
                self._places[index].undone_ns = at_ns
            case ev.MediaDecoded(media=media) if self._kinds.pop(media, "") in _ASKED:
                return self.exchange.decoded(event)
        return []

    def _note_effects(self, record: Record) -> None:
        fields, at_ns = record.fields, record.at_ns
        match fields.get("type"):
            case "RunChunk":
                self.exchange.dictated.write(fields.get("chunk"))
            case "StartUnit":
                unit = fields.get("unit")
                index = unit.get("index") if isinstance(unit, Mapping) else None
                if isinstance(index, int):
                    place = self._places.setdefault(index, _UnitPlace(seq=0, arrived_ns=None))
                    place.seq = record.seq
            case "DecodeMedia":
                media, kind = fields.get("media"), fields.get("kind")
                if isinstance(media, int) and isinstance(kind, str):
                    self._kinds[media] = kind
            case "Interrupt" | "CutTurn":
                self._mark(at_ns, "interrupt", record.seq, {"index": fields.get("index")})
            case "OpenBackend":
                opening = fields.get("opening")
                said = opening.get("instructions") if isinstance(opening, Mapping) else None
                self._instructions = said if isinstance(said, str) else None

    def _mark(self, at_ns: int, kind: str, seq: int, fields: Fields) -> None:
        self._point(self._happenings, at_ns, kind, seq, plain(fields))

    @staticmethod
    def _point(line: list[Json], *values: Json) -> None:
        if len(line) < POINTS_MAX:
            line.append([*values])


_RESHAPED: Final = frozenset({"units", "turns", "states", "drops", "errors", "marks", "shortened"})
_ASKED: Final = frozenset({"image", "audio", "video"})
"""Media of a conversation; the others are voices, and frames that come with their sound."""


def plain_fields(fields: Mapping[str, Value]) -> dict[str, Json]:
    """Shorten the values of some fields."""
    return {name: plain(value) for name, value in fields.items()}


def _mappings(value: Value) -> list[Mapping[str, Value]]:
    """Read a list of objects, of which `to_json` has made every list that is asked for here."""
    items = value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Mapping)]
