"""An opening message that comes while its client waits is kept, and taken at `queue_done`."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import Mode
from protocol.values.messages import QueuePlace
from protocol.wire.codec import parse_frame
from tests.sessions.in_memory import append_frame, init_frame

LIMITS = ev.SessionLimits(session_s=60, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
OPENINGS: dict[str, tuple[ev.Endpoint, str]] = {
    "realtime": ("realtime", init_frame()),
    "duplex-v1": ("realtime", '{"type": "session.update", "session": {"instructions": "hi"}}'),
    "legacy-duplex": ("duplex", '{"type": "prepare", "system_prompt": "hi"}'),
}
PLACE = QueuePlace(position=1, estimated_wait_s=20, ticket_id="ticket_1", queue_length=1)


class Waiting:
    """A session in the queue; what it says and asks for is kept."""

    def __init__(self, endpoint: ev.Endpoint, *, mode: Mode = "audio", **limits: Any) -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode=mode,
            seed=1,
            limits=attrs.evolve(LIMITS, **limits),
            recording="off",
            endpoint=endpoint,
            label="omni_1",
        )
        self.session, self.effects = Session.open(opened)
        self.now_ns = 0

    def step(self, kind: type[Any], **fields: Any) -> tuple[ef.Effect, ...]:
        """Step an event a millisecond later."""
        self.now_ns += 1_000_000
        return self.session.step(kind(at_ns=self.now_ns, **fields))

    def say(self, frame: Any, **fields: Any) -> list[dict[str, Any]]:
        """Send a frame; returns what is answered."""
        return said(self.step(ev.FrameReceived, frame=frame, **fields))


def said(effects: tuple[ef.Effect, ...]) -> list[dict[str, Any]]:
    """What is sent to the client."""
    return [
        dict(parse_frame(effect.frame, 1 << 20))
        for effect in effects
        if isinstance(effect, ef.Send)
    ]


@pytest.mark.parametrize("dialect", OPENINGS)
@pytest.mark.parametrize("is_told", [False, True], ids=["before it is told", "told its place"])
def test_it_is_taken_at_queue_done(dialect: str, *, is_told: bool) -> None:
    """The sources' pages send it 100 ms after opening, once, and give up on any error."""
    endpoint, opening = OPENINGS[dialect]
    waiting = Waiting(endpoint)
    if is_told:
        waiting.step(ev.TicketMoved, place=PLACE)
    assert waiting.say(opening) == []
    effects = waiting.step(ev.SlotLeased, lease=1, slot=0)
    assert any(isinstance(effect, ef.OpenBackend) for effect in effects)
    assert waiting.session.dialect_name == dialect
    assert waiting.session.early_bytes is None


def test_a_chat_keeps_it_until_it_is_admitted() -> None:
    """A chat holds no slot, and its admission may take as long as a disk does."""
    waiting = Waiting("realtime", mode="chat")
    assert waiting.say('{"type": "session.init", "payload": {}}') == []
    told = said(waiting.step(ev.Admitted))
    assert [body["type"] for body in told] == ["session.queue_done", "session.created"]


@pytest.mark.parametrize("dialect", OPENINGS)
def test_a_second_one_is_refused_and_the_first_counts(dialect: str) -> None:
    """Two settings for one session: the server would pick one and say nothing."""
    endpoint, opening = OPENINGS[dialect]
    waiting = Waiting(endpoint)
    waiting.say(opening)
    [error] = waiting.say(opening.replace("hi", "second"))
    assert "invalid_event" in str(error)
    assert "while queued" in str(error)
    [opened] = [
        effect
        for effect in waiting.step(ev.SlotLeased, lease=1, slot=0)
        if isinstance(effect, ef.OpenBackend)
    ]
    assert opened.opening.instructions != "second"


def test_what_is_wrong_with_it_is_said_when_it_is_taken() -> None:
    """A client is told of a mistake before its turn, and takes the queue for lost."""
    waiting = Waiting("duplex")
    assert waiting.say('{"type": "prepare", "system_prompt": 7}') == []
    done, error = said(waiting.step(ev.SlotLeased, lease=1, slot=0))
    assert done == {"type": "queue_done"}
    assert error["code"] == "invalid_payload"
    assert waiting.say(OPENINGS["legacy-duplex"][1]) == []


def test_sound_while_queued_is_not_kept() -> None:
    """A minute of sound would be heard all at once when the slot comes."""
    waiting = Waiting("realtime")
    [error] = waiting.say(append_frame())
    assert error["error"]["code"] == "not_ready"
    assert error["error"]["message"] == "input.append while queued"
    assert waiting.session.early_bytes == 0


def test_one_that_cannot_be_kept_is_refused_with_what_to_do() -> None:
    """A queue of a thousand with voices would take the server's memory."""
    waiting, (_, frame) = Waiting("duplex"), OPENINGS["legacy-duplex"]
    [error] = waiting.say(frame, has_room=False)
    assert error["code"] == "not_ready"
    assert "send it again after the queue" in error["error"]
    assert waiting.say(frame) == []


def test_it_goes_with_the_session() -> None:
    """A client leaves, and its voices stay in memory."""
    waiting = Waiting("duplex")
    waiting.say(OPENINGS["legacy-duplex"][1])
    waiting.step(ev.PeerGone)
    assert waiting.session.early_bytes is None
    assert waiting.session.kind.peer.early is None


def test_the_state_names_what_is_kept() -> None:
    """A replay that keeps something else goes unnoticed until the slot comes."""
    waiting, other = Waiting("duplex"), Waiting("duplex")
    waiting.say(OPENINGS["legacy-duplex"][1])
    other.now_ns = waiting.now_ns
    other.session.step(ev.TimerFired(at_ns=other.now_ns, name="init", generation=9))
    assert waiting.session.digest() != other.session.digest()
