"""The frames of a recorded connection, read as its two ends read them.

Rules: frames are given in the order in which they were recorded, for the client's first init picks
the dialect of `/v1/realtime`; what is no message of that dialect is nothing here, and no error. A
transcription's two sets of names are read alike.

It keeps no session: whether a request was welcome when it came is the machine's to say
(`was_taken`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from protocol import effects as ef
from protocol import events as ev
from protocol.behaviour import NEWEST
from protocol.codec import parse_frame
from protocol.dialects import LEGACY_CHAT, LEGACY_DUPLEX, TRANSCRIPTION
from protocol.dialects.base import Context, Dialect, Json
from protocol.dialects.opening import OPENING, choose
from protocol.errors import RemoteProtocolError
from protocol.limits import FRAME_BYTES_MAX_OF
from protocol.messages import Mode, ServerMessage
from protocol.requests import ClientMessage
from protocol.session import Session
from protocol.utf8 import Frame

from .words import Step

INVALID: Final = "invalid"
"""The kind of a frame that is no JSON object, or was too long."""

_BEGINNINGS: Final[Mapping[ev.Endpoint, Dialect]] = {
    "realtime": OPENING,
    "duplex": LEGACY_DUPLEX,
    "chat": LEGACY_CHAT,
}


class Wire:
    """One connection's dialect, as far as its frames have told.

    Args:
        opened: the session's first event; None where it is lost, which is taken for `/v1/realtime`.

    Attributes:
        mode: what the session carries.
        endpoint: where the client connected.
        dialect: the one in use.
    """

    def __init__(self, opened: ev.ConnectionOpened | None = None) -> None:
        self.mode: Mode = "video" if opened is None else opened.mode
        self.endpoint: ev.Endpoint = "realtime" if opened is None else opened.endpoint
        is_transcription = self.mode == "transcription"
        self.dialect = TRANSCRIPTION if is_transcription else _BEGINNINGS[self.endpoint]
        self._bytes_max: Final = FRAME_BYTES_MAX_OF[self.mode]
        behaviour = NEWEST if opened is None else opened.behaviour
        self._context: Final = Context(mode=self.mode, behaviour=behaviour)

    def kind(self, frame: Frame) -> str:
        """Name the kind of a client's frame: a value of `requests.Request`, or `INVALID`."""
        body = self._body(frame)
        return INVALID if body is None else self._dialect_for(body).classify(body).value

    def request(self, frame: Frame) -> ClientMessage | None:
        """Read a client's frame; None where a server would refuse it whatever its state."""
        body = self._body(frame)
        if body is None:
            return None
        dialect = self._dialect_for(body)
        try:
            return dialect.parse(dialect.classify(body), body, self._context)
        except RemoteProtocolError:
            return None

    def messages(self, frame: Frame) -> tuple[ServerMessage, ...]:
        """Read a server's frame; nothing where it is none of the dialect."""
        body = self._body(frame)
        try:
            return () if body is None else self.dialect.decode(body, self.mode)
        except RemoteProtocolError:
            return ()

    def _body(self, frame: Frame) -> Json | None:
        try:
            return parse_frame(frame, self._bytes_max)
        except RemoteProtocolError:
            return None

    def _dialect_for(self, body: Json) -> Dialect:
        if self.dialect is OPENING:
            self.dialect = choose(body) or OPENING
        return self.dialect


def requests_taken(session: Session | None) -> int:
    """Count the requests with something to hear or see that a session took so far."""
    counts = {} if session is None else session.counts
    return counts.get("appends", 0) + counts.get("turns", 0)


def was_taken(step: Step | None, before: int, session: Session | None) -> bool:
    """Whether a session took a request.

    Args:
        step: the request's; None where the machine has parted from the log: then it is said to be.
        before: `requests_taken` before it.
        session: the machine after it.
    """
    if step is None:
        return True
    decodes = any(isinstance(effect, ef.DecodeMedia) for effect in step.effects)
    return decodes or requests_taken(session) > before  # what only shows something is not counted
