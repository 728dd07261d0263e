"""One unit on its way through the model: prefill, generate, speak.

The rules are model.md's ("One unit"). A turn is open from the first token that is fed in generate
until `turn_eos` is fed; a listen decided inside an open turn becomes `tts_bos`, a listen forced
inside one feeds `turn_eos` first. The token of step 0 is neither text nor speech. `chunk_eos` and
the other terminators are not fed here: finalize feeds them.

A run replaces `state` as it goes; the caches it writes to are restored by their lengths.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protocol.model import Costs, Cut, Opening, Stage, Unit, UnitResult

from .decide import CHUNK_CHARACTERS_MAX, DRAWS_A_STEP, REPETITION_WINDOW, decide, fed_max
from .parts import Parts
from .sampling import draws
from .sound import read_pcm
from .state import SessionState, Speech, feed
from .tokens import Tokens
from .tts import CODES_A_UNIT
from .vision import QUERIES
from .vocoder import Vocoder


def input_hash(unit: Unit) -> str:
    """Blake2b-128 of all that the model takes in: sound, pictures and flags, with their lengths."""
    digest = hashlib.blake2b(digest_size=16)
    flags = f"{unit.force_listen:d} {unit.max_slice_nums} {len(unit.frames)}".encode()
    for part in (flags, unit.pcm, *unit.frames):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@attrs.define(kw_only=True)
class UnitRun:
    """A unit while it runs.

    Attributes:
        parts: the weights.
        tokens: the tokenizer.
        vocoder: codes to sound.
        opening: the session's settings.
        unit: what is heard and seen.
        state: the session's, replaced step by step.
        stop: asked before each step; True cuts the unit there.
        terminator: what finalize is to feed.
        decided: ids decided.
        fed: ids fed in generate.
        spoken: text tokens for the speech decoder, each with its hidden state (width,).
        text: the unit's text.
        codes: speech codes.
        pcm: sound, float32 LE at 24 kHz.
        cut: where the unit was cut.
        spent_ns: time by stage.
    """

    parts: Parts
    tokens: Tokens
    vocoder: Vocoder
    opening: Opening
    unit: Unit
    state: SessionState
    stop: Callable[[Stage, int], bool]
    terminator: int = -1
    decided: list[int] = attrs.field(factory=list)
    fed: list[int] = attrs.field(factory=list)
    spoken: list[tuple[int, Tensor]] = attrs.field(factory=list)
    text: str = ""
    codes: list[int] = attrs.field(factory=list)
    pcm: bytes = b""
    cut: Cut | None = None
    spent_ns: dict[Stage, int] = attrs.field(factory=dict)

    def run(self) -> UnitResult:
        """Run the unit to its end or its cut."""
        began = time.perf_counter_ns()
        hidden = self._prefill()
        first: NDArray[np.float32] = self.parts.llm.logits(hidden).numpy()  # (V,)
        self._spend("prefill", began)
        config = self.opening.config
        forced = self.unit.force_listen or self.unit.index < config.force_listen_count
        middle = time.perf_counter_ns()
        is_listen = self._listen_by_force() if forced else self._generate(first)
        self._spend("llm", middle)
        ended = bool(self.fed) and self.fed[-1] == self.tokens.ids.turn_eos
        if not is_listen and self.cut is None and config.generate_audio:
            self._vocalise(last=ended)
        if ended:
            self.state = self.state.but(turn_open=False, speech=Speech())
        return self._result(first, is_listen=is_listen, ended=ended, began=began, middle=middle)

    def _spend(self, stage: Stage, began: int) -> None:
        self.spent_ns[stage] = time.perf_counter_ns() - began

    def _cut_at(self, stage: Stage, step: int) -> bool:
        if self.stop(stage, step):
            self.cut = Cut(stage=stage, step=step)
        return self.cut is not None

    def _feed(self, embeddings: Tensor) -> Tensor:
        self.state, hidden = feed(self.parts.llm, self.state, embeddings)
        return hidden

    def _prefill(self) -> Tensor:
        """Feed `<unit>`, the pictures and the sound; gives the last hidden state, (width,)."""
        parts, ids = self.parts, self.tokens.ids
        rows = [parts.llm.embed((ids.unit,))]
        for jpeg in self.unit.frames:
            marks = parts.llm.embed((ids.image, ids.image_end))
            rows += [marks[:1], parts.vpm.embed(jpeg), marks[1:]]  # 1 + 64 + 1
        pcm = torch.from_numpy(read_pcm(self.unit.pcm))  # (16000,)
        sound, carry = parts.apm.encode(pcm, self.state.audio)  # (10, width)
        self.state = self.state.but(audio=carry)
        return self._feed(torch.cat([*rows, sound]))[-1]

    def _listen_by_force(self) -> bool:
        ids = self.tokens.ids
        self.terminator = ids.listen
        self.decided.append(ids.listen)
        if self.state.turn_open:
            self._feed(self.parts.llm.embed((ids.turn_eos,)))
            self.fed.append(ids.turn_eos)
        return True

    def _generate(self, first: NDArray[np.float32]) -> bool:
        """Decide and feed tokens until a terminator; True where the unit listens."""
        ids, config = self.tokens.ids, self.opening.config
        most = fed_max(config)
        numbers = draws(self.opening.seed, self.unit.index, "llm", DRAWS_A_STEP * (most + 1))
        numbers = numbers.reshape(-1, DRAWS_A_STEP)
        logits, self.terminator = first.astype(np.float64), ids.chunk_eos
        for step in range(most + 1):
            if self._cut_at("llm", step):
                return False
            if step == most:
                self.decided.append(ids.chunk_eos)
                return False
            token = decide(logits, self.state.history, numbers[step], config, self.tokens)
            self.decided.append(token)
            if token == ids.chunk_eos:
                return False
            self._remember(token)
            if token == ids.listen and self.state.turn_open:
                token = ids.tts_bos
            if token in self.tokens.terminators:
                self.terminator = token
                return token == ids.listen and not self.fed
            if self._overflows(token, step):
                return False
            hidden = self._feed(self.parts.llm.embed((token,)))[0]  # (width,)
            self._say(token, hidden, step)
            logits = self.parts.llm.logits(hidden).numpy().astype(np.float64)
        raise AssertionError("the last iteration returns")

    def _remember(self, token: int) -> None:
        history = (*self.state.history, token)[-REPETITION_WINDOW:]
        self.state = self.state.but(history=history)

    def _overflows(self, token: int, step: int) -> bool:
        if step == 0 or token in self.tokens.control:
            return False
        return len(self.text) + len(self.tokens.decode((token,))) > CHUNK_CHARACTERS_MAX

    def _say(self, token: int, hidden: Tensor, step: int) -> None:
        turn_eos = token == self.tokens.ids.turn_eos
        self.fed.append(token)
        self.state = self.state.but(turn_open=not turn_eos)
        if step > 0 and not turn_eos:
            self.spoken.append((token, hidden))
            self.text = self.tokens.decode([index for index, _ in self.spoken])

    def _vocalise(self, *, last: bool) -> None:
        """Text to codes to sound."""
        began = time.perf_counter_ns()
        speech = self.state.speech.begun(self.parts.config.tts)
        numbers = draws(self.opening.seed, self.unit.index, "tts", CODES_A_UNIT)
        assert speech.cache is not None
        self.codes = self.parts.tts.speak(
            self.spoken,
            speech.cache,
            speech.codes,
            numbers,
            last=last,
            stop=lambda step: self._cut_at("tts", step),
        )
        self._spend("tts", began)
        began, tail = time.perf_counter_ns(), speech.tail
        if self.cut is None and not self._cut_at("token2wav", 0):
            sound, tail = self.vocoder.synthesise(self.codes, tail)
            self.pcm = sound.astype("<f4").tobytes()
            self._spend("token2wav", began)
        self.state = self.state.but(speech=speech.after(self.codes, tail))

    def _result(
        self, first: NDArray[np.float32], *, is_listen: bool, ended: bool, began: int, middle: int
    ) -> UnitResult:
        second, best = np.sort(first)[-2:]
        spent = {stage: ns // 1000 for stage, ns in self.spent_ns.items()}
        now, pictures = time.perf_counter_ns(), len(self.unit.frames)
        return UnitResult(
            index=self.unit.index,
            is_listen=is_listen,
            text=self.text,
            pcm=self.pcm,
            end_of_turn=ended,
            kv_length=self.state.length,
            decided_ids=tuple(self.decided),
            fed_ids=tuple(self.fed),
            codec_ids=tuple(self.codes),
            cut=self.cut,
            input_hash=input_hash(self.unit),
            logits_hash=hashlib.blake2b(first.tobytes(), digest_size=16).hexdigest(),
            margin=float(best - second),
            vision_slices=pictures,
            vision_tokens=QUERIES * pictures,
            costs=Costs(
                prefill_us=spent["prefill"],
                generate_us=(now - middle) // 1000,
                llm_us=spent["llm"],
                tts_us=spent.get("tts", 0),
                token2wav_us=spent.get("token2wav", 0),
                wall_us=(now - began) // 1000,
            ),
        )
