"""A fork's request, its result and its errors: plain values.

    ForkError
     ├── ForkRefusedError    the request is invalid, or the change is not possible at that unit
     └── CannotForkError     the recording cannot be continued here: its model, or the recording

Messages name an alternative, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from protocol.values.model import UnitResult

Setting = bool | int | float | str
NO_SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({})


class ForkError(Exception):
    """The fork was not made."""


class ForkRefusedError(ForkError):
    """The request is not possible for this recording."""


class CannotForkError(ForkError):
    """The recording cannot be continued here."""


@attrs.frozen(kw_only=True)
class Change:
    """The changes of a fork; None keeps the recorded value.

    Attributes:
        at: the first changed unit.
        force_listen: that unit has to listen.
        pcm: the sound from that unit on, float32 LE, 16 kHz mono, followed by silence.
        seed: of the session's random choices.
        settings: of the session's init, by name.
        model: another model's name.
    """

    at: int
    force_listen: bool = False
    pcm: bytes | None = attrs.field(default=None, repr=False)
    seed: int | None = None
    settings: Mapping[str, Setting] = NO_SETTINGS
    model: str | None = None

    @property
    def is_of_the_opening(self) -> bool:
        """Whether a change takes effect only when the session opens."""
        return self.seed is not None or bool(self.settings) or self.model is not None


@attrs.frozen(kw_only=True)
class Prefix:
    """The units before the fork: the model's results compared with the recording.

    Of `units`, forced decoding changed the answers of `held`; the results of `otherwise` differ
    nevertheless. `first` is the first difference, in words.
    """

    units: int = 0
    held: int = 0
    otherwise: int = 0
    first: str | None = None


Decisions = tuple[bool, Sequence[int], Sequence[int]]
"""Of a unit: whether it listens, the ids decided, and the speech codes."""
Decided = Mapping[int, Decisions]
"""By unit."""


def decisions_of(result: UnitResult) -> Decisions:
    """Return the decisions in a unit's result."""
    return result.is_listen, result.decided_ids, result.codec_ids


@attrs.frozen(kw_only=True)
class Forked:
    """A fork that was made, from its `unit` on.

    Attributes:
        parent_seq: the parent's event by which the unit began: everything before it is equal.
        units: units started in it.
        prefix: the units before that one.
        ended_early: the fork was still running at the recording's end, so that its client left.
    """

    recording_id: str
    parent: str
    parent_seq: int
    unit: int
    model: str
    units: int
    prefix: Prefix
    ended_early: bool
