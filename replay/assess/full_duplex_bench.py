"""The folder layout of Full-Duplex-Bench, read as cases of a suite, and written from recordings.

    TASK/ID/input.wav          the user's sound
            output.wav         the model's, from the same instant; the data set has none yet
            output.json        {"text": ..., "chunks": [{"text": WORD, "timestamp": [from, to]}]}
            pause.json, turn_taking.json, interrupt.json    annotations of v1: the task
            metadata.json      annotations of v1.5, whose task is the folder's name
    Daily/Daily.ID/A.wav, B.wav     v2: the examiner, and the model

v1 judges by who takes the turn (TOR): so do these cases (`takes_turn`). v1.5 and v2 ask a language
model, so their cases are skipped. What is written has folders with numbers, as v1's backchannel
script needs them, sound at 16 kHz from the session's start, and `turn_taking.json`, which has the
ends of the user's turns. The words of a piece of sound share its time evenly: it has no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader
from recorder.write.files import new_file
from runtime.measures.conversation import TICK_HZ, Turns
from runtime.measures.placing import RATE_HZ, Sound, Voice

from ..export.mixer import to_pcm16
from ..export.moments import Moment, Words
from ..export.timeline import Timeline
from ..shared.commands import UnusableError, make_folder, reason, unwritable
from ..shared.fields import typed
from ..shared.page import printable
from .suite import CASES_MAX, MANIFEST, Case, Suite, read_suite
from .suite_judging import heard_in

INPUT: Final = "input.wav"
OUTPUT: Final = "output.wav"
TRANSCRIPT: Final = "output.json"
TURN_TAKING: Final = "turn_taking.json"
RECORDING: Final = "recording.json"
"""Which recording it was, which the benchmark does not read."""
SOUND_S_MAX: Final = 3600
"""A longer session is not written: both voices are in memory."""
FILE_BYTES_MAX: Final = 1 << 20
_TAKES_TURN: Final = {"pause.json": False, TURN_TAKING: True, "interrupt.json": True}
_JUDGED: Final = "the benchmark judges this task by a language model"

_Floats = NDArray[np.float32]


# -- read -----------------------------------------------------------------------------------------


def suite_in(folder: Path) -> Suite:
    """Read a suite by its manifest; without one, a folder in the benchmark's layout."""
    cases = () if (folder / MANIFEST).exists() else read_cases(folder)
    for case in cases:
        if complaint := case.complaint():
            raise UnusableError(f"{folder / case.name}: {complaint}")
    return Suite(folder=folder, cases=cases) if cases else read_suite(folder)


def read_cases(folder: Path) -> tuple[Case, ...]:
    """Read a folder in the layout, of one task or of all; empty if it is in another."""
    names = {INPUT: _case_of, "A.wav": _case_of_v2}
    found = sorted(it for name in names for it in folder.glob(f"**/{name}"))
    if len(found) > CASES_MAX:
        raise UnusableError(f"{folder}: {len(found)} cases: at most {CASES_MAX}")
    return tuple(names[it.name](folder, it.parent) for it in found)


def _case_of(folder: Path, sample: Path) -> Case:
    name = str(sample.relative_to(folder))
    if not (sample / OUTPUT).is_file():
        return _skipped(name, sample, folder, f"no {OUTPUT}: no model has answered it yet")
    transcript = _path(folder, sample / TRANSCRIPT) if (sample / TRANSCRIPT).is_file() else ""
    files = _TAKES_TURN.keys() & {it.name for it in sample.iterdir()}
    case = Case(
        name=name,
        user=_path(folder, sample / INPUT),
        model=_path(folder, sample / OUTPUT),
        transcript=transcript,
    )
    if files:
        task = min(files)
        after = _end_of(sample / task) if task == "interrupt.json" else None
        return attrs.evolve(case, takes_turn=_TAKES_TURN[task], after=after)
    task = sample.parent.resolve().name
    if (sample / "metadata.json").is_file():
        return attrs.evolve(case, skipped=_JUDGED)
    if "backchannel" in task:
        return attrs.evolve(case, takes_turn=False)
    return attrs.evolve(case, skipped=f"{task}: no task of the benchmark")


def _case_of_v2(folder: Path, sample: Path) -> Case:
    return _skipped(str(sample.relative_to(folder)), sample, folder, _JUDGED, "A.wav", "B.wav")


def _skipped(name: str, sample: Path, folder: Path, why: str, *files: str) -> Case:
    user, model = (_path(folder, sample / it) for it in files or (INPUT, OUTPUT))
    return Case(name=name, user=user, model=model, skipped=why)


