"""What all sessions of OpenAI's dialects share: their events have ids, and sound has any size."""

from __future__ import annotations

import attrs

from ..values.digest import derive_id
from ..values.errors import ErrorCode
from ..values.limits import APPEND_S_MAX
from ..values.messages import ErrorReport, ServerMessage
from ..values.model import SAMPLE16_BYTES
from ..values.requests import AppendSound
from ..values.sound import Coding
from ..values.utf8 import Refused
from ..wire.dialects.live_answers import EVENT
from .core import Core


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
