"""The kinds of sessions: each wires its parts, and the machine never asks which it is."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path
from typing import Any, Final, get_args

import attrs
import pytest

from protocol.machine.kind import Kind, Migration
from protocol.machine.session import _HANDLERS, KINDS, KINDS_OF_ENDPOINTS, Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import SLEEPS_AMID_MOVES
from protocol.values.limits import Mode
from protocol.values.requests import ClientMessage, CloseRequest, Played, Report
from protocol.values.state import SessionKind, State, session_kind_of
from protocol.wire.dialects import DIALECTS, MODES_OF

ROOT: Final = Path(__file__).parents[2]
MACHINE: Final = ("core", "duplex", "input", "kind", "reception", "session", "unit_loop")
ANSWERED_BY_THE_SESSION: Final = {ev.ConnectionOpened, CloseRequest, Played, Report}
LIMITS: Final = ev.SessionLimits(
    session_s=60, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192
)
OPENED: Final[tuple[tuple[Mode, ev.Endpoint], ...]] = (
    *(("audio", "realtime"), ("audio", "live"), ("audio", "openai"), ("chat", "realtime")),
    *(("chat", "chat"), ("transcription", "realtime"), ("transcription", "openai")),
    ("audio", "omni"),
)


def kinds() -> list[Kind]:
    """The kinds of those sessions."""
    return [session.kind for session in sessions()]


def sessions(**fields: Any) -> list[Session]:
    """Open a session of each kind."""
    opened = [
        ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode=mode,
            endpoint=endpoint,
            label="m" if endpoint == "openai" else "",
            seed=1,
            recording="on",
            **{"limits": LIMITS, **fields},
        )
        for mode, endpoint in OPENED
    ]
    return [Session.open(event)[0] for event in opened]


def test_each_session_kind_has_its_kind() -> None:
    """A session would take the states of one kind, and do what another does."""
    assert {session_kind: cls.session_kind for session_kind, cls in KINDS.items()} == {
        it: it for it in SessionKind
    }
    assert {type(kind) for kind in kinds()} == {*KINDS.values(), *KINDS_OF_ENDPOINTS.values()}


def test_every_message_and_event_has_a_handler() -> None:
    """A message or an event would be lost."""
    known = {*get_args(ev.Event), *get_args(ClientMessage)}
    handled = {item for kind in kinds() for item in kind.handlers}
    assert {*handled, *_HANDLERS} | ANSWERED_BY_THE_SESSION == known
    assert not handled & _HANDLERS.keys()


def test_a_handler_takes_its_message_or_event() -> None:
    """A name in a table would be of no method, or of one for another message."""
    for kind in kinds():
        for item, method_of in kind.handlers.items():
            (given,) = signature(method_of(kind)).parameters.values()
            assert item.__name__ == given.annotation.rpartition(".")[2], (kind, item)


def test_a_kind_handles_all_that_its_dialects_have() -> None:
    """A valid message would be accepted, and nothing come of it."""
    for name, dialect in DIALECTS.items():
        for mode in MODES_OF[name]:
            session_kind = session_kind_of(mode, is_request=name == "legacy-chat")
            endpoints: dict[str, ev.Endpoint] = {"live": "live", "vllm-omni": "omni"}
            endpoint = endpoints.get(name, "openai")
            is_own = name in endpoints or name.startswith("openai")
            kind = KINDS_OF_ENDPOINTS[endpoint, session_kind] if is_own else KINDS[session_kind]
            sent = {table.cls for _, table in dialect.requests(mode)}
            assert sent <= {*kind.handlers} | ANSWERED_BY_THE_SESSION, (name, mode)


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine_does_not_ask_which_session_kind_it_is(name: str) -> None:
    """A new mode would be a branch in every file again."""
    tree = ast.parse((ROOT / "protocol" / "machine" / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.match_case):
            assert "SessionKind." not in ast.unparse(node), f"line {getattr(node, 'lineno', '')}"


def test_each_kind_sleeps_amid_a_move_until_its_client_is_back() -> None:
    """The wait for another slot would go on in its sleep, and end the session."""
    limits = attrs.evolve(LIMITS, models=("m",), detach_s=30, resume_s=600, rebuild_wait_s=10)
    found = sessions(limits=limits, resume_hash="0" * 64, behaviour=SLEEPS_AMID_MOVES)
    moving = [it for it in found if isinstance(it.kind.slot_user, Migration)]
    assert len(moving) == len(found) - 2  # a chat has its slot for a turn only
    for session in moving:
        timers = session.kind.timers.pending
        session.step(ev.SlotLeased(at_ns=1, lease=1, slot=0))
        session.peer.enter(State.ACTIVE)
        session.step(ev.PeerGone(at_ns=2, code=1006))
        session.step(ev.LeaseRevoked(at_ns=3, lease=1))
        assert "rebuild" in timers
        generation = timers["detach"]
        session.step(ev.TimerFired(at_ns=4, name="detach", generation=generation))
        assert "rebuild" not in timers
        assert not session.step(ev.BackendReleased(at_ns=5, lease=1))
        back = session.step(ev.PeerAttached(at_ns=6, after=-1, resume_hash="1" * 64))
        assert ef.EnterQueue(mode=session.opened.mode, ahead=True) in back
        assert "rebuild" not in timers
