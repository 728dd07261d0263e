"""What came of cases: of one, and of a whole run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import attrs

from .case import Case, Finding, Step

PAIRS_MAX: Final = 20_000
"""Gates times message types times answers are some hundreds; a hostile server could make more."""
Pair = tuple[str, str, str]
"""Dialect and gate, the message, and its answer."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of one case.

    Attributes:
        findings: what a server must not do, the first first.
        told: what happened, as steps of a transcript.
        pairs: what was said where, and what the answer was; counted.
    """

    findings: tuple[Finding, ...]
    told: tuple[Step, ...]
    pairs: Counter[Pair]


@attrs.frozen(kw_only=True)
class Found:
    """A finding and the smallest case that has led to it.

    Attributes:
        finding: what it is.
        case: what leads to it.
        outcome: of playing it.
        seed: of the round in which it was found.
        is_steady: it came again each time.
    """

    finding: Finding
    case: Case
    outcome: Outcome
    seed: int
    is_steady: bool


@attrs.define
class Tally:
    """What a run has seen so far; its size is bounded.

    Attributes:
        examples: cases that were played, those of shrinking not among them.
        plays: cases that were played in all.
        messages: messages that were sent in `examples`.
        rounds: rounds that are over.
        elapsed_s: seconds.
        pairs: what was said where, and what the answer was; counted.
        found: the findings, each once.
        repeated: how often a finding came again after it was known.
    """

    examples: int = 0
    plays: int = 0
    messages: int = 0
    rounds: int = 0
    elapsed_s: float = 0.0
    pairs: Counter[Pair] = attrs.Factory(Counter)
    found: list[Found] = attrs.Factory(list)
    repeated: int = 0

    def count(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self.examples += 1
        self.messages += case.messages
        for pair, times in outcome.pairs.items():
            if pair in self.pairs or len(self.pairs) < PAIRS_MAX:
                self.pairs[pair] += times

    def to_json(self) -> dict[str, Any]:
        """Say all of it as JSON."""
        return {
            "examples": self.examples,
            "plays": self.plays,
            "messages": self.messages,
            "rounds": self.rounds,
            "elapsed_s": round(self.elapsed_s, 3),
            "examples_per_s": round(self.examples / max(self.elapsed_s, 1e-9), 1),
            "findings": [
                {
                    "kind": found.finding.kind,
                    "label": found.finding.label,
                    "detail": found.finding.detail,
                    "messages": found.case.messages,
                    "seed": found.seed,
                    "steady": found.is_steady,
                }
                for found in self.found
            ],
            "repeated": self.repeated,
            "coverage": [
                {"state": state, "message": message, "answer": answer, "times": times}
                for (state, message, answer), times in sorted(self.pairs.items())
            ],
        }
