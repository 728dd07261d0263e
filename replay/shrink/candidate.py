"""A candidate: a log with fewer or simpler events than another, made by the real machine.

    the events of a log -> some left out, some made simpler -> fitted to what was asked -> remade

Each is a whole log that verifies and logic-replays; otherwise `RemakeError`. It keeps the times of
its events, and the `fin` if there is one; marks are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.format.mapping import EVENT_KINDS, MappingError, event_of
from recorder.format.records import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage

from ..redact.content import Kind, Policy, Tally, hide_picture, mute
from ..redact.frames import FrameEditor
from ..redact.redaction import without_media
from ..rerun.remake import RemakeError, Remaker, head_record, write
from ..story.exchanges import ANSWERS, CallName, answered, asked, renumbered

# -- open questions -------------------------------------------------------------------------------


OUTSIDE: Final = (
    *(ev.ConnectionOpened, ev.Forked, ev.FrameReceived, ev.PeerGone, ev.PeerAttached),
    *(ev.SendFailed, ev.RecordingFailed, ev.Flooded, ev.DrainBegan, ev.Draining),
)
"""Events that answer nothing; each may come at any time."""
_MODEL_CALLS: Final = frozenset(
    {"open", "unit", "finalize", "rollback", "turn", "prefill", "utterance", "chunk", "rebuild"}
)
_ALSO_ASKED: Final[Mapping[type, str]] = {
    ef.EnterQueue: "queue",
    ef.LeaveQueue: "leave",
    ef.Admit: "admit",
    ef.DetectSpeech: "speech",
    ef.StartUnit: "words",
}
"""By effect: a question without a number."""
_REPORTS: Final[Mapping[type, str]] = {
    ev.TicketMoved: "queue",
    ev.SpeechStarted: "speech",
    ev.SpeechStopped: "speech",
    ev.UserTranscribed: "words",
}
"""By event: the question that must be open, and stays so."""
_ENDS: Final[Mapping[type, tuple[str, ...]]] = {
    ev.Admitted: ("admit",),
    ev.AdmissionRefused: ("admit", "queue"),
    ev.TicketCancelled: ("queue",),
    ev.TicketLeft: ("queue",),
    ev.SlotLeased: ("queue",),
}
"""By event: the questions of which it ends the first that is open."""


@attrs.define
class Asked:
    """The open questions of a session, so that each answer has its question.

    Events come from outside (frames, a lost peer, a shutdown), or answer an effect. After events
    were left out, effects differ or have other numbers. `fit` gives an answer the number of its
    open question, and drops one without a question. It checks neither times nor contents.

    `numbers` has the lease, unit or turn that a question is about. `media` maps an answer's number
    to the one that it must get, `timers` a name to its generation.
    """

    numbers: dict[str, int] = attrs.Factory(dict)
    media: dict[int, int] = attrs.Factory(dict)
    timers: dict[str, int] = attrs.Factory(dict)
    lease: int | None = None
    _is_gone: bool = False
    _chunks: int = 0

    def note(self, effects: Iterable[ef.Effect]) -> tuple[int, ...]:
        """Note a step's questions; return its media, whose answers must be named in `media`."""
        media: list[int] = []
        for effect in effects:
            call, also = asked(effect), _ALSO_ASKED.get(type(effect))
            if call is not None:
                self.numbers[call[0]] = call[1]
            if also is not None:
                self.numbers[also] = 0
            match effect:
                case ef.StartTurn(turn=turn):
                    self.numbers["prefill"] = turn.index
                case ef.RunChunk(chunk=chunk):
                    self.numbers["utterance"] = chunk.utterance
                case ef.SetTimer(name=name, generation=generation):
                    self.timers[name] = generation
                case ef.CancelTimer(name=name):
                    self.timers.pop(name, None)
                case ef.DecodeMedia(media=number):
                    media.append(number)
        return tuple(media)

    def fit(self, event: ev.Event) -> ev.Event | None:
        """The event with the numbers of its question; None without a question."""
        if type(event) in _REPORTS:
            return event if _REPORTS[type(event)] in self.numbers else None
        if type(event) in _ENDS:
            return self._end(event)
        match event:
            case ev.TimerFired(name=name):
                generation = self.timers.pop(name, None)
                return None if generation is None else attrs.evolve(event, generation=generation)
            case ev.MediaDecoded(media=old) | ev.MediaRejected(media=old):
                number = self.media.pop(old, None)
                return None if number is None else attrs.evolve(event, media=number)
            case ev.TurnPrefilled() | ev.TurnProgress() | ev.TurnDone() | ev.TurnFailed():
                return self._of_turn(event)
            case ev.BackendLost() | ev.LeaseRevoked():
                if self.lease is None:
                    return None
                if isinstance(event, ev.BackendLost):
                    self.numbers = {
                        name: it for name, it in self.numbers.items() if name not in _MODEL_CALLS
                    }
                return attrs.evolve(event, lease=self.lease)
        call = answered(event)
        return self._from_outside(event) if call is None else self._of_call(event, call[0])

    def _end(self, event: ev.Event) -> ev.Event | None:
        question = next((it for it in _ENDS[type(event)] if it in self.numbers), None)
        is_stale = isinstance(event, ev.TicketLeft) and "leave" not in self.numbers
        if question is None or is_stale:
            return None
        del self.numbers[question]
        if isinstance(event, ev.SlotLeased):
            self.lease = event.lease
        return event

    def _from_outside(self, event: ev.Event) -> ev.Event | None:
        """None for an event of a peer that is gone, until it comes back."""
        if not isinstance(event, OUTSIDE):
            return None
        if self._is_gone and isinstance(event, ev.FrameReceived | ev.PeerGone):
            return None
        if isinstance(event, ev.PeerGone | ev.PeerAttached):
            self._is_gone = isinstance(event, ev.PeerGone)
        if isinstance(event, ev.Forked):
            self._is_gone, self.lease = False, None
        return event

    def _of_turn(
        self, event: ev.TurnPrefilled | ev.TurnProgress | ev.TurnDone | ev.TurnFailed
    ) -> ev.Event | None:
        index, is_prefill = self.numbers.get("turn"), isinstance(event, ev.TurnPrefilled)
        fits = isinstance(event, ev.TurnFailed) or is_prefill is ("prefill" in self.numbers)
        if index is None or not fits:
            return None
        if isinstance(event, ev.TurnProgress):
            step, self._chunks = self._chunks, self._chunks + 1
            return renumbered(event, index, step=step)
        self.numbers.pop("prefill", None)
        self._chunks = 0
        if not is_prefill:
            del self.numbers["turn"]
        return renumbered(event, index)

    def _of_call(self, event: ev.Event, call: CallName) -> ev.Event | None:
        number = self.numbers.pop(call, None)
        if call == "release":
            self.lease = None
        if number is None:
            return None
        also = {"utterance": self.numbers.pop("utterance")} if call == "chunk" else {}
        return renumbered(event, number, **also)


