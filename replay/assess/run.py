"""Runs a model over recordings, several at once, each on a slot of the model, and measures it.

A recording that cannot be judged is named with the reason and stops no other; the same is true of
one on which the model fails. A model that is lost ends the run: what is done is kept.

**Mode open** plays a recording's client again, with a model that decides freely. It is a fork at
unit 0 (`fork.run`): the recorded frames come at their recorded times, and the session, the model's
calls and the log are as on a server. The new log is measured like any other. A call takes as long
as the recorded one, so delays follow from what the model decides, and not from how fast this
machine is.

**Mode forced** has a model decide on a recording's own past, unit by unit. The recorded inputs and
decisions are fed (`rerun.full`), so each unit is judged by itself: what this model would
decide there, and by which margin. Nothing is sent, and no log is made.

**Results** are kept in a folder as each session is done, so that a killed run goes on:

    OUT/forced-3f2a.../<hash of the log>.json         a session's measures
    OUT/open-91c0.../<hash of the log>.json           the same, and the log that was made:
    OUT/open-91c0.../open-<hash of the log>.session.zst

A folder is named by a hash of the mode, the model's fingerprint, this version and the definitions
of the measures, and says them in `run.json`: results of another model or version are never taken
for these. A file is there only when it is whole. One that cannot be read is made again.

**The word error of the model's own voice** is what a transcriber hears in its sound, against its
text. A stretch of the model's sound as it was played, gaps of `SPEECH_GAP_MS` apart (within a
response of `PAUSE_MS`), is transcribed: in seconds, after half a second of silence and with a
second of silence at its end. What was written is compared with the text that was sent with the
sound. Text without sound is not judged, and neither is a recording without the model's sound or
text. Words that were cut off within a second count as said.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Final, Self

import anyio
import attrs
import numpy as np
import soxr

from protocol.values import model
from protocol.values.limits import NS_PER_S, OF_MODE
from protocol.values.model import Chunk, Opening
from protocol.values.records import DIGEST_BYTES, digest
from recorder.format.format import LogDamaged, Record, RecorderError
from recorder.read.reader import LogReader
from recorder.write.files import PART_PREFIX, new_file
from runtime.measures.conversation import PAUSE_MS, SPEECH_GAP_MS, Ratio, Scores
from runtime.measures.talk import Sound
from runtime.model.backends import base
from runtime.model.backends.base import Backend
from runtime.session.setup import Identity

from ..eval.evaluate import (
    DIGITS,
    MEASURES,
    OWN_VOICE,
    Json,
    Result,
    Row,
    measure_log,
    raw_of,
    row_of,
    scores_of,
)
from ..eval.scores import ForcedSession, lost_in
from ..export.timeline import Moment, Timeline, Words
from ..fork.command import make_fork
from ..fork.run import CannotForkError, Change, Decided, ForkRefusedError
from ..rerun.full import Loading, ModelRerun, ModelUnavailableError, held_units, note_change
from ..rerun.logic import Replayer
from ..rerun.report import UnitDifference
from ..shared.commands import UnusableError, Watch, reason
from ..shared.recordings import removed_in, typed

# -- a recording, before a model is run on it ------------------------------------------------------


class SkippedError(Exception):
    """A recording on which no model can be judged; the message says why."""


@attrs.frozen(kw_only=True)
class Recording:
    """A log, by the hash of its bytes.

    Attributes:
        recording_id: its name; empty if the head has none.
        created_ms: when it was made, in Unix milliseconds.
        held_units: units that were held to another recording.
    """

    log: Path
    content: str
    mode: str
    recording_id: str
    created_ms: int
    held_units: int


def content_of(log: Path) -> str:
    """Hash the bytes of a log (blake2b-128, hex); `OSError` if it cannot be read."""
    with log.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)
        ).hexdigest()


def look_at(log: Path) -> Recording:
    """Look at a log before a model is run on it.

    `SkippedError`: none can be; `RecorderError` or `OSError`: it cannot be read.
    """
    with LogReader(log) as reader:
        head = reader.head.fields
        if "speech" in lost_in(head):
            raise SkippedError("redacted: the user's sound is not in it")
        first = next((it for it in reader if isinstance(it, Record) and it.seq > 0), None)
        mode = None if first is None else typed(first.fields, "mode", str)
        served = {name: known for name, known in OF_MODE.items() if name == mode}
        if mode is not None and not any(known.work == "unit" for known in served.values()):
            raise SkippedError(f"mode {mode}: only duplex sessions are run again")
    return Recording(
        log=log,
        content=content_of(log),
        mode=mode or "",
        recording_id=typed(head, "recording_id", str) or "",
        created_ms=typed(head, "wall_ms", int) or 0,
        held_units=held_units(head),
    )


# -- results, kept ---------------------------------------------------------------------------------


NAME_CHARS: Final = 16


class Results:
    """One model's results in one mode; without a folder only until the block ends."""

    def __init__(self, out: Path | None, mode: str, info: base.BackendInfo) -> None:
        about = {
            "mode": mode,
            "antiphon": version("antiphon"),
            "fingerprint": dict(sorted(info.fingerprint.items())),
            "measures": digest([attrs.astuple(it) for it in MEASURES.values()]),
        }
        self.name: Final = f"{mode}-{digest(about)[:NAME_CHARS]}"
        self.found = 0
        self._temporary = None if out is not None else TemporaryDirectory(prefix=PART_PREFIX)
        root = Path(self._temporary.name) if self._temporary is not None else out
        assert root is not None
        self.folder: Final = root / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "run.json", {"model": info.name, **about})

    @property
    def is_lasting(self) -> bool:
        """Whether the folder stays after the command."""
        return self._temporary is None

    def __enter__(self) -> Self:
        """Keep it open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove a folder that was not asked for."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def load(self, content: str, log: str) -> Row | None:
        """Return the result of a log, by the hash of its bytes; None if it has to be made."""
        try:
            body = json.loads(self._path(content).read_bytes())
            row = row_of(log, scores_of(body["scores"]), body["body"])
            row = attrs.evolve(
                row,
                duration_ns=int(body["duration_ns"]),
                lost=frozenset(body["body"].get("lost", ())),
            )
        except (OSError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError):
            return None
        self.found += 1
        return row

    def save(self, content: str, row: Row) -> None:
        """Keep a result; `OSError` if the disk refuses."""
        raw = raw_of(row.scores)
        body = {"log": row.log, "duration_ns": row.duration_ns, "body": row.about, "scores": raw}
        _write(self._path(content), body)

    def remove_log(self, content: str) -> None:
        """Remove a log that an earlier run made, or began, and whose result it did not keep."""
        for log in self.folder.glob(f"open-{content}.*"):
            log.unlink()
        for part in self.folder.glob(f"{PART_PREFIX}*/open-{content}.*"):
            rmtree(part.parent)

    def _path(self, content: str) -> Path:
        return self.folder / f"{content}.json"


def _write(path: Path, body: object) -> None:
    with new_file(path, replaces=True) as part:
        part.write_text(json.dumps(body, indent=1) + "\n", "utf-8")


# -- one slot of a model ---------------------------------------------------------------------------


@attrs.frozen
class OnSlot:
    """A backend of one slot; it is not closed with its sessions."""

    backend: Backend
    slot: int

    @property
    def info(self) -> base.BackendInfo:
        """The model's, with all its slots."""
        return self.backend.info

    async def open(self, opening: Opening, *, slot: int) -> base.BackendSession:
        """Open a session on this one's slot; `slot` is 0."""
        assert slot == 0, slot
        return await self.backend.open(opening, slot=self.slot)


