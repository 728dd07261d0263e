"""One chat turn in a slot: prefill the whole conversation, answer, wipe the slot.

Prefill and answer are generators of requests (`work.py`). Pictures are encoded one by one before
the prefill, so a long video is never decoded in memory at once. Nothing is computed before the
conversation is known to fit, with room for one token. An answer ends with one of the tokenizer's
endings, at `max_new_tokens`, or at the context's end.

A run emits each token's text at once, and speech second by second after its text; the flushed end
of the speech is part of the result. Where the turn offers tools, tokens that may belong to a call
wait with their text: those of a call are neither text nor spoken.

`interrupt` may come from any thread. Before the answer it fails the turn at the next picture, sound
or block. The answer stops before its next token, or after the last; the result says where, and
`cut` stops there again. A cut within speech discards unemitted speech and counts as before the next
token: slot and result are as if it had been cut there before speaking. A failed turn leaves the
slot empty.

*Its speech*: ten text tokens are spoken at a time: their conditions, `text_eos` after the answer's
last, `audio_bos`, then codes until speech ends or `CODES_MAX` are drawn. When the speech decoder's
slot would overflow, it restarts. Each 25 codes give a second of sound (`VocoderBuffer`), the first
ones as many as the vocoder says; the rest is flushed after the last text. A cut, checked before
each code and vocoder portion, ends it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import attrs
import numpy as np
import torch
from torch import Tensor

from protocol.values import model as md

from ..base import BackendError, ContextFull
from ..tool_calls import CallStream
from .audio import samples_of
from .chat_prompt import Clip, Prompt, Slice, Words, lay_out
from .checkpoint import CODES_A_UNIT, Parts
from .logits import CodeLogits
from .runner import InSlot, ModelRunner
from .sampling import Candidates, decide_chat, decide_chat_code, draws
from .state import EMBEDDED, feed_blocks
from .tokens import TextStream, Tokens
from .vision import Slicing, read_jpeg
from .vocoder import LOOKAHEAD, Prepare, Vocoder, VocoderBuffer
from .work import EncodeImage, EncodeReference, Feed, LlmOutput, Speak, Steps


def turn_hash(turn: md.Turn) -> str:
    """Blake2b-128 of all model input: tools, messages, media, voice and flags."""
    digest = hashlib.blake2b(digest_size=16)

    def add(kind: str, data: bytes) -> None:
        digest.update(f"{kind} {len(data)} ".encode() + data)

    flags = f"{turn.max_slice_nums} {turn.use_image_id:d} {turn.omni:d} {turn.thinking:d}"
    add("flags", flags.encode())
    if turn.speech is not None:
        add("speech", f"{turn.speech.mode} {turn.speech.language}".encode())
        add("voice", turn.speech.voice_pcm)
    for tool in turn.tools:
        for text in (tool.name, tool.description, tool.parameters):
            add("tool", text.encode())
    for message in turn.messages:
        add(message.role, b"")
        for part in message.content:
            match part:
                case md.Text(text=text):
                    add("text", text.encode())
                case md.Picture(jpeg=jpeg):
                    add("picture", jpeg)
                case md.Sound(pcm=pcm):
                    add("sound", pcm)
                case md.ToolCall(name=name, arguments=arguments):
                    add("call", name.encode())
                    add("arguments", arguments.encode())
                case md.ToolResult(output=output):
                    add("result", output.encode())
    return digest.hexdigest()


class ChatTurn(InSlot):
    """One turn in one slot, which must be empty; its calls never overlap."""

    kind: ClassVar[str] = "turn"

    def __init__(self, runner: ModelRunner, tokens: Tokens, slot: int) -> None:
        super().__init__(runner, tokens, slot, "new")
        self._turn: md.Turn
        self._name = "a turn"
        self._prompt: Prompt
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._first: LlmOutput
        self._voice: object = None
        self._length = 0
        self._began_ns = 0

    def measure(self, turn: md.Turn) -> int:
        """Lay a turn out without computing, and count its pictures; safe from any thread.

        `ContextFull`: it does not fit, with room for one token; `BackendError`: a picture is not a
        JPEG file, the voice's sound is malformed, or the call is out of order.
        """
        self._require("new")
        self._began_ns = time.perf_counter_ns()
        self._turn, self._name = turn, f"turn {turn.index}"
        config = self._runner.config
        self._prompt = lay_out(config, self._tokens, turn)
        if self._prompt.length + 1 > config.context_limit:
            raise ContextFull(
                f"{self._name} has {self._prompt.length} tokens, "
                f"more than {config.context_limit - 1}"
            )
        speech, vocoder = turn.speech, self._runner.vocoder
        if speech is not None and vocoder is not None:
            self._require_uncut()
            self._voice = vocoder.open(_samples(speech.voice_pcm).numpy())
        self._phase = "measured"
        return len(self._prompt.pictures)

    def look(self, place: int) -> list[Tensor]:
        """Decode and slice a picture, numbered from 0; changes nothing, safe from any thread.

        `BackendError` if it cannot be decoded, or the turn was cut.
        """
        self._require_uncut()
        try:
            pixels = read_jpeg(self._prompt.pictures[place])
        except ValueError as error:
            raise BackendError(f"picture {place} cannot be decoded") from error
        return Slicing.of(self._runner.config.vision).cut(pixels, self._turn.max_slice_nums)

    def see(self, place: int) -> Steps[None]:
        """Look at a picture, then encode its slices; where encoding fails the slot is empty."""
        return self._see(place, self.look(place))

    def _see(self, place: int, slices: list[Tensor]) -> Steps[None]:
        self._require("measured")
        with self._wiped_on_failure(f"a picture of {self._name}"):
            for index, picture in enumerate(slices):
                self._require_uncut()
                self._seen[place, index] = yield EncodeImage(picture=picture)  # (64, width)

    def prefill(self) -> Steps[md.Prefill]:
        """Feed the conversation, after all pictures; after a `BackendError` the slot is empty."""
        self._require("measured")
        with self._wiped_on_failure(f"prefill of {self._name}"):
            return (yield from self._prefill())

    def _prefill(self) -> Steps[md.Prefill]:
        embed, rows, fed = self._runner.parts.embed, [], list[int]()
        most = self._prompt.length + self._turn.config.max_new_tokens
        limit = self._runner.config.context_limit
        # How long the speech will be is not known: it starts over at the end of its memory.
        speech = 0 if self._voice is None else self._runner.tts.capacity
        self._runner.reserve(self._slot, min(most, limit), speech=speech, is_new=True)
        if self._voice is not None:
            self._require_uncut()
            yield Prepare(voice=self._voice)
        for piece in self._prompt.pieces:
            match piece:
                case Words(ids=ids):
                    rows.append(embed(ids))
                    fed += ids
                case Slice(picture=picture, index=index):
                    rows.append(self._seen[picture, index])
                    fed += [EMBEDDED] * len(rows[-1])
                case Clip(pcm=pcm):
                    self._require_uncut()
                    rows.append((yield EncodeReference(pcm=_samples(pcm))))  # (10 a second, width)
                    fed += [EMBEDDED] * len(rows[-1])
        assert len(fed) == self._prompt.length, (len(fed), self._prompt.length)
        self._seen.clear()
        self._first = yield from feed_blocks(self._slot, 0, torch.cat(rows), self._require_uncut)
        self._length = self._prompt.length
        self._require_uncut()
        self._phase = "ready"
        return md.Prefill(
            index=self._turn.index,
            input_tokens=self._length,
            fed_ids=tuple(fed),
            input_hash=turn_hash(self._turn),
            cost_us=(time.perf_counter_ns() - self._began_ns) // 1000,
        )

    def generate(self, emit: Emit, cut: int | None = None) -> Steps[md.TurnResult]:
        """Answer; see `ModelSession.run`. After a `BackendError` the slot is empty.

        `emit` is called in the thread that drives the generator. `cut` overrides `interrupt`; one
        past the last token, it drops only that token's speech.
        """
        self._require("ready")

        def stop(step: int) -> bool:
            return self._is_interrupted if cut is None else step == cut

        with self._wiped_on_failure(f"the answer of {self._name}"):
            answer = Answer(
                runner=self._runner,
                tokens=self._tokens,
                turn=self._turn,
                slot=self._slot,
                length=self._length,
                stop=stop,
                emit=emit,
                speaker=self._speaker(lambda: cut is None and self._is_interrupted),
            )
            result = yield from answer.run(self._first)
        self._phase = "ran"
        return result

    def _speaker(self, is_cut: Callable[[], bool]) -> Speaker | None:
        """The answer's speech; None if speech is not requested or not available."""
        vocoder = self._runner.vocoder
        if vocoder is None or self._voice is None:
            return None
        return Speaker(
            parts=self._runner.parts,
            vocoder=vocoder,
            voice=self._voice,
            slot=self._slot,
            capacity=self._runner.tts.capacity,
            is_cut=is_cut,
            key=(self._turn.seed, self._turn.index),
        )

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        super().release()
        self._seen.clear()
        self._voice = None
        for name in ("_prompt", "_first"):
            self.__dict__.pop(name, None)


