"""A session that outlives its connection: its client may come back to it on another one.

attached -> lost -> detached, with its slot -> asleep, without one -> attached -> rebuilt

A client asks for it by its address, and so for two numbers in every frame: `seq`, the frame's own,
and `ack`, how many of the client's messages the session has. With both, nothing is lost or told
twice when it comes back: it says the last `seq` that it has, the frames after it are read from the
log, and it sends again what `ack` does not count. Only a session that is recorded can be resumed.
Who may come back is decided outside; the machine hears of those who may (`PeerAttached`).
"""

from __future__ import annotations

from typing import Final

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import CLOSE_NORMAL
from ..values.resuming import Resumable
from ..values.state import State
from ..wire.dialects.resuming import RESUMABLE, UNRESUMABLE, numbered
from .core import Core

TOKEN: Final = "$token"
"""Stands for the token in the log, and is replaced where a connection is greeted."""


@attrs.define(kw_only=True, eq=False)
class Resuming(Core):
    """State of the client's connection.

    Attributes:
        is_detached: no client is connected.
        is_asleep: it gives its slot back, or has none, until its client comes back.
        frames_received: messages of the client.
    """

    is_detached: bool = False
    is_asleep: bool = False
    frames_received: int = 0

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it."""
        return self.has_numbers and self.recording == "on"

    @property
    def has_numbers(self) -> bool:
        """Whether its client asked for a session that can be resumed."""
        return bool(self.opened.resume_hash)

    # -- what a course says of itself -----------------------------------------------------------

    @property
    def may_sleep(self) -> bool:
        """Whether it can do without the slot that it holds, or holds none."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give the slot back when no model call is in progress."""

    def wake(self) -> None:
        """Ask for a slot again."""

    # -- the client comes and goes --------------------------------------------------------------

    def greet(self) -> None:
        """Tell the client how to come back, on its first connection."""
        if self.has_numbers:
            self._attach(after=self.frames_sent - 1)

    def peer_gone(self, code: int = 0) -> None:
        """Wait for the client, or end the session: the connection is over."""
        if self.is_closed or self.is_detached or not self.is_resumable or code == CLOSE_NORMAL:
            self.lose_peer()
            return
        self.is_detached = True
        self.set_timer("detach", self.opened.limits.detach_s)
        self.set_timer("resume", self.opened.limits.resume_s)

    def peer_attached(self, event: ev.PeerAttached) -> None:
        """Give the new connection what the client has not heard, and go on."""
        self.is_detached = False
        self.cancel_timer("detach")
        self.cancel_timer("resume")
        for name, seconds in self._patience:
            if name in self.timers.pending:
                self.cancel_timer(name)
                self.set_timer(name, seconds)
        self._attach(after=event.after)
        if self.is_closed:
            self.do(ef.Close(code=CLOSE_NORMAL, reason=self.end_reason or ""))
        elif self.is_asleep:
            self.is_asleep = False
            self.wake()

    def _attach(self, after: int) -> None:
        limits = self.opened.limits
        greeting = Resumable(
            recording_id=self.opened.recording_id,
            token=TOKEN if self.is_resumable else "",
            grace_s=limits.detach_s,
            expires_in_s=limits.resume_s,
            next_seq=after + 1,
            ack=self.frames_received,
        )
        frame = RESUMABLE.encode(greeting)
        self.do(ef.Attach(frame=frame, after=after, before=self.frames_sent))

    def heard(self) -> None:
        """Count a message of the client."""
        self.frames_received += 1
        super().heard()

    def number(self, frame: str) -> str:
        """Put the frame's number and the client's into a frame."""
        if not self.has_numbers:
            return frame
        return numbered(frame, seq=self.frames_sent, ack=self.frames_received)

    def forget_recording(self) -> None:
        """Stop recording and remove the log, as the client asked."""
        if self.recording != "off":
            self.recording = "off"
            self.do(ef.ForgetRecording())
            self.not_recorded()

    def not_recorded(self) -> None:
        """Tell the client that it cannot come back any more, or end the session if it has left."""
        if not self.has_numbers or self.is_closed:
            return
        if self.is_detached:
            self.lose_peer()
        else:
            self.say_frame(UNRESUMABLE.encode(Resumable(recording_id="", token="")))

    def timed_out(self, name: ev.TimerName) -> None:
        """Handle a timer that bounds the session, or the wait for its client."""
        if name == "detach":
            self._fall_asleep()
        else:
            super().timed_out(name)

    def bears(self, name: ev.TimerName) -> bool:
        """Whether a client that is away may be silent for longer: its timer is set again."""
        is_borne = self.is_detached and name in dict(self._patience)
        if is_borne:
            self.set_timer(name, self.opened.limits.resume_s)
        return is_borne

    @property
    def _patience(self) -> tuple[tuple[ev.TimerName, int], ...]:
        """Timers of a silent client, in seconds; without one, "resume" bounds the session."""
        return (("idle", self.opened.limits.idle_s), ("pause", self.opened.limits.pause_s))

    def _fall_asleep(self) -> None:
        if self.state is State.ACTIVE and self.may_sleep:
            self.is_asleep = True
            self.sleep()
        else:
            self.lose_peer()
