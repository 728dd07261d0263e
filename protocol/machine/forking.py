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
from ..values.errors import ErrorCode
from ..values.requests import ClientMessage, Init
from ..values.state import BEGINNINGS, State
from ..values.utf8 import Refused
from ..wire.dialects import first_dialect
from .beginning import Beginning, PendingInit
from .unit_loop import Phase

AT_REST: Final = frozenset({Phase.IDLE, Phase.FINALIZING, Phase.ROLLING_BACK})
"""What a rebuild stands for; a unit that runs, or a model that is opened, is no past."""
_KEPT: Final = (
    "a fork keeps the prompt, the voice and the settings of its recording: leave them out"
)


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
        self.dialect = first_dialect(self.opened.mode, self.opened.endpoint)
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

    def refused(self, message: ClientMessage) -> Refused | None:
        """Refuse an init that would change what the model was opened with."""
        if self.is_forking and isinstance(message, Init) and _asks_for_another(message):
            return Refused(code=ErrorCode.INVALID_PAYLOAD, message=_KEPT)
        return super().refused(message)

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


def _asks_for_another(init: Init) -> bool:
    """Whether an init has what opens a model."""
    plain = Init(instructions="")
    names = ("instructions", "ref_audio", "tts_ref_audio", "max_slice_nums", "config")
    return any(getattr(init, name) != getattr(plain, name) for name in names)
