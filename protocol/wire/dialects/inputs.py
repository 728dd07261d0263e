"""The client's input, the same in every dialect except for its place: audio, frames, requests.

Its rows are read and written in `$.input` in `realtime`, in the message itself elsewhere.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from ...values.limits import FRAMES_MAX, INPUT_ID_CHARS_MAX, INSTRUCTIONS_CHARS_MAX, SLICES_MAX
from ..codec import Value, invalid
from ..field import DROPPED, Field
from ..kinds import FLAG, JPEG, NAMED, PROMPTED, Kind, because, integer, text
from ..nested import items
from ..reading import Reading
from ..table import Row

SLICES: Final = integer(1, SLICES_MAX)
"""A slice count (000, max_slice_nums)."""
PROMPT: Final = text(INSTRUCTIONS_CHARS_MAX, holds=PROMPTED)
INPUT_ID: Final = Field("input_id", text(INPUT_ID_CHARS_MAX, 1, holds=NAMED), None, omit=True)
"""The client's own name for its input, returned in the answers to it."""
FORCE_LISTEN: Final = Field("force_listen", FLAG, False)
APPEND_SLICES: Final = Field("max_slice_nums", SLICES, None, omit=True)


def frames(name: str) -> Field:
    """Make the row of an append's pictures; `mode=audio` ignores them."""
    kind = items(JPEG, FRAMES_MAX)
    return Field(name, kind, (), attr="frames", omit=True, aside_in={"audio": ()})


def _record(value: Value, at: Reading) -> bool:
    if not value.flag() and at.context.must_record:
        raise invalid(value.path, "false, but this server records all sessions of this client")
    return bool(value.value)


RECORD: Final = Field(
    "record",
    attrs.evolve(FLAG, read=_record),
    True,
    omit=True,
    rank=9,
)
"""Whether the session may be recorded."""
ASKED: Final[tuple[Row, ...]] = (
    Field("notices", FLAG, False, omit=True, rank=9),
    RECORD,
)
"""A client's wishes for the server in addition to its settings."""


def setting(name: str, kind: Kind, default: object, **more: Any) -> Field:
    """Make the row of a setting, which is written unless it is the default."""
    return Field(name, kind, default, omit=True, **more)


def one_value(name: str, kind: Kind, why: str = "", **more: Any) -> Field:
    """Make the row of a setting with a single allowed value."""
    return Field(name, because(kind, why) if why else kind, None, attr=DROPPED, **more)
