"""Makes a suite of recordings: a copy of each, and what was so in it as what is expected.

A session whose client asked not to be recorded has no log, so it is in no suite. Of a redacted
recording the suite has what is left; a comment says that no model can be run on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from protocol.values.limits import NS_PER_S
from recorder.format.errors import RecorderError
from recorder.write.files import new_file
from runtime.measures.conversation import Turns, ns_of

from ..shared.commands import make_folder, reason, unwritable
from ..shared.page import printable
from .suite import MANIFEST
from .suite_judging import Heard, heard_in

SLACK_S: Final = 0.5
"""A case may take so much longer than its recording: half a unit."""


def write_suite(logs: Iterable[Path], folder: Path) -> tuple[int, list[str]]:
    """Write a suite into a new folder; return how many cases it has, and why logs are not in it.

    `UnusableError`: the folder cannot be written, or is there.
    """
    make_folder(folder)
    cases, left_out, names = list[str](), list[str](), set[str]()
    for log in logs:
        try:
            heard = heard_in(log)
            expected = [*_expected(heard)]
        except (OSError, RecorderError, ValueError) as error:
            left_out.append(f"{printable(str(log))}: {reason(error)}")
            continue
        if not expected or log.name in names:
            why = "another log has its name" if expected else "nothing in it can be expected"
            left_out.append(f"{printable(str(log))}: {why}")
            continue
        names.add(log.name)
        _write(folder / log.name, log.read_bytes(), like=log)
        cases.append("\n".join(_case(log.name, heard, expected)))
    _write(folder / MANIFEST, ("\n\n".join(cases) + "\n").encode())
    return len(cases), left_out


def _write(target: Path, data: bytes, like: Path | None = None) -> None:
    try:
        with new_file(target, like=like) as part:
            part.write_bytes(data)
    except OSError as error:
        raise unwritable(error, target) from error


def _case(name: str, heard: Heard, expected: Iterable[str]) -> Iterator[str]:
    quoted = json.dumps(name, ensure_ascii=False)
    if "speech" in heard.lost:
        yield "# redacted: without the user's sound it is judged by --mode closed only"
    yield "[[case]]"
    yield f"name = {quoted}"
    yield f"recording = {quoted}"
    yield from expected


def _expected(heard: Heard) -> Iterator[str]:
    if not heard.talk.model:
        if not heard.talk.is_written:
            yield "stays_silent = true"
        return
    if "speech" in heard.lost:
        return
    turns = Turns(heard.talk)
    judged = [turn for turn in turns.turns if turn.is_judged]
    delays = [turn.answer.begin - turn.speech.end for turn in judged if turn.answer is not None]
    if judged and len(delays) == len(judged):
        yield f"answers_by = {_with_slack(max(0, *delays, 0))}"
    if turns.barge_ins:
        took = max(it.over.end - it.speech.begin for it in turns.barge_ins)
        yield f"stops_within = {_with_slack(took)}"


def _with_slack(ticks: int) -> float:
    return math.ceil(10 * (ns_of(ticks) / NS_PER_S + SLACK_S)) / 10
