"""The answers that a server owes, from the protocol's tables and parsers.

A message is judged as in wire.md: JSON, then state, then type, then fields. `demand_of` uses
`codec`, the dialect's `classify` and `parse`, and `state.RECEPTION`. The judge knows the gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

import attrs

from protocol.values import openai as oa
from protocol.values.errors import CLOSE_NORMAL, CLOSE_TOO_BIG, ErrorCode, FieldError, FrameError
from protocol.values.messages import (
    Created,
    ErrorReport,
    Interrupted,
    Listen,
    Paused,
    Response,
    Resumed,
    Speech,
    TranscriptDone,
)
from protocol.values.model import SAMPLE_BYTES, SlidingWindow
from protocol.values.modes import OF_MODE, Mode
from protocol.values.requests import (
    Append,
    AppendSound,
    Ask,
    ChooseModel,
    ClientMessage,
    CloseRequest,
    Commit,
    Init,
    Interrupt,
    Pause,
    Request,
    Resume,
    See,
)
from protocol.values.state import ACCEPT, IGNORE, KEEP, OPENAI_GATES, Course, Gate, judge
from protocol.values.utf8 import frame_bytes
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import DIALECTS, OPENAI, OPENAI_TRANSCRIPTION
from protocol.wire.dialects.base import Context, Dialect
from protocol.wire.dialects.opening import OPENING, choose
from protocol.wire.dialects.shared import is_openai_update

from .schema import described

ANSWERS: Final[Mapping[type, tuple[type, ...]]] = {
    Init: (Created, ErrorReport),
    Ask: (Response, ErrorReport),
    Pause: (Paused,),
    Resume: (Resumed,),
    Interrupt: (Interrupted,),
    Commit: (TranscriptDone, ErrorReport),
    oa.Configure: (oa.Configured,),
    oa.CommitSound: (oa.InputStep, ErrorReport),
    oa.ClearSound: (oa.InputStep,),
    oa.CancelResponse: (oa.ReplyStep, oa.ReplyState, ErrorReport),
    oa.CreateItem: (oa.ItemStep, ErrorReport),
    oa.DeleteItem: (oa.ItemDeleted, ErrorReport),
    oa.RetrieveItem: (oa.ItemStep, ErrorReport),
    oa.TruncateItem: (oa.ItemTruncated, ErrorReport),
}
"""The answers to a valid message; an `error` where its media may turn out damaged."""
OUTCOMES: Final = (Listen, Speech, ErrorReport)
"""The outcomes of a unit."""
EARLY: Final = (oa.Configure, AppendSound, oa.CreateItem)
"""Messages of `openai` that are taken while the session waits, and answered later or never."""
MODELS: Final = frozenset({"tiny", "scripted"})
"""Possible names of a server's model: it answers nothing to these, or that there is none."""


@attrs.frozen(kw_only=True)
class Demand:
    """The answer owed for a message.

    Attributes:
        kind: for reports: the wire type, or the fault.
        answers: any of these answers it; empty: nothing is owed, or the end.
        code: of the error, where only one is right.
        closes: the close codes, where the end is owed.
        message: the parsed message, if valid.
        is_kept: it may be kept, and answered once there is a slot.
    """

    kind: str
    gate: Gate
    answers: tuple[type, ...] = ()
    code: ErrorCode | None = None
    closes: tuple[int, ...] = ()
    message: ClientMessage | None = None
    is_kept: bool = False

    @property
    def is_owed(self) -> bool:
        """Whether an answer or the end must come."""
        return bool(self.answers or self.closes)


