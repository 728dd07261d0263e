"""A session's story for the page: its dialogue, as it was heard, seen and read, and its times.

    with Narrator(head) as narrator:
        for item in reader: parts = narrator.narrate(item)
        parts = narrator.conclude()

Values are those recorded, as `replay.story.inspect` has them. The arrival of a unit's input, and
the number that waited, are known only from stepping the session, so they end at a divergence.
Memory holds the last part: some numbers a unit, words, errors. Times are nanoseconds of the
session's clock.

The dialogue is the session's time line (`export.timeline`); words that are sent within `HOLD_NS`
are joined, and those without sound give way to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import attrs

from protocol.values import events as ev
from recorder.format.format import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage, OpenSource
from runtime.measures.conversation import NEAR_TIE_LOGITS, VOICES, Span, Turns, Voice, ns_of, shared
from runtime.measures.talk import Sound

from ..diff import DiffReport, Parting, compare
from ..eval.evaluate import own_values
from ..eval.scores import Facts, Gathering, score
from ..eval.table import MEASURES
from ..export.timeline import HOLD_NS, Moment, Note, Picture, Words
from ..rerun.report import Divergence
from ..shared.fields import typed
from ..story.inspect import Inspector, to_json
from ..story.reading import Passage
from .parts import ROWS_A_PART, Json, Part, Pictures, Track, plain, row_of

# -- remarks on places -----------------------------------------------------------------------------


Open = Callable[[], OpenSource]


@attrs.frozen
class Finding:
    """A remark on a place in a session: one of `seq`, `unit`, `turn` and `at_ns`; the last wins."""

    title: str
    detail: tuple[str, ...] = ()
    seq: int | None = None
    unit: int | None = None
    turn: int | None = None
    at_ns: int | None = None


@attrs.frozen(kw_only=True)
class Comparison:
    """The comparison with the session `name`; `findings` is empty if both are the same."""

    name: str
    findings: Sequence[Finding] = ()


def finding_of(divergence: Divergence) -> Finding:
    """Describe the divergence of logic replay."""
    field = f", {divergence.field}" if divergence.field else ""
    cause = divergence.cause
    detail = [f"recorded: {divergence.recorded}", f"came out: {divergence.came_out}"]
    detail += [] if cause is None else [f"event: {cause.seq}, {cause.kind} {cause.summary}"]
    title = f"Replay diverges here: {divergence.record}{field} ({divergence.kind})"
    return Finding(title, tuple(detail), seq=divergence.seq, at_ns=divergence.at_ns)


def comparison_of(report: DiffReport, name: str) -> Comparison:
    """Describe how the session `name` differs; in the report it is `b`, the shown session `a`."""
    found = [_parting(parting, name, report.a.span_ns) for parting in report.partings]
    return Comparison(name=name, findings=found)


def compared_with(one: Open, other: Open, name: str) -> Comparison:
    """Compare the log that `one` opens with that of `other`, the session `name`."""
    with LogReader(one()) as a, LogReader(other()) as b:
        return comparison_of(compare(a.head.fields, a, b.head.fields, b), name)


def _parting(parting: Parting, name: str, end_ns: int) -> Finding:
    place = parting.what if parting.index is None else f"{parting.what} {parting.index}"
    is_missing = parting.fields == (parting.what,)
    fields = "" if is_missing else f", {', '.join(parting.fields)}"
    snr = parting.snr_db
    detail = [f"here: {parting.in_a}", f"there: {parting.in_b}"]
    detail += [] if snr is None else [f"sound: {snr} dB above the difference"]
    unit, turn = (parting.index if parting.what == what else None for what in ("unit", "turn"))
    at_ns = {"opening": 0, "end": end_ns}.get(parting.what)
    return Finding(f"Differs from {name}: {place}{fields}", tuple(detail), None, unit, turn, at_ns)


# -- the dialogue ----------------------------------------------------------------------------------


WORDS_MAX: Final = 20_000
"""Pieces of text: a longest session has 600, a chat of an hour one a second."""


class Dialogue:
    """Takes the moments of a session's time line, in order.

    `words` holds words: voice, when they begin and end, the text, the record; the last of `pauses`
    has no end until it comes.
    """

    def __init__(self) -> None:
        self.tracks: Final = {voice: Track(voice) for voice in VOICES}
        self.pictures: Final = Pictures()
        self.words: list[list[Any]] = []
        self.pauses: list[list[int | None]] = []
        self._last: dict[Voice, tuple[Words, list[Any]]] = {}

    def take(self, moment: Moment) -> list[Part]:
        """Take the next moment; give the parts that are complete with it."""
        match moment:
            case Sound():
                return self.tracks[moment.voice].take(moment.begin, moment.pcm)
            case Picture():
                return [self.pictures.take(moment.begin_ns, moment.jpeg)]
            case Words():
                self._add(moment)
            case Note(begin_ns=at_ns, kind="unheard") if len(self.words) < WORDS_MAX:
                self.words.append(["model", at_ns, at_ns + HOLD_NS, moment.text, moment.seq])
            case Note(kind="paused"):
                self.pauses.append([moment.begin_ns, None])
            case Note(kind="resumed") if self.pauses:
                self.pauses[-1][1] = moment.begin_ns
        return []

    def end(self) -> list[Part]:
        """Give the rest."""
        return [part for track in self.tracks.values() for part in track.flush()]

    def _add(self, words: Words) -> None:
        first, shown = self._last.get(words.voice, (None, []))
        if first is not None and _goes_on(first, words):
            shown[3] += words.text
            return
        if first is not None:  # words without sound give way
            shown[2] = min(shown[2], max(shown[1], words.begin_ns))
        end_ns = words.begin_ns + HOLD_NS if words.end_ns is None else words.end_ns
        shown = [words.voice, words.begin_ns, end_ns, words.text, words.seq]
        if words.text.strip() and len(self.words) < WORDS_MAX:
            self._last[words.voice] = (words, shown)
            self.words.append(shown)


def _goes_on(first: Words, words: Words) -> bool:
    """Whether words go on in the passage that begins with others, without sound as these."""
    is_mute = first.end_ns is None and words.end_ns is None
    is_one = words.voice == "model" and words.response_id == first.response_id
    return is_mute and is_one and words.begin_ns - first.begin_ns < HOLD_NS


# -- who spoke when --------------------------------------------------------------------------------


TALK_POINTS_MAX: Final = 10_000
"""Of one kind: an hour of seconds, each spoken over, has fewer."""


def talk_of(facts: Facts) -> Json:
    """Place the user's turns, their answers and all speech over speech.

    None without two voices to place: in chats and transcriptions, and where a redaction took the
    user's sound and the log does not say where it was.
    """
    talk = facts.conversation
    if facts.work != "unit" or "speech" in facts.lost or not (talk.user or talk.model):
        return None
    turns = Turns(talk)
    return {
        "user": _spans(talk.user),
        "model": _spans(talk.model),
        "overlaps": _spans(shared(talk.user, talk.model)),
        "turns": [
            {
                **_ends(turn.speech.begin, turn.speech.end),
                "delay_ns": None if turn.delay is None else ns_of(turn.delay),
                "answer_ns": None if turn.answer is None else ns_of(turn.answer.begin),
                "is_silent": turn.is_silent and turn.is_judged,
            }
            for turn in turns.turns[:TALK_POINTS_MAX]
        ],
        "barge_ins": [
            {**_ends(it.speech.begin, it.over.end), "is_yielded_to": it.is_yielded_to}
            for it in turns.barge_ins[:TALK_POINTS_MAX]
        ],
    }


def _ends(begin: int, end: int) -> dict[str, Json]:
    return {"begin_ns": ns_of(begin), "end_ns": ns_of(end)}


def measures_of(facts: Facts) -> Json:
    """List the recording's measures, in the order of their table, each with its definition."""
    values = own_values(score(facts))
    known = [it for it in MEASURES.values() if it.name in values]
    names = ("name", "unit", "definition")
    return [{n: getattr(it, n) for n in names} | {"value": values[it.name]} for it in known]


