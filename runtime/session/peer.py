"""The client of a session: its connection, which may change, and its right to come back.

The driver sends by it (`AttachedClient`). The machine's `Peer` (`protocol.machine.core`) decides
what is sent; the client's own end is `protocol.machine.client`.

A token is a client's right to come back to its session, once: each connection is greeted with
another one. The one before stays right until the client's first message, for the greeting may be
lost too. The log has only hashes of tokens: it puts a word for the token into the greeting, and the
token takes that word's place behind the log.

A client that was away when its session ended gets the last frames when it comes again
(`EndedSession`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import attrs

from protocol.machine.session import Session
from protocol.values.effects import Attach
from protocol.values.errors import CLOSE_INTERNAL_ERROR, CLOSE_NORMAL
from protocol.values.limits import NS_PER_S, Mode
from protocol.values.messages import ConnectionReplaced, Resumable, ResumeRequest
from protocol.wire.dialects.shared import REPLACED, RESUMABLE, TOKEN

from ..net.connection import Connection, Ready, WebSocket
from .journal import FrameIndex, frames_of, ready_now

NO_TOKEN: Final = "0" * 64
"""In a fork's log, in place of the hash of a token of its parent's client: no token has it."""


_CREATED: Final = '{"type":"session.created"'
_OWN_TOKEN: Final = f'"resume_token":"{TOKEN}"'
"""No text of a client is written like this: it would have its quotes escaped."""


def hash_of(token: str) -> str:
    """SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


@attrs.frozen
class _NewConnection:
    connection: Connection
    token: str


class Tokens:
    """The tokens with which a client may come back: the last one, and maybe the one before it."""

    def __init__(self, hashes: Sequence[str]) -> None:
        """`hashes`: of the tokens, the last given first; without any no token is right."""
        self.hashes = list(hashes)

    def is_right(self, token: str) -> bool:
        """Whether a client with this token may come back; in constant time."""
        given = hash_of(token)
        return sum(hmac.compare_digest(given, known) for known in self.hashes) > 0

    def rotate(self, token: str, *, used: str) -> str:
        """Take the next token in place of one that was used; returns its hash."""
        self.hashes = [hash_of(token), hash_of(used)]
        return self.hashes[0]

    def forget_old(self) -> None:
        """Keep only the last token: the client has it."""
        del self.hashes[1:]


class AttachedClient:
    """The connection of one session's client.

    Args:
        token: the first one; empty for a session that cannot be resumed, or that is recovered.
        again: reads the frames from one ordinal up to another from the log.
        tokens: those of a session that is recovered.

    Attributes:
        connection: the last one; None before one comes to a server that went on with the session.
        new_connections: those that wait for their greeting.
    """

    def __init__(
        self,
        token: str,
        again: Callable[[int, int], AsyncGenerator[str]],
        tokens: Tokens | None = None,
    ) -> None:
        self._again = again
        self.tokens: Final = tokens or Tokens([hash_of(token)] if token else [])
        self.new_connections: deque[_NewConnection] = deque()
        self._first = token
        self.connection: Connection | None = None
        self.number = -1 if tokens is None else 0  # the first one was another server's

    def next_number(self) -> int:
        """Number a new connection; what another one sends or meets is ignored from now on."""
        self.number += 1
        return self.number

    def first(self, connection: Connection) -> None:
        """Take the connection with which the session begins."""
        self.connection = connection
        if self._first:
            self.new_connections.append(_NewConnection(connection, self._first))

    def resume(self, connection: Connection, *, used: str, token: str) -> str:
        """Take a new connection of a client with a right token; returns the next token's hash.

        It gets the session from `greet` on.
        """
        self.new_connections.append(_NewConnection(connection, token))
        return self.tokens.rotate(token, used=used)

    def with_token(self, frame: str) -> str:
        """Write the token into a frame before a greeting: in vLLM-Omni's `session.created`."""
        if frame.startswith(_CREATED) and _OWN_TOKEN in frame:
            return frame.replace(TOKEN, self.new_connections.popleft().token, 1)
        return frame

    def close(self, code: int, reason: str, ready: Ready) -> None:
        """Close the connection, if there was one since the server began."""
        if self.connection is not None:
            self.connection.close(code, reason, ready)

    def hang_up(self, code: int = CLOSE_INTERNAL_ERROR) -> None:
        """Close the connections that the session left open: it broke, or ended before a greeting.

        A client that came too late for a greeting gets the end when it comes again.
        """
        for waiting in self.new_connections:
            waiting.connection.close(code, "", ready_now)
        self.close(code, "", ready_now)

    def greet(self, effect: Attach, ready: Ready) -> None:
        """Send the new connection its greeting, and the frames that the client does not have."""
        waiting = self.new_connections.popleft()
        if self.connection is not None and self.connection is not waiting.connection:
            self.connection.send(REPLACED.encode(ConnectionReplaced()), ready_now)
            self.connection.close(CLOSE_NORMAL, "replaced", ready_now)
        self.connection = waiting.connection
        self.connection.send(effect.frame.replace(TOKEN, waiting.token), ready)
        if effect.after + 1 < effect.before:
            self.connection.send_again(self._again(effect.after + 1, effect.before))


