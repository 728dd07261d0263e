"""How a client's frame is judged, in the order of the wire: JSON, close, state, type, fields.

A frame that is refused is answered here; what is left is a message whose every field is within its
bounds and which has its place. What becomes of it is the `session`'s.

A frame that cannot be read ends a session, but for two courses: a single request is answered as any
mistake is, and a transcription goes on (003).
"""

from __future__ import annotations

from .codec import parse_frame
from .core import Core
from .dialects import TRANSCRIPTION, TRANSCRIPTION_RESPONSES
from .dialects.base import Context, Dialect, Json
from .dialects.opening import OPENING, choose
from .dialects.transcription import begins_with_create
from .errors import CLOSE_TOO_BIG, ErrorCode, FieldError, FrameError
from .limits import FRAME_BYTES_MAX_OF
from .messages import ErrorReport
from .requests import ClientMessage, Request
from .state import ACCEPT, Course, Gate, judge
from .utf8 import Frame


def read_frame(core: Core, gate: Gate, frame: Frame) -> ClientMessage | None:
    """Read a frame and judge it; None where it was refused, and answered.

    Args:
        core: the session's; it is not CLOSED.
        gate: what its client may say now.
        frame: the WebSocket message.
    """
    try:
        body = parse_frame(frame, FRAME_BYTES_MAX_OF[core.opened.mode])
    except FrameError as error:
        _refuse_frame(core, error, is_binary=isinstance(frame, bytes))
        return None
    request = core.dialect.classify(body)
    verdict = judge(gate, request)
    if verdict != ACCEPT:
        core.complain(ErrorCode(verdict), f"{request} event in state {gate}")
        return None
    core.dialect = _dialect_after(core.dialect, gate, request, body)
    limits = core.opened.limits
    context = Context(mode=core.opened.mode, sliding_windows=limits.sliding_windows)
    try:
        return core.dialect.parse(request, body, context)
    except FieldError as error:
        core.complain(error.code, error.message)
        return None


def _dialect_after(dialect: Dialect, gate: Gate, request: Request, body: Json) -> Dialect:
    """Say which dialect goes on; a client picks it by its first message, and it stays."""
    if dialect is OPENING:
        return choose(body) or OPENING
    if gate is Gate.UNCHOSEN and request is Request.INIT:
        return TRANSCRIPTION_RESPONSES if begins_with_create(body) else TRANSCRIPTION
    return dialect


def _refuse_frame(core: Core, error: FrameError, *, is_binary: bool) -> None:
    """Answer a frame that is beyond repair, by what the course is."""
    is_too_big = error.close_code == CLOSE_TOO_BIG
    if core.course is Course.REQUEST:
        core.say(ErrorReport(code=ErrorCode.INVALID_PAYLOAD, message=error.reason))
        core.end("rejected", close_code=CLOSE_TOO_BIG if is_too_big else None)
    elif core.course is Course.TRANSCRIPTION and not is_too_big:
        code = ErrorCode.INVALID_FRAME if is_binary else ErrorCode.INVALID_JSON
        core.complain(code, error.reason)
    else:
        core.end("invalid_frame", close_code=error.close_code, words=error.reason)
