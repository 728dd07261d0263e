"""Units of a fork that were held to its parent's: which they are, and what is made of them.

Where a fork changes what a model is told when a session opens, the units before the fork's own are
*held*: the model is made to decide what was recorded (`runtime.model.backends.forcing`), for by
itself it would have said something else. So their results have two makers. What was decided and
said is the recording's; what the model was fed, and what that left in it, is its own.

Whoever makes a fork and whoever replays one asks here, so that both make the same of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from protocol.values.model import UnitResult
from recorder.format.records import Fields

FORK: Final = "fork"
"""Where the `config` of a fork's head says what was changed."""
IS_HELD: Final = "is_held"
"""What it says there of the units before `parent.unit`."""
OWN_FIELDS: Final = (
    *("fed_ids", "kv_length", "vision_slices", "vision_tokens", "logits_hash", "margin"),
)
"""Of a held unit's result, what is the model's own."""


def held_units(head: Fields) -> int:
    """Say how many units of a log were held, from its first on.

    Args:
        head: the fields of its `session` record.
    """
    config, parent = head.get("config"), head.get("parent")
    fork = config.get(FORK) if isinstance(config, Mapping) else None
    is_held = isinstance(fork, Mapping) and fork.get(IS_HELD) is True
    unit = parent.get("unit") if isinstance(parent, Mapping) else None
    return unit if is_held and isinstance(unit, int) else 0


def hold(recorded: UnitResult, forced: UnitResult) -> UnitResult:
    """Give the result of a held unit.

    Args:
        recorded: what was decided and said.
        forced: what the model made when it was forced to that.
    """
    return attrs.evolve(recorded, **{name: getattr(forced, name) for name in OWN_FIELDS})