class Reader:
    """Reads a client's messages as the server does."""

    def __init__(self, dialect_name: str, mode: Mode, course: Course) -> None:
        self._is_realtime = not dialect_name.startswith("legacy")
        is_open = dialect_name in {"realtime", "duplex-v1"} and course is Course.DUPLEX
        self.dialect: Dialect = OPENING if is_open else DIALECTS[dialect_name]
        self._mode: Mode = mode
        self._course = course

    def demand_of(self, frame: str | bytes | None, gate: Gate) -> Demand:
        """The demand for a frame, None above the limit; a valid init picks the dialect."""
        frame = self._in_size(frame)
        try:
            body = parse_frame(frame, OF_MODE[self._mode].frame_bytes_max)
        except FrameError as error:
            return self._beyond_repair(frame, gate, error)
        request = self.dialect.classify(body)
        kind = kind_of(body.get("type"), request)
        is_openai = self.dialect in (OPENAI, OPENAI_TRANSCRIPTION)
        if gate in OPENAI_GATES and self._is_realtime and is_openai_update(body) and not is_openai:
            return self._refused(kind, gate, ErrorCode.INVALID_EVENT)
        keeps = gate is Gate.QUEUED and self._course in {Course.DUPLEX, Course.CHAT}
        judged = Gate.WAITING if keeps else gate
        verdict = judge(Gate.OPEN if is_openai and gate is not Gate.CLOSED else judged, request)
        if verdict == IGNORE:
            return Demand(kind=kind, gate=gate)
        if verdict == KEEP:
            either = (Created, ErrorReport)
            return Demand(kind=kind, gate=gate, answers=either, is_kept=True)
        if verdict != ACCEPT:
            return self._refused(kind, gate, ErrorCode(verdict))
        if self.dialect is OPENING:
            self.dialect = choose(body) or OPENING
        try:
            message = self._parse(request, body, ("off",))
        except FieldError as error:
            if self._is_taken_by_others(request, body):
                return Demand(kind=kind, gate=gate, answers=(Created, ErrorReport))
            return self._refused(kind, gate, error.code)
        if is_openai and gate is Gate.QUEUED:
            if isinstance(message, EARLY):
                return Demand(kind=kind, gate=gate, message=message)
            return self._refused(kind, gate, ErrorCode.NOT_READY)
        if isinstance(message, CloseRequest):
            return Demand(kind=kind, gate=gate, closes=(CLOSE_NORMAL,), message=message)
        if named_by(message) not in {None, *MODELS}:
            return self._refused(kind, gate, ErrorCode.MODEL_NOT_FOUND)
        is_half = isinstance(message, Commit) and not (message.final and message.begins)
        answers = () if is_half else ANSWERS.get(type(message), ())
        return Demand(kind=kind, gate=gate, answers=answers, message=message)

    def read(self, frame: str | bytes | None) -> ClientMessage | None:
        """Parse a frame, wherever it is allowed; None if it is always invalid."""
        try:
            body = parse_frame(self._in_size(frame), OF_MODE[self._mode].frame_bytes_max)
            return self._parse(self.dialect.classify(body), body, get_args(SlidingWindow))
        except (FrameError, FieldError):
            return None

    def _in_size(self, frame: str | bytes | None) -> str | bytes | None:
        """The frame as the server gets it: None above the limit."""
        is_too_big = frame is not None and frame_bytes(frame) > OF_MODE[self._mode].frame_bytes_max
        return None if is_too_big else frame

    def _parse(
        self, request: Request, body: Mapping[str, object], windows: tuple[SlidingWindow, ...]
    ) -> ClientMessage:
        return self.dialect.parse(request, body, Context(mode=self._mode, sliding_windows=windows))

    def _is_taken_by_others(self, request: Request, body: Mapping[str, object]) -> bool:
        """Whether a backend with sliding windows could accept it."""
        try:
            self._parse(request, body, get_args(SlidingWindow))
        except FieldError:
            return False
        return True

    def _refused(self, kind: str, gate: Gate, code: ErrorCode) -> Demand:
        return Demand(kind=kind, gate=gate, answers=(ErrorReport,), code=code)

    def _beyond_repair(self, frame: str | bytes | None, gate: Gate, error: FrameError) -> Demand:
        kind = "too big" if frame is None else "binary" if isinstance(frame, bytes) else "no JSON"
        if self._course is Course.TRANSCRIPTION and frame is not None:
            is_binary = isinstance(frame, bytes)
            code = ErrorCode.INVALID_FRAME if is_binary else ErrorCode.INVALID_JSON
            return self._refused(kind, gate, code)
        closes: tuple[int, ...] = (error.close_code,)
        if self._course is Course.REQUEST:
            closes = (CLOSE_NORMAL, CLOSE_TOO_BIG) if frame is None else (CLOSE_NORMAL,)
        return Demand(kind=kind, gate=gate, closes=() if gate is Gate.CLOSED else closes)


def kind_of(name: object, request: Request) -> str:
    """A message's name in reports, without the client's text."""
    known = {message.kind for dialect in DIALECTS for message in described(dialect)} - {""}
    if isinstance(name, str) and name in known:
        return name
    return "request" if request is Request.INIT else "unknown"


def named_by(message: ClientMessage) -> str | None:
    """The model that a message asks for; None if it does not ask for one."""
    match message:
        case ChooseModel(model=name) | oa.Configure(transcriber=name):
            return name
    return None


def samples_of(message: ClientMessage | None) -> int:
    """The samples in a message."""
    return len(message.pcm) // SAMPLE_BYTES if isinstance(message, Append) else 0


def pictures_of(message: ClientMessage | None) -> int:
    """The parts that are checked only after acceptance: pictures, a known model."""
    if isinstance(message, See):
        return 1
    if isinstance(message, ChooseModel):
        return int(message.model in MODELS)
    if isinstance(message, oa.Configure):
        return int(message.voice is not None)
    return len(message.frames) if isinstance(message, Append) else 0
