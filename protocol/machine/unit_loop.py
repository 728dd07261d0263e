"""The unit loop of a duplex session, and its barrier: seconds in, listens and speech out.

prefill -> generate -> send -> finalize (deferred) -> barrier -> next prefill

- A unit starts only when no call is in progress, and only `FinalizeDone` or `RollbackDone` of the
  unit before leads there: this is the barrier (B1), and how cleanup knows what to wait for (B4).
- Each started unit has exactly one outcome: listen, speech, `inference_error`, or the session's end
  (B9). The kind sends it.
- `force_listen` and the interrupts make the model listen (B6). The user's own speech does too,
  where the operator wants that (`--barge-in`): where it begins and stops is found outside
  (`DetectSpeech`), and the model listens while the user speaks on. A turn that the model begins
  while the user speaks may be the answer to it, and goes on; unless the user does too.
- The dialect of 002 owes each chunk of sound a result: `Lockstep`, None in all other sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.limits import NS_PER_MS, SPEECH_SILENCE_MS, SPEECH_THRESHOLD, UNIT_FAILURES_MAX
from ..values.messages import EndReason, Listen, Metrics, Pending, Speech, ToolCalled
from ..values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES, Unit, UnitResult
from ..values.requests import Append
from ..wire.audio import to_pcm16
from .core import Call, Peer, Phase, Recording, Step
from .input import Input, PendingUnit, ToolCalls
from .kind import MODEL_LOST, Migration, Slot


@attrs.define
class AwaitedUnit:
    """A unit whose result is awaited, the chunk that completed it, and its pending results."""

    ordinal: int
    chunk: int
    pending: int = 0


@attrs.define
class Lockstep:
    """Counts the results that chunks of sound are owed in the dialect of 002, one at least each.

    Its clients send the next chunk after the last one was answered. A chunk that completes units
    has a result of each; one that completes none, or whose units were all dropped (B7), has a
    pending result. Results keep the order of chunks: a pending one waits behind the units before
    it. They are bounded by the waiting units and the one in flight.

    `chunk` is the last one answered; `kv_length` tokens in the model's cache, as last reported.
    """

    kv_length: int
    units: deque[AwaitedUnit] = attrs.Factory(deque)
    chunk: int = -1

    def add_unit(self, ordinal: int, chunk: int) -> None:
        """Note a unit that a chunk completed."""
        self.units.append(AwaitedUnit(ordinal=ordinal, chunk=chunk))

    def wait(self) -> int:
        """Note a chunk that completed none; returns how many pending results are due now."""
        return self._pend(len(self.units) - 1, 1)

    def answer(self) -> int:
        """Note the result of the unit in flight; returns how many pending ones are due now."""
        unit = self.units.popleft()
        self.chunk = unit.chunk
        return unit.pending

    def drop(self, ordinal: int) -> int:
        """Note a dropped unit; returns how many pending results are due now."""
        numbers = [unit.ordinal for unit in self.units]
        index = numbers.index(ordinal)
        dropped = self.units[index]
        del self.units[index]
        others = any(unit.chunk == dropped.chunk for unit in self.units)
        is_answered = others or self.chunk == dropped.chunk
        return self._pend(index - 1, dropped.pending + (not is_answered))

    def _pend(self, index: int, count: int) -> int:
        """Owe pending results after the unit at an index; without one they are due now."""
        if index < 0:
            return count
        self.units[index].pending += count
        return 0


@attrs.define(eq=False)
class UserSpeech:
    """What is known of the user's speech.

    Attributes:
        samples: that the client sent, as far as they are searched.
        is_speaking: the user speaks.
        over_samples: spoken by the user in this turn, which began meanwhile.
        must_listen: the model only listens, for the user interrupted it and speaks on.
        sought: threshold and silence in ms, of a client that wants its speech to stop the model.
    """

    step: Step
    samples: int = 0
    is_speaking: bool = False
    over_samples: int = 0
    must_listen: bool = False
    sought: tuple[float, int] | None = None

    def detect(
        self, pcm16: bytes, rate_hz: int, threshold: float, silence_ms: int, speech_ms: int
    ) -> None:
        """Have speech found in the client's next sound."""
        self.step.do(
            ef.DetectSpeech(
                at=self.samples,
                rate_hz=rate_hz,
                data=pcm16,
                threshold=threshold,
                silence_ms=silence_ms,
                is_speech=self.is_speaking,
                speech_ms=speech_ms,
            )
        )
        self.samples += len(pcm16) // SAMPLE16_BYTES

    def forget(self) -> None:
        """Forget the user, but not how much was said."""
        self.is_speaking, self.must_listen, self.over_samples = False, False, 0


