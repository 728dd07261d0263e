"""Reads one log once: each record, and the state collected so far.

    story = SessionStory()
    for item in reader: decoded = story.take(item)

Values are those recorded, not those of a replay. Damage is counted and skipped. If the session is
stepped too, it decides which requests were taken; after a divergence each counts as taken. It keeps
the story of the whole session and one model call (`model_calls`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL
from protocol.values.frames import Shortened
from protocol.values.limits import NS_PER_S
from protocol.values.messages import ErrorReport
from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, DuplexConfig, Opened, UnitInput
from protocol.values.omni import Acknowledged
from protocol.values.requests import Played
from protocol.values.state import State
from protocol.wire.dialects.shared import PLAYBACK_ACK
from recorder.format.format import Fields, Record
from recorder.format.mapping import EVENT_KINDS, LoggedStep, MappingError, event_of
from recorder.read.reader import RESTARTED
from recorder.read.scan import Damage
from runtime.measures.conversation import ToolCallTracker, TrackedToolCall

from ..rerun.difference import label
from ..rerun.logic import Replayer
from ..shared.recordings import below, show_bytes, typed
from .model_calls import ModelCall, ModelCallStory, spoken_ms
from .wire import Wire


def show_shortened(short: Shortened) -> str:
    """Describe a refused message, and the part that is kept."""
    is_kept = bool(short.head or short.unreadable)
    kept = "first 1 KiB kept" if is_kept else "its start left out"
    read = "" if short.read_bytes is None else f" of the {show_bytes(short.read_bytes)} read"
    return f"{show_bytes(short.size_bytes)}, {kept}, blake2b {label(short.blake2b)}{read}"


@attrs.frozen
class Drop:
    """A second of input that was lost to newer input (B7), from the record `seq`."""

    at_ns: int
    ordinal: int
    input_id: str
    seq: int = attrs.field(default=0, eq=False)


MoveReason = Literal["lost", "drained", "restarted"]


@attrs.frozen(kw_only=True)
class Move:
    """A move to another slot (B11), from the record `seq`.

    Attributes:
        why: the worker was lost or drained, or the server was started again.
        to_ns: when the session went on; None if it did not.
        steps: units or seconds that the model was fed again; 0 if there were none.
        exact: each was fed as recorded; else in long prefills.
    """

    at_ns: int
    why: MoveReason
    to_ns: int | None = None
    steps: int = 0
    exact: bool = True
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen
class ErrorSent:
    """An `error` that the client was sent, in the record `seq`."""

    at_ns: int
    code: str
    message: str
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen
class ShortenedFrame:
    """A refused message of which the log keeps length, hash (128 bits in hex) and start.

    `told` is a description, with the part that is kept.
    """

    at_ns: int
    size_bytes: int
    blake2b: str
    told: str


@attrs.frozen(kw_only=True)
class Mark:
    """A mark; `by` is the name of its author's key.

    `is_later`: it was written after the session, next to the log (`recorder.storage.marks`).
    """

    at_ns: int
    text: str
    by: str | None
    is_later: bool = False


@attrs.frozen
class Playback:
    """What a client said of its playback.

    Attributes:
        played_ms: milliseconds of the session's speech that it had played.
        behind_ms: milliseconds that it had not: spoken before, and not played.
    """

    at_ns: int
    played_ms: int
    behind_ms: int
    seq: int = attrs.field(default=0, eq=False)


@attrs.frozen
class UserWords:
    """What the user said, as the server's transcriber wrote it down.

    Attributes:
        start_ms, end_ms: where it was said, in milliseconds of the client's sound.
        is_whole: no more words of the same came.
    """

    at_ns: int
    start_ms: int
    end_ms: int
    text: str
    is_whole: bool = attrs.field(default=False, eq=False)


@attrs.frozen(kw_only=True)
class End:
    """The end of a session; the close is of the WebSocket, and None unless the server closed it.

    `reason` is one word, None if the log has no end; `finished`: the log has its `fin`.
    """

    reason: str | None = None
    close_code: int | None = None
    close_reason: str | None = None
    finished: bool = False


@attrs.frozen(kw_only=True)
class Absence:
    """A time without a connection, from the record `seq`.

    Attributes:
        to_ns: when the client was back; None if it did not come back.
        slept: the session gave its slot back meanwhile.
        steps: units or seconds that the model on another slot was fed again; 0 if there were none.
    """

    at_ns: int
    to_ns: int | None = None
    slept: bool = False
    steps: int = 0
    seq: int = attrs.field(default=0, eq=False)


class Absences:
    """Follows the client of a session that can be resumed; of others it notes nothing."""

    def __init__(self) -> None:
        self.found: list[Absence] = []
        self._can_resume = self._keeps_slot = False
        self._is_waking = False

    def take(self, event: ev.Event, seq: int) -> None:
        """Take an event."""
        match event:
            case ev.ConnectionOpened(resume_hash=token, mode=mode):
                self._can_resume, self._keeps_slot = bool(token), mode != "chat"
            case ev.Forked(at_ns=at_ns, resume_hash=token):
                self._can_resume, self._is_waking = bool(token), False
                if self._is_away:
                    self.found[-1] = attrs.evolve(self.found[-1], to_ns=at_ns)
            case ev.PeerGone(code=code) if self._can_resume and code == CLOSE_NORMAL:
                pass
            case ev.PeerGone(at_ns=at_ns) | ev.SendFailed(at_ns=at_ns) if self._can_resume:
                self.found.append(Absence(at_ns=at_ns, seq=seq))
            case ev.PeerAttached(at_ns=at_ns) if self._is_away:
                self.found[-1] = attrs.evolve(self.found[-1], to_ns=at_ns)
            case ev.BackendLost():
                self._is_waking = False

    @property
    def _is_away(self) -> bool:
        return bool(self.found) and self.found[-1].to_ns is None

    def release(self, *, is_moving: bool) -> None:
        """Note that a slot is given back in a session that goes on; `is_moving`: it was lost."""
        if self._is_away and self._keeps_slot and not is_moving:
            self.found[-1] = attrs.evolve(self.found[-1], slept=True)
            self._is_waking = True

    def rebuilt(self, event: ev.Rebuilt) -> bool:
        """Whether a rebuild is that of a session that slept, and no move."""
        is_it, self._is_waking = self._is_waking, False
        if is_it:
            self.found[-1] = attrs.evolve(self.found[-1], slept=True, steps=event.steps)
        return is_it


class TranscriptionBacklog:
    """Sound not transcribed yet; the model was fed all up to `fed_ns`.

    Each second of an utterance is given to the model as soon as it is there. A client that sends a
    file at once sends it long before it would be heard; its text is placed where its sound is.
    """

    def __init__(self) -> None:
        self.fed_ns = 0
        self._pieces: deque[tuple[int, int, int]] = deque()  # utterance, its samples, the time
        self._utterance = self._samples = 0

    def add(self, samples: int, end_ns: int, session: Session | None) -> None:
        """Take samples of the open utterance, ending at `end_ns`.

        Without a session that took them the utterance is unknown.
        """
        utterance = 0 if session is None else session.counts.get("utterances", 1) - 1
        if utterance != self._utterance:
            self._utterance, self._samples = utterance, 0
        self._samples += samples
        self._pieces.append((utterance, self._samples, end_ns))

    def write(self, chunk: object) -> None:
        """Take a chunk that the model is given, as in `StartChunk`."""
        if not isinstance(chunk, Mapping):
            return
        utterance, index = chunk.get("utterance"), chunk.get("index")
        if not isinstance(utterance, int) or not isinstance(index, int):
            return
        until = (index + 1) * UNIT_SAMPLES
        while self._pieces and self._pieces[0][0] <= utterance:
            of, samples, end_ns = self._pieces[0]
            if (of, samples) >= (utterance, until):
                rest_ns = (samples - until) * NS_PER_S // INPUT_RATE_HZ
                self.fed_ns = max(self.fed_ns, end_ns - rest_ns)
                return
            self.fed_ns = max(self.fed_ns, end_ns)
            self._pieces.popleft()


ERROR_CHARS_MAX: Final = 4096
"""A longer frame is audio, not an `error` or a `playback.ack`, so it is not parsed."""


@attrs.frozen(kw_only=True)
class DecodedRecord:
    """A record of a log with what it holds, decoded.

    Attributes:
        effect: the effect's name; empty for all else.
        event: None if it holds none that can be read, or a frame that was taken.
        step: its effects, if the session is stepped and did not diverge from its log.
        frame: of a `tx`, and of an `rx` that the session took whole; else empty.
        short: a refused message that the log keeps in part.
        ended: the model call that is complete from here on.
        calls: calls of tools that are made in it, or whose result it gives to the model.
    """

    record: Record
    effect: str = ""
    event: ev.Event | None = None
    step: LoggedStep | None = None
    frame: str = ""
    short: ShortenedFrame | None = None
    ended: ModelCall | None = None
    calls: tuple[TrackedToolCall, ...] = ()


class SessionStory:
    """A log in progress; lists and counts are so far. `leaves_out` are model call fields not kept.

    Attributes:
        replayer: steps the session, if given.
        wire: the connection's dialect, as known from its frames.
        backlog: sound not yet transcribed, if a caller places it on the clock.
        opened: the session's first event; None before it, and if it is lost.
        opening: the model's opening, from its record; empty if it was not opened.
        prepared: the model's result of the opening.
        shortened: refused messages that are kept shortened.
        damage_count: damages skipped.
        duration_ns: the session's time.
    """

    def __init__(
        self, replayer: Replayer | None = None, *, leaves_out: frozenset[str] = frozenset()
    ) -> None:
        self.model_calls: Final = ModelCallStory(leaves_out)
        self.wire = Wire()
        self.backlog: Final = TranscriptionBacklog()
        self.opened: ev.ConnectionOpened | None = None
        self.opening: Fields = {}
        self.prepared: Opened | None = None
        self.drops: Final[list[Drop]] = []
        self.moves: Final[list[Move]] = []
        self._restarted_ns: int | None = None
        self.absences: Final = Absences()
        self.playback: Final[list[Playback]] = []
        self.user_words: Final[list[UserWords]] = []
        self.calls: Final = ToolCallTracker()
        self.errors: Final[list[ErrorSent]] = []
        self.shortened: Final[list[ShortenedFrame]] = []
        self.marks: Final[list[Mark]] = []
        self.end = End()
        self.frames_received = self.frames_sent = self.records = self.damage_count = 0
        self.duration_ns = 0
        self._replayer: Final = replayer
        self._is_over = self._is_forking = False
        self._spoken_ms = 0

    @property
    def session(self) -> Session | None:
        """The machine; None before its first event, and if it is not stepped."""
        return None if self._replayer is None else self._replayer.session

    @property
    def forced_units(self) -> int:
        """Units at the start that had to listen; 0 before the model is opened."""
        config = below(self.opening, "config")
        default = DuplexConfig().force_listen_count if self.opening else 0
        return default if (it := typed(config, "force_listen_count", int)) is None else it

    @property
    def is_in_step(self) -> bool:
        """Whether the session is stepped, and did not diverge from its log."""
        return self._replayer is not None and not self._replayer.is_stopped

    @property
    def _accepted(self) -> int:
        """The number of requests with sound or a turn that were accepted, not only pictures."""
        counts = {} if self.session is None else self.session.counts
        return counts.get("appends", 0) + counts.get("turns", 0)

    def read(self, items: Iterable[Record | Damage]) -> Iterator[ModelCall]:
        """Read a log to its end; yield each model call when it is complete."""
        for item in items:
            decoded = self.take(item)
            if decoded is not None and decoded.ended is not None:
                yield decoded.ended
        if self.model_calls.current is not None:
            yield self.model_calls.current

    def take(self, item: Record | Damage) -> DecodedRecord | None:
        """Take the next record; None for damage."""
        before = self._accepted
        step = None if self._replayer is None else self._replayer.feed(item)
        if isinstance(item, Damage):
            self.damage_count += 1
            return None
        self.records += 1
        self.duration_ns = max(self.duration_ns, item.at_ns)
        decoded = DecodedRecord(record=item, step=step)
        match item.kind:
            case "effect":
                name, ended = typed(item.fields, "type", str), self.model_calls.begin(item)
                self._spoken_ms += spoken_ms(ended)
                decoded = attrs.evolve(decoded, effect=name or "", ended=ended)
                self._take_effect(decoded.effect, item)
                if name == "StartUnit":
                    inputs = _results(below(item.fields, "unit").get("inputs"))
                    fed = [it for each in inputs for it in self.calls.fed(each, item.at_ns)]
                    decoded = attrs.evolve(decoded, calls=tuple(fed))
            case "rx":
                is_shown = step is not None and any(
                    isinstance(it, ef.DecodeMedia) for it in step.effects
                )
                # Each piece of sound may be taken, whole seconds or not.
                is_active = self.session is not None and self.session.state is State.ACTIVE
                is_piece = is_active and self.wire.endpoint in ev.PIECES
                is_new = is_shown or is_piece or self._accepted > before
                return self._take_received(decoded, is_accepted=step is None or is_new)
            case "tx":
                return self._take_sent(decoded)
            case "mark":
                self._take_mark(item)
            case "fin":
                reason = typed(item.fields, "reason", str)
                self.end = attrs.evolve(self.end, finished=True, reason=reason)
            case kind if kind in EVENT_KINDS:
                event = step.event if step is not None else event_in(item)
                if event is not None:
                    self._take_event(event, item.seq)
                    calls = tuple(self.calls.take(event))
                    decoded = attrs.evolve(decoded, event=event, calls=calls)
        return decoded

    # -- frames ---------------------------------------------------------------------------------

    def _take_received(self, decoded: DecodedRecord, *, is_accepted: bool) -> DecodedRecord:
        self.frames_received += 1
        record = decoded.record
        frame = typed(record.fields, "frame", str)
        if frame is not None:
            self.wire.prepare(frame)
            is_played = len(frame) <= ERROR_CHARS_MAX and PLAYBACK_ACK in frame
            request = self.wire.request(frame) if is_played else None
            is_refused = self.session is not None and self.session.state is not State.ACTIVE
            if isinstance(request, Played) and not is_refused:
                self._note_played(record, request.played_ms)
        if "shortened" not in record.fields:
            return attrs.evolve(decoded, frame=frame if frame and is_accepted else "")
        event = decoded.step.event if decoded.step is not None else event_in(record)
        short = event.shortened if isinstance(event, ev.FrameReceived) else None
        if short is None:
            return decoded
        text = show_shortened(short)
        kept = ShortenedFrame(record.at_ns, short.size_bytes, short.blake2b, text)
        self.shortened.append(kept)
        return attrs.evolve(decoded, short=kept)

    @property
    def _all_spoken_ms(self) -> int:
        return self._spoken_ms + spoken_ms(self.model_calls.current)

    def _note_played(self, record: Record, played_ms: int) -> None:
        behind_ms = max(0, self._all_spoken_ms - played_ms)
        self.playback.append(Playback(record.at_ns, played_ms, behind_ms, record.seq))

    def _take_sent(self, decoded: DecodedRecord) -> DecodedRecord:
        self.frames_sent += 1
        record = decoded.record
        frame = record.fields.get("frame")
        if not isinstance(frame, str):
            return decoded
        is_short = len(frame) <= ERROR_CHARS_MAX
        is_shown = is_short and ('"error"' in frame or '"playback.acknowledged"' in frame)
        for it in self.wire.messages(frame) if is_shown else ():
            if isinstance(it, ErrorReport):
                error = ErrorSent(record.at_ns, it.code.value, it.message, record.seq)
                self.errors.append(error)
            elif isinstance(it, Acknowledged):  # of one response, which is the last
                behind_ms = max(0, it.playback.generated_ms - it.playback.played_ms)
                self._note_played(record, max(0, self._all_spoken_ms - behind_ms))
        return attrs.evolve(decoded, frame=frame)

    def _take_mark(self, record: Record) -> None:
        text, by = record.fields.get("text"), typed(record.fields, "by", str)
        if isinstance(text, str):  # other marks are a machine's
            self.marks.append(Mark(at_ns=record.at_ns, text=text, by=by))
        elif record.fields == RESTARTED:
            self._restarted_ns = record.at_ns

    # -- events ---------------------------------------------------------------------------------

    def _take_event(self, event: ev.Event, seq: int) -> None:
        self.absences.take(event, seq)
        match event:
            case ev.BackendLost() | ev.LeaseRevoked():
                self._take_loss(event, seq)
            case ev.SlotLeased(at_ns=at_ns) if self._is_moving:
                self.moves[-1] = attrs.evolve(self.moves[-1], to_ns=at_ns)
            case ev.Forked() if self.opened is not None:
                self.opened = attrs.evolve(self.opened, resume_hash=event.resume_hash)
                self.wire.fork()
                # The next rebuild is not a move; one that had begun was the parent's. The client
                # plays only what is said from here on.
                self._is_forking, self._spoken_ms = True, 0
                if self._is_moving:
                    self.moves.pop()
            case ev.Rebuilt() if self._is_forking or self.absences.rebuilt(event):
                self._is_forking = False
            case ev.Rebuilt(at_ns=at_ns, steps=steps, batches=batches) if self.moves:
                move = attrs.evolve(self.moves[-1], to_ns=at_ns, steps=steps, exact=not batches)
                self.moves[-1] = move
            case ev.RebuildFailed() if self.moves:
                self.moves[-1] = attrs.evolve(self.moves[-1], to_ns=None)
            case ev.ConnectionOpened():
                self.opened, self.wire = event, Wire(event)
            case ev.BackendOpened(opened=prepared):
                self.prepared = prepared
            case ev.UserTranscribed():
                self._take_words(event)
        self.model_calls.take(event, is_over=self._is_over)
        if isinstance(event, ev.PeerGone | ev.SendFailed) and not self._may_come_back:
            self._is_over = True

    def _take_words(self, event: ev.UserTranscribed) -> None:
        """Join words of the user to those of the same utterance."""
        start_ms, text = event.start_ms, event.text
        if self.user_words and not self.user_words[-1].is_whole:
            before = self.user_words.pop()
            start_ms, text = before.start_ms, before.text + text
        words = UserWords(event.at_ns, start_ms, event.end_ms, text, event.is_last)
        self.user_words.append(words)

    @property
    def _may_come_back(self) -> bool:
        return self.opened is not None and bool(self.opened.resume_hash)

    @property
    def _is_moving(self) -> bool:
        return bool(self.moves) and self.moves[-1].to_ns is None

    def _take_loss(self, event: ev.BackendLost | ev.LeaseRevoked, seq: int) -> None:
        """Note a move that begins; a worker that is drained may be lost before its session left."""
        if self._is_moving:
            self.moves.pop()
        why: MoveReason = "lost" if isinstance(event, ev.BackendLost) else "drained"
        is_restart = event.at_ns == self._restarted_ns
        self.moves.append(Move(at_ns=event.at_ns, why="restarted" if is_restart else why, seq=seq))

    def _take_effect(self, name: str, record: Record) -> None:
        fields = record.fields
        match name:
            case "OpenBackend":
                self.opening = below(fields, "opening")
            case "Release" if not self._is_over:
                self.absences.release(is_moving=self._is_moving)
            case "StartChunk":
                self.backlog.write(fields.get("chunk"))
            case "StartFinalize" if fields.get("interrupted") is True:
                self.model_calls.withhold(fields.get("index"))
            case "DropUnit":
                ordinal, input_id = fields.get("ordinal"), fields.get("input_id")
                if isinstance(ordinal, int) and isinstance(input_id, str):
                    self.drops.append(Drop(record.at_ns, ordinal, input_id, record.seq))
            case "Close":
                self._is_over = True
                code, reason = fields.get("code"), fields.get("reason")
                if isinstance(code, int) and isinstance(reason, str):
                    self.end = attrs.evolve(self.end, close_code=code, close_reason=reason)


def _results(inputs: object) -> Iterator[UnitInput]:
    """The results among the events that a unit feeds."""
    for each in inputs if isinstance(inputs, list | tuple) else ():
        if isinstance(each, Mapping) and each.get("kind") == "result":
            call, text = str(each.get("call")), str(each.get("text", ""))
            yield UnitInput(kind="result", call=call, text=text)


def event_in(record: Record) -> ev.Event | None:
    """Read an event back from its record; None if it does not hold one."""
    try:
        return event_of(record.fields, record.at_ns)
    except MappingError:
        return None
