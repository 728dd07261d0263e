"""A machine's batched steps: what they take, and how far they are off rows by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from runtime.model.backends.minicpmo.audio import EncodeAudio
from runtime.model.backends.minicpmo.batched import ComputeOptions
from runtime.model.backends.minicpmo.decoder import Decoder, RowByRowDecoder, StockDecoder
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import EncodeImage, Feed, Speak

SESSIONS: Final = (1, 3, 16, 48, 64)
LENGTHS: Final = (1, 2, 11, 77)
"""Rows of a session: a token, what closes a unit, a unit, a unit with a picture."""
CHUNK_LENGTHS: Final = (1, 8)
"""The same of the speech decoder: a code, a chunk's first rows."""
MEL_FRAMES: Final = 104

Say = Callable[[str, object], None]


@attrs.frozen
class Bench:
    """A machine, and how what it does is measured.

    Attributes:
        machine: with random weights.
        say: told each finding.
    """

    runner: ModelRunner
    say: Say

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU's."""
        return self.runner.llm.keys.is_cuda

    def wait(self) -> None:
        """Wait until the GPU has done all that it was asked for."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def clock(self, what: str, work: Callable[[], object], count: int = 3) -> None:
        """Say how many milliseconds something takes: the median, after once to warm up."""
        spent_ms = []
        for _ in range(count + 1):
            began = time.perf_counter()
            work()
            self.wait()
            spent_ms.append(1000 * (time.perf_counter() - began))
        self.say(f"{what}, ms", round(sorted(spent_ms[1:])[count // 2], 3))

    def rows(self, count: int, width: int) -> Tensor:
        """Random rows."""
        return torch.randn(count, width).mul_(0.02).to(self.runner.llm.keys)

    def decoder(
        self, stock: StockDecoder, decoder: Decoder, kind: type[Any], lengths: tuple[int, ...]
    ) -> None:
        """Hold rows of many sessions to rows by themselves, and time both."""
        plain, store = RowByRowDecoder(stock, ComputeOptions()), stock.store
        name, width = stock.name, int(stock.model.config.hidden_size)
        slots = self.runner.slots
        for length in lengths:
            top = min(8000, store.capacity) - length
            for count in (count for count in SESSIONS if count <= slots):
                works = [
                    kind(slot=slot, start=(7 * slot + 5) * top // 64 % top, rows=rows)
                    for slot, rows in enumerate(self.rows(count * length, width).split(length))
                ]
                pairs = zip(plain.run(works), decoder.run(works), strict=True)
                off = [float((a - b).float().norm() / a.float().norm()) for a, b in pairs]
                what = f"{name}: {length} for {count}"
                self.say(f"{what} is off by", [f"{part:.1e}" for part in off])
                for start in (100, top // 2, top):
                    works = [attrs.evolve(work, start=start) for work in works]
                    self.clock(f"{what} at {start}", lambda w=works: decoder.run(w))
            self.clock(f"{name}: {length} by itself at {top}", lambda w=works: plain.run(w[:1]))

    def senses(self) -> None:
        """Time sounds and a picture."""
        bands = self.runner.config.audio.num_mel_bins
        for count in (count for count in (1, 16, 64) if count <= self.runner.slots):
            hears = [
                EncodeAudio(mel=torch.randn(bands, MEL_FRAMES), slot=slot, units=20)
                for slot in range(count)
            ]
            self.clock(f"sound of {count}", lambda works=hears: self.runner.compute(works), 3)
        for count in (1, 16):
            pictures = [EncodeImage(picture=torch.randn(3, 448, 448)) for _ in range(count)]
            self.clock(f"pictures, {count}", lambda works=pictures: self.runner.compute(works), 3)


@torch.inference_mode()
def measure(runner: ModelRunner, say: Say) -> None:
    """Say all that is to be known of a machine; its slots are free, and empty afterwards."""
    bench, config = Bench(runner, say), runner.config
    for store in (runner.llm, runner.tts, runner.audio):
        store.scramble()
    parts = runner.parts
    llm = StockDecoder(
        name="tokens", model=parts.llm.model, head=parts.llm.lm_head, store=runner.llm
    )
    tts = StockDecoder(name="codes", model=parts.tts.model, head=parts.tts.logits, store=runner.tts)
    bench.decoder(llm, runner._llm, Feed, LENGTHS)
    bench.decoder(tts, runner._tts, Speak, CHUNK_LENGTHS)
    shortlists = runner.shortlists
    if shortlists is not None:
        logits = torch.randn(runner.slots, config.llm.vocab_size).to(runner.llm.keys.device)
        bench.clock(f"shortlists of {runner.slots}", lambda: shortlists.rows(logits))
    bench.senses()
    for store in (runner.llm, runner.tts, runner.audio):
        store.clear()
