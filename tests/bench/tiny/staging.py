"""Material for the scores of `tiny`: held-out speech, a quiet room, sessions, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import numpy as np
import simplejpeg
import soundfile
from numpy.typing import NDArray
from torch import Tensor

from protocol.values.model import (
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
    DuplexConfig,
    Opening,
    Silent,
    Tool,
    Unit,
    UnitInput,
    UnitResult,
    Voice,
)
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.unit import Pictures
from runtime.model.backends.minicpmo.work import EncodeImage, Steps, Work

Result = TypeVar("Result")

Pcm = NDArray[np.float32]
Course = Callable[[int], Steps[Result]]
"""A whole session, in the slot that it is given."""

SEEING: Final = "what do you see"
"""The phrase that is answered from the pictures."""
FORCED: Final = 3
"""Units at the start of a session that must listen, by default."""
AFTER: Final = 5
"""Units after the phrase: enough for the longest answer and a listen."""
ROOM_DB: Final = -62.0
"""RMS of the quiet room, relative to full scale."""


@attrs.frozen(kw_only=True)
class Heldout:
    """One rendering of the manifest.

    Attributes:
        file: name of the FLAC file.
        answer: the expected answer; empty for speech that must stay unanswered.
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
    """White noise that depends only on `key`, 16 kHz."""
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(samples)
    pcm: Pcm = (noise * 10.0 ** (level_db / 20.0)).astype(np.float32)
    return pcm


def together(model: DuplexModel, courses: Iterable[Course[Result]]) -> list[Result]:
    """Run courses in all slots of a model, in batches, on which CPU results do not depend.

    Each begins once a slot is free, in order; the model must be otherwise unused.
    """
    results: dict[int, Result] = {}
    waiting = enumerate(courses)
    running: dict[int, tuple[int, Steps[Result], Work]] = {}

    def begin(slot: int) -> None:
        for place, course in waiting:
            if go_on(slot, place, course(slot), None):
                return

    def go_on(slot: int, place: int, steps: Steps[Result], answer: Any) -> bool:
        try:
            running[slot] = (place, steps, steps.send(answer))
        except StopIteration as end:
            running.pop(slot, None)
            results[place] = end.value
            return False
        return True

    for slot in range(model.info.slots):
        begin(slot)
    while running:
        bucket = min(running.values(), key=lambda one: one[2].stage)[2].bucket
        batch = [(slot, *one) for slot, one in running.items() if one[2].bucket == bucket]
        answers = model.compute([work for *_, work in batch])
        for (slot, place, steps, _), answer in zip(batch, answers, strict=True):
            if not go_on(slot, place, steps, answer):
                begin(slot)
    return [results[place] for place in sorted(results)]


class Player:
    """A new session, played into unit by unit; a repeated picture is computed once.

    `silent`: what the last unit did in silence; None of a session without tools.
    """

    def __init__(
        self, model: DuplexModel, seed: int, slot: int, tools: tuple[Tool, ...] = ()
    ) -> None:
        opening = Opening(
            instructions="You are a helpful assistant.",
            voice=Voice(),
            config=DuplexConfig(),
            seed=seed,
            tools=tools,
        )
        self.silent: Silent | None = None
        self._session = model.session(opening, slot=slot)
        self._look, self._session.look = self._session.look, self._look_once
        self._index = -1
        self._looked: dict[tuple[bytes, ...], Pictures] = {}
        self._seen: dict[int, Tensor] = {}

    def step(
        self, second: Pcm, frames: tuple[bytes, ...] = (), inputs: tuple[UnitInput, ...] = ()
    ) -> Steps[UnitResult]:
        """Play one unit, (16000,), and finalize it."""
        session = self._session
        if self._index < 0:
            yield from session.open()
        self._index += 1
        pcm = second.astype("<f4").tobytes()
        unit = Unit(index=self._index, pcm=pcm, frames=frames, inputs=inputs)
        result = yield from self._seeing_once(session.unit(unit, None))
        made = yield from session.finalize(self._index, interrupted=False)
        self.silent = made.silent
        return result

    def _look_once(self, unit: Unit) -> Pictures:
        """Look at frames that were not looked at before."""
        if unit.frames not in self._looked:
            self._looked[unit.frames] = self._look(unit)
        return self._looked[unit.frames]

    def _seeing_once(self, steps: Steps[Result]) -> Steps[Result]:
        """Answer a slice that was seen before from memory."""
        answer: Any = None
        try:
            while True:
                work = steps.send(answer)
                if not isinstance(work, EncodeImage):
                    answer = yield work
                    continue
                key = id(work.picture)  # Of what was looked at, which is kept.
                if key not in self._seen:
                    self._seen[key] = yield work
                answer = self._seen[key]
        except StopIteration as end:
            result: Result = end.value
            return result

    def close(self) -> None:
        """Release the session."""
        self._session.release()


