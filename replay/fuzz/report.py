"""The results of a case, and of a whole run; texts are short, and the same in each run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import attrs

from .case import Case, Finding, Step

SHOWN_CHARS: Final = 200
"""Characters of a text that is shown."""
PAIRS_MAX: Final = 20_000
"""Gates, messages and answers make some hundreds; a hostile server could make more."""
Pair = tuple[str, str, str]
"""Dialect and gate, the message, and its answer."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The results of one case: findings in order, steps of a transcript, and counted pairs."""

    findings: tuple[Finding, ...]
    told: tuple[Step, ...]
    pairs: Counter[Pair]


@attrs.frozen(kw_only=True)
class Found:
    """A finding and its smallest case, with the seed of its round; steady if it came each time."""

    finding: Finding
    case: Case
    outcome: Outcome
    seed: int
    is_steady: bool


@attrs.define
class Tally:
    """The results of a run so far; its size is bounded.

    `examples` are cases played, with their `messages`; `plays` adds those of shrinking. `repeated`
    counts known findings that came again.
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
        """All of it as JSON."""
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


def plain(text: str) -> str:
    """A text without its digits, shortened: the same in each run."""
    words = "".join("n" if char.isdigit() else char for char in text)
    return words[:SHOWN_CHARS]


def without_sound(value: Any) -> Any:
    """A body with its long texts, which are sound, shortened."""
    if isinstance(value, dict):
        return {key: without_sound(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:40]}... ({len(value)} characters)"
    return value