# -- mode open -------------------------------------------------------------------------------------


async def run_open(
    model: str, results: Results, recording: Recording, backend: Backend, *, watch: Watch
) -> Row:
    """Run a recording with a model, and measure the new log, which is kept if the results are.

    Args:
        model: its name, for the log's head.
        results: has the folder for the log, whose name is derived from the recording's.
        recording: a duplex session.
        backend: opened on slot 0.
        watch: called with 1 for each unit.

    Raises:
        RecorderError: the recording is damaged.
        SkippedError: it cannot be run again.
        CannotForkError: the model is lost, or does not serve the mode.
    """
    results.remove_log(recording.content)
    units, parted = 0, dict[str, object]()

    def count(done: int, _units: int) -> None:
        nonlocal units
        watch(done - units)
        units = done

    identity = Identity(
        recording_id=f"open-{recording.content}",
        created_ms=recording.created_ms,
        seed=0,  # The recording's is results.
    )
    try:
        log, _ = await make_fork(
            recording.log,
            Change(at=0, model=model),
            results.folder,
            identity=identity,
            load=lambda _: backend,
            watch=count,
            note=lambda recorded, made: parted.update(_parting(recorded, made)),
        )
    except ForkRefusedError as error:
        raise SkippedError(str(error)) from error
    row = measure_log(log, str(recording.log)).with_body(parted=parted)
    if results.is_lasting:
        return row.with_body(made=str(log))
    log.unlink()
    return row


