"""Logic replay of a recording as a server answers it: what `antiphon replay` says, as JSON.

{"result", "elapsed_ms", "times_real_time", ..., "lines": ["identical", ...]}
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Final

from recorder.format.records import Fields, Record
from recorder.read.scan import Damage

from ..rerun.logic import Replayer
from ..rerun.report import Outcome, logic_result, to_json
from .text import replay_lines

ITEMS_A_STEP: Final = 500
"""Records, or damages, between two places at which a caller may stop: some milliseconds."""


def replay_of(head: Fields, items: Iterable[Record | Damage]) -> Iterator[bytes]:
    """Replay a session, given the fields of its `session` record; yield one JSON object.

    White space comes before it, while the log is read.
    """
    began, replayer = time.perf_counter(), Replayer()
    for number, item in enumerate(items, start=1):
        replayer.feed(item)
        if replayer.is_stopped:
            break
        if number % ITEMS_A_STEP == 0:
            yield b"\n"
    report, elapsed_s = replayer.report(), time.perf_counter() - began
    name = str(head.get("recording_id"))
    outcome = Outcome(log=name, result=logic_result(report), elapsed_s=elapsed_s, report=report)
    lines = [line for line in replay_lines(report, elapsed_s) if isinstance(line, str)]
    yield json.dumps({**to_json(outcome), "lines": lines}, allow_nan=False).encode()
