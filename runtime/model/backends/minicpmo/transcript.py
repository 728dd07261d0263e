"""Live transcription in one slot: each utterance is a streaming request.

An utterance's first prompt is `<|im_start|>system`, a newline, the instructions, `<|im_end|>`, then
the second's ten embeddings; each later prompt is ten embeddings, so ten minutes fit, in 6000
tokens. The most likely text tokens are decided, up to `<|chunk_eos|>` or `TOKENS_A_CHUNK`; the
terminator is never in the context. A failed chunk loses its utterance; no state passes to the next.
"""

from __future__ import annotations

import hashlib
from typing import Final

import attrs

from protocol.values.model import UNIT_BYTES, Chunk, ChunkResult, Sound

from ..base import BackendError, ContextFull
from ..streams import Anchoring, Part, Sampled, SamplingParams, TokenIds
from .anchor import Anchor
from .machine import Machine
from .tokens import Tokens
from .work import Steps

INSTRUCTIONS: Final = "Transcribe what is said."
TOKENS_A_CHUNK: Final = 32
"""Tokens of a second, its terminator included: more than the fastest speech has."""


@attrs.define(kw_only=True)
class _Utterance:
    """An utterance in progress, the index of its next chunk, and whether it has no text yet."""

    anchor: Anchor
    number: int
    index: int = 0
    is_blank: bool = True

    def text_of(self, pieces: list[str]) -> str:
        """The text of a chunk; the utterance's first word has no leading space."""
        text = "".join(pieces)
        if self.is_blank:
            text = text.lstrip(" ")
        self.is_blank = self.is_blank and not text
        return text


def input_hash(chunk: Chunk) -> str:
    """Blake2b-128 of all model input: the sound, and whether it begins an utterance."""
    digest = hashlib.blake2b(f"{chunk.index == 0:d} ".encode(), digest_size=16)
    digest.update(chunk.pcm)
    return digest.hexdigest()


def opening_ids(tokens: Tokens) -> tuple[int, ...]:
    """The ids before an utterance's sound."""
    words = tokens.encode(f"system\n{INSTRUCTIONS}")
    return (tokens.ids.im_start, *words, tokens.ids.im_end)


class Transcript:
    """One transcription in one slot, which must be empty; its generators never overlap."""

    def __init__(self, machine: Machine, tokens: Tokens, slot: int) -> None:
        self._machine, self._tokens, self._slot = machine, tokens, slot
        ids = tokens.ids
        self._head = TokenIds(ids=opening_ids(tokens))
        # Only text is decided: other tokens have no meaning here.
        never = {*tokens.control, *tokens.forbidden, *tokens.endings} - {ids.chunk_eos}
        self._forbidden = tuple(sorted(never))
        self._utterance: _Utterance | None = None
        self._is_released = False

    def chunk(self, chunk: Chunk) -> Steps[ChunkResult]:
        """Transcribe a second; see `TranscriptSession.run_chunk`.

        `ContextFull`: the worst case does not fit; nothing was fed. `BackendError`: it failed, its
        sound is malformed, or it was called out of order.
        """
        self._check(chunk)
        if chunk.index == 0:
            self._begin(chunk.utterance)
        utterance = self._utterance
        assert utterance is not None
        anchor, texts = utterance.anchor, list[str]()
        params = SamplingParams(
            max_tokens=TOKENS_A_CHUNK,
            temperature=0.0,
            seed=chunk.seed,
            stop_token_ids=(self._tokens.ids.chunk_eos,),
            ignore_eos=True,
        )
        sound = Sound(pcm=chunk.pcm)
        prompt: tuple[Part, ...] = (sound,) if chunk.index else (self._head, sound)
        looked = anchor.look(prompt, params)
        most = looked.rows + TOKENS_A_CHUNK - 1  # The last one is never fed.
        limit = self._machine.config.context_limit
        if anchor.length + most > limit:
            used = anchor.length
            raise ContextFull(f"a chunk may need {most} tokens; {used} of {limit} are used")

        def emit(sampled: Sampled) -> None:
            texts.append(sampled.text)

        self._utterance = None  # Lost, unless it completes and another chunk may follow.
        done = yield from anchor.answer(looked, params, emit)
        utterance.index += 1
        if chunk.is_last:
            texts.append(anchor.rest())
            anchor.release()
        else:
            self._utterance = utterance
        assert done.reason != "context_full", done
        return ChunkResult(
            utterance=chunk.utterance,
            index=chunk.index,
            text=utterance.text_of(texts),
            token_ids=done.token_ids,
            reason=done.reason,
            prompt_tokens=done.prompt_tokens,
            generated_tokens=len(done.token_ids),
            kv_length=done.kv_length,
            fed_ids=done.fed_ids,
            input_hash=input_hash(chunk),
            logits_hash=done.logits_hash,
            margin=done.margin,
            costs=done.costs,
        )

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        if not self._is_released:
            self._machine.clear(self._slot)
        self._utterance, self._is_released = None, True

    def _begin(self, number: int) -> None:
        if self._utterance is not None:
            self._utterance.anchor.release()
        anchor = Anchor(
            self._machine,
            self._tokens,
            Anchoring(request_id=f"utterance {number}"),
            self._slot,
            forbidden=self._forbidden,
        )
        self._utterance = _Utterance(anchor=anchor, number=number)

    def _check(self, chunk: Chunk) -> None:
        if self._is_released:
            raise BackendError("call out of order: the transcription is released")
        if len(chunk.pcm) != UNIT_BYTES:
            raise BackendError(
                f"chunk {chunk.index} has {len(chunk.pcm)} bytes of sound, not {UNIT_BYTES}"
            )
        under_way, wanted = self._utterance, (chunk.utterance, chunk.index)
        if chunk.index and (under_way is None or (under_way.number, under_way.index) != wanted):
            raise BackendError(
                f"call out of order: chunk {chunk.index} of utterance {chunk.utterance} is not "
                "the next"
            )