def _parting(before: Decided, after: Decided) -> Json:
    """Say where the model first decided otherwise; after that it was elsewhere."""
    both = sorted(before.keys() & after.keys())
    otherwise = [index for index in both if before[index] != after[index]]
    first = otherwise[0] if otherwise else None
    return {"units": len(both), "first": first, "elsewhere": max(0, len(otherwise) - 1)}


# -- mode forced -----------------------------------------------------------------------------------


async def run_forced(recording: Recording, backend: Backend, watch: Watch) -> Row:
    """Force a recording on a model, and measure its own decisions.

    Args:
        recording: a duplex session.
        backend: opened on slot 0.
        watch: called with 1 for each unit.

    Raises:
        LogDamaged: the log is damaged: a model that missed an input cannot be judged.
        SkippedError: the log does not replay, or no unit was finished.
        ModelUnavailableError: the model cannot be forced.
        BackendError: the model failed.
    """
    session, replayer, changed = ForcedSession(), Replayer(), dict[int, UnitDifference]()
    calls = ModelRerun(backend=backend, held_units=recording.held_units, judge=session.take)
    try:
        with LogReader(recording.log) as reader:
            for step in replayer.steps(reader):
                made = calls.made
                note_change(changed, step, await calls.renew(step.event, step.effects))
                watch(calls.made - made)
    finally:
        await calls.close()
    report = replayer.report()
    if report.damage_count:
        raise LogDamaged(f"a model that missed an input cannot be judged: {report.damage[0]}")
    if report.divergence is not None:
        seq = report.divergence.seq
        raise SkippedError(f"its replay diverges at record {seq} (see `antiphon replay`)")
    if not calls.made:
        raise SkippedError("no unit of the recording was finished")
    body: Json = {
        "recording_id": recording.recording_id,
        "mode": recording.mode,
        "duration_s": round(report.span_ns / NS_PER_S, DIGITS),
        "changed": [attrs.asdict(it) for it in changed.values()],
    }
    row = row_of(str(recording.log), session.scores(), body)
    return attrs.evolve(row, duration_ns=report.span_ns)


# -- several recordings at once --------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Run:
    """A run that is done.

    Attributes:
        measured: in the order of the logs.
        found: how many results an earlier run had results.
        folder: where they are kept; None if they are not.
    """

    measured: list[Row]
    info: base.BackendInfo
    found: int
    folder: Path | None


_TROUBLE: Final[tuple[tuple[type[Exception], Result], ...]] = (
    (SkippedError, "skipped"),
    (LogDamaged, "damaged"),
    (RecorderError, "unreadable"),
    (OSError, "unreadable"),
    (CannotForkError, "failed"),
    (ModelUnavailableError, "failed"),
    (base.BackendError, "failed"),
)
"""What each error says of a recording; the first that fits."""


async def run_model(
    mode: str,
    loading: Loading,
    logs: Sequence[Path],
    load: Callable[[Loading], Backend],
    *,
    out: Path | None,
    watch: Watch,
) -> Run:
    """Run a model over logs in mode `open` or `forced`, and measure what it does.

    Args:
        mode: `open` or `forced`.
        loading: the model, with a slot for each recording that it runs at once.
        logs: the recordings.
        load: loads the model.
        out: where results are kept; None: they are not.
        watch: called with 0 when the model is loaded, then with 1 for each unit.

    Raises:
        UnusableError: the model cannot be loaded, or was lost; or the folder takes no files.
    """
    async with _loaded("model", loading, load) as backend:
        watch(0)
        try:
            with Results(out, mode, backend.info) as results:
                run_one = (
                    run_forced if mode == "forced" else partial(run_open, loading.name, results)
                )
                slots = [OnSlot(backend, slot) for slot in range(loading.slots)]
                done = await _run_each(results, partial(run_one, watch=watch), logs, slots)
        except OSError as error:
            raise UnusableError(f"{out or 'the temporary folder'}: {reason(error)}") from error
    where = results.folder if results.is_lasting else None
    return Run(measured=done, info=backend.info, found=results.found, folder=where)


