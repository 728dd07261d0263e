"""A script's faults, and the rules to which it holds its callers: slots, context, order of calls.

A broken rule of ARCHITECTURE.md is an `AssertionError`, kept for callers that swallow it.
"""

from __future__ import annotations

from typing import Final, Literal, NoReturn

import attrs

from .base import BackendError, BackendGone, ContextFull

US_PER_S: Final = 1_000_000
Fault = Literal["fail", "context_full", "gone", "hang"]
"""An error, a refusal, a lost worker, or a call that never returns."""
FAULTS: Final[dict[Fault, type[BackendError]]] = {
    "fail": BackendError,
    "context_full": ContextFull,
    "gone": BackendGone,
}


@attrs.frozen
class Rules:
    """One backend's slots and rules, and the violations in order."""

    slots: int
    context_limit: int
    violations: list[str] = attrs.field(factory=list, init=False)
    held_slots: set[int] = attrs.field(factory=set, init=False)

    def hold(self, slot: int) -> None:
        """Take a slot."""
        if slot in self.held_slots or not 0 <= slot < self.slots:
            self.violate(f"B5: slot {slot} of {self.slots} is not released, or not ours")
        self.held_slots.add(slot)

    def violate(self, rule: str) -> NoReturn:
        """Keep and raise a broken rule."""
        self.violations.append(rule)
        raise AssertionError(rule)
