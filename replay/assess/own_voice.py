"""Word error of the model's own voice: what a transcriber hears in its sound, against its text.

A stretch of the model's sound as it was played, gaps of `SPEECH_GAP_MS` apart (within a response of
`PAUSE_MS`), is written down by the transcriber: in seconds, after half a second of silence and with
a second of silence at its end. What it wrote is compared with the text that was sent with the
sound. Text without sound is not judged, and neither is a recording without the model's sound or
text. Words that were cut off within a second count as said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import soxr

from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES, UNIT_SAMPLES, Chunk
from protocol.values.modes import OF_MODE
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader
from runtime.measures.measure import PAUSE_MS, SPEECH_GAP_MS, Ratio, Scores
from runtime.measures.placing import Sound
from runtime.model.backends.base import (
    Backend,
    BackendError,
    BackendGone,
    Closes,
    Transcribes,
    TranscriptSession,
)

from ..eval.evaluate import Row, measure_log
from ..eval.table import OWN_VOICE
from ..export.moments import Moment, Words
from ..export.timeline import Timeline
from ..rerun.environment import Loading
from ..shared.commands import UnusableError, Watch
from ..shared.fields import removed_in

UTTERANCE_S_MAX: Final = 30
"""Longer speech is several utterances: it would outgrow the transcriber's context."""
LEAD_SAMPLES: Final = INPUT_RATE_HZ // 2
_PER_MS: Final = OUTPUT_RATE_HZ // 1000
_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+(?:['’][^\W_]+)*")
"""A word, of scripts without spaces a character."""


@attrs.define
class Said:
    """A stretch of the model's sound (float32 LE, 24 kHz), its end in samples, and its text."""

    response_id: str
    end: int
    pcm: bytearray
    text: str = ""


def stretches(moments: Iterable[Moment]) -> Iterator[Said]:
    """Join the model's sound and words; words follow the sound that they begin with."""
    said: Said | None = None
    for moment in moments:
        match moment:
            case Sound(voice="model", pcm=pcm, response_id=response):
                if said is not None and moment.begin - said.end < _gap_after(said, response):
                    said.pcm += bytes(max(0, moment.begin - said.end) * SAMPLE_BYTES)
                    said.pcm += pcm
                else:
                    if said is not None:
                        yield said
                    said = Said(response, moment.end, bytearray(pcm))
                said.response_id, said.end = response, moment.end
            case Words(voice="model", end_ns=int()) if said is not None:
                said.text += moment.text
    if said is not None:
        yield said


def _gap_after(said: Said, response_id: str) -> int:
    is_same = response_id != "" and response_id == said.response_id
    return (PAUSE_MS if is_same else SPEECH_GAP_MS) * _PER_MS


def words_of(text: str) -> list[str]:
    """List the words of a text, without case and punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def word_errors(said: Sequence[str], wrote: Sequence[str]) -> int:
    """Count the words that are inserted, left out or replaced, at the least."""
    row = list(range(len(wrote) + 1))
    for place, word in enumerate(said, 1):
        corner, row[0] = row[0], place
        for at, written in enumerate(wrote, 1):
            replaced = corner + (word != written)
            corner = row[at]
            row[at] = min(replaced, row[at] + 1, row[at - 1] + 1)
    return row[-1]


async def write_down(
    held: TranscriptSession, pcm: bytes | bytearray, utterance: int
) -> tuple[str, int]:
    """Write sound (24 kHz) down; return the text, and the number of the next utterance."""
    sound = soxr.resample(np.frombuffer(pcm, "<f4"), OUTPUT_RATE_HZ, INPUT_RATE_HZ)
    samples = LEAD_SAMPLES + len(sound)
    seconds = -(-samples // UNIT_SAMPLES) + 1
    sound = np.pad(sound, (LEAD_SAMPLES, seconds * UNIT_SAMPLES - samples)).astype("<f4")
    text = ""
    for number, second in enumerate(sound.reshape(seconds, UNIT_SAMPLES)):
        index = number % UTTERANCE_S_MAX
        chunk = Chunk(
            utterance=utterance + number // UTTERANCE_S_MAX,
            index=index,
            pcm=second.tobytes(),
            is_last=number + 1 == seconds or index + 1 == UTTERANCE_S_MAX,
            seed=0,
        )
        text += (await held.run_chunk(chunk)).text
    return text, utterance + -(-seconds // UTTERANCE_S_MAX)


async def own_voice(log: Path, backend: Transcribes) -> Scores:
    """Measure one log, if it has the model's sound and text; `BackendError`, `RecorderError`."""
    errors = words = utterance = 0
    held: TranscriptSession | None = None
    try:
        with LogReader(log) as reader:
            if {("audio", "model"), ("text", "model")} & removed_in(reader.head.fields):
                return {}
            timeline = Timeline(reader.head.fields, reader)
            for said in stretches(timeline):
                expected = words_of(said.text)
                if not expected or not said.pcm:
                    continue
                held = held or await backend.transcribe(slot=0)
                text, utterance = await write_down(held, said.pcm, utterance)
                errors += word_errors(expected, words_of(text))
                words += len(expected)
            opened = timeline.story.opened
    finally:
        if held is not None:
            await held.release()
    is_duplex = opened is None or OF_MODE[opened.mode].work == "unit"
    return {OWN_VOICE: Ratio(errors, words)} if words and is_duplex else {}


async def measure_with(
    loading: Loading, logs: Sequence[Path], load: Callable[[Loading], Backend], watch: Watch
) -> list[Row]:
    """Measure logs as they are, with the word error of the model's voice.

    `UnusableError`: there is no such transcriber, or it was lost.
    """
    name = loading.name
    try:
        backend = load(loading)
    except Exception as error:  # any error means that there is no model
        raise UnusableError(f"the transcriber {name!r} cannot be loaded: {error}") from error
    try:
        if not isinstance(backend, Transcribes) or "transcription" not in backend.info.modes:
            raise UnusableError(f"the model {name!r} does not transcribe")
        return [await _measured(log, backend, watch) for log in logs]
    except BackendGone as error:
        raise UnusableError(f"the transcriber {name!r} is lost: {error}") from error
    finally:
        if isinstance(backend, Closes):
            await backend.aclose()


async def _measured(log: Path, backend: Transcribes, watch: Watch) -> Row:
    found: Scores = {}
    trouble = ""
    try:
        found = await own_voice(log, backend)
    except BackendGone:
        raise
    except BackendError as error:
        trouble = f"failed: the transcriber: {error}"
    except (OSError, RecorderError):
        pass  # measuring says so
    row = measure_log(log, str(log), watch, found)
    if trouble and not row.error:
        row = attrs.evolve(row, result="failed", error=trouble)
    return row
