"""The user's own speech stops the model's, where the operator wants that: `--barge-in`.

Where speech begins and stops is found outside (`DetectSpeech`). It stops a turn that is being
spoken as `force_listen` does (B6), and the model listens while the user speaks on. A turn that the
model begins while the user speaks may be the answer to it, and goes on; unless the user does too.
"""

from __future__ import annotations

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.limits import SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from ..values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES
from ..values.requests import Append
from ..values.state import State
from ..wire.rates import to_pcm16
from .seeing import Seeing


@attrs.define(kw_only=True, eq=False)
class BargeIn(Seeing):
    """What is known of a user's speech.

    Attributes:
        samples: that the client sent, as far as they are searched.
        is_speaking: the user speaks.
        over_samples: spoken by the user in this turn, which began meanwhile.
        is_hushed: the model only listens, for the user interrupted it and speaks on.
        response_id: the turn being spoken, or None.
    """

    samples: int = 0
    is_speaking: bool = False
    over_samples: int = 0
    is_hushed: bool = False
    response_id: str | None = None

    def fall_silent(self) -> None:
        """Have the model listen from now on (B6)."""
        raise NotImplementedError

    def search(self, message: Append) -> Append:
        """Have speech found in an append; while the user speaks on, the model listens to it."""
        if self.opened.limits.barge_in:
            self._speak_over(len(message.pcm) // SAMPLE_BYTES)
            pcm16 = to_pcm16(message.pcm)
            self.detect(pcm16, INPUT_RATE_HZ, SPEECH_THRESHOLD, SPEECH_SILENCE_MS)
        return attrs.evolve(message, force_listen=True) if self.is_hushed else message

    def _speak_over(self, samples: int) -> None:
        """Stop a turn that began while the user spoke, if the user goes on for a second."""
        if self.response_id is None or not self.is_speaking or self.is_hushed:
            self.over_samples = 0
        elif self.over_samples < INPUT_RATE_HZ:
            self.over_samples += samples
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        self.over_samples, self.is_hushed = 0, True
        self.fall_silent()

    def detect(self, pcm16: bytes, rate_hz: int, threshold: float, silence_ms: int) -> None:
        """Have speech found in the client's next sound."""
        self.do(
            ef.DetectSpeech(
                at=self.samples,
                rate_hz=rate_hz,
                data=pcm16,
                threshold=threshold,
                silence_ms=silence_ms,
                is_speech=self.is_speaking,
            )
        )
        self.samples += len(pcm16) // SAMPLE16_BYTES

    def speech_started(self, _event: ev.SpeechStarted) -> None:
        """Stop the turn that is being spoken."""
        if self.state is not State.ACTIVE:
            return
        self.is_speaking = True
        if self.response_id is not None:
            self._interrupt()

    def speech_stopped(self, _event: ev.SpeechStopped) -> None:
        """Let the model speak again."""
        self.is_speaking = self.is_hushed = False
