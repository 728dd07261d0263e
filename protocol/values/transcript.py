"""The plain values of a transcription, as a session and a model exchange them (003).

An utterance is one anchored request of streaming input: its sound comes in chunks of exactly one
second, and the model writes the text of each before the next. A slot keeps an utterance's state
from chunk to chunk, and forgets it when the next begins.

PCM is little-endian float32, mono, 16 kHz.
"""

from __future__ import annotations

from typing import Literal

import attrs

from .model import Costs

ChunkEnd = Literal["stop", "length"]
"""Why the text of a chunk ends: the model's terminator, or the most tokens of a chunk."""


@attrs.frozen(kw_only=True)
class Chunk:
    """One second of an utterance.

    Attributes:
        utterance: 0, 1, 2... counts the session's; with the session's seed it keys the RNG.
        index: 0 begins the utterance: the slot forgets the last one.
        pcm: float32 LE, exactly `UNIT_SAMPLES` samples at 16 kHz.
        is_last: the end of the utterance: text that was held back is released.
    """

    utterance: int
    index: int
    pcm: bytes
    is_last: bool = False
    seed: int


@attrs.frozen(kw_only=True)
class ChunkResult:
    """The model's result of one chunk.

    Attributes:
        text: only whole characters; may be empty.
        token_ids: sampled in this chunk, the terminator included.
        prompt_tokens: rows fed as the chunk's prompt, embeddings too; the first chunk's has the
            instructions.
        kv_length: tokens in the KV cache after it.
        fed_ids: the prompt's ids, with -1 for an embedding fed instead of a token.
        input_hash: blake2b-128 hex of the chunk's sound.
        logits_hash: blake2b-128 hex of the first token's logits.
        margin: difference between the first token's best and second logit.
    """

    utterance: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    reason: ChunkEnd
    prompt_tokens: int
    generated_tokens: int
    kv_length: int
    fed_ids: tuple[int, ...] = ()
    input_hash: str = ""
    logits_hash: str = ""
    margin: float = 0.0
    costs: Costs = Costs()


@attrs.frozen(kw_only=True)
class TranscriptDelta:
    """Text of an utterance since the last delta; it is never taken back (003).

    Attributes:
        text: the words, or a part of one; never empty.
    """

    text: str


@attrs.frozen(kw_only=True)
class TranscriptDone:
    """An utterance is transcribed, as far as possible (003).

    Attributes:
        text: text of the whole utterance: its deltas, joined.
        prompt_tokens: tokens and embeddings that the model was fed.
        completion_tokens: tokens that the model generated.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
