"""Material of `antiphon bench streaming`: held-out phrases, the ends of their words, and matching.

A phrase's words are located by their lengths, with the following space, accurate to a tenth of a
second or so. A word came with the delta of its last letter. The text is aligned with the phrase, so
a wrong or missing word affects no other. The scripted model names the second that it heard.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from pathlib import Path
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from protocol.values.model import INPUT_RATE_HZ

from ...media.audio import read_wav
from .material import FIXTURES
from .output import BenchError

HELDOUT: Final = FIXTURES / "heldout"
ROOM_DB: Final = -62.0
"""RMS of the quiet between phrases, relative to full scale: that of a quiet room."""
TAIL_SAMPLES: Final = INPUT_RATE_HZ
"""Quiet after a phrase until its utterance is closed, as a client would wait."""
PIECE_SAMPLES: Final = INPUT_RATE_HZ // 10
"""Of an append: 100 ms, as a microphone gives them; ten make a second."""
LEAD_TURN: Final = (5**0.5 - 1) / 2
"""Each phrase begins later in its second by this, modulo one, so that words end evenly in it."""
WORD: Final = re.compile(r"[\w']+")

_Samples = NDArray[np.float32]
Arrivals = list[int | None]
"""Each word's delta index; None if it never came."""


@attrs.frozen(kw_only=True)
class Phrase:
    """A held-out phrase of the fixtures.

    Attributes:
        text: in small letters.
        samples: 16 kHz mono, in [-1, 1].
        start: first sample of speech.
        end: the sample after the last of speech.
    """

    text: str
    samples: _Samples
    start: int
    end: int


@attrs.frozen(kw_only=True)
class SpokenWord:
    """A word, in small letters, and the utterance's sample after its estimated end."""

    text: str
    end: int


@attrs.frozen(kw_only=True)
class Utterance:
    """The speech between two final commits: 16 kHz mono in whole pieces, and its words."""

    samples: _Samples
    words: tuple[SpokenWord, ...]

    @property
    def pieces(self) -> list[_Samples]:
        """Its appends, in order."""
        return np.split(self.samples, len(self.samples) // PIECE_SAMPLES)


# -- the phrases --------------------------------------------------------------------------------


def load_phrases(count: int, folder: Path = HELDOUT) -> list[Phrase]:
    """Read held-out phrases, evenly out of all, or `BenchError`; repeated if too few."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except OSError as error:
        text = "bench streaming needs fixtures/speech/heldout, which only the source tree has"
        raise BenchError(text) from error
    known = [each for each in manifest["renderings"] if each["answer"]]
    if count <= len(known):
        chosen = [known[place * len(known) // count] for place in range(count)]
    else:
        chosen = [known[place % len(known)] for place in range(count)]
    return [
        Phrase(
            text=each["phrase"].lower(),
            samples=np.frombuffer(read_wav(folder / each["file"]), "<f4"),
            start=each["start"],
            end=each["end"],
        )
        for each in chosen
    ]


def words_of(phrase: Phrase) -> list[SpokenWord]:
    """Estimate where a phrase's words end, by their lengths; see the module's docstring."""
    words = phrase.text.split()
    letters = list(accumulate(len(word) + 1 for word in words))
    spoken = phrase.end - phrase.start
    return [
        SpokenWord(text=word, end=phrase.start + round(spoken * upto / letters[-1]))
        for word, upto in zip(words, letters, strict=True)
    ]


def make_utterance(phrase: Phrase, place: int) -> Utterance:
    """Say a phrase with quiet around it; its `place` from 0 decides where in the second."""
    lead = int(place * LEAD_TURN % 1 * INPUT_RATE_HZ)
    least = lead + max(len(phrase.samples), phrase.end + TAIL_SAMPLES)
    samples = quiet(-(-least // PIECE_SAMPLES) * PIECE_SAMPLES, place)
    samples[lead : lead + len(phrase.samples)] += phrase.samples
    words = tuple(attrs.evolve(word, end=lead + word.end) for word in words_of(phrase))
    return Utterance(samples=samples, words=words)


def quiet(samples: int, seed: int) -> _Samples:
    """Make the noise of a quiet room, (samples,), the same for the same seed."""
    noise = np.random.default_rng(seed).standard_normal(samples)
    made: _Samples = (noise * 10 ** (ROOM_DB / 20)).astype(np.float32)
    return made


# -- results ------------------------------------------------------------------------------------


def find_words(utterance: Utterance, number: int, deltas: Sequence[str]) -> Arrivals:
    """Find the delta of each word in the utterance's text."""
    del number
    found = list(WORD.finditer("".join(deltas).lower()))
    ends = list(accumulate(map(len, deltas)))
    arrivals: Arrivals = [None] * len(utterance.words)
    said = [word.text for word in utterance.words]
    heard = [match.group() for match in found]
    for block in SequenceMatcher(None, said, heard, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            last_letter = found[block.b + offset].end()
            arrivals[block.a + offset] = bisect_left(ends, last_letter)
    return arrivals


def find_seconds(utterance: Utterance, number: int, deltas: Sequence[str]) -> Arrivals:
    """As `find_words`, for the scripted model, which names the second that it heard."""
    seconds = [(word.end - 1) // INPUT_RATE_HZ for word in utterance.words]
    places = {delta.strip().partition("-")[2]: at for at, delta in enumerate(deltas)}
    return [places.get(f"{number}.{second}") for second in seconds]


Find = Callable[[Utterance, int, Sequence[str]], Arrivals]
"""`find_words` or `find_seconds`."""
