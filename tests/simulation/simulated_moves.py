"""What must be true of a simulated session that loses its worker, or has to leave it (B11).

It goes by the session's events and effects, and shares no code with the machine. Held here:

- What the model says names the past that it was fed (`remembered`). That is the session's own, each
  unit once and in order, wherever the model has been.
- Each unit that is done is answered once, before another one starts.
- A loss ends a session only if it is not recorded, the same call was lost before, or too many
  workers were lost in a row. A rebuild fails only if its log or the model failed.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import LOSSES_MAX
from protocol.values.model import Unit
from runtime.model.backends.scripted import AS_ASKED
from tests.simulation.simulated_backend import remembered, words

ANSWERS = (ev.BackendOpened, ev.UnitDone, ev.UnitFailed, ev.ChunkDone, ev.ChunkFailed)
"""A worker that answers so is no reason for the loss that follows."""


class Moves:
    """The moves of one session.

    Args:
        opened: the session's first event.
        owner: the number of its client.
        report: told of what must not be.

    Attributes:
        past_s: seconds of input that the model was fed, at least.
        moved: the moves so far.
        is_rebuilding: its model is being rebuilt.
    """

    def __init__(self, opened: ev.ConnectionOpened, owner: str, report: Callable[[str], None]):
        self._owner, self._report = owner, report
        self._is_recorded = opened.recording == "on" and opened.limits.rebuild_wait_s > 0
        self._losses, self._is_repeated = 0, False
        self._unit: Unit | None = None
        self._is_running = self.is_rebuilding = False
        self._past = ""
        self._done = self._told = 0
        self.past_s = self.moved = 0

    def follow(
        self, event: ev.Event, effects: tuple[ef.Effect, ...], *, is_answer: bool, may_fail: bool
    ) -> None:
        """Judge a step of a session that lives.

        Args:
            is_answer: it told the client a unit's outcome.
            may_fail: a rebuild of the session may fail.
        """
        is_over = any(isinstance(effect, ef.Close) for effect in effects)
        self._told += is_answer
        if isinstance(event, ev.Rebuilt | ev.RebuildFailed | ev.BackendLost):
            self.is_rebuilding = False
        self._take_event(event, is_over=is_over)
        if isinstance(event, ev.RebuildFailed) and is_over and not may_fail:
            self._report("B11: its rebuild failed, and nothing was wrong")
        for effect in effects:
            self._take_effect(effect)

    def _take_event(self, event: ev.Event, *, is_over: bool) -> None:
        match event:
            case ev.RecordingFailed():
                self._is_recorded = False
            case ev.BackendLost() | ev.BackendOpenFailed(is_lost=True):
                self._lose(is_over=is_over)
            case ev.UnitDone(result=result):
                self._is_running = False
                self._done += 1
                said = words(int(self._owner), result.index, self._past)
                is_asked = self._unit is not None and self._unit.force_speak
                if is_asked and AS_ASKED.text.startswith(result.text):
                    said = result.text  # it had nothing to say, and was made to
                if result.text not in ("", said):
                    self._report(f"B11: the model said {result.text!r}, not {said!r}")
            case ev.Rebuilt():
                self.moved += 1
        if isinstance(event, ANSWERS):
            self._losses, self._is_repeated, self._is_running = 0, False, False

    def _lose(self, *, is_over: bool) -> None:
        is_poison = self._is_running and self._is_repeated
        self._losses += 1
        self._is_repeated |= self._is_running
        self._is_running = False
        if is_over and self._is_recorded and not is_poison and self._losses <= LOSSES_MAX:
            self._report("B11: a loss ended it, and it could have moved")

    def _take_effect(self, effect: ef.Effect) -> None:
        match effect:
            case ef.ForgetRecording():
                self._is_recorded = False
            case ef.Rebuild():
                self.is_rebuilding = True
            case ef.StartUnit(unit=unit):
                if self._told != self._done:
                    text = f"{self._told} answers to {self._done} units that are done"
                    self._report(f"B9: {text}, and unit {unit.index} starts")
                self._unit, self._is_running, self.past_s = unit, True, unit.index + 1
            case ef.StartFinalize(interrupted=interrupted) if self._unit is not None:
                self._past = remembered(self._past, self._unit, interrupted=interrupted)
            case ef.RunChunk(chunk=chunk):
                self._is_running, self.past_s = True, chunk.index + 1
