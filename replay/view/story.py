"""A session's story for the page: as `replay.story.inspect`, with the times on the clock.

    with Narrator(head) as narrator:
        for item in reader: parts = narrator.tell(item)
        parts = narrator.conclude()

Values are those recorded. The arrival of a unit's input, and the number that waited, are known only
from stepping the session, so they end at a divergence. Memory holds the last part: some numbers a
unit, words, errors. Frames and media are `dialogue`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, Self

import attrs

from protocol.values import events as ev
from recorder.format.records import Fields, Record, Value
from recorder.read.scan import Damage
from runtime.measures.measure import NEAR_TIE_LOGITS

from ..eval.gather import Gathering
from ..shared.fields import typed
from ..story.inspect import Inspector, to_json
from ..story.reading import Passage
from .dialogue import Dialogue
from .findings import Comparison, finding_of
from .parts import ROWS_A_PART, Json, Part, plain, row_of
from .talk import measures_of, talk_of

POINTS_MAX: Final = 50_000
"""Of one line, and of one kind of mark: a longest session has a few thousand."""


class Narrator(Inspector):
    """Narrates a session record by record; what `Inspector` collects comes with the last part.

    Args:
        head: the fields of the log's `session` record.
    """

    def __init__(self, head: Fields) -> None:
        super().__init__()
        self.head: Final = head
        self._gathering: Final = Gathering(head, self)
        self.dialogue: Final = Dialogue(self.dictated)
        self._rows: list[Json] = []
        self._places: dict[int, dict[str, Json]] = {}
        self._arrived: deque[int] = deque()
        self._kinds: dict[int, str] = {}
        self._waiting: list[Json] = []
        self._queue: list[Json] = []
        self._kv: list[Json] = []
        self._happenings: list[Json] = []
        self._damages: list[Json] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._gathering.__exit__(*error)

    def tell(self, item: Record | Damage) -> list[Part]:
        """Take the next record, or damage; give the parts that are complete by now."""
        before = self._counts()
        passage = self.take(item)
        self._gathering.take(item, passage)
        if isinstance(item, Damage):
            self._damages.append([item.first_seq, item.records, item.reason, plain(item.detail)])
        if passage is None:
            return []
        kept = "" if passage.short is None else passage.short.told
        self._rows.append(row_of(passage.record, kept))
        parts = self._flush() if len(self._rows) >= ROWS_A_PART else []
        self._note_arrivals(passage.record, before)
        return [*parts, *self._note(passage)]

    def conclude(
        self, *, replayed: bool = False, comparison: Comparison | None = None
    ) -> list[Part]:
        """Give the last parts, if `replayed` with the verdict of logic replay."""
        parts = [*self._flush(), *self.dialogue.end()]
        _, facts = self._gathering.end()
        told = to_json(self.inspection(self.head))
        divergence = self.replayer.report().divergence
        found = [] if divergence is None else [finding_of(divergence)]
        found += comparison.findings if comparison is not None else ()
        story: dict[str, Json] = {
            **{name: plain(value) for name, value in told.items() if name not in _RESHAPED},
            "units": [plain_fields(it) | self._places.get(it["index"], {}) for it in told["units"]],
            "turns": [plain(turn) for turn in told["turns"]],
            "states": [[span["state"], span["at_ns"]] for span in told["states"]],
            "drops": [plain(attrs.asdict(drop)) for drop in self.drops[:POINTS_MAX]],
            "errors": [plain(attrs.asdict(error)) for error in self.errors[:POINTS_MAX]],
            "shortened": [plain(it) for it in told["shortened"][:POINTS_MAX]],
            "playback": [plain(it) for it in told["playback"][:POINTS_MAX]],
            "said": self.dialogue.said,
            "pauses": self.dialogue.pauses,
            "waiting": self._waiting,
            "queue": self._queue,
            "kv": self._kv,
            "marks": self._happenings,
            "damages": self._damages[:POINTS_MAX],
            "findings": [plain(attrs.asdict(finding)) for finding in found],
            "talk": talk_of(facts),
            "measures": measures_of(facts),
            "forced_units": self.forced_units,
            "near_tie_logits": NEAR_TIE_LOGITS,
            "verdict": self._verdict() if replayed else None,
            "compared": None
            if comparison is None
            else {"name": plain(comparison.name), "differences": len(comparison.findings)},
            "instructions": plain(typed(self.opening, "instructions", str)),
            "context_tokens": self.opened.limits.context_tokens if self.opened else None,
            "pictures_left_out": self.dialogue.pictures.left_out,
            "sound_left_out_s": self.dialogue.user.left_out_s + self.dialogue.model.left_out_s,
        }
        return [*parts, Part("story", story)]

    def _verdict(self) -> str:
        report = self.replayer.report()
        if report.damage_count:
            return "damaged"
        return "diverged" if report.divergence is not None else "identical"

    def _flush(self) -> list[Part]:
        rows, self._rows = self._rows, []
        return [Part("rows", rows)] if rows else []

    # -- from stepping --------------------------------------------------------------------------

    def _counts(self) -> Mapping[str, int]:
        session = self.session
        return {} if session is None else session.counts

    def _note_arrivals(self, record: Record, before: Mapping[str, int]) -> None:
        """Count the waiting seconds of input: those that came, and those that were dropped."""
        session = self.session
        if session is None or self.replayer.is_stopped:
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
            self._place(after["units"] - 1, record.seq, self._arrived.popleft())
        if session.units_waiting != waited and len(self._waiting) < POINTS_MAX:
            self._waiting.append([record.at_ns, session.units_waiting])

    # -- from records ---------------------------------------------------------------------------

    def _note(self, passage: Passage) -> list[Part]:
        record, wire = passage.record, self.wire
        if record.kind == "rx":
            request = wire.request(passage.frame) if passage.frame else None
            return [] if request is None else self.dialogue.receive(record, request)
        if record.kind == "tx":
            return self.dialogue.send(record, wire.messages(passage.frame))
        if record.kind == "mark":
            self._mark("mark", record, record.fields)
        elif passage.effect:
            self._note_effect(passage.effect, record)
        if passage.event is None:
            return []
        self._note_move(passage.event, record)
        if isinstance(passage.event, ev.UserTranscribed):
            self.dialogue.transcribed(passage.event, record.seq)
        return self._note_event(passage.event)

    def _note_move(self, event: ev.Event, record: Record) -> None:
        match event:
            case ev.BackendLost():
                self._mark("move", record, {"why": "lost"})
            case ev.LeaseRevoked():
                self._mark("move", record, {"why": "drained"})
            case ev.Forked():
                self._mark("forked", record, {})
            case ev.PeerAttached(after=after):
                self._mark("back", record, {"seq": after + 1})
            case ev.PeerGone() | ev.SendFailed() if self.opened is not None:
                if self.opened.resume_hash:
                    self._mark("away", record, {})
            case ev.Rebuilt(steps=steps):
                self._mark("rebuilt", record, {"steps": steps})

    def _note_event(self, event: ev.Event) -> list[Part]:
        at_ns = event.at_ns
        match event:
            case ev.TicketMoved(place=place):
                self._point(self._queue, at_ns, place.position, place.queue_length)
            case ev.SlotLeased() | ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                self._point(self._queue, at_ns, 0, 0)
            case ev.BackendOpened(opened=opened):
                self._point(self._kv, at_ns, opened.prompt_length)
            case ev.UnitDone(result=made) | ev.TurnDone(result=made) | ev.ChunkDone(result=made):
                self._point(self._kv, at_ns, made.kv_length)
                if isinstance(event, ev.UnitDone) and made.margin and made.index in self._places:
                    self._places[made.index]["margin"] = plain(made.margin)
            case ev.FinalizeDone(finalized=finalized):
                self._point(self._kv, at_ns, finalized.kv_length)
            case ev.TurnPrefilled(prefill=prefill):
                self._point(self._kv, at_ns, prefill.input_tokens)
            case ev.BackendReleased():
                self._point(self._kv, at_ns, 0)
            case ev.RollbackDone(index=index) if index in self._places:
                self._places[index]["undone_ns"] = at_ns
            case ev.MediaDecoded(media=media) if self._kinds.pop(media, "") in _ASKED:
                return self.dialogue.decoded(event)
        return []

    def _note_effect(self, effect: str, record: Record) -> None:
        fields, current = record.fields, self.exchanges.current
        match effect:
            case "StartUnit" if current is not None and current.seq == record.seq:
                self._place(current.index, record.seq)
            case "DecodeMedia":
                media, kind = fields.get("media"), fields.get("kind")
                if isinstance(media, int) and isinstance(kind, str):
                    self._kinds[media] = kind
            case "InterruptUnit" | "InterruptTurn":
                self._mark("interrupt", record, {"index": fields.get("index")})

    def _place(self, unit: int, seq: int, arrived_ns: int | None = None) -> None:
        """Note a unit's place in the log, and the facts known only from stepping."""
        place = self._places.setdefault(unit, {"seq": 0, "arrived_ns": None, "undone_ns": None})
        place |= {"seq": seq} if arrived_ns is None else {"seq": seq, "arrived_ns": arrived_ns}

    def _mark(self, kind: str, record: Record, fields: Fields) -> None:
        self._point(self._happenings, record.at_ns, kind, record.seq, plain(fields))

    @staticmethod
    def _point(line: list[Json], *values: Json) -> None:
        if len(line) < POINTS_MAX:
            line.append([*values])


_RESHAPED: Final = frozenset(
    {"units", "turns", "states", "drops", "errors", "marks", "shortened"} | {"playback"}
)
_ASKED: Final = frozenset({"image", "audio", "video"})
"""Media of which a session uses the decoded form; the others are voices, and JPEG frames."""


def plain_fields(fields: Mapping[str, Value]) -> dict[str, Json]:
    """Shorten the values of some fields."""
    return {name: plain(value) for name, value in fields.items()}
