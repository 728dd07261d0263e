"""The rules to which one backend's scripts hold their callers: slots, context, order of calls.

A broken rule of ARCHITECTURE.md is an `AssertionError`, kept for callers that swallow it.
"""

from __future__ import annotations

from typing import NoReturn

import attrs


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
