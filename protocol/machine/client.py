"""The client's end of a session, without IO: it makes frames to send and reads received frames.

    connection = ClientConnection("realtime", "video")
    for message in connection.receive(frame): ...           # until `state` is CONNECTED
    await socket.send(connection.init(Init(instructions="be brief")))

It reads the same tables as the server (`state.TRANSITIONS`, `state.RECEPTION`) and keeps only the
session's state and how it was closed. A message that the server would refuse for its state is a
`LocalProtocolError`, before anything is sent; a message that the server may not send is a
`RemoteProtocolError`. An `error` event is returned as a message.

A pause lasts from `Paused` to `Resumed`, a turn from its question to its answer or error. Fields
to send are not checked: a test client may send bad ones.
"""

from __future__ import annotations

from typing import Final

import attrs

from ..values.errors import CLIENT_ERRORS, CLOSE_NORMAL, LocalProtocolError
from ..values.messages import Closed, ErrorReport, Paused, Response, Resumed, ServerMessage
from ..values.modes import OF_MODE, Mode
from ..values.openai import OpenAIRequest
from ..values.requests import (
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
    Played,
    Report,
    Request,
    Resume,
    See,
)
from ..values.state import (
    ACCEPT,
    BEGINNINGS,
    ConnectionEnded,
    Course,
    Gate,
    ModelChosen,
    Role,
    State,
    course_of,
    gate_of,
    judge,
    next_state,
)
from ..wire.codec import parse_frame
from ..wire.dialects import DIALECTS, LEGACY_CHAT, LEGACY_DUPLEX, MODES_OF, OPENAI

_OPENAI_REQUESTS: Final = {table.cls: request for request, table in OPENAI.requests("audio")}


