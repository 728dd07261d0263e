"""A transcription: sound in pieces of any size, cut into seconds, and the text of each as it comes.

appended -> committed -> chunk, chunk, ... -> answered

- Sound belongs to the utterance that is open: the one after the last that was closed. It is kept
  from the first append on, and heard once the utterance's text is asked for. Closing and asking may
  be one message or two, in either order; what is asked for first is the oldest.
- One chunk at a time is with the model, a second of the oldest utterance; the rest waits here,
  bounded in bytes. So cleanup knows what to wait for (B4), and utterances are answered in order.
- At the end of an utterance what is left is filled up with silence to a whole second, and a second
  of silence follows, for the words at the very end. One without any sound needs no model.
- An utterance that the model fails at, or that outgrows its context, is answered by an error and by
  what there is of its text, and is over: the rest of its sound is discarded, and what is appended
  from then on belongs to the next one, which the next commit begins, final or not.
- A client that is silent is let go (`idle`), but not while it waits for the model.

What was said is never taken back. Sound is cut here alone: how it was split into appends makes no
difference to what the model is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import numpy as np

from . import effects as ef
from .behaviour import COMMIT_BEGINS_ANEW, NO_MODEL_TOLD, TWO_SIGNALS
from .core import Core
from .errors import ErrorCode
from .limits import MODEL_CHARS_SHOWN, NS_PER_S, UTTERANCES_PENDING_MAX
from .messages import Created, TranscriptDelta, TranscriptDone
from .model import SAMPLE16_BYTES, UNIT_BYTES, UNIT_SAMPLES
from .requests import AppendSound, ChooseModel, Commit
from .state import ModelChosen
from .transcript import Chunk, ChunkResult
from .utf8 import Refused

_TOO_MANY_UTTERANCES: Final = f"{UTTERANCES_PENDING_MAX} utterances wait, and no more may"
SECOND_BYTES: Final = UNIT_SAMPLES * SAMPLE16_BYTES
"""Of a second of PCM16."""
PCM16_SCALE: Final = 32_768
"""From a 16-bit integer to [-1, 1): a power of two, so that every sample is exact."""
MS_PER_S: Final = 1_000


def to_float32(pcm16: bytes) -> bytes:
    """Turn signed 16-bit LE samples into float32 LE ones in [-1, 1), exactly."""
    samples = np.frombuffer(pcm16, dtype="<i2").astype("<f4") / np.float32(PCM16_SCALE)
    return samples.tobytes()


@attrs.define
class Utterance:
    """What is known of an utterance that is not answered yet.

    Attributes:
        index: which of the session's it is, from 0.
        sound: PCM16 that waits.
        is_begun: committed: it may be heard.
        is_final: all of its sound is here.
        is_answered: the model failed at it, and its end was told. In sessions without
            `COMMIT_BEGINS_ANEW` what is appended to it later is discarded.
        chunks: chunks given to the model so far.
        is_heard_out: the last of them was the one that ends it.
        texts: what the model wrote, chunk by chunk.
        prompt_tokens: fed so far.
        completion_tokens: generated so far.
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
        """Whether it was closed before any sound of it came, and nothing is asked of it yet."""
        return self.is_final and not self.is_begun and not self.sound

    @property
    def has_chunk(self) -> bool:
        """Whether the model can be given a chunk of it now."""
        if len(self.sound) >= SECOND_BYTES:
            return True
        is_silent = not self.sound and not self.chunks
        return self.is_final and not self.is_heard_out and not is_silent

    def take_chunk(self, seed: int) -> Chunk:
        """Take its next second out; past its sound, the silence that ends it."""
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


