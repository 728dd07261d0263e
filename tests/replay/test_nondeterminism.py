"""Sessions that are not deterministic, on purpose: each is found out, and at the right record.

A double is the real machine with one fault, which strikes in one step: it reads a clock, asks a
generator, goes by the order of a set or by an address, swaps two effects, or counts what nobody
sees. It is recorded and replayed as any session is, and strikes in each step in turn.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from recorder.format import mapping as steps
from recorder.format.format import Record
from recorder.format.mapping import EFFECT_KINDS, EVENT_KINDS
from recorder.read.reader import read
from replay.rerun import logic
from replay.rerun.report import Divergence
from tests.replay import test_logs as test_replay_logs
from tests.replay.test_logs import busy_scene, write_log

Effects = tuple[ef.Effect, ...]
ROOT = Path(__file__).parents[2]
STRIDE = 4
"""Each fault strikes in every fourth step: some thirty times in the busy scene."""


class Double(Session):
    """The machine with a fault.

    Attributes:
        strikes_at: the step in which it strikes, from 0; -1: in none.
    """

    strikes_at: ClassVar[int] = -1

    def __init__(self, opened: ev.ConnectionOpened) -> None:
        super().__init__(opened)
        self._steps = 0

    def step(self, event: ev.Event) -> Effects:
        self._steps += 1
        effects = super().step(event)
        return self.spoil(effects) if self._steps == self.strikes_at else effects

    def spoil(self, effects: Effects) -> Effects:
        """Strike."""
        raise NotImplementedError


def with_number(effects: Effects, number: float) -> Effects:
    """Put a number into the first frame that is sent."""
    sends = [effect for effect in effects if isinstance(effect, ef.Send)]
    if not sends:
        return effects
    told = attrs.evolve(sends[0], frame=sends[0].frame.replace("{", f'{{"n":{number},', 1))
    return tuple(told if effect is sends[0] else effect for effect in effects)


class ReadsAClock(Double):
    """It tells the client what time it is."""

    def spoil(self, effects: Effects) -> Effects:
        return with_number(effects, time.perf_counter_ns())


class AsksAGenerator(Double):
    """It tells the client a random number."""

    def spoil(self, effects: Effects) -> Effects:
        return with_number(effects, random.random())


class LooksAtAnAddress(Double):
    """It tells the client where in memory something lies."""

    kept: ClassVar[list[object]] = []

    def spoil(self, effects: Effects) -> Effects:
        self.kept.append(object())  # alive, so that no other lies there
        return with_number(effects, id(self.kept[-1]))


class SwapsEffects(Double):
    """Two effects change places, in every other session."""

    swaps: ClassVar[Iterator[bool]]

    def spoil(self, effects: Effects) -> Effects:
        if len(effects) < 2 or not next(self.swaps):
            return effects
        return (effects[1], effects[0], *effects[2:])


class ForgetsAnEffect(SwapsEffects):
    """The last effect is missing, in every other session."""

    def spoil(self, effects: Effects) -> Effects:
        return effects[:-1] if effects and next(self.swaps) else effects


class CountsUnseen(Double):
    """What nobody is told of counts something by the clock."""

    def spoil(self, effects: Effects) -> Effects:
        self.kind.peer.fields_ignored += time.perf_counter_ns() % 1_000_003
        return effects


class GoesByASet(Double):
    """Effects are performed in the order in which a set holds their names."""

    def spoil(self, effects: Effects) -> Effects:
        order = list({f"{type(effect).__name__} {number}" for number, effect in enumerate(effects)})
        return tuple(effects[int(name.split()[1])] for name in order)


@attrs.frozen
class Stepped:
    """The records of one step: an event, and the effects that follow it."""

    event: Record
    effects: list[Record]


def steps_of(records: list[Record]) -> list[Stepped]:
    """Take a log apart, step by step."""
    steps: list[Stepped] = []
    for record in records:
        if record.kind in EVENT_KINDS:
            steps.append(Stepped(record, []))
        elif record.kind in EFFECT_KINDS:
            steps[-1].effects.append(record)
    return steps


def play(
    double: type[Double], monkeypatch: pytest.MonkeyPatch, strikes_at: int
) -> tuple[list[Record], Divergence | None]:
    """Record a session with a double, and replay it with the same double."""
    monkeypatch.setattr(double, "strikes_at", strikes_at)
    monkeypatch.setattr(test_replay_logs, "Session", double)
    monkeypatch.setattr(steps, "Session", double)
    records = busy_scene().records
    return records, logic.replay(records).divergence


STEPS = range(1, len(steps_of(busy_scene().records)), STRIDE)


@pytest.mark.parametrize("double", [ReadsAClock, AsksAGenerator, LooksAtAnAddress])
def test_another_frame_is_found_where_it_is(
    double: type[Double], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that no event brought would reach clients, and each replay would pass."""
    found = 0
    for number in STEPS:
        records, divergence = play(double, monkeypatch, number)
        sent = [record for record in steps_of(records)[number].effects if record.kind == "tx"]
        assert (divergence is None) is (not sent)
        if divergence is not None:
            assert (divergence.seq, divergence.kind) == (sent[0].seq, "changed")
            assert divergence.field.startswith("frame[")
            assert divergence.cause is not None
            assert divergence.cause.seq == steps_of(records)[number].event.seq
            found += 1
    assert found >= 5


