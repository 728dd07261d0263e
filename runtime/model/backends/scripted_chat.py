"""What a `ScriptedBackend` plays of chat turns and transcriptions, and what all its scripts share.

A script is a pure function of a turn or of a chunk. Of a turn, an interrupt takes effect before the
next token, and `run(turn, cut)` stops before a token with the same bytes; in a prefill, within
`POLL_S`. Of a transcription, by default a loud second gives one word, chosen by its samples, with
the numbers of its utterance and second: `amber-0.3`; silence gives none. Tokens are counted as a
model's.

`Rules` holds the callers to slots, context and the order of calls. A broken rule of ARCHITECTURE.md
is an `AssertionError`, kept for callers that swallow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, NoReturn

import anyio
import attrs
import numpy as np

from protocol.values import model as md
from protocol.values.records import digest

from .base import BackendError, BackendGone, ContextFull, Emit, ignore
from .tool_calls import BEGIN, END, CallStream

# -- draws and tones ----------------------------------------------------------------------------

CODE_SAMPLES: Final = 960
"""Of a speech code, 40 ms (model.md)."""


def tone(index: int, seed: int, *, samples: int) -> bytes:
    """Make a triangle wave (float32 LE, 24 kHz mono, within +-0.25); its pitch identifies the unit.

    Integer arithmetic gives the same bytes on every machine.
    """
    pitch_hz = 110 + int.from_bytes(draw("tone", seed, index)[:2], "little") % 770
    phase = np.arange(samples, dtype=np.int64) * pitch_hz % md.OUTPUT_RATE_HZ
    triangle = np.abs(2 * phase - md.OUTPUT_RATE_HZ) - md.OUTPUT_RATE_HZ // 2
    return (triangle.astype("<f4") / np.float32(2 * md.OUTPUT_RATE_HZ)).tobytes()


def draw(*parts: str | int) -> bytes:
    """Draw 16 bytes by the draw's name: the same every time."""
    return bytes.fromhex(digest(parts))


# -- faults and rules ---------------------------------------------------------------------------

US_PER_S: Final = 1_000_000
Fault = Literal["fail", "context_full", "gone", "hang"]
"""An error, a refusal, a lost worker, or a call that never returns."""
FAULTS: Final[dict[Fault, type[BackendError]]] = {
    "fail": BackendError,
    "context_full": ContextFull,
    "gone": BackendGone,
}


@attrs.frozen
class Rules:
    """One backend's slots and rules, and the violations in order."""

    slots: int
    context_limit: int
    violations: list[str] = attrs.field(factory=list, init=False)
    held_slots: set[int] = attrs.field(factory=set, init=False)

    def hold(self, slot: int) -> None:
        """Take a slot."""
        if slot in self.held_slots or not 0 <= slot < self.slots:
            self.violate(f"B5: slot {slot} of {self.slots} is not released, or not ours")
        self.held_slots.add(slot)

    def violate(self, rule: str) -> NoReturn:
        """Keep and raise a broken rule."""
        self.violations.append(rule)
        raise AssertionError(rule)


# -- ids ----------------------------------------------------------------------------------------

TOKEN_CHARS: Final = 4
UNIT_END_ID: Final = 151_684
"""The model's own ids (model.md)."""
LISTEN_ID: Final = 151_705
SPEAK_ID: Final = 151_706
TURN_EOS_ID: Final = 151_717
CHUNK_EOS_ID: Final = 151_718


# -- chat turns ---------------------------------------------------------------------------------

MESSAGE_TOKENS: Final = 5
"""`<|im_start|>`, the role, its line break, `<|im_end|>` and another line break (model.md)."""
PICTURE_TOKENS: Final = 66
SOUND_BYTES_PER_TOKEN: Final = 6_400
"""A tenth of a second of float32 at 16 kHz."""
TAIL_SAMPLES: Final = 2_400
POLL_S: Final = 0.1
"""Interval of a prefill's checks for a cut; a real one checks once a block."""
SHOWN_CHARS: Final = 64


