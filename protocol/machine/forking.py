"""A session that begins from the past of another one: a fork.

copied -> forked -> queued -> slot leased -> the client's init -> rebuilt -> it goes on

Its log begins with what the other session did, up to a unit, so the machine comes to where that one
was. With `Forked` it begins again: a client of its own waits in the queue and sets it up,
and the model is rebuilt (B11) where that of another session is opened.
"""

from __future__ import annotations

from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.state import BEGINNINGS, State
from .beginning import Beginning, PendingInit
from .unit_loop import Phase

AT_REST: Final = frozenset({Phase.IDLE, Phase.FINALIZING, Phase.ROLLING_BACK})
"""What a rebuild stands for; a unit that runs, or a model that is opened, is no past."""


@attrs.define(kw_only=True, eq=False)
class Forking(Beginning):
    """A session that keeps its model, and may begin from another's past."""

    def forget_client(self) -> None:
        """Forget what the other session's client sent and the model has not heard."""

    def forked(self, event: ev.Forked) -> None:
        """Begin again, with the past as it is; ignored if the session was never set up."""
        if self.state is not State.ACTIVE or self.call.phase not in AT_REST:
            return
        self.opened = attrs.evolve(
            self.opened,
            limits=event.limits,
            resume_hash=event.resume_hash,
            recording_notice=event.recording_notice,
            must_record=True,  # the rebuild reads it
        )
        for name in tuple(self.timers.pending):
            self.cancel_timer(name)
        self.state, self.recording, self.is_forking = BEGINNINGS[self.course], "on", True
        self.lease, self.place, self.early = None, None, None
        self.releasing = self.is_draining = self.wants_notices = False
        self.is_moving = self.is_revoked = self.is_repeated = False
        self.is_detached = self.is_asleep = False
        self.losses = self.frames_received = 0
        self.call.settle()
        self.forget_client()
        self.greet()
        self.begin()

    def open_if_decoded(self, pending: PendingInit) -> None:
        """Have the model opened, or brought to the past of a fork."""
        past_s = self.call.index + 1
        if not self.is_forking:
            super().open_if_decoded(pending)
        elif not self.is_moving:
            assert self.lease is not None
            self.set_timer("rebuild", self.opened.limits.rebuild_wait_s + past_s)
            self.call.phase = Phase.REBUILDING
            self.do(ef.Rebuild(lease=self.lease))

    def rebuilt(self, event: ev.Rebuilt) -> None:
        """Go on; the client of a fork hears that its session is set up."""
        if not self.is_forking:
            super().rebuilt(event)
        elif self.is_rebuilding(event.lease):
            self.pending, self.is_forking = None, False
            self.cancel_timer("rebuild")
            self.answered()
            if self.settle():
                self.create()
                self.move_if_due()
