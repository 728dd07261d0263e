"""Measures one session from its events and effects only: traffic, queue, slot, calls, end.

- A meter reads no clock: the same log gives the same figures, live or later.
- Events that the machine ignores as stale, such as those of an earlier lease, are not counted.
- A frame counts as sent when it was handed to the connection.
- An error's code is read from its frame; no other frame is parsed.
- Turns and chunks are measured from their start on the slot. The wait for a turn's slot is the
  queue's (`queue_wait_seconds` of mode `chat`); the wait of sound for the model is the session's
  backlog.
- A conversation is measured when it is over, as `antiphon eval` does, from the messages that the
  machine took and made, so no frame is read again. A session that was not seen from its begin (a
  fork, or one that another server began) is not measured.
- Steps are counted later, many at once (`Backlog`). A step of a session comes some milliseconds
  after another's, and by then the CPU's caches hold other things: counted at once, each takes three
  times as long. What a meter reads of the session is noted with the step, so the figures are the
  same. With 20 sessions this saves a seventh of a unit's CPU.
- `Instruments` are the counters and histograms of a server, or of a recording that is measured. A
  unit makes a dozen observations: each is a lookup, a bisection and two additions, without a lock.

The times of a unit:

    last sample -> whole -> [pictures, barrier] -> started -> result -> answered -> finalized

A second of input is whole when the append that completes it is taken. It is late when its answer
comes more than `DEADLINE_NS` after that: then the next second is whole too, and the session falls
behind. Waiting units keep their order (B7), and so does the queue of their times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

import attrs
import orjson

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import MS_PER_S, NS_PER_S, OF_MODE, Mode, Work
from protocol.values.messages import ServerMessage, Speech
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, UnitResult
from protocol.values.requests import AppendSound, ClientMessage
from protocol.values.state import State
from protocol.wire.codec import frame_bytes
from protocol.wire.dialects import DUPLEX_V1

from ..measures.conversation import Ratio, Times, ToolCallTracker, Value, talk_scores, tool_scores
from ..measures.talk import ClientSound, Talk
from ..telemetry import catalogue as c
from .catalogue import ALL, Metric
from .watching import SessionSnapshot, Shown

# -- instruments -----------------------------------------------------------------------------------


Labels = tuple[str, ...]


class Series:
    """The `total` of a counter or of a histogram, and how many observations each bucket has.

    `bounds` are the rising upper bounds of the buckets, with one bucket above.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0


class Instruments:
    """The instruments of one server, one for each series of the catalogue."""

    def __init__(self) -> None:
        self._made: Final = {
            metric: {labels: Series(metric.buckets) for labels in metric.series} for metric in ALL
        }

    def series(self, metric: Metric, *labels: str) -> Series:
        """A counter or a histogram; the values of its labels in the order of their names."""
        return self._made[metric][labels]

    def all(self) -> Iterator[tuple[Metric, Mapping[Labels, Series]]]:
        """Each metric, with its series by the values of their labels."""
        yield from self._made.items()


Key = Metric | tuple[Metric, *tuple[str, ...]]
"""A metric, with the values of its labels."""


class ModeInstruments(dict[Key, Series]):
    """The instruments of a server, as the meters of one mode's sessions use them.

    The mode is the first label of a metric that has it, and is not given.
    """

    def __init__(self, made: Instruments, mode: Mode) -> None:
        super().__init__()
        self._made = made
        self._mode = mode

    def __missing__(self, key: Key) -> Series:
        metric, *labels = key if isinstance(key, tuple) else (key,)
        mode = (self._mode,) if "mode" in metric.labels else ()
        series = self[key] = self._made.series(metric, *mode, *labels)
        return series

    def observe(self, values: Mapping[Key, float]) -> None:
        """Add a value to each of some histograms: to the sum, and to the first bucket it fits."""
        for key, value in values.items():
            series = self[key]
            series.counts[bisect_left(series.bounds, value)] += 1
            series.total += value


# -- turns and chunks ------------------------------------------------------------------------------


SPEECH_BYTES_PER_S: Final = OUTPUT_RATE_HZ * SAMPLE_BYTES
OnSlot = ev.SlotLeased | ev.BackendOpened | ev.BackendLost | ev.BackendReleased