def _samples(pcm: bytes) -> Tensor:
    """Convert PCM to samples, (samples,); malformed sound is a `BackendError`."""
    return samples_of(pcm, "malformed sound", BackendError)


# -- the answer ---------------------------------------------------------------------------------

Emit = Callable[[md.TurnChunk], None]


@attrs.define(kw_only=True)
class Answer:
    """A chat answer in progress.

    Attributes:
        length: tokens in the slot.
        stop: asked before each token and after the last; True cuts there.
        speaker: speaks it, and checks for cuts in speech itself; None: text only.
        generated: ids so far, without the ending.
        emitted: number of these ids in pieces.
        chunks: pieces so far.
        thinks: the ids are thoughts, which are not spoken.
        text_so_far: the text of all pieces.
        calls: separates calls from text; None without tools.
        held: ids that may belong to a call, with their hidden states.
    """

    runner: ModelRunner
    tokens: Tokens
    turn: md.Turn
    slot: int
    length: int
    stop: Callable[[int], bool]
    emit: Emit
    speaker: Speaker | None
    generated: list[int] = attrs.field(factory=list)
    emitted: int = 0
    chunks: int = 0
    thinks: bool = False
    text_so_far: str = ""
    calls: CallStream | None = None
    held: list[tuple[int, Tensor]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.calls = CallStream(self.turn.tools) if self.turn.tools else None

    def run(self, first: LlmOutput) -> Steps[md.TurnResult]:
        """Answer to the end or the cut, from the output of the prefill's last row."""
        began = time.perf_counter_ns()
        first.logits.whole()  # On the device they would keep the batch's memory.
        config, limit = self.turn.config, self.runner.config.context_limit
        numbers = draws(self.turn.seed, self.turn.index, "chat", config.max_new_tokens)
        stream, fed, waiting = TextStream(self.tokens), first, list[tuple[int, Tensor]]()
        reason: md.StopReason = "length"
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
            is_done = yield from self._speak_chunks(waiting)
            if not is_done:
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
            if self.speaker is not None and (waiting or self.speaker.codes):
                step = len(self.generated) + ended
                if self.stop(step) or not (yield from self._last_words(waiting, flushed)):
                    cut = step
                    flushed.clear()
        pcm, codes = flushed[-1] if flushed else (b"", ())
        calls = () if self.calls is None else tuple(self.calls.calls)
        if calls and reason == "turn_end":
            reason = "tool_calls"
        return self._result(
            md.TurnResult(
                index=self.turn.index,
                text=self.text_so_far,
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

    def _decide(self, fed: LlmOutput, number: float) -> int:
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

    def _feed(self, token: int) -> Steps[LlmOutput]:
        rows = self.runner.parts.embed((token,))
        fed: LlmOutput = yield Feed(slot=self.slot, start=self.length, rows=rows)
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
        assert self.speaker is not None

        def keep(pcm: bytes, codes: tuple[int, ...]) -> None:
            if flushed:
                self._speech(*flushed.pop())
            flushed.append((pcm, codes))

        return (yield from self.speaker.speak(waiting, keep, last=True))

    def _speak_chunks(self, waiting: list[tuple[int, Tensor]]) -> Steps[bool]:
        """Speak the first tokens that wait, ten at a time, and remove them; False: cut."""
        while self.speaker is not None and len(waiting) >= TEXT_A_CHUNK:
            chunk, waiting[:] = waiting[:TEXT_A_CHUNK], waiting[TEXT_A_CHUNK:]
            is_done = yield from self.speaker.speak(chunk, self._speech, last=False)
            if not is_done:
                return False
        return True

    def _write(self, text: str) -> bool:
        """Emit text as far as it belongs to no call; whether a call ended with it."""
        if self.calls is None:
            self._emit_text(text)
            return False
        before = self.calls.ends
        certain, ends = self.calls.add(text), self.calls.ends > before
        if certain or ends:
            self._emit_text(certain, always=True)
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
        self._emit_text(self.calls.end())
        return self._released(ends=False)

    def _emit_text(self, text: str, *, always: bool = False) -> None:
        if text or always:
            self.text_so_far += text
            self._piece(text=text)

    def _speech(self, pcm: bytes, codes: tuple[int, ...]) -> None:
        self._piece(pcm=pcm, codec_ids=codes)

    def _piece(self, *, text: str = "", pcm: bytes = b"", codec_ids: tuple[int, ...] = ()) -> None:
        ids, self.emitted = tuple(self.generated[self.emitted :]), len(self.generated)
        piece = md.TurnChunk(
            index=self.turn.index,
            step=self.chunks,
            text=text,
            pcm=pcm,
            token_ids=ids,
            codec_ids=codec_ids,
        )
        self.chunks += 1
        self.emit(piece)

    def _result(self, result: md.TurnResult, first: LlmOutput, began: int) -> md.TurnResult:
        trace, speaker = first.logits.trace().result(), self.speaker
        wall = (time.perf_counter_ns() - began) // 1000
        tts = 0 if speaker is None else speaker.tts_ns // 1000
        vocoder = 0 if speaker is None else speaker.vocoder_ns // 1000
        return attrs.evolve(
            result,
            logits_hash=trace.digest,
            margin=trace.margin,
            costs=md.Costs(
                generate_us=wall,
                llm_us=wall - tts - vocoder,
                tts_us=tts,
                token2wav_us=vocoder,
                wall_us=wall,
            ),
        )


# -- its speech ---------------------------------------------------------------------------------

TEXT_A_CHUNK: Final = 10
"""Text tokens spoken together, as in the published model's training."""
CODES_MAX: Final = 500
"""Maximum codes for these tokens: 20 seconds, as in the public code."""

SoundSink = Callable[[bytes, tuple[int, ...]], None]
"""Takes sound (float32 LE, 24 kHz) and its codes."""


@attrs.define(kw_only=True)
class Speaker:
    """The speaking side of one answer.

    Attributes:
        voice: the vocoder's encoding of the reference audio.
        slot: of the speech decoder, with `capacity` positions.
        key: session seed and turn index, which key the draws.
        is_cut: asked while speaking; True ends the speech. Default: never.
        length: positions in use.
        chunks: texts spoken so far.
        codes: all codes so far; the first `sounded` went to the vocoder.
        vocoder_buffer: codes that wait, and the vocoder's state.
        tts_ns: time spent on codes.
        vocoder_ns: time spent on sound.
    """

    parts: Parts
    vocoder: Vocoder
    voice: object
    slot: int
    capacity: int
    key: tuple[int, int]
    is_cut: Callable[[], bool] = bool
    length: int = 0
    chunks: int = 0
    codes: list[int] = attrs.field(factory=list)
    sounded: int = 0
    vocoder_buffer: VocoderBuffer = attrs.field(init=False)
    tts_ns: int = 0
    vocoder_ns: int = 0

    def __attrs_post_init__(self) -> None:
        self.vocoder_buffer = VocoderBuffer(buffer=(self.vocoder.silent_code,) * LOOKAHEAD)

    def speak(
        self, text: Sequence[tuple[int, Tensor]], sink: SoundSink, *, last: bool
    ) -> Steps[bool]:
        """Speak text: token ids, each with its hidden state (width,).

        `sink` gets each second of sound, after the `last` text the flushed rest. False: cut.
        """
        began = time.perf_counter_ns()
        before_ns = self.vocoder_ns
        is_done = yield from self._codes(self._rows(text, last=last), sink)
        self.tts_ns += time.perf_counter_ns() - began - (self.vocoder_ns - before_ns)
        if is_done and last:
            is_done = yield from self._sound(sink, last=True)
        return is_done

    def _rows(self, text: Sequence[tuple[int, Tensor]], *, last: bool) -> Tensor:
        """The opening rows of a text, (text + 1 or 2, hidden)."""
        tts, eos = self.parts.tts, self.parts.config.tts.text_eos_token_id
        rows = tts.opening(text)
        if last and eos is not None:
            rows = torch.cat((rows[:-1], tts.emb_text.weight[eos][None], rows[-1:]))
        return rows

    def _codes(self, rows: Tensor, sink: SoundSink) -> Steps[bool]:
        seed, turn = self.key
        if self.length + len(rows) + CODES_MAX > self.capacity:
            self.length = 0  # Restart the cache; its content is overwritten.
        most = min(CODES_MAX, self.capacity - self.length - len(rows))
        numbers = draws(seed, turn, f"chat speech {self.chunks}", most)
        self.chunks += 1
        for number in numbers:
            if self.is_cut():
                return False
            answer: CodeLogits = yield Speak(slot=self.slot, start=self.length, rows=rows)
            self.length += len(rows)
            code = decide_chat_code(answer.numbers(), self.codes, float(number))
            if code == self.parts.config.tts.eos:
                break
            self.codes.append(code)
            rows = self.parts.tts.code(code)
            most_waiting = CODES_A_UNIT if self.sounded else self.vocoder.first_codes
            if len(self.codes) - self.sounded == most_waiting:
                is_done = yield from self._sound(sink, last=False)
                if not is_done:
                    return False
        return True

    def _sound(self, sink: SoundSink, *, last: bool) -> Steps[bool]:
        began = time.perf_counter_ns()
        codes, self.sounded = tuple(self.codes[self.sounded :]), len(self.codes)
        seed, turn = self.key
        spoken = yield from self.vocoder_buffer.sound(
            codes, self.voice, f"{seed}/chat {turn}", last=last, is_cut=self.is_cut
        )
        if spoken is None:
            return False
        sound, self.vocoder_buffer = spoken
        self.vocoder_ns += time.perf_counter_ns() - began
        if self.is_cut():
            return False
        sink(np.concatenate([np.zeros(0, np.float32), *sound]).astype("<f4").tobytes(), codes)
        return True
