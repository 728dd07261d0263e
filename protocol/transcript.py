"""The plain values of live transcription, as a session and a model exchange them (003).

An utterance is one request to the model that is added to second by second: what was said of it
stays in the model's memory and is never computed again. A chunk is one second of its sound, and
one chunk is with the model at a time.

PCM is little-endian float32, mono, 16 kHz.
"""

from __future__ import annotations

from typing import Literal

import attrs

from .model import Costs

ChunkEnd = Literal["stop", "length"]
"""Why a chunk's text ended: the model's own terminator, or the most tokens of a chunk."""


@attrs.frozen(kw_only=True)
class Chunk:
    """One second of an utterance.

    Attributes:
        utterance: 0, 1, 2... counts the session's; with the session's seed it keys the RNG.
        index: 0 begins the utterance: what the slot held of the last one is forgotten.
        pcm: float32 LE, exactly `UNIT_SAMPLES` samples at 16 kHz.
        is_last: nothing of the utterance follows: text that was held back is let go.
        seed: the session's.
    """

    utterance: int
    index: int
    pcm: bytes
    is_last: bool = False
    seed: int


@attrs.frozen(kw_only=True)
class ChunkResult:
    """What the model made of one chunk.

    Attributes:
        utterance: the chunk's.
        index: the chunk's.
        text: whole characters alone; may be empty.
        token_ids: sampled in this chunk, the terminator included.
        reason: why it ended.
        prompt_tokens: rows of this chunk's prompt, embeddings too; with index 0 the instructions.
        generated_tokens: how many `token_ids` there are.
        kv_length: tokens in the KV cache after it.
        fed_ids: the prompt's ids, -1 where an embedding was fed.
        input_hash: blake2b-128 hex of all that the model took in.
        logits_hash: blake2b-128 hex of the prompt's last logits.
        margin: by how much the best of these logits was ahead of the second.
        costs: what it took.
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
