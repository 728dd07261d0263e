"""Scripted chat turns: the answers of a `ScriptedBackend`, piece by piece.

A script is a pure function of a turn. An interrupt takes effect before the next token, and
`generate(cut=n)` stops before token n with the same bytes; in a prefill, within `POLL_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

import anyio
import attrs

from protocol.values.digest import digest
from protocol.values.model import (
    Costs,
    Message,
    Picture,
    Prefill,
    Sound,
    StopReason,
    Text,
    ToolCall,
    ToolResult,
    Turn,
    TurnChunk,
    TurnResult,
)

from .base import BackendError, ContextFull
from .scripted_ids import TOKEN_CHARS
from .scripted_rules import FAULTS, US_PER_S, Fault, Rules
from .scripted_tone import CODE_SAMPLES, tone
from .tool_calls import BEGIN, END, CallStream

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


ChatScript = Callable[[Turn], Answer]
"""Decides a turn from its value; must be pure."""


def default_answer(turn: Turn) -> Answer:
    """Repeat the last message's text, and count its pictures and sounds.

    A tool that the last message names as a word is called, without arguments; a tool's result is
    repeated.
    """
    last = turn.messages[-1].content
    if isinstance(last[0], ToolResult):
        return Answer(tokens=(f"turn {turn.index}: ", f"it is {last[0].output[:SHOWN_CHARS]}."))
    text = " ".join(part.text for part in last if isinstance(part, Text))[:SHOWN_CHARS]
    called = [tool.name for tool in turn.tools if tool.name in text.split()]
    if called:
        return Answer(
            tokens=(f"turn {turn.index}. ", *(it for name in called for it in call(name)))
        )
    pictures = sum(isinstance(part, Picture) for part in last)
    sounds = sum(isinstance(part, Sound) for part in last)
    words = [f"turn {turn.index}: ", *(f"{word} " for word in text.split())]
    return Answer(tokens=(*words, f"({pictures} pictures, {sounds} sounds)"))


def call(name: str, arguments: str = "{}") -> tuple[str, ...]:
    """The tokens of a call; its marks are several each, as in most tokenizers."""
    body = ('\n{"name": "', name, '", "arguments": ', arguments, "}\n")
    return (BEGIN[:6], BEGIN[6:], *body, END[:4], END[4:])


class ScriptedTurn:
    """One turn on a slot."""

    def __init__(self, rules: Rules, turn: Turn, slot: int, answer: Answer) -> None:
        self._rules, self._turn, self._slot, self._answer = rules, turn, slot, answer
        self._phase: Literal["new", "prefilled", "answered", "broken", "released"] = "new"
        self._running = False
        self._is_cut = False
        self._calls, self._said = CallStream(turn.tools), ""
        self._input_tokens = sum(map(_tokens_of, turn.messages)) + MESSAGE_TOKENS

    async def prefill(self) -> Prefill:
        """Feed the conversation."""
        with self._call("prefill", "new"):
            if self._answer.fault == "context_full":
                raise ContextFull(f"turn {self._turn.index}: the script says so")
            if self._input_tokens >= self._rules.context_limit:
                raise ContextFull(f"a conversation of {self._input_tokens} tokens")
            await self._take_in()
            if self._answer.fault == "hang":
                await anyio.sleep_forever()
            self._phase = "prefilled"
        turn = self._turn
        return Prefill(
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

    async def generate(
        self, emit: Callable[[TurnChunk], None], cut: int | None = None
    ) -> TurnResult:
        """Answer token by token."""
        with self._call("generate", "prefilled"):
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
            self._phase = "answered"
        return self._result(made, made if stopped else None)

    def interrupt(self) -> None:
        """Cut the prefill at its next check, or the answer before its next token."""
        self._is_cut = True

    async def release(self) -> None:
        """Free the slot."""
        if self._running:
            self._rules.violate("B4: release while the turn is in flight")
        if self._phase == "released":
            self._rules.violate("B5: the turn is released already")
        self._phase = "released"
        self._rules.held_slots.discard(self._slot)

    def _rest(self, made: int) -> Iterator[TurnChunk]:
        """The text held back, at the end of an answer of so many tokens."""
        text = self._calls.end()
        if text:
            self._said += text
            yield TurnChunk(index=self._turn.index, step=made, text=text)

    def _piece(self, step: int, token: str) -> TurnChunk:
        text = self._calls.add(token) if self._turn.tools else token
        self._said += text
        is_said = self._turn.speech is not None and (text or not self._turn.tools)
        pcm = self._speech(step, self._answer.samples) if is_said else b""
        return TurnChunk(
            index=self._turn.index,
            step=step,
            text=text,
            pcm=pcm,
            token_ids=(step,),
            codec_ids=tuple(range(len(pcm) // 4 // CODE_SAMPLES)),
        )

    def _result(self, made: int, cut: int | None) -> TurnResult:
        ended = cut is None and made == len(self._answer.tokens)
        spoken = self._turn.speech is not None and cut is None
        took_us = round(made * self._answer.token_s * US_PER_S)
        calls = tuple(self._calls.calls)
        natural: StopReason = "tool_calls" if calls else "turn_end"
        return TurnResult(
            index=self._turn.index,
            text=self._said,
            pcm=self._speech(made, TAIL_SAMPLES) if spoken else b"",
            reason="interrupted" if cut is not None else natural if ended else "length",
            generated_tokens=made + ended,
            kv_length=self._input_tokens + made,
            cut=cut,
            costs=Costs(generate_us=took_us, llm_us=took_us, wall_us=took_us),
            calls=calls,
        )

    def _speech(self, step: int, samples: int) -> bytes:
        return tone(step, self._turn.seed, samples=samples)

    def _fail_at(self, step: int) -> None:
        if self._answer.fault in ("fail", "gone") and self._answer.fault_at == step:
            raise FAULTS[self._answer.fault](f"turn {self._turn.index}: the script says so")

    @contextmanager
    def _call(self, name: str, due: str) -> Iterator[None]:
        """Check the order of calls; a failed call leaves `broken`."""
        if self._running or self._phase != due:
            self._rules.violate(f"B1: {name} of a turn that is {self._phase}")
        self._running, self._phase = True, "broken"
        try:
            yield
        finally:
            self._running = False


def _tokens_of(message: Message) -> int:
    tokens = MESSAGE_TOKENS
    for part in message.content:
        match part:
            case Text(text=text):
                tokens += -(-len(text) // TOKEN_CHARS)
            case Picture():
                tokens += PICTURE_TOKENS
            case Sound(pcm=pcm):
                tokens += 2 + len(pcm) // SOUND_BYTES_PER_TOKEN
            case ToolCall(arguments=text) | ToolResult(output=text):
                tokens += -(-len(text) // TOKEN_CHARS)
    return tokens
