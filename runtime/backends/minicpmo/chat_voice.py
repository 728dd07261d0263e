"""An answer of chat, aloud: text tokens to speech codes, codes to sound.

Ten text tokens at a time are spoken: their conditions, behind the last of the answer `text_eos`,
then `audio_bos`, then codes until speech ends or `CODES_MAX` were drawn. What the speech decoder
remembers lives for the answer; where its slot would overflow it starts over. Each 25 codes give a
second of sound (`Voicing`); what is left is flushed behind the last text.

Whether the answer was cut is asked before each code and each portion for the vocoder. Nothing is
told from then on, and nothing more can be said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, cat

from .decide import decide_chat_code
from .parts import Parts
from .sampling import draws
from .token_logits import numbers_of
from .tts import CODES_A_UNIT
from .vocoder import LOOKAHEAD, Sounding, Vocoder, Voicing
from .work import Sound, Speak, Steps

TEXT_A_CHUNK: Final = 10
"""Text tokens that are spoken together: what the published model was trained on."""
CODES_MAX: Final = 500
"""Codes of so many tokens, at most: 20 seconds, as in the public code."""

Tell = Callable[[bytes, tuple[int, ...]], None]
"""Takes sound (float32 LE, 24 kHz) and the codes that it was made of."""


@attrs.define(kw_only=True)
class Mouth:
    """The speaking side of one answer.

    Attributes:
        parts: the weights; shared.
        vocoder: codes to sound; shared.
        voice: what the vocoder made of the reference audio.
        slot: where the speech decoder's keys and values lie.
        capacity: positions of that slot.
        key: session seed and turn index, which key the draws.
        is_cut: asked as it speaks; True ends it there. By default it never is.
        length: positions in use.
        chunks: texts spoken so far.
        codes: all codes so far.
        sounded: of these, so many went to the vocoder.
        voicing: what the vocoder was handed.
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
        """Speak some text.

        Args:
            text: token ids, each with its hidden state (width,).
            tell: told each second of sound as it is made, and what is flushed at the end.
            last: no text follows; what the vocoder holds back is flushed.

        Returns:
            Whether all was said; if not, the answer was cut.
        """
        began = time.perf_counter_ns()
        before_ns = self.vocoder_ns
        is_said = yield from self._codes(self._rows(text, last=last), tell)
        self.tts_ns += time.perf_counter_ns() - began - (self.vocoder_ns - before_ns)
        if is_said and last:
            is_said = yield from self._sound(tell, last=True)
        return is_said

    def _rows(self, text: Sequence[tuple[int, Tensor]], *, last: bool) -> Tensor:
        """What a text begins with, (text + 1 or 2, hidden)."""
        tts, eos = self.parts.tts, self.parts.config.tts.text_eos_token_id
        rows = tts.opening(text)
        if last and eos is not None:
            rows = cat((rows[:-1], tts.emb_text.weight[eos][None], rows[-1:]))
        return rows

    def _codes(self, rows: Tensor, tell: Tell) -> Steps[bool]:
        seed, turn = self.key
        if self.length + len(rows) + CODES_MAX > self.capacity:
            self.length = 0  # It forgets what was said before; what lies there is overwritten.
        most = min(CODES_MAX, self.capacity - self.length - len(rows))
        numbers = draws(seed, turn, f"chat speech {self.chunks}", most)
        self.chunks += 1
        for number in numbers:
            if self.is_cut():
                return False
            answer: Tensor = yield Speak(slot=self.slot, start=self.length, rows=rows)
            self.length += len(rows)
            code = decide_chat_code(numbers_of(answer), self.codes, float(number))
            if code == self.parts.config.tts.eos:
                break
            self.codes.append(code)
            rows = self.parts.tts.code(code)
            if len(self.codes) - self.sounded == CODES_A_UNIT:
                is_said = yield from self._sound(tell, last=False)
                if not is_said:
                    return False
        return True

    def _sound(self, tell: Tell, *, last: bool) -> Steps[bool]:
        began = time.perf_counter_ns()
        codes, self.sounded = tuple(self.codes[self.sounded :]), len(self.codes)
        portions, waiting = self.voicing.portions(codes, last=last)
        state, sound = self.voicing.state, [np.zeros(0, np.float32)]
        for index, portion in enumerate(portions):
            if self.is_cut():
                return False
            flush = last and index == len(portions) - 1
            sounding = Sounding(codes=portion, state=state, last=flush, voice=self.voice)
            pcm: NDArray[np.float32]
            pcm, state = yield Sound(sounding=sounding)
            sound.append(pcm)
        self.voicing = Voicing(buffer=waiting, state=state)
        self.vocoder_ns += time.perf_counter_ns() - began
        if self.is_cut():
            return False
        tell(np.concatenate(sound).astype("<f4").tobytes(), codes)
        return True