# -- simpler events -------------------------------------------------------------------------------


Simplification = Callable[[ev.Event], ev.Event]

_FILES: Final[frozenset[Kind]] = frozenset({"audio", "video", "image", "voice"})
_WORDS: Final[frozenset[Kind]] = frozenset({"text", "prompt"})
_RESULTS: Final[Mapping[type, str]] = {
    ev.BackendOpened: "opened",
    **{answer: path.partition(".")[0] for answer, (_, path) in ANSWERS.items() if "." in path},
}
"""The field of a model's result, by event."""
_NUMBERS: Final = ("decided_ids", "fed_ids", "token_ids", "codec_ids")
_TRACES: Final = ("input_hash", "logits_hash", "margin", "costs")


def _frame_step(kinds: frozenset[Kind], *, is_shorter: bool = False) -> Simplification:
    def step(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.FrameReceived):
            return event
        editor = FrameEditor(policy=Policy(kinds=kinds), tally=Tally(), is_shorter=is_shorter)
        return attrs.evolve(event, frame=editor.edit(event.frame, event.at_ns))

    return step


def _result_step(*names: str) -> Simplification:
    """Give some fields of a model's result their defaults, or empty values."""

    def step(event: ev.Event) -> ev.Event:
        where = _RESULTS.get(type(event))
        if where is None:
            return event
        made: Any = getattr(event, where)
        fields = {field.name: field for field in attrs.fields(type(made))}
        empty = {
            name: type(getattr(made, name))()
            if fields[name].default is attrs.NOTHING
            else fields[name].default
            for name in names
            if name in fields
        }
        return attrs.evolve(event, **{where: attrs.evolve(made, **empty)})

    return step


