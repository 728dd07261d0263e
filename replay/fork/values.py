"""What a fork is asked for, what comes of it, and what can go wrong: plain values.

    ForkError
     ├── ForkRefusedError    what is asked makes no sense, or cannot be changed at that unit
     └── CannotForkError     this recording cannot be taken up here: its model, or the recording

Messages say what to do instead, where there is something.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

Setting = bool | int | float | str
NO_SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType({})


class ForkError(Exception):
    """There is no fork."""


class ForkRefusedError(ForkError):
    """What is asked makes no sense for this recording."""


class CannotForkError(ForkError):
    """The recording cannot be taken up again here."""


@attrs.frozen(kw_only=True)
class Change:
    """What is to be otherwise.

    Attributes:
        at: from which unit on.
        force_listen: that unit has to listen.
        pcm: what is heard from that unit on, float32 LE, 16 kHz mono, and silence after it; None
            leaves what was recorded.
        seed: of the session's random choices; None leaves it.
        settings: of the session's init, by name.
        model: another model's name; None takes the one that the recording names.
    """

    at: int
    force_listen: bool = False
    pcm: bytes | None = attrs.field(default=None, repr=False)
    seed: int | None = None
    settings: Mapping[str, Setting] = NO_SETTINGS
    model: str | None = None

    @property
    def is_of_the_opening(self) -> bool:
        """Whether something changes that a model is told once, when the session opens."""
        return self.seed is not None or bool(self.settings) or self.model is not None


@attrs.frozen(kw_only=True)
class Prefix:
    """The units before the fork: what the model made of them, beside what was recorded.

    Attributes:
        units: how many there are.
        held: those of them that the model would have answered otherwise, and was made to answer as
            recorded (`runtime.backends.forcing`).
        otherwise: those of them that came out otherwise all the same.
        first: the first difference, in words; None where there is none.
    """

    units: int = 0
    held: int = 0
    otherwise: int = 0
    first: str | None = None


@attrs.frozen(kw_only=True)
class Forked:
    """A fork that was made.

    Attributes:
        recording_id: its name.
        parent: the recording that it comes from.
        parent_seq: the parent's event by which the unit began: everything before it is the same.
        unit: the unit from which on it is a session of its own.
        model: who made it.
        units: units started in it.
        prefix: the units before that one.
        ended_early: the fork went on when the recording was over, so that its client left it.
    """

    recording_id: str
    parent: str
    parent_seq: int
    unit: int
    model: str
    units: int
    prefix: Prefix
    ended_early: bool
