"""The skills of `tiny`, measured: `python -m tests.bench.tiny.score` prints JSON.

Held-out renderings, in `fixtures/speech/heldout`, are each played into a session with the default
settings: `FORCED` seconds of quiet, a pause that depends on its place in the list, the phrase,
quiet. `SCORES` is the registry: a new skill adds an entry, and a retraining must pass all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, UnitResult
from runtime.model.backends.minicpmo import device
from runtime.model.backends.minicpmo.model import SLOTS, DuplexModel
from runtime.model.backends.minicpmo.quantized import BITS
from runtime.settings.settings import DEVICES, DTYPES
from tests.bench.tiny.score_chat import (
    colour_pictures,
    score_chat_aloud,
    score_chat_colour,
    score_chat_spoken,
    score_chat_typed,
)
from tests.bench.tiny.score_clock import score_clock
from tests.bench.tiny.score_tools import score_tools
from tests.bench.tiny.score_transcripts import score_transcripts
from tests.bench.tiny.staging import (
    AFTER,
    SEEING,
    Course,
    Heldout,
    Pcm,
    known_phrases,
    playing,
    read_manifest,
    read_speech,
    room,
    speaking_into,
    stage_phrase,
    together,
)

COLOURS: Final = {
    "red": ((214, 34, 40), (150, 22, 30), (235, 60, 62)),
    "green": ((40, 168, 60), (30, 120, 62), (90, 205, 96)),
    "blue": ((36, 72, 205), (24, 50, 140), (70, 110, 236)),
    "yellow": ((240, 214, 30), (215, 190, 44), (250, 228, 88)),
    "black": ((12, 12, 14), (24, 22, 20), (4, 8, 16)),
    "white": ((246, 246, 248), (250, 248, 242), (238, 240, 242)),
}
"""Shades of each colour in the pictures, RGB."""
SIZES: Final = ((400, 300), (256, 256), (352, 198))
"""Width and height of those pictures; training has other sizes."""
BARGE_OFFSETS: Final = 5
"""A phrase that interrupts an answer starts 0 to 0.4 s into a unit, in steps of 0.1 s."""
SHOWN_EVERY: Final = 3
"""Seconds between pictures when they are rare."""
LONG_UNITS: Final = 30
"""Seconds of silence, and of each noise, that must pass without speech."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The model's reaction to one rendering.

    Attributes:
        interrupted: it spoke in a unit that ended before the phrase did.
        audible: each speaking unit came with sound.
        ended: it ended its turn and listened again.
        latency_s: from the phrase's end to the end of the answering unit; nan without answer.
    """

    text: str
    interrupted: bool
    audible: bool
    ended: bool
    latency_s: float


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


def judge_all(
    model: DuplexModel,
    staged: Iterable[tuple[Pcm, int]],
    shown: Iterable[tuple[bytes, ...]] = repeat(()),
    *,
    every: int = 1,
) -> list[Outcome]:
    """Play phrases, each with its end's sample, into their own sessions, and judge each.

    JPEG files of `shown` are shown in every `every`-th unit; the place gives the seed.
    """
    ends = list[int]()

    def courses() -> Iterator[Course[list[UnitResult]]]:
        for place, ((pcm, end), frames) in enumerate(zip(staged, shown, strict=False)):
            ends.append(end)
            yield playing(model, pcm, place, frames, every=every)

    return [
        judge(results, end) for results, end in zip(together(model, courses()), ends, strict=True)
    ]


def _right(items: Sequence[Heldout], outcomes: Sequence[Outcome]) -> float:
    """The share of phrases that were answered correctly."""
    answered = zip(items, outcomes, strict=True)
    return float(np.mean([outcome.text == item.answer for item, outcome in answered]))


def score_heldout(model: DuplexModel, folder: Path) -> dict[str, float]:
    """The known phrases in voices not used in training."""
    items = known_phrases(folder)
    staged = [stage_phrase(folder, item, place) for place, item in enumerate(items)]
    outcomes = judge_all(model, staged)
    right = [o.text == item.answer for item, o in zip(items, outcomes, strict=True)]
    return {
        "renderings": len(items),
        "answered_right": float(np.mean(right)),
        "answered_aloud": float(
            np.mean([r and o.audible for r, o in zip(right, outcomes, strict=True)])
        ),
        "never_during_phrase": float(np.mean([not o.interrupted for o in outcomes])),
        "ended_turn": float(np.mean([o.ended for o in outcomes])),
        "latency_s_mean": float(np.nanmean([o.latency_s for o in outcomes])),
    }


def score_unknown(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Unknown speech, in voices and sentences not used in training."""
    items = [item for item in read_manifest(folder) if not item.answer]
    played = together(
        model,
        (
            playing(model, stage_phrase(folder, item, place)[0], place)
            for place, item in enumerate(items)
        ),
    )
    silent = [all(result.is_listen for result in results) for results in played]
    return {"renderings": len(items), "left_unanswered": float(np.mean(silent))}


