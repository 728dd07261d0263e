"""Judges the cases of a suite: is each conversation as expected?

A recording is judged by its log, a pair of WAV files by where the energy detector hears speech in
each. Where an expectation cannot be judged (a redaction took out what it needs; a file cannot be
run again) the case is skipped, with the reason, and is neither right nor wrong.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.model import INPUT_RATE_HZ
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader
from runtime.measures.conversation import TICK_HZ, Conversation, Span, Turns
from runtime.measures.placing import Sound, time_of
from runtime.measures.talk import UserSound, UserSpeech

from ..eval.benchmark import takes_turn
from ..eval.evaluate import Row
from ..eval.facts import Lost
from ..eval.gather import gather
from ..export.moments import Words
from ..export.timeline import Timeline
from ..shared.commands import reason
from ..shared.page import printable
from .suite import Case, Suite

TRANSCRIPT_BYTES_MAX: Final = 1 << 20
"""Words of hours."""

Run = Callable[[list[Path]], list[Row]]


@attrs.frozen(kw_only=True)
class Judged:
    """A case: why it is not as expected, or why it was not judged; neither if it is."""

    name: str
    failures: tuple[str, ...] = ()
    skipped: str = ""


@attrs.frozen(kw_only=True)
class Heard:
    """A conversation, the model's words, and what a redaction took out.

    `spoken`: where each of the model's words is, if a transcript says so.
    """

    talk: Conversation
    words: str = ""
    lost: frozenset[Lost] = frozenset()
    spoken: tuple[Span, ...] | None = None

    def takes_turn(self, after_s: float) -> bool:
        """Whether the model takes the turn, as Full-Duplex-Bench counts it, after a time."""
        after = round(after_s * TICK_HZ)
        if self.spoken is not None:
            later = [span for span in self.spoken if span.begin >= after]
            return takes_turn(later, len(later))
        model = [Span(max(it.begin, after), it.end) for it in self.talk.model if it.end > after]
        words = sum(text.words for text in self.talk.texts if text.begin >= after)
        return takes_turn(model, words)


def judged_closed(suite: Suite) -> list[Judged]:
    """Judge the cases as they were recorded."""
    return [_judged(case, partial(_heard, suite, case)) for case in suite.cases]


def judged_open(suite: Suite, run: Run) -> list[Judged]:
    """Judge the cases as a model answers them, which `run` runs on logs, keeping what it made."""
    recorded = [case for case in suite.cases if case.recording and not case.skipped]
    logs = [suite.path(case.recording) for case in recorded]
    rows = dict(zip((case.name for case in recorded), run(logs), strict=True))
    found = []
    for case in suite.cases:
        row = rows.get(case.name)
        if case.skipped:
            found.append(Judged(name=case.name, skipped=case.skipped))
        elif row is None:
            why = "a WAV file has no client that could be heard again: --mode closed"
            found.append(Judged(name=case.name, skipped=why))
        elif row.result == "skipped":
            found.append(Judged(name=case.name, skipped=f"{row.error}: --mode closed"))
        elif row.error:
            found.append(Judged(name=case.name, failures=(row.error,)))
        else:
            made = Path(str(row.body["made"]))
            found.append(_judged(case, partial(heard_in, made)))
    return found


def _judged(case: Case, hear: Callable[[], Heard]) -> Judged:
    if case.skipped:
        return Judged(name=case.name, skipped=case.skipped)
    try:
        heard = hear()
    except (OSError, RecorderError, ValueError, RuntimeError) as error:
        return Judged(name=case.name, failures=(f"cannot be read: {reason(error)}",))
    times = (case.answers_by, case.stops_within)
    if "speech" in heard.lost and times != (None, None):
        return Judged(name=case.name, skipped="redacted: where the user spoke is not known")
    if "words" in heard.lost and (case.says_one_of or case.takes_turn is not None):
        return Judged(name=case.name, skipped="redacted: the model's words are not in it")
    return Judged(name=case.name, failures=tuple(failures_of(case, heard)))


def failures_of(case: Case, heard: Heard) -> Iterator[str]:
    """Say in what a conversation is not as expected."""
    talk = heard.talk
    turns = Turns(talk)
    if case.stays_silent and talk.model:
        yield f"the model is heard at {_s(talk.model[0].begin)}"
    if case.answers_by is not None:
        judged = [turn for turn in turns.turns if turn.is_judged]
        if not judged:
            yield "the user has no turn that could be answered"
        for turn in judged:
            late = None if turn.answer is None else turn.answer.begin - turn.speech.end
            if late is None:
                yield f"the turn that ends at {_s(turn.speech.end)} is not answered"
            elif late > case.answers_by * TICK_HZ:
                yield f"the turn that ends at {_s(turn.speech.end)} is answered after {_s(late)}"
    if case.stops_within is not None:
        if not turns.barge_ins:
            yield "the user does not speak over the model"
        for barge_in in turns.barge_ins:
            took = barge_in.over.end - barge_in.speech.begin
            if took > case.stops_within * TICK_HZ:
                yield f"the model speaks on for {_s(took)} at {_s(barge_in.speech.begin)}"
    if case.takes_turn is not None and heard.takes_turn(case.after or 0) != case.takes_turn:
        yield f"the model {'does not take' if case.takes_turn else 'takes'} the turn"
    said = heard.words.casefold()
    if case.says_one_of and not any(words.casefold() in said for words in case.says_one_of):
        yield f"none of {list(case.says_one_of)} is said"


def _s(ticks: int) -> str:
    return f"{ticks / TICK_HZ:.2f} s"


# -- what is heard --------------------------------------------------------------------------------


def _heard(suite: Suite, case: Case) -> Heard:
    if case.recording:
        return heard_in(suite.path(case.recording))
    if case.stereo:
        user, model = channels_of(suite.path(case.stereo), 2)
    else:
        ((user,), (model,)) = (channels_of(suite.path(it), 1) for it in (case.user, case.model))
    end = max(len(user), len(model)) * TICK_HZ // INPUT_RATE_HZ
    talk = Conversation(user=_spoken(user), model=_spoken(model), end=end)
    if not case.transcript:
        return Heard(talk=talk)
    words, spoken = read_transcript(suite.path(case.transcript))
    return Heard(talk=talk, words=words, spoken=spoken)


def read_transcript(path: Path) -> tuple[str, tuple[Span, ...]]:
    """Read words and their times, as Full-Duplex-Bench has them; `OSError`, `ValueError`."""
    with path.open("rb") as file:
        data = file.read(TRANSCRIPT_BYTES_MAX + 1)
    if len(data) > TRANSCRIPT_BYTES_MAX:
        raise ValueError(f"{path.name}: more than {TRANSCRIPT_BYTES_MAX} bytes")
    try:
        body = json.loads(data)
        times = [chunk["timestamp"] for chunk in body["chunks"]]
        ticks = [[round((at or 0) * TICK_HZ) for at in pair] for pair in times]
        spans = (Span(begin, end or begin) for begin, end in ticks)
        return str(body["text"]), tuple(spans)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path.name}: no words with times, from and to in seconds") from error


def heard_in(log: Path) -> Heard:
    """Hear a recording; `RecorderError`, `OSError`: it cannot be read; `ValueError`: damaged."""
    with LogReader(log) as reader:
        facts = gather(reader.head.fields, reader)
    if facts.damage_count:
        raise ValueError("it is damaged")
    if facts.work != "unit":
        raise ValueError(f"mode {facts.mode}: only duplex sessions are judged")
    with LogReader(log) as reader:
        words = [it for it in Timeline(reader.head.fields, reader) if isinstance(it, Words)]
    said = (it.text for it in words if it.voice == "model")
    return Heard(talk=facts.conversation, words="".join(said), lost=facts.lost)


def channels_of(path: Path, count: int) -> list[NDArray[np.float32]]:
    """Read the channels of a WAV file, at 16 kHz; `ValueError`: it has others."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    if samples.shape[1] != count:
        raise ValueError(f"{path.name}: {samples.shape[1]} channels, not {count}")
    return [
        np.asarray(soxr.resample(channel, rate_hz, INPUT_RATE_HZ), np.float32)
        for channel in samples.T
    ]