def _spans(spans: Iterable[Span]) -> Json:
    return [[ns_of(span.begin), ns_of(span.end)] for span in [*spans][:TALK_POINTS_MAX]]


# -- the session -----------------------------------------------------------------------------------


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
        self.dialogue: Final = Dialogue()
        self._parts: list[Part] = []
        self._gathering: Final = Gathering(
            head, self, also=lambda it: self._parts.extend(self.dialogue.take(it))
        )
        self._rows: list[Json] = []
        self._places: dict[int, dict[str, Json]] = {}
        self._arrived: deque[int] = deque()
        self._points: dict[str, list[Json]] = {"waiting": [], "queue": [], "kv": [], "marks": []}
        self._damages: list[Json] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._gathering.__exit__(*error)

    def narrate(self, item: Record | Damage) -> list[Part]:
        """Add the next record, or damage; return the parts that are complete by now."""
        before = {} if self.session is None else self.session.counts
        passage = self.take(item)
        self._gathering.take(item, passage)
        if isinstance(item, Damage):
            self._damages.append([item.first_seq, item.records, item.reason, plain(item.detail)])
        if passage is not None:
            kept = "" if passage.short is None else passage.short.told
            self._rows.append(row_of(passage.record, kept))
            self._note_arrivals(passage.record, before)
            self._note(passage)
        return self._flush(ROWS_A_PART)

    def conclude(
        self, *, replayed: bool = False, comparison: Comparison | None = None
    ) -> list[Part]:
        """Give the last parts, if `replayed` with the verdict of logic replay."""
        facts = self._gathering.end()
        parts = [*self._flush(), *self.dialogue.end()]
        inspected, places = to_json(self.inspection(self.head)), self._places
        divergence = self.replayer.report().divergence
        found = [] if divergence is None else [finding_of(divergence)]
        found += comparison.findings if comparison is not None else ()
        story: dict[str, Json] = {
            **{name: plain(value) for name, value in inspected.items() if name not in _RESHAPED},
            "units": [
                {name: plain(value) for name, value in it.items()} | places.get(it["index"], {})
                for it in inspected["units"]
            ],
            "turns": [plain(turn) for turn in inspected["turns"]],
            "states": [[span["state"], span["at_ns"]] for span in inspected["states"]],
            "drops": [plain(attrs.asdict(drop)) for drop in self.drops[:POINTS_MAX]],
            "errors": [plain(attrs.asdict(error)) for error in self.errors[:POINTS_MAX]],
            "shortened": [plain(it) for it in inspected["shortened"][:POINTS_MAX]],
            "playback": [plain(it) for it in inspected["playback"][:POINTS_MAX]],
            "said": [[*at, plain(text), seq] for *at, text, seq in self.dialogue.words],
            "pauses": self.dialogue.pauses,
            **self._points,
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
            "transcriber": plain(self.opened.limits.transcriber) if self.opened else "",
            "context_tokens": self.opened.limits.context_tokens if self.opened else None,
            "pictures_left_out": self.dialogue.pictures.left_out,
            "sound_left_out_s": sum(it.left_out_s for it in self.dialogue.tracks.values()),
        }
        return [*parts, Part("story", story)]

    def _verdict(self) -> str:
        report = self.replayer.report()
        if report.damage_count:
            return "damaged"
        return "diverged" if report.divergence is not None else "identical"

    def _flush(self, rows_min: int = 1) -> list[Part]:
        """Give what is complete, with the rows if there are so many."""
        parts, self._parts = self._parts, []
        if len(self._rows) >= rows_min:
            parts.append(Part("rows", self._rows))
            self._rows = []
        return parts

    # -- from stepping --------------------------------------------------------------------------

    def _note_arrivals(self, record: Record, before: Mapping[str, int]) -> None:
        """Count the waiting seconds of input: those that came, and those that were dropped."""
        session = self.session
        if session is None or self.replayer.is_stopped:
            self._arrived.clear()
            return
        after = session.counts
        gone = sum(after[name] - before.get(name, 0) for name in ("units", "units_dropped"))
        waited = len(self._arrived)
        came = session.units_waiting + gone - waited
        self._arrived.extend([record.at_ns] * came)
        for _ in range(min(len(self._arrived), gone) - (after["units"] - before.get("units", 0))):
            self._arrived.popleft()
        if after["units"] > before.get("units", 0) and self._arrived:
            self._place(after["units"] - 1, record.seq, self._arrived.popleft())
        if session.units_waiting != waited:
            self._point("waiting", record.at_ns, session.units_waiting)

    # -- from records ---------------------------------------------------------------------------

    def _note(self, passage: Passage) -> None:
        record = passage.record
        if record.kind == "mark":
            self._mark("mark", record, record.fields)
        elif passage.effect:
            self._note_effect(passage.effect, record)
        if passage.event is not None:
            self._note_move(passage.event, record)
            self._note_event(passage.event)

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

    def _note_event(self, event: ev.Event) -> None:
        at_ns = event.at_ns
        match event:
            case ev.TicketMoved(place=place):
                self._point("queue", at_ns, place.position, place.queue_length)
            case ev.SlotLeased() | ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                self._point("queue", at_ns, 0, 0)
            case ev.BackendOpened(opened=opened):
                self._point("kv", at_ns, opened.prompt_length)
            case ev.UnitDone(result=made) | ev.TurnDone(result=made) | ev.ChunkDone(result=made):
                self._point("kv", at_ns, made.kv_length)
                if isinstance(event, ev.UnitDone) and made.margin and made.index in self._places:
                    self._places[made.index]["margin"] = plain(made.margin)
            case ev.FinalizeDone(finalized=finalized):
                self._point("kv", at_ns, finalized.kv_length)
            case ev.TurnPrefilled(prefill=prefill):
                self._point("kv", at_ns, prefill.input_tokens)
            case ev.BackendReleased():
                self._point("kv", at_ns, 0)
            case ev.RollbackDone(index=index) if index in self._places:
                self._places[index]["undone_ns"] = at_ns

    def _note_effect(self, effect: str, record: Record) -> None:
        fields, current = record.fields, self.exchanges.current
        match effect:
            case "StartUnit" if current is not None and current.seq == record.seq:
                self._place(current.index, record.seq)
            case "InterruptUnit" | "InterruptTurn":
                self._mark("interrupt", record, {"index": fields.get("index")})

    def _place(self, unit: int, seq: int, arrived_ns: int | None = None) -> None:
        """Note a unit's place in the log, and the facts known only from stepping."""
        place = self._places.setdefault(unit, {"seq": 0, "arrived_ns": None, "undone_ns": None})
        place |= {"seq": seq} if arrived_ns is None else {"seq": seq, "arrived_ns": arrived_ns}

    def _mark(self, kind: str, record: Record, fields: Fields) -> None:
        self._point("marks", record.at_ns, kind, record.seq, plain(fields))

    def _point(self, line: str, *values: Json) -> None:
        if len(self._points[line]) < POINTS_MAX:
            self._points[line].append([*values])


_RESHAPED: Final = frozenset(
    {"units", "turns", "states", "drops", "errors", "marks", "shortened"} | {"playback"}
)
