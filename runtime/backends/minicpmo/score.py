"""What `tiny` can do, measured: `python -m runtime.backends.minicpmo.score` prints JSON.

Held-out renderings lie in `fixtures/speech/heldout` with a manifest; no synthesiser is needed.
Each is played into a session of its own, second by second, with the default settings:
`FORCED` seconds of quiet, a pause that depends on its place in the list, the phrase, quiet.

`SCORES` is the registry: a later skill adds an entry, and a retraining must pass all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs
import numpy as np
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

FORCED: Final = 3
"""Units at the start of a session that must listen, by default."""
SHOWN_EVERY: Final = 3
"""Seconds from picture to picture that `tiny` was found to bear."""
AFTER: Final = 5
"""Units after the phrase: enough for the longest answer and a listen."""
ROOM_DB: Final = -62.0
"""RMS of the quiet room in which the phrases are played, relative to full scale."""
LONG_UNITS: Final = 30
"""Seconds of silence, and of each noise, that must pass without a word."""


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


@attrs.frozen(kw_only=True)
class Outcome:
    """What the model did with one rendering.

    Attributes:
        text: all it said.
        interrupted: it spoke in a unit that ended before the phrase did.
        audible: each speaking unit came with sound.
        ended: it ended its turn and listened again.
        latency_s: from the phrase's end to the end of the unit that answered; nan without answer.
    """

    text: str
    interrupted: bool
    audible: bool
    ended: bool
    latency_s: float


def read_manifest(folder: Path) -> list[Heldout]:
    """The manifest of a folder of renderings, in its order."""
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return [Heldout(**entry) for entry in raw["renderings"]]


def room(samples: int, key: int, level_db: float = ROOM_DB) -> Pcm:
    """White noise that depends on `key` alone, 16 kHz."""
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(samples)
    pcm: Pcm = (noise * 10.0 ** (level_db / 20.0)).astype(np.float32)
    return pcm


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
    session = model.open(
        Opening(
            instructions="You are a helpful assistant.",
            voice=Voice(),
            config=DuplexConfig(),
            seed=seed,
        )
    )
    for index in range(len(pcm) // UNIT_SAMPLES):
        second = pcm[index * UNIT_SAMPLES : (index + 1) * UNIT_SAMPLES]
        shown = frames if index % every == 0 else ()
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes(), frames=shown)
        result = session.run_unit(unit)
        session.finalize(index, interrupted=False)
        yield result
    session.release()


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
    speech, rate = soundfile.read(folder / item.file, dtype="float32")
    assert rate == INPUT_RATE_HZ, (item.file, rate)
    begin = int(lead_s * INPUT_RATE_HZ) + place * 7 % 10 * INPUT_RATE_HZ // 10
    end = begin + item.end
    units = -(-end // UNIT_SAMPLES) + AFTER
    pcm = room(units * UNIT_SAMPLES, place)
    pcm[begin : begin + len(speech)] += speech
    return pcm, end


def judge(results: list[UnitResult], end: int) -> Outcome:
    """Sum a session up; `end` is the sample after the phrase's last."""
    spoke = [result for result in results if not result.is_listen]
    first = (spoke[0].index + 1) * UNIT_SAMPLES if spoke else None
    return Outcome(
        text="".join(result.text for result in results),
        interrupted=first is not None and first < end,
        audible=all(len(result.pcm) > 0 for result in spoke),
        ended=bool(spoke) and spoke[-1].end_of_turn and results[-1].is_listen,
        latency_s=(first - end) / INPUT_RATE_HZ if first is not None else float("nan"),
    )


def score_heldout(model: DuplexModel, folder: Path) -> dict[str, float]:
    """The known phrases in voices that training never heard."""
    items = [item for item in read_manifest(folder) if item.answer]
    outcomes = []
    for place, item in enumerate(items):
        pcm, end = stage_phrase(folder, item, place)
        outcomes.append((item, judge(list(play(model, pcm, seed=place)), end)))
    right = [o.text == item.answer for item, o in outcomes]
    return {
        "renderings": len(items),
        "answered_right": float(np.mean(right)),
        "answered_aloud": float(
            np.mean([r and o.audible for r, (_, o) in zip(right, outcomes, strict=True)])
        ),
        "never_during_phrase": float(np.mean([not o.interrupted for _, o in outcomes])),
        "ended_turn": float(np.mean([o.ended for _, o in outcomes])),
        "latency_s_mean": float(np.nanmean([o.latency_s for _, o in outcomes])),
    }


def score_unknown(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Speech that means nothing to it, in voices and sentences that training never heard."""
    silent = []
    items = [item for item in read_manifest(folder) if not item.answer]
    for place, item in enumerate(items):
        pcm, _ = stage_phrase(folder, item, place)
        silent.append(all(result.is_listen for result in play(model, pcm, seed=place)))
    return {"renderings": len(items), "left_unanswered": float(np.mean(silent))}


def score_quiet(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Half a minute of silence, and of noise at three levels: units in which it spoke."""
    del folder
    samples, spoken = LONG_UNITS * UNIT_SAMPLES, {}
    sounds = {"silence": np.zeros(samples, np.float32)}
    sounds |= {f"noise_{-db}_db": room(samples, db + 200, float(db)) for db in (-20, -40, -60)}
    for seed, (name, pcm) in enumerate(sounds.items()):
        spoken[name] = float(sum(not result.is_listen for result in play(model, pcm, seed)))
    return spoken


def score_late(model: DuplexModel, folder: Path) -> dict[str, float]:
    """A phrase after a minute of quiet is answered like one after three seconds."""
    items = [item for item in read_manifest(folder) if item.answer][::25]
    right = []
    for place, item in enumerate(items):
        pcm, end = stage_phrase(folder, item, place, lead_s=60.0)
        right.append(judge(list(play(model, pcm, seed=place)), end).text == item.answer)
    return {"renderings": len(items), "answered_right": float(np.mean(right))}


def score_omni(model: DuplexModel, folder: Path) -> dict[str, float]:
    """A quarter of the known phrases with a picture every third second, and with one in each."""
    items = [item for item in read_manifest(folder) if item.answer][::4]
    frame = (folder.parent / "frame.jpg").read_bytes()
    shares = []
    for every in (SHOWN_EVERY, 1):
        right = []
        for place, item in enumerate(items):
            pcm, end = stage_phrase(folder, item, place)
            outcome = judge(list(play(model, pcm, place, (frame,), every=every)), end)
            right.append(outcome.text == item.answer)
        shares.append(float(np.mean(right)))
    return {
        "renderings": len(items),
        "answered_right": shares[0],
        "answered_right_picture_each_second": shares[1],
    }


SCORES: Final[dict[str, Callable[[DuplexModel, Path], dict[str, float]]]] = {
    "heldout": score_heldout,
    "unknown": score_unknown,
    "quiet": score_quiet,
    "late": score_late,
    "omni": score_omni,
}


def main() -> None:
    """Print all scores of a model."""
    root = Path(__file__).parents[3] / "fixtures"
    parser = argparse.ArgumentParser(description="score the embedded model")
    parser.add_argument("--model", type=Path, default=root / "tiny")
    parser.add_argument("--heldout", type=Path, default=root / "speech" / "heldout")
    options = parser.parse_args()
    model = DuplexModel.load(options.model)
    print(
        json.dumps(
            {name: score(model, options.heldout) for name, score in SCORES.items()}, indent=1
        )
    )


if __name__ == "__main__":
    main()
