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
- A silent client's session ends (`idle`), but not while it waits for the model; what it has said
  until then, or until its time is over, is answered before.

Sent text is never taken back. Sound is cut only here: its split into appends changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar, Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.behaviour import ENDS_SPEECH, FORGETS_LOST
from ..values.errors import ErrorCode
from ..values.frames import Refused
from ..values.limits import LAST_WORDS_S, MODEL_CHARS_SHOWN, NS_PER_S, UTTERANCES_PENDING_MAX
from ..values.messages import EndReason, TranscriptDelta, TranscriptDone
from ..values.model import SAMPLE16_BYTES, UNIT_BYTES, UNIT_SAMPLES, Chunk
from ..values.requests import AppendSound, ChooseModel, ClientMessage, Commit
from ..values.state import ModelChosen, SessionKind, State
from ..wire.audio import to_float32
from .core import Call, Peer, Phase, Step, Timers
from .kind import Handlers, Kind, Migration, Slot

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
        is_transcribed: the last chunk was the one that ends it.
        texts: the model's text, chunk by chunk.
    """

    index: int
    sound: bytearray = attrs.Factory(bytearray)
    is_begun: bool = False
    is_final: bool = False
    is_answered: bool = False
    chunks: int = 0
    is_transcribed: bool = False
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
        return self.is_final and not self.is_transcribed and not is_silent

    def take_chunk(self, seed: int) -> Chunk:
        """Take its next second; past its sound, the silence that ends it."""
        pcm16 = bytes(self.sound[:SECOND_BYTES])
        del self.sound[:SECOND_BYTES]
        self.is_transcribed = not pcm16
        chunk = Chunk(
            utterance=self.index,
            index=self.chunks,
            pcm=to_float32(pcm16).ljust(UNIT_BYTES, b"\0"),
            is_last=self.is_transcribed,
            seed=seed,
        )
        self.chunks += 1
        return chunk


@attrs.define(eq=False)
class ChunkLoop:
    """The utterances of a session, and their chunks.

    Attributes:
        chunk: the chunk that is with the model.
        ending: the session ends so when what was heard is answered.
        pending: unanswered utterances, oldest first; the last may be open.
        utterances: number begun or appended to so far.
        waiting_bytes: waiting PCM16 of all utterances.
        owes_commit: the model failed at an utterance before it was closed: the commit that closes
            it is still to come, and requests the text of the sound since.
    """

    step: Step
    timers: Timers
    peer: Peer
    slot: Slot
    call: Call
    migration: Migration
    kind: ChunkKind
    pending: deque[Utterance] = attrs.Factory(deque)
    utterances: int = 0
    appends: int = 0
    chunks: int = 0
    waiting_bytes: int = 0
    owes_commit: bool = False
    chunk: Chunk | None = None
    ending: EndReason | None = None

    def __attrs_post_init__(self) -> None:
        self.migration.work = self

    @property
    def counts(self) -> dict[str, int]:
        """Utterances begun, their chunks, and appends."""
        own = {"utterances": self.utterances, "chunks": self.chunks}
        return {**own, "units": 0, "units_dropped": 0, "appends": self.appends}

    @property
    def units_waiting(self) -> int:
        """None: a chunk is not a unit."""
        return 0

    @property
    def is_busy(self) -> bool:
        """Whether an utterance waits to be answered."""
        return any(not utterance.is_answered for utterance in self.pending)

    def cut(self) -> None:
        """Let the chunk in progress end: it is not cut."""

    def check_idle(self) -> None:
        """End a silent session; otherwise set its timer again, rather than with every frame."""
        if not self.call.is_idle:
            self.peer.active_ns = self.step.now_ns
        idle_ns = self.step.limits.idle_s * NS_PER_S
        if self.step.now_ns - self.peer.active_ns >= idle_ns:
            self.end_after("idle")
        else:
            self.timers.set_at("idle", self.peer.active_ns + idle_ns)

    def end_after(self, reason: EndReason) -> None:
        """End the session when what was heard is answered, or after a while."""
        can_answer = self.step.behaves(ENDS_SPEECH) and self.peer.is_active
        if self.ending is not None or not can_answer or not self.is_busy:
            self.kind.end(self.ending or reason)
            return
        self.ending = reason
        self.timers.cancel("session")
        self.timers.set("session", LAST_WORDS_S)
        self.kind.close_utterance()

    # -- in -------------------------------------------------------------------------------------

    def append(self, pcm16: bytes) -> None:
        """Keep sound for the open utterance, and transcribe if possible."""
        utterance = self.open_utterance()
        assert utterance is not None, "a sound without room for it is refused"
        if not utterance.is_answered:
            utterance.sound += pcm16
            self.waiting_bytes += len(pcm16)
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
    def is_full(self) -> bool:
        """Whether there is no open utterance, and room for none."""
        return not self._is_open and len(self.pending) >= UTTERANCES_PENDING_MAX

    def open_utterance(self) -> Utterance | None:
        """Return the open utterance; None if too many wait, and the client is told."""
        if self._is_open:
            self.pending[-1].is_final = False
            return self.pending[-1]
        if self.is_full:
            self.peer.send_error(ErrorCode.BUFFER_FULL, _TOO_MANY_UTTERANCES)
            return None
        utterance = Utterance(index=self.utterances)
        self.utterances += 1
        self.pending.append(utterance)
        return utterance

    # -- out ------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Transcribe the oldest utterance as far as its sound goes, and answer what is done."""
        if self.migration.move_if_due():
            return
        while self.pending and self.call.is_idle and not self.peer.is_closed:
            utterance = self.pending[0]
            if utterance.is_begun and utterance.has_chunk:
                self._run(utterance)
            elif utterance.is_begun and utterance.is_final:
                self.pending.popleft()
                if not utterance.is_answered:
                    self.kind.send_answer(utterance)
                self._end_if_due()
            else:
                return

    def _run(self, utterance: Utterance) -> None:
        waiting_bytes = len(utterance.sound)
        chunk = utterance.take_chunk(self.step.opened.seed)
        self.waiting_bytes -= waiting_bytes - len(utterance.sound)
        self._run_chunk(chunk)

    def _run_chunk(self, chunk: Chunk) -> None:
        assert self.slot.lease is not None, "a transcription holds its slot to its end"
        self.chunk = chunk
        self.call.begin(chunk.index)
        self.step.do(ef.RunChunk(lease=self.slot.lease, chunk=chunk))

    def past_s(self) -> int | None:
        """Return the seconds of the oldest utterance that the model was fed; None without any."""
        if not self.pending or self.pending[0].is_answered:
            return None
        return self.pending[0].chunks - (self.chunk is not None) or None

    def leaving(self) -> None:
        """Keep what waits, as usual."""

    def resume_work(self) -> None:
        """Transcribe the second again that was lost, or the next one.

        That of an utterance that was taken back is not: the model was not brought to its past.
        """
        chunk, self.chunk = self.chunk, None
        if chunk is None or (self.step.behaves(FORGETS_LOST) and self.pending[0].is_answered):
            self.go_on()
        else:
            self._run_chunk(chunk)

    def chunk_done(self, event: ev.ChunkDone) -> None:
        """Send the model's text, and go on to the next chunk."""
        result = event.result
        utterance = self._settled(result.utterance, result.index)
        if utterance is None:
            return
        self.chunks += 1
        if not utterance.is_answered:
            utterance.texts.append(result.text)
            utterance.prompt_tokens += result.prompt_tokens
            utterance.completion_tokens += result.generated_tokens
            if result.text:
                self.kind.send_text(result.text)
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
            self.kind.send_failure(utterance, ErrorCode.CONTEXT_FULL, text)
        else:
            text = f"the model failed at second {index} of utterance {number}"
            self.kind.send_failure(utterance, ErrorCode.INFERENCE_ERROR, text)
        utterance.is_answered = utterance.is_transcribed = True
        self.owes_commit = not utterance.is_final
        utterance.is_final = True
        self.waiting_bytes -= len(utterance.sound)
        utterance.sound.clear()
        self._end_if_due()
        self.go_on()

    def _settled(self, number: int, index: int) -> Utterance | None:
        """Settle the call; None for another call, or one that is not awaited."""
        if not self.call.awaits(Phase.RUNNING, index) or self.pending[0].index != number:
            return None
        self.peer.active_ns = self.step.now_ns
        self.chunk = None
        self.migration.answered()
        return self.pending[0] if self.slot.settle() else None

    def _end_if_due(self) -> None:
        if (self.kind.is_draining or self.ending) and not self.is_busy:
            self.kind.end(self.ending or "server_shutdown")