def playing(
    model: DuplexModel, pcm: Pcm, seed: int, frames: tuple[bytes, ...] = (), *, every: int = 1
) -> Course[list[UnitResult]]:
    """Play sound (16 kHz, in [-1, 1]) into a new session; an incomplete last unit is dropped.

    The JPEG `frames` are shown in every `every`-th unit. The course gives each unit's result.
    """

    def course(slot: int) -> Steps[list[UnitResult]]:
        player, results = Player(model, seed, slot), []
        try:
            for index in range(len(pcm) // UNIT_SAMPLES):
                second = pcm[index * UNIT_SAMPLES : (index + 1) * UNIT_SAMPLES]
                shown = frames if index % every == 0 else ()
                results.append((yield from player.step(second, shown)))
        finally:
            player.close()
        return results

    return course


def play(model: DuplexModel, pcm: Pcm, seed: int) -> list[UnitResult]:
    """Play sound into a new session, unbatched; see `playing`."""
    return together(model, [playing(model, pcm, seed)])[0]


def known_phrases(folder: Path) -> list[Heldout]:
    """The renderings of phrases with one answer, whatever is shown."""
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
    """Put a rendering into a quiet room, after `lead_s` and the pause of its place in the list.

    Returns the sound, and the sample after the phrase's last.
    """
    speech = read_speech(folder, item)
    begin = int(lead_s * INPUT_RATE_HZ) + pause_of(place)
    end = begin + item.end
    units = -(-end // UNIT_SAMPLES) + AFTER
    pcm = room(units * UNIT_SAMPLES, place)
    pcm[begin : begin + len(speech)] += speech
    return pcm, end


def speaking_into(
    model: DuplexModel, pcm: Pcm, seed: int, second: Pcm
) -> Course[tuple[list[UnitResult], list[UnitResult]] | None]:
    """Play the sound `pcm`, and `second` from the second unit of its answer on; whole units.

    The course gives the results before and from the second sound on; None without an open answer.
    """

    def course(slot: int) -> Steps[tuple[list[UnitResult], list[UnitResult]] | None]:
        player, before, rest = Player(model, seed, slot), list[UnitResult](), list[UnitResult]()
        try:
            for start in range(0, len(pcm), UNIT_SAMPLES):
                before.append((yield from player.step(pcm[start : start + UNIT_SAMPLES])))
                if not before[-1].is_listen:
                    break
            if before[-1].is_listen or before[-1].end_of_turn:
                return None
            for start in range(0, len(second), UNIT_SAMPLES):
                rest.append((yield from player.step(second[start : start + UNIT_SAMPLES])))
        finally:
            player.close()
        return before, rest

    return course


def picture(colour: tuple[int, int, int], size: tuple[int, int], key: int) -> bytes:
    """A JPEG of one shade, darker towards its foot, with a little grain."""
    width, height = size
    rng = np.random.Generator(np.random.Philox(key=key))
    light = np.linspace(1.0, 0.9, height)[:, None, None]
    pixels = np.array(colour) * light + rng.normal(0.0, 4.0, (height, width, 3))
    whole = np.ascontiguousarray(pixels.round().clip(0, 255).astype(np.uint8))
    return bytes(simplejpeg.encode_jpeg(whole, quality=90))