def _spoken(samples: NDArray[np.float32]) -> tuple[Span, ...]:
    speech = UserSpeech()
    for begin in range(0, len(samples), INPUT_RATE_HZ):
        pcm = samples[begin : begin + INPUT_RATE_HZ].astype("<f4").tobytes()
        at_ns = time_of("user", begin + INPUT_RATE_HZ)
        speech.hear(UserSound.of(Sound(voice="user", at_ns=at_ns, begin=begin, pcm=pcm)))
    return speech.spans()


# -- reports --------------------------------------------------------------------------------------


def lines_of_cases(cases: Sequence[Judged]) -> Iterator[str]:
    """Tell people of each case, and how many there are."""
    for case in cases:
        if case.skipped:
            yield f"skipped  {printable(case.name)}: {printable(case.skipped)}"
        elif case.failures:
            yield f"FAILED   {printable(case.name)}: {printable('; '.join(case.failures))}"
        else:
            yield f"passed   {printable(case.name)}"
    failed, skipped = sum(bool(it.failures) for it in cases), sum(bool(it.skipped) for it in cases)
    passed = len(cases) - failed - skipped
    yield f"{passed} passed, {failed} failed, {skipped} skipped"


def junit_of_cases(suite: Suite, cases: Iterable[Judged]) -> bytes:
    """Write the cases as tests."""
    cases = [*cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(bool(it.failures) for it in cases)),
        "skipped": str(sum(bool(it.skipped) for it in cases)),
    }
    name = printable(suite.folder.name)
    root = ET.Element("testsuites", counts)
    tests = ET.SubElement(root, "testsuite", {"name": name, **counts})
    for case in cases:
        test = ET.SubElement(tests, "testcase", {"classname": name, "name": printable(case.name)})
        if case.skipped:
            ET.SubElement(test, "skipped", {"message": printable(case.skipped)})
        for failure in case.failures:
            ET.SubElement(test, "failure", {"message": printable(failure)})
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"
