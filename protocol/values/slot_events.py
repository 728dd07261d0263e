"""Events of a session's slot: leased, lost, revoked, rebuilt on another one, returned."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class SlotLeased:
    """A slot is the session's until it is released; `lease` is the lease's generation."""

    at_ns: int
    lease: int
    slot: int


@attrs.frozen(kw_only=True)
class BackendLost:
    """The backend or its worker is gone."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class LeaseRevoked:
    """The slot's worker is drained, or lost: the session moves between two model calls."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class Rebuilt:
    """The model on a new slot has the session's past.

    Attributes:
        steps: the units, or the chunks of an utterance, that it was fed.
        batches: of a rebuild in long prefills, the units of each; empty if each unit was fed as
            recorded, so that the model's state is the same byte for byte.
        cost_us: the time it took.
    """

    at_ns: int
    lease: int
    steps: int
    batches: tuple[int, ...] = ()
    cost_us: int = 0


@attrs.frozen(kw_only=True)
class RebuildFailed:
    """The session's past cannot be brought to the model on the new slot."""

    at_ns: int
    lease: int


@attrs.frozen(kw_only=True)
class BackendReleased:
    """The slot's cleanup is done and the slot is back in its pool (B5)."""

    at_ns: int
    lease: int