class CallMeter:
    """Counts the calls of one session by `outcomes`, and its tokens in the model's cache."""

    outcomes: ClassVar[c.Metric]

    def __init__(self, instruments: ModeInstruments) -> None:
        self._instruments: Final = instruments
        self._now_ns = self._began_ns = 0
        self._running: Hashable = None
        self._again: Hashable = None  # a call that was lost, if it will be made again
        self._lease: int | None = None
        self._ended = False
        self.kv_tokens = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Count an event and its effects."""
        raise NotImplementedError

    def _happened_on_slot(self, event: OnSlot, session: Shown) -> None:
        """Follow the lease; events of an earlier one are stale."""
        if isinstance(event, ev.SlotLeased):
            self._lease = event.lease
        elif event.lease == self._lease:
            match event:
                case ev.BackendOpened(opened=opened):
                    self._opened(opened.prompt_length)
                case ev.BackendLost():
                    self._lost(goes_on=session.end_reason is None)
                case ev.BackendReleased():
                    self._lease = None
                    self.kv_tokens = 0

    def _opened(self, prompt_length: int) -> None:
        """Note the tokens of a model that was opened."""

    def _lost(self, *, goes_on: bool) -> None:
        """Count the call that was lost with the worker, unless it will be made again."""
        if goes_on and self._running is not None:
            self._again, self._running = self._running, None
        self._finish("failed")

    def over(self) -> None:
        """Count a running call as ended, or one that was lost."""
        if self._running is None:
            self._running = self._again
        self._finish("ended")
        self.kv_tokens = 0

    def _begin(self, call: Hashable) -> bool:
        """Note a call that begins; whether it does for the first time."""
        is_new, self._running, self._again = call != self._again, call, None
        if is_new:
            self._began_ns = self._now_ns
        return is_new

    def _since(self, at_ns: int) -> float:
        return max(0, self._now_ns - at_ns) / NS_PER_S

    def _spoke(self, pcm: bytes, codes: int) -> None:
        if pcm or codes:
            self._instruments[c.SPEECH_SECONDS].total += len(pcm) / SPEECH_BYTES_PER_S
            self._instruments[c.TOKENS, "speech"].total += codes

    def _finish(self, outcome: str) -> None:
        if self._running is not None:
            self._instruments[self.outcomes, "ended" if self._ended else outcome].total += 1
            self._running = None


class TurnMeter(CallMeter):
    """Counts the turns of a chat, from each start to the end of its answer."""

    outcomes = c.TURNS
    _has_begun_to_answer = False

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """As `CallMeter`."""
        self._now_ns = event.at_ns
        match event:
            case ev.TurnPrefilled(prefill=prefill) if prefill.index == self._running:
                self._reached("prefill")
                self._instruments[c.TOKENS, "prompt"].total += prefill.input_tokens
                self.kv_tokens = prefill.input_tokens
            case ev.TurnProgress(chunk=chunk) if chunk.index == self._running:
                if not self._has_begun_to_answer:
                    self._has_begun_to_answer = True
                    self._reached("first")
                self._spoke(chunk.pcm, len(chunk.codec_ids))
            case ev.TurnDone(result=result) if result.index == self._running:
                self._reached("end")
                self._instruments[c.TOKENS, "text"].total += result.generated_tokens
                self._spoke(result.pcm, len(result.codec_ids))
                self.kv_tokens = result.kv_length
                self._finish(result.reason)
            case ev.TurnFailed() if event.index == self._running:
                self._finish("failed")
            case ev.SlotLeased() | ev.BackendOpened() | ev.BackendLost() | ev.BackendReleased():
                self._happened_on_slot(event, session)
        self._ended = session.end_reason is not None
        for effect in effects:
            if isinstance(effect, ef.StartTurn) and self._begin(effect.turn.index):
                self._has_begun_to_answer = False

    def _reached(self, stage: str) -> None:
        self._instruments.observe({(c.TURN_STAGE_SECONDS, stage): self._since(self._began_ns)})


class ChunkMeter(CallMeter):
    """Counts the chunks of a transcription, from each start to its text."""

    outcomes = c.CHUNKS

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """As `CallMeter`."""
        self._now_ns = event.at_ns
        match event:
            case ev.ChunkDone(result=result) if (result.utterance, result.index) == self._running:
                self._instruments.observe({c.CHUNK_SECONDS: self._since(self._began_ns)})
                self._instruments[c.TOKENS, "prompt"].total += result.prompt_tokens
                self._instruments[c.TOKENS, "text"].total += result.generated_tokens
                self.kv_tokens = result.kv_length
                self._finish("heard")
            case ev.ChunkFailed() if (event.utterance, event.index) == self._running:
                self._finish("context_full" if event.context_full else "failed")
            case ev.SlotLeased() | ev.BackendOpened() | ev.BackendLost() | ev.BackendReleased():
                self._happened_on_slot(event, session)
        self._ended = session.end_reason is not None
        for effect in effects:
            if isinstance(effect, ef.RunChunk):
                is_new = self._begin((effect.chunk.utterance, effect.chunk.index))
                if is_new and effect.chunk.index == 0:
                    self._instruments[c.UTTERANCES].total += 1


# -- units -----------------------------------------------------------------------------------------


DEADLINE_NS: Final = NS_PER_S
"""A unit is one second of input, so the next is whole one second after it."""
US_PER_S: Final = 1_000_000


class UnitMeter(CallMeter):
    """Counts the units of one session, and its tokens in the model's cache."""

    outcomes = c.UNITS

    def __init__(self, instruments: ModeInstruments) -> None:
        super().__init__(instruments)
        self._whole_ns: deque[int] = deque()
        self._due_ns = 0
        self._interrupted = False
        self._unanswered = False  # its answer waits for its finalize (B2)
        self._closing: int | None = None  # the unit that is finalized, or undone
        self._barrier_ns = (0, 0)  # from when to when that was, or of the one before
        self._kv_settled = 0
        self._is_speaking = False  # the model goes on to speak
        self._overlap_ms: int | None = None  # where speech began that is over the model's

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """As `CallMeter`."""
        self._now_ns = event.at_ns
        asked = [*map(type, effects)]
        is_sent = ef.Send in asked
        match event:
            case ev.FrameReceived() | ev.MediaDecoded() | ev.MediaRejected() | ev.TimerFired():
                # A client's sound may be resampled first, or missing.
                # The whole units are those waiting and those gone.
                left = asked.count(ef.StartUnit) + asked.count(ef.DropUnit)
                new = session.units_waiting + left - len(self._whole_ns)
                self._whole_ns.extend([self._now_ns] * new)
            case ev.UnitDone(result=result) if result.index == self._running:
                self._unit_done(result, is_sent=is_sent)
            case ev.UnitFailed() if event.index == self._running:
                self._finish("failed")
                self.kv_tokens = self._kv_settled
            case ev.FinalizeDone(finalized=done) if self._is_closed(done.index):
                self._instruments.observe(
                    {(c.UNIT_STAGE_SECONDS, "finalize"): done.cost_us / US_PER_S}
                )
                self.kv_tokens = self._kv_settled = done.kv_length
                if self._unanswered and not self._ended:
                    self._answer()
            case ev.FinalizeFailed() if self._is_closed(event.index):
                self._instruments[c.FINALIZES_FAILED].total += 1
            case ev.RollbackDone() if self._is_closed(event.index):
                self._instruments[c.ROLLBACKS, "done"].total += 1
            case ev.RollbackFailed() if self._is_closed(event.index):
                self._instruments[c.ROLLBACKS, "failed"].total += 1
            case ev.Rebuilt() if self._unanswered and is_sent:
                self._answer()
            case ev.SpeechStarted(at_ms=at_ms) if self._is_speaking and not self._ended:
                self._overlap_ms = at_ms
            case ev.SpeechStopped(at_ms=at_ms) if self._overlap_ms is not None:
                self._instruments.observe(
                    {c.OVERLAP_SECONDS: (at_ms - self._overlap_ms) / MS_PER_S}
                )
                self._overlap_ms = None
            case ev.SlotLeased() | ev.BackendOpened() | ev.BackendLost() | ev.BackendReleased():
                self._happened_on_slot(event, session)
        self._ended = session.end_reason is not None
        for effect in effects:
            match effect:
                case ef.StartUnit():
                    self._start(effect.unit.index)
                case ef.DropUnit():
                    self._pop_whole_ns()
                    self._instruments[c.UNITS_DROPPED].total += 1
                case ef.Interrupt() if not self._ended:  # else the session's end cuts it
                    self._interrupted = True
                    self._instruments[c.INTERRUPTS].total += 1
                case ef.StartFinalize() | ef.Rollback():
                    self._closing = effect.index
                    self._barrier_ns = (self._now_ns, self._now_ns)

    def _pop_whole_ns(self) -> int:
        """When the oldest unit was whole; of one that waited before a restart: now."""
        return self._whole_ns.popleft() if self._whole_ns else self._now_ns

    # -- one unit -------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._interrupted = self._unanswered = False
        if not self._begin(index):
            return
        self._due_ns = self._pop_whole_ns() + DEADLINE_NS
        whole_ns = self._due_ns - DEADLINE_NS
        closed_ns, open_ns = self._barrier_ns
        barrier_s = max(0, open_ns - max(whole_ns, closed_ns)) / NS_PER_S
        self._instruments.observe(
            {c.UNIT_WAIT_SECONDS: self._since(whole_ns), c.UNIT_BARRIER_SECONDS: barrier_s}
        )

    def _answer(self) -> None:
        self._unanswered = False
        self._instruments.observe({c.UNIT_ANSWER_SECONDS: self._since(self._due_ns - DEADLINE_NS)})
        if self._now_ns > self._due_ns:
            self._instruments[c.UNITS_LATE].total += 1

    def _unit_done(self, result: UnitResult, *, is_sent: bool) -> None:
        is_cut = self._interrupted and (result.cut is not None or not result.is_listen)
        self._finish("cut" if is_cut else "listen" if result.is_listen else "speech")
        costs = result.costs
        stages = {"prefill": costs.prefill_us, "generate": costs.generate_us, "llm": costs.llm_us}
        if not result.is_listen:
            stages |= {"tts": costs.tts_us, "token2wav": costs.token2wav_us}
        took: dict[Key, float] = {c.UNIT_SECONDS: self._since(self._began_ns)}
        for stage, cost_us in stages.items():
            took[c.UNIT_STAGE_SECONDS, stage] = cost_us / US_PER_S
        self._instruments.observe(took)
        self._spoke(result.pcm, len(result.codec_ids))
        self._instruments[c.TOKENS, "text"].total += len(result.decided_ids)
        self._instruments[c.TOKENS, "picture"].total += result.vision_tokens
        self.kv_tokens = result.kv_length
        self._is_speaking = not (result.is_listen or result.end_of_turn)
        if self._ended:
            return
        self._unanswered = True
        if is_sent:
            self._answer()

    def _is_closed(self, index: int) -> bool:
        """Whether it is the unit that is being closed; ends its closing."""
        if self._closing != index:
            return False
        self._closing = None
        self._barrier_ns = (self._barrier_ns[0], self._now_ns)
        return True

    def _opened(self, prompt_length: int) -> None:
        self.kv_tokens = self._kv_settled = prompt_length

    def _lost(self, *, goes_on: bool) -> None:
        if not goes_on:
            self._finish("ended")
        super()._lost(goes_on=goes_on)
        self._closing = None


