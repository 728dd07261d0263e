"""The vocoder: speech codes to 24 kHz sound, behind a protocol, and how a turn feeds it.

`VocoderBuffer` holds codes for the vocoder: a turn starts with three silent codes, each portion has
28 codes and advances by 25, so the vocoder sees three codes ahead, and the turn's end flushes
(docs/model.md, "Voice"). `PieceVocoder` is the small vocoder of `tiny`; that of the published model
is in `runtime/model/voice`, behind `voices.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

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
"""Added to the score of a piece's original lag, so that silence stays in place."""


@attrs.frozen(kw_only=True, eq=False)
class Vocode:
    """Codes to be turned into sound: a request, answered as by `Vocoder.sound`.

    Attributes:
        codes: at most 28; unless `last`, the final three are only lookahead.
        state: the turn's vocoder state; None at its start.
        last: the turn ends with these codes.
        voice: from `Vocoder.open`.
        key: the session's seed and the unit or turn, by which the vocoder's draws are keyed.
    """

    codes: tuple[int, ...]
    state: object
    last: bool
    voice: object
    key: str = ""

    stage: ClassVar[int] = 6
    bucket: ClassVar[str] = "sound"


@attrs.frozen(kw_only=True, eq=False)
class Prepare:
    """Compute what all turns of a `voice` start from, before the first one."""

    voice: object

    stage: ClassVar[int] = 0

    @property
    def bucket(self) -> Hashable:
        """Never batched: lengths differ."""
        return ("voice", id(self))


class Vocoder(Protocol):
    """Codes to sound; one for all sessions. States are values, passed in and out."""

    @property
    def silent_code(self) -> int:
        """The code that a turn's buffer starts with."""
        ...

    @property
    def codes(self) -> int:
        """Number of codes that it knows."""
        ...

    @property
    def first_codes(self) -> int:
        """Codes of an answer's first piece of sound; later ones have `CODES_A_CHUNK`."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether equal codes give equal bytes in any batch."""
        ...

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Its identity besides its files, which a full replay must find equal."""
        ...

    def open(self, reference: Pcm) -> object:
        """Read reference audio (16 kHz, may be empty), in any thread; None: text only.

        `BackendRefused`: it gives no voice.
        """
        ...

    def prepare(self, voice: object) -> None:
        """Compute what all turns of a voice start from, and keep it as long as there is room."""
        ...

    def sound(self, requests: Sequence[Vocode]) -> list[tuple[Pcm, object]]:
        """Turn codes into sound, for several sessions at once.

        Returns:
            For each: float32 at 24 kHz, 960 samples per code beyond the lookahead, plus those held
            back at the turn's end; and the turn's next state.
        """
        ...


@attrs.frozen(kw_only=True)
class VocoderBuffer:
    """A turn's codes not yet passed to the vocoder, and the vocoder's state."""

    buffer: tuple[int, ...]
    state: object = attrs.field(default=None, eq=False)

    def portions(
        self, codes: Sequence[int], *, last: bool
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Split the buffer and new codes into portions for the vocoder; `last` ends the turn.

        Returns:
            The portions in order, the final one of a turn to be flushed; and the remaining buffer.
        """
        waiting, portions = (*self.buffer, *codes), []
        while len(waiting) >= LOOKAHEAD + CHUNK_MIN:
            count = min(CODES_A_CHUNK + LOOKAHEAD, len(waiting))
            portions.append(waiting[:count])
            waiting = waiting[count - LOOKAHEAD :]
        if last and waiting:
            return [*portions, waiting], ()
        return portions, waiting

    def sound(
        self,
        codes: Sequence[int],
        voice: object,
        key: str,
        *,
        last: bool,
        is_cut: Callable[[], bool] = bool,
    ) -> Generator[Vocode, tuple[Pcm, object], tuple[list[Pcm], VocoderBuffer] | None]:
        """Turn the buffer and new codes into sound, a request for each of their `portions`.

        Returns:
            The sound of each, and what follows; None if `is_cut` before a portion.
        """
        portions, waiting = self.portions(codes, last=last)
        state, sound = self.state, list[Pcm]()
        for index, portion in enumerate(portions):
            if is_cut():
                return None
            flush = last and index == len(portions) - 1
            pcm, state = yield Vocode(codes=portion, state=state, last=flush, voice=voice, key=key)
            sound.append(pcm)
        return sound, VocoderBuffer(buffer=waiting, state=state)


