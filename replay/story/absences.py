"""When a session had no client: it lost its connection, and came back on another one or did not."""

from __future__ import annotations

import attrs

from protocol.values import events as ev
from protocol.values.errors import CLOSE_NORMAL


@attrs.frozen(kw_only=True)
class Absence:
    """A time without a connection, from the record `seq`.

    Attributes:
        to_ns: when the client was back; None if it did not come back.
        slept: the session gave its slot back meanwhile.
        steps: units or seconds that the model on another slot was fed again; 0 if there were none.
    """

    at_ns: int
    to_ns: int | None = None
    slept: bool = False
    steps: int = 0
    seq: int = attrs.field(default=0, eq=False)


class Absences:
    """Follows the client of a session that can be resumed; of others it notes nothing."""

    def __init__(self) -> None:
        self.told: list[Absence] = []
        self._can_resume = self._keeps_slot = False
        self._is_waking = False

    def take(self, event: ev.Event, seq: int) -> None:
        """Take an event."""
        match event:
            case ev.ConnectionOpened(resume_hash=token, mode=mode):
                self._can_resume, self._keeps_slot = bool(token), mode != "chat"
            case ev.Forked(at_ns=at_ns, resume_hash=token):
                self._can_resume, self._is_waking = bool(token), False
                if self._is_away:
                    self.told[-1] = attrs.evolve(self.told[-1], to_ns=at_ns)
            case ev.PeerGone(code=code) if self._can_resume and code == CLOSE_NORMAL:
                pass
            case ev.PeerGone(at_ns=at_ns) | ev.SendFailed(at_ns=at_ns) if self._can_resume:
                self.told.append(Absence(at_ns=at_ns, seq=seq))
            case ev.PeerAttached(at_ns=at_ns) if self._is_away:
                self.told[-1] = attrs.evolve(self.told[-1], to_ns=at_ns)
            case ev.BackendLost():
                self._is_waking = False

    @property
    def _is_away(self) -> bool:
        return bool(self.told) and self.told[-1].to_ns is None

    def release(self, *, is_moving: bool) -> None:
        """Note that a slot is given back in a session that goes on; `is_moving`: it was lost."""
        if self._is_away and self._keeps_slot and not is_moving:
            self.told[-1] = attrs.evolve(self.told[-1], slept=True)
            self._is_waking = True

    def rebuilt(self, event: ev.Rebuilt) -> bool:
        """Whether a rebuild is that of a session that slept, and no move."""
        is_it, self._is_waking = self._is_waking, False
        if is_it:
            self.told[-1] = attrs.evolve(self.told[-1], slept=True, steps=event.steps)
        return is_it
