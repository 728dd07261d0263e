"""The running model: weights, all slots' memory, batched requests, and what computes in a slot.

All memory is allocated once. On a CPU a result does not depend on its batch: decoders ensure it
(`decoder.py`), and convolutions run per picture and per unit; `rows_are_independent` tests the
assumption with the loaded weights. On a GPU it does depend, except in exact mode
(`ComputeOptions`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Literal

import attrs
import torch
from torch import Tensor, nn

from ..base import BackendError, ContextFull, DeviceLost
from . import decoder
from .attention import PAGE, KvCopy, KvSlots, can_attend
from .audio import AudioNetwork, EncodeAudio
from .batched import ON_CPU, Batched, ComputeOptions, batched
from .checkpoint import Parts
from .config import UNIT_FRAMES, ModelConfig
from .device import (
    SHARED,
    StoreShape,
    choose_kernels,
    raising_device_lost,
    send,
    shared_positions,
    stores,
)
from .logits import CodeChooser, CodeLogits, Shortlists, rows_on_host
from .quantized import QuantizedLinear
from .tokens import Tokens
from .vision import FusedVision
from .vocoder import Pcm, Prepare, Vocode, Vocoder
from .work import EncodeImage, EncodeReference, Feed, KnownRows, LlmOutput, Speak, Work

PICTURE_MARKS: Final = 2
"""Tokens around a picture."""
CODE_ROWS: Final = (1, 10, 20)
"""A code; the first rows of a chunk of speech, which are those of its text, and `audio_bos`."""
TURN_ROWS: Final = 64
"""Of a batch of known rows; each has logits of all ids."""
PROBE_ROWS: Final = (16, 17, 23, 32, 50, 64, 100, 256)

_log = logging.getLogger("antiphon.model")


class ModelRunner:
    """Answers requests; see `work.py`.

    Args:
        vocoder: None where the model has no voice.
        slots: maximum concurrent sessions.
        shortlists: brings token logits to the host; None brings all of them, and those of codes.
        options: how it computes (`options_for`).
        context_percent: of the decoders' contexts, the language model's and the speech decoder's,
            for which memory is there in each slot; the slots share it.
    """

    def __init__(
        self,
        parts: Parts,
        vocoder: Vocoder | None,
        slots: int,
        shortlists: Shortlists | None = None,
        *,
        options: ComputeOptions = ON_CPU,
        context_percent: int = 100,
    ) -> None:
        choose_kernels()
        self.parts, self.vocoder, self.slots = parts, vocoder, slots
        self.shortlists = shortlists
        self._codes = CodeChooser(parts.config.tts.eos, is_near=shortlists is None)
        lengths = (*token_rows(parts.config), *CODE_ROWS, UNIT_FRAMES)
        shapes, spare = stores(parts.config), max(lengths) if options.is_flash else 0
        self.llm, self.tts = (
            self._store(
                shapes[name], spare, shared_positions(shapes[name].capacity, slots, context_percent)
            )
            for name in SHARED
        )
        self.audio = self._store(shapes["audio"], spare)
        if options.is_flash and not can_attend(self.llm):
            _log.warning("no flash attention here: rows are attended one by one")
            options = ComputeOptions()
        self.options = options
        llm = decoder.StockDecoder("tokens", parts.llm.model, parts.llm.lm_head, self.llm)
        tts = decoder.StockDecoder("codes", parts.tts.model, parts.tts.logits, self.tts)
        self._llm: decoder.Decoder = decoder.RowByRowDecoder(llm, options)
        self._tts: decoder.Decoder = decoder.RowByRowDecoder(tts, options)
        self._together: list[Batched] = []
        if options.is_flash:
            self._use_flash(llm, tts)
        if options.is_flash and self.llm.keys.is_cuda:
            self._warm_up()

    def _use_flash(self, llm: decoder.StockDecoder, tts: decoder.StockDecoder) -> None:
        """Compute sessions together, as a GPU does."""
        options, apm, projection = self.options, self.parts.apm, self.parts.audio_projection_layer
        self._vision = FusedVision(self.parts.vpm, self.parts.resampler)
        tokens = batched(network_of(llm), options, token_rows(self.config))
        codes = batched(network_of(tts), options, CODE_ROWS)
        self._sound_of = batched(AudioNetwork(apm, projection, self.audio), options, (UNIT_FRAMES,))
        self._llm, self._tts = decoder.BatchedDecoder(tokens), decoder.BatchedDecoder(codes)
        self._together = [tokens, codes, self._sound_of]

    def _warm_up(self) -> None:
        """Have the libraries choose their kernels, for which the first session would wait."""
        config, vision = self.parts.config, self.parts.config.vision
        side = vision.scale_resolution // vision.patch_size * vision.patch_size
        mels = [torch.zeros(config.audio.num_mel_bins, 2 * UNIT_FRAMES + more) for more in (2, 4)]
        works: list[Work] = [
            EncodeImage(picture=torch.zeros(3, side, side)),
            *(EncodeAudio(mel=mel, slot=0, units=units) for units, mel in enumerate(mels)),
            Feed(slot=0, start=0, rows=self.parts.embed((0,))),
        ]
        try:
            for work in works[: None if config.audio.units > 1 else 2]:
                self.compute([work])
        except Exception as error:
            if isinstance(error, DeviceLost):
                raise
            _log.warning("the first session will wait for kernels", exc_info=True)
        self.clear(0)

    def _store(self, shape: StoreShape, spare: int, positions: int | None = None) -> KvSlots:
        weight, sizes = self.parts.llm.lm_head.weight, attrs.asdict(shape)
        return KvSlots(
            **sizes,
            slots=self.slots,
            spare=spare,
            positions=positions,
            dtype=weight.dtype,
            device=weight.device,
        )

    def reserve(self, slot: int, end: int, *, speech: int = 0, is_new: bool = False) -> None:
        """Reserve memory for a slot's tokens up to `end`, before any of them is fed.

        `speech`: the same of the speech decoder. A session that `is_new` leaves a page to each that
        runs. There is not enough: `ContextFull`, or `BackendError` for a new one, which may find
        some later.
        """
        tokens = (self.llm, end, max(token_rows(self.config)), "tokens")
        for store, last, rows, what in (tokens, (self.tts, speech, max(CODE_ROWS), "codes")):
            # A step writes so many rows, however few it is given.
            most = min(store.capacity, last + self.options.is_flash * rows) if last else 0
            if not store.reserve(slot, most, PAGE * store.used_slots if is_new else 0):
                free = f"{last} {what}: {store.free} of {store.positions} are free"
                if is_new:
                    raise BackendError(f"no memory for another session of {free}")
                raise ContextFull(f"no memory for {free}")

    @property
    def config(self) -> ModelConfig:
        """The model's shapes."""
        return self.parts.config

    @property
    def attention(self) -> str:
        """A description of the attention method, on which bits depend."""
        if not self._together:
            return "sdpa, row by row"
        steps = {each.network.name: each.steps for each in self._together}
        described = (
            f"{name} in steps of {some.description}" if some else name
            for name, some in steps.items()
        )
        return "; ".join(("flash", *described))

    @property
    def batch(self) -> str:
        """A description of the batching, on which bits depend."""
        alone = ", but for steps one session at a time" if self.options.is_alone else ""
        return f"{self.options.rows_min} rows at least{alone}"

    @property
    def is_exact(self) -> bool:
        """Whether results are bitwise independent of the batch, as far as can be tested."""
        if self.options.is_alone:
            return all(each.steps is not None for each in self._together)
        is_on_cpu = self.llm.keys.device.type == "cpu"
        return is_on_cpu and not self.options.is_flash and rows_are_independent(self.parts)

    @property
    def slot_bytes(self) -> int:
        """Memory of each slot, in bytes."""
        return sum(store.slot_bytes for store in (self.llm, self.tts, self.audio))

    def compute(self, works: Sequence[Work]) -> list[Any]:
        """Answer one bucket's requests in order, repeatably; `DeviceLost` if the GPU is lost."""
        together = [works]
        if self.options.is_alone and isinstance(works[0], EncodeImage):
            together = [[work] for work in works]
        with raising_device_lost(), torch.inference_mode():
            return [answer for some in together for answer in self._answer(some)]

    def _answer(self, works: Sequence[Any]) -> list[Any]:
        answers: dict[type[Work], Callable[[Sequence[Any]], list[Any]]] = {
            EncodeImage: self._encode_images,
            EncodeAudio: self._encode_sound,
            EncodeReference: self._encode_references,
            Feed: self._feed,
            Speak: self._speak,
            KnownRows: self._run_known,
            Prepare: self._prepare,
            Vocode: self._vocode,
        }
        return answers[type(works[0])](works)

    def _encode_images(self, works: Sequence[EncodeImage]) -> list[Tensor]:
        sent = send([work.picture for work in works], self.llm.keys)
        slices = torch.stack(sent) if len(sent) > 1 else sent[0][None]  # (B, 3, h, w)
        patch = self.config.vision.patch_size
        if self._together:
            return list(self._vision.embed(slices))
        rows, columns = (side // patch for side in slices.shape[2:])
        return list(self.parts.resampler(self.parts.vpm(slices), rows, columns))

    def _encode_references(self, works: Sequence[EncodeReference]) -> list[Tensor]:
        (work,) = works
        (mel,) = send([self.parts.front_end.clip(work.pcm)], self.llm.keys)
        return list(self.parts.audio_projection_layer(self.parts.apm.reference(mel[None])))

    def _encode_sound(self, requests: Sequence[EncodeAudio]) -> list[Tensor]:
        mels = send([request.mel for request in requests], self.audio.keys)
        sent = [attrs.evolve(one, mel=mel) for one, mel in zip(requests, mels, strict=True)]
        if self._together:
            frames = self.parts.apm.frames(sent, together=not self.options.is_alone)
            return list(self._sound_of.run(frames, [one.row for one in sent])[0])
        rows = self.parts.apm.encode_units(sent, self.audio)  # (B, 50, d_model)
        return list(self.parts.audio_projection_layer(rows))  # (10, width) each

    def _feed(self, works: Sequence[Feed]) -> list[LlmOutput]:
        hidden, logits = self._llm.run(works)  # (B, width), (B, V)
        rows = rows_on_host(logits) if self.shortlists is None else self.shortlists.rows(logits)
        return [LlmOutput(hidden=row, logits=out) for row, out in zip(hidden, rows, strict=True)]

    def _speak(self, works: Sequence[Speak]) -> list[CodeLogits]:
        logits = self._tts.run(works)[1]  # (B, codes)
        return self._codes.rows(logits, [work.choice for work in works])

    def _run_known(self, turns: Sequence[KnownRows]) -> list[list[Any]]:
        works = [work for turn in turns for work in turn.works]
        parts = (works[at : at + TURN_ROWS] for at in range(0, len(works), TURN_ROWS))
        answers = iter([answer for part in parts for answer in self._answer(part)])
        return [[next(answers) for _ in turn.works] for turn in turns]

    def _prepare(self, works: Sequence[Prepare]) -> list[None]:
        assert self.vocoder is not None
        for work in works:
            self.vocoder.prepare(work.voice)
        return [None] * len(works)

    def _vocode(self, works: Sequence[Vocode]) -> list[tuple[Pcm, object]]:
        assert self.vocoder is not None
        return self.vocoder.sound(works)

    def first_block(self, slot: int) -> KvCopy:
        """A copy of the first unit in the audio encoder's slot."""
        return self.audio.take(slot, 0, UNIT_FRAMES)

    def clear(self, slot: int) -> None:
        """Wipe a slot, so that nothing of a session remains."""
        for store in (self.llm, self.tts, self.audio):
            store.wipe(slot)


def network_of(stock: decoder.StockDecoder) -> decoder.FusedDecoder:
    """A decoder's pass for many sessions, with the fastest operators of its device."""
    heads = int(stock.model.config.num_attention_heads)
    return decoder.FusedDecoder(stock, operators_for(stock.store, heads))


def operators_for(store: KvSlots, heads: int) -> decoder.Operators:
    """The fastest operators that compute rightly for a decoder of so many query heads."""
    like = store.keys  # (layers, slots, groups, capacity, width)
    if like.is_cuda:
        try:
            from .kernels_triton import TritonOperators

            found = TritonOperators()
            decoder.try_operators(
                found, like, heads=heads, groups=like.shape[2], width=like.shape[4]
            )
        except Exception:  # Of the compiler or the driver, of any type.
            _log.warning("no fused kernels here: torch's operators are launched", exc_info=True)
        else:
            return found
    return decoder.Operators()


def token_rows(config: ModelConfig) -> tuple[int, ...]:
    """The most frequent lengths: a token, the end of a unit, a unit, and one with a picture."""
    unit = 1 + UNIT_FRAMES // config.audio.pool
    return (1, 2, unit, unit + config.vision.queries + PICTURE_MARKS)


def rows_are_independent(parts: Parts) -> bool:
    """Test with the loaded weights whether a row's bits are its own from `ROWS_MIN` rows on."""
    seen = set[tuple[object, ...]]()
    with torch.inference_mode():
        for module in parts.modules():
            if not isinstance(module, nn.Linear | QuantizedLinear):
                continue
            kind = (type(module), module.out_features, module.in_features)
            if kind in seen:
                continue
            seen.add(kind)
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(PROBE_ROWS[-1], module.in_features, generator=generator)
            x = x.to(parts.llm.lm_head.weight)
            whole = module(x)
            if not all(torch.equal(module(x[:count]), whole[:count]) for count in PROBE_ROWS):
                return False
    return True


# -- what computes in one slot ------------------------------------------------------------------

Phase = Literal["new", "measured", "ready", "ran", "open", "failed", "released"]


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Make any other exception a `BackendError` that says what failed."""
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"{what} failed: {error}") from error


class InSlot:
    """What computes in one slot, which must be empty; its generators never overlap.

    A chat turn, a streaming request or a transcription: they share their slot, their cut, and their
    end. After a failure the slot is empty.
    """

    kind: ClassVar[str]

    def __init__(self, runner: ModelRunner, tokens: Tokens, slot: int, phase: Phase) -> None:
        self._runner, self._tokens, self._slot = runner, tokens, slot
        self._phase: Phase = phase
        self._is_interrupted = False

    def interrupt(self, index: int = -1) -> None:  # noqa: ARG002 - it is the only one here
        """Cut it for good at its next step, begun or not; safe from any thread."""
        self._is_interrupted = True

    def release(self) -> None:
        """Wipe the slot; idempotent, and any other call fails afterwards."""
        if self._phase not in ("failed", "released"):
            self._runner.clear(self._slot)
        self._phase = "released"

    @contextmanager
    def _wiped_on_failure(self, what: str) -> Iterator[None]:
        """As `failing`, and the slot is empty then."""
        with failing(what):
            try:
                yield
            except Exception:
                self.release()
                self._phase = "failed"
                raise

    def _require_uncut(self) -> None:
        if self._is_interrupted:
            raise BackendError(f"the {self.kind} was cut")

    def _require(self, phase: Phase) -> None:
        if self._phase != phase:
            raise BackendError(f"call out of order: the {self.kind} is {self._phase}, not {phase}")
