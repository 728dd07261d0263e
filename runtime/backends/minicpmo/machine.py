"""The model at work: weights, the memory of all slots, and answers to batches of requests.

All memory is made here, once. What a request gets does not depend on what it is computed with:

- attention is computed row by row (`attention.py`), convolutions picture by picture and unit by
  unit;
- what is computed for all rows together is matrix products and functions of single rows. A product
  gives each row the same bits however many others there are, as long as there are at least
  `ROWS_MIN`: below that the CPU's libraries take other kernels. So smaller batches are padded.

`rows_are_independent` tries just that with the weights at hand.

On a GPU single tokens and codes are decoded in steps of fixed sizes instead (`decode.py`), where
the steps can be made; all else is as on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .attention import Kept, KvSlots, Row, SlotCache
from .audio import Hearing
from .config import UNIT_FRAMES, ModelConfig
from .decode import Stepper, stepper
from .parts import Parts
from .plan import StoreShape, stores
from .token_logits import Shortlists, rows_on_host
from .vocoder import Vocoder
from .work import Fed, Feed, Hear, Recall, See, Sound, Speak, Work

ROWS_MIN: Final = 16
"""Rows of a matrix product from which on each row's bits are its own; see above."""
PROBE_ROWS: Final = (16, 17, 23, 32, 50, 64, 100, 256)

_log = logging.getLogger(__name__)


def _padded(rows: Tensor, count: int) -> Tensor:
    """Rows (B, ...) with zeros behind them, `count` at least."""
    lacking = max(0, count - len(rows))
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, lacking)) if lacking else rows


MakeSteps = Callable[[nn.Module, Callable[[Tensor], Tensor], KvSlots], Stepper]
"""Of a model without its head, its head, and its store."""


