"""The scripted model without waiting: the same script, its calls ended by a virtual clock.

`runtime.model.backends.scripted` decides what a unit or a turn becomes and what is told of it, down
to the helpers that it keeps to itself, so that none of it is written twice; here is only when.
Nobody is held to the rules of a backend: the live player does that, with the real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Chunk, Cut, Finalized, Opened, Opening, Prefill, Turn, Unit
from runtime.media.decoder import MediaDecoder
from runtime.media.values import Decoded, MediaError
from runtime.media.video import read_video
from runtime.model.backends.base import BackendRefused, ContextFull, require_tools
from runtime.model.backends.scripted import (
    FINALIZE_TOKENS,
    PROMPT_TOKENS_MIN,
    VOICE_BYTES_PER_TOKEN,
    Call,
    SilentWriter,
    Step,
    _result,
)
from runtime.model.backends.scripted_chat import (
    TOKEN_CHARS,
    ScriptedTranscript,
    ScriptedTurn,
    Transcribed,
)
from tests.transcripts.scripts import make_backend

if TYPE_CHECKING:
    from tests.transcripts.pure import Clock

DECODING_S: Final = 0.001


@attrs.define
class Running:
    """A unit under way; `began_s` is when its first step of generate began."""

    step: Step
    unit: Unit
    began_s: float
    is_over: bool = False


class PureModel:
    """Does what a session asks of its model, and posts what came of it.

    Args:
        clock: says when.
        script: of `transcript_scripts`.
        slots: of the model; None takes its own.
        decoder: decodes media.

    Attributes:
        backend: holds the script; none of its calls is made.
        post: tells the session a fact.
    """

    def __init__(self, clock: Clock, script: str, slots: int | None, decoder: MediaDecoder) -> None:
        self.clock = clock
        self.backend = make_backend(script, slots=slots)
        self.post: Callable[..., None] = lambda *_, **__: None
        self._decoder = decoder
        self._opening: Opening | None = None
        self._writer = SilentWriter(())
        self._kv_length = 0
        self._lease = 0
        self._running: Running | None = None
        self._turn_is_cut = False
        self._transcript: ScriptedTranscript | None = None

    def perform(self, effect: ef.Effect) -> None:
        """Begin a call, or cut one."""
        match effect:
            case ef.OpenBackend():
                self._open(effect)
            case ef.StartUnit():
                self._start(effect.unit)
            case ef.Interrupt():
                self._interrupt()
            case ef.StartFinalize():
                self._finalize(effect)
            case ef.Rollback():
                assert self._running is not None
                done = partial(self.post, ev.RollbackDone, index=effect.index)
                self._call(self._running.step.rollback, done, ev.RollbackFailed, effect.index)
            case ef.StartTurn():
                self._begin_turn(effect)
            case ef.CutTurn():
                self._turn_is_cut = True
            case ef.RunChunk():
                self._hear(effect)
            case _:
                raise AssertionError(f"{type(effect).__name__} is no call")

    def decode(self, effect: ef.DecodeMedia) -> None:
        """Decode media."""
        try:
            made = self._decode(effect)
        except MediaError as error:
            self._after(DECODING_S, ev.MediaRejected, media=effect.media, reason=str(error))
        else:
            fields = {"pcm": made.pcm, "pictures": made.pictures, "stacked": made.stacked}
            self._after(DECODING_S, ev.MediaDecoded, media=effect.media, **fields)

    def _decode(self, effect: ef.DecodeMedia) -> Decoded:
        if effect.kind == "video":  # the decoder does it in a process of its own
            return read_video(effect.data, effect.stack_frames)
        return self._decoder.decode_here(effect)

    def release(self, done: Callable[[], None]) -> None:
        """Forget the session."""
        self._running = self._transcript = None
        self.clock.after(self.backend.release.duration_s, done)

    # -- units ----------------------------------------------------------------------------------

    def _open(self, effect: ef.OpenBackend) -> None:
        self._opening, self._lease = effect.opening, effect.lease
        self._writer = SilentWriter(effect.opening.tools)
        call = self.backend._opening(effect.opening)
        opened = PROMPT_TOKENS_MIN + len(effect.opening.instructions) // TOKEN_CHARS
        opened += len(effect.opening.voice.llm_pcm) // VOICE_BYTES_PER_TOKEN
        self._kv_length = opened
        if call.fault is None:
            fact = {"lease": effect.lease, "opened": Opened(prompt_length=opened)}
            self._after(call.duration_s, ev.BackendOpened, **fact)
        else:
            full = call.fault == "context_full"
            self._after(
                call.duration_s, ev.BackendOpenFailed, lease=effect.lease, context_full=full
            )

    def _start(self, unit: Unit) -> None:
        assert self._opening is not None
        step = self.backend.script(unit, self._opening.seed)
        if self._opening.tools:
            step = self.backend.calls(step, unit, self._opening.tools)
        if unit.force_listen:
            step = attrs.evolve(step, speech=None)
        self._running = running = Running(step, unit, self.clock.now_s + step.prefill_s)
        if step.fault == "context_full":
            self._after(0, ev.UnitFailed, index=unit.index, context_full=True)
        elif step.fault != "hang":
            took_s = step.prefill_s + step.generate_s
            self.clock.after(took_s, lambda: self._finish(running, None))

    def _interrupt(self) -> None:
        """Cut before the next step; where none is left, the unit ends by itself."""
        running = self._running
        assert running is not None
        each_s = running.step.generate_s / running.step.steps
        ran_s = max(0.0, self.clock.now_s - running.began_s)
        step = math.ceil(ran_s / each_s)
        if step < running.step.steps and running.step.fault != "hang":
            cut = Cut(stage="llm", step=step)
            left_s = running.began_s + step * each_s - self.clock.now_s
            self.clock.after(left_s, lambda: self._finish(running, cut))

    def _finish(self, running: Running, cut: Cut | None) -> None:
        if running.is_over or running is not self._running:
            return
        running.is_over = True
        unit, step = running.unit, running.step
        if cut is None and step.fault == "gone":
            self.post(ev.BackendLost, lease=self._lease)
        elif cut is None and step.fault == "fail":
            self.post(ev.UnitFailed, index=unit.index)
        else:
            assert self._opening is not None
            result = _result(unit, step, cut, self._opening, self._kv_length)
            self._kv_length = result.kv_length
            self.post(ev.UnitDone, result=result)

    def _finalize(self, effect: ef.StartFinalize) -> None:
        assert self._running is not None
        self._kv_length += FINALIZE_TOKENS
        silent, step = None, self._running.step
        if self._writer.tools:
            self._writer.begin(step)
            silent = self._writer.write(step)
        finalized = Finalized(index=effect.index, kv_length=self._kv_length, silent=silent)
        done = partial(self.post, ev.FinalizeDone, finalized=finalized)
        self._call(self._running.step.finalize, done, ev.FinalizeFailed, effect.index)

    def _call(self, call: Call, done: Callable[[], None], failed: type[Any], index: int) -> None:
        if call.fault is None:
            self.clock.after(call.duration_s, done)
        elif call.fault == "fail":
            self._after(call.duration_s, failed, index=index)
        elif call.fault == "gone":
            self._after(call.duration_s, ev.BackendLost, lease=self._lease)

    # -- turns ----------------------------------------------------------------------------------

    def _begin_turn(self, effect: ef.StartTurn) -> None:
        turn, self._lease, self._turn_is_cut = effect.turn, effect.lease, False
        scripted = ScriptedTurn(self.backend.rules, self.backend._answer, 0)
        scripted._take(turn)
        tokens = scripted._input_tokens
        answer = scripted._answer
        try:
            require_tools(self.backend.info, turn)
        except BackendRefused as error:
            self._after(0, ev.TurnFailed, index=turn.index, refused=str(error))
            return
        if answer.fault == "context_full" or tokens >= self.backend.info.context_limit:
            self._after(0, ev.TurnFailed, index=turn.index, context_full=True)
        elif answer.fault != "hang":
            cost_us = round(answer.prefill_s * 1_000_000)
            prefill = Prefill(index=turn.index, input_tokens=tokens, cost_us=cost_us)
            self.clock.after(answer.prefill_s, lambda: self._prefilled(scripted, turn, prefill))

    def _prefilled(self, scripted: ScriptedTurn, turn: Turn, prefill: Prefill) -> None:
        self.post(ev.TurnPrefilled, prefill=prefill)
        self._next_token(scripted, turn, [])

    def _next_token(self, scripted: ScriptedTurn, turn: Turn, made: list[str]) -> None:
        """Answer from here: before each token it may be cut."""
        tokens = scripted._answer.tokens[: turn.config.max_new_tokens]
        if self._turn_is_cut:
            self.post(ev.TurnDone, result=scripted._result(len(made), len(made)))
        elif len(made) < len(tokens):
            text = tokens[len(made)]
            self.clock.after(
                scripted._answer.token_s, lambda: self._token(scripted, turn, made, text)
            )
        elif not self._fails(scripted, turn, len(made)):
            for rest in scripted._rest(len(made)):
                self.post(ev.TurnProgress, chunk=rest)
            self.post(ev.TurnDone, result=scripted._result(len(made), None))

    def _token(self, scripted: ScriptedTurn, turn: Turn, made: list[str], text: str) -> None:
        if not self._fails(scripted, turn, len(made)):
            self.post(ev.TurnProgress, chunk=scripted._piece(len(made), text))
            self._next_token(scripted, turn, [*made, text])

    def _fails(self, scripted: ScriptedTurn, turn: Turn, step: int) -> bool:
        answer = scripted._answer
        if answer.fault not in {"fail", "gone"} or answer.fault_at != step:
            return False
        if answer.fault == "gone":
            self.post(ev.BackendLost, lease=self._lease)
        else:
            self.post(ev.TurnFailed, index=turn.index)
        return True

    # -- chunks ---------------------------------------------------------------------------------

    def _hear(self, effect: ef.RunChunk) -> None:
        chunk = effect.chunk
        which: dict[str, Any] = {"utterance": chunk.utterance, "index": chunk.index}
        heard = self.backend._transcription(chunk)
        if heard.fault == "gone":
            self._after(heard.takes_s, ev.BackendLost, lease=effect.lease)
        elif heard.fault == "fail":
            self._after(heard.takes_s, ev.ChunkFailed, **which)
        elif heard.fault != "hang":
            self._write(chunk, which, heard.takes_s)

    def _write(self, chunk: Chunk, which: dict[str, Any], takes_s: float) -> None:
        if self._transcript is None:
            self._transcript = ScriptedTranscript(self.backend.rules, self._at_once, 0)
        try:
            result = trio.run(self._transcript.run, chunk)
        except ContextFull:
            self._after(0, ev.ChunkFailed, **which, context_full=True)
            return
        self._after(takes_s, ev.ChunkDone, result=result)

    def _at_once(self, chunk: Chunk) -> Transcribed:
        """What is heard of a chunk, without the time that it takes."""
        return attrs.evolve(self.backend._transcription(chunk), takes_s=0.0)

    def _after(self, seconds: float, kind: type[Any], **fields: object) -> None:
        self.clock.after(seconds, lambda: self.post(kind, **fields))