@asynccontextmanager
async def _loaded(
    what: str, loading: Loading, load: Callable[[Loading], Backend]
) -> AsyncIterator[Backend]:
    """Load a model, and close it; `UnusableError`: it cannot be loaded, or is lost meanwhile."""
    try:
        backend = load(loading)
    except Exception as error:  # any error means that there is no model
        raise UnusableError(f"the {what} {loading.name!r} cannot be loaded: {error}") from error
    try:
        yield backend
    except base.BackendGone as error:
        raise UnusableError(f"the {what} {loading.name!r} is lost: {error}") from error
    finally:
        if isinstance(backend, base.Closes):
            await backend.aclose()


async def _run_each(
    results: Results,
    run_one: Callable[[Recording, Backend], Awaitable[Row]],
    logs: Sequence[Path],
    slots: Iterable[Backend],
) -> list[Row]:
    """Run logs that are not done yet, as many at once as there are slots; equal ones once."""
    found = {log: _look(log) for log in logs}
    unlike = {it.content: it for it in found.values() if isinstance(it, Recording)}
    waiting, rows, errors = iter(unlike.values()), dict[str, Row](), list[Exception]()

    async def work(backend: Backend) -> None:
        for recording in waiting:
            if errors:
                return
            row = results.load(recording.content, str(recording.log))
            rows[recording.content] = row or await one(recording, backend)

    async def one(recording: Recording, backend: Backend) -> Row:
        try:
            row = await run_one(recording, backend)
        except Exception as error:
            lost = error.__cause__ if isinstance(error, CannotForkError) else error
            if isinstance(lost, base.BackendGone):
                errors.append(lost)
            return _trouble(recording.log, error)
        try:
            results.save(recording.content, row)
        except OSError as error:
            errors.append(error)
        return row

    async with anyio.create_task_group() as group:
        for backend in slots:
            group.start_soon(work, backend)
    if errors:
        raise errors[-1]
    return [
        it if isinstance(it, Row) else attrs.evolve(rows[it.content], log=str(log))
        for log, it in found.items()
    ]


def _look(log: Path) -> Recording | Row:
    try:
        return look_at(log)
    except Exception as error:
        return _trouble(log, error)


def _trouble(log: Path, error: Exception) -> Row:
    """Name a recording that was not measured; an error of ours goes on."""
    for kind, result in _TROUBLE:
        if isinstance(error, kind):
            why = reason(error).removeprefix(f"{result}: ")
            return Row(log=str(log), result=result, error=f"{result}: {why}")
    raise error


# -- the model's own voice -------------------------------------------------------------------------


