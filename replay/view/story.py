"""A session's story for the page: its dialogue, as it was heard, seen and read, and its times.

    with Narrator(head) as narrator:
        for item in reader: parts = narrator.narrate(item)
        parts = narrator.conclude()

Values are those recorded, as `replay.story.inspect` has them. The arrival of a unit's input, and
the number that waited, are known only from stepping the session, so they end at a divergence.
Memory holds the last part: some numbers a unit, words, errors. Times are nanoseconds of the
session's clock.

Rules of the dialogue:

- Frames are read with the dialect's own parsers; one that cannot be read, or that was refused, has
  no sound, picture or text.
- If the user's sound came ahead of the clock, what the server sends stands later by as much
  (`placing.Lead`).
- A model's words stand where their sound is heard, since text is sent earlier; words without sound
  stand where they were sent.
- From an answer's end, the words that were in no delta are taken: all, if it was not streamed.
- A listen during a turn stops playing sound, as a client does; after the turn's end it plays out.
- A picture stands where it was sent, a PNG or a WebP where it was decoded.
- A question in chat carries the whole conversation again; only its new part is taken, and its sound
  stands where it was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import attrs

from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values.digest import digest
from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, ToolCall
from protocol.values.openai import CreateItem
from protocol.values.requests import Append, AppendSound, Ask, AudioPart, ClientMessage, See
from protocol.values.requests import Part as ReceivedPart
from protocol.wire.audio import to_float32
from protocol.wire.media import kind_of
from recorder.format.records import Fields, Record, Value
from recorder.read.reader import LogReader
from recorder.read.scan import Damage, OpenSource
from runtime.measures.conversation import Span, Turns, ns_of, shared
from runtime.measures.measure import NEAR_TIE_LOGITS
from runtime.measures.placing import Positions, Voice, ahead_ns
from runtime.measures.tools import CallStory

from ..diff import DiffReport, Parting, compare
from ..eval.evaluate import own_values
from ..eval.scores import Facts, Gathering, score
from ..eval.table import MEASURES
from ..rerun.report import Divergence
from ..shared.fields import typed
from ..story.exchanges import asked_texts, calls_text
from ..story.inspect import Inspector, to_json
from ..story.reading import Dictated, Passage
from .parts import ROWS_A_PART, Json, Part, Pictures, Placed, Track, plain, row_of

# -- remarks on places -----------------------------------------------------------------------------


Open = Callable[[], OpenSource]


@attrs.frozen(kw_only=True)
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
    return Finding(
        title=f"Replay diverges here: {divergence.record}{field} ({divergence.kind})",
        detail=(
            f"recorded: {divergence.recorded}",
            f"came out: {divergence.came_out}",
            *([] if cause is None else [f"event: {cause.seq}, {cause.kind} {cause.summary}"]),
        ),
        seq=divergence.seq,
        at_ns=divergence.at_ns,
    )


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
    sound = None if parting.snr_db is None else f"sound: {parting.snr_db} dB above the difference"
    return Finding(
        title=f"Differs from {name}: {place}{fields}",
        detail=(
            f"here: {parting.in_a}",
            f"there: {parting.in_b}",
            *([] if sound is None else [sound]),
        ),
        unit=parting.index if parting.what == "unit" else None,
        turn=parting.index if parting.what == "turn" else None,
        at_ns={"opening": 0, "end": end_ns}.get(parting.what),
    )


# -- the dialogue ----------------------------------------------------------------------------------


HOLD_NS: Final = NS_PER_S
"""Words wait this long for their sound: a model speaks a second at a time."""
WORDS_MAX: Final = 20_000
"""Pieces of text: a longest session has 600, a chat of an hour one a second."""


@attrs.define(kw_only=True)
class _Held:
    turn: str
    seq: int
    begin_ns: int
    end_ns: int
    text: str = ""


class Dialogue:
    """Takes a session's frames and media in order.

    `words` holds words: voice, when they begin and end, the text, the record; the last of `pauses`
    has no end until it comes. `dictated` is the placed sound that is not transcribed yet.
    """

    def __init__(self, dictated: Dictated) -> None:
        self.user: Final = Track("user")
        self.model: Final = Track("model")
        self.pictures: Final = Pictures()
        self._dictated: Final = dictated
        self.words: list[Json] = []
        self.pauses: list[list[int | None]] = []
        self._held: _Held | None = None
        self._last_words: dict[Voice, list[Any]] = {}
        self._streamed = ("", "")
        self._in_turn = False
        self._sounds: set[str] = set()
        self._asked_ns = 0
        self._is_chat = False
        self._positions: Final = Positions()

    def receive(self, record: Record, request: ClientMessage, lag_ns: int) -> list[Part]:
        """Take a request that the session took; resampling made its sound later by `lag_ns`."""
        match request:
            case AppendSound(pcm16=pcm16):
                return self.user.take(record.at_ns, to_float32(pcm16), is_captured=True)[1]
            case Append(pcm=pcm, frames=frames):
                came_ns = max(record.at_ns - lag_ns, 0)
                place, parts = self.user.take(came_ns, pcm, is_captured=True)
                self._positions.add(len(pcm) // SAMPLE_BYTES, place.begin_ns)
                spoken_ns = self._spoken_ns(record.at_ns)
                pictures = [it for it in frames if isinstance(it, bytes)]  # others are invalid
                return [*parts, *(self.pictures.take(spoken_ns, each) for each in pictures)]
            case See(jpeg=jpeg):
                return [self.pictures.take(self._spoken_ns(record.at_ns), jpeg)]
            case CreateItem(item=item):
                shown = (one for one in item.pictures if kind_of(one) == "JPEG")
                return [self.pictures.take(record.at_ns, jpeg) for jpeg in shown]
            case Ask(messages=messages):
                return self._asked(record, messages[-1].content)
        return []

    def _spoken_ns(self, at_ns: int) -> int:
        """When it is spoken what the client sends at a time, with its sound so far."""
        return at_ns + ahead_ns(self.user.end_ns, at_ns)

    def _asked(self, record: Record, content: tuple[ReceivedPart, ...]) -> list[Part]:
        self._asked_ns, self._is_chat = record.at_ns, True
        words = asked_texts(content)
        place = Placed(begin_ns=record.at_ns, end_ns=record.at_ns + HOLD_NS)
        self._add_words("user", place, " ".join(words), record.seq)
        parts: list[Part] = []
        for sound in content:
            if (
                isinstance(sound, AudioPart)
                and not sound.is_file
                and sound.rate_hz == INPUT_RATE_HZ
            ):
                parts += self.user.take(record.at_ns, sound.data)[1]
        return parts

    def decoded(self, event: ev.MediaDecoded) -> list[Part]:
        """Take decoded media; a chat's turn brings that of the turns before it again."""
        parts: list[Part] = []
        if event.pcm and (name := digest(event.pcm)) not in self._sounds:
            self._sounds.add(name)
            _, parts = self.user.take(self._asked_ns, event.pcm)
        is_chat, known = self._is_chat, self.pictures
        new = (jpeg for jpeg in event.pictures if not (is_chat and known.has(jpeg)))
        return [*parts, *(self.pictures.take(event.at_ns, jpeg) for jpeg in new)]

    def transcribed(self, event: ev.UserTranscribed, seq: int) -> None:
        """Take what the user said, as it was transcribed."""
        now_ns = self._spoken_ns(event.at_ns)
        begin_ns, end_ns = self._positions.span(event.start_ms, event.end_ms, now_ns)
        self._add_words("user", Placed(begin_ns=begin_ns, end_ns=end_ns), event.text, seq)

    def send(self, record: Record, messages: Iterable[ms.ServerMessage], at_ns: int) -> list[Part]:
        """Take the server's messages of a frame, heard at `at_ns` at the earliest."""
        return [part for message in messages for part in self._take(record, message, at_ns)]

    def end(self) -> list[Part]:
        """Give the rest."""
        self._let_go()
        return [*self.user.flush(), *self.model.flush()]

    def _take(self, record: Record, message: ms.ServerMessage, at_ns: int) -> list[Part]:
        match message:
            case ms.Speech(response_id=turn, text=text, pcm=pcm, end_of_turn=is_end):
                self._in_turn = not is_end
                return self._speak(record, at_ns, turn, text, pcm)
            case ms.Delta(response_id=turn, text=text, pcm=pcm):
                streamed = self._streamed[1] if self._streamed[0] == turn else ""
                self._streamed = (turn, streamed + text)
                return self._speak(record, at_ns, turn, text, pcm)
            case ms.TranscriptDelta(text=text):
                self._hold(max(record.at_ns, self._dictated.fed_ns), record.seq, "", text)
            case ms.TranscriptDone():
                self._let_go()
            case ms.Response(response_id=turn, text=text, pcm=pcm, tool_calls=calls):
                streamed = self._streamed[1] if self._streamed[0] == turn else ""
                rest = [text.removeprefix(streamed), *([calls_text(calls)] if calls else ())]
                return self._speak(record, at_ns, turn, " ".join(rest), pcm)
            case ms.Listen():
                self._let_go()
                return self.model.stop(at_ns) if self._in_turn else []
            case ms.Interrupted():
                return self.model.stop(at_ns)
            case ms.Paused():
                self.pauses.append([at_ns, None])
            case ms.Resumed() if self.pauses:
                self.pauses[-1][1] = at_ns
        return []

    # -- words ----------------------------------------------------------------------------------

    def call(self, record: Record, call: CallStory, at_ns: int) -> None:
        """Take a call of a tool in a duplex session, or its result."""
        place = Placed(begin_ns=at_ns, end_ns=at_ns + HOLD_NS)
        if call.ended_ns is not None:
            self._add_words("user", place, f"[returns {call.result}]", record.seq)
        elif call.name:
            made = ToolCall(id=call.call, name=call.name, arguments=call.arguments)
            self._add_words("model", place, calls_text((made,)), record.seq)

    def _speak(self, record: Record, at_ns: int, turn: str, text: str, pcm: bytes) -> list[Part]:
        self._hold(at_ns, record.seq, turn, text)
        if not pcm:
            return []
        place, parts = self.model.take(at_ns, pcm)
        self._let_go(place)
        return parts

    def _hold(self, at_ns: int, seq: int, turn: str, text: str) -> None:
        held = self._held
        if held is not None and (held.turn != turn or at_ns - held.begin_ns >= HOLD_NS):
            self._let_go()
            held = None
        if held is None:
            held = _Held(turn=turn, seq=seq, begin_ns=at_ns, end_ns=at_ns + HOLD_NS)
        held.text += text
        self._held = held

    def _let_go(self, place: Placed | None = None) -> None:
        held, self._held = self._held, None
        if held is not None:
            place = place or Placed(begin_ns=held.begin_ns, end_ns=held.end_ns)
            self._add_words("model", place, held.text, held.seq)

    def _add_words(self, voice: Voice, place: Placed, text: str, seq: int) -> None:
        if not text.strip() or len(self.words) >= WORDS_MAX:
            return
        last = self._last_words.get(voice)
        if last is not None:  # words without sound give way
            last[2] = min(last[2], max(last[1], place.begin_ns))
        self._last_words[voice] = words = [voice, place.begin_ns, place.end_ns, plain(text), seq]
        self.words.append(words)


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
                "begin_ns": ns_of(turn.speech.begin),
                "end_ns": ns_of(turn.speech.end),
                "delay_ns": None if turn.delay is None else ns_of(turn.delay),
                "answer_ns": None if turn.answer is None else ns_of(turn.answer.begin),
                "is_silent": turn.is_silent and turn.is_judged,
            }
            for turn in turns.turns[:TALK_POINTS_MAX]
        ],
        "barge_ins": [
            {
                "begin_ns": ns_of(it.speech.begin),
                "end_ns": ns_of(it.over.end),
                "is_yielded_to": it.is_yielded_to,
            }
            for it in turns.barge_ins[:TALK_POINTS_MAX]
        ],
    }