class PieceVocoder:
    """The vocoder of `tiny`: stored pieces of waveform, joined.

    A code stands for 40 ms. Its piece, learned from one fixed voice (see the model card), is longer
    on both sides: it is placed where it best continues the previous tail (the lag of highest
    normalised correlation), and the two are cross-faded. The lookahead is ignored.

    Args:
        frame: samples per code.
        overlap: samples of the cross-fade.
        search: samples by which a piece may start later, to match its neighbour's phase.
        silent_code: the code of silence.
        pieces: int16, (codes, search + frame + overlap).
    """

    first_codes = CODES_A_CHUNK
    is_exact = True
    fingerprint: Final = MappingProxyType({"voice": "pieces"})

    def __init__(
        self, *, frame: int, overlap: int, search: int, silent_code: int, pieces: NDArray[np.int16]
    ) -> None:
        assert pieces.shape[1] == search + frame + overlap, pieces.shape
        self._frame, self._overlap, self._search = frame, overlap, search
        self.silent_code = silent_code
        self._pieces: Pcm = pieces.astype(np.float32) / np.float32(32768.0)
        self._energies: dict[int, NDArray[np.float64]] = {}
        ramp = (np.arange(overlap, dtype=np.float32) + 0.5) / np.float32(overlap)
        self._ramp: Pcm = ramp.astype(np.float32)

    @property
    def codes(self) -> int:
        """Number of codes with a piece."""
        return len(self._pieces)

    @classmethod
    def load(cls, folder: Path) -> PieceVocoder:
        """Load `config.json` and `pieces.safetensors`.

        `OSError`: a file is missing; `ValueError`: they do not fit each other.
        """
        names = ("frame", "overlap", "search", "silent_code")
        try:
            sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            pieces = load_file(folder / "pieces.safetensors")["pieces"]
            return cls(**{name: int(sizes[name]) for name in names}, pieces=pieces)
        except (KeyError, ValueError, AssertionError, SafetensorError) as error:
            raise ValueError(f"the vocoder's files do not fit: {error!r}") from error

    def open(self, reference: Pcm) -> object:  # noqa: ARG002
        """Return the only voice, whatever the reference."""
        return "the only one"

    def prepare(self, voice: object) -> None:
        """Do nothing: a turn starts from silence."""

    def sound(self, requests: Sequence[Vocode]) -> list[tuple[Pcm, object]]:
        """Join the pieces of each request."""
        return [self._join(item) for item in requests]

    def _lag(self, code: int, tail: Pcm) -> int:
        overlap, search = self._overlap, self._search
        piece = self._pieces[code, : search + overlap]
        spots = np.lib.stride_tricks.sliding_window_view(piece, overlap)
        wide, end = spots.astype(np.float64), tail.astype(np.float64)  # (search + 1, overlap)
        energies = self._energies.get(code)
        if energies is None:
            energies = self._energies[code] = (wide**2).sum(axis=1)
        energy = energies * (end**2).sum()
        likeness = (wide @ end) / np.sqrt(energy + 1e-9)
        likeness[search // 2] += NOMINAL_BONUS
        return int(likeness.argmax())

    def _join(self, request: Vocode) -> tuple[Pcm, object]:
        frame, overlap = self._frame, self._overlap
        codes = request.codes if request.last else request.codes[:-LOOKAHEAD]
        tail = request.state
        out = np.zeros(len(codes) * frame, np.float32)
        for index, code in enumerate(codes):
            piece = self._pieces[code]
            if isinstance(tail, np.ndarray):
                lag = self._lag(code, tail)
            else:
                tail, lag = np.zeros(overlap, np.float32), self._search // 2
            body = piece[lag : lag + frame].copy()
            body[:overlap] = tail * (1 - self._ramp) + body[:overlap] * self._ramp
            out[index * frame : (index + 1) * frame] = body
            tail = piece[lag + frame : lag + frame + overlap].copy()
        return out, tail
