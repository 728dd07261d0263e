"""Mistakes planted into the session machine: some golden log parts from each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from protocol.machine import core
from protocol.machine import session as session_module
from protocol.machine.chat import TurnLoop
from protocol.machine.core import Call, Phase, Timers
from protocol.machine.duplex import Setup
from protocol.machine.kind import Kind
from protocol.machine.session import Session
from protocol.machine.unit_loop import UnitLoop
from protocol.values import events as ev
from recorder.format.format import Record
from recorder.read.scan import Damage
from replay.rerun.logic import replay
from tests.golden.logs import FOLDER, items

Handler = Callable[[Session, Any], None]


@cache
def golden_logs() -> dict[str, list[Record | Damage]]:
    """All golden logs, read once."""
    return {path.name: items(path) for path in sorted(FOLDER.glob("*.zst"))}


def handled_by(event: type[ev.Event], handler: Handler) -> AbstractContextManager[Any]:
    """Have something else take an event."""
    return patch.dict(session_module._HANDLERS, {event: handler})  # type: ignore[arg-type]


def kept_after_close(session: Session, event: ev.BackendReleased) -> None:
    """The lease of a session that is over is never cleared."""
    slot = session.kind.slot
    if event.lease == slot.lease and not session.kind.peer.is_closed:
        slot.lease, slot.is_releasing = None, False
        session.kind.slot_user.slot_returned()


def any_release(session: Session, _event: ev.BackendReleased) -> None:
    """The release of another lease is taken for one's own."""
    slot = session.kind.slot
    slot.lease, slot.is_releasing = None, False
    session.kind.slot_user.slot_returned()


def leased_to_the_closed(session: Session, event: ev.SlotLeased) -> None:
    """A slot that comes for a session that is over is not given back."""
    if session.kind.peer.is_closed:
        session.kind.slot.is_waiting = False
        session.kind.slot.lease = event.lease
    else:
        Session._slot_leased(session, event)


def any_opening(self: Setup, event: ev.BackendOpened) -> None:
    """A model that was opened for another lease is taken for one's own."""
    was = self.slot.lease
    self.slot.lease = event.lease
    opened_before(self, event)
    self.slot.lease = was


opened_before = Setup.backend_opened


def any_timer(self: Timers, name: Any, _generation: int) -> bool:
    """A timer that was set anew fires as it was set before."""
    return self.pending.pop(name, None) is not None


def begins_amid_finalize(self: Call, index: int) -> None:
    """A unit starts while the last one is finalized."""
    self.phase = Phase.IDLE
    begun_before(self, index)


begun_before = Call.begin


def ends_by_failure(self: TurnLoop, index: int, **fields: Any) -> None:
    """A chat whose turn failed ends, as a single request does."""
    failed_before(self, index, **fields)
    self.kind.end("backend_error")


def goes_on_with_the_failed(self: TurnLoop, index: int, **fields: Any) -> None:
    """A single request whose turn failed is told of it, and stays."""
    with patch.object(Kind, "refuse", lambda self, code, text, **_: self.send_error(code, text)):
        failed_before(self, index, **fields)


failed_before = TurnLoop.failed


@contextmanager
def no_signs_of_life() -> Iterator[None]:
    """Progress of a call does not count as life."""
    with patch.object(core, "SIGNS_OF_LIFE", ()):
        yield


def is_open_barrier(self: Call) -> bool:
    """The barrier is open as soon as a unit is done."""
    return self.phase in {Phase.IDLE, Phase.FINALIZING}


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "lease kept after a close": lambda: handled_by(ev.BackendReleased, kept_after_close),
    "lease of the closed kept": lambda: handled_by(ev.SlotLeased, leased_to_the_closed),
    "stale release heeded": lambda: handled_by(ev.BackendReleased, any_release),
    "stale opening heeded": lambda: patch.object(Setup, "backend_opened", any_opening),
    "stale timer heeded": lambda: patch.object(Timers, "fire", any_timer),
    "withheld unit sent": lambda: patch.object(UnitLoop, "is_withheld", lambda *_: False),
    "barrier open amid finalize": lambda: patch.multiple(
        Call, is_idle=property(is_open_barrier), begin=begins_amid_finalize
    ),
    "failed chat ends": lambda: patch.object(TurnLoop, "failed", ends_by_failure),
    "failed request stays": lambda: patch.object(TurnLoop, "failed", goes_on_with_the_failed),
    "progress is no life": no_signs_of_life,
}


def test_golden_logs_replay_without_a_mutant() -> None:
    """Every mutant would be found for another's fault."""
    for name, found_in in golden_logs().items():
        report = replay(found_in)
        assert report.divergence is None, (name, report.divergence)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_by_a_golden_log(name: str) -> None:
    """Somebody could break the machine like that, and all recordings would still replay."""
    with MUTANTS[name]():
        found = [log for log, found_in in golden_logs().items() if replay(found_in).divergence]
    assert found
