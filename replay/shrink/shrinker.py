"""The search for a smaller log that still fails: delta debugging over events, then simpler events.

    groups left out -> events left out -> events made simpler -> again, until nothing is left to do

- Larger pieces first, and later before earlier ones: the same log and command give the same result.
- An event first goes with its group: a client's frame with its answers.
- No candidate is tried twice. The best log so far is always a file.
- It ends when nothing can be left out or simplified by itself, or when the runs are used up.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs

from protocol.values import events as ev
from recorder.format.records import Fields

from ..rerun.remake import RemakeError
from .candidate import Change, Shape, build, origin_of, shape_of
from .simpler import STEPS, Step

Fails = Callable[[Path], bool]


class NoFailureError(ValueError):
    """Nothing to shrink: the log, or its remade events, do not fail."""


class OutOfRunsError(Exception):
    """The runs are used up."""


@attrs.define
class Progress:
    """The search's progress: runs of `fails`, and the best log's events and bytes."""

    runs: int = 0
    events: int = 0
    file_bytes: int = 0
    stage: str = ""


class Shrinker:
    """One search; the log is not changed, candidates are in `folder`.

    `fails` says whether a log fails; after its `KeyboardInterrupt` the best log stays. It is run
    `runs_max` times at most, with a call of `watch` before each. `best`, the smallest failing log
    so far, exists once `begin` has returned.
    """

    def __init__(
        self,
        log: Path,
        folder: Path,
        fails: Fails,
        *,
        runs_max: int,
        watch: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.best: Final = folder / log.name
        self.progress = Progress()
        self._log: Final = log
        self._candidate: Final = folder / "candidate" / log.name
        self._fails: Final = fails
        self._runs_max: Final = runs_max
        self._watch: Final = watch
        self._tried: set[bytes] = set()
        self._shape = Shape(events=0, groups=())
        self._origin: Fields = {}

    def begin(self) -> None:
        """Check that the log fails, and that it still does when it is made again.

        Raises:
            NoFailureError: it does not.
            RemakeError: it cannot be made again.
            RecorderError: it cannot be read.
        """
        self._candidate.parent.mkdir()
        self._origin = origin_of(self._log)
        self.progress.stage = "the log itself"
        if not self._asks(self._log):
            raise NoFailureError("the command does not fail on the log")
        self.progress.stage = "the log, made again"
        if not self._accepts(self._log, lambda _, event: event):
            raise NoFailureError(
                "the command fails on the log and not on one that this version makes of its events:"
                " the failure is not in them (is the log damaged, or does it not replay?)"
            )

    def run(self) -> bool:
        """Search; return whether nothing smaller is left to try.

        `RecorderError`: a candidate cannot be read back; `OSError`: the disk refused.
        """
        try:
            is_smaller = True
            while is_smaller:
                is_smaller = self._leave_out("groups", by_group=True)
                is_smaller |= self._leave_out("events", by_group=False)
                is_smaller |= self._simplify()
        except OutOfRunsError:
            return False
        return True

    # -- fewer events ---------------------------------------------------------------------------

    def _leave_out(self, stage: str, *, by_group: bool) -> bool:
        """Leave out runs of groups or events, half of all at first; return whether any was."""
        self.progress.stage = stage
        found = False
        size = len(self._starts(by_group)) // 2
        while size:
            found |= self._leave_out_each(size, by_group)
            size = min(size, len(self._starts(by_group))) // 2
        return found

    def _leave_out_each(self, size: int, by_group: bool) -> bool:
        found = False
        end = len(self._starts(by_group))
        while end > 0:
            starts = [*self._starts(by_group), self._shape.events]
            end = min(end, len(starts) - 1)
            begin = max(0, end - size)
            dropped = range(max(1, starts[begin]), starts[end])
            if dropped and self._accepts(self.best, _without(dropped)):
                found = True
            end = begin
        return found

    def _starts(self, by_group: bool) -> Sequence[int]:
        return self._shape.groups if by_group else range(self._shape.events)

    # -- simpler events -------------------------------------------------------------------------

    def _simplify(self) -> bool:
        """Make events simpler, all at once if possible; return whether any was."""
        found = False
        for number, step in enumerate(STEPS, start=1):
            self.progress.stage = f"simpler events, {number} of {len(STEPS)}"
            found |= self._simplify_within(step, range(self._shape.events))
        return found

    def _simplify_within(self, step: Step, places: range) -> bool:
        if not places:
            return False
        if self._accepts(self.best, _simpler(step, places)):
            return True
        if len(places) == 1:
            return False
        middle = len(places) // 2
        late = self._simplify_within(step, places[middle:])
        return self._simplify_within(step, places[:middle]) or late

    # -- candidates -----------------------------------------------------------------------------

    def _accepts(self, source: Path, change: Change) -> bool:
        """Make a candidate; if it is new and fails, it becomes the best log."""
        self._candidate.unlink(missing_ok=True)
        try:
            build(source, self._candidate, change, self._origin)
        except RemakeError:
            return False
        with self._candidate.open("rb") as file:
            name = hashlib.file_digest(file, "blake2b").digest()
        if name in self._tried:
            return False
        self._tried.add(name)
        if not self._asks(self._candidate):
            return False
        os.replace(self._candidate, self.best)
        self._shape = shape_of(self.best)
        self.progress.events = self._shape.events
        self.progress.file_bytes = self.best.stat().st_size
        return True

    def _asks(self, path: Path) -> bool:
        if self.progress.runs >= self._runs_max:
            raise OutOfRunsError
        self.progress.runs += 1
        self._watch(self.progress)
        return self._fails(path)


def _without(dropped: range) -> Change:
    return lambda place, event: None if place in dropped else event


def _simpler(step: Step, places: range) -> Change:
    def change(place: int, event: ev.Event) -> ev.Event:
        return step(event) if place in places else event

    return change
