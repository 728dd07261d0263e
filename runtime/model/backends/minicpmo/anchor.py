"""One streaming request in one slot: chunks extend the prompt, and tokens are sampled after each.

Rules, besides those of `streams`:
- Cached keys and values are never recomputed: a chunk feeds its prompt and all its tokens but the
  last, which is dropped from the cumulative prompt or carried over.
- A draw depends on the chunk's seed, the request id, the chunk and the step, never on timing.
- Sound is one stream per request; the audio encoder restarts every 29 seconds (model.md).
- If the context fills while sampling, the chunk ends with `context_full`. A failed or cut chunk
  ends the request and empties the slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import Costs

from ..base import BackendRefused
from ..streams import Anchoring, Extended, FinishReason, Part, Sampled, SamplingParams
from .anchor_prompt import Look, Looked
from .audio import Hearing
from .candidates import Candidates
from .chat_prompt import Words
from .chat_text import TextStream
from .decide import decide_plain
from .machine import Machine
from .mel import MelCarry
from .prompt import EMBEDDED, feed_blocks
from .sampling import draws
from .slot import InSlot
from .tokens import Tokens
from .work import Fed, See, Steps

Emit = Callable[[Sampled], None]


class Anchor(InSlot):
    """One request in one slot, which must be empty; its generators never overlap.

    `length`: tokens in the slot; `chunks`: number of chunks answered.
    """

    kind: ClassVar[str] = "request"

    def __init__(
        self,
        machine: Machine,
        tokens: Tokens,
        anchoring: Anchoring,
        slot: int,
        *,
        forbidden: Sequence[int] = (),
    ) -> None:
        super().__init__(machine, tokens, slot, "open")
        self._anchoring, self._forbidden = anchoring, tuple(forbidden)
        self.length = self.chunks = 0
        self._carried: tuple[int, ...] = ()
        self._mel, self._heard = MelCarry.start(), 0
        self._stream = TextStream(tokens)

    def look(self, prompt: Sequence[Part], params: SamplingParams) -> Looked:
        """Check the next chunk's prompt without changing state; safe from any thread.

        Raises:
            ContextFull: it does not fit.
            BackendRefused: it is malformed, empty, or asks for an id that the model lacks.
            BackendError: called out of order, or the request was cut.
        """
        self._require("open")
        self._require_uncut()
        for place, index in enumerate(params.stop_token_ids):
            if index >= self._tokens.size:
                raise BackendRefused(
                    f"stop_token_ids[{place}] is {index}, not below {self._tokens.size}"
                )
        config, carried = self._machine.config, len(self._carried)
        look = Look(
            config=config,
            tokens=self._tokens,
            slices_max=self._anchoring.max_slice_nums,
            room=config.context_limit - self.length - carried,
        )
        looked = look.at(prompt)
        if looked.rows + carried == 0:
            raise BackendRefused(f"chunk {self.chunks} is empty: there is nothing to compute")
        return looked

    def extend(self, prompt: Sequence[Part], params: SamplingParams, emit: Emit) -> Steps[Extended]:
        """Look at the next chunk; then `answer` it; see `AnchorSession.extend`."""
        return self.answer(self.look(prompt, params), params, emit)

    def answer(self, looked: Looked, params: SamplingParams, emit: Emit) -> Steps[Extended]:
        """Compute the chunk that `look` checked, and answer it.

        `emit` runs in the thread that drives the generator. A `BackendError` leaves the slot empty.
        """
        self._require("open")
        with self._wiped_on_failure(f"chunk {self.chunks}"):
            began = time.perf_counter_ns()
            rows, fed_ids = yield from self._rows(looked)
            first = yield from self._feed(rows)
            first.logits.whole()  # On the device they would keep the batch's memory.
            middle = time.perf_counter_ns()
            sampled, reason = yield from self._sample(first, params, emit, len(rows))
            ended = time.perf_counter_ns()
        self._carried = sampled[-1:] if self._anchoring.carry_terminator else ()
        self.chunks += 1
        prefill_us, generate_us = (middle - began) // 1000, (ended - middle) // 1000
        trace = first.logits.trace().result()
        return Extended(
            chunk=self.chunks - 1,
            token_ids=sampled,
            reason=reason,
            prompt_tokens=len(rows),
            kv_length=self.length,
            held=self._stream.held,
            fed_ids=fed_ids,
            logits_hash=trace.digest,
            margin=trace.margin,
            costs=Costs(
                prefill_us=prefill_us,
                generate_us=generate_us,
                llm_us=generate_us,
                wall_us=prefill_us + generate_us,
            ),
        )

    def rest(self) -> str:
        """Return and drop the text held back for an incomplete character."""
        rest, self._stream = self._stream.end(), TextStream(self._tokens)
        return rest

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        super().release()
        self._mel = MelCarry.start()

    # -- what a chunk does ----------------------------------------------------------------------

    def _rows(self, looked: Looked) -> Steps[tuple[Tensor, tuple[int, ...]]]:
        """Compute the rows of a prompt, (T, width), and their ids."""
        embed = self._machine.parts.embed
        rows, fed = list[Tensor](), list[int]()
        for piece in (Words(ids=self._carried), *looked.pieces):
            self._require_uncut()
            if isinstance(piece, Words):
                rows.append(embed(piece.ids))
                fed += piece.ids
                continue
            if isinstance(piece, See):
                rows.append((yield piece))  # (64, width)
            else:
                rows.append((yield from self._hear(piece)))  # (10, width)
            fed += [EMBEDDED] * len(rows[-1])
        assert len(fed) == looked.rows + len(self._carried), (len(fed), looked.rows)
        return torch.cat(rows), tuple(fed)

    def _hear(self, pcm: Tensor) -> Steps[Tensor]:
        parts = self._machine.parts
        mel, self._mel = parts.front_end.next_frames(pcm, self._mel)
        units = 0 if self._heard == parts.config.audio.units else self._heard
        self._heard = units + 1
        heard: Tensor = yield Hearing(mel=mel, slot=self._slot, units=units)
        return heard

    def _feed(self, rows: Tensor) -> Steps[Fed]:
        """Feed rows after the slot's content; return the output of the last."""
        fed = yield from feed_blocks(self._slot, self.length, rows, self._require_uncut)
        self.length += len(rows)
        return fed

    def _sample(
        self, fed: Fed, params: SamplingParams, emit: Emit, prompt_tokens: int
    ) -> Steps[tuple[tuple[int, ...], FinishReason]]:
        """Sample until a finish reason; all tokens but the last are fed."""
        sampled, computed = list[int](), prompt_tokens
        for step, draw in enumerate(self._draws(params)):
            token = self._decide(fed, float(draw), params)
            sampled.append(token)
            reason = self._reason(token, len(sampled), params)
            emit(
                Sampled(
                    chunk=self.chunks,
                    step=step,
                    token_id=token,
                    text=self._stream.add(token),
                    reason=reason,
                    computed_tokens=computed,
                    prompt_tokens=prompt_tokens,
                    kv_length=self.length,
                )
            )
            if reason is not None:
                return tuple(sampled), reason
            fed, computed = (yield from self._feed(self._machine.parts.embed((token,)))), 1
        raise AssertionError("the last token has a reason")

    def _decide(self, fed: Fed, draw: float, params: SamplingParams) -> int:
        def rule(logits: Candidates) -> int:
            return decide_plain(logits, draw, self._tokens.size, self._forbidden, params)

        return fed.logits.settle(rule)

    def _draws(self, params: SamplingParams) -> NDArray[np.float64]:
        """The draws of this chunk, one for each token that it may sample."""
        # The first token needs no room: it is sampled after the prompt, and the last is never fed.
        most = min(params.max_tokens, self._machine.config.context_limit - self.length + 1)
        return draws(params.seed, self.chunks, f"stream/{self._anchoring.request_id}", most)

    def _reason(self, token: int, count: int, params: SamplingParams) -> FinishReason | None:
        """Return the finish reason if the `count`-th token is the chunk's last."""
        if token in params.stop_token_ids:
            return "stop"
        if token in self._tokens.endings and not params.ignore_eos:
            return "stop"
        if count == params.max_tokens:
            return "length"
        return "context_full" if self.length == self._machine.config.context_limit else None