@attrs.frozen(eq=False)
class Decoder:
    """A decoder with its memory.

    Attributes:
        model: stock, without its head.
        head: last hidden states to logits, (B, width) -> (B, ids).
        store: keys and values of all slots.
        steps: decodes single rows; None decodes them as any others.
    """

    model: nn.Module
    head: Callable[[Tensor], Tensor]
    store: KvSlots
    steps: Stepper | None

    def run(self, works: Sequence[Feed | Speak]) -> tuple[Tensor, Tensor]:
        """Run rows of one length; gives their last hidden states (B, width) and logits (B, ids)."""
        count = len(works[0].rows)
        if self.steps is not None and count == 1:
            places = [(work.slot, work.start) for work in works]
            return self.steps.decode([work.rows[0] for work in works], places)
        rows = [Row(slot=work.slot, start=work.start) for work in works]
        x = _padded(torch.stack([work.rows for work in works]), -(-ROWS_MIN // count))
        starts = torch.tensor([work.start for work in works] + [0] * (len(x) - len(works)))
        positions = (starts[:, None] + torch.arange(count)).to(x.device)
        heads = int(self.model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
        cache = SlotCache(self.store, rows, count, heads // self.store.keys.shape[2])
        out = self.model(
            inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True
        )
        hidden: Tensor = out.last_hidden_state[: len(works), -1]
        return hidden, self.head(_padded(hidden, ROWS_MIN)).float()[: len(works)]


class Machine:
    """Answers requests; see `work.py`.

    Args:
        parts: the weights.
        vocoder: codes to sound; None where the model has no voice.
        slots: sessions at once.
        shortlists: what brings the logits of tokens to the host; None brings all of them.
        make_steps: makes what decodes single rows; on a GPU `decode.stepper`, elsewhere nothing.

    Attributes:
        llm: keys and values of the language model.
        audio: of the audio encoder.
        tts: of the speech decoder.
    """

    def __init__(
        self,
        parts: Parts,
        vocoder: Vocoder | None,
        slots: int,
        shortlists: Shortlists | None = None,
        *,
        make_steps: MakeSteps | None = None,
    ) -> None:
        # On a Hopper GPU torch would take cuDNN's attention, which makes a plan, in tens of
        # milliseconds, for each length of keys that is new to the thread: here nearly all are.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        self.parts, self.vocoder, self.slots = parts, vocoder, slots
        self.shortlists = shortlists
        shapes = stores(parts.config)
        self.llm = self._store(shapes["llm"])
        self.tts = self._store(shapes["tts"])
        self.audio = self._store(shapes["audio"])
        if make_steps is None and self.llm.keys.is_cuda:
            make_steps = stepper
        self._llm = _decoder(parts.llm.model, parts.llm.lm_head, self.llm, make_steps)
        self._tts = _decoder(parts.tts.model, parts.tts.logits, self.tts, make_steps)

    def _store(self, shape: StoreShape) -> KvSlots:
        weight = self.parts.llm.lm_head.weight
        sizes = attrs.asdict(shape)
        return KvSlots(**sizes, slots=self.slots, dtype=weight.dtype, device=weight.device)

    @property
    def config(self) -> ModelConfig:
        """The model's shapes."""
        return self.parts.config

    @property
    def attention(self) -> str:
        """How attention is computed, in words: other ways give other bits."""
        said = ["sdpa, row by row"]
        for what, decoder in (("tokens", self._llm), ("codes", self._tts)):
            if decoder.steps is not None:
                sizes = ", ".join(map(str, decoder.steps.sizes))
                said.append(f"{what} by flex in steps of {sizes}")
        return "; ".join(said)

    @property
    def slot_bytes(self) -> int:
        """Memory that each slot takes."""
        return sum(store.slot_bytes for store in (self.llm, self.tts, self.audio))

    def compute(self, works: Sequence[Work]) -> list[Any]:
        """Answer requests of one bucket, in their order; answering again gives the same."""
        with torch.inference_mode():
            first = works[0]
            if isinstance(first, Feed):
                return self._feed([work for work in works if isinstance(work, Feed)])
            if isinstance(first, Speak):
                return self._speak([work for work in works if isinstance(work, Speak)])
            if isinstance(first, Hear):
                return self._hear([work.hearing for work in works if isinstance(work, Hear)])
            if isinstance(first, Sound):
                soundings = [work.sounding for work in works if isinstance(work, Sound)]
                assert self.vocoder is not None
                return list(self.vocoder.sound(soundings))
            return [self._one(work) for work in works]

    def _one(self, work: Work) -> Tensor:
        if isinstance(work, See):
            picture = work.picture.to(self.llm.keys)[None]
            patch = self.config.vision.patch_size
            rows, columns = (side // patch for side in picture.shape[2:])
            seen: Tensor = self.parts.resampler(self.parts.vpm(picture), rows, columns)
            return seen[0]
        assert isinstance(work, Recall), work
        mel = self.parts.front_end.clip(work.pcm).to(self.llm.keys)
        heard: Tensor = self.parts.audio_projection_layer(self.parts.apm.reference(mel[None]))
        return heard[0]

    def _hear(self, hearings: Sequence[Hearing]) -> list[Tensor]:
        rows = self.parts.apm.hear(hearings, self.audio)  # (B, 50, d_model)
        return list(self.parts.audio_projection_layer(rows))  # (10, width) each

    def _feed(self, works: Sequence[Feed]) -> list[Fed]:
        hidden, logits = self._llm.run(works)  # (B, width), (B, V)
        rows = rows_on_host(logits) if self.shortlists is None else self.shortlists.rows(logits)
        return [Fed(hidden=row, logits=out) for row, out in zip(hidden, rows, strict=True)]

    def _speak(self, works: Sequence[Speak]) -> list[Tensor]:
        return list(self._tts.run(works)[1].cpu())

    def first_block(self, slot: int) -> Kept:
        """A copy of the first unit in the audio encoder's slot."""
        return self.audio.take(slot, 0, UNIT_FRAMES)

    def clear(self, slot: int) -> None:
        """Wipe a slot: nothing of a session is left for the next one."""
        for store in (self.llm, self.tts, self.audio):
            store.wipe(slot)


def _decoder(
    model: nn.Module, head: Callable[[Tensor], Tensor], store: KvSlots, make: MakeSteps | None
) -> Decoder:
    """A decoder, with steps where they can be made; without, it does all the same, and slower."""
    steps = None
    if make is not None:
        try:
            with torch.inference_mode():
                steps = make(model, head, store)
        except Exception:  # Of the compiler, the driver or a library: what, no caller can know.
            _log.exception("no fixed steps for %s: it decodes row by row", type(model).__name__)
            if store.keys.is_cuda:
                torch.cuda.synchronize()  # Raises where the GPU is lost to this process.
    return Decoder(model, head, store, steps)


def rows_are_independent(parts: Parts) -> bool:
    """Whether a row's bits are its own from `ROWS_MIN` rows on, tried with the weights at hand."""
    seen: set[tuple[int, ...]] = set()
    with torch.inference_mode():
        for module in parts.modules():
            if not isinstance(module, nn.Linear) or tuple(module.weight.shape) in seen:
                continue
            seen.add(tuple(module.weight.shape))
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(PROBE_ROWS[-1], module.in_features, generator=generator)
            x = x.to(module.weight)
            whole = module(x)
            if not all(torch.equal(module(x[:count]), whole[:count]) for count in PROBE_ROWS):
                return False
    return True
