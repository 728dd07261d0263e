"""The vocoder: speech codes to 24 kHz sound, behind a protocol, and how a turn feeds it.

`Voicing` is the buffer between speech decoder and vocoder: it starts a turn with three silent
codes, hands over 28 codes and moves on by 25, so that the vocoder sees three codes ahead, and
flushes at the turn's end (model.md, "token2wav"). `PieceVocoder` is the small vocoder of `tiny`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

Pcm = NDArray[np.float32]

CODES_A_CHUNK: Final = 25
LOOKAHEAD: Final = 3
"""Codes that the vocoder sees beyond those it gives sound for."""
CHUNK_MIN: Final = 5
"""Codes beyond the lookahead from which on an unfinished turn gives sound."""
NOMINAL_BONUS: Final = 1e-3
"""Added to the score of the lag at which a piece was cut, so that silence stays in place."""


@attrs.frozen(kw_only=True, eq=False)
class Sounding:
    """Codes on their way to sound.

    Attributes:
        codes: at most 28; unless `last`, the final three are only looked at.
        state: what the vocoder remembers of this turn; None at its start.
        last: the turn ends with these codes.
        voice: what the session's vocoder was opened with.
    """

    codes: tuple[int, ...]
    state: object
    last: bool
    voice: object


class Vocoder(Protocol):
    """Codes to sound; one for all sessions. The states are values, handed in and out."""

    @property
    def silent_code(self) -> int:
        """The code that a turn's buffer starts with."""
        ...

    @property
    def is_ready(self) -> bool:
        """It can give sound now; while it cannot, units give text alone."""
        ...

    @property
    def is_exact(self) -> bool:
        """The same codes are proven to give the same bytes in the same environment."""
        ...

    @property
    def fingerprint(self) -> str:
        """What it is, for a full replay to find equal, besides its files."""
        ...

    def open(self, reference: Pcm) -> object:
        """Prepare a voice from reference audio (16 kHz, may be empty); shared by its turns.

        Returns:
            The voice; None where the session is to have none, and gives text alone.
        """
        ...

    def sound(self, soundings: Sequence[Sounding]) -> list[tuple[Pcm, object]]:
        """Turn codes into sound, for several sessions at once.

        Returns:
            For each: float32 at 24 kHz, 960 samples a code that was not only looked at, and what
            was held back of them at the turn's end; and the state for the turn's next codes.
        """
        ...


@attrs.frozen(kw_only=True)
class Voicing:
    """What a turn has handed to the vocoder, and what waits.

    Attributes:
        buffer: codes that wait.
        state: the vocoder's.
    """

    buffer: tuple[int, ...]
    state: object = attrs.field(default=None, eq=False)

    def portions(
        self, codes: Sequence[int], *, last: bool
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Cut the buffer and new codes into what the vocoder is to be handed, in order.

        Args:
            codes: new ones.
            last: the turn ends with them.

        Returns:
            The portions, of which only the final one of a turn is flushed; and what waits on.
        """
        waiting, portions = (*self.buffer, *codes), []
        while len(waiting) >= LOOKAHEAD + CHUNK_MIN:
            count = min(CODES_A_CHUNK + LOOKAHEAD, len(waiting))
            portions.append(waiting[:count])
            waiting = waiting[count - LOOKAHEAD :]
        if last and waiting:
            return [*portions, waiting], ()
        return portions, waiting


class PieceVocoder:
    """The vocoder of `tiny`: stored pieces of waveform, joined.

    Each code stands for 40 ms. Its piece, learned from one fixed voice (see the model card), is
    longer than that on both sides: a piece is laid where it best continues the tail of the one
    before (the lag of highest normalised correlation), and the two are faded into each other. It
    has one voice and no use for the codes ahead.

    Args:
        frame: samples a code.
        overlap: samples over which neighbours are faded into each other.
        search: samples by which a piece may start later, to meet its neighbour in phase.
        silent_code: the code of silence.
        pieces: int16, (codes, search + frame + overlap).
    """

    is_ready = True
    is_exact = True
    fingerprint = "pieces"

    def __init__(
        self, *, frame: int, overlap: int, search: int, silent_code: int, pieces: NDArray[np.int16]
    ) -> None:
        assert pieces.shape[1] == search + frame + overlap, pieces.shape
        self._frame, self._overlap, self._search = frame, overlap, search
        self.silent_code = silent_code
        self._pieces: Pcm = pieces.astype(np.float32) / np.float32(32768.0)
        ramp = (np.arange(overlap, dtype=np.float32) + 0.5) / np.float32(overlap)
        self._ramp: Pcm = ramp.astype(np.float32)

    @property
    def codes(self) -> int:
        """Codes that it has a piece for."""
        return len(self._pieces)

    @classmethod
    def load(cls, folder: Path) -> PieceVocoder:
        """Load `config.json` and `pieces.safetensors`.

        Raises:
            OSError: a file is missing.
            ValueError: they do not fit each other.
        """
        names = ("frame", "overlap", "search", "silent_code")
        try:
            sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            pieces = load_file(folder / "pieces.safetensors")["pieces"]
            return cls(**{name: int(sizes[name]) for name in names}, pieces=pieces)
        except (KeyError, ValueError, AssertionError, SafetensorError) as error:
            raise ValueError(f"the vocoder's files do not fit: {error!r}") from error

    def open(self, reference: Pcm) -> object:  # noqa: ARG002
        """See `Vocoder.open`: there is one voice, whatever the reference."""
        return "the only one"

    def sound(self, soundings: Sequence[Sounding]) -> list[tuple[Pcm, object]]:
        """See `Vocoder.sound`."""
        return [self._join(item) for item in soundings]

    def _lag(self, piece: Pcm, tail: Pcm) -> int:
        overlap, search = self._overlap, self._search
        spots = np.lib.stride_tricks.sliding_window_view(piece[: search + overlap], overlap)
        wide, end = spots.astype(np.float64), tail.astype(np.float64)  # (search + 1, overlap)
        energy = (wide**2).sum(axis=1) * (end**2).sum()
        likeness = (wide @ end) / np.sqrt(energy + 1e-9)
        likeness[search // 2] += NOMINAL_BONUS
        return int(likeness.argmax())

    def _join(self, sounding: Sounding) -> tuple[Pcm, object]:
        frame, overlap = self._frame, self._overlap
        codes = sounding.codes if sounding.last else sounding.codes[:-LOOKAHEAD]
        tail = sounding.state
        out = np.zeros(len(codes) * frame, np.float32)
        for index, code in enumerate(codes):
            piece = self._pieces[code]
            if isinstance(tail, np.ndarray):
                lag = self._lag(piece, tail)
            else:
                tail, lag = np.zeros(overlap, np.float32), self._search // 2
            body = piece[lag : lag + frame].copy()
            body[:overlap] = tail * (1 - self._ramp) + body[:overlap] * self._ramp
            out[index * frame : (index + 1) * frame] = body
            tail = piece[lag + frame : lag + frame + overlap].copy()
        return out, tail