def score_quiet(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Half a minute of silence, and of noise at three levels: units in which it spoke."""
    del folder
    samples = LONG_UNITS * UNIT_SAMPLES
    sounds = {"silence": np.zeros(samples, np.float32)}
    sounds |= {f"noise_{-db}_db": room(samples, db + 200, float(db)) for db in (-20, -40, -60)}
    played = together(model, (playing(model, pcm, n) for n, pcm in enumerate(sounds.values())))
    return {
        name: float(sum(not result.is_listen for result in results))
        for name, results in zip(sounds, played, strict=True)
    }


def score_late(model: DuplexModel, folder: Path) -> dict[str, float]:
    """A phrase after a minute of quiet is answered like one after three seconds."""
    items = known_phrases(folder)[::25]
    staged = (stage_phrase(folder, item, place, lead_s=60.0) for place, item in enumerate(items))
    return {"renderings": len(items), "answered_right": _right(items, judge_all(model, staged))}


def score_omni(model: DuplexModel, folder: Path) -> dict[str, float]:
    """A quarter of the known phrases with a picture every third second, and with one in each."""
    items = known_phrases(folder)[::4]
    frame = (folder.parent / "frame.jpg").read_bytes()
    staged = [stage_phrase(folder, item, place) for place, item in enumerate(items)]
    shares = [
        _right(items, judge_all(model, staged, repeat((frame,)), every=every))
        for every in (SHOWN_EVERY, 1)
    ]
    return {
        "renderings": len(items),
        "answered_right": shares[0],
        "answered_right_picture_each_second": shares[1],
    }


def score_colour(model: DuplexModel, folder: Path) -> dict[str, float]:
    """The colour that it names: fixed shades, in sizes new to it; and no picture."""
    items = [item for item in read_manifest(folder) if item.phrase == SEEING]
    trials: list[tuple[str, tuple[bytes, ...]]] = [
        (name, (jpeg,)) for name, jpeg in colour_pictures(COLOURS, SIZES)
    ]
    trials += [*trials, *[("nothing", ())] * len(COLOURS)]
    staged = [
        stage_phrase(folder, items[place % len(items)], place) for place in range(len(trials))
    ]
    outcomes = judge_all(model, staged, (frames for _, frames in trials))
    right: dict[bool, list[bool]] = {True: [], False: []}
    for (name, frames), outcome in zip(trials, outcomes, strict=True):
        right[bool(frames)].append(outcome.text == f"I see {name}.")
    return {
        "questions": len(right[True]),
        "named_right": float(np.mean(right[True])),
        "nothing_right": float(np.mean(right[False])),
    }


def score_barge(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Barge-in: an interrupted answer stops at once, and the interruption is answered."""
    items, strange = known_phrases(folder), [i for i in read_manifest(folder) if not i.answer]
    others, courses, stopped, answered = [], [], list[bool](), list[bool]()
    for place, item in enumerate(items[::2]):
        other = items[(2 * place + 37) % len(items)] if place % 5 else strange[place % len(strange)]
        others.append(other)
        speech = read_speech(folder, other)
        begin = place % BARGE_OFFSETS * INPUT_RATE_HZ // 10
        units = -(-(begin + len(speech)) // UNIT_SAMPLES) + AFTER
        sound = room(units * UNIT_SAMPLES, place)
        sound[begin : begin + len(speech)] += speech
        phrase, _ = stage_phrase(folder, item, place)
        courses.append(speaking_into(model, phrase, place, sound))
    for other, played in zip(others, together(model, courses), strict=True):
        if played is None:
            continue
        first, *rest = played[1]
        stopped.append(first.end_of_turn and not first.text)
        if other.answer:
            answered.append(stopped[-1] and "".join(r.text for r in rest) == other.answer)
    return {
        "answers": len(stopped),
        "stopped_at_once": float(np.mean(stopped)),
        "answered_right": float(np.mean(answered)),
    }


def score_noise_during_answer(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Noise and knocks during an answer do not stop it."""
    items, courses, whole = known_phrases(folder)[::4], [], list[bool]()
    for place, item in enumerate(items):
        sound = room(AFTER * UNIT_SAMPLES, place, (-62.0, -45.0, -35.0)[place % 3])
        sound[4000:4400] += (0.3 if place % 2 else 0.0) * np.hanning(400).astype(np.float32)
        phrase, _ = stage_phrase(folder, item, place)
        courses.append(speaking_into(model, phrase, place, sound))
    for item, played in zip(items, together(model, courses), strict=True):
        if played is not None:
            said = "".join(r.text for r in (*played[0], *played[1]))
            whole.append(said == item.answer or not item.answer.startswith(played[0][-1].text))
    return {"answers": len(whole), "went_on": float(np.mean(whole))}


def score_chat_sight(model: DuplexModel, folder: Path) -> dict[str, float]:
    """The same pictures in chat; see `score_chat_colour`."""
    return score_chat_colour(model, folder, colour_pictures(COLOURS, SIZES))


SCORES: Final[dict[str, Callable[[DuplexModel, Path], dict[str, float]]]] = {
    "heldout": score_heldout,
    "unknown": score_unknown,
    "quiet": score_quiet,
    "late": score_late,
    "omni": score_omni,
    "colour": score_colour,
    "barge": score_barge,
    "noise_during_answer": score_noise_during_answer,
    "chat_typed": score_chat_typed,
    "chat_spoken": score_chat_spoken,
    "chat_colour": score_chat_sight,
    "chat_aloud": score_chat_aloud,
    "transcripts": score_transcripts,
    "tools": score_tools,
    "clock": score_clock,
}


def main() -> None:
    """Print all scores of a model."""
    root = Path(__file__).parents[3] / "fixtures"
    parser = argparse.ArgumentParser(description="score the embedded model")
    parser.add_argument("--model", type=Path, default=root / "tiny")
    parser.add_argument("--heldout", type=Path, default=root / "speech" / "heldout")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--quantize", choices=BITS, help="as of `antiphon serve`")
    parser.add_argument("--only", default=",".join(SCORES), help="scores, with commas")
    options = parser.parse_args()
    dtype = device.DTYPES[options.dtype]
    where = device.pick_device(options.device, prefer_cuda=False)
    model = DuplexModel.load(
        options.model, slots=options.slots, device=where, dtype=dtype, quantize=options.quantize
    )
    chosen = options.only.split(",")
    found = {
        name: score(model, options.heldout) for name, score in SCORES.items() if name in chosen
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
