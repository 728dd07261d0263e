"""The client's end of a session, without any IO: frames to send come out, frames received go in.

    connection = ClientConnection("realtime", "video")
    for message in connection.receive(frame): ...           # until `state` is CONNECTED
    await socket.send(connection.init(Init(instructions="be brief")))

It reads the same two tables as the server (`state.TRANSITIONS`, `state.RECEPTION`) and keeps
nothing beside where the session stands and how it was closed. What the server would refuse for its
state is a `LocalProtocolError` here, before anything is sent; what the server may not say is a
`RemoteProtocolError`. An `error` event is neither: it is returned as a message.

It checks no field of what it sends (a test client may send bad ones), plays no audio, measures no
time and does not reconnect.
"""

from __future__ import annotations

from typing import Final

from .codec import parse_frame
from .dialects import DIALECTS
from .errors import CLIENT_ERRORS, LocalProtocolError
from .limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN
from .messages import (
    Append,
    ClientMessage,
    CloseRequest,
    ErrorReport,
    Init,
    Mode,
    Request,
    ServerMessage,
)
from .model import SAMPLE_BYTES, UNIT_SAMPLES
from .state import ACCEPT, ConnectionEnded, Gate, Role, State, judge, next_state

CHUNK_SAMPLES_MAX: Final = APPEND_SAMPLES_MAX - APPEND_SAMPLES_MIN
"""`split_pcm` joins a short rest to the chunk before it, which must not outgrow an append."""


class ClientConnection:
    """One client's view of one session.

    Args:
        dialect_name: `realtime` or `duplex-v1`.
        mode: what the connection's address asked for; `audio` sends no video frames.

    Raises:
        LocalProtocolError: there is no such dialect.
    """

    def __init__(self, dialect_name: str, mode: Mode) -> None:
        if dialect_name not in DIALECTS:
            names = ", ".join(DIALECTS)
            raise LocalProtocolError(f"no dialect {dialect_name!r}, there are {names}")
        self._dialect = DIALECTS[dialect_name]
        self._mode = mode
        self._state = State.QUEUED
        self._gate = Gate.QUEUED
        self._close_sent = False
        self._closed_with: tuple[int, str] | None = None

    @property
    def state(self) -> State:
        """Where the session stands, as far as the server has told."""
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
        """Set the session up.

        Args:
            init: prompt, voices and settings.

        Returns:
            The frame to send.

        Raises:
            LocalProtocolError: there was no `queue_done` yet, an init is under way or accepted, or
                the dialect has no field for something in it.
        """
        frame = self._frame(Request.INIT, init)
        self._gate = Gate.OPENING
        return frame

    def append(self, append: Append) -> str:
        """Send audio, and what is seen with it.

        Args:
            append: 250 ms to 10 s of it.

        Returns:
            The frame to send.

        Raises:
            LocalProtocolError: the session is not ACTIVE, frames were given in mode=audio, or
                the dialect has no field for something in it.
        """
        if append.frames and self._mode == "audio":
            raise LocalProtocolError(f"{len(append.frames)} video frames in mode=audio")
        return self._frame(Request.APPEND, append)

    def close(self, reason: str | None = None) -> str:
        """End the session; nothing may be sent after it.

        Args:
            reason: in the client's own words; the server keeps 64 characters.

        Returns:
            The frame to send.

        Raises:
            LocalProtocolError: the session is over, or `close` was called before.
        """
        frame = self._frame(Request.CLOSE, CloseRequest(reason=reason))
        self._gate = Gate.CLOSED
        self._close_sent = True
        return frame

    def _frame(self, request: Request, message: ClientMessage) -> str:
        verdict = judge(self._gate, request)
        if verdict != ACCEPT:
            raise LocalProtocolError(f"{request} in state {self._gate}: it would be {verdict}")
        return self._dialect.encode_request(message)

    # -- receiving ------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> tuple[ServerMessage, ...]:
        """Take a WebSocket message of the server's.

        Args:
            frame: the message; bytes for a binary one.

        Returns:
            What the server said.

        Raises:
            RemoteProtocolError: it is no JSON object, no event of the dialect, or one that has no
                place in this state.
        """
        messages = self._dialect.decode(parse_frame(frame))
        for message in messages:
            self._take(message)
        return messages

    def _take(self, message: ServerMessage) -> None:
        before = self._state
        self._state = next_state(Role.CLIENT, before, type(message))
        refused = isinstance(message, ErrorReport) and message.code in CLIENT_ERRORS
        # In OPENING nothing but the init can have been wrong: a better one may be sent.
        if self._state is not before or (refused and self._gate is Gate.OPENING):
            self._move_gate()

    def connection_closed(self, code: int, reason: str) -> bool:
        """Take note that the WebSocket is closed; nothing can be sent or received any more.

        Args:
            code: its close code; 1006 where there was none.
            reason: its close reason.

        Returns:
            Whether the session ended in order: the server said `session.closed`, or there was no
            session yet and the code is 1000.
        """
        self._closed_with = (code, reason)
        ordered = self._state is State.CLOSED or (self._state is not State.ACTIVE and code == 1000)
        if self._state is not State.CLOSED:
            self._state = next_state(Role.CLIENT, self._state, ConnectionEnded)
        self._move_gate()
        return ordered

    def _move_gate(self) -> None:
        self._gate = Gate.CLOSED if self._close_sent else Gate(self._state.value)


def split_pcm(pcm: bytes, chunk_samples: int = UNIT_SAMPLES) -> tuple[bytes, ...]:
    """Cut audio into pieces that an append may carry; the server joins them to exact units.

    Args:
        pcm: float32 LE, 16 kHz mono, 250 ms at least.
        chunk_samples: the samples of each piece; the last one has up to 250 ms more.

    Returns:
        The pieces; joined, they are `pcm`.

    Raises:
        LocalProtocolError: the audio is too short, or no append may have so many samples.
    """
    if not APPEND_SAMPLES_MIN <= chunk_samples <= CHUNK_SAMPLES_MAX:
        allowed = f"{APPEND_SAMPLES_MIN} to {CHUNK_SAMPLES_MAX}"
        raise LocalProtocolError(f"chunks of {chunk_samples} samples, allowed is {allowed}")
    size, size_min = chunk_samples * SAMPLE_BYTES, APPEND_SAMPLES_MIN * SAMPLE_BYTES
    if len(pcm) < size_min or len(pcm) % SAMPLE_BYTES:
        raise LocalProtocolError(f"{len(pcm)} bytes of audio, whole samples of 250 ms are needed")
    starts = range(0, len(pcm) - size_min + 1, size)
    ends = [*starts[1:], len(pcm)]
    return tuple(pcm[start:end] for start, end in zip(starts, ends, strict=True))
