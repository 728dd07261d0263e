"""Steps that are counted later: none is lost or kept too long, and one bug costs one session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.machine.session import Session
from protocol.values import events as ev
from runtime.telemetry import catalogue as c
from runtime.telemetry.meters import BYTES_MAX, STEPS_MAX, DeferredMeter
from runtime.telemetry.metrics import Metrics
from tests.sessions.chatting import opened, question
from tests.sessions.telemetry import Figures


class Told:
    """A session of a server that counts, and what was counted so far."""

    def __init__(self, metrics: Metrics) -> None:
        self.session, effects = Session.open(opened())
        self.later: DeferredMeter = metrics.watch(self.session.opened, "")
        self.later.saw(self.session.opened, effects, self.session)
        self._counted = metrics._instruments["chat"]._made.series(c.FRAMES_RECEIVED, "chat")

    def step(self, kind: type[Any], **fields: Any) -> None:
        event = kind(at_ns=self.session.now_ns, **fields)
        self.later.saw(event, self.session.step(event), self.session)

    def say(self, frame: str = "{}") -> None:
        self.step(ev.FrameReceived, frame=frame)

    @property
    def counted(self) -> float:
        return self._counted.total


def test_steps_wait_for_others_and_for_a_reader() -> None:
    """A figure would be old, or the steps of a quiet server kept for ever."""
    metrics = Metrics()
    told = Told(metrics)
    told.say()
    assert told.counted == 0
    assert Figures(metrics)("frames_received_total", mode="chat") == 1
    for _ in range(STEPS_MAX):
        told.say()
    assert told.counted == 1 + STEPS_MAX
    told.say()
    assert told.counted == 1 + STEPS_MAX
    told.later.over(None)
    assert told.counted == 2 + STEPS_MAX


def test_large_messages_do_not_wait() -> None:
    """Thirty of the largest would be kept, a gigabyte."""
    told = Told(Metrics())
    told.say("x" * (BYTES_MAX + 1))
    assert told.counted == 1


def test_pictures_do_not_wait() -> None:
    """They are larger than the message that they came in, and were not counted as bytes."""
    told = Told(Metrics())
    told.say()
    told.step(ev.MediaDecoded, media=1, stacked=(bytes(BYTES_MAX), b"."))
    assert told.counted == 1


def test_a_conversation_that_is_answered_does_not_wait() -> None:
    """All its sound and pictures would be kept for as long as its client is silent."""
    told = Told(Metrics())
    told.step(ev.Admitted)
    told.say(json.dumps({"type": "session.init", "payload": {}}))
    told.say(json.dumps({"type": "input.append", "input": question()}))
    assert told.counted == 0
    told.step(ev.SlotLeased, lease=1, slot=0)
    assert told.counted == 2


def test_a_meter_that_breaks_costs_its_own_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost the figures of a session that happened to fill the row, or be called again."""
    metrics = Metrics()
    broken, other = Told(metrics), Told(metrics)
    calls: list[Any] = []

    def fail(*seen: Any) -> None:
        calls.append(seen)
        raise RuntimeError("a bug")

    monkeypatch.setattr(broken.later.meter, "saw", fail)
    broken.say()
    broken.say()
    other.say()
    assert Figures(metrics)("frames_received_total", mode="chat") == 1
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="a bug"):
        broken.say()
    with pytest.raises(RuntimeError, match="a bug"):
        broken.later.over(None)
    other.later.over(None)
