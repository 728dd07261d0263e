"""How well `tiny` transcribes; see `score.py` for the registry.

Each rendering is an utterance, cut into seconds: a pause that depends on its place in the list, the
file, silence up to a whole second, and a second of silence. Then every fourth rendering in
sequence, as one utterance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, Chunk, ChunkResult
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Steps
from tests.bench.tiny.staging import (
    Course,
    Heldout,
    Pcm,
    known_phrases,
    pause_of,
    read_manifest,
    read_speech,
    room,
    together,
)

PAUSES: Final = (0.3, 0.7, 1.1, 1.9)
"""Seconds of quiet between the renderings of the stream, in turn."""


@attrs.frozen(kw_only=True)
class Written:
    """The words said and the words transcribed."""

    said: tuple[str, ...]
    wrote: tuple[str, ...]

    @property
    def errors(self) -> int:
        """The word edit distance."""
        row = list(range(len(self.wrote) + 1))
        for place, said in enumerate(self.said, 1):
            corner, row[0] = row[0], place
            for at, wrote in enumerate(self.wrote, 1):
                replaced = corner + (said != wrote)
                corner = row[at]
                row[at] = min(replaced, row[at] + 1, row[at - 1] + 1)
        return row[-1]


def word_error(transcripts: Sequence[Written]) -> float:
    """Errors per word said, over all transcripts."""
    return sum(item.errors for item in transcripts) / sum(len(item.said) for item in transcripts)


def writing_down(model: DuplexModel, pcm: Pcm) -> Course[list[ChunkResult]]:
    """Transcribe an utterance (16 kHz, in [-1, 1]), second by second; the last is silence."""
    seconds = -(-len(pcm) // UNIT_SAMPLES) + 1
    sound = np.pad(pcm, (0, seconds * UNIT_SAMPLES - len(pcm))).astype("<f4")

    def course(slot: int) -> Steps[list[ChunkResult]]:
        transcript, results = model.transcript(slot=slot), []
        try:
            for index, second in enumerate(sound.reshape(seconds, UNIT_SAMPLES)):
                chunk = Chunk(
                    utterance=0,
                    index=index,
                    pcm=second.tobytes(),
                    is_last=index == seconds - 1,
                    seed=0,
                )
                results.append((yield from transcript.chunk(chunk)))
        finally:
            transcript.release()
        return results

    return course


def transcribe(model: DuplexModel, said: Sequence[str], sounds: Iterable[Pcm]) -> list[Written]:
    """Transcribe utterances and pair each with its words."""
    written = together(model, (writing_down(model, pcm) for pcm in sounds))
    texts = ("".join(result.text for result in results) for results in written)
    return [
        Written(said=tuple(words.split()), wrote=tuple(text.split()))
        for words, text in zip(said, texts, strict=True)
    ]


def _staged(folder: Path, item: Heldout, place: int) -> Pcm:
    return np.concatenate([room(pause_of(place), place), read_speech(folder, item)])


def _stream(folder: Path, items: Sequence[Heldout]) -> Pcm:
    pieces = []
    for place, item in enumerate(items):
        quiet = room(int(PAUSES[place % len(PAUSES)] * INPUT_RATE_HZ), place)
        pieces += [quiet, read_speech(folder, item)]
    return np.concatenate(pieces)


def score_transcripts(model: DuplexModel, folder: Path) -> dict[str, float]:
    """The known phrases, other speech, and a stream of phrases, in voices new to it."""
    known = known_phrases(folder)
    strange = [item for item in read_manifest(folder) if not item.answer]
    phrases, others = (
        transcribe(
            model,
            [item.phrase for item in items],
            (_staged(folder, item, place) for place, item in enumerate(items)),
        )
        for items in (known, strange)
    )
    some = known[::4]
    spoken = " ".join(item.phrase for item in some)
    stream = transcribe(model, [spoken], [_stream(folder, some)])
    return {
        "renderings": len(phrases),
        "word_error": word_error(phrases),
        "written_right": float(np.mean([item.errors == 0 for item in phrases])),
        "stream_phrases": len(some),
        "stream_word_error": word_error(stream),
        "strange_word_error": word_error(others),
    }