def test_swapped_effects_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close before a send would pass for the same session."""
    found = 0
    for number in STEPS:
        SwapsEffects.swaps = iter((False, True))
        records, divergence = play(SwapsEffects, monkeypatch, number)
        effects = steps_of(records)[number].effects
        assert (divergence is None) is (len(effects) < 2)
        if divergence is not None:
            assert (divergence.seq, divergence.kind) == (effects[0].seq, "changed")
            found += 1
    assert found >= 5


def test_a_missing_effect_is_found_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is only sent now and then would pass for the same session."""
    found = 0
    for number in STEPS:
        ForgetsAnEffect.swaps = iter((False, True))
        records, divergence = play(ForgetsAnEffect, monkeypatch, number)
        effects = steps_of(records)[number].effects
        assert (divergence is None) is (not effects)
        if divergence is not None:
            assert (divergence.seq, divergence.kind) == (effects[-1].seq, "left_over")
            found += 1
    assert found >= 5


def test_what_nobody_sees_is_found_by_the_next_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session could drift for hours before anything of it shows."""
    for number in STEPS:
        records, divergence = play(CountsUnseen, monkeypatch, number)
        struck = steps_of(records)[number].event.seq
        shows = [r.seq for r in records if r.kind in ("state", "fin") and r.seq > struck]
        assert divergence is not None
        assert (divergence.seq, divergence.kind in ("state", "fin")) == (shows[0], True)


# -- the order of a set, which only another process has otherwise ---------------------------------


def record_by_a_set(path: str, strikes_at: int) -> None:
    """Record the double into a file; called in a process of its own."""
    GoesByASet.strikes_at = strikes_at
    test_replay_logs.Session = GoesByASet
    write_log(Path(path), busy_scene().records)


def replay_by_a_set(path: str, strikes_at: int) -> None:
    """Replay the double, and print where it parts; called in a process of its own."""
    GoesByASet.strikes_at = strikes_at
    steps.Session = GoesByASet
    divergence = logic.replay(read(next(Path(path).iterdir()))).divergence
    print(None if divergence is None else divergence.seq)


def run(*calls: str, hash_seed: int) -> list[str]:
    """Make calls of this file in a process with a seed of its own for hashes; what they print."""
    code = "; ".join(["from tests.replay.test_nondeterminism import *", *calls])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def test_the_order_of_a_set_is_found_in_another_process(tmp_path: Path) -> None:
    """A log would replay on the machine that made it, and diverge on all others."""
    steps = steps_of(busy_scene().records)
    number = next(at for at, step in enumerate(steps) if len(step.effects) >= 4)
    folders = [tmp_path / "1", tmp_path / "2"]
    replayed, logs = [], []
    for seed, folder in enumerate(folders, 1):
        folder.mkdir()
        record = f"record_by_a_set({str(folder)!r}, {number})"
        replay = f"replay_by_a_set({str(folders[0])!r}, {number})"
        replayed += run(record, replay, hash_seed=seed)
        logs.append(list(read(next(folder.iterdir()))))
    parted = next(one.seq for one, other in zip(*logs, strict=True) if one != other)
    assert replayed == ["None", str(parted)]
