"""The units of a fork that were held to its parent's: their number and their results.

If a fork changes the opening of the model, the units before the fork's own are *held*: the model is
forced to the recorded decisions (`runtime.model.backends.base`), since its own would differ. So
decisions and speech in their results are the recording's; the inputs, and the model's state after
them, are the model's own. Making a fork and replaying one both use this module.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol.values.model import UnitResult
from recorder.format.records import Fields

from ..shared.fields import below, typed

FORK: Final = "fork"
"""The field of the `config` of a fork's head that holds its changes."""
IS_HELD: Final = "is_held"
"""The entry of `FORK` for the units before `parent.unit`."""
OWN_FIELDS: Final = (
    *("fed_ids", "kv_length", "vision_slices", "vision_tokens", "logits_hash", "margin"),
)
"""The fields of a held unit's result that are the model's own."""


def held_units(head: Fields) -> int:
    """Return how many units, from the first on, were held in the log with this head."""
    is_held = below(below(head, "config"), FORK).get(IS_HELD) is True
    unit = typed(below(head, "parent"), "unit", int)
    return unit if is_held and unit is not None else 0


def hold(recorded: UnitResult, forced: UnitResult) -> UnitResult:
    """Combine the result of a held unit: decisions and speech recorded, the rest as forced."""
    return attrs.evolve(recorded, **{name: getattr(forced, name) for name in OWN_FIELDS})