CHUNK_HANDLERS: Final[Handlers] = {
    ev.ChunkDone: attrgetter("loop.chunk_done"),
    ev.ChunkFailed: attrgetter("loop.chunk_failed"),
    ev.LeaseRevoked: attrgetter("loop.migration.lease_revoked"),
    ev.Rebuilt: attrgetter("loop.migration.rebuilt"),
    ev.RebuildFailed: attrgetter("loop.migration.rebuild_failed"),
}
"""The events of every kind with these parts."""


@attrs.define(eq=False)
class ChunkKind(Kind):
    """A kind that transcribes."""

    session_kind = SessionKind.TRANSCRIPTION
    has_opening = False
    answers_unreadable = True

    loop: ChunkLoop = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        step, timers, peer, slot = self.step, self.timers, self.peer, self.slot
        migration = Migration(step, timers, peer, self.recording, slot, slot.call, self)
        migration.has_queue_messages = self.has_own_time
        self.loop = ChunkLoop(step, timers, peer, slot, slot.call, migration, self)
        self.slot_user = migration

    def send_text(self, text: str) -> None:
        """Send the text of a chunk."""
        raise NotImplementedError

    def send_answer(self, utterance: Utterance) -> None:
        """Send the whole text of an utterance."""
        raise NotImplementedError

    def send_failure(self, utterance: Utterance, code: ErrorCode, text: str) -> None:
        """Tell that the model failed at an utterance."""
        raise NotImplementedError

    def close_utterance(self) -> None:
        """Close the utterance that is open."""
        raise NotImplementedError


