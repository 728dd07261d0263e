"""A suite: a folder with `suite.toml`, whose cases say what is expected of a conversation.

    [[case]]
    name = "answers a question"
    recording = "rec-1.session.zst"   # or user and model, or stereo: WAV files
    answers_by = 1.5                  # every turn of the user, in seconds after its end
    stops_within = 1.0                # at every barge-in, in seconds from its begin
    stays_silent = true               # the model is not heard at all
    takes_turn = false                # as Full-Duplex-Bench counts turns; `after` so many seconds
    says_one_of = ["yes", "of course"]

The manifest is read strictly: an unknown key, a value of another type and a path that leaves the
folder are errors that name the place (`$.case[0].answers_by`).

A recording is judged by its log, a pair of WAV files by where the energy detector hears speech in
each. Where an expectation cannot be judged (a redaction took out what it needs; a file cannot be
run again) the case is skipped, with the reason, and is neither right nor wrong.

A suite is made of recordings: a copy of each, and what was so in it as what is expected. A session
whose client asked not to be recorded has no log, so it is in no suite. Of a redacted recording the
suite has what is left; a comment says that no model can be run on it.

The folders of Full-Duplex-Bench are made such a suite by `examples/full_duplex_bench.py`.
"""

from __future__ import annotations

import json
import math
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import attrs
import numpy as np
import soundfile
import soxr
from cattrs import Converter, transform_error
from numpy.typing import NDArray

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ
from recorder.format.format import RecorderError
from recorder.read.reader import LogReader
from recorder.write.files import new_file
from runtime.measures.conversation import TICK_HZ, Conversation, Span, Turns, ns_of
from runtime.measures.talk import Sound, UserSound, UserSpeech, time_of

from ..eval.evaluate import Row
from ..eval.reports import junit_xml
from ..eval.scores import Facts, FactsCollector, Lost, takes_turn
from ..export.timeline import Moment, Words
from ..shared.commands import UnusableError, make_folder, printable, reason, unwritable

# -- the manifest ----------------------------------------------------------------------------------


MANIFEST: Final = "suite.toml"
CASES_MAX: Final = 10_000
MANIFEST_BYTES_MAX: Final = 16 << 20
SECONDS_MAX: Final = 3600.0


@attrs.frozen(kw_only=True)
class Case:
    """One conversation, and what is expected.

    Attributes:
        recording: a log; or `user` and `model`, a WAV file each; or `stereo`, one for both voices,
            the user left. Paths are relative to the folder.
        transcript: the words of WAV files, as Full-Duplex-Bench has them (`output.json`).
        skipped: why it is not judged.
    """

    name: str
    recording: str = ""
    user: str = ""
    model: str = ""
    stereo: str = ""
    answers_by: float | None = None
    stops_within: float | None = None
    stays_silent: bool = False
    says_one_of: tuple[str, ...] = ()
    takes_turn: bool | None = None
    after: float | None = None
    transcript: str = ""
    skipped: str = ""

    def complaint(self) -> str:
        """Say what is wrong with it as a whole; empty if nothing is."""
        sources = [bool(self.recording), bool(self.user and self.model), bool(self.stereo)]
        spans = (self.answers_by, self.stops_within)
        does = spans != (None, None) or bool(self.says_one_of) or self.takes_turn is not None
        if sum(sources) != 1 or bool(self.user) != bool(self.model):
            return "give one of recording, user and model, or stereo"
        if not does and not self.stays_silent and not self.skipped:
            return "the case expects nothing"
        if self.stays_silent and does:
            return "a model that stays silent does nothing else"
        if any(it is not None and not 0 <= it <= SECONDS_MAX for it in (*spans, self.after)):
            return f"a time is from 0 to {SECONDS_MAX:g} s"
        if self.after is not None and self.takes_turn is None:
            return "after says from when on takes_turn is judged"
        if self.transcript and self.recording:
            return "a recording has its words: transcript is of WAV files"
        if self.says_one_of and not self.recording and not self.transcript:
            return "says_one_of needs a recording or a transcript: the words of WAV are not known"
        for path in (self.recording, self.user, self.model, self.stereo, self.transcript):
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts:
                return f"{path!r} leaves the folder"
        return ""


@attrs.frozen(kw_only=True)
class Manifest:
    """The cases of a suite."""

    case: tuple[Case, ...]


@attrs.frozen(kw_only=True)
class Suite:
    """A suite, and its folder."""

    folder: Path
    cases: tuple[Case, ...]


def read_suite(folder: Path) -> Suite:
    """Read the manifest of a folder; `UnusableError` names what is wrong, and where."""
    path = folder / MANIFEST
    try:
        if not path.is_file():
            raise UnusableError(f"{path}: there is no suite; make one with --record-suite")
        body = tomllib.loads(_bounded(path, MANIFEST_BYTES_MAX).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path}: is not TOML: {error}") from error
    try:
        cases = _CONVERTER.structure(body, Manifest).case
    except Exception as error:
        raise UnusableError(f"{path}: {transform_error(error)[0]}") from error
    if not 0 < len(cases) <= CASES_MAX:
        raise UnusableError(f"{path}: {len(cases)} cases: from 1 to {CASES_MAX}")
    names = set[str]()
    for number, case in enumerate(cases):
        complaint = "the name is used by another case" if case.name in names else case.complaint()
        if complaint:
            raise UnusableError(f"{path}: $.case[{number}]: {complaint}")
        names.add(case.name)
    return Suite(folder=folder, cases=cases)


