"""A spoken chat answer: text tokens to speech codes, codes to sound.

Ten text tokens are spoken at a time: their conditions, `text_eos` after the answer's last,
`audio_bos`, then codes until speech ends or `CODES_MAX` are drawn. When the speech decoder's slot
would overflow, it restarts. Each 25 codes give a second of sound (`Voicing`), the first ones as
many as the vocoder says; the rest is flushed after the last text. A cut, checked before each code
and vocoder portion, ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np
from torch import Tensor, cat

from .checkpoint import CODES_A_UNIT, Parts
from .logits import CodeLogits
from .sampling import decide_chat_code, draws
from .vocoder import LOOKAHEAD, Vocoder, Voicing
from .work import Speak, Steps

TEXT_A_CHUNK: Final = 10
"""Text tokens spoken together, as in the published model's training."""
CODES_MAX: Final = 500
"""Maximum codes for these tokens: 20 seconds, as in the public code."""

Tell = Callable[[bytes, tuple[int, ...]], None]
"""Takes sound (float32 LE, 24 kHz) and its codes."""


@attrs.define(kw_only=True)
class Mouth:
    """The speaking side of one answer.

    Attributes:
        voice: the vocoder's encoding of the reference audio.
        slot: of the speech decoder, with `capacity` positions.
        key: session seed and turn index, which key the draws.
        is_cut: asked while speaking; True ends the speech. Default: never.
        length: positions in use.
        chunks: texts spoken so far.
        codes: all codes so far; the first `sounded` went to the vocoder.
        voicing: the vocoder's input state.
        tts_ns: time spent on codes.
        vocoder_ns: time spent on sound.
    """

    parts: Parts
    vocoder: Vocoder
    voice: object
    slot: int
    capacity: int
    key: tuple[int, int]
    is_cut: Callable[[], bool] = bool
    length: int = 0
    chunks: int = 0
    codes: list[int] = attrs.field(factory=list)
    sounded: int = 0
    voicing: Voicing = attrs.field(init=False)
    tts_ns: int = 0
    vocoder_ns: int = 0

    def __attrs_post_init__(self) -> None:
        self.voicing = Voicing(buffer=(self.vocoder.silent_code,) * LOOKAHEAD)

    def say(self, text: Sequence[tuple[int, Tensor]], tell: Tell, *, last: bool) -> Steps[bool]:
        """Speak text: token ids, each with its hidden state (width,).

        `tell` gets each second of sound, after the `last` text the flushed rest. False: cut.
        """
        began = time.perf_counter_ns()
        before_ns = self.vocoder_ns
        is_said = yield from self._codes(self._rows(text, last=last), tell)
        self.tts_ns += time.perf_counter_ns() - began - (self.vocoder_ns - before_ns)
        if is_said and last:
            is_said = yield from self._sound(tell, last=True)
        return is_said

    def _rows(self, text: Sequence[tuple[int, Tensor]], *, last: bool) -> Tensor:
        """The opening rows of a text, (text + 1 or 2, hidden)."""
        tts, eos = self.parts.tts, self.parts.config.tts.text_eos_token_id
        rows = tts.opening(text)
        if last and eos is not None:
            rows = cat((rows[:-1], tts.emb_text.weight[eos][None], rows[-1:]))
        return rows

    def _codes(self, rows: Tensor, tell: Tell) -> Steps[bool]:
        seed, turn = self.key
        if self.length + len(rows) + CODES_MAX > self.capacity:
            self.length = 0  # Restart the cache; its content is overwritten.
        most = min(CODES_MAX, self.capacity - self.length - len(rows))
        numbers = draws(seed, turn, f"chat speech {self.chunks}", most)
        self.chunks += 1
        for number in numbers:
            if self.is_cut():
                return False
            answer: CodeLogits = yield Speak(slot=self.slot, start=self.length, rows=rows)
            self.length += len(rows)
            code = decide_chat_code(answer.numbers(), self.codes, float(number))
            if code == self.parts.config.tts.eos:
                break
            self.codes.append(code)
            rows = self.parts.tts.code(code)
            most_waiting = CODES_A_UNIT if self.sounded else self.vocoder.first_codes
            if len(self.codes) - self.sounded == most_waiting:
                is_said = yield from self._sound(tell, last=False)
                if not is_said:
                    return False
        return True

    def _sound(self, tell: Tell, *, last: bool) -> Steps[bool]:
        began = time.perf_counter_ns()
        codes, self.sounded = tuple(self.codes[self.sounded :]), len(self.codes)
        seed, turn = self.key
        spoken = yield from self.voicing.sound(
            codes, self.voice, f"{seed}/chat {turn}", last=last, is_cut=self.is_cut
        )
        if spoken is None:
            return False
        sound, self.voicing = spoken
        self.vocoder_ns += time.perf_counter_ns() - began
        if self.is_cut():
            return False
        tell(np.concatenate([np.zeros(0, np.float32), *sound]).astype("<f4").tobytes(), codes)
        return True
