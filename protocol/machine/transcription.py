"""A transcription: sound in pieces of any size, cut into seconds, and the text of each.

appended -> committed -> chunk, chunk, ... -> answered

- Sound belongs to the open utterance: the one after the last closed one. It is kept from the first
  append on, and transcribed once its text is requested. Closing and requesting may be one message
  or two, in either order; a request applies to the oldest utterance.
- One chunk at a time is with the model, a second of the oldest utterance; the rest waits here,
  bounded in bytes. So cleanup knows what to wait for (B4), and utterances are answered in order.
- The end of an utterance is filled up with silence to a whole second, and a second of silence
  follows for its last words. An utterance without sound needs no model.
- An utterance that fails or outgrows the context is answered by an error and its text so far. The
  rest of its sound is discarded; the next commit, final or not, begins the next utterance.
- A silent client's session ends (`idle`), but not while it waits for the model.

Sent text is never taken back. Sound is cut only here: its split into appends changes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import CLOSE_TOO_BIG, ErrorCode, FrameError
from ..values.limits import MODEL_CHARS_SHOWN, NS_PER_S, UTTERANCES_PENDING_MAX
from ..values.messages import TranscriptDelta, TranscriptDone
from ..values.model import SAMPLE16_BYTES, UNIT_BYTES, UNIT_SAMPLES
from ..values.requests import AppendSound, ChooseModel, ClientMessage, Commit
from ..values.state import Course, ModelChosen, State
from ..values.transcript import Chunk
from ..values.utf8 import Refused
from ..wire.rates import to_float32
from .moving import Moving
from .unit_loop import Phase

_TOO_MANY_UTTERANCES: Final = f"{UTTERANCES_PENDING_MAX} utterances wait, and no more may"
SECOND_BYTES: Final = UNIT_SAMPLES * SAMPLE16_BYTES
"""Bytes in a second of PCM16."""


@attrs.define
class Utterance:
    """An utterance that is not answered yet.

    Attributes:
        index: 0, 1, 2... counts the session's utterances.
        sound: PCM16 that waits.
        is_begun: committed: it may be transcribed.
        is_final: all its sound has arrived.
        is_answered: the model failed at it, and its end was sent; or it was taken back.
        is_heard_out: the last chunk was the one that ends it.
        texts: the model's text, chunk by chunk.
    """

    index: int
    sound: bytearray = attrs.Factory(bytearray)
    is_begun: bool = False
    is_final: bool = False
    is_answered: bool = False
    chunks: int = 0
    is_heard_out: bool = False
    texts: list[str] = attrs.Factory(list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def is_void(self) -> bool:
        """Whether it was closed without sound, and its text is not requested yet."""
        return self.is_final and not self.is_begun and not self.sound

    @property
    def has_chunk(self) -> bool:
        """Whether the model can transcribe one of its chunks now."""
        if len(self.sound) >= SECOND_BYTES:
            return True
        is_silent = not self.sound and not self.chunks
        return self.is_final and not self.is_heard_out and not is_silent

    def take_chunk(self, seed: int) -> Chunk:
        """Take its next second; past its sound, the silence that ends it."""
        pcm16 = bytes(self.sound[:SECOND_BYTES])
        del self.sound[:SECOND_BYTES]
        self.is_heard_out = not pcm16
        chunk = Chunk(
            utterance=self.index,
            index=self.chunks,
            pcm=to_float32(pcm16).ljust(UNIT_BYTES, b"\0"),
            is_last=self.is_heard_out,
            seed=seed,
        )
        self.chunks += 1
        return chunk


@attrs.define(kw_only=True, eq=False)
class Transcription(Moving):
    """A transcription's state between events.

    Attributes:
        chunk: the chunk that is with the model.
        model: the last chosen one; empty before.
        pending: unanswered utterances, oldest first; the last may be open.
        utterances: number begun or appended to so far.
        waiting_bytes: waiting PCM16 of all utterances.
        owes_commit: the model failed at an utterance before it was closed: the commit that closes
            it is still to come, and requests the text of the sound since.
        active_ns: the last message of the client or answer of the model.
    """

    course = Course.TRANSCRIPTION
    has_opening = False
    goodbye_in = frozenset(State)  # it is an error

    model: str = ""
    pending: deque[Utterance] = attrs.Factory(deque)
    utterances: int = 0
    appends: int = 0
    chunks: int = 0
    waiting_bytes: int = 0
    active_ns: int = 0
    owes_commit: bool = False
    chunk: Chunk | None = None

    @property
    def hears_queue(self) -> bool:
        """Whether the client hears of the queue: 003 has no word for it."""
        return False

    # -- beginning ------------------------------------------------------------------------------

    def first_slot(self) -> None:
        """Greet the client, and set the time to choose a model."""
        self.create()
        self.active_ns = self.now_ns
        self.set_timer("init", self.opened.limits.init_wait_s)
        self.set_timer("idle", self.opened.limits.idle_s)

    def choose(self, message: ChooseModel) -> None:
        """Take a model's name; all allowed names mean the same model."""
        self.model = message.model
        self.cancel_timer("init")
        self.move(ModelChosen)

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse an unknown model, or sound for which there is no room."""
        match message:
            case ChooseModel(model=model) if model not in self.opened.limits.models:
                code = ErrorCode.MODEL_NOT_FOUND
                text = f"$.model: there is no model {model[:MODEL_CHARS_SHOWN]!r} here"
            case AppendSound(pcm16=sound) if self._has_no_room(sound):
                code, limit = ErrorCode.BUFFER_FULL, self.opened.limits.sound_bytes
                text = (
                    f"{self.waiting_bytes} bytes of sound wait, at most {limit} may: it is not kept"
                )
            case AppendSound() if self._is_full:
                code, text = ErrorCode.BUFFER_FULL, _TOO_MANY_UTTERANCES
            case _:
                return None
        return Refused(code=code, message=text, ignored=len(message.ignored))

    def _has_no_room(self, sound: bytes) -> bool:
        return self.waiting_bytes + len(sound) > self.opened.limits.sound_bytes

    def heard(self) -> None:
        """Note that the client is active."""
        super().heard()
        self.active_ns = self.now_ns

    def frame_refused(self, error: FrameError, code: ErrorCode) -> None:
        """Answer an unreadable frame, and go on (003)."""
        if error.close_code == CLOSE_TOO_BIG:
            super().frame_refused(error, code)
        else:
            self.complain(code, error.reason)

    def timed_out(self, name: ev.TimerName) -> None:
        """End the session: no model was chosen in time, or the client is silent."""
        if name == "idle":
            self._look_at_idle()
        elif name == "init":
            wait_s = self.opened.limits.init_wait_s
            text = f"the session is over: no model was chosen within {wait_s:g} s"
            self.end("timeout", told=text)
        else:
            super().timed_out(name)

    # -- in -------------------------------------------------------------------------------------

    def append_sound(self, message: AppendSound) -> None:
        """Keep sound for the open utterance, and transcribe if possible."""
        utterance = self.open_utterance()
        assert utterance is not None, "a sound without room for it is refused"
        self.appends += 1
        if not utterance.is_answered:
            utterance.sound += message.pcm16
            self.waiting_bytes += len(message.pcm16)
        self.go_on()

    def commit(self, message: Commit) -> None:
        """Close the open utterance, request the oldest one's text, or both."""
        begins, self.owes_commit = message.begins or self.owes_commit, False
        unasked = [utterance for utterance in self.pending if not utterance.is_begun]
        utterance = self.open_utterance() if message.final or not unasked else unasked[0]
        if utterance is None:
            return
        utterance.is_final = utterance.is_final or message.final
        if begins:
            utterance.is_begun = True
            for earlier in unasked if message.final else ():
                earlier.is_begun = True
        self.go_on()

    @property
    def _is_open(self) -> bool:
        """Whether the last utterance accepts sound; a void one is opened again."""
        last = self.pending[-1] if self.pending else None
        return last is not None and (not last.is_final or last.is_void)

    @property
    def _is_full(self) -> bool:
        return not self._is_open and len(self.pending) >= UTTERANCES_PENDING_MAX

    def open_utterance(self) -> Utterance | None:
        """Return the open utterance; None if too many wait, and the client is told."""
        if self._is_open:
            self.pending[-1].is_final = False
            return self.pending[-1]
        if self._is_full:
            self.complain(ErrorCode.BUFFER_FULL, _TOO_MANY_UTTERANCES)
            return None
        utterance = Utterance(index=self.utterances)
        self.utterances += 1
        self.pending.append(utterance)
        return utterance

    def _look_at_idle(self) -> None:
        """End a silent session; otherwise set its timer again, rather than with every frame."""
        if not self.call.is_idle:
            self.active_ns = self.now_ns
        idle_ns = self.opened.limits.idle_s * NS_PER_S
        if self.now_ns - self.active_ns >= idle_ns:
            self.end("idle")
        else:
            self.do(self.timers.set("idle", self.active_ns + idle_ns))

    # -- out ------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Utterances begun, their chunks, and appends."""
        own = {"utterances": self.utterances, "chunks": self.chunks}
        return {**own, **super().counts, "appends": self.appends}

    @property
    def is_busy(self) -> bool:
        """Whether an utterance waits to be answered."""
        return any(not utterance.is_answered for utterance in self.pending)

    def go_on(self) -> None:
        """Transcribe the oldest utterance as far as its sound goes, and answer what is done."""
        if self.move_if_due():
            return
        while self.pending and self.call.is_idle and not self.is_closed:
            utterance = self.pending[0]
            if utterance.is_begun and utterance.has_chunk:
                self._run(utterance)
            elif utterance.is_begun and utterance.is_final:
                self.pending.popleft()
                if not utterance.is_answered:
                    self._answer(utterance)
                self._end_if_due()
            else:
                return

    def _run(self, utterance: Utterance) -> None:
        waiting_bytes = len(utterance.sound)
        chunk = utterance.take_chunk(self.opened.seed)
        self.waiting_bytes -= waiting_bytes - len(utterance.sound)
        self._run_chunk(chunk)

    def _run_chunk(self, chunk: Chunk) -> None:
        assert self.lease is not None, "a transcription holds its slot to its end"
        self.chunk = chunk
        self.call.begin(chunk.index)
        self.do(ef.RunChunk(lease=self.lease, chunk=chunk))

    def past_s(self) -> int | None:
        """Return the seconds of the oldest utterance that the model was fed; None without any."""
        if not self.pending or self.pending[0].is_answered:
            return None
        return self.pending[0].chunks - (self.chunk is not None) or None

    def take_up(self) -> None:
        """Transcribe the second again that was lost, or the next one."""
        if self.chunk is not None:
            self._run_chunk(self.chunk)
        else:
            self.go_on()

    def chunk_done(self, event: ev.ChunkDone) -> None:
        """Send the model's text, and go on to the next chunk."""
        result = event.result
        utterance = self._settled(result.utterance, result.index)
        if utterance is None:
            return
        self.chunks += 1
        if utterance.is_answered:
            self.go_on()
            return
        utterance.texts.append(result.text)
        utterance.prompt_tokens += result.prompt_tokens
        utterance.completion_tokens += result.generated_tokens
        if result.text:
            self.say(TranscriptDelta(text=result.text))
        self.go_on()

    def chunk_failed(self, event: ev.ChunkFailed) -> None:
        """Answer the utterance with its text so far; the rest of its sound is discarded."""
        number, index = event.utterance, event.index
        utterance = self._settled(number, index)
        if utterance is None:
            return
        if utterance.is_answered:
            self.go_on()
            return
        if event.context_full:
            text = f"utterance {number} outgrew the model's context after {index} s"
            self.failed(utterance, ErrorCode.CONTEXT_FULL, text)
        else:
            text = f"the model failed at second {index} of utterance {number}"
            self.failed(utterance, ErrorCode.INFERENCE_ERROR, text)
        utterance.is_answered = utterance.is_heard_out = True
        self.owes_commit = not utterance.is_final
        utterance.is_final = True
        self.waiting_bytes -= len(utterance.sound)
        utterance.sound.clear()
        self._end_if_due()
        self.go_on()

    def failed(self, utterance: Utterance, code: ErrorCode, text: str) -> None:
        """Tell that the model failed at an utterance, with its text so far."""
        self.complain(code, text)
        self._answer(utterance)

    def _settled(self, number: int, index: int) -> Utterance | None:
        """Settle the call; None for another call, or one that is not awaited."""
        if not self.call.awaits(Phase.RUNNING, index) or self.pending[0].index != number:
            return None
        self.active_ns = self.now_ns
        self.chunk = None
        self.answered()
        return self.pending[0] if self.settle() else None

    def _answer(self, utterance: Utterance) -> None:
        self.say(
            TranscriptDone(
                text="".join(utterance.texts),
                prompt_tokens=utterance.prompt_tokens,
                completion_tokens=utterance.completion_tokens,
            )
        )

    def _end_if_due(self) -> None:
        if self.is_draining and not self.is_busy:
            self.end("server_shutdown")
