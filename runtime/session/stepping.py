"""Steps one session, event by event.

Each event is appended to the log and stepped, its effects are appended, and only then performed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.state import State
from protocol.values.utf8 import Frame

from ..telemetry.watching import Watcher
from .journal import Journal
from .performing import Performer


@attrs.frozen(kw_only=True)
class Stepper:
    """Steps a session.

    Attributes:
        session: it.
        journal: appends to its log, if it has one.
        performer: performs effects.
        watcher: sees events and effects; None for none.
        has_room: whether there is room for so many more early bytes.
    """

    session: Session
    journal: Journal
    performer: Performer
    watcher: Watcher | None
    has_room: Callable[[int], bool]

    def take(self, at_ns: int, frames: Sequence[Frame]) -> int:
        """Take a client's first message, or, if they bring sound that is only kept, several.

        `frames`: messages that came together. Returns the number of those taken.
        """
        messages = self.session.foresee(frames)
        events = [
            ev.FrameReceived(at_ns=at_ns, frame=frame) for frame in frames[: len(messages) or 1]
        ]
        if not messages:
            self.step(events[0])
            return 1
        self.journal.append_event(*events)
        self.session.keep(at_ns, messages)
        if self.watcher is not None:
            self.watcher.heard(events, messages, self.session)
        return len(events)

    def step(self, event: ev.Event) -> None:
        """Step an event."""
        session = self.session
        if isinstance(event, ev.FrameReceived):
            if session.early_bytes == 0 and not self.has_room(len(event.frame or b"")):
                event = attrs.evolve(event, has_room=False)
            event = session.shortened(event)
        self.journal.append_event(event)
        self.perform(event, session.step(event))

    def perform(self, event: ev.Event, effects: tuple[ef.Effect, ...]) -> None:
        """Append the effects of a stepped event, and perform them."""
        for effect in effects:
            if isinstance(effect, ef.ForgetRecording):
                self.journal.forget()
        ready = self.journal.append_effects(self.session, event, effects)
        for effect in effects:
            self.performer.perform(effect, ready, event.at_ns)
        if self.session.state is State.CLOSED:
            self.performer.stop()
        if self.watcher is not None:
            self.watcher.saw(event, effects, self.session)
