"""The limits of one session as its server has resolved them: a part of its first event.

A setting that steers a session's course must stand in its log; so a constant of `limits` that an
operator may set, or that depends on the model, reaches the machine by this.
"""

from __future__ import annotations

import attrs

from .limits import IDLE_S, PAUSE_S, SOUND_BYTES_MAX, UNITS_PENDING_MAX
from .model import SlidingWindow


@attrs.frozen(kw_only=True)
class SessionLimits:
    """The settings that bound one session, as resolved at its start.

    Attributes:
        session_s: total time, queueing and idling included.
        init_wait_s: time for the init once a slot is assigned.
        cleanup_wait_s: time for the calls in flight after the session's end.
        context_tokens: the backend's context limit.
        sliding_windows: the window policies that the backend supports.
        can_rollback: the backend can undo a failed unit.
        close_on_recording_failure: end the session when its log fails; else go on and report it.
        idle_s: time between two turns of chat, or of a transcription's silence.
        pause_s: longest pause.
        call_wait_s: longest time of a model call without a sign of life; 0 waits for ever.
        models: the names by which a transcription's model may be chosen.
        sound_bytes: PCM16 of a transcription that may wait for the model.
        rebuild_wait_s: wait for another slot after the loss of the worker; 0: the session ends.
        rebuild_units: units that may wait while the model is brought back, and until they are run.
        can_speak: the model can be made to speak.
        can_see: the model sees the pictures of items.
        transcriber: the model that writes down what the user says; empty without one.
        barge_in: the user's speech stops the model's.
        can_repeat: the model gives an interrupted turn's answer again, piece by piece.
        detach_s: time without a connection for which a session that can be resumed keeps its slot.
        resume_s: time without a connection after which it ends.
    """

    session_s: int
    init_wait_s: int
    cleanup_wait_s: int
    context_tokens: int
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    can_rollback: bool = True
    close_on_recording_failure: bool = False
    idle_s: int = IDLE_S
    pause_s: int = PAUSE_S
    call_wait_s: int = 0
    models: tuple[str, ...] = ()
    sound_bytes: int = SOUND_BYTES_MAX
    rebuild_wait_s: int = 0
    rebuild_units: int = UNITS_PENDING_MAX
    can_repeat: bool = False
    can_speak: bool = False
    can_see: bool = False
    transcriber: str = ""
    barge_in: bool = False
    detach_s: int = 0
    resume_s: int = 0