@attrs.frozen(kw_only=True)
class Answer:
    """The outcome of one turn.

    `tokens`: the text of each token, in order; calls of tools are spelled in it. `samples`: of
    speech per token, if requested; 24 kHz. `fault`: instead: `context_full` before feeding, `hang`
    in prefill, others at `fault_at`.
    """

    tokens: tuple[str, ...] = ()
    prefill_s: float = 0.02
    token_s: float = 0.01
    samples: int = 4_800
    fault: Fault | None = None
    fault_at: int = 0


ChatScript = Callable[[md.Turn], Answer]
"""Decides a turn from its value; must be pure."""


def default_answer(turn: md.Turn) -> Answer:
    """Repeat the last message's text, and count its pictures and sounds.

    A tool that the last message names as a word is called, without arguments; a tool's result is
    repeated.
    """
    last = turn.messages[-1].content
    if isinstance(last[0], md.ToolResult):
        return Answer(tokens=(f"turn {turn.index}: ", f"it is {last[0].output[:SHOWN_CHARS]}."))
    text = " ".join(part.text for part in last if isinstance(part, md.Text))[:SHOWN_CHARS]
    called = [tool.name for tool in turn.tools if tool.name in text.split()]
    if called:
        return Answer(
            tokens=(f"turn {turn.index}. ", *(it for name in called for it in call(name)))
        )
    pictures = sum(isinstance(part, md.Picture) for part in last)
    sounds = sum(isinstance(part, md.Sound) for part in last)
    words = [f"turn {turn.index}: ", *(f"{word} " for word in text.split())]
    return Answer(tokens=(*words, f"({pictures} pictures, {sounds} sounds)"))


def call(name: str, arguments: str = "{}") -> tuple[str, ...]:
    """The tokens of a call; its marks are several each, as in most tokenizers."""
    body = ('\n{"name": "', name, '", "arguments": ', arguments, "}\n")
    return (BEGIN[:6], BEGIN[6:], *body, END[:4], END[4:])


class OnSlot:
    """What is on a slot: its calls come one at a time (B1), and it is released once (B4, B5)."""

    def __init__(self, rules: Rules, slot: int) -> None:
        self._rules, self._slot = rules, slot
        self._phase: Literal["ready", "running", "over", "released"] = "ready"
        self._is_cut = False

    def interrupt(self, index: int = -1) -> None:  # noqa: ARG002 - there is one at most
        """Cut the prefill at its next check, or the answer before its next token."""
        self._is_cut = True

    async def release(self) -> None:
        """Free the slot."""
        if self._phase == "running":
            self._rules.violate("B4: release while a call is in flight")
        if self._phase == "released":
            self._rules.violate("B5: it is released already")
        self._phase = "released"
        self._rules.held_slots.discard(self._slot)

    @contextmanager
    def _call(self, name: str, *, after: Literal["ready", "over"]) -> Iterator[None]:
        """Check the order of calls."""
        if self._phase != "ready":
            self._rules.violate(f"B1: {name} of what is {self._phase}")
        self._phase = "running"
        try:
            yield
        finally:
            self._phase = after


