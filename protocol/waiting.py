"""A session's place in the queue, and what its client is told of it.

A client is told its place at once when it moved, and a new estimate alone at most every
`ESTIMATE_INTERVAL_S` (the wire decisions).
"""

from __future__ import annotations

import attrs

from . import events as ev
from .core import Core
from .limits import ESTIMATE_INTERVAL_S, NS_PER_S
from .messages import Queued, QueuePlace, QueueUpdate
from .state import Course


@attrs.define
class Waiting:
    """What a session remembers of its place.

    Attributes:
        core: the session's state and voice.
        place: as it was told last; None where it was told none, for the slot that it waits for.
        told_ns: when that was.
    """

    core: Core = attrs.field(eq=False)
    place: QueuePlace | None = None
    told_ns: int = 0

    def moved(self, event: ev.TicketMoved) -> None:
        """Tell the client its place, if there is something new to tell."""
        core, told, place = self.core, self.place, event.place
        if core.is_closed or not core.waits_for_slot or told == place:
            return
        if core.course is Course.TRANSCRIPTION:
            return  # 003 has no word for it
        if told is not None:
            moved = (told.position, told.queue_length) != (place.position, place.queue_length)
            age_ns = core.now_ns - self.told_ns
            if not moved and age_ns < ESTIMATE_INTERVAL_S * NS_PER_S:
                return
        self.place, self.told_ns = place, core.now_ns
        core.say(Queued(place=place) if told is None else QueueUpdate(place=place))

    def left(self) -> None:
        """It waits no more, by its own wish."""
        self.core.waits_for_slot = False

    def cancelled(self) -> None:
        """An operator deleted its ticket."""
        self.core.waits_for_slot = False
        self.core.end("cancelled")
