"""One chat turn in a slot: prefill the whole conversation, answer, wipe the slot.

Prefill and answer are generators of requests (`work.py`). Pictures are encoded one by one before
the prefill, so a long video is never decoded in memory at once. Nothing is computed before the
conversation is known to fit, with room for one token. An answer ends with one of the tokenizer's
endings, at `max_new_tokens`, or at the context's end.

`interrupt` may come from any thread. Before the answer it fails the turn at the next picture, sound
or block. The answer stops before its next token, and unspoken speech is dropped; the result says
where, and `cut` stops there again. A failed turn leaves the slot empty.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from protocol.values.model import (
    Picture,
    Prefill,
    Sound,
    Text,
    ToolCall,
    ToolResult,
    Turn,
    TurnResult,
)

from ..base import BackendError, ContextFull
from .chat_answer import Answer, Emit
from .chat_prompt import Clip, Prompt, Slice, Words, lay_out
from .chat_voice import Mouth
from .machine import Machine
from .prompt import EMBEDDED, feed_blocks
from .slices import Slicing, read_jpeg
from .slot import InSlot
from .sound import samples_of
from .tokens import Tokens
from .work import Fed, Recall, See, Steps


def turn_hash(turn: Turn) -> str:
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
                case Text(text=text):
                    add("text", text.encode())
                case Picture(jpeg=jpeg):
                    add("picture", jpeg)
                case Sound(pcm=pcm):
                    add("sound", pcm)
                case ToolCall(name=name, arguments=arguments):
                    add("call", name.encode())
                    add("arguments", arguments.encode())
                case ToolResult(output=output):
                    add("result", output.encode())
    return digest.hexdigest()


class ChatTurn(InSlot):
    """One turn in one slot, which must be empty; its calls never overlap."""

    kind: ClassVar[str] = "turn"

    def __init__(self, machine: Machine, tokens: Tokens, turn: Turn, slot: int) -> None:
        super().__init__(machine, tokens, slot, "new")
        self._turn, self._name = turn, f"turn {turn.index}"
        self._prompt: Prompt
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._first: Fed
        self._length = 0
        self._began_ns = 0

    def measure(self) -> int:
        """Lay the conversation out without computing, and count its pictures; safe from any thread.

        `ContextFull`: it does not fit, with room for one token; `BackendError`: a picture is no
        JPEG file, or the call is out of order.
        """
        self._require("new")
        self._began_ns = time.perf_counter_ns()
        config = self._machine.config
        self._prompt = lay_out(config, self._tokens, self._turn)
        if self._prompt.length + 1 > config.context_limit:
            raise ContextFull(
                f"{self._name} has {self._prompt.length} tokens, "
                f"more than {config.context_limit - 1}"
            )
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
        return Slicing.of(self._machine.config.vision).cut(pixels, self._turn.max_slice_nums)

    def see(self, place: int) -> Steps[None]:
        """Look at a picture, then encode its slices; where encoding fails the slot is empty."""
        return self._see(place, self.look(place))

    def _see(self, place: int, slices: list[Tensor]) -> Steps[None]:
        self._require("measured")
        with self._wiped_on_failure(f"a picture of {self._name}"):
            for index, picture in enumerate(slices):
                self._require_uncut()
                self._seen[place, index] = yield See(picture=picture)  # (64, width)

    def prefill(self) -> Steps[Prefill]:
        """Feed the conversation, after all pictures; after a `BackendError` the slot is empty."""
        self._require("measured")
        with self._wiped_on_failure(f"prefill of {self._name}"):
            return (yield from self._prefill())

    def _prefill(self) -> Steps[Prefill]:
        embed, rows, fed = self._machine.parts.embed, [], list[int]()
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
                    rows.append((yield Recall(pcm=_samples(pcm))))  # (10 a second, width)
                    fed += [EMBEDDED] * len(rows[-1])
        assert len(fed) == self._prompt.length, (len(fed), self._prompt.length)
        self._seen.clear()
        self._first = yield from feed_blocks(self._slot, 0, torch.cat(rows), self._require_uncut)
        self._length = self._prompt.length
        self._require_uncut()
        self._phase = "ready"
        return Prefill(
            index=self._turn.index,
            input_tokens=self._length,
            fed_ids=tuple(fed),
            input_hash=turn_hash(self._turn),
            cost_us=(time.perf_counter_ns() - self._began_ns) // 1000,
        )

    def generate(self, emit: Emit, cut: int | None = None) -> Steps[TurnResult]:
        """Answer; see `TurnSession.generate`. After a `BackendError` the slot is empty.

        `emit` is called in the thread that drives the generator. `cut` overrides `interrupt`; one
        past the last token, it drops only that token's speech.
        """
        self._require("ready")

        def stop(step: int) -> bool:
            return self._is_interrupted if cut is None else step == cut

        with self._wiped_on_failure(f"the answer of {self._name}"):
            answer = Answer(
                machine=self._machine,
                tokens=self._tokens,
                turn=self._turn,
                slot=self._slot,
                length=self._length,
                stop=stop,
                emit=emit,
                mouth=self._mouth(lambda: cut is None and self._is_interrupted),
            )
            result = yield from answer.run(self._first)
        self._phase = "ran"
        return result

    def _mouth(self, is_cut: Callable[[], bool]) -> Mouth | None:
        """Return the answer's speaker; None if speech is not requested or not available."""
        speech, vocoder = self._turn.speech, self._machine.vocoder
        if speech is None or vocoder is None or not vocoder.is_ready:
            return None
        voice = vocoder.open(_samples(speech.voice_pcm).numpy())
        if voice is None:
            return None
        return Mouth(
            parts=self._machine.parts,
            vocoder=vocoder,
            voice=voice,
            slot=self._slot,
            capacity=self._machine.tts.capacity,
            is_cut=is_cut,
            key=(self._turn.seed, self._turn.index),
        )

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        super().release()
        self._seen.clear()
        for name in ("_prompt", "_first"):
            self.__dict__.pop(name, None)


def _samples(pcm: bytes) -> Tensor:
    """Convert PCM to samples, (samples,); malformed sound is a `BackendError`."""
    return samples_of(pcm, "malformed sound", BackendError)