class ClientConnection:
    """One client's view of one session.

    Args:
        dialect_name: a name of `dialects.DIALECTS`.
        mode: as in the connection's address; in `audio` no video frames are sent.

    Raises:
        LocalProtocolError: the dialect is unknown, or does not have this mode; from each method
            that makes a frame, the state does not allow it, or the dialect has no such event.
    """

    def __init__(self, dialect_name: str, mode: Mode) -> None:
        if dialect_name not in DIALECTS:
            names = ", ".join(DIALECTS)
            raise LocalProtocolError(f"no dialect {dialect_name!r}, there are {names}")
        if mode not in MODES_OF[dialect_name]:
            raise LocalProtocolError(f"no mode={mode} in {dialect_name}")
        self._dialect = DIALECTS[dialect_name]
        self._mode = mode
        self._course = course_of(mode, is_request=self._dialect is LEGACY_CHAT)
        self._state = BEGINNINGS[self._course]
        if self._dialect is OPENAI:  # which hears nothing of the queue
            self._state = State.CONNECTED
        self._close_sent = False
        self._is_answered = False
        self._is_streamed: bool | None = None
        self._closed_with: tuple[int, str] | None = None
        self._gate = Gate.CLOSED
        self._move_gate()

    @property
    def state(self) -> State:
        """The session's state, as far as the server's messages show."""
        return self._state

    @property
    def gate(self) -> Gate:
        """What may be sent now: nothing in CLOSED, which `close` leads to at once (001)."""
        return self._gate

    @property
    def closed_with(self) -> tuple[int, str] | None:
        """Code and reason of the WebSocket's close; None while it is open."""
        return self._closed_with

    # -- sending --------------------------------------------------------------------------------

    def init(self, init: Init) -> str:
        """Set the session up; returns the frame.

        `LocalProtocolError` before `queue_done`, with an init in progress or accepted, or for an
        attribute without a field in the dialect.
        """
        frame = self._frame(Request.INIT, init)
        self._gate = Gate.OPENING
        return frame

    def append(self, append: Append) -> str:
        """Send 250 ms to 10 s of audio, with frames; returns the frame.

        `LocalProtocolError` if the session is not ACTIVE, with frames in mode=audio, or for an
        attribute without a field in the dialect.
        """
        if self._mode == "chat":
            raise LocalProtocolError("no audio flows in mode=chat: it is asked with a turn")
        if append.frames and self._mode == "audio":
            raise LocalProtocolError(f"{len(append.frames)} video frames in mode=audio")
        return self._frame(Request.APPEND, append)

    def ask(self, ask: Ask) -> str:
        """Ask for a turn of chat with the whole conversation; returns the frame.

        `LocalProtocolError` if it is no chat, a turn is in progress, the session is not ACTIVE (in
        `legacy-chat`: it was asked before), or for an attribute without a field in the dialect.
        """
        if self._mode != "chat":
            raise LocalProtocolError(f"no turns in mode={self._mode}: audio is appended")
        is_first = self._course is Course.REQUEST
        frame = self._frame(Request.INIT if is_first else Request.APPEND, ask)
        self._gate = Gate.TURN
        self._is_streamed = ask.streaming
        return frame

    def choose(self, model: str) -> str:
        """Choose the model of a transcription; returns the frame.

        The server answers only with `model_not_found`, so the session counts as ACTIVE from here.
        `LocalProtocolError` before the server's greeting, or if it is no transcription.
        """
        frame = self._frame(Request.INIT, ChooseModel(model=model))
        self._state = next_state(Role.CLIENT, self._course, self._state, ModelChosen)
        self._move_gate()
        return frame

    def append_sound(self, pcm16: bytes) -> str:
        """Send PCM16 LE, 16 kHz mono, of any length to be transcribed; errors as in `choose`."""
        return self._frame(Request.APPEND, AppendSound(pcm16=pcm16))

    def commit(self, *, final: bool = False) -> str:
        """Begin to transcribe; `final`: all of the utterance's sound is sent.

        `LocalProtocolError` as in `choose`, and without a chosen model.
        """
        return self._frame(Request.COMMIT, Commit(final=final))

    def say(self, message: OpenAIRequest) -> str:
        """Say what only clients of `openai` can; returns the frame. Errors as in `append`."""
        return self._frame(_OPENAI_REQUESTS[type(message)], message)

    def see(self, see: See) -> str:
        """Send a frame that goes with the next audio (002); errors as in `append`."""
        if self._mode == "audio":
            raise LocalProtocolError("1 video frames in mode=audio")
        return self._frame(Request.SEE, see)

    def pause(self, timeout_s: float | None = None) -> str:
        """Ask for a pause of at most `timeout_s` seconds; it begins with `Paused` (002)."""
        return self._frame(Request.PAUSE, Pause(timeout_s=timeout_s))

    def resume(self) -> str:
        """Ask for the pause's end, which comes with `Resumed` (002)."""
        return self._frame(Request.RESUME, Resume())

    def interrupt(self) -> str:
        """Ask the model to stop speaking (002)."""
        return self._frame(Request.INTERRUPT, Interrupt())

    def report(self) -> str:
        """Send diagnostics, which are kept in the session's log (002)."""
        return self._frame(Request.REPORT, Report())

    def played(self, played_ms: int) -> str:
        """Tell how much of the speech was played, in milliseconds since the session began.

        `LocalProtocolError` before the session is set up, and in a dialect without the event.
        """
        return self._frame(Request.PLAYED, Played(played_ms=played_ms))

    def close(self, reason: str | None = None) -> str:
        """End the session, so that nothing may follow; the server keeps 64 characters of `reason`.

        `LocalProtocolError` if the session is over, or `close` was called before.
        """
        frame = self._frame(Request.CLOSE, CloseRequest(reason=reason))
        self._gate = Gate.CLOSED
        self._close_sent = True
        return frame

    def _frame(self, request: Request, message: ClientMessage) -> str:
        verdict = judge(self._gate, request)
        if verdict != ACCEPT:
            raise LocalProtocolError(f"{request} in state {self._gate}: it would be {verdict}")
        frame = self._dialect.encode_request(message)
        bytes_max = OF_MODE[self._mode].frame_bytes_max
        if len(frame) > bytes_max:
            text = f"a message of {len(frame)} bytes, at most {bytes_max} are taken"
            raise LocalProtocolError(text)
        return frame

    # -- receiving ------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> tuple[ServerMessage, ...]:
        """Read a WebSocket message of the server; a binary one is bytes.

        `RemoteProtocolError` if it is no JSON object, no event of the dialect, or not allowed now.
        """
        messages = self._dialect.decode(
            parse_frame(frame, OF_MODE[self._mode].frame_bytes_max), self._mode
        )
        return tuple(self._as_asked(message) for message in messages if self._take(message))

    def _as_asked(self, message: ServerMessage) -> ServerMessage:
        if isinstance(message, Response):
            return attrs.evolve(message, streaming=self._is_streamed)
        return message

    def _take(self, message: ServerMessage) -> bool:
        """Follow a message; False for the `stopped` after the `error` that ended it (002)."""
        before = self._state
        is_over = before is State.CLOSED and self._dialect is LEGACY_DUPLEX
        if is_over and isinstance(message, Closed):
            return False
        self._state = next_state(Role.CLIENT, self._course, before, type(message))
        if self._gate is Gate.TURN:
            self._follow_turn(message)
        elif isinstance(message, Paused) and not self._close_sent:
            self._gate = Gate.PAUSED
        elif self._state is not before or self._reopens(message):
            self._move_gate()
        return True

    def _reopens(self, message: ServerMessage) -> bool:
        """Whether a pause ended or an init was refused, so that more may be sent."""
        refused = isinstance(message, ErrorReport) and message.code in CLIENT_ERRORS
        # In OPENING nothing but the init can have been wrong: a better one may be sent.
        return isinstance(message, Resumed) or (refused and self._gate is Gate.OPENING)

    def _follow_turn(self, message: ServerMessage) -> None:
        if isinstance(message, Response | ErrorReport) and self._course is Course.REQUEST:
            self._is_answered = True
            self._gate = Gate.CLOSED
        elif isinstance(message, Response | ErrorReport | Closed):
            self._move_gate()

    def connection_closed(self, code: int, reason: str) -> bool:
        """Note that the WebSocket is closed: nothing can be sent or received any more.

        `code` is 1006 without a close frame. Returns whether the session ended in order: with
        `session.closed`; or with code 1000 before a session, after the answer to a single request,
        in a transcription, or in `openai`.
        """
        self._closed_with = (code, reason)
        is_due = self._state is not State.ACTIVE or self._is_answered
        # An idle transcription ends without a message, and so does each session of `openai`.
        is_due = is_due or self._course is Course.TRANSCRIPTION or self._dialect is OPENAI
        ordered = self._state is State.CLOSED or (is_due and code == CLOSE_NORMAL)
        if self._state is not State.CLOSED:
            self._state = next_state(Role.CLIENT, self._course, self._state, ConnectionEnded)
        self._move_gate()
        return ordered

    def _move_gate(self) -> None:
        is_over = self._close_sent or self._state is State.CLOSED
        there = Gate.OPEN if self._dialect is OPENAI else gate_of(self._course, self._state)
        self._gate = Gate.CLOSED if is_over else there
