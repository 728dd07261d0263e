"""A run: rounds of cases drawn by Hypothesis; findings are reduced and kept.

Each round has its own seed, made from the run's. Only findings are kept: no database, and no memory
that grows. Later rounds skip known findings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from .case import Case, Finding, Step, write_case
from .plans import Names, cases
from .play import FuzzerError
from .report import Found, Outcome, Tally

ROUND_EXAMPLES: Final = 200
"""Enough for Hypothesis to vary its draws; few enough to report, and to forget."""
SHRINK_S: Final = 30.0
"""For reducing one finding; then it is small enough to read."""
FINDINGS_MAX: Final = 50
"""A run with so many has done its work."""
SEEDS: Final = 1_000_003
"""Above the rounds of any run, and prime: runs share no seeds."""


class Target(Protocol):
    """Plays cases to a server."""

    @property
    def is_local(self) -> bool:
        """Whether the server is in memory; see `plans.cases`."""
        ...

    def run(self, case: Case) -> Outcome:
        """Play a case."""
        ...


class _FoundError(Exception):
    """A case has a finding; it makes Hypothesis reduce the case."""


@attrs.frozen(kw_only=True)
class Budget:
    """The end of a run: the bound that is reached first; None for no bound."""

    seconds: float | None = None
    examples: int | None = None

    def is_spent(self, examples: int, elapsed_s: float) -> bool:
        """Whether a bound is reached."""
        is_late = self.seconds is not None and elapsed_s >= self.seconds
        return is_late or (self.examples is not None and examples >= self.examples)


class Campaign:
    """One run over the dialects and modes of `names`; `clock` gives monotonic seconds.

    `on_progress` is called after each case, `on_found` once with each reduced finding.
    """

    def __init__(
        self,
        target: Target,
        names: Names,
        *,
        seed: int,
        budget: Budget,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[Tally], None] = lambda _: None,
        on_found: Callable[[Found], None] = lambda _: None,
    ) -> None:
        self.tally = Tally()
        self._target = target
        self._strategy = cases(names, is_local=target.is_local)
        self._seed = seed
        self._budget = budget
        self._clock = clock
        self._on_progress = on_progress
        self._on_found = on_found
        self._known: set[Finding] = set()
        self._began_s = clock()

    def run(self) -> Tally:
        """Run until the budget is spent; a `FuzzerError` leaves earlier findings in `tally`."""
        while not self._is_over():
            seed = self._seed * SEEDS + self.tally.rounds
            left = ROUND_EXAMPLES
            if self._budget.examples is not None:
                left = min(left, self._budget.examples - self.tally.examples)
            found = _Round(self, seed, left).run()
            self.tally.rounds += 1
            if found is not None:
                self._known.add(found.finding)
                self.tally.found.append(found)
                self._on_found(found)
            self._progress()
        return self.tally

    def _is_over(self) -> bool:
        is_spent = self._budget.is_spent(self.tally.examples, self._elapsed_s())
        return is_spent or len(self.tally.found) >= FINDINGS_MAX

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _progress(self) -> None:
        self.tally.elapsed_s = self._elapsed_s()
        self._on_progress(self.tally)


class _Round:
    """One round: it ends with the first new finding, reduced."""

    def __init__(self, campaign: Campaign, seed: int, examples: int) -> None:
        self._of = campaign
        self._seed = seed
        self._examples = examples
        self._sought: Finding | None = None
        self._best: tuple[Case, Outcome] | None = None
        self._shrinks_until_s = 0.0

    def run(self) -> Found | None:
        """Draw the cases; return the finding, if any."""
        try:
            _drawing(self._seed, self._examples, self._of._strategy, self._examine)()
        except (_FoundError, hypothesis.errors.HypothesisException, BaseExceptionGroup):
            if self._best is None:
                raise
        except Exception as error:
            raise FuzzerError(f"{type(error).__name__}: {error}") from error
        if self._best is None or self._sought is None:
            return None
        self._trim()
        case, outcome = self._best
        steady = [self._sought in self._play_again(case).findings for _ in range(2)]
        finding = next(one for one in outcome.findings if one == self._sought)
        return Found(
            finding=finding, case=case, outcome=outcome, seed=self._seed, is_steady=all(steady)
        )

    def _examine(self, case: Case) -> None:
        of = self._of
        if self._sought is None:
            if of._is_over():
                return
            outcome = self._play(case)
            of.tally.count(case, outcome)
            of._progress()
            if not outcome.findings:
                return
            # Later findings of a case are mostly consequences of the first.
            if outcome.findings[0] in of._known:
                of.tally.repeated += 1
                return
            self._sought = outcome.findings[0]
            self._shrinks_until_s = of._clock() + SHRINK_S
        elif of._clock() > self._shrinks_until_s:
            return
        else:
            outcome = self._play(case)
        if self._keep(case, outcome):
            raise _FoundError

    def _keep(self, case: Case, outcome: Outcome) -> bool:
        """Whether a case has the sought finding; keeps the smallest."""
        if self._sought not in outcome.findings:
            return False
        if self._best is None or _size(case) <= _size(self._best[0]):
            self._best = case, outcome
        return True

    def _trim(self) -> None:
        """Leave out steps one by one, while the finding stays."""
        assert self._best is not None
        at = len(self._best[0].steps) - 1
        while at >= 0 and self._of._clock() <= self._shrinks_until_s:
            case = self._best[0]
            if at < len(case.steps):
                steps = case.steps[:at] + case.steps[at + 1 :]
                less = attrs.evolve(case, steps=steps)
                self._keep(less, self._play_again(less))
            at -= 1

    def _play(self, case: Case) -> Outcome:
        self._of.tally.plays += 1
        return self._of._target.run(case)

    def _play_again(self, case: Case) -> Outcome:
        self._of.tally.plays += 1
        return play_again(self._of._target, case)


def _size(case: Case) -> tuple[int, int, int]:
    """A case's size for its reader: messages, steps, text."""
    return (case.messages, len(case.steps), sum(len(repr(step)) for step in case.steps))


def _drawing(
    seed: int, examples: int, strategy: st.SearchStrategy[Case], examine: Callable[[Case], None]
) -> Callable[[], None]:
    """Make a Hypothesis test to be run by hand."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max(1, examples),
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(strategy)
    def draw(case: Case) -> None:
        examine(case)

    return draw


def play_again(target: Target, case: Case) -> Outcome:
    """Play one case as a round would, with the same random values of Hypothesis."""
    found: list[Outcome] = []
    _drawing(0, 1, st.just(case), lambda drawn: found.append(target.run(drawn)))()
    return found[-1]


def save(found: Found, folder: Path, number: int, facts: dict[str, object]) -> Path:
    """Write a finding's transcript into a folder, made if missing, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:02}-{found.finding.kind}-{found.case.dialect}.jsonl"
    told: tuple[Step, ...] = found.outcome.told or found.case.steps
    more = {"seed": found.seed, "steady": found.is_steady, **facts}
    write_case(path, found.case, found.finding, told, more)
    return path