# -- the conversation ------------------------------------------------------------------------------


IN_SECONDS: Final = frozenset({"overlap", "self_talk"})
"""Amounts of time; the others are counts."""


class TalkMeter:
    """Hears one session."""

    def __init__(self, instruments: ModeInstruments) -> None:
        self._instruments = instruments
        self._talk: Talk | None = None
        self._calls = ToolCallTracker(keeps_texts=False)
        self._sound = ClientSound("audio", "realtime")
        self._now_ns = 0

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Hear what an event brought, and its effects."""
        match event:
            case ev.ConnectionOpened(mode=mode, endpoint=endpoint):
                self._talk, self._sound = Talk(), ClientSound(mode, endpoint)
            case ev.Forked():
                self._talk = None
        talk, at_ns = self._talk, event.at_ns
        if talk is None:
            return
        self._now_ns = at_ns
        match event:
            case ev.SpeechStarted() | ev.SpeechStopped():
                talk.user.found(event)
            case ev.UnitDone() | ev.FinalizeDone():
                self._calls.take(event)
        if session.accepted is not None:
            self._received(talk, at_ns, session.accepted, session)
        for effect in effects:
            match effect:
                case ef.DetectSpeech():
                    talk.user.searched(at_ns, effect.at, effect.rate_hz, effect.silence_ms)
                case ef.StartUnit(unit=unit):
                    for each in unit.inputs:
                        self._calls.fed(each, at_ns)
        for message in session.sent:
            self._take_message(talk, at_ns, message, session.dialect_name)
        if ef.StartUnit in map(type, effects):
            talk.unit_started(at_ns, session.samples_waiting)

    def received(
        self, events: Sequence[ev.FrameReceived], messages: Sequence[ClientMessage], session: Shown
    ) -> None:
        """Hear messages that had no effects (`Watcher`)."""
        for event, message in zip(events, messages, strict=True):
            self._now_ns = event.at_ns
            if self._talk is not None:
                self._received(self._talk, event.at_ns, message, session)

    def _received(self, talk: Talk, at_ns: int, message: ClientMessage, session: Shown) -> None:
        is_early = isinstance(message, AppendSound) and session.state is not State.ACTIVE
        if not is_early:
            talk.received(at_ns, self._sound.read(message))

    def _take_message(self, talk: Talk, at_ns: int, message: ServerMessage, dialect: str) -> None:
        if not isinstance(message, Speech):
            talk.sent(at_ns, message)
            return
        if self._sound.endpoint == "duplex" or dialect == DUPLEX_V1.name:
            message = attrs.evolve(message, response_id="")  # its frames name no turn
        if self._sound.endpoint == "live" and not any(message.pcm):
            talk.sent(at_ns, attrs.evolve(message, pcm=b""))
            talk.stopped(at_ns)  # a second of silence is a listen there
        else:
            talk.sent(at_ns, message, self._sound.spoken_hz(message.coding))

    def over(self) -> None:
        """Measure the session."""
        if self._talk is not None:
            talk = self._talk.conversation(self._now_ns)
            found = tool_scores(self._calls.found.values(), talk.user)
            found |= {} if talk.is_written else talk_scores(talk)
            for name, value in found.items():
                metric = c.CONVERSATION.get(name)
                if metric is None or value is None:
                    continue
                for one in values_of(name, value):
                    if metric.kind == "counter":
                        self._instruments[metric].total += one
                    else:
                        self._instruments.observe({metric: one})


def values_of(name: str, value: Value) -> Iterator[float]:
    """Give what a metric holds of a measure: seconds, shares, or a count."""
    match value:
        case Times(values=values):
            yield from (length_ns / NS_PER_S for _, length_ns in values)
        case Ratio(part=part, whole=whole):
            yield part / whole
        case _:
            yield value.amount / (NS_PER_S if name in IN_SECONDS else 1)


# -- a session -------------------------------------------------------------------------------------


ERROR_BEGINS: Final = '{"type":"error"'
"""The start of an error in every dialect; a test checks it."""
METERS: Final[Mapping[Work, type[CallMeter]]] = {
    "unit": UnitMeter,
    "turn": TurnMeter,
    "chunk": ChunkMeter,
}
"""The meter of the model's work for a session."""
LEFT: Final[Mapping[type[ev.Event], str]] = {
    ev.TicketLeft: "left",
    ev.TicketCancelled: "cancelled",
    ev.AdmissionRefused: "refused",
}
"""How a session leaves the queue without a slot."""


