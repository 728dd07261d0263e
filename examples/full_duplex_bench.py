"""Full-Duplex-Bench: its folders as a suite of `antiphon eval`, and recordings as its folders.

    python examples/full_duplex_bench.py suite FOLDER
    antiphon eval --suite FOLDER
    python examples/full_duplex_bench.py folders NEW recordings

The layout (https://github.com/DanielLin94144/Full-Duplex-Bench):

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
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np
import soundfile
import soxr

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from recorder.format.format import RecorderError
from replay.assess.suite import MANIFEST, facts_in
from replay.export.sound import to_pcm16
from replay.export.timeline import Moment, Words
from replay.rerun.folder import find_logs
from runtime.measures.conversation import RATE_HZ, TICK_HZ, Turns, Voice
from runtime.measures.talk import Sound

INPUT = "input.wav"
OUTPUT = "output.wav"
TRANSCRIPT = "output.json"
TURN_TAKING = "turn_taking.json"
RECORDING = "recording.json"
"""Which recording it was, which the benchmark does not read."""
SOUND_S_MAX = 3600
"""A longer session is not written: both voices are in memory."""
TAKES_TURN = {"pause.json": False, TURN_TAKING: True, "interrupt.json": True}
JUDGED = "the benchmark judges this task by a language model"


@click.group()
def main() -> None:
    """Read and write the folders of Full-Duplex-Bench."""


# -- a suite of its folders ------------------------------------------------------------------------


@main.command("suite")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def suite_command(folder: Path) -> None:
    """Write the suite.toml of FOLDER: of one task of the benchmark, or of all."""
    found = sorted(it for name in (INPUT, "A.wav") for it in folder.glob(f"**/{name}"))
    if not found:
        raise click.ClickException(f"{folder}: no {INPUT} or A.wav in it")
    cases = [case_of(folder, it.parent, is_v2=it.name != INPUT) for it in found]
    texts = ("\n".join(("[[case]]", *map(_line, case.items()))) for case in cases)
    (folder / MANIFEST).write_text("\n\n".join(texts) + "\n", "utf-8")
    click.echo(f"{folder / MANIFEST}: cases: {len(cases)}")


def _line(item: tuple[str, object]) -> str:
    return f"{item[0]} = {json.dumps(item[1], ensure_ascii=False)}"


def case_of(folder: Path, sample: Path, *, is_v2: bool) -> dict[str, object]:
    """Return the keys of a sample's case."""

    def path(name: str) -> str:
        return (sample / name).relative_to(folder).as_posix()

    user, model = map(path, ("A.wav", "B.wav") if is_v2 else (INPUT, OUTPUT))
    case: dict[str, object] = {"name": path(""), "user": user, "model": model}
    if is_v2:
        return case | {"skipped": JUDGED}
    if not (sample / OUTPUT).is_file():
        return case | {"skipped": f"no {OUTPUT}: no model has answered it yet"}
    if (sample / TRANSCRIPT).is_file():
        case["transcript"] = path(TRANSCRIPT)
    files = TAKES_TURN.keys() & {it.name for it in sample.iterdir()}
    if files:
        task = min(files)
        after = {"after": _end_of(sample / task)} if task == "interrupt.json" else {}
        return case | {"takes_turn": TAKES_TURN[task], **after}
    task = sample.parent.resolve().name
    if (sample / "metadata.json").is_file():
        return case | {"skipped": JUDGED}
    if "backchannel" in task:
        return case | {"takes_turn": False}
    return case | {"skipped": f"{task}: no task of the benchmark"}


def _end_of(path: Path) -> float:
    """Read where an interruption ends, in seconds."""
    try:
        end_s = float(json.loads(path.read_bytes())[0]["timestamp"][1])
        assert end_s >= 0
    except (AssertionError, LookupError, TypeError, ValueError, RecursionError) as error:
        text = f"{path}: no JSON with $[0].timestamp, from and to in seconds"
        raise click.ClickException(text) from error
    return end_s


# -- folders of recordings -------------------------------------------------------------------------


@main.command("folders")
@click.argument("new", type=click.Path(path_type=Path))
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
def folders_command(new: Path, logs: tuple[Path, ...]) -> None:
    """Write recordings, LOGS or those of folders, into the folder NEW, for the benchmark."""
    try:
        found = find_logs(logs)
        new.mkdir(mode=0o700)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    numbers, left_out = count(1), 0
    for log in found:
        try:
            files = files_of(log)
        except (OSError, RecorderError, ValueError) as error:
            click.echo(f"{log}: {error}", err=True)
            left_out += 1
            continue
        sample = new / str(next(numbers))
        sample.mkdir()
        for name, content in files.items():
            if isinstance(content, np.ndarray):
                soundfile.write(sample / name, content, INPUT_RATE_HZ, "PCM_16", format="WAV")
            else:
                text = json.dumps(content, ensure_ascii=False, indent=4)
                (sample / name).write_text(text, "utf-8")
    if left_out == len(found):
        new.rmdir()
        raise click.ClickException(f"{new} was not written: no recording can be a case")
    click.echo(f"{new}: cases: {len(found) - left_out}, recordings left out: {left_out}")


def files_of(log: Path) -> dict[str, Any]:
    """Make the files of a recording: sound, or JSON; `ValueError` says why it has none."""
    moments = list[Moment]()
    facts, end_ns = facts_in(log, moments.append)
    if facts.lost:
        raise ValueError("redacted: the benchmark needs sound and words")
    if end_ns > SOUND_S_MAX * NS_PER_S:
        raise ValueError(f"longer than {SOUND_S_MAX} s")
    chunks = [*chunks_of(moments)]
    turns = [
        {
            "text": "[TURN-TAKING]",
            "timestamp": [_ms(it.speech.end / TICK_HZ), _ms(it.until / TICK_HZ)],
        }
        for it in Turns(facts.conversation).turns
    ]
    text = " ".join(it["text"] for it in chunks)
    return {
        INPUT: _voice(moments, "user", end_ns),
        OUTPUT: _voice(moments, "model", end_ns),
        TRANSCRIPT: {"text": text, "chunks": chunks},
        **({TURN_TAKING: turns} if turns else {}),
        RECORDING: {"recording_id": facts.recording_id, "log": log.name},
    }


def _voice(moments: Iterable[Moment], voice: Voice, duration_ns: int) -> Any:
    """Make a voice's sound from the session's start to its end: 16 bits, 16 kHz."""
    rate_hz = RATE_HZ[voice]
    made = np.zeros(-(-duration_ns * rate_hz // NS_PER_S), np.float32)
    for moment in moments:
        if isinstance(moment, Sound) and moment.voice == voice:
            made[moment.begin : moment.end] = np.frombuffer(moment.pcm, "<f4")
    if rate_hz == OUTPUT_RATE_HZ:
        made = np.asarray(soxr.resample(made, rate_hz, INPUT_RATE_HZ), np.float32)
    return to_pcm16(made)


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


if __name__ == "__main__":
    main()
