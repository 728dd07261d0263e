"""What the scripts of one backend hold their callers to: its slots, its context and the rules.

A call that breaks a rule of ARCHITECTURE.md raises an `AssertionError` naming the rule, and is kept
for callers that swallow it.
"""

from __future__ import annotations

from typing import NoReturn

import attrs


@attrs.frozen
class Rules:
    """The rules of one backend, and who broke them.

    Attributes:
        slots: that the backend has.
        context_limit: tokens.
        violations: the rules that callers broke, in order.
        held_slots: slots with a session, also one that opens.
    """

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