ENDED_MAX: Final = 1024
"""Each is some hashes and a path."""
RESTS_MAX: Final = 16
"""Each holds the frames of a second."""


@attrs.frozen(kw_only=True)
class EndedSession:
    """A session that is over.

    Attributes:
        party: its owner, or else the address of its client.
        frame_index: where its frames stand in the log.
        first_frame: the first that was sent to its client.
        frames_sent: of which a client may miss the last.
        frames_received: messages that its client sent.
        close: code and reason with which its connection was closed, or would have been.
        resume_s: for how long a client may ask for it.
        ended_ns: when, on the server's clock.
    """

    recording_id: str
    mode: Mode
    owner: str
    party: str = ""
    tokens: Tokens
    path: Path
    frame_index: FrameIndex = attrs.Factory(FrameIndex)
    first_frame: int = 0
    frames_sent: int
    frames_received: int
    close: tuple[int, str]
    resume_s: int
    ended_ns: int

    @classmethod
    def of(cls, session: Session, **kept: Any) -> EndedSession:
        """What is kept of a session; `kept`: the attributes that its machine does not have."""
        return cls(
            recording_id=session.opened.recording_id,
            mode=session.opened.mode,
            frames_sent=session.counts["frames_sent"],
            frames_received=session.frames_received,
            **kept,
        )

    async def send_rest(self, websocket: WebSocket, request: ResumeRequest, stall_s: float) -> None:
        """Send the frames that the client has not received, and close with 1000: it is over.

        Raises an `ExceptionGroup` of what `frames_of` raises, with the connection broken.
        """
        connection = Connection(
            websocket,
            on_frames=lambda *_: anyio.sleep_forever(),
            on_gone=lambda _: None,
            on_send_failed=lambda: None,
            stall_s=stall_s,
        )
        after = request.last_seq
        greeting = Resumable(
            recording_id=self.recording_id,
            token=request.token,  # it stays right: there is nothing to take over any more
            expires_in_s=self.resume_s,
            next_seq=after + 1,
            ack=self.frames_received,
        )
        connection.send(RESUMABLE.encode(greeting), ready_now)
        if after + 1 < self.frames_sent:
            from_seq = self.frame_index.before(after + 1)
            rest = {"first": after + 1, "until": self.frames_sent}
            connection.send_again(frames_of(self.path, from_seq=from_seq, **rest))
        # Its own code may be one to come back from, and there is nothing more to receive.
        connection.close(CLOSE_NORMAL, self.close[1], ready_now)
        await connection.run()


class EndedSessions:
    """The sessions that ended in the last `keep_s` seconds.

    At most `ENDED_MAX` are kept: one more takes the place of the oldest of the party that has most.
    A session's last frames are sent to one client at a time, the last that came for them, and those
    of `RESTS_MAX` sessions of a party.
    """

    def __init__(self, keep_s: int) -> None:
        self._keep_ns = keep_s * NS_PER_S
        self._ended = OrderedDict[str, EndedSession]()
        self._rests = dict[anyio.CancelScope, EndedSession]()

    def add(self, ended: EndedSession) -> None:
        """Keep a session that has ended now."""
        self._ended[ended.recording_id] = ended
        if len(self._ended) > ENDED_MAX:
            ((heaviest, _),) = Counter(it.party for it in self._ended.values()).most_common(1)
            oldest = next(it for it in self._ended.values() if it.party == heaviest)
            del self._ended[oldest.recording_id]

    async def send_rest(
        self, ended: EndedSession, websocket: WebSocket, request: ResumeRequest, stall_s: float
    ) -> None:
        """Send the frames that the client has not received, in place of an older connection's."""
        party = [scope for scope, it in self._rests.items() if it.party == ended.party]
        older = [scope for scope, it in self._rests.items() if it is ended]
        for scope in older or party[: len(party) + 1 - RESTS_MAX]:
            scope.cancel()
        with anyio.CancelScope() as scope:
            self._rests[scope] = ended
            try:
                await ended.send_rest(websocket, request, stall_s)
            finally:
                del self._rests[scope]

    def discard(self, recording_id: str) -> None:
        """Keep a session no longer: its frames cannot be read."""
        self._ended.pop(recording_id, None)

    def get(self, recording_id: str, now_ns: int) -> EndedSession | None:
        """The session of this name; None if it ended too long ago, or is not known."""
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now_ns - oldest.ended_ns < self._keep_ns:
                break
            del self._ended[oldest.recording_id]
        return self._ended.get(recording_id)