def _path(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _end_of(path: Path) -> float:
    """Read where an interruption ends, in seconds."""
    body = read_json(path)
    try:
        return float(body[0]["timestamp"][1])
    except (LookupError, TypeError, ValueError) as error:
        raise UnusableError(f"{path}: $[0].timestamp: not two numbers") from error


def read_json(path: Path) -> Any:
    """Read a small file; `UnusableError`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise UnusableError(f"{path}: more than {FILE_BYTES_MAX} bytes")
        return json.loads(data)
    except OSError as error:
        raise UnusableError(f"{path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"{path}: no JSON") from error


# -- write ----------------------------------------------------------------------------------------


def write_bench(logs: Iterable[Path], folder: Path) -> tuple[int, list[str]]:
    """Write recordings into a new folder; return how many, and why others are not in it.

    `UnusableError`: the folder cannot be written, or is there.
    """
    make_folder(folder)
    count, left_out = 0, list[str]()
    for log in logs:
        try:
            files = _files_of(log)
        except (OSError, RecorderError, ValueError) as error:
            left_out.append(f"{printable(str(log))}: {reason(error)}")
            continue
        count += 1
        _write(folder / str(count), files, log)
    return count, left_out


def _write(sample: Path, files: dict[str, Any], log: Path) -> None:
    sample.mkdir()
    for name, content in files.items():
        try:
            with new_file(sample / name, like=log) as part:
                if name.endswith(".wav"):
                    with part.open("wb") as file:
                        soundfile.write(file, content, INPUT_RATE_HZ, "PCM_16", format="WAV")
                else:
                    part.write_text(json.dumps(content, ensure_ascii=False, indent=4), "utf-8")
        except OSError as error:
            raise unwritable(error, sample / name) from error


def _files_of(log: Path) -> dict[str, Any]:
    """Make the files of a recording; `ValueError` says why it has none."""
    heard = heard_in(log)
    if heard.lost:
        raise ValueError("redacted: the benchmark needs sound and words")
    with LogReader(log) as reader:
        timeline = Timeline(reader.head.fields, reader)
        moments = [it for it in timeline if isinstance(it, Sound | Words)]
        recording = typed(reader.head.fields, "recording_id", str)
    if timeline.duration_ns > SOUND_S_MAX * NS_PER_S:
        raise ValueError(f"longer than {SOUND_S_MAX} s")
    chunks = [*chunks_of(moments)]
    ends = [turn.speech.end / TICK_HZ for turn in Turns(heard.talk).turns]
    until = [turn.until / TICK_HZ for turn in Turns(heard.talk).turns]
    turns = [
        {"text": "[TURN-TAKING]", "timestamp": [*map(_ms, it)]}
        for it in zip(ends, until, strict=True)
    ]
    return {
        INPUT: to_pcm16(_voice(moments, "user", timeline.duration_ns)),
        OUTPUT: to_pcm16(_voice(moments, "model", timeline.duration_ns)),
        TRANSCRIPT: {"text": " ".join(it["text"] for it in chunks), "chunks": chunks},
        **({TURN_TAKING: turns} if turns else {}),
        RECORDING: {"recording_id": recording, "log": log.name},
    }


def _voice(moments: Iterable[Moment], voice: Voice, duration_ns: int) -> _Floats:
    """Make a voice's sound from the session's start to its end, at 16 kHz."""
    rate_hz = RATE_HZ[voice]
    made = np.zeros(-(-duration_ns * rate_hz // NS_PER_S), np.float32)
    for moment in moments:
        if isinstance(moment, Sound) and moment.voice == voice:
            made[moment.begin : moment.end] = np.frombuffer(moment.pcm, "<f4")
    if rate_hz == OUTPUT_RATE_HZ:
        made = np.asarray(soxr.resample(made, rate_hz, INPUT_RATE_HZ), np.float32)
    return made


def chunks_of(moments: Iterable[Moment]) -> Iterator[dict[str, Any]]:
    """Give the model's words that have sound, each with its time in seconds."""
    last: dict[str, Any] | None = None
    goes_on, response = False, ""
    for moment in moments:
        if not (
            isinstance(moment, Words) and moment.voice == "model" and moment.end_ns is not None
        ):
            continue
        words = moment.text.split()
        took_ns = (moment.end_ns - moment.begin_ns) / max(len(words), 1)
        for number, word in enumerate(words):
            begin_ns = moment.begin_ns + number * took_ns
            end_s = _ms((begin_ns + took_ns) / NS_PER_S)
            is_same = goes_on and number == 0 and response == moment.response_id
            if last is not None and is_same and not moment.text[0].isspace():
                last["text"] += word  # a word that its pieces share
                last["timestamp"][1] = end_s
                continue
            if last is not None:
                yield last
            last = {"text": word, "timestamp": [_ms(begin_ns / NS_PER_S), end_s]}
        if words:
            goes_on, response = not moment.text[-1].isspace(), moment.response_id
    if last is not None:
        yield last


def _ms(seconds: float) -> float:
    return round(seconds, 3)
