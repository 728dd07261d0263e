"""The client's end of a session, without IO: it makes frames to send and reads received frames.

    connection = ClientConnection("realtime", "video")
    for message in connection.receive(frame): ...           # until `state` is CONNECTED
    await socket.send(connection.send(Init(instructions="be brief")))

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

from ..values import messages as ms
from ..values import requests as rq
from ..values import state as states
from ..values.errors import CLIENT_ERRORS, CLOSE_NORMAL, LocalProtocolError
from ..values.limits import OF_MODE, Mode
from ..values.state import Gate, Role, SessionKind, State
from ..wire import dialects
from ..wire.codec import parse_frame

_NO_QUEUE_DONE: Final = (dialects.OPENAI, dialects.OMNI)
"""The end of the wait is not a message there."""


class ClientConnection:
    """One client's view of one session.

    Args:
        dialect_name: a name of `dialects.DIALECTS`.
        mode: as in the connection's address; in `audio` no video frames are sent.

    Raises:
        LocalProtocolError: the dialect is unknown, or does not have this mode.
    """

    def __init__(self, dialect_name: str, mode: Mode) -> None:
        if dialect_name not in dialects.DIALECTS:
            names = ", ".join(dialects.DIALECTS)
            raise LocalProtocolError(f"no dialect {dialect_name!r}, there are {names}")
        if mode not in dialects.MODES_OF[dialect_name]:
            raise LocalProtocolError(f"no mode={mode} in {dialect_name}")
        self._dialect = dialects.DIALECTS[dialect_name]
        self._mode = mode
        self._requests = {table.cls: request for request, table in self._dialect.requests(mode)}
        self._session_kind = states.session_kind_of(
            mode, is_request=self._dialect is dialects.LEGACY_CHAT
        )
        self._state = states.BEGINNINGS[self._session_kind]
        if self._dialect in _NO_QUEUE_DONE:
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
        """What may be sent now: nothing in CLOSED, where a `CloseRequest` leads at once (001)."""
        return self._gate

    @property
    def closed_with(self) -> tuple[int, str] | None:
        """Code and reason of the WebSocket's close; None while it is open."""
        return self._closed_with

    # -- sending --------------------------------------------------------------------------------

    def send(self, message: rq.ClientMessage) -> str:
        """Write a message as the frame to be sent; nothing may follow a `CloseRequest`.

        A server answers `ChooseModel`, or the first commit in place of it, only if it lacks the
        model, so the session counts as ACTIVE from here.

        `LocalProtocolError`: the state does not allow it, the dialect has no such message in this
        mode or no field for an attribute, there are frames in mode=audio, or it is too long.
        """
        request = self._requests.get(type(message))
        if request is None:
            name = type(message).__name__
            text = f"no frame for {name} in mode={self._mode} of {self._dialect.name}"
            raise LocalProtocolError(text)
        frames = _frames_of(message)
        if frames and self._mode == "audio":
            raise LocalProtocolError(f"{frames} video frames in mode=audio")
        verdict = states.judge(self._gate, request)
        if verdict != states.ACCEPT:
            raise LocalProtocolError(f"{request} in state {self._gate}: it would be {verdict}")
        frame = self._dialect.encode_request(message)
        bytes_max = OF_MODE[self._mode].frame_bytes_max
        if len(frame) > bytes_max:
            text = f"a message of {len(frame)} bytes, at most {bytes_max} are taken"
            raise LocalProtocolError(text)
        self._follow_sent(message)
        return frame

    def _follow_sent(self, message: rq.ClientMessage) -> None:
        match message:
            case rq.Init():
                self._gate = Gate.OPENING
            case rq.Ask(streaming=is_streamed):
                self._gate, self._is_streamed = Gate.TURN, is_streamed
            case rq.ChooseModel():
                self._choose()
            case rq.Commit() if self._gate is Gate.UNCHOSEN:
                self._choose()
            case rq.CloseRequest():
                self._gate, self._close_sent = Gate.CLOSED, True

    def _choose(self) -> None:
        self._state = states.next_state(
            Role.CLIENT, self._session_kind, self._state, states.ModelChosen
        )
        self._move_gate()

    # -- receiving ------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> tuple[ms.ServerMessage, ...]:
        """Read a WebSocket message of the server; a binary one is bytes.

        `RemoteProtocolError` if it is not a JSON object or an event of the dialect, or not allowed
        now.
        """
        messages = self._dialect.decode(
            parse_frame(frame, OF_MODE[self._mode].frame_bytes_max), self._mode
        )
        return tuple(self._as_asked(message) for message in messages if self._take(message))

    def _as_asked(self, message: ms.ServerMessage) -> ms.ServerMessage:
        if isinstance(message, ms.Response):
            return attrs.evolve(message, streaming=self._is_streamed)
        return message

    def _take(self, message: ms.ServerMessage) -> bool:
        """Follow a message; False for the `stopped` after the `error` that ended it (002)."""
        before = self._state
        is_over = before is State.CLOSED and self._dialect is dialects.LEGACY_DUPLEX
        if is_over and isinstance(message, ms.Closed):
            return False
        is_place = isinstance(message, ms.Queued | ms.QueueUpdate)
        if is_place and self._dialect in _NO_QUEUE_DONE and before is State.CONNECTED:
            return True
        self._state = states.next_state(Role.CLIENT, self._session_kind, before, type(message))
        if isinstance(message, ms.Created) and self._dialect is dialects.OPENAI_TRANSCRIPTION:
            self._choose()
        if self._gate is Gate.TURN:
            self._follow_turn(message)
        elif isinstance(message, ms.Paused) and not self._close_sent:
            self._gate = Gate.PAUSED
        elif self._state is not before or self._reopens(message):
            self._move_gate()
        return True

    def _reopens(self, message: ms.ServerMessage) -> bool:
        """Whether a pause ended or an init was refused, so that more may be sent."""
        refused = isinstance(message, ms.ErrorReport) and message.code in CLIENT_ERRORS
        # In OPENING nothing but the init can have been wrong: a better one may be sent.
        return isinstance(message, ms.Resumed) or (refused and self._gate is Gate.OPENING)

    def _follow_turn(self, message: ms.ServerMessage) -> None:
        if (
            isinstance(message, ms.Response | ms.ErrorReport)
            and self._session_kind is SessionKind.REQUEST
        ):
            self._is_answered = True
            self._gate = Gate.CLOSED
        elif isinstance(message, ms.Response | ms.ErrorReport | ms.Closed):
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
        is_due = (
            is_due
            or self._session_kind is SessionKind.TRANSCRIPTION
            or self._dialect is dialects.OPENAI
        )
        ordered = self._state is State.CLOSED or (is_due and code == CLOSE_NORMAL)
        if self._state is not State.CLOSED:
            self._state = states.next_state(
                Role.CLIENT, self._session_kind, self._state, states.ConnectionEnded
            )
        self._move_gate()
        return ordered

    def _move_gate(self) -> None:
        is_over = self._close_sent or self._state is State.CLOSED
        is_open = self._dialect in (dialects.OPENAI, dialects.OPENAI_TRANSCRIPTION)
        there = Gate.OPEN if is_open else states.gate_of(self._session_kind, self._state)
        if there is Gate.ACTIVE and self._dialect is dialects.OMNI:
            there = Gate.STEERED
        self._gate = Gate.CLOSED if is_over else there


def _frames_of(message: rq.ClientMessage) -> int:
    """The number of video frames in a message."""
    return (
        len(message.frames) if isinstance(message, rq.Append) else int(isinstance(message, rq.See))
    )