UTTERANCE_S_MAX: Final = 30
"""Longer speech is several utterances: it would outgrow the transcriber's context."""
LEAD_SAMPLES: Final = model.INPUT_RATE_HZ // 2
_PER_MS: Final = model.OUTPUT_RATE_HZ // 1000
_WORD: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+(?:['’][^\W_]+)*")
"""A word, of scripts without spaces a character."""


@attrs.define
class SpeechSegment:
    """A stretch of the model's sound (float32 LE, 24 kHz), its end in samples, and its text."""

    response_id: str
    end: int
    pcm: bytearray
    text: str = ""


def speech_segments(moments: Iterable[Moment]) -> Iterator[SpeechSegment]:
    """Join the model's sound and words; words follow the sound that they begin with."""
    spoken: SpeechSegment | None = None
    for moment in moments:
        match moment:
            case Sound(voice="model", pcm=pcm, response_id=response):
                is_same = spoken is not None and response == spoken.response_id != ""
                gap_max = (PAUSE_MS if is_same else SPEECH_GAP_MS) * _PER_MS
                if spoken is not None and moment.begin - spoken.end < gap_max:
                    spoken.pcm += bytes(max(0, moment.begin - spoken.end) * model.SAMPLE_BYTES)
                    spoken.pcm += pcm
                else:
                    if spoken is not None:
                        yield spoken
                    spoken = SpeechSegment(response, moment.end, bytearray(pcm))
                spoken.response_id, spoken.end = response, moment.end
            case Words(voice="model", end_ns=int()) if spoken is not None:
                spoken.text += moment.text
    if spoken is not None:
        yield spoken


def words_of(text: str) -> list[str]:
    """List the words of a text, without case and punctuation."""
    return [word.replace("’", "'") for word in _WORD.findall(text.casefold())]


def word_errors(spoken: Sequence[str], wrote: Sequence[str]) -> int:
    """Count the words that are inserted, left out or replaced, at the least."""
    row = list(range(len(wrote) + 1))
    for place, word in enumerate(spoken, 1):
        corner, row[0] = row[0], place
        for at, written in enumerate(wrote, 1):
            replaced = corner + (word != written)
            corner = row[at]
            row[at] = min(replaced, row[at] + 1, row[at - 1] + 1)
    return row[-1]


async def write_down(
    session: base.TranscriptSession, pcm: bytes | bytearray, utterance: int
) -> tuple[str, int]:
    """Write sound (24 kHz) down; return the text, and the number of the next utterance."""
    sound = soxr.resample(np.frombuffer(pcm, "<f4"), model.OUTPUT_RATE_HZ, model.INPUT_RATE_HZ)
    samples = LEAD_SAMPLES + len(sound)
    seconds = -(-samples // model.UNIT_SAMPLES) + 1
    sound = np.pad(sound, (LEAD_SAMPLES, seconds * model.UNIT_SAMPLES - samples)).astype("<f4")
    text = ""
    for number, second in enumerate(sound.reshape(seconds, model.UNIT_SAMPLES)):
        index = number % UTTERANCE_S_MAX
        chunk = Chunk(
            utterance=utterance + number // UTTERANCE_S_MAX,
            index=index,
            pcm=second.tobytes(),
            is_last=number + 1 == seconds or index + 1 == UTTERANCE_S_MAX,
            seed=0,
        )
        text += " " * (index == 0) + (await session.run(chunk)).text
    return text, utterance + -(-seconds // UTTERANCE_S_MAX)


async def own_voice(log: Path, backend: base.Transcribes) -> Scores:
    """Measure one log, if it has the model's sound and text; `BackendError`, `RecorderError`."""
    errors = words = utterance = 0
    session: base.TranscriptSession | None = None
    try:
        with LogReader(log) as reader:
            if {("audio", "model"), ("text", "model")} & removed_in(reader.head.fields):
                return {}
            timeline = Timeline(reader.head.fields, reader)
            for spoken in speech_segments(timeline):
                expected = words_of(spoken.text)
                if not expected or not spoken.pcm:
                    continue
                session = session or await backend.transcribe(slot=0)
                text, utterance = await write_down(session, spoken.pcm, utterance)
                errors += word_errors(expected, words_of(text))
                words += len(expected)
            opened = timeline.story.opened
    finally:
        if session is not None:
            await session.release()
    is_duplex = opened is None or OF_MODE[opened.mode].work == "unit"
    return {OWN_VOICE: Ratio(errors, words)} if words and is_duplex else {}


async def measure_with(
    loading: Loading, logs: Sequence[Path], load: Callable[[Loading], Backend], watch: Watch
) -> list[Row]:
    """Measure logs as they are, with the word error of the model's voice.

    `UnusableError`: there is no such transcriber, or it was lost.
    """
    async with _loaded("transcriber", loading, load) as backend:
        if not isinstance(backend, base.Transcribes) or "transcription" not in backend.info.modes:
            raise UnusableError(f"the model {loading.name!r} does not transcribe")
        return [await _measured(log, backend, watch) for log in logs]


async def _measured(log: Path, backend: base.Transcribes, watch: Watch) -> Row:
    found: Scores = {}
    trouble = ""
    try:
        found = await own_voice(log, backend)
    except base.BackendGone:
        raise
    except base.BackendError as error:
        trouble = f"failed: the transcriber: {error}"
    except (OSError, RecorderError):
        pass  # measuring says so
    row = measure_log(log, str(log), watch, found)
    if trouble and not row.error:
        row = attrs.evolve(row, result="failed", error=trouble)
    return row
