"""The referee is itself judged: each rule sees its own foul, and nothing else would have.

A foul is a trace that a broken machine could give. With the rule it is called; with the rule taken
away (a mutant of the detector) nobody calls it, so no rule stands there for show.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Finalized, Opened, Opening, Unit, UnitResult
from tests.sessions.in_memory import base64
from tests.sessions.referee import RULES, Referee

Moves = Sequence[tuple[ev.Event, Sequence[ef.Effect]]]

SECOND = np.full(16_000, 0.25, dtype="<f4").tobytes()


def send(**body: Any) -> ef.Send:
    """A frame that was sent."""
    return ef.Send(ordinal=0, frame=json.dumps(body))


def append(**fields: Any) -> ev.FrameReceived:
    """A second of audio that came in."""
    body = {"type": "input.append", "input": {"audio": base64(SECOND), **fields}}
    return ev.FrameReceived(at_ns=0, frame=json.dumps(body))


def start(index: int, *, force_listen: bool = False, pcm: bytes = SECOND) -> ef.StartUnit:
    """A unit that is started."""
    return ef.StartUnit(unit=Unit(index=index, pcm=pcm, force_listen=force_listen))


def done(index: int) -> ev.UnitDone:
    """A unit that is done."""
    return ev.UnitDone(at_ns=0, result=UnitResult(index=index, is_listen=True))


def finalized(index: int) -> ev.FinalizeDone:
    """A unit that is finalized."""
    return ev.FinalizeDone(at_ns=0, finalized=Finalized(index=index, kv_length=1))


def finalize(index: int) -> ef.StartFinalize:
    """A finalize that is started."""
    return ef.StartFinalize(index=index, interrupted=False)


LISTEN = send(type="response.output.delta", kind="listen")
TEXT = send(type="response.output.delta", kind="text")
CLOSED = send(type="session.closed", reason="timeout")
CLOSE = ef.Close(code=1000, reason="stopped")
QUIET = ev.TimerFired(at_ns=0, name="init", generation=0)
OPENING = ef.OpenBackend(
    lease=1, opening=Opening.__new__(Opening)
)  # the referee looks at the lease alone

ACTIVE: Moves = [
    (ev.SlotLeased(at_ns=0, lease=1, slot=0), [send(type="session.queue_done")]),
    (QUIET, [OPENING]),
    (
        ev.BackendOpened(at_ns=0, lease=1, opened=Opened(prompt_length=1)),
        [send(type="session.created")],
    ),
]
RUNNING: Moves = [*ACTIVE, (append(), [start(0)])]
LOST: Moves = [
    (
        ev.ConnectionOpened(
            recording_id="r",
            created_ms=0,
            mode="audio",
            seed=0,
            recording="on",
            limits=ev.SessionLimits(
                session_s=9, init_wait_s=9, cleanup_wait_s=9, context_tokens=9, rebuild_wait_s=9
            ),
        ),
        [],
    ),
    *RUNNING,
    (ev.BackendLost(at_ns=0, lease=1), [ef.Release(lease=1)]),
]
MOVED: Moves = [*LOST, (ev.SlotLeased(at_ns=0, lease=2, slot=0), [ef.Rebuild(lease=2)])]
REBUILT: Final = ev.Rebuilt(at_ns=0, lease=2, steps=0)
RESUMABLE: Final = ef.Attach(frame="{}", after=-1, before=0)
NUMBERED: Moves = [(attrs.evolve(LOST[0][0], resume_hash="00"), [RESUMABLE])]
BACK: Final = ev.PeerAttached(at_ns=0, after=-1, resume_hash="00")
FINALIZING: Moves = [*RUNNING, (done(0), [LISTEN, finalize(0)])]

FOULS: dict[str, Moves] = {
    "silence": [*ACTIVE, (QUIET, [CLOSED, CLOSE]), (QUIET, [LISTEN])],
    "farewell": [*ACTIVE, (QUIET, [CLOSE])],
    "numbers": [*NUMBERED, (QUIET, [send(type="session.queue_done", seq=1, ack=0)])],
    "return": [*NUMBERED, (BACK, [])],
    "codes": [*ACTIVE, (QUIET, [send(type="error", error={"code": "oops"})])],
    "b1": [*FINALIZING, (append(), [start(1)])],
    "b2": [*RUNNING, (done(0), [finalize(0), LISTEN])],
    "b3": [*RUNNING, (ev.UnitFailed(at_ns=0, index=0), [CLOSED, CLOSE])],
    "b4": [*RUNNING, (ev.PeerGone(at_ns=0), [ef.Release(lease=1)])],
    "b5": [*ACTIVE, (ev.PeerGone(at_ns=0), [ef.Release(lease=1), ef.Release(lease=1)])],
    "b6": [*RUNNING, (append(force_listen=True), [])],
    "b7": [*RUNNING, *[(append(), [])] * 6],
    "b9": [*RUNNING, (done(0), [LISTEN, TEXT, finalize(0)])],
    "b10": [
        *RUNNING,
        (ev.UnitFailed(at_ns=0, index=0, context_full=True), [LISTEN, ef.Rollback(index=0)]),
    ],
    "b11": [*LOST, (ev.SlotLeased(at_ns=0, lease=2, slot=0), [start(0)])],
}
OTHER_FOULS: dict[str, tuple[str, Moves]] = {
    "greeted unasked": ("return", [(QUIET, [RESUMABLE])]),
    "greeted twice": ("return", [*NUMBERED, (BACK, [RESUMABLE, RESUMABLE])]),
    "frames from elsewhere on": (
        "return",
        [*NUMBERED, (BACK, [ef.Attach(frame="{}", after=0, before=0)])],
    ),
    "numbers unasked": ("numbers", [(QUIET, [send(type="session.queue_done", seq=0, ack=0)])]),
    "closed twice": ("silence", [*ACTIVE, (QUIET, [CLOSED, CLOSED, CLOSE])]),
    "said after closed": ("silence", [*ACTIVE, (QUIET, [CLOSED, LISTEN, CLOSE])]),
    "closed before created": ("farewell", [(QUIET, [CLOSED, CLOSE])]),
    "refused without 1013": (
        "codes",
        [(QUIET, [send(type="error", error={"code": "queue_full"}), CLOSE])],
    ),
    "unit after a failed finalize": (
        "b1",
        [*FINALIZING, (ev.FinalizeFailed(at_ns=0, index=0), []), (append(), [start(1)])],
    ),
    "no finalize barrier within a step": ("b1", [*RUNNING, (done(0), [LISTEN, start(1)])]),
    "failure not told": (
        "b3",
        [*RUNNING, (ev.UnitFailed(at_ns=0, index=0), [ef.Rollback(index=0)])],
    ),
    "slot kept": ("b5", [*ACTIVE, (ev.PeerGone(at_ns=0), [])]),
    "forced unit speaks": (
        "b6",
        [
            *RUNNING,
            (append(force_listen=True), [ef.Interrupt(index=0)]),
            (done(0), [TEXT, finalize(0)]),
        ],
    ),
    "force lost": (
        "b6",
        [
            *RUNNING,
            (append(force_listen=True), [ef.Interrupt(index=0)]),
            (done(0), [LISTEN, finalize(0)]),
            (finalized(0), [start(1)]),
        ],
    ),
    "wrong sound": ("b7", [*ACTIVE, (append(), [start(0, pcm=b"\0" * 64_000)])]),
    "short unit": ("b7", [*ACTIVE, (append(), [start(0, pcm=SECOND[:-4])])]),
    "newest dropped": (
        "b7",
        [
            *RUNNING,
            *[(append(), [])] * 5,
            (append(), [ef.DropUnit(ordinal=6, input_id="", force_listen_passed=False)]),
        ],
    ),
    "index reused": ("b9", [*FINALIZING, (finalized(0), []), (append(), [start(0)])]),
    "unit without an outcome": ("b9", [*RUNNING, (done(0), [finalize(0)])]),
    "rebuilt on an old lease": ("b11", [*LOST, (REBUILT, [ef.Rebuild(lease=1)])]),
    "another unit after a move": ("b11", [*MOVED, (REBUILT, [start(1)])]),
    "the queue is told again": ("b11", [*LOST, (QUIET, [send(type="session.queue_update")])]),
    "outcome out of the blue": ("b9", [*ACTIVE, (QUIET, [LISTEN])]),
}


def judge(moves: Moves, without: Sequence[str] = ()) -> set[str]:
    """Name the rules that a trace breaks."""
    referee = Referee(without)
    for event, effects in moves:
        referee.observe(event, effects)
    if "b5" not in without:
        gone = any(isinstance(event, ev.PeerGone) for event, _ in moves)
        if gone:
            referee.finish()
    return {violation.split(":")[0] for violation in referee.violations}


def test_a_clean_game_is_not_whistled_at() -> None:
    """A right machine is called wrong."""
    played = [
        *FINALIZING,
        (append(), []),
        (finalized(0), [start(1)]),
        (ev.PeerGone(at_ns=0), [ef.Interrupt(index=1)]),
        (done(1), [ef.Release(lease=1)]),
    ]
    assert judge(played) == set()
    assert judge([*MOVED, (REBUILT, [start(0)]), (done(0), [LISTEN, finalize(0)])]) == set()


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_sees_its_foul_and_is_needed_for_it(rule: str) -> None:
    """A rule of the design is checked by nothing, and nobody notices."""
    assert rule in judge(FOULS[rule])
    assert rule not in judge(FOULS[rule], without=[rule])


@pytest.mark.parametrize("foul", OTHER_FOULS)
def test_other_ways_to_break_a_rule(foul: str) -> None:
    """A rule sees one way to break it and not another."""
    rule, moves = OTHER_FOULS[foul]
    assert rule in judge(moves)