def measures_of(facts: Facts) -> Json:
    """List the recording's measures, in the order of their table, each with its definition."""
    values = own_values(score(facts))
    return [
        {
            "name": name,
            "unit": measure.unit,
            "definition": measure.definition,
            "value": values[name],
        }
        for name, measure in MEASURES.items()
        if name in values
    ]


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
        self._gathering: Final = Gathering(head, self)
        self.dialogue: Final = Dialogue(self.dictated)
        self._rows: list[Json] = []
        self._places: dict[int, dict[str, Json]] = {}
        self._arrived: deque[int] = deque()
        self._kinds: dict[int, str] = {}
        self._points: dict[str, list[Json]] = {"waiting": [], "queue": [], "kv": [], "marks": []}
        self._damages: list[Json] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._gathering.__exit__(*error)

    def narrate(self, item: Record | Damage) -> list[Part]:
        """Add the next record, or damage; return the parts that are complete by now."""
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
        facts = self._gathering.end()
        inspected = to_json(self.inspection(self.head))
        divergence = self.replayer.report().divergence
        found = [] if divergence is None else [finding_of(divergence)]
        found += comparison.findings if comparison is not None else ()
        story: dict[str, Json] = {
            **{name: plain(value) for name, value in inspected.items() if name not in _RESHAPED},
            "units": [
                plain_fields(it) | self._places.get(it["index"], {}) for it in inspected["units"]
            ],
            "turns": [plain(turn) for turn in inspected["turns"]],
            "states": [[span["state"], span["at_ns"]] for span in inspected["states"]],
            "drops": [plain(attrs.asdict(drop)) for drop in self.drops[:POINTS_MAX]],
            "errors": [plain(attrs.asdict(error)) for error in self.errors[:POINTS_MAX]],
            "shortened": [plain(it) for it in inspected["shortened"][:POINTS_MAX]],
            "playback": [plain(it) for it in inspected["playback"][:POINTS_MAX]],
            "said": self.dialogue.words,
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
        if session.units_waiting != waited:
            self._point("waiting", record.at_ns, session.units_waiting)

    # -- from records ---------------------------------------------------------------------------

    def _note(self, passage: Passage) -> list[Part]:
        record, read = passage.record, self._gathering.timeline
        for call in passage.calls:
            self.dialogue.call(record, call, read.played_ns)
        if record.kind == "rx":
            if read.request is None:
                return []
            return self.dialogue.receive(record, read.request, read.story.wire.lag_ns)
        if record.kind == "tx":
            return self.dialogue.send(record, read.messages, read.played_ns)
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
        self._point("marks", record.at_ns, kind, record.seq, plain(fields))

    def _point(self, line: str, *values: Json) -> None:
        if len(self._points[line]) < POINTS_MAX:
            self._points[line].append([*values])


_RESHAPED: Final = frozenset(
    {"units", "turns", "states", "drops", "errors", "marks", "shortened"} | {"playback"}
)
_ASKED: Final = frozenset({"image", "audio", "video"})
"""Media of which a session uses the decoded form; the others are voices, and JPEG frames."""


def plain_fields(fields: Mapping[str, Value]) -> dict[str, Json]:
    """Shorten the values of some fields."""
    return {name: plain(value) for name, value in fields.items()}
