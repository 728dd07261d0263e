"""The speech codes of one unit: its text's rows, then code after code, at most a second's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import UnitResult

from .code_logits import CodeChoice, CodeLogits
from .decide import CODE_WINDOW, codes_apart
from .known import Known
from .teacher import Teacher
from .tts import CODES_A_UNIT, SpeechDecoder
from .work import Speak, Steps


@attrs.define(kw_only=True)
class Utterance:
    """The codes of a unit in progress.

    Attributes:
        length: places of the turn's speech that are used, this unit's included as they are fed.
        numbers: the draws of its codes, (25,).
        may_end: speech may end before its second is full.
        stop: asked before each step; True cuts it there.
        teacher, past: as of `UnitRun`.
        codes: taken so far; grows.
    """

    tts: SpeechDecoder
    slot: int
    length: int
    numbers: NDArray[np.float64]
    may_end: bool
    stop: Callable[[int], bool]
    teacher: Teacher | None
    past: UnitResult | None
    codes: list[int]

    def speak(self, text: Sequence[tuple[int, Tensor]]) -> Steps[None]:
        """Say text tokens with their hidden states, (llm_dim,) each."""
        eos = self.tts.config.eos
        rows = self.tts.opening(text)
        known = self._known(self.length + len(rows))
        for step in range(CODES_A_UNIT + 1):
            if self.stop(step):
                return
            answer: CodeLogits
            choice = self._choice(self.codes)
            if known is None or not step:
                answer = yield Speak(slot=self.slot, start=self.length, rows=rows, choice=choice)
            else:
                answer = yield from known.ask(self.codes[-1])
            self.length += len(rows)
            if choice is None:
                return
            code = self._taught(answer.choose(choice, eos), answer, choice)
            if code == eos:
                return
            self.codes.append(code)
            rows = self.tts.code(code)

    def _choice(self, codes: Sequence[int]) -> CodeChoice | None:
        """How the code after these is chosen; None if they fill the second."""
        if len(codes) == CODES_A_UNIT:
            return None
        recent, draw = tuple(codes[-CODE_WINDOW:]), float(self.numbers[len(codes)])
        return CodeChoice(recent, draw, may_end=self.may_end)

    def _known(self, start: int) -> Known | None:
        if self.past is None:
            return None
        codes = self.past.codec_ids

        def work(at: int) -> Speak:
            rows, choice = self.tts.code(codes[at]), self._choice(codes[: at + 1])
            return Speak(slot=self.slot, start=start + at, rows=rows, choice=choice)

        return Known(codes, work, CODES_A_UNIT)

    def _taught(self, own: int, answer: CodeLogits, choice: CodeChoice) -> int:
        """Take the recorded code, if there is a teacher."""
        if self.teacher is None:
            return own
        chunk, draw, may_end = choice.chunk, choice.draw, choice.may_end
        eos = self.tts.config.eos

        def apart(wanted: int) -> tuple[float | None, float | None]:
            logits = answer.numbers()
            return codes_apart(logits, chunk, draw, eos, may_end=may_end, own=own, wanted=wanted)

        return self.teacher.code(len(self.codes), own, apart)
