"""A server may be killed after any block of a session's log; the next one goes on, in every mode.

`python -m tests.soak.prefixes` has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from runtime.session.crash_recovery import Outstanding, RecoveredSession
from runtime.session.journal import Journal
from tests.soak.prefixes import LIVES, kill_everywhere

STEP = 3
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.costly
@pytest.mark.parametrize("name", LIVES)
def test_a_session_goes_on_from_any_block(tmp_path: Path, name: str) -> None:
    """A conversation was lost, or went on as another one, where its server was killed."""
    kills, failures = kill_everywhere(name, tmp_path, STEP, first=len(name) % STEP)
    assert kills > 0
    assert failures == []


def _timers_lost(patch: pytest.MonkeyPatch) -> None:
    real = Outstanding.effects

    def effects(self: Outstanding) -> Iterator[ef.Effect]:
        return (effect for effect in real(self) if not isinstance(effect, ef.SetTimer))

    patch.setattr(Outstanding, "effects", effects)


def _media_lost(patch: pytest.MonkeyPatch) -> None:
    real = Outstanding.effects

    def effects(self: Outstanding) -> Iterator[ef.Effect]:
        return (effect for effect in real(self) if not isinstance(effect, ef.DecodeMedia))

    patch.setattr(Outstanding, "effects", effects)


def _lease_kept(patch: pytest.MonkeyPatch) -> None:
    def losses(self: RecoveredSession, now_ns: int) -> Iterator[ev.Event]:
        yield ev.PeerGone(at_ns=now_ns, code=1012)

    patch.setattr(RecoveredSession, "losses", losses)


def _tokens_of_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveredSession, "_follow_tokens", lambda self, event: None)


def _rest_of_a_step_is_late(patch: pytest.MonkeyPatch) -> None:
    real = Journal.go_on

    def go_on(self: Journal, _step_ns: int, rest: Any, at_ns: int, mark: Any) -> None:
        real(self, at_ns, rest, at_ns, mark)

    patch.setattr(Journal, "go_on", go_on)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (_timers_lost, "away"),
        (_media_lost, "live"),
        (_lease_kept, "audio"),
        (_tokens_of_the_first, "away"),
        (_rest_of_a_step_is_late, "openai"),
    ],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_a_planted_bug_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant, name: str
) -> None:
    """The kills would be green for nothing."""
    plant(monkeypatch)
    try:
        _, failures = kill_everywhere(name, tmp_path)
    except (AssertionError, ExceptionGroup):
        return  # the scripted model itself saw it
    assert failures