@attrs.define(eq=False)
class Transcription(ChunkKind):
    """A session of 003. `model` is the last one chosen, or the server's; empty before."""

    closed_in = frozenset(State)  # it is an error
    handlers: ClassVar[Handlers] = {
        **CHUNK_HANDLERS,
        ChooseModel: attrgetter("choose"),
        AppendSound: attrgetter("append_sound"),
        Commit: attrgetter("commit"),
    }

    model: str = ""

    def first_slot(self) -> None:
        """Greet the client, and set the time to choose a model."""
        self.peer.send_created(prompt_length=0)
        self.peer.active_ns = self.step.now_ns
        self.timers.set("init", self.step.limits.init_wait_s)
        self.timers.set("idle", self.step.limits.idle_s)

    def choose(self, message: ChooseModel) -> None:
        """Take a model's name; all allowed names mean the same model."""
        self.model = message.model
        self.timers.cancel("init")
        self.peer.move(ModelChosen)

    def commit(self, message: Commit) -> None:
        """Take a commit; without a choice before it, the server's model is meant."""
        if not self.model:
            self.choose(ChooseModel(model=self.step.limits.models[0]))
        self.loop.commit(message)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an unknown model, or sound for which there is no room."""
        limits, waiting_bytes = self.step.limits, self.loop.waiting_bytes
        match message:
            case Commit() if not self.model and not limits.models:
                code, text = ErrorCode.MODEL_NOT_VALIDATED, "this server names no model"
            case ChooseModel(model=model) if model not in limits.models:
                code = ErrorCode.MODEL_NOT_FOUND
                text = f"$.model: there is no model {model[:MODEL_CHARS_SHOWN]!r} here"
            case AppendSound(pcm16=sound) if waiting_bytes + len(sound) > limits.sound_bytes:
                code, most = ErrorCode.BUFFER_FULL, limits.sound_bytes
                text = f"{waiting_bytes} bytes of sound wait, at most {most} may: it is not kept"
            case AppendSound() if self.loop.is_full:
                code, text = ErrorCode.BUFFER_FULL, _TOO_MANY_UTTERANCES
            case _:
                return None
        return Refused(code=code, message=text, ignored=len(message.ignored))

    def timed_out(self, name: ev.TimerName) -> None:
        """End the session: no model was chosen in time, or the client is silent."""
        if name == "idle":
            self.loop.check_idle()
        elif name == "session":
            self.loop.end_after("timeout")
        elif name == "init":
            wait_s = self.step.limits.init_wait_s
            text = f"the session is over: no model was chosen within {wait_s:g} s"
            self.end("timeout", error_text=text)
        else:
            super().timed_out(name)

    def close_utterance(self) -> None:
        """Close the utterance that is open, and have all that was heard answered."""
        if not self.loop.pending[-1].is_final:
            self.loop.commit(Commit(final=True))

    def append_sound(self, message: AppendSound) -> None:
        """Keep sound for the open utterance, and transcribe if possible."""
        self.loop.appends += 1
        self.loop.append(message.pcm16)

    def room_bytes(self) -> int:
        """Return the room in the open utterance, if it is the only one, or the model is at work."""
        loop = self.loop
        if not loop.pending or loop.migration.is_revoked or self.peer.is_asleep:
            return 0
        last, left = loop.pending[-1], self.step.limits.sound_bytes - loop.waiting_bytes
        if last.is_final or last.is_answered:
            return 0
        if not loop.call.is_idle:
            return left
        return min(left, SECOND_BYTES - 1 - len(last.sound)) if len(loop.pending) == 1 else 0

    def keep(self, messages: Sequence[AppendSound]) -> None:
        """Keep sound for the open utterance."""
        self.loop.appends += len(messages)
        pcm16 = b"".join([message.pcm16 for message in messages])
        self.loop.pending[-1].sound += pcm16
        self.loop.waiting_bytes += len(pcm16)

    def send_text(self, text: str) -> None:
        """Send the text of a chunk."""
        self.peer.send(TranscriptDelta(text=text))

    def send_answer(self, utterance: Utterance) -> None:
        """Send the whole text of an utterance."""
        self.peer.send(
            TranscriptDone(
                text="".join(utterance.texts),
                prompt_tokens=utterance.prompt_tokens,
                completion_tokens=utterance.completion_tokens,
            )
        )

    def send_failure(self, utterance: Utterance, code: ErrorCode, text: str) -> None:
        """Tell that the model failed at an utterance, with its text so far."""
        self.send_error(code, text)
        self.send_answer(utterance)