def _silence(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.MediaDecoded):
        return without_media(event, lambda jpeg: hide_picture(jpeg, "remove"))
    where = _RESULTS.get(type(event))
    made: Any = None if where is None else getattr(event, where)
    if where is None or not getattr(made, "pcm", b""):
        return event
    return attrs.evolve(event, **{where: attrs.evolve(made, pcm=mute(made.pcm))})


SIMPLIFICATIONS: Final[tuple[Simplification, ...]] = (
    _frame_step(_FILES),
    _silence,
    _result_step("pcm"),
    _result_step(*_NUMBERS),
    _result_step(*_TRACES),
    _frame_step(_WORDS, is_shorter=True),
    _result_step("text"),
)
"""In the order of the search: the largest savings first.

A client's frame keeps its fields: sound becomes silence of the same length, because units are made
from it, and words are removed.
"""


# -- candidates -----------------------------------------------------------------------------------


Change = Callable[[int, ev.Event], ev.Event | None]
"""Makes an event simpler, or leaves it out (None), by its place among the events."""
SHRUNK: Final = "shrunk"
"""The head's field for a shrunk log's origin."""


@attrs.frozen(kw_only=True)
class Shape:
    """The size of a log, and the start of each group: an event from outside, and its answers."""

    events: int
    groups: tuple[int, ...]


def shape_of(path: Path) -> Shape:
    """Count a log's events."""
    groups, events = [], 0
    with LogReader(path) as reader:
        for record in _sound(reader):
            if record.kind in EVENT_KINDS:
                if isinstance(_event(record), OUTSIDE):
                    groups.append(events)
                events += 1
    return Shape(events=events, groups=tuple(groups))


def origin_of(path: Path) -> Fields:
    """The head's field for the origin of a log made from this one."""
    with LogReader(path) as reader:
        head = reader.head.fields
    return {SHRUNK: {"recording": head.get("recording_id"), "events": shape_of(path).events}}


def build(source: Path, target: Path, change: Change, origin: Fields) -> None:
    """Write a candidate; the source's fields of the head win over `origin`'s.

    Raises:
        RemakeError: there is no such session.
        RecorderError: the source cannot be read.
        OSError: the disk refused.
    """
    with LogReader(source) as reader:
        head = {**origin, **reader.head.fields}
        write(target, _records(head, _sound(reader), change), is_durable=False)


def _records(head: Fields, records: Iterable[Record], change: Change) -> Iterator[Record]:
    yield head_record(head)
    remaker, asked = Remaker(), Asked()
    media: deque[int] = deque()
    place = 0
    for record in records:
        if record.kind in EVENT_KINDS:
            media.clear()
            event = change(place, _event(record))
            place += 1
            is_over = remaker.session is not None and remaker.session.is_finished
            fitted = None if event is None or is_over else asked.fit(event)
            if fitted is not None:
                remade = remaker.step(fitted)
                media.extend(asked.note(remade.effects))
                yield from remade.records
        elif record.fields.get("type") == "DecodeMedia" and media:
            number = record.fields["media"]
            assert isinstance(number, int)
            asked.media[number] = media.popleft()
        elif record.kind == "fin":
            yield remaker.end()


def _sound(items: Iterable[Record | Damage]) -> Iterator[Record]:
    for item in items:
        if isinstance(item, Damage):
            raise RemakeError(f"the log is damaged at byte {item.offset}: {item.detail}")
        yield item


def _event(record: Record) -> ev.Event:
    try:
        return event_of(record.fields, record.at_ns)
    except MappingError as error:
        raise RemakeError(f"record {record.seq}: {error}") from error
