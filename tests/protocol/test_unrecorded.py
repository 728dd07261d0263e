"""A client that asks not to be recorded is not, whatever else is wrong with its message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import Mode
from recorder.format.mapping import effect_record, event_of, event_record

LIMITS = ev.SessionLimits(session_s=300, init_wait_s=30, cleanup_wait_s=10, context_tokens=2000)
LONG = "x" * 5000
"""Enough for a refused message to be recorded without its content."""
REFUSED: dict[str, tuple[Mode, ev.Endpoint, dict[str, Any]]] = {
    "a request": ("chat", "chat", {"record": False, "messages": [{"role": "user", "content": 7}]}),
    "an init": (
        *("audio", "realtime"),
        {"type": "session.init", "payload": {"record": False, "config": 7}},
    ),
    "an update": (
        *("audio", "realtime"),
        {"type": "session.update", "session": {"instructions": 7, "record": False}},
    ),
    "a prepare": (*("audio", "duplex"), {"type": "prepare", "record": False, "config": 7}),
}


def begun(mode: Mode, endpoint: ev.Endpoint, **opened: Any) -> Session:
    """A session that waits for its client's first words."""
    session, _ = Session.open(
        ev.ConnectionOpened(
            **{
                "recording_id": "rec-000001",
                "created_ms": 1,
                "mode": mode,
                "endpoint": endpoint,
                "seed": 1,
                "limits": LIMITS,
                "recording": "on",
                **opened,
            }
        )
    )
    return session


def said(session: Session, body: object) -> tuple[ef.Effect, ...]:
    """Say something, as it is recorded; gives what comes of it in a replay too."""
    event = session.shortened(ev.FrameReceived(at_ns=0, frame=json.dumps(body)))
    kept = event_of(event_record(event)[1], 0)
    assert isinstance(kept, ev.FrameReceived)
    return session.step(kept)


@pytest.mark.parametrize("size", ["short", "long"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_is_refused_is_heeded(name: str, size: str) -> None:
    """A recording would stay of somebody who said that there must be none."""
    mode, endpoint, body = REFUSED[name]
    session = begun(mode, endpoint)
    if endpoint != "chat":
        session.step(ev.SlotLeased(at_ns=0, lease=1, slot=0))
    else:
        session.step(ev.Admitted(at_ns=0))
    effects = said(session, body | ({"padding": LONG} if size == "long" else {}))
    assert ef.ForgetRecording() in effects
    assert any('"error"' in effect.frame for effect in effects if isinstance(effect, ef.Send))
    assert all(effect_record(effect) for effect in effects)


@pytest.mark.parametrize(
    "body",
    [REFUSED["an init"][2], {"type": "session.init", "payload": {"record": False}}],
    ids=["wrong", "right"],
)
def test_a_message_that_has_to_wait_is_heeded_at_once(body: dict[str, Any]) -> None:
    """Its client may leave the queue, and what it said would stay."""
    session = begun("audio", "realtime")
    assert ef.ForgetRecording() in said(session, body)
    assert ef.ForgetRecording() not in session.step(ev.SlotLeased(at_ns=1, lease=1, slot=0))


@pytest.mark.parametrize("opened", [{"must_record": True}, {"recording": "off"}])
def test_who_must_be_recorded_is(opened: dict[str, Any]) -> None:
    """An operator's duty would depend on a client's mistake."""
    mode, endpoint, body = REFUSED["an init"]
    session = begun(mode, endpoint, **opened)
    session.step(ev.SlotLeased(at_ns=0, lease=1, slot=0))
    assert ef.ForgetRecording() not in said(session, body)


def test_what_a_second_message_asks_for_changes_nothing() -> None:
    """A session under way would end its recording by a message that is refused for its place."""
    session = begun("audio", "realtime")
    session.step(ev.SlotLeased(at_ns=0, lease=1, slot=0))
    said(session, {"type": "session.init", "payload": {}})
    effects = said(session, {"type": "session.init", "payload": {"record": False}})
    assert ef.ForgetRecording() not in effects
