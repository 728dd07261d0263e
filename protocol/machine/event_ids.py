"""What all sessions of OpenAI's dialects share: their events have ids, and sound has any size."""

from __future__ import annotations

from typing import Final

import attrs

from ..values.digest import derive_id
from ..values.errors import CLOSE_POLICY, ErrorCode
from ..values.limits import APPEND_S_MAX, MODEL_CHARS_SHOWN, MS_PER_S
from ..values.messages import ErrorReport, ServerMessage
from ..values.model import SAMPLE16_BYTES
from ..values.openai import OpenAISession
from ..values.requests import AppendSound
from ..values.sound import Coding
from ..values.utf8 import Refused
from ..wire.dialects.live_answers import EVENT
from .core import Core

UPDATES_MAX: Final = 16
"""Changes that are told one by one when the session is there: no client sets itself up in more."""


@attrs.define(kw_only=True, eq=False)
class EventIds(Core):
    """A session whose events have ids, and whose errors name the client's event."""

    def say(self, message: ServerMessage) -> None:
        """Send a message; an error names the message that it answers."""
        if isinstance(message, ErrorReport) and self.cause:
            message = attrs.evolve(message, client_event_id=self.cause)
        super().say(message)

    def say_frame(self, frame: str) -> None:
        """Send a frame, with an id of its own."""
        number = derive_id("event", self.opened.recording_id, self.frames_sent)
        super().say_frame(frame.replace(EVENT, f'"event_id":"{number}"', 1))


def size_refusal(message: AppendSound, coding: Coding, rate_hz: int) -> Refused | None:
    """Refuse half a sample, and more sound at once than may wait; None accepts it."""
    size, width = len(message.pcm16), SAMPLE16_BYTES if coding == "audio/pcm" else 1
    most, text = APPEND_S_MAX * rate_hz, ""
    if size % width:
        text = f"{size} bytes, a multiple of {width} is needed (int16)"
    elif size > most * width:
        text = f"{size // width} samples, at most {most} are allowed"
    return Refused(code=ErrorCode.INVALID_PAYLOAD, message=f"$.audio: {text}") if text else None


def first_settings(core: Core) -> OpenAISession:
    """The settings in the Realtime API of a client that has said nothing but its address."""
    limits = core.opened.limits
    return OpenAISession(
        id=core.session_id,
        model=core.opened.label or next(iter(limits.models), ""),
        expires_at=core.opened.created_ms // MS_PER_S + limits.session_s,
    )


def no_model(name: str) -> str:
    """The words for a model that is not served."""
    return f"there is no model {name[:MODEL_CHARS_SHOWN]!r} here"


def is_served(core: Core, name: str) -> bool:
    """Whether a session's model is served; one that is not ends the session."""
    if name in core.opened.limits.models:
        return True
    core.refuse(ErrorCode.MODEL_NOT_FOUND, no_model(name), close_code=CLOSE_POLICY)
    return False
