"""A chat answer in progress: token by token, and spoken on request.

A run emits each token's text at once, and speech second by second after its text; the flushed end
of the speech is part of the result. A cut stops before a token, or after the last. A cut within
speech discards unemitted speech and counts as before the next token: slot and result are as if it
had been cut there before speaking.

Where the turn offers tools, tokens that may belong to a call wait with their text: those of a call
are neither text nor spoken.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
from torch import Tensor

from protocol.values.model import Costs, StopReason, Turn, TurnChunk, TurnResult

from ..tool_calls import CallStream
from .candidates import Candidates
from .chat_text import TextStream
from .chat_voice import TEXT_A_CHUNK, Mouth
from .decide import decide_chat
from .machine import Machine
from .sampling import draws
from .tokens import Tokens
from .work import Fed, Feed, Steps

Emit = Callable[[TurnChunk], None]


@attrs.define(kw_only=True)
class Answer:
    """A chat answer in progress.

    Attributes:
        length: tokens in the slot.
        stop: asked before each token and after the last; True cuts there.
        mouth: the speaker, which checks for cuts in speech itself; None: text only.
        generated: ids so far, without the ending.
        told: number of these ids in pieces.
        chunks: pieces so far.
        thinks: the ids are thoughts, which are not spoken.
        said: the text of all pieces.
        calls: tells calls apart from text; None without tools.
        held: ids that may belong to a call, with their hidden states.
    """

    machine: Machine
    tokens: Tokens
    turn: Turn
    slot: int
    length: int
    stop: Callable[[int], bool]
    emit: Emit
    mouth: Mouth | None
    generated: list[int] = attrs.field(factory=list)
    told: int = 0
    chunks: int = 0
    thinks: bool = False
    said: str = ""
    calls: CallStream | None = None
    held: list[tuple[int, Tensor]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.calls = CallStream(self.turn.tools) if self.turn.tools else None

    def run(self, first: Fed) -> Steps[TurnResult]:
        """Answer to the end or the cut, from the output of the prefill's last row."""
        began = time.perf_counter_ns()
        first.logits.whole()  # On the device they would keep the batch's memory.
        config, limit = self.turn.config, self.machine.config.context_limit
        numbers = draws(self.turn.seed, self.turn.index, "chat", config.max_new_tokens)
        stream, fed, waiting = TextStream(self.tokens), first, list[tuple[int, Tensor]]()
        reason: StopReason = "length"
        cut, ended = None, 0
        for step, number in enumerate(numbers):
            if self.length == limit:
                break
            if self.stop(step):
                cut = step
                break
            token = self._decide(fed, float(number))
            if token in self.tokens.endings:
                reason, ended = "turn_end", 1
                break
            is_said = yield from self._speak_chunks(waiting)
            if not is_said:
                cut = step
                break
            self.generated.append(token)
            ends = self._write(stream.add(token))
            fed = yield from self._feed(token)
            if self.is_spoken(token):
                self.held.append((token, fed.hidden))
            waiting += self._released(ends=ends)
        flushed: list[tuple[bytes, tuple[int, ...]]] = []
        if cut is None:
            waiting += self._end(stream)
            if self.mouth is not None and (waiting or self.mouth.codes):
                step = len(self.generated) + ended
                if self.stop(step) or not (yield from self._last_words(waiting, flushed)):
                    cut = step
                    flushed.clear()
        pcm, codes = flushed[-1] if flushed else (b"", ())
        calls = () if self.calls is None else tuple(self.calls.calls)
        if calls and reason == "turn_end":
            reason = "tool_calls"
        return self._result(
            TurnResult(
                index=self.turn.index,
                text=self.said,
                pcm=pcm,
                reason=reason if cut is None else "interrupted",
                generated_tokens=len(self.generated) + ended,
                kv_length=self.length,
                codec_ids=codes,
                cut=cut,
                calls=calls,
            ),
            first,
            began,
        )

    def _decide(self, fed: Fed, number: float) -> int:
        config, spoken = self.turn.config, self.turn.speech is not None

        def rule(logits: Candidates) -> int:
            return decide_chat(
                logits,
                self.generated,
                number,
                config,
                self.tokens,
                spoken=spoken,
                calls=self.calls is not None,
            )

        return fed.logits.settle(rule)

    def _feed(self, token: int) -> Steps[Fed]:
        rows = self.machine.parts.embed((token,))
        fed: Fed = yield Feed(slot=self.slot, start=self.length, rows=rows)
        self.length += 1
        return fed

    def is_spoken(self, token: int) -> bool:
        """Track the thinking marks; return whether the id is spoken: thoughts and marks are not."""
        was, chat = self.thinks, self.tokens.chat
        if token == chat.think:
            self.thinks = True
        elif token == chat.think_end:
            self.thinks = False
        return not (was or self.thinks)

    def _last_words(
        self, waiting: list[tuple[int, Tensor]], flushed: list[tuple[bytes, tuple[int, ...]]]
    ) -> Steps[bool]:
        """Speak the rest; its end is kept in `flushed`, all before is emitted."""
        assert self.mouth is not None

        def tell(pcm: bytes, codes: tuple[int, ...]) -> None:
            if flushed:
                self._speech(*flushed.pop())
            flushed.append((pcm, codes))

        return (yield from self.mouth.say(waiting, tell, last=True))

    def _speak_chunks(self, waiting: list[tuple[int, Tensor]]) -> Steps[bool]:
        """Speak the first tokens that wait, ten at a time, and remove them; False: cut."""
        while self.mouth is not None and len(waiting) >= TEXT_A_CHUNK:
            chunk, waiting[:] = waiting[:TEXT_A_CHUNK], waiting[TEXT_A_CHUNK:]
            is_said = yield from self.mouth.say(chunk, self._speech, last=False)
            if not is_said:
                return False
        return True

    def _write(self, text: str) -> bool:
        """Emit text as far as it belongs to no call; whether a call ended with it."""
        if self.calls is None:
            self._tell(text)
            return False
        before = self.calls.ends
        certain, ends = self.calls.add(text), self.calls.ends > before
        if certain or ends:
            self._tell(certain, always=True)
        return ends

    def _released(self, *, ends: bool) -> list[tuple[int, Tensor]]:
        """Take the ids that are to be spoken from those held; those of a call never are."""
        if self.calls is not None and self.calls.is_holding:
            return []
        held, self.held = self.held, []
        return [] if ends else held

    def _end(self, stream: TextStream) -> list[tuple[int, Tensor]]:
        """Emit the text held back, and take its ids; those of an unfinished call are not spoken."""
        self._write(stream.end())
        if self.calls is None:
            return []
        if self.calls.is_open:
            self.held.clear()
        self._tell(self.calls.end())
        return self._released(ends=False)

    def _tell(self, text: str, *, always: bool = False) -> None:
        if text or always:
            self.said += text
            self._piece(text=text)

    def _speech(self, pcm: bytes, codes: tuple[int, ...]) -> None:
        self._piece(pcm=pcm, codec_ids=codes)

    def _piece(self, *, text: str = "", pcm: bytes = b"", codec_ids: tuple[int, ...] = ()) -> None:
        ids, self.told = tuple(self.generated[self.told :]), len(self.generated)
        piece = TurnChunk(
            index=self.turn.index,
            step=self.chunks,
            text=text,
            pcm=pcm,
            token_ids=ids,
            codec_ids=codec_ids,
        )
        self.chunks += 1
        self.emit(piece)

    def _result(self, result: TurnResult, first: Fed, began: int) -> TurnResult:
        trace, mouth = first.logits.trace().result(), self.mouth
        wall = (time.perf_counter_ns() - began) // 1000
        tts = 0 if mouth is None else mouth.tts_ns // 1000
        vocoder = 0 if mouth is None else mouth.vocoder_ns // 1000
        return attrs.evolve(
            result,
            logits_hash=trace.digest,
            margin=trace.margin,
            costs=Costs(
                generate_us=wall,
                llm_us=wall - tts - vocoder,
                tts_us=tts,
                token2wav_us=vocoder,
                wall_us=wall,
            ),
        )
