"""`tiny`'s clock in full duplex, measured; see `score.py` for the registry.

A clock is offered to a session in which the held-out renderings are played. A call is answered as
the server does: it is accepted in the next unit, and its result comes some units later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import numpy as np

from protocol.values.model import UNIT_SAMPLES, UnitInput, UnitResult
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.work import Steps
from tests.bench.tiny.score_tools import CLOCKS, HOURS, TIME
from tests.bench.tiny.staging import (
    SEEING,
    Course,
    Pcm,
    Player,
    read_manifest,
    room,
    stage_phrase,
    together,
)

TIMER: Final = "set a timer"
"""The phrase at whose answer the clock is called while the model speaks."""
DELAYS: Final = (0, 1, 2, 4)
"""Units between the event that a call was accepted and that of its result."""
REST: Final = 6
"""Units after the phrase's end for a result, and to tell it, beyond the longest delay."""


@attrs.frozen(kw_only=True)
class Clocked:
    """What a session did: the units of its results, and those in which it called."""

    results: Sequence[UnitResult]
    calls: Sequence[int]

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(result.text for result in self.results)

    def speaks(self, unit: int) -> bool:
        """Whether a unit spoke."""
        return not self.results[unit].is_listen


def with_clock(model: DuplexModel, pcm: Pcm, seed: int, result: str, delay: int) -> Course[Clocked]:
    """Play sound into a session with a clock, whose result comes after a delay."""

    def course(slot: int) -> Steps[Clocked]:
        player = Player(model, seed, slot, (CLOCKS[seed % len(CLOCKS)],))
        results, calls = list[UnitResult](), list[int]()
        due: dict[int, list[UnitInput]] = {}
        try:
            for index in range(len(pcm) // UNIT_SAMPLES):
                second = pcm[index * UNIT_SAMPLES : (index + 1) * UNIT_SAMPLES]
                inputs = sorted(due.pop(index, []), key=lambda it: it.kind != "started")
                results.append((yield from player.step(second, (), tuple(inputs))))
                assert player.silent is not None
                for span in player.silent.spans:
                    calls += [index] * (span.kind == "call" and span.name == "clock")
                    name = f"t{len(calls)}"
                    begun = UnitInput(kind="started", call=name)
                    due.setdefault(index + 1, []).append(begun)
                    told = UnitInput(kind="result", call=name, text=result)
                    due.setdefault(index + 1 + delay, []).append(told)
        finally:
            player.close()
        return Clocked(results=results, calls=calls)

    return course


def _staged(folder: Path, phrase: str) -> list[tuple[Pcm, int]]:
    items = [item for item in read_manifest(folder) if item.phrase == phrase]
    return [stage_phrase(folder, item, place) for place, item in enumerate(items)]


def _longer(pcm: Pcm, seed: int) -> Pcm:
    return np.concatenate([pcm, room(REST * UNIT_SAMPLES, seed)])


def _share(found: Sequence[bool]) -> float:
    return float(np.mean(found))


def score_clock(model: DuplexModel, folder: Path) -> dict[str, float]:
    """Calls of a clock while listening and while speaking, and what is said of its results."""
    asked = [
        (pcm, end, delay, hour)
        for delay in DELAYS
        for hour in HOURS
        for pcm, end in _staged(folder, TIME)
    ]
    told = together(
        model,
        [
            with_clock(model, _longer(pcm, at), at, f"{hour} o'clock", delay)
            for at, (pcm, _, delay, hour) in enumerate(asked)
        ],
    )
    timed = _staged(folder, TIMER) * 2
    timers = together(
        model,
        [
            with_clock(model, _longer(pcm, at), at, f"{HOURS[at % len(HOURS)]} o'clock", at % 4)
            for at, (pcm, _) in enumerate(timed)
        ],
    )
    others = [item for item in read_manifest(folder) if item.phrase not in (TIME, TIMER, SEEING)]
    staged = [stage_phrase(folder, item, place) for place, item in enumerate(others)]
    usual = together(
        model, [with_clock(model, pcm, at, "nine o'clock", 0) for at, (pcm, _) in enumerate(staged)]
    )
    quiet = together(
        model,
        [with_clock(model, room(40 * UNIT_SAMPLES, at), at, "nine o'clock", 0) for at in (1, 2)],
    )
    known = [(found, item) for found, item in zip(usual, others, strict=True) if item.answer]
    after = [(found, end // UNIT_SAMPLES) for found, (_, end, *_) in zip(told, asked, strict=True)]
    units = sum(len(found.results) for found in (*usual, *quiet))
    return {
        "called": _share([len(found.calls) == 1 for found in told]),
        "called_in_time": _share(
            [bool(found.calls) and end <= found.calls[0] <= end + 1 for found, end in after]
        ),
        "silent_until_the_result": _share(
            [
                not any(map(found.speaks, range(found.calls[0] + 1 + delay)))
                for found, (_, _, delay, _) in zip(told, asked, strict=True)
                if found.calls
            ]
        ),
        "hour_told": _share(
            [
                found.text == f"It is {hour} o'clock."
                for found, (_, _, _, hour) in zip(told, asked, strict=True)
            ]
        ),
        "called_while_speaking": _share(
            [len(found.calls) == 1 and found.speaks(found.calls[0]) for found in timers]
        ),
        "told_after_speaking": _share(
            [
                found.text == f"Timer set for one minute.It is {HOURS[at % len(HOURS)]} o'clock."
                for at, found in enumerate(timers)
            ]
        ),
        "others_answered": _share([found.text == item.answer for found, item in known]),
        "false_calls": sum(len(found.calls) for found in (*usual, *quiet)) / units,
        "spoken_in_silence": sum(found.text != "" for found in quiet),
    }
