"""One streaming request in one slot: chunks extend the prompt, and tokens are sampled after each.

Rules, besides those of `streams`:
- Cached keys and values are never recomputed: a chunk feeds its prompt and all its tokens but the
  last, which is dropped from the cumulative prompt or carried over.
- A draw depends on the chunk's seed, the request id, the chunk and the step, never on timing.
- A chunk's prompt is checked before any computation or decoding. Text is encoded, ids are used as
  they are. A picture is `<image>`, its embeddings, `</image>`, then its slices in `<slice>` and
  `</slice>`, as in a duplex unit. Sound is ten embeddings a second without marks.
- Sound is one stream per request, so only whole seconds are accepted; the audio encoder restarts
  every 29 seconds (model.md).
- If the context fills while sampling, the chunk ends with `context_full`. A failed or cut chunk
  ends the request and empties the slot.

*Live transcription* is one such request per utterance. An utterance's first prompt is
`<|im_start|>system`, a newline, the instructions, `<|im_end|>`, then the second's ten embeddings;
each later prompt is ten embeddings, so ten minutes fit, in 6000 tokens. The most likely text tokens
are decided, up to `<|chunk_eos|>` or `TOKENS_A_CHUNK`; the terminator is never in the context. A
failed chunk loses its utterance; no state passes to the next.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.values import model as md
from protocol.values.errors import FieldError
from protocol.values.limits import CHAT_TEXT_CHARS_MAX

from ..base import BackendError, BackendRefused, ContextFull
from ..streams import Anchoring, Extended, FinishReason, Part, Sampled, SamplingParams, TokenIds
from .audio import EncodeAudio, MelCarry, samples_of
from .chat_prompt import Words
from .config import ModelConfig
from .runner import InSlot, ModelRunner
from .sampling import Candidates, decide_plain, draws
from .state import EMBEDDED, feed_blocks
from .tokens import TextStream, Tokens
from .vision import Slicing, read_jpeg
from .work import EncodeImage, LlmOutput, Steps

# -- the prompt of a chunk ----------------------------------------------------------------------

Piece = Words | EncodeImage | Tensor
"""Ids, the request for a slice of a picture, or a second of sound, (16000,)."""


@attrs.define(kw_only=True, eq=False)
class ChunkPrompt:
    """The prompt of one chunk, checked part by part without changing a session's state.

    Attributes:
        slices_max: maximum slices per picture.
        room: rows left in the slot.
        pieces: in feeding order.
        rows: of all pieces.
    """

    config: ModelConfig
    tokens: Tokens
    slices_max: int
    room: int
    pieces: list[Piece] = attrs.field(factory=list)
    rows: int = 0

    def add(self, path: str, part: Part) -> None:
        """Add a part, which `path` names.

        `ContextFull`: it does not fit. `BackendRefused`: it is malformed; the text names it.
        """
        match part:
            case md.Text(text=text):
                if len(text) > CHAT_TEXT_CHARS_MAX:  # No context could hold it: do not encode it.
                    raise ContextFull(
                        f"the text has {len(text)} characters, over {CHAT_TEXT_CHARS_MAX}"
                    )
                ids = tuple(self.tokens.encode(text))
                self._take(len(ids))
                self.pieces.append(Words(ids=ids))
            case md.Picture(jpeg=jpeg):
                self._add_picture(f"{path}.jpeg", jpeg)
            case md.Sound(pcm=pcm):
                if not pcm or len(pcm) % md.UNIT_BYTES:
                    raise BackendRefused(
                        f"{path}.pcm has {len(pcm) / md.SAMPLE_BYTES:g} samples, not whole seconds "
                        f"of {md.UNIT_SAMPLES}"
                    )
                self._take(len(pcm) // md.UNIT_BYTES * self.config.audio.embeddings)
                self.pieces += torch.split(samples_of(pcm, f"{path}.pcm"), md.UNIT_SAMPLES)
            case _:
                self._take(len(part.ids))
                for at, index in enumerate(part.ids):
                    if not 0 <= index < self.tokens.size:
                        raise BackendRefused(
                            f"{path}.ids[{at}] is {index}, not below {self.tokens.size}"
                        )
                self.pieces.append(Words(ids=part.ids))

    def _take(self, rows: int) -> None:
        self.rows += rows
        if self.rows > self.room:
            raise ContextFull(
                f"the prompt needs {self.rows} tokens or more; {self.room} of "
                f"{self.config.context_limit} are free"
            )

    def _add_picture(self, path: str, jpeg: bytes) -> None:
        from protocol.wire.media import (
            check_frame,  # Here: it needs libraries that the model does not.
        )

        cutter, ids = Slicing.of(self.config.vision), self.tokens.ids
        try:
            width, height = check_frame(path, jpeg)
        except FieldError as error:
            raise BackendRefused(str(error)) from error
        count = cutter.count(width, height, self.slices_max)
        self._take(count * (self.config.vision.queries + 2))
        try:
            pixels = read_jpeg(jpeg)
        except ValueError as error:
            raise BackendRefused(f"{path} cannot be decoded") from error
        for index, picture in enumerate(cutter.cut(pixels, self.slices_max)):
            begin, end = (ids.slice_, ids.slice_end) if index else (ids.image, ids.image_end)
            self.pieces += (Words(ids=(begin,)), EncodeImage(picture=picture), Words(ids=(end,)))


# -- the request --------------------------------------------------------------------------------

Emit = Callable[[Sampled], None]


class Anchor(InSlot):
    """One request in one slot, which must be empty; its generators never overlap.

    `length`: tokens in the slot; `chunks`: number of chunks answered.
    """

    kind: ClassVar[str] = "request"

    def __init__(
        self,
        runner: ModelRunner,
        tokens: Tokens,
        anchoring: Anchoring,
        slot: int,
        *,
        forbidden: Sequence[int] = (),
    ) -> None:
        super().__init__(runner, tokens, slot, "open")
        self._anchoring, self._forbidden = anchoring, (*forbidden, *tokens.unchatted)
        self.length = self.chunks = 0
        self._carried: tuple[int, ...] = ()
        self._mel, self._audio_units = MelCarry.start(), 0
        self._stream = TextStream(tokens)

    def check(self, prompt: Sequence[Part], params: SamplingParams) -> ChunkPrompt:
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
        config, carried = self._runner.config, len(self._carried)
        checked = ChunkPrompt(
            config=config,
            tokens=self._tokens,
            slices_max=self._anchoring.max_slice_nums,
            room=config.context_limit - self.length - carried,
        )
        for place, part in enumerate(prompt):
            checked.add(f"prompt[{place}]", part)
        if checked.rows + carried == 0:
            raise BackendRefused(f"chunk {self.chunks} is empty: there is nothing to compute")
        return checked

    def extend(self, prompt: Sequence[Part], params: SamplingParams, emit: Emit) -> Steps[Extended]:
        """Check the next chunk; then `answer` it; see `AnchorSession.extend`."""
        return self.answer(self.check(prompt, params), params, emit)

    def answer(self, checked: ChunkPrompt, params: SamplingParams, emit: Emit) -> Steps[Extended]:
        """Compute the chunk that was checked, and answer it.

        `emit` runs in the thread that drives the generator. A `BackendError` leaves the slot empty.
        """
        self._require("open")
        with self._wiped_on_failure(f"chunk {self.chunks}"):
            began = time.perf_counter_ns()
            most = self.length + len(self._carried) + checked.rows + params.max_tokens
            limit = self._runner.config.context_limit
            self._runner.reserve(self._slot, min(most, limit), is_new=not self.length)
            rows, fed_ids = yield from self._rows(checked)
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
            costs=md.Costs(
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

    # -- a chunk ----------------------------------------------------------------------

    def _rows(self, checked: ChunkPrompt) -> Steps[tuple[Tensor, tuple[int, ...]]]:
        """Compute the rows of a prompt, (T, width), and their ids."""
        embed = self._runner.parts.embed
        rows, fed = list[Tensor](), list[int]()
        for piece in (Words(ids=self._carried), *checked.pieces):
            self._require_uncut()
            if isinstance(piece, Words):
                rows.append(embed(piece.ids))
                fed += piece.ids
                continue
            if isinstance(piece, EncodeImage):
                rows.append((yield piece))  # (64, width)
            else:
                rows.append((yield from self._encode_sound(piece)))  # (10, width)
            fed += [EMBEDDED] * len(rows[-1])
        assert len(fed) == checked.rows + len(self._carried), (len(fed), checked.rows)
        return torch.cat(rows), tuple(fed)

    def _encode_sound(self, pcm: Tensor) -> Steps[Tensor]:
        parts = self._runner.parts
        mel, self._mel = parts.front_end.next_frames(pcm, self._mel)
        units = 0 if self._audio_units == parts.config.audio.units else self._audio_units
        self._audio_units = units + 1
        embeddings: Tensor = yield EncodeAudio(mel=mel, slot=self._slot, units=units)
        return embeddings

    def _feed(self, rows: Tensor) -> Steps[LlmOutput]:
        """Feed rows after the slot's content; return the output of the last."""
        fed = yield from feed_blocks(self._slot, self.length, rows, self._require_uncut)
        self.length += len(rows)
        return fed

    def _sample(
        self, fed: LlmOutput, params: SamplingParams, emit: Emit, prompt_tokens: int
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
            fed, computed = (yield from self._feed(self._runner.parts.embed((token,)))), 1
        raise AssertionError("the last token has a reason")

    def _decide(self, fed: LlmOutput, draw: float, params: SamplingParams) -> int:
        def rule(logits: Candidates) -> int:
            return decide_plain(logits, draw, self._tokens.size, self._forbidden, params)

        return fed.logits.settle(rule)

    def _draws(self, params: SamplingParams) -> NDArray[np.float64]:
        """The draws of this chunk, one for each token that it may sample."""
        # The first token needs no room: it is sampled after the prompt, and the last is never fed.
        most = min(params.max_tokens, self._runner.config.context_limit - self.length + 1)
        return draws(params.seed, self.chunks, f"stream/{self._anchoring.request_id}", most)

    def _reason(self, token: int, count: int, params: SamplingParams) -> FinishReason | None:
        """Return the finish reason if the `count`-th token is the chunk's last."""
        if token in params.stop_token_ids:
            return "stop"
        if token in self._tokens.endings and not params.ignore_eos:
            return "stop"
        if count == params.max_tokens:
            return "length"
        return "context_full" if self.length == self._runner.config.context_limit else None


# -- transcription ------------------------------------------------------------------------------

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


def input_hash(chunk: md.Chunk) -> str:
    """Blake2b-128 of all model input: the sound, and whether it begins an utterance."""
    digest = hashlib.blake2b(f"{chunk.index == 0:d} ".encode(), digest_size=16)
    digest.update(chunk.pcm)
    return digest.hexdigest()


def opening_ids(tokens: Tokens) -> tuple[int, ...]:
    """The ids before an utterance's sound."""
    words = tokens.encode(f"system\n{INSTRUCTIONS}")
    return (tokens.ids.im_start, *words, tokens.ids.im_end)


class Transcript(InSlot):
    """One transcription in one slot, which must be empty; its generators never overlap."""

    kind: ClassVar[str] = "transcription"

    def __init__(self, runner: ModelRunner, tokens: Tokens, slot: int) -> None:
        super().__init__(runner, tokens, slot, "open")
        ids = tokens.ids
        self._head = TokenIds(ids=opening_ids(tokens))
        # Only text is decided: other tokens have no meaning here.
        never = {*tokens.control, *tokens.forbidden, *tokens.endings} - {ids.chunk_eos}
        self._forbidden = tuple(sorted(never))
        self._utterance: _Utterance | None = None

    def chunk(self, chunk: md.Chunk) -> Steps[md.ChunkResult]:
        """Transcribe a second; see `ModelSession.run`.

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
        sound = md.Sound(pcm=chunk.pcm)
        prompt: tuple[Part, ...] = (sound,) if chunk.index else (self._head, sound)
        checked = anchor.check(prompt, params)
        most = checked.rows + TOKENS_A_CHUNK - 1  # The last one is never fed.
        limit = self._runner.config.context_limit
        if anchor.length + most > limit:
            used = anchor.length
            raise ContextFull(f"a chunk may need {most} tokens; {used} of {limit} are used")

        def emit(sampled: Sampled) -> None:
            texts.append(sampled.text)

        self._utterance = None  # Lost, unless it completes and another chunk may follow.
        done = yield from anchor.answer(checked, params, emit)
        utterance.index += 1
        if chunk.is_last:
            texts.append(anchor.rest())
            anchor.release()
        else:
            self._utterance = utterance
        assert done.reason != "context_full", done
        return md.ChunkResult(
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
        super().release()
        self._utterance = None

    def _begin(self, number: int) -> None:
        if self._utterance is not None:
            self._utterance.anchor.release()
        anchor = Anchor(
            self._runner,
            self._tokens,
            Anchoring(request_id=f"utterance {number}"),
            self._slot,
            forbidden=self._forbidden,
        )
        self._utterance = _Utterance(anchor=anchor, number=number)

    def _check(self, chunk: md.Chunk) -> None:
        self._require("open")
        if len(chunk.pcm) != md.UNIT_BYTES:
            raise BackendError(
                f"chunk {chunk.index} has {len(chunk.pcm)} bytes of sound, not {md.UNIT_BYTES}"
            )
        under_way, wanted = self._utterance, (chunk.utterance, chunk.index)
        if chunk.index and (under_way is None or (under_way.number, under_way.index) != wanted):
            raise BackendError(
                f"call out of order: chunk {chunk.index} of utterance {chunk.utterance} is not "
                "the next"
            )
