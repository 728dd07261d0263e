"""What happened in a session: its states, units, drops, errors and end, from its log alone.

Rules: what was recorded is told, not what a replay would make of it. Only the states come from
stepping the session, so they end where it parts from its log. Damage is counted and passed by.

It compares nothing and prints nothing: see `logic` and `text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from protocol import events as ev
from protocol.codec import parse_frame
from protocol.dialects import DIALECTS, Dialect
from protocol.dialects.opening import OPENING
from protocol.errors import RemoteProtocolError
from protocol.messages import ErrorReport
from protocol.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, UnitResult
from protocol.session import Session
from protocol.state import State
from recorder.mapping import EVENT_KINDS, MappingError, event_of
from recorder.records import Fields, Record, Value
from recorder.scan import Damage
from recorder.summary import WALL_MS_MAX, session_id_in

from .environment import model_of
from .inspection import (
    Drop,
    End,
    ErrorSent,
    Inspection,
    Mark,
    ShortenedFrame,
    StateSpan,
    TurnStory,
    UnitStory,
)
from .logic import Replayer
from .report import ReplayReport
from .utterances import Utterances
from .words import Step, shortened_in, show_shortened

ERROR_CHARS_MAX: Final = 4096
"""A longer frame is audio, and no `error`: it is not parsed to find that out."""


def inspect(head: Fields, items: Iterable[Record | Damage]) -> Inspection:
    """Tell what happened in a session.

    Args:
        head: the fields of the log's `session` record.
        items: its records in order, and its damage.
    """
    inspector = Inspector()
    for item in items:
        inspector.feed(item)
    return inspector.inspection(head)


class Inspector:
    """Collects what is told of a session, record by record.

    Attributes:
        opened: its first event; None before it, and where it is lost.
        drops: so far.
        errors: so far.
    """

    def __init__(self) -> None:
        self._replayer: Final = Replayer(go_on=True)
        self._states: list[StateSpan] = []
        self._units: dict[int, UnitStory] = {}
        self._turns: dict[int, TurnStory] = {}
        self._utterances: Final = Utterances()
        self.drops: list[Drop] = []
        self.errors: list[ErrorSent] = []
        self._shortened: list[ShortenedFrame] = []
        self._marks: list[Mark] = []
        self.opened: ev.ConnectionOpened | None = None
        self._end = End()
        self._received = self._sent = self._records = 0
        self._damage_count = 0
        self._duration_ns = 0

    def feed(self, item: Record | Damage) -> Step | None:
        """Take the next record, or damage; gives what was stepped."""
        was_closed = self._is_closed
        step = self._replayer.feed(item)
        if isinstance(item, Damage):
            self._damage_count += 1
            return step
        self._records += 1
        self._duration_ns = max(self._duration_ns, item.at_ns)
        self._note_state(item)
        if item.kind in EVENT_KINDS:
            self._note_event(item, was_closed=was_closed)
        elif item.kind == "tx":
            self._note_sent(item)
        elif item.kind == "effect":
            self._note_effect(item)
        elif item.kind == "mark":
            self._note_mark(item)
        elif item.kind == "fin":
            reason = item.fields.get("reason")
            said = reason if isinstance(reason, str) else self._end.reason
            self._end = attrs.evolve(self._end, finished=True, reason=said)
        return step

    @property
    def session(self) -> Session | None:
        """The machine; None before its first event."""
        return self._replayer.session

    @property
    def is_parted(self) -> bool:
        """The machine parted from the log, and tells no more of it."""
        return self._replayer.is_stopped

    def replayed(self) -> ReplayReport:
        """Say what stepping the session has found."""
        return self._replayer.report()

    def inspection(self, head: Fields) -> Inspection:
        """Tell what was collected."""
        session, opened, divergence = self.session, self.opened, self.replayed().divergence
        ended = session.end_reason if session is not None else None
        recording_id, seed, wall_ms = (
            head.get(name) for name in ("recording_id", "seed", "wall_ms")
        )
        return Inspection(
            recording_id=recording_id if isinstance(recording_id, str) else None,
            session_id=session_id_in(head),
            model=model_of(head),
            mode=opened.mode if opened is not None else None,
            dialect=session.dialect_name if session is not None else None,
            seed=seed if isinstance(seed, int) else None,
            wall_ms=wall_ms if isinstance(wall_ms, int) and 0 <= wall_ms <= WALL_MS_MAX else None,
            duration_ns=self._duration_ns,
            states=tuple(self._states),
            frames_received=self._received,
            shortened=tuple(self._shortened),
            frames_sent=self._sent,
            fields_ignored=0 if session is None else session.counts["fields_ignored"],
            units=tuple(self._units.values()),
            turns=tuple(self._turns.values()),
            utterances=self._utterances.told,
            drops=tuple(self.drops),
            errors=tuple(self.errors),
            marks=tuple(self._marks),
            end=attrs.evolve(self._end, reason=self._end.reason or ended),
            records=self._records,
            damage_count=self._damage_count,
            diverged_seq=divergence.seq if divergence is not None else None,
        )

    @property
    def _is_closed(self) -> bool:
        session = self.session
        return session is not None and session.state is State.CLOSED

    def _note_state(self, record: Record) -> None:
        session = self.session
        if session is None or self.is_parted:
            return
        if not self._states or self._states[-1].state is not session.state:
            self._states.append(StateSpan(state=session.state, at_ns=record.at_ns))

    def _note_mark(self, record: Record) -> None:
        text, by = record.fields.get("text"), record.fields.get("by")
        if isinstance(text, str):  # else a machine made it, and it says something else
            name = by if isinstance(by, str) else None
            self._marks.append(Mark(at_ns=record.at_ns, text=text, by=name))

    # -- events ---------------------------------------------------------------------------------

    def _note_event(self, record: Record, *, was_closed: bool) -> None:
        if record.kind == "rx":
            self._note_received(record)
            return
        try:
            event = event_of(record.fields, record.at_ns)
        except MappingError:
            return
        match event:
            case ev.ConnectionOpened():
                self.opened = event
            case ev.UnitDone(result=result):
                self._change(result.index, done_ns=record.at_ns, **_told(result, was_closed))
            case ev.UnitFailed(index=index, context_full=full):
                outcome = "context_full" if full else "failed"
                self._change(index, done_ns=record.at_ns, outcome=outcome)
            case ev.FinalizeDone(finalized=finalized):
                self._change(finalized.index, finalized_ns=record.at_ns)
            case _:
                self._note_turn(event)
                self._utterances.note_event(event)

    def _note_received(self, record: Record) -> None:
        self._received += 1
        short = shortened_in(record)
        if short is not None:
            frame = ShortenedFrame(
                at_ns=record.at_ns,
                size_bytes=short.size_bytes,
                blake2b=short.blake2b,
                told=show_shortened(short),
            )
            self._shortened.append(frame)

    def _note_turn(self, event: ev.Event) -> None:
        match event:
            case ev.TurnPrefilled(at_ns=at_ns, prefill=prefill):
                tokens = prefill.input_tokens
                self._change_turn(prefill.index, prefilled_ns=at_ns, input_tokens=tokens)
            case ev.TurnProgress(chunk=chunk) if chunk.index in self._turns:
                turn = self._turns[chunk.index]
                self._change_turn(
                    chunk.index,
                    text=turn.text + chunk.text,
                    audio_ms=turn.audio_ms + _audio_ms(chunk.pcm),
                    generated_tokens=turn.generated_tokens + len(chunk.token_ids),
                )
            case ev.TurnDone(at_ns=at_ns, result=result) if result.index in self._turns:
                self._change_turn(
                    result.index,
                    done_ns=at_ns,
                    outcome=result.reason,
                    text=result.text,
                    audio_ms=self._turns[result.index].audio_ms + _audio_ms(result.pcm),
                    generated_tokens=result.generated_tokens,
                    kv_length=result.kv_length,
                    costs=result.costs,
                )
            case ev.TurnFailed(at_ns=at_ns, index=index, context_full=full):
                outcome = "context_full" if full else "failed"
                self._change_turn(index, done_ns=at_ns, outcome=outcome)

    def _change_turn(self, index: int, **changes: Any) -> None:
        turn = self._turns.get(index)
        if turn is not None:
            self._turns[index] = attrs.evolve(turn, **changes)

    def _change(self, index: int, **changes: Any) -> None:
        unit = self._units.get(index)
        if unit is not None:
            self._units[index] = attrs.evolve(unit, **changes)

    # -- effects --------------------------------------------------------------------------------

    def _note_sent(self, record: Record) -> None:
        self._sent += 1
        session = self._replayer.session
        dialect = OPENING if session is None else DIALECTS.get(session.dialect_name, OPENING)
        error = _error_of(record.fields.get("frame"), dialect)
        if error is not None:
            sent = ErrorSent(at_ns=record.at_ns, code=error.code.value, message=error.message)
            self.errors.append(sent)

    def _note_effect(self, record: Record) -> None:
        fields = record.fields
        match fields.get("type"):
            case "StartUnit":
                self._note_start(record.at_ns, fields.get("unit"))
            case "StartTurn":
                turn = fields.get("turn")
                if isinstance(turn, Mapping) and isinstance(index := turn.get("index"), int):
                    self._turns[index] = TurnStory(index=index, started_ns=record.at_ns)
            case "RunChunk":
                self._utterances.note_start(record.at_ns, fields.get("chunk"))
            case "StartFinalize" if fields.get("interrupted") is True:
                index = fields.get("index")
                if isinstance(index, int):
                    self._change(index, outcome="withheld")
            case "DropUnit":
                ordinal, input_id = fields.get("ordinal"), fields.get("input_id")
                if isinstance(ordinal, int) and isinstance(input_id, str):
                    drop = Drop(at_ns=record.at_ns, ordinal=ordinal, input_id=input_id)
                    self.drops.append(drop)
            case "Close":
                code, reason = fields.get("code"), fields.get("reason")
                if isinstance(code, int) and isinstance(reason, str):
                    self._end = attrs.evolve(self._end, close_code=code, close_reason=reason)

    def _note_start(self, at_ns: int, unit: Value) -> None:
        if not isinstance(unit, Mapping) or not isinstance(index := unit.get("index"), int):
            return
        frames = unit.get("frames")
        self._units[index] = UnitStory(
            index=index,
            started_ns=at_ns,
            forced=unit.get("force_listen") is True,
            frames=len(frames) if isinstance(frames, list | tuple) else 0,
        )


def _told(result: UnitResult, was_closed: bool) -> dict[str, object]:
    """Say what a unit's story takes from its result."""
    outcome = "listen" if result.is_listen else "speech"
    if was_closed:
        outcome = "ended"
    elif result.cut is not None:
        outcome = "withheld"
    return {
        "outcome": outcome,
        "text": result.text,
        "audio_ms": _audio_ms(result.pcm),
        "end_of_turn": result.end_of_turn,
        "cut": result.cut,
        "kv_length": result.kv_length,
        "costs": result.costs,
    }


def _audio_ms(pcm: bytes) -> int:
    return len(pcm) // SAMPLE_BYTES * 1000 // OUTPUT_RATE_HZ


def _error_of(frame: Value, dialect: Dialect) -> ErrorReport | None:
    """Read a sent frame that is an `error`, in the words of its dialect."""
    if not isinstance(frame, str) or len(frame) > ERROR_CHARS_MAX or '"error"' not in frame:
        return None
    try:
        messages = dialect.decode(parse_frame(frame))
    except RemoteProtocolError:
        return None
    return next((message for message in messages if isinstance(message, ErrorReport)), None)
