"""Sound of a microphone while a loudspeaker speaks, and how the page's echo meter judges it.

    python -m tests.browser.echoes [--minutes 20]

prints what the table of `docs/console.md` sums up: for each case how often the meter of
`runtime/web/echo.js` warned. The voices are those of `fixtures/speech`; loudspeaker and user say
different phrases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import soundfile

from tests.test_javascript import SCRIPTS, node

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
RATE: Final = 16_000
CASE_S: Final = 40
LEVEL: Final = 0.1
"""Of speech, as a loudspeaker plays it: -20 dB."""
Samples = npt.NDArray[np.float64]


@cache
def phrases(who: int) -> list[Samples]:
    """The phrases of the loudspeaker (0) or the user (1), all as loud."""
    files = sorted(SPEECH.glob("*.flac"), key=lambda path: path.name[4:])
    names = sorted({path.name[4:] for path in files})
    own = [path for path in files if names.index(path.name[4:]) % 2 == who]
    read = [soundfile.read(path)[0] for path in own]
    return [LEVEL * sound / np.sqrt(np.mean(sound**2)) for sound in read]


def speech(rng: np.random.Generator, who: int) -> Samples:
    """Phrases with short pauses."""
    pieces = list[Samples]()
    while sum(map(len, pieces)) < CASE_S * RATE:
        phrase = phrases(who)[rng.integers(len(phrases(who)))]
        pieces += [phrase, np.zeros(int(RATE * rng.uniform(0.05, 0.5)))]
    return np.concatenate(pieces)[: CASE_S * RATE]


def turns(rng: np.random.Generator) -> tuple[Samples, Samples]:
    """When the loudspeaker speaks, and when a user does who speaks just then, a little later."""
    model, user = np.zeros((2, CASE_S * RATE))
    at = 0
    while at < len(model):
        length, pause, late = (
            int(RATE * rng.uniform(*range_)) for range_ in ((1, 3), (0.3, 1.5), (0, 0.4))
        )
        model[at : at + length] = user[at + late : at + late + length] = 1
        at += length + pause
    return model, user


def room(rng: np.random.Generator, sound: Samples, db: float) -> Samples:
    """The echo of a sound: late, with the room's reverberation of 0.2 to 0.9 s."""
    length = int(RATE * rng.uniform(0.2, 0.9))
    answer = 0.06 * rng.standard_normal(length) * 10 ** (-3 * np.arange(length) / length)
    answer[0] += 1
    answer *= 10 ** (db / 20) / np.sqrt(np.sum(answer**2))
    size = 1 << (len(sound) + length).bit_length()  # a Fourier transform is slow for others
    back = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(answer, size), size)
    late = int(RATE * rng.uniform(0.01, 0.5))
    return np.concatenate([np.zeros(late), back])[: len(sound)]


def noise(rng: np.random.Generator, db: float) -> Samples:
    """White noise."""
    return 10 ** (db / 20) * rng.standard_normal(CASE_S * RATE)


def converging(rng: np.random.Generator, sound: Samples) -> Samples:
    """The echo of a canceller that has learnt the room after two seconds, and leaves -50 dB."""
    seconds = np.arange(len(sound)) / RATE
    return room(rng, sound, -6) * 10 ** (-np.minimum(seconds * 22, 44) / 20)


ECHOES: Final = {
    "the model's voice, -6 dB": lambda rng, own, _: room(rng, own, -6) + noise(rng, -66),
    "the model's voice, -20 dB": lambda rng, own, _: room(rng, own, -20) + noise(rng, -66),
    "the model's voice, -40 dB": lambda rng, own, _: room(rng, own, -40) + noise(rng, -66),
    "the model's voice, -20 dB, in noise of -50 dB": lambda rng, own, _: (
        room(rng, own, -20) + noise(rng, -50)
    ),
    "the model's voice, -20 dB, and headphones after 20 s": lambda rng, own, _: (
        room(rng, np.where(np.arange(len(own)) < 20 * RATE, own, 0), -20) + noise(rng, -66)
    ),
    "the model's voice, -12 dB, and a user as loud all the time": lambda rng, own, user: (
        room(rng, own, -12) + 0.25 * user
    ),
}
NONE: Final = {
    "a user who speaks all the time": lambda rng, _, user: user + noise(rng, -60),
    "the same, 20 dB quieter": lambda rng, _, user: 0.1 * user + noise(rng, -66),
    "a user who speaks whenever the model does": lambda rng, _, user: user + noise(rng, -60),
    "noise of -50 dB": lambda rng, *_: noise(rng, -50),
    "silence (muted, or headphones)": lambda *_: np.zeros(CASE_S * RATE),
    "an echo canceller that learns for 2 s, and leaves -50 dB": lambda rng, own, _: (
        converging(rng, own) + noise(rng, -66)
    ),
}


def case(name: str, seed: int) -> npt.NDArray[np.float32]:
    """The sound that is played in a case, and the sound that is heard."""
    rng = np.random.default_rng(seed)
    own, user = speech(rng, 0), speech(rng, 1)
    if "whenever" in name:
        model, other = turns(rng)
        own, user = own * model, user * other
    heard = (ECHOES | NONE)[name](rng, own, user)
    return np.stack([own, heard]).astype(np.float32)


def measure(folder: Path, names: list[str], seeds: range) -> dict[str, list[dict[str, Any]]]:
    """The meter's judgements of each case, seed by seed."""
    asked = [(name, seed) for name in names for seed in seeds]
    command = [*node(), str(SCRIPTS / "echo.mjs")]
    said = dict[str, list[dict[str, Any]]]()
    path = folder / "case.f32"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for name, seed in asked:
            case(name, seed).tofile(path)
            process.stdin.write(f"{path}\n")
            said.setdefault(name, []).append(json.loads(process.stdout.readline()))
    return said


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="of each case")
    seeds = range(int(parser.parse_args().minutes * 60 / CASE_S))
    with tempfile.TemporaryDirectory() as name:
        said = measure(Path(name), [*ECHOES, *NONE], seeds)
    print("| the microphone hears | correlation, p1, median and p99 | judgements | warned |")
    print("|---|---|---|---|")
    for what, runs in said.items():
        found = [echo["correlation"] for run in runs for echo in run["told"]]
        low, middle, high = np.quantile(found, [0.01, 0.5, 0.99])
        warned = sum(any(echo["isHeard"] for echo in run["told"]) for run in runs)
        row = f"{low:.2f}, {middle:.2f}, {high:.2f} | {len(found)} | {warned} of {len(runs)}"
        print(f"| {what} | {row} |")
    took = [run["tookMs"] / run["frames"] for runs in said.values() for run in runs]
    print(f"microseconds a frame: {1000 * float(np.median(took)):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
