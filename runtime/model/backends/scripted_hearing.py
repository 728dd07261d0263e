"""Scripted transcriptions: the text of a `ScriptedBackend` for each second.

A script is a pure function of a chunk. By default a loud second gives one word, chosen by its
samples, with the numbers of its utterance and second: `amber-0.3`; silence gives none. Tokens are
counted as a model's. Chunks out of order break a rule, as in the other scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio
import attrs
import numpy as np

from protocol.values.digest import digest
from protocol.values.model import UNIT_BYTES, Chunk, ChunkResult, Costs

from .base import ContextFull
from .scripted_ids import CHUNK_EOS_ID, TOKEN_CHARS
from .scripted_rules import FAULTS, US_PER_S, Fault, Rules
from .scripted_tone import draw

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
class Heard:
    """The outcome of one chunk: text, seconds, or a fault, before feeding if `context_full`."""

    text: str = ""
    takes_s: float = 0.02
    fault: Fault | None = None


HearingScript = Callable[[Chunk], Heard]
"""Decides a chunk from its value; must be pure."""


def default_hearing(chunk: Chunk) -> Heard:
    """Give one word for a loud second, and none for any other."""
    samples = np.frombuffer(chunk.pcm, dtype="<f4").astype(np.float64)
    if float(np.sqrt(np.mean(samples**2))) < LOUD_RMS:
        return Heard()
    word = WORDS[draw("word", digest(chunk.pcm))[0] % len(WORDS)]
    return Heard(text=f"{word}-{chunk.utterance}.{chunk.index} ")


class ScriptedTranscript:
    """A transcription on a slot."""

    def __init__(self, rules: Rules, hears: HearingScript, slot: int) -> None:
        self._rules, self._hears, self._slot = rules, hears, slot
        self._expected: tuple[int, int] | None = None
        self._kv_length = 0
        self._running = self._released = False

    async def run_chunk(self, chunk: Chunk) -> ChunkResult:
        """Transcribe a second by its script."""
        self._check(chunk)
        self._running = True
        try:
            return await self._run(chunk)
        finally:
            self._running = False

    async def _run(self, chunk: Chunk) -> ChunkResult:
        heard = self.take(chunk)
        await anyio.sleep(heard.takes_s)
        if heard.fault == "hang":
            await anyio.sleep_forever()
        if heard.fault is not None:
            raise FAULTS[heard.fault](f"chunk {chunk.index}: the script says so")
        return self.write(chunk, heard)

    def take(self, chunk: Chunk) -> Heard:
        """Return the script's outcome of a chunk; `ContextFull`, before feeding, if too long."""
        self._expected = None  # until it succeeds, only a new utterance may follow
        if chunk.index == 0:
            self._kv_length = 0
        heard = self._hears(chunk)
        worst = self._kv_length + _prompt_tokens(chunk) + TOKENS_MAX
        if heard.fault == "context_full" or worst > self._rules.context_limit:
            raise ContextFull(f"chunk {chunk.index} may need {worst} tokens")
        return heard

    def write(self, chunk: Chunk, heard: Heard) -> ChunkResult:
        """Make the result of a transcribed chunk."""
        prompt_tokens = _prompt_tokens(chunk)
        count = min(-(-len(heard.text) // TOKEN_CHARS), TOKENS_MAX - 1)
        token_ids = (*range(count), CHUNK_EOS_ID)
        self._kv_length += prompt_tokens + count
        self._expected = None if chunk.is_last else (chunk.utterance, chunk.index + 1)
        took_us = round(heard.takes_s * US_PER_S)
        return ChunkResult(
            utterance=chunk.utterance,
            index=chunk.index,
            text=heard.text,
            token_ids=token_ids,
            reason="stop",
            prompt_tokens=prompt_tokens,
            generated_tokens=len(token_ids),
            kv_length=self._kv_length,
            fed_ids=(*range(prompt_tokens - SOUND_TOKENS), *(-1,) * SOUND_TOKENS),
            input_hash=digest(chunk.pcm),
            costs=Costs(generate_us=took_us, llm_us=took_us, wall_us=took_us),
        )

    async def release(self) -> None:
        """Free the slot."""
        if self._running:
            self._rules.violate("B4: release while a chunk is in flight")
        if self._released:
            self._rules.violate("B5: the transcription is released already")
        self._released = True
        self._rules.held_slots.discard(self._slot)

    def _check(self, chunk: Chunk) -> None:
        """Check the order of chunks; a failed utterance must not continue."""
        if self._running or self._released:
            self._rules.violate(f"B1: chunk {chunk.index} while another is in flight, or after")
        if len(chunk.pcm) != UNIT_BYTES:
            self._rules.violate(f"B1: chunk {chunk.index} has {len(chunk.pcm)} bytes of PCM")
        if chunk.index and (chunk.utterance, chunk.index) != self._expected:
            self._rules.violate(f"B9: chunk {chunk.utterance}.{chunk.index}: {self._expected}")


def _prompt_tokens(chunk: Chunk) -> int:
    return SOUND_TOKENS + (INSTRUCTION_TOKENS if chunk.index == 0 else 0)
