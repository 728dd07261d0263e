"""The vocoder: speech codes to 24 kHz sound, by joining stored pieces of waveform.

Each code stands for 40 ms. Its piece, learned from one fixed voice (see the model card), is longer
than that on both sides: a piece is laid where it best continues the tail of the one before (the lag
of highest normalised correlation), and the two are faded into each other. Nothing is looked ahead,
so a code gives its samples at once and a chunk of 25 codes gives exactly 24000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .config import VocoderConfig

Pcm = NDArray[np.float32]

NOMINAL_BONUS = 1e-3
"""Added to the score of the lag at which a piece was cut, so that silence stays in place."""


class Vocoder(Protocol):
    """Codes to sound. The state between calls is a value: the tail, None at a turn's start."""

    def synthesise(self, codes: Sequence[int], tail: Pcm | None) -> tuple[Pcm, Pcm | None]:
        """Turn codes into sound.

        Args:
            codes: 25 a second.
            tail: from the call before in this turn; None at its start.

        Returns:
            float32, 24 kHz, `frame` samples a code; and the tail for the next call.
        """
        ...


class PieceVocoder:
    """The vocoder of `tiny`."""

    def __init__(self, config: VocoderConfig, pieces: Tensor) -> None:
        """Take the learned pieces.

        Args:
            config: sizes.
            pieces: int16, (codes, search + frame + overlap).
        """
        expected = config.search + config.frame + config.overlap
        assert pieces.shape[1] == expected, (pieces.shape, expected)
        self.config = config
        self._pieces: Pcm = pieces.numpy().astype(np.float32) / np.float32(32768.0)
        ramp = (np.arange(config.overlap, dtype=np.float32) + 0.5) / np.float32(config.overlap)
        self._ramp: Pcm = ramp.astype(np.float32)

    def _lag(self, piece: Pcm, tail: Pcm) -> int:
        overlap, search = self.config.overlap, self.config.search
        spots = np.lib.stride_tricks.sliding_window_view(piece[: search + overlap], overlap)
        wide, end = spots.astype(np.float64), tail.astype(np.float64)  # (search + 1, overlap)
        energy = (wide**2).sum(axis=1) * (end**2).sum()
        likeness = (wide @ end) / np.sqrt(energy + 1e-9)
        likeness[search // 2] += NOMINAL_BONUS
        return int(likeness.argmax())

    def synthesise(self, codes: Sequence[int], tail: Pcm | None) -> tuple[Pcm, Pcm | None]:
        """See `Vocoder.synthesise`."""
        frame, overlap = self.config.frame, self.config.overlap
        out = np.zeros(len(codes) * frame, np.float32)
        for index, code in enumerate(codes):
            piece = self._pieces[code]
            if tail is None:
                tail, lag = np.zeros(overlap, np.float32), self.config.search // 2
            else:
                lag = self._lag(piece, tail)
            body = piece[lag : lag + frame].copy()
            body[:overlap] = tail * (1 - self._ramp) + body[:overlap] * self._ramp
            out[index * frame : (index + 1) * frame] = body
            tail = piece[lag + frame : lag + frame + overlap].copy()
        return out, tail
