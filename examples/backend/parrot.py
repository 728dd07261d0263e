"""A model for Antiphon in 100 lines: it waits until its user pauses, and repeats what it heard.

    pip install ./examples/backend
    antiphon serve --model backend:parrot

The server asks for one unit after the other, never for two at once: `run` hears a second of
sound and decides, `finalize` closes it, or `rollback` undoes it after an error. Sound is float32,
little-endian and mono, 16 kHz in and 24 kHz out. Nothing here depends on a clock or on chance, so a
recorded session can be run again with the model, and compared (`antiphon replay --full`).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import soxr

from protocol.values.model import Cut, Finalized, Opened, Opening, Unit, UnitResult
from runtime.model.backends.base import BackendInfo, BackendRefused, ContextFull

LOUD = 0.01
"""Root mean square above which a second counts as speech."""
SECOND = 24_000
UNITS_MAX = 600


def load(
    argument: str, slots: int | None, *, device: str | None, dtype: str | None, deterministic: bool
) -> Parrot:
    """Make the model; `argument` is the text after `backend:parrot:`. Its errors end the server."""
    if argument or device == "cuda":
        raise ValueError("a parrot has no checkpoint, and needs no GPU")
    return Parrot(slots or 4)


class Parrot:
    """The model, which all sessions share."""

    def __init__(self, slots: int) -> None:
        self.info = BackendInfo(
            name="backend:parrot",
            modes=("audio",),
            slots=slots,
            context_limit=UNITS_MAX,
            sliding_windows=("off",),
            can_rollback=True,
            deterministic=True,
            fingerprint={"backend": "parrot", "version": "1", "soxr": soxr.__version__},
        )

    async def open(self, opening: Opening, *, slot: int) -> ParrotSession:
        """Begin a session."""
        if opening.config.sliding_window != "off":
            raise BackendRefused("sliding_window: a parrot has none")
        return ParrotSession(opening)


class ParrotSession:
    """What one session has heard, and has yet to say; `_before` undoes the last unit."""

    def __init__(self, opening: Opening) -> None:
        self.opened = Opened(prompt_length=0)
        self._speaks = opening.config.generate_audio
        self._heard = self._unsaid = b""
        self._before = (b"", b"")
        self._length = 0

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        """Hear a second, and listen or say a second."""
        if self._length >= UNITS_MAX:
            raise ContextFull(f"{UNITS_MAX} seconds are heard")
        self._before = self._heard, self._unsaid
        samples = np.frombuffer(unit.pcm, "<f4")
        if np.sqrt(np.mean(samples**2)) > LOUD:
            self._heard, self._unsaid = self._heard + unit.pcm, b""  # its user speaks: be silent
        elif self._heard:
            said = soxr.resample(np.frombuffer(self._heard, "<f4"), 16_000, SECOND)
            self._heard, self._unsaid = b"", said.astype("<f4").tobytes()
        pcm = b"" if unit.force_listen else self._unsaid[: 4 * SECOND]
        self._unsaid = self._unsaid[len(pcm) :]
        return UnitResult(
            index=unit.index,
            is_listen=not pcm,
            text="squawk " if pcm else "",
            pcm=pcm if self._speaks else b"",
            end_of_turn=bool(pcm) and not self._unsaid,
            kv_length=self._length + 1,
            input_hash=blake2b(unit.pcm, digest_size=16).hexdigest(),
        )

    def interrupt(self, index: int) -> None:
        """Cut a unit: this one takes no time, so it has always ended."""

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        """Close the unit."""
        self._length += 1
        if interrupted:
            self._unsaid = b""
        return Finalized(index=index, kv_length=self._length)

    async def rollback(self, index: int) -> None:
        """Undo the unit."""
        self._heard, self._unsaid = self._before

    async def release(self) -> None:
        """Free what the session holds."""
        self._heard = self._unsaid = b""