def _bounded(path: Path, bytes_max: int) -> bytes:
    """Read a small file; `UnusableError`: it cannot be read, or is larger."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise UnusableError(f"{path}: {reason(error)}") from error
    if len(data) > bytes_max:
        raise UnusableError(f"{path}: more than {bytes_max} bytes")
    return data


def _exactly(kind: type) -> Any:
    def check(value: object, _: Any) -> object:
        if type(value) is not kind:
            raise TypeError(f"is {type(value).__name__}, not {kind.__name__}")
        return value

    return check


def _number(value: object, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"is {type(value).__name__}, not a finite number")
    return float(value)  # type: ignore[arg-type]


def _converter() -> Converter:
    """Make a converter that coerces nothing."""
    made = Converter(forbid_extra_keys=True)
    for kind in (str, bool):
        made.register_structure_hook(kind, _exactly(kind))
    made.register_structure_hook(float, _number)
    return made


_CONVERTER: Final = _converter()


# -- judging ---------------------------------------------------------------------------------------


TRANSCRIPT_BYTES_MAX: Final = 1 << 20
"""Words of hours."""

Run = Callable[[list[Path]], list[Row]]


@attrs.frozen(kw_only=True)
class Verdict:
    """A case: why it is not as expected, or why it was not judged; neither if it is."""

    name: str
    failures: tuple[str, ...] = ()
    skipped: str = ""


@attrs.frozen(kw_only=True)
class Observed:
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


def judged(suite: Suite, run: Run | None = None) -> list[Verdict]:
    """Judge the cases as they were recorded, or as a model answers them.

    `run` runs the model on logs, and keeps what it made.
    """
    if run is None:
        return [_judged(case, partial(_observe_case, suite, case)) for case in suite.cases]
    recorded = [case for case in suite.cases if case.recording and not case.skipped]
    logs = [suite.folder / case.recording for case in recorded]
    rows = dict(zip((case.name for case in recorded), run(logs), strict=True))
    return [_judged_made(case, rows.get(case.name)) for case in suite.cases]


def _judged_made(case: Case, row: Row | None) -> Verdict:
    why = case.skipped
    if row is None:
        why = why or "a WAV file has no client that could be heard again: --mode closed"
    elif row.result == "skipped":
        why = f"{row.error}: --mode closed"
    if why or row is None:
        return Verdict(name=case.name, skipped=why)
    if row.error:
        return Verdict(name=case.name, failures=(row.error,))
    return _judged(case, partial(observe, Path(str(row.body["made"]))))


def _judged(case: Case, observe_case: Callable[[], Observed]) -> Verdict:
    if case.skipped:
        return Verdict(name=case.name, skipped=case.skipped)
    try:
        found = observe_case()
    except (OSError, RecorderError, ValueError, RuntimeError) as error:
        return Verdict(name=case.name, failures=(f"cannot be read: {reason(error)}",))
    times = (case.answers_by, case.stops_within)
    if "speech" in found.lost and times != (None, None):
        return Verdict(name=case.name, skipped="redacted: where the user spoke is not known")
    if "words" in found.lost and (case.says_one_of or case.takes_turn is not None):
        return Verdict(name=case.name, skipped="redacted: the model's words are not in it")
    return Verdict(name=case.name, failures=tuple(failures_of(case, found)))


def failures_of(case: Case, found: Observed) -> Iterator[str]:
    """Say in what a conversation is not as expected."""
    talk = found.talk
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
    if case.takes_turn is not None and found.takes_turn(case.after or 0) != case.takes_turn:
        yield f"the model {'does not take' if case.takes_turn else 'takes'} the turn"
    text = found.words.casefold()
    if case.says_one_of and not any(words.casefold() in text for words in case.says_one_of):
        yield f"none of {list(case.says_one_of)} is said"


def _s(ticks: int) -> str:
    return f"{ticks / TICK_HZ:.2f} s"


# -- what is observed ------------------------------------------------------------------------------


def _observe_case(suite: Suite, case: Case) -> Observed:
    if case.recording:
        return observe(suite.folder / case.recording)
    if case.stereo:
        user, model = channels_of(suite.folder / case.stereo, 2)
    else:
        ((user,), (model,)) = (channels_of(suite.folder / it, 1) for it in (case.user, case.model))
    end = max(len(user), len(model)) * TICK_HZ // INPUT_RATE_HZ
    talk = Conversation(user=_spoken(user), model=_spoken(model), end=end)
    if not case.transcript:
        return Observed(talk=talk)
    words, spoken = read_transcript(suite.folder / case.transcript)
    return Observed(talk=talk, words=words, spoken=spoken)


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


def observe(log: Path) -> Observed:
    """Observe a recording; `RecorderError`, `OSError`: unreadable; `ValueError`: damaged."""
    words = list[str]()

    def take(moment: Moment) -> None:
        if isinstance(moment, Words) and moment.voice == "model":
            words.append(moment.text)

    facts, _ = facts_in(log, take)
    return Observed(talk=facts.conversation, words="".join(words), lost=facts.lost)


def facts_in(log: Path, also: Callable[[Moment], object]) -> tuple[Facts, int]:
    """Read a recording; return its facts, and when all of its sound is over."""
    with LogReader(log) as reader, FactsCollector(reader.head.fields, also=also) as collector:
        for item in reader:
            collector.take(item, collector.story.take(item))
        facts, end_ns = collector.end(), collector.timeline.duration_ns
    if facts.damage_count:
        raise ValueError("it is damaged")
    if facts.work != "unit":
        raise ValueError(f"mode {facts.mode}: only duplex sessions are judged")
    return facts, end_ns


def channels_of(path: Path, count: int) -> list[NDArray[np.float32]]:
    """Read the channels of a WAV file, at 16 kHz; `ValueError`: it has others."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    if samples.shape[1] != count:
        raise ValueError(f"{path.name}: channels: {samples.shape[1]}, not {count}")
    return [
        np.asarray(soxr.resample(channel, rate_hz, INPUT_RATE_HZ), np.float32)
        for channel in samples.T
    ]