class UnitKind(Protocol):
    """The kind of a session that runs on units."""

    def open_if_due(self) -> bool:
        """Open the model if that is due; whether it is open."""

    def must_speak(self) -> bool:
        """Whether the next unit may not listen."""

    def must_listen(self) -> bool:
        """Whether the next unit may only listen."""

    def send_outcome(self, outcome: Listen | Speech) -> None:
        """Send a unit's outcome."""

    def send_calls(self, calls: Sequence[ToolCalled]) -> None:
        """Send the calls of tools that the model made in a unit, if any; results may wait."""

    def unit_dropped(self) -> None:
        """Go on after a waiting unit was dropped."""

    def unit_undone(self) -> None:
        """Go on after a unit that failed, and has no outcome."""

    def end(self, reason: EndReason) -> None:
        """End the session."""

    def give_up(self, text: str) -> None:
        """End the session: the model does not answer."""


@attrs.define(eq=False)
class UnitLoop:
    """The unit in flight, its progress and its outcome. Its index is never reused (B9).

    Attributes:
        input_id: the append that completed it.
        interrupted: it is being cut, or its answer withheld (B6).
        failures: units failed in a row (B3).
        unit: the one that runs, or was lost with its worker.
        held: an outcome that waits for its finalize, if that is not deferred (B2).
        response_id: the turn being spoken, or None.
        ended_id: an ended turn that no listen has followed.
        is_paused: no unit starts until the client resumes (002).
        max_slice_nums: for frames whose append has none.
        lockstep: results owed to chunks, if each is owed one (002).
    """

    step: Step
    peer: Peer
    recording: Recording
    slot: Slot
    call: Call
    migration: Migration
    input: Input
    speech: UserSpeech
    tools: ToolCalls
    kind: UnitKind
    input_id: str = ""
    interrupted: bool = False
    failures: int = 0
    unit: Unit | None = None
    held: Listen | Speech | None = None
    response_id: str | None = None
    ended_id: str | None = None
    responses: int = 0
    appends: int = 0
    max_slice_nums: int = 1
    deferred_finalize: bool = True
    is_paused: bool = False
    lockstep: Lockstep | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Units started and dropped, and appends."""
        started, dropped = self.call.index + 1, self.input.units_dropped
        return {"units": started, "units_dropped": dropped, "appends": self.appends}

    @property
    def is_busy(self) -> bool:
        """Whether the model works for the client: as long as the session is set up."""
        return self.peer.is_active

    @property
    def units_waiting(self) -> int:
        """Full seconds of input that wait for the model."""
        return len(self.input.waiting.units)

    def forget_client(self) -> None:
        """Forget the input, the unit that was lost, and what the client was owed."""
        self.input.forget(self.call.index + 1 + self.input.units_dropped)
        if self.unit is not None:
            self.tools.put_back(self.unit.inputs)
        self.tools.forget_client()
        self.unit, self.held, self.lockstep = None, None, None
        self.failures, self.is_paused = 0, False
        self.speech.forget()

    # -- in -------------------------------------------------------------------------------------

    def append(self, message: Append) -> None:
        """Take an append: force first, then cut it into units, and start a unit if one may."""
        input_id = message.input_id or self.step.derive("input", self.appends)
        self.appends += 1
        message = self._search(message)
        if message.force_listen:
            self._force_listen()
        attached = self.input.attach(message, input_id)
        units = self.input.assembler.add(message.pcm, attached)
        for unit in units:
            dropped = self.input.waiting.push(unit)
            if self.lockstep is not None:
                self.lockstep.add_unit(unit.ordinal, self.appends)
            if dropped is not None:
                self.input.drop(dropped)
                self.kind.unit_dropped()
                if self.lockstep is not None:
                    self._send_pending(self.lockstep.drop(dropped.ordinal))
            self.start_if_due()
        self.hurry()
        if self.lockstep is not None and not units:
            self._send_pending(self.lockstep.wait())

    def hurry(self) -> None:
        """Cut the silent part in progress if more than the next unit waits for its end."""
        cut = self._cut_silent() if len(self.input.waiting.units) > 1 else None
        if cut is not None:
            self.step.do(cut)

    def _search(self, message: Append) -> Append:
        """Have speech found in an append; while the user speaks on, the model listens to it."""
        if self.step.limits.barge_in or self.speech.sought:
            self._stop_overlapped_turn(len(message.pcm) // SAMPLE_BYTES)
            pcm16 = to_pcm16(message.pcm)
            how = self.speech.sought or (SPEECH_THRESHOLD, SPEECH_SILENCE_MS)
            is_over = self.response_id is not None
            speech_ms = self.step.limits.backchannel_ms * is_over
            self.speech.detect(pcm16, INPUT_RATE_HZ, *how, speech_ms)
        is_forced = self.speech.must_listen
        return attrs.evolve(message, force_listen=True) if is_forced else message

    def _stop_overlapped_turn(self, samples: int) -> None:
        """Stop a turn that began while the user spoke, if the user goes on for a second."""
        speech = self.speech
        if self.response_id is None or not speech.is_speaking or speech.must_listen:
            speech.over_samples = 0
        elif speech.over_samples < INPUT_RATE_HZ:
            speech.over_samples += samples
        else:
            self._barge_in()

    def _barge_in(self) -> None:
        self.speech.over_samples, self.speech.must_listen = 0, True
        self.stop_speaking()

    def speech_started(self, _event: ev.SpeechStarted) -> None:
        """Stop the turn that is being spoken."""
        if self.peer.is_active:
            self.speech.is_speaking = True
            if self.response_id is not None:
                self._barge_in()

    def speech_stopped(self, _event: ev.SpeechStopped) -> None:
        """Let the model speak again."""
        self.speech.is_speaking = self.speech.must_listen = False

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a decoded picture, whose unit may start."""
        self.input.media_decoded(event)
        self.start_if_due()

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Let the unit of a damaged picture run without it."""
        if self.input.media_rejected(event):
            self.start_if_due()

    def interrupt_next(self) -> None:
        """Have the unit in flight listen, else the next one (002, interrupt)."""
        if self.unit is not None or isinstance(self.held, Speech):
            self._withhold()
        elif not self.input.waiting.force_next():
            self.input.assembler.force_listen()

    def stop_speaking(self) -> None:
        """Have the model listen from now on: the next unit, if none is there (B6)."""
        if self.unit is None and not self.input.waiting.units:
            self.input.assembler.force_listen()
        self._force_listen()

    def _force_listen(self) -> None:
        """Force the unit in flight and all waiting ones to listen (B6)."""
        self._withhold()
        self.input.waiting.force_listen()

    def _withhold(self) -> None:
        """Cut the unit in flight, or withhold its outcome if it is done."""
        interrupt = self.cut()
        if interrupt is not None:
            self.step.do(interrupt)
        if isinstance(self.held, Speech):  # not sent yet, so it is not sent at all
            self.response_id = None
            self.held = Listen(
                session_id=self.held.session_id,
                input_id=self.held.input_id,
                metrics=self.held.metrics,
                response_id=self.held.response_id,
            )

    # -- the call -------------------------------------------------------------------------------

    def start_if_due(self) -> None:
        """Start the oldest waiting unit if the barrier is open (B1) and its media is decoded."""
        if not self.kind.open_if_due() or self.migration.move_if_due():
            return
        if not self.peer.is_closed and self.call.is_idle and not self.is_paused:
            pending = self.input.waiting.pop_ready(self.input.undecided_media)
            if pending is not None:
                self.start(pending, must_speak=self.kind.must_speak())
            self.input.catch_up()

    def start(self, pending: PendingUnit, *, must_speak: bool) -> None:
        """Start the next unit (B1: only through the open barrier)."""
        self.call.begin(self.call.index + 1)
        attached = pending.attached
        must_listen = attached.force_listen or self.kind.must_listen()
        self.input_id, self.interrupted = attached.input_id, False
        self.unit = Unit(
            index=self.call.index,
            pcm=pending.pcm,
            frames=tuple(frame.jpeg for frame in attached.frames),
            force_listen=must_listen,
            max_slice_nums=attached.max_slice_nums or self.max_slice_nums,
            force_speak=must_speak and not must_listen,
            inputs=self.tools.next_inputs(),
        )
        self.step.do(ef.StartUnit(unit=self.unit))

    def start_again(self, unit: Unit) -> None:
        """Start the unit that was lost with its worker, forced to listen if it was being cut."""
        self.call.begin(self.call.index)
        self.unit = attrs.evolve(unit, force_listen=unit.force_listen or self.interrupted)
        self.interrupted = False
        self.step.do(ef.StartUnit(unit=self.unit))

    def cut(self) -> ef.Interrupt | None:
        """Cut the running unit, or its silent part; None if it is being cut already.

        A unit that was lost with its worker will listen when it starts again.
        """
        if self.unit is None:
            return self._cut_silent()
        if self.interrupted:
            return None
        self.interrupted = True
        is_running = self.call.phase is Phase.RUNNING
        return ef.Interrupt(index=self.call.index) if is_running else None

    def _cut_silent(self) -> ef.Interrupt | None:
        """Cut the silent part in progress, as if by its budget: its call goes on in the next."""
        is_silent = self.step.limits.duplex_tools and self.call.phase is Phase.FINALIZING
        if not is_silent or self.tools.is_cut:
            return None
        self.tools.is_cut = True
        return ef.Interrupt(index=self.call.index)

    def is_withheld(self, result: UnitResult) -> bool:
        """Whether the unit's speech, whole or in part, is withheld (B6)."""
        return self.interrupted and (result.cut is not None or not result.is_listen)

    def resume_work(self) -> None:
        """Send what waited for its finalize, and start the unit again that was lost."""
        self._send_held()
        if self.unit is not None and not self.peer.is_closed:
            self.start_again(self.unit)
            self.input.catch_up()
        else:
            self.start_if_due()

    def _go_on(self) -> None:
        """Go on after a model call: start the next unit, or release the slot."""
        if self.slot.settle():
            self.start_if_due()

    def unit_done(self, event: ev.UnitDone) -> None:
        """Send a unit's outcome, then finalize it; not deferred, the other way round (B2)."""
        result = event.result
        if not self.call.awaits(Phase.RUNNING, result.index):
            return
        self.migration.answered()
        if self.peer.is_closed:
            self._go_on()
            return
        outcome = self._outcome(result)
        if result.kv_length >= self.step.limits.context_tokens:
            self.kind.send_outcome(outcome)
            self.call.settle()
            self.kind.end("context_full")
            return
        if self.deferred_finalize:
            self._send_outcome(outcome)
        else:
            self.held = outcome
        self.call.require(Phase.RUNNING)
        self.call.phase = Phase.FINALIZING
        self.failures, self.unit = 0, None
        self.tools.is_cut = False
        is_withheld = self.is_withheld(result)
        self.step.do(ef.StartFinalize(index=self.call.index, interrupted=is_withheld))
        self.hurry()

    def finalize_done(self, event: ev.FinalizeDone) -> None:
        """Send the calls of the unit's silent part, and open the barrier (B1)."""
        done = event.finalized
        if not self.call.awaits(Phase.FINALIZING, done.index):
            return
        self._send_held()
        if done.silent is not None and self.peer.is_active:
            self.kind.send_calls(self.tools.take(done.silent, done.index))
            if self.tools.failures >= UNIT_FAILURES_MAX:
                self.call.settle()
                self.kind.end("backend_error")
                return
        self._go_on()

    def unit_failed(self, event: ev.UnitFailed) -> None:
        """Undo a failed unit, or end the session if that cannot help (B3, B10)."""
        index = event.index
        if not self.call.awaits(Phase.RUNNING, index):
            return
        self.failures += 1
        self.migration.answered()
        if self.peer.is_closed:
            self._go_on()
        elif event.context_full:
            self.call.settle()
            self.kind.end("context_full")
        elif not self.step.limits.can_rollback or self.failures >= UNIT_FAILURES_MAX:
            self.call.settle()
            self.kind.end("backend_error")
        else:
            self.response_id = None
            text = f"unit {index} failed and was undone"
            self.peer.send_error(ErrorCode.INFERENCE_ERROR, text)
            self.kind.unit_undone()
            if self.lockstep is not None:
                self._send_pending(self.lockstep.answer())
            self.call.require(Phase.RUNNING)
            if self.unit is not None:
                self.tools.put_back(self.unit.inputs)
            self.call.phase, self.unit = Phase.ROLLING_BACK, None
            self.step.do(ef.Rollback(index=index))

    def rollback_done(self, event: ev.RollbackDone) -> None:
        """Go on after the failed unit is undone (B3)."""
        if self.call.awaits(Phase.ROLLING_BACK, event.index):
            self._go_on()

    def finalize_failed(self, event: ev.FinalizeFailed) -> None:
        """End the session: no unit may run on what is left (B3)."""
        if self.call.awaits(Phase.FINALIZING, event.index) and self.slot.settle():
            self.kind.give_up(MODEL_LOST)

    def rollback_failed(self, event: ev.RollbackFailed) -> None:
        """End the session: no unit may run on what is left (B3)."""
        if self.call.awaits(Phase.ROLLING_BACK, event.index) and self.slot.settle():
            self.kind.give_up(MODEL_LOST)

    # -- out ------------------------------------------------------------------------------------

    def _send_held(self) -> None:
        if self.held is not None and not self.peer.is_closed:
            self._send_outcome(self.held)
        self.held = None

    def _send_outcome(self, outcome: Listen | Speech) -> None:
        self.kind.send_outcome(outcome)
        if self.lockstep is not None:
            self.lockstep.kv_length = outcome.metrics.kv_cache_length
            self._send_pending(self.lockstep.answer())

    def _send_pending(self, count: int) -> None:
        for _ in range(count):
            assert self.lockstep is not None
            metrics = self._metrics(self.lockstep.kv_length)
            self.peer.send(Pending(is_speaking=self.response_id is not None, metrics=metrics))

    def _outcome(self, result: UnitResult) -> Listen | Speech:
        """Turn a result into the message to the client (B9)."""
        costs = result.costs
        metrics = self._metrics(
            result.kv_length,
            prefill_ms=costs.prefill_us / 1000,
            generate_ms=costs.generate_us / 1000,
            wall_clock_ms=costs.wall_us / 1000,
            cost_llm_ms=costs.llm_us / 1000,
            cost_tts_ms=costs.tts_us / 1000,
            cost_token2wav_ms=costs.token2wav_us / 1000,
            n_tokens=len(result.decided_ids),
            n_tts_tokens=len(result.codec_ids),
            vision_slices=result.vision_slices,
            vision_tokens=result.vision_tokens,
        )
        if result.is_listen or self.is_withheld(result):
            ended = self.response_id or self.ended_id or self.next_response_id
            self.response_id = self.ended_id = None
            return Listen(
                session_id=self.peer.session_id,
                input_id=self.input_id,
                metrics=metrics,
                response_id=ended,  # the turn that the listen ends, else the one it precedes
            )
        if self.response_id is None:
            self.response_id = self.next_response_id
            self.responses += 1
        speech = Speech(
            session_id=self.peer.session_id,
            response_id=self.response_id,
            input_id=self.input_id,
            text=result.text,
            pcm=result.pcm,
            end_of_turn=result.end_of_turn,
            metrics=metrics,
        )
        self.ended_id = None
        if result.end_of_turn:
            self.ended_id = self.response_id
            self.response_id = None
        return speech

    @property
    def next_response_id(self) -> str:
        """The id of the next turn that the model speaks."""
        return self.step.derive("resp", self.responses)

    def _metrics(self, kv_length: int, **of_unit: Any) -> Metrics:
        """Make the metrics of a message; only 002 has its time."""
        opened = self.step.opened
        at_ms = self.step.now_ns / NS_PER_MS if opened.endpoint == "duplex" else 0.0
        return Metrics(
            kv_cache_length=kv_length,
            dropped_units=self.input.units_dropped,
            recording=self.recording.state,
            session_ms=at_ms,
            wall_ms=opened.created_ms + at_ms if at_ms else 0.0,
            **of_unit,
        )