class Meter:
    """Counts one session into the instruments of its mode (`Watcher`)."""

    def __init__(self, instruments: ModeInstruments, opened: ev.ConnectionOpened) -> None:
        self._instruments = instruments
        self._work = METERS[OF_MODE[opened.mode].work](instruments)
        self._talk = TalkMeter(instruments) if OF_MODE[opened.mode].work == "unit" else None
        self._now_ns = self._began_ns = 0
        self._queued_ns: int | None = None
        self._lease: int | None = None
        self._leased_ns = self._opening_ns = self._releasing_ns = self._rebuilding_ns = 0
        self._media: dict[int, tuple[ef.MediaKind, int]] = {}
        self._kv_tokens_max = 0
        instruments[c.SESSIONS_OPENED, opened.endpoint].total += 1

    @property
    def kv_tokens(self) -> int:
        """The session's tokens in the model's cache; 0 without a slot."""
        return self._work.kv_tokens

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Count an event and its effects."""
        self._now_ns = event.at_ns
        match event:
            case ev.FrameReceived():
                self._instruments[c.FRAMES_RECEIVED].total += 1
                self._instruments[c.RECEIVED_BYTES].total += _size_bytes(event)
            case ev.SendFailed():
                self._instruments[c.SENDS_FAILED].total += 1
            case ev.Forked():
                self._instruments[c.FORKED].total += 1
                self._began_ns = self._now_ns
            case ev.PeerAttached():
                self._instruments[c.RESUMED].total += 1
            case ev.RecordingFailed():
                self._instruments[c.RECORDINGS_FAILED].total += 1
            case ev.SlotLeased():
                if self._queued_ns is not None:
                    self._instruments.observe({c.QUEUE_WAIT_SECONDS: self._since(self._queued_ns)})
                    self._queued_ns = None
                self._lease, self._leased_ns = event.lease, self._now_ns
            case ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                if self._queued_ns is not None:
                    self._instruments[c.QUEUE_LEFT, LEFT[type(event)]].total += 1
                    self._queued_ns = None
            case ev.MediaDecoded(media=media) | ev.MediaRejected(media=media):
                self._decided(media, "decoded" if type(event) is ev.MediaDecoded else "rejected")
            case _ if getattr(event, "lease", None) == self._lease:
                self._happened_on_slot(event)
        self._work.saw(event, effects, session)
        if self._talk is not None:
            self._talk.saw(event, effects, session)
        for effect in effects:
            match effect:
                case ef.Send(frame=frame):
                    self._instruments[c.FRAMES_SENT].total += 1
                    self._instruments[c.SENT_BYTES].total += frame_bytes(frame)
                    if frame.startswith(ERROR_BEGINS):
                        self._count_error(error_code(frame))
                case ef.EnterQueue():
                    self._queued_ns = self._now_ns
                case ef.OpenBackend():
                    self._opening_ns = self._now_ns
                case ef.Rebuild():
                    self._rebuilding_ns = self._now_ns
                case ef.Release():
                    self._releasing_ns = self._now_ns
                case ef.DecodeMedia():
                    self._media[effect.media] = (effect.kind, self._now_ns)
                case ef.CancelDecode():
                    self._media.pop(effect.media, None)
        self._kv_tokens_max = max(self._kv_tokens_max, self._work.kv_tokens)

    def received(
        self, events: Sequence[ev.FrameReceived], messages: Sequence[ClientMessage], session: Shown
    ) -> None:
        """Count messages that had no effects (`Watcher`)."""
        self._now_ns = events[-1].at_ns
        self._instruments[c.FRAMES_RECEIVED].total += len(events)
        self._instruments[c.RECEIVED_BYTES].total += sum(map(_size_bytes, events))
        if self._talk is not None:
            self._talk.received(events, messages, session)

    def over(self, reason: str | None) -> None:
        """Count the session's end."""
        self._work.over()
        if self._talk is not None:
            self._talk.over()
        self._instruments[c.SESSIONS_ENDED, reason or c.BROKEN_OFF].total += 1
        self._instruments.observe({c.SESSION_SECONDS: self._since(self._began_ns)})
        if self._kv_tokens_max:
            self._instruments.observe({c.SESSION_KV_TOKENS: self._kv_tokens_max})

    def _since(self, at_ns: int) -> float:
        return (self._now_ns - at_ns) / NS_PER_S

    def _happened_on_slot(self, event: ev.Event) -> None:
        match event:
            case ev.BackendOpened():
                self._instruments.observe({c.OPEN_SECONDS: self._since(self._opening_ns)})
                self._instruments[c.TOKENS, "prompt"].total += event.opened.prompt_length
            case ev.BackendOpenFailed():
                self._instruments[c.OPENS_FAILED].total += 1
            case ev.BackendLost():
                self._instruments[c.BACKENDS_LOST].total += 1
            case ev.Rebuilt():
                self._instruments[c.REBUILDS, "done"].total += 1
                self._instruments.observe({c.REBUILD_SECONDS: self._since(self._rebuilding_ns)})
                self._instruments[c.REBUILT_SECONDS].total += event.steps
            case ev.RebuildFailed():
                self._instruments[c.REBUILDS, "failed"].total += 1
            case ev.BackendReleased():
                held_s, took_s = self._since(self._leased_ns), self._since(self._releasing_ns)
                self._instruments.observe({c.SLOT_SECONDS: held_s, c.RELEASE_SECONDS: took_s})
                self._lease = None

    def _count_error(self, code: str) -> None:
        if (code,) in c.ERRORS.series:  # else 002 reports an end; ends are counted as such
            self._instruments[c.ERRORS, code].total += 1

    def _decided(self, media: int, outcome: str) -> None:
        kind, began_ns = self._media.pop(media, (None, 0))
        if kind is not None:
            self._instruments[c.MEDIA, outcome, kind].total += 1
            self._instruments.observe({(c.MEDIA_SECONDS, kind): self._since(began_ns)})


