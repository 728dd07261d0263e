"""A run: rounds of cases drawn by Hypothesis, what they find made small, and kept.

Each round has its own seed, made from the run's, and nothing of it is kept but what was found: no
database, and memory that does not grow with the hours. What a round finds first it makes as small
as it can, by Hypothesis and then by leaving out steps; other findings are for later rounds, which
go on past those that are known.
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
"""Enough for Hypothesis to vary what it has drawn; few enough to report, and to forget."""
SHRINK_S: Final = 30.0
"""Of one finding: what is not small by then is small enough to be read."""
FINDINGS_MAX: Final = 50
"""A run that has found so many has found what it was for."""
SEEDS: Final = 1_000_003
"""Rounds of one run have other seeds than those of the next: a prime above any number of them."""


class Target(Protocol):
    """What cases are played to."""

    @property
    def is_local(self) -> bool:
        """It is in memory; see `plans.cases`."""
        ...

    def run(self, case: Case) -> Outcome:
        """Play a case."""
        ...


class _FoundError(Exception):
    """A case has found something; for Hypothesis, which makes it small."""


@attrs.frozen(kw_only=True)
class Budget:
    """When a run is over: at the first of these that is reached.

    Attributes:
        seconds: of time; None for as long as it takes.
        examples: cases; None for as many as fit.
    """

    seconds: float | None = None
    examples: int | None = None


class Campaign:
    """One run.

    Args:
        target: the server.
        names: the dialects and modes.
        seed: of the run.
        budget: when it is over.
        clock: seconds, going on.
        on_progress: told after each case.
        on_found: told of each finding, once, when it is small.
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
        """Run until the budget is spent.

        Raises:
            FuzzerError: the fuzzer itself is broken; what was found before is in `tally`.
        """
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
        budget, tally = self._budget, self.tally
        is_late = budget.seconds is not None and self._elapsed_s() >= budget.seconds
        is_done = budget.examples is not None and tally.examples >= budget.examples
        return is_late or is_done or len(tally.found) >= FINDINGS_MAX

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _progress(self) -> None:
        self.tally.elapsed_s = self._elapsed_s()
        self._on_progress(self.tally)


class _Round:
    """One round: it ends with the first finding that is new, made small."""

    def __init__(self, campaign: Campaign, seed: int, examples: int) -> None:
        self._of = campaign
        self._seed = seed
        self._examples = examples
        self._sought: Finding | None = None
        self._best: tuple[Case, Outcome] | None = None
        self._shrinks_until_s = 0.0

    def run(self) -> Found | None:
        """Draw the cases; returns what was found, if anything."""
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
            # What comes after the first is most often the same thing seen from elsewhere.
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
        """Whether a case finds what is sought; the smallest that does is kept."""
        if self._sought not in outcome.findings:
            return False
        if self._best is None or _size(case) <= _size(self._best[0]):
            self._best = case, outcome
        return True

    def _trim(self) -> None:
        """Leave out steps, one after the other, as long as it is still found."""
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
    """Measure what a reader has to take in: messages, steps, text."""
    return (case.messages, len(case.steps), sum(len(repr(step)) for step in case.steps))


def _drawing(
    seed: int, examples: int, strategy: st.SearchStrategy[Case], examine: Callable[[Case], None]
) -> Callable[[], None]:
    """Make a test of Hypothesis that is run by hand."""

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
    """Play one case as a round would, with all that Hypothesis makes come again."""
    found: list[Outcome] = []
    _drawing(0, 1, st.just(case), lambda drawn: found.append(target.run(drawn)))()
    return found[-1]


def save(found: Found, folder: Path, number: int, facts: dict[str, object]) -> Path:
    """Write a finding's transcript into a folder.

    Args:
        found: the finding.
        folder: it is made where there is none.
        number: of the finding in its run.
        facts: of the run.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:02}-{found.finding.kind}-{found.case.dialect}.jsonl"
    told: tuple[Step, ...] = found.outcome.told or found.case.steps
    more = {"seed": found.seed, "steady": found.is_steady, **facts}
    write_case(path, found.case, found.finding, told, more)
    return path
