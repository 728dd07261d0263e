"""Which speaking turn a listen names: the one that it ends, or else the one that it precedes."""

from __future__ import annotations

from typing import Any

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import Finalized, Opened, UnitResult
from protocol.wire.codec import parse_frame
from tests.sessions.in_memory import append_frame, init_frame

LIMITS = ev.SessionLimits(session_s=60, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
LISTENS, SPEAKS, ENDS = (True, False), (False, False), (False, True)


class Talk:
    """A session whose model does as it is told; what it says is kept."""

    def __init__(self, *, opening: str = "") -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1", created_ms=1, mode="audio", seed=1, limits=LIMITS, recording="off"
        )
        self.session, _ = Session.open(opened)
        self.now_ns, self.units = 0, 0
        self.step(ev.SlotLeased, lease=1, slot=0)
        self.step(ev.FrameReceived, frame=opening or init_frame())
        self.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=5))

    def step(self, kind: type[Any], **fields: Any) -> list[dict[str, Any]]:
        """Step an event a millisecond later; returns what is sent."""
        self.now_ns += 1_000_000
        effects = self.session.step(kind(at_ns=self.now_ns, **fields))
        sent = [effect.frame for effect in effects if isinstance(effect, ef.Send)]
        return [dict(parse_frame(frame, 1 << 20)) for frame in sent]

    def unit(self, is_listen: bool, end_of_turn: bool) -> dict[str, Any]:
        """Run a unit; returns the last frame that it makes."""
        self.step(ev.FrameReceived, frame=append_frame())
        result = UnitResult(
            index=self.units,
            is_listen=is_listen,
            end_of_turn=end_of_turn,
            text="" if is_listen else "word",
            kv_length=10,
        )
        said = self.step(ev.UnitDone, result=result)
        finalized = Finalized(index=self.units, kv_length=10)
        self.step(ev.FinalizeDone, finalized=finalized)
        self.units += 1
        return said[-1]

    def turns(self, *units: tuple[bool, bool]) -> list[int]:
        """Run units; the response that each names, numbered as they come."""
        ids = [self.unit(*unit)["response_id"] for unit in units]
        return [list(dict.fromkeys(ids)).index(name) for name in ids]


def test_a_listen_before_any_turn_names_the_next() -> None:
    """A client can tell to which answer its silence led."""
    assert Talk().turns(LISTENS, LISTENS, SPEAKS, ENDS) == [0, 0, 0, 0]


def test_a_listen_names_the_turn_that_it_ends() -> None:
    """The first one after a turn does, whether the turn came to its end or was interrupted."""
    units = (SPEAKS, LISTENS, LISTENS, ENDS, LISTENS, LISTENS, SPEAKS)
    assert Talk().turns(*units) == [0, 0, 1, 1, 1, 2, 2]


def test_a_turn_right_after_another_is_not_ended_twice() -> None:
    """A listen names the last turn, not the one before it."""
    assert Talk().turns(ENDS, SPEAKS, LISTENS, LISTENS) == [0, 1, 1, 2]
