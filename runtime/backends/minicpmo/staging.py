"""What the scores of `tiny` are played from: held-out speech, a quiet room, sessions, pictures.

See `score.py`. Nothing here says what is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import simplejpeg
import soundfile
from numpy.typing import NDArray

from protocol.model import (
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
    DuplexConfig,
    Opening,
    Unit,
    UnitResult,
    Voice,
)

from .model import DuplexModel

Pcm = NDArray[np.float32]

SEEING: Final = "what do you see"
"""The phrase that is answered from the pictures."""
FORCED: Final = 3
"""Units at the start of a session that must listen, by default."""
AFTER: Final = 5
"""Units after the phrase: enough for the longest answer and a listen."""
ROOM_DB: Final = -62.0
"""RMS of the quiet room in which the phrases are played, relative to full scale."""


@attrs.frozen(kw_only=True)
class Heldout:
    """One rendering of the manifest.

    Attributes:
        file: name of the FLAC file.
        phrase: what is said.
        answer: what the model should say; empty for speech that it must not answer.
        voice: espeak-ng's accent and variant.
        speed: words a minute.
        pitch: 0-99.
        start: first sample of speech.
        end: sample after the last of speech.
    """

    file: str
    phrase: str
    answer: str
    voice: str
    speed: int
    pitch: int
    start: int
    end: int


def read_manifest(folder: Path) -> list[Heldout]:
    """The manifest of a folder of renderings, in its order."""
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return [Heldout(**entry) for entry in raw["renderings"]]


def room(samples: int, key: int, level_db: float = ROOM_DB) -> Pcm:
    """White noise that depends on `key` alone, 16 kHz."""
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(samples)
    pcm: Pcm = (noise * 10.0 ** (level_db / 20.0)).astype(np.float32)
    return pcm


class Player:
    """A new session into which sound is played unit by unit.

    Args:
        model: the model.
        seed: the session's.
    """

    def __init__(self, model: DuplexModel, seed: int) -> None:
        self._session = model.open(
            Opening(
                instructions="You are a helpful assistant.",
                voice=Voice(),
                config=DuplexConfig(),
                seed=seed,
            )
        )
        self._index = 0

    def step(self, second: Pcm, frames: tuple[bytes, ...] = ()) -> UnitResult:
        """Play one unit, (16000,); gives its result after it was finalized."""
        index, self._index = self._index, self._index + 1
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes(), frames=frames)
        result = self._session.run_unit(unit)
        self._session.finalize(index, interrupted=False)
        return result

    def close(self) -> None:
        """Release the session."""
        self._session.release()


def play(
    model: DuplexModel, pcm: Pcm, seed: int, frames: tuple[bytes, ...] = (), *, every: int = 1
) -> Iterator[UnitResult]:
    """Play sound into a new session; what does not fill a unit is left out.

    Args:
        model: the model.
        pcm: 16 kHz, in [-1, 1].
        seed: the session's.
        frames: JPEG files to show.
        every: in which units: 1 is all of them.

    Yields:
        Each unit's result, after it was finalized.
    """
    player = Player(model, seed)
    try:
        for index in range(len(pcm) // UNIT_SAMPLES):
            second = pcm[index * UNIT_SAMPLES : (index + 1) * UNIT_SAMPLES]
            yield player.step(second, frames if index % every == 0 else ())
    finally:
        player.close()


def known_phrases(folder: Path) -> list[Heldout]:
    """The renderings of phrases that have one answer, whatever is seen."""
    return [item for item in read_manifest(folder) if item.answer and item.phrase != SEEING]


def read_speech(folder: Path, item: Heldout) -> Pcm:
    """A rendering's sound, 16 kHz."""
    speech, rate = soundfile.read(folder / item.file, dtype="float32")
    assert rate == INPUT_RATE_HZ, (item.file, rate)
    sound: Pcm = speech
    return sound


def pause_of(place: int) -> int:
    """Samples of the pause before a rendering, by its place in the list: 0 to 0.9 s."""
    return place * 7 % 10 * INPUT_RATE_HZ // 10


def stage_phrase(
    folder: Path, item: Heldout, place: int, lead_s: float = FORCED
) -> tuple[Pcm, int]:
    """Put a rendering into a quiet room.

    Args:
        folder: where the file lies.
        item: which.
        place: its place in the list; gives the pause before it, in steps of 0.1 s, and the room.
        lead_s: seconds before that pause.

    Returns:
        The sound, and the sample after the phrase's last.
    """
    speech = read_speech(folder, item)
    begin = int(lead_s * INPUT_RATE_HZ) + pause_of(place)
    end = begin + item.end
    units = -(-end // UNIT_SAMPLES) + AFTER
    pcm = room(units * UNIT_SAMPLES, place)
    pcm[begin : begin + len(speech)] += speech
    return pcm, end


def speak_into(
    model: DuplexModel, pcm: Pcm, seed: int, second: Pcm
) -> tuple[list[UnitResult], list[UnitResult]] | None:
    """Play sound, and other sound into its answer.

    Args:
        model: the model.
        pcm: the phrase in its room, whole units.
        seed: the session's.
        second: what is said into the answer, from the start of its second unit on; whole units.

    Returns:
        What came before and from the second sound on; None where no answer was left open.
    """
    player, before = Player(model, seed), []
    try:
        for start in range(0, len(pcm), UNIT_SAMPLES):
            before.append(player.step(pcm[start : start + UNIT_SAMPLES]))
            if not before[-1].is_listen:
                break
        if before[-1].is_listen or before[-1].end_of_turn:
            return None
        rest = [
            player.step(second[start : start + UNIT_SAMPLES])
            for start in range(0, len(second), UNIT_SAMPLES)
        ]
    finally:
        player.close()
    return before, rest


def picture(colour: tuple[int, int, int], size: tuple[int, int], key: int) -> bytes:
    """A picture of one shade, darker towards its foot, with a little grain, as JPEG."""
    width, height = size
    rng = np.random.Generator(np.random.Philox(key=key))
    light = np.linspace(1.0, 0.9, height)[:, None, None]
    pixels = np.array(colour) * light + rng.normal(0.0, 4.0, (height, width, 3))
    whole = np.ascontiguousarray(pixels.round().clip(0, 255).astype(np.uint8))
    return bytes(simplejpeg.encode_jpeg(whole, quality=90))