class ScriptedTurn(OnSlot):
    """One turn on a slot."""

    def __init__(self, rules: Rules, script: ChatScript, slot: int) -> None:
        super().__init__(rules, slot)
        self._script = script
        self._turn: md.Turn
        self._answer: Answer
        self._calls: CallStream
        self._text = ""
        self._input_tokens = MESSAGE_TOKENS

    async def run(
        self, turn: md.Turn, cut: md.Cut | None = None, *, emit: Emit = ignore
    ) -> md.TurnResult:
        """Feed the conversation, and answer token by token."""
        with self._call("run", after="over"):
            self._take(turn)
            emit(await self._prefill())
            return await self._generate(emit, None if cut is None else cut.step)

    def _take(self, turn: md.Turn) -> None:
        self._turn, self._answer = turn, self._script(turn)
        self._calls = CallStream(turn.tools)
        self._input_tokens += sum(map(_tokens_of, turn.messages))

    async def _prefill(self) -> md.Prefill:
        turn = self._turn
        if self._answer.fault == "context_full":
            raise ContextFull(f"turn {turn.index}: the script says so")
        if self._input_tokens >= self._rules.context_limit:
            raise ContextFull(f"a conversation of {self._input_tokens} tokens")
        await self._take_in()
        if self._answer.fault == "hang":
            await anyio.sleep_forever()
        return md.Prefill(
            index=turn.index,
            input_tokens=self._input_tokens,
            input_hash=digest((turn.messages, turn.tools) if turn.tools else turn.messages),
            cost_us=round(self._answer.prefill_s * US_PER_S),
        )

    async def _take_in(self) -> None:
        left_s = self._answer.prefill_s
        while True:
            if self._is_cut:
                raise BackendError("the turn was cut")
            if left_s <= 0:
                return
            await anyio.sleep(min(left_s, POLL_S))
            left_s -= POLL_S

    async def _generate(self, emit: Emit, cut: int | None) -> md.TurnResult:
        stopped = False
        tokens = self._answer.tokens[: self._turn.config.max_new_tokens]
        for step, text in enumerate(tokens):
            if self._is_cut or cut == step:
                stopped = True
                break
            await anyio.sleep(self._answer.token_s)
            self._fail_at(step)
            emit(self._piece(step, text))
        made = step if stopped else len(tokens)
        if not stopped:
            self._fail_at(made)
            for rest in self._rest(made):
                emit(rest)
        return self._result(made, made if stopped else None)

    def _rest(self, made: int) -> Iterator[md.TurnChunk]:
        """The text held back, at the end of an answer of so many tokens."""
        text = self._calls.end()
        if text:
            self._text += text
            yield md.TurnChunk(index=self._turn.index, step=made, text=text)

    def _piece(self, step: int, token: str) -> md.TurnChunk:
        text = self._calls.add(token) if self._turn.tools else token
        self._text += text
        is_spoken = self._turn.speech is not None and (text or not self._turn.tools)
        pcm = self._speech(step, self._answer.samples) if is_spoken else b""
        return md.TurnChunk(
            index=self._turn.index,
            step=step,
            text=text,
            pcm=pcm,
            token_ids=(step,),
            codec_ids=tuple(range(len(pcm) // 4 // CODE_SAMPLES)),
        )

    def _result(self, made: int, cut: int | None) -> md.TurnResult:
        ended = cut is None and made == len(self._answer.tokens)
        spoken = self._turn.speech is not None and cut is None
        took_us = round(made * self._answer.token_s * US_PER_S)
        calls = tuple(self._calls.calls)
        natural: md.StopReason = "tool_calls" if calls else "turn_end"
        return md.TurnResult(
            index=self._turn.index,
            text=self._text,
            pcm=self._speech(made, TAIL_SAMPLES) if spoken else b"",
            reason="interrupted" if cut is not None else natural if ended else "length",
            generated_tokens=made + ended,
            kv_length=self._input_tokens + made,
            cut=cut,
            costs=md.Costs(generate_us=took_us, llm_us=took_us, wall_us=took_us),
            calls=calls,
        )

    def _speech(self, step: int, samples: int) -> bytes:
        return tone(step, self._turn.seed, samples=samples)

    def _fail_at(self, step: int) -> None:
        if self._answer.fault in ("fail", "gone") and self._answer.fault_at == step:
            raise FAULTS[self._answer.fault](f"turn {self._turn.index}: the script says so")


def _tokens_of(message: md.Message) -> int:
    tokens = MESSAGE_TOKENS
    for part in message.content:
        match part:
            case md.Text(text=text):
                tokens += -(-len(text) // TOKEN_CHARS)
            case md.Picture():
                tokens += PICTURE_TOKENS
            case md.Sound(pcm=pcm):
                tokens += 2 + len(pcm) // SOUND_BYTES_PER_TOKEN
            case md.ToolCall(arguments=text) | md.ToolResult(output=text):
                tokens += -(-len(text) // TOKEN_CHARS)
    return tokens


# -- transcriptions -----------------------------------------------------------------------------

INSTRUCTION_TOKENS: Final = 12
"""Of a system message with the instructions."""
SOUND_TOKENS: Final = 10
"""Embeddings of a second (model.md)."""
TOKENS_MAX: Final = 32
"""Maximum tokens of a chunk, its terminator included."""
LOUD_RMS: Final = 0.01
"""-40 dB: quieter seconds are silence."""
WORDS: Final = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "heron")


@attrs.frozen(kw_only=True)
class Transcribed:
    """The outcome of one chunk: text, seconds, or a fault, before feeding if `context_full`."""

    text: str = ""
    takes_s: float = 0.02
    fault: Fault | None = None


HearingScript = Callable[[md.Chunk], Transcribed]
"""Decides a chunk from its value; must be pure."""


def default_hearing(chunk: md.Chunk) -> Transcribed:
    """Give one word for a loud second, and none for any other."""
    samples = np.frombuffer(chunk.pcm, dtype="<f4").astype(np.float64)
    if float(np.sqrt(np.mean(samples**2))) < LOUD_RMS:
        return Transcribed()
    word = WORDS[draw("word", digest(chunk.pcm))[0] % len(WORDS)]
    return Transcribed(text=f"{word}-{chunk.utterance}.{chunk.index} ")


class ScriptedTranscript(OnSlot):
    """A transcription on a slot."""

    def __init__(self, rules: Rules, transcription: HearingScript, slot: int) -> None:
        super().__init__(rules, slot)
        self._transcription = transcription
        self._expected: tuple[int, int] | None = None
        self._kv_length = 0

    async def run(self, chunk: md.Chunk, cut: md.Cut | None = None) -> md.ChunkResult:  # noqa: ARG002
        """Transcribe a second by its script; `ContextFull`, before feeding, if it is too long."""
        with self._call(f"chunk {chunk.index}", after="ready"):
            self._check(chunk)
            return await self._run(chunk)

    async def _run(self, chunk: md.Chunk) -> md.ChunkResult:
        self._expected = None  # until it succeeds, only a new utterance may follow
        if chunk.index == 0:
            self._kv_length = 0
        outcome, prompt_tokens = self._transcription(chunk), _prompt_tokens(chunk)
        worst = self._kv_length + prompt_tokens + TOKENS_MAX
        if outcome.fault == "context_full" or worst > self._rules.context_limit:
            raise ContextFull(f"chunk {chunk.index} may need {worst} tokens")
        await anyio.sleep(outcome.takes_s)
        if outcome.fault == "hang":
            await anyio.sleep_forever()
        if outcome.fault is not None:
            raise FAULTS[outcome.fault](f"chunk {chunk.index}: the script says so")
        count = min(-(-len(outcome.text) // TOKEN_CHARS), TOKENS_MAX - 1)
        token_ids = (*range(count), CHUNK_EOS_ID)
        self._kv_length += prompt_tokens + count
        self._expected = None if chunk.is_last else (chunk.utterance, chunk.index + 1)
        took_us = round(outcome.takes_s * US_PER_S)
        return md.ChunkResult(
            utterance=chunk.utterance,
            index=chunk.index,
            text=outcome.text,
            token_ids=token_ids,
            reason="stop",
            prompt_tokens=prompt_tokens,
            generated_tokens=len(token_ids),
            kv_length=self._kv_length,
            fed_ids=(*range(prompt_tokens - SOUND_TOKENS), *(-1,) * SOUND_TOKENS),
            input_hash=digest(chunk.pcm),
            costs=md.Costs(generate_us=took_us, llm_us=took_us, wall_us=took_us),
        )

    def _check(self, chunk: md.Chunk) -> None:
        """Check the order of chunks; a failed utterance must not continue."""
        if len(chunk.pcm) != md.UNIT_BYTES:
            self._rules.violate(f"B1: chunk {chunk.index} has {len(chunk.pcm)} bytes of PCM")
        if chunk.index and (chunk.utterance, chunk.index) != self._expected:
            self._rules.violate(f"B9: chunk {chunk.utterance}.{chunk.index}: {self._expected}")


def _prompt_tokens(chunk: md.Chunk) -> int:
    return SOUND_TOKENS + (INSTRUCTION_TOKENS if chunk.index == 0 else 0)