@attrs.define
class Transcription:
    """What a transcription remembers between events.

    Attributes:
        core: the session's state and voice.
        model: as it was chosen last; empty before.
        pending: utterances that are not answered yet, oldest first; the last may be open.
        utterances: utterances begun or appended to so far.
        appends: appends taken so far.
        chunks: chunks that the model has heard.
        waiting_bytes: PCM16 that waits, of all utterances.
        owes_commit: the model failed at an utterance before it was closed: the commit that closes
            it is still to come, and has heard what came since.
        active_ns: when the client last said something, or the model answered it.
    """

    core: Core = attrs.field(eq=False)
    model: str = ""
    pending: deque[Utterance] = attrs.Factory(deque)
    utterances: int = 0
    appends: int = 0
    chunks: int = 0
    waiting_bytes: int = 0
    active_ns: int = 0
    owes_commit: bool = False

    # -- beginning ------------------------------------------------------------------------------

    def greet(self) -> None:
        """A slot is there: the client is told, and has so long to choose a model."""
        core = self.core
        created_s = core.opened.created_ms // MS_PER_S
        core.say(
            Created(
                session_id=core.session_id,
                prompt_length=0,
                recording=core.recording,
                recording_id=core.recording_id,
                recording_notice=core.recording_notice,
                created_s=created_s,
            )
        )
        self.active_ns = core.now_ns
        core.set_timer("init", core.opened.limits.init_wait_s)
        core.set_timer("idle", core.opened.limits.idle_s)

    def choose(self, message: ChooseModel) -> None:
        """Take a model by its name, which is the one there is, or refuse the name."""
        core = self.core
        refused = self.choice_refused(message)
        if refused is not None:
            core.turn_down(refused)
            return
        core.fields_ignored += len(message.ignored)
        if not message.record:
            core.forget_recording()
        self.model = message.model
        core.cancel_timer("init")
        core.move(ModelChosen)

    @property
    def refused(self) -> Mapping[type, Callable[[Any], Refused | None]]:
        """Say by its class how a message is refused."""
        return {ChooseModel: self.choice_refused, AppendSound: self.sound_refused}

    def choice_refused(self, message: ChooseModel) -> Refused | None:
        """Say how the choice of a model is refused; None: it is there."""
        if message.model in self.core.opened.limits.models:
            return None
        name = message.model[:MODEL_CHARS_SHOWN]
        text = f"$.model: there is no model {name!r} here"
        code, ignored = ErrorCode.MODEL_NOT_FOUND, len(message.ignored)
        return Refused(code=code, message=text, ignored=ignored)

    def has_waited(self, *, for_model: bool) -> None:
        """A timer fired: the client chose no model in time, or may be silent."""
        if not for_model:
            self._look_at_idle()
            return
        wait_s = self.core.opened.limits.init_wait_s
        told = f"the session is over: no model was chosen within {wait_s:g} s"
        self.core.end("timeout", told=told if self.core.behaves(NO_MODEL_TOLD) else None)

    # -- in -------------------------------------------------------------------------------------

    def append(self, message: AppendSound) -> None:
        """Keep sound for the utterance that is open, and have heard what may be."""
        refused = self.sound_refused(message)
        if refused is not None:
            self.core.turn_down(refused)
            return
        self.core.fields_ignored += len(message.ignored)
        utterance = self._open_utterance()
        assert utterance is not None, "a sound without room for it is refused"
        self.appends += 1
        if not utterance.is_answered:
            utterance.sound += message.pcm16
            self.waiting_bytes += len(message.pcm16)
        self._go_on()

    def sound_refused(self, message: AppendSound) -> Refused | None:
        """Say how sound is refused; None: there is room for it."""
        limit = self.core.opened.limits.sound_bytes
        if self.waiting_bytes + len(message.pcm16) > limit:
            text = f"{self.waiting_bytes} bytes of sound wait, at most {limit} may: it is not kept"
        elif self._is_full:
            text = _TOO_MANY_UTTERANCES
        else:
            return None
        code, ignored = ErrorCode.BUFFER_FULL, len(message.ignored)
        return Refused(code=code, message=text, ignored=ignored)

    def commit(self, message: Commit) -> None:
        """Close the open utterance, have the oldest heard that waits for that, or both."""
        self.core.fields_ignored += len(message.ignored)
        begins, self.owes_commit = message.begins or self.owes_commit, False
        unasked = [utterance for utterance in self.pending if not utterance.is_begun]
        utterance = self._open_utterance() if message.final or not unasked else unasked[0]
        if utterance is None:
            return
        utterance.is_final = utterance.is_final or message.final
        if begins:
            utterance.is_begun = True
            for earlier in unasked if message.final else ():
                earlier.is_begun = True
        self._go_on()

    @property
    def _is_open(self) -> bool:
        """Whether the last utterance is spoken still; one that is void is spoken again."""
        last = self.pending[-1] if self.pending else None
        return last is not None and (not last.is_final or last.is_void)

    @property
    def _is_full(self) -> bool:
        """Whether no further utterance may begin, and none is open."""
        return not self._is_open and len(self.pending) >= UTTERANCES_PENDING_MAX

    def _open_utterance(self) -> Utterance | None:
        """The utterance that is spoken now; None where too many wait, and the client is told."""
        if self._is_open:
            self.pending[-1].is_final = False
            return self.pending[-1]
        if self._is_full:
            self.core.complain(ErrorCode.BUFFER_FULL, _TOO_MANY_UTTERANCES)
            return None
        utterance = Utterance(index=self.utterances)
        self.utterances += 1
        self.pending.append(utterance)
        return utterance

    def heard(self) -> None:
        """The client said something, whatever it was."""
        self.active_ns = self.core.now_ns

    def _look_at_idle(self) -> None:
        """End a silent session; for one that is not, set its timer anew.

        So it is set once in a while, and not with every frame.
        """
        core = self.core
        if core.running_chunk is not None:
            self.active_ns = core.now_ns
        idle_ns = core.opened.limits.idle_s * NS_PER_S
        if core.now_ns - self.active_ns >= idle_ns:
            core.end("idle")
        else:
            core.do(core.timers.set("idle", self.active_ns + idle_ns))

    # -- out ------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[str, int]:
        """Utterances begun, and chunks heard of them."""
        return {"utterances": self.utterances, "chunks": self.chunks}

    @property
    def is_busy(self) -> bool:
        """Something waits to be answered."""
        return any(not utterance.is_answered for utterance in self.pending)

    def _go_on(self) -> None:
        """Give the model its next chunk, and answer what needs no more of it."""
        core = self.core
        while self.pending and core.running_chunk is None and not core.is_closed:
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
        core = self.core
        assert core.lease is not None, "a transcription holds its slot to its end"
        waiting_bytes = len(utterance.sound)
        chunk = utterance.take_chunk(core.opened.seed)
        self.waiting_bytes -= waiting_bytes - len(utterance.sound)
        core.running_chunk = (chunk.utterance, chunk.index)
        core.do(ef.RunChunk(lease=core.lease, chunk=chunk))

    def chunk_done(self, result: ChunkResult) -> None:
        """Tell what the model wrote, and go on to the next chunk."""
        utterance = self._settle(result.utterance, result.index)
        if utterance is None:
            return
        self.chunks += 1
        utterance.texts.append(result.text)
        utterance.prompt_tokens += result.prompt_tokens
        utterance.completion_tokens += result.generated_tokens
        if result.text:
            self.core.say(TranscriptDelta(text=result.text))
        self._go_on()

    def chunk_failed(self, number: int, index: int, *, context_full: bool) -> None:
        """Answer the utterance with what there is of it; the rest of its sound is discarded."""
        utterance = self._settle(number, index)
        if utterance is None:
            return
        if context_full:
            text = f"utterance {number} outgrew the model's context after {index} s"
            self.core.complain(ErrorCode.CONTEXT_FULL, text)
        else:
            text = f"the model failed at second {index} of utterance {number}"
            self.core.complain(ErrorCode.INFERENCE_ERROR, text)
        self._answer(utterance)
        utterance.is_answered = utterance.is_heard_out = True
        self.owes_commit = not utterance.is_final and self.core.behaves(TWO_SIGNALS)
        utterance.is_final = utterance.is_final or self.core.behaves(COMMIT_BEGINS_ANEW)
        self.waiting_bytes -= len(utterance.sound)
        utterance.sound.clear()
        self._end_if_due()
        self._go_on()

    def _settle(self, number: int, index: int) -> Utterance | None:
        """The call under way is over; None where it is another, or nobody waits for it any more."""
        core = self.core
        if core.running_chunk != (number, index):
            return None
        core.running_chunk = None
        self.active_ns = core.now_ns
        if core.is_closed:
            core.release()
            return None
        return self.pending[0]

    def backend_lost(self) -> None:
        """The model is gone, and the session with it."""
        self.core.running_chunk = None
        if self.core.is_closed:
            self.core.release()
        else:
            self.core.end("backend_error")

    def _answer(self, utterance: Utterance) -> None:
        self.core.say(
            TranscriptDone(
                text="".join(utterance.texts),
                prompt_tokens=utterance.prompt_tokens,
                completion_tokens=utterance.completion_tokens,
            )
        )

    def _end_if_due(self) -> None:
        """Where the server goes away, go once all is answered."""
        if self.core.is_draining and not self.is_busy:
            self.core.end("server_shutdown")