def error_code(frame: str) -> str:
    """Read the code of an error frame of ours, in any dialect."""
    body = orjson.loads(frame)
    code = body["code"] if "code" in body else body["error"]["code"]
    assert isinstance(code, str)
    return code


def _size_bytes(event: ev.FrameReceived) -> int:
    """The bytes of a frame; of one that was too long, those that were read."""
    if event.shortened is not None:
        read_bytes = event.shortened.read_bytes
        return event.shortened.size_bytes if read_bytes is None else read_bytes
    return 0 if event.frame is None else frame_bytes(event.frame)


# -- counting later --------------------------------------------------------------------------------


STEPS_MAX: Final = 32
"""Counted at once: a millisecond."""
BYTES_MAX: Final = 4 << 20
"""Of clients' messages and media, kept by steps that wait."""


class Backlog:
    """The steps of a server's sessions that are not counted yet, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[DeferredMeter, Callable[[], None]]] = []
        self.size_bytes = 0

    def count(self) -> None:
        """Count all steps, but none of a session of which an earlier one could not be counted."""
        steps, self.steps, self.size_bytes = self.steps, [], 0
        for meter, count in steps:
            if meter.error is None:
                try:
                    count()
                except Exception as error:
                    meter.error = error


class DeferredMeter:
    """A session's meter, which counts when the backlog does (`Watcher`).

    What it raises, `error`, is raised by the next call.
    """

    def __init__(self, meter: Meter, backlog: Backlog) -> None:
        self.meter: Final = meter
        self._backlog = backlog
        self.error: Exception | None = None

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """As `Watcher`."""
        is_turn = ef.StartTurn in map(type, effects)  # it has a whole conversation
        self._put(partial(self.meter.saw, event, effects), (event,), session, is_large=is_turn)

    def received(
        self,
        events: Sequence[ev.FrameReceived],
        messages: Sequence[ClientMessage],
        session: Session,
    ) -> None:
        """As `Watcher`."""
        self._put(partial(self.meter.received, events, messages), events, session)

    def over(self, reason: str | None) -> None:
        """As `Watcher`."""
        self._backlog.count()
        if self.error is not None:
            raise self.error
        self.meter.over(reason)

    def _put(
        self,
        count: Callable[[Shown], None],
        events: Sequence[ev.Event],
        session: Session,
        *,
        is_large: bool = False,
    ) -> None:
        """Have a step counted later; now, with all others, if they are many, or one is large."""
        if self.error is not None:
            raise self.error
        kind, peer, backlog = session.kind, session.peer, self._backlog
        snapshot = SessionSnapshot(
            dialect_name=peer.dialect.name,
            end_reason=kind.end_reason,
            sent=peer.sent,
            state=peer.state,
            accepted=peer.accepted,
            units_waiting=kind.loop.units_waiting,
            samples_waiting=kind.samples_waiting,
        )
        backlog.steps.append((self, partial(count, snapshot)))
        for event in events:
            if isinstance(event, ev.FrameReceived):
                backlog.size_bytes += len(event.frame or b"")
            elif isinstance(event, ev.MediaDecoded):
                backlog.size_bytes += len(event.pcm) + sum(map(len, event.pictures + event.stacked))
        if is_large or backlog.size_bytes > BYTES_MAX or len(backlog.steps) >= STEPS_MAX:
            backlog.count()
