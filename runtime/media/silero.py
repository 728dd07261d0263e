"""Speech, judged by the model of the package `silero-vad` (extra `antiphon[vad]`).

Its network is loaded once and has no state; each session has its own: what it remembers, and the
end of its sound. A frame takes some 0.4 ms of a processor, so a second of sound takes 13.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np

from protocol.values.effects import DetectSpeech
from protocol.values.limits import MS_PER_S
from protocol.values.model import INPUT_RATE_HZ
from protocol.wire.rates import Heard

from ..settings.extras import install

FRAME_SAMPLES: Final = 512
CONTEXT_SAMPLES: Final = 64
"""As the network takes them, at 16 kHz."""
STATE: Final = (2, 1, 128)


class NoSileroError(ImportError):
    """The package is not installed."""


@cache
def network() -> Any:
    """Load the network; `NoSileroError`."""
    try:
        from silero_vad import load_silero_vad
    except ImportError as error:
        text = f"the speech detector silero needs the extra 'vad': {install('vad')}"
        raise NoSileroError(text) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its file's format
        return load_silero_vad()._model  # the part that is given its state, and keeps none


class SileroJudge:
    """Judges one session's frames."""

    frame_ms = FRAME_SAMPLES * MS_PER_S // INPUT_RATE_HZ
    window = 6
    start = 5
    """160 of 192 ms, which music passes seldom and coughs do not."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._heard: Heard | None = None
        self._rest = b""
        self._context = np.zeros(CONTEXT_SAMPLES, np.float32)
        self._state = torch.zeros(STATE)

    def judge(self, effect: DetectSpeech) -> Iterator[bool]:
        """Judge the frames that a piece of sound completes."""
        if self._heard is None:
            self._heard = Heard(effect.rate_hz)
        sound = self._rest + self._heard.take(effect.data)
        size = FRAME_SAMPLES * np.dtype(np.float32).itemsize
        count = len(sound) // size
        self._rest = sound[count * size :]
        frames = np.frombuffer(sound[: count * size], "<f4").reshape(count, FRAME_SAMPLES)
        for frame in frames:
            yield self._probability(frame) > effect.threshold

    def _probability(self, frame: np.ndarray[Any, Any]) -> float:
        given = np.concatenate([self._context, frame])
        self._context = frame[-CONTEXT_SAMPLES:]
        with self._torch.inference_mode():
            found, self._state = network()(self._torch.from_numpy(given)[None], self._state)
            return float(found)
