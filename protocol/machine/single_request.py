"""A single request (004): a chat of one turn without init; it closes after its answer or error."""

from __future__ import annotations

import attrs

from ..values.errors import CLOSE_INTERNAL_ERROR, CLOSE_TOO_BIG, ErrorCode, FrameError
from ..values.messages import ErrorReport
from ..values.state import Course
from .chat import Chat


@attrs.define(kw_only=True, eq=False)
class SingleRequest(Chat):
    """One turn a connection (004)."""

    course = Course.REQUEST
    has_opening = False
    goodbye_in = frozenset()

    def admitted(self) -> None:
        """Wait for the request, for a limited time."""
        self.set_timer("init", self.opened.limits.init_wait_s)

    def frame_refused(self, error: FrameError, _code: ErrorCode) -> None:
        """Answer an unreadable frame like any other mistake."""
        self.say(ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message=error.reason))
        is_too_big = error.close_code == CLOSE_TOO_BIG
        self.end("rejected", close_code=CLOSE_TOO_BIG if is_too_big else None)

    def complain(self, code: ErrorCode, message: str) -> None:
        """Send an `error`, and close."""
        super().complain(code, message)
        self.end("rejected")

    def model_failed(self, index: int) -> None:
        """Tell the client that the model failed at the turn."""
        self.give_up(f"turn {index} failed")

    def give_up(self, _text: str) -> None:
        """End the session: the model does not answer."""
        self.refuse(ErrorCode.INFERENCE_ERROR, "the turn failed", close_code=CLOSE_INTERNAL_ERROR)

    def shut_down(self) -> None:
        """End the session: the server shuts down."""
        self.refuse(ErrorCode.SERVICE_UNAVAILABLE, "the server shuts down")

    def _go_on(self) -> None:
        self.turn = None
        self.end("answered")