def _spoken(samples: NDArray[np.float32]) -> tuple[Span, ...]:
    speech = UserSpeech()
    for begin in range(0, len(samples), INPUT_RATE_HZ):
        pcm = samples[begin : begin + INPUT_RATE_HZ].astype("<f4").tobytes()
        at_ns = time_of("user", begin + INPUT_RATE_HZ)
        speech.add(UserSound.of(Sound(voice="user", at_ns=at_ns, begin=begin, pcm=pcm)))
    return speech.spans()


# -- reports ---------------------------------------------------------------------------------------


def lines_of_cases(cases: Sequence[Verdict]) -> Iterator[str]:
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


def junit_of_cases(suite: Suite, cases: Iterable[Verdict]) -> bytes:
    """Write the cases as tests."""
    tests, name = list[ET.Element](), printable(suite.folder.name)
    for case in cases:
        tests.append(ET.Element("testcase", {"classname": name, "name": printable(case.name)}))
        if case.skipped:
            ET.SubElement(tests[-1], "skipped", {"message": printable(case.skipped)})
        for failure in case.failures:
            ET.SubElement(tests[-1], "failure", {"message": printable(failure)})
    return junit_xml(name, tests, ("failure", "skipped"))


# -- making a suite --------------------------------------------------------------------------------


SLACK_S: Final = 0.5
"""A case may take so much longer than its recording: half a unit."""


def write_suite(logs: Iterable[Path], folder: Path) -> tuple[int, list[str]]:
    """Write a suite into a new folder; return how many cases it has, and why logs are not in it.

    Without a case there is no folder.

    `UnusableError`: the folder cannot be written, or is there.
    """
    make_folder(folder)
    cases, left_out = dict[str, str](), list[str]()
    for log in logs:
        try:
            found = observe(log)
            expected = [*_expected(found)]
            if not expected:
                raise ValueError("nothing in it can be expected")
            if log.name in cases:
                raise ValueError("another log has its name")
            _write(folder / log.name, log.read_bytes(), like=log)
            cases[log.name] = "\n".join(_case(log.name, found, expected))
        except (OSError, RecorderError, ValueError) as error:
            left_out.append(f"{printable(str(log))}: {reason(error)}")
    if cases:
        _write(folder / MANIFEST, ("\n\n".join(cases.values()) + "\n").encode())
    else:
        folder.rmdir()
    return len(cases), left_out


def _write(target: Path, data: bytes, like: Path | None = None) -> None:
    try:
        with new_file(target, like=like) as part:
            part.write_bytes(data)
    except OSError as error:
        raise unwritable(error, target) from error


def _case(name: str, found: Observed, expected: Iterable[str]) -> Iterator[str]:
    quoted = json.dumps(name, ensure_ascii=False)
    if "speech" in found.lost:
        yield "# redacted: without the user's sound it is judged by --mode closed only"
    yield "[[case]]"
    yield f"name = {quoted}"
    yield f"recording = {quoted}"
    yield from expected


def _expected(found: Observed) -> Iterator[str]:
    if not found.talk.model:
        if not found.talk.is_written:
            yield "stays_silent = true"
        return
    if "speech" in found.lost:
        return
    turns = Turns(found.talk)
    judged = [turn for turn in turns.turns if turn.is_judged]
    delays = [turn.answer.begin - turn.speech.end for turn in judged if turn.answer is not None]
    if judged and len(delays) == len(judged):
        yield f"answers_by = {_with_slack(max(0, *delays, 0))}"
    if turns.barge_ins:
        took = max(it.over.end - it.speech.begin for it in turns.barge_ins)
        yield f"stops_within = {_with_slack(took)}"


def _with_slack(ticks: int) -> float:
    return math.ceil(10 * (ns_of(ticks) / NS_PER_S + SLACK_S)) / 10
