"""Sessions that ended while their clients may have been away: these get the last frames."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Final

import anyio
import attrs

from protocol.machine.session import Session
from protocol.values.errors import CLOSE_NORMAL
from protocol.values.limits import NS_PER_S
from protocol.values.modes import Mode
from protocol.values.resuming import ComeBack, Resumable
from protocol.wire.dialects.resuming import RESUMABLE

from ..net.connection import Connection
from ..net.websocket import WebSocket
from .again import frames_of
from .journal import ready_now
from .peer import Tokens

ENDED_MAX: Final = 1024
"""Each is some hashes and a path."""


@attrs.frozen(kw_only=True)
class Ended:
    """A session that is over.

    Attributes:
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
    tokens: Tokens
    path: Path
    first_frame: int = 0
    frames_sent: int
    frames_received: int
    close: tuple[int, str]
    resume_s: int
    ended_ns: int

    @classmethod
    def of(
        cls,
        session: Session,
        *,
        owner: str,
        tokens: Tokens,
        path: Path,
        first_frame: int,
        close: tuple[int, str],
        resume_s: int,
        ended_ns: int,
    ) -> Ended:
        """What is kept of a session."""
        return cls(
            recording_id=session.opened.recording_id,
            mode=session.opened.mode,
            owner=owner,
            tokens=tokens,
            path=path,
            first_frame=first_frame,
            frames_sent=session.counts["frames_sent"],
            frames_received=session.frames_received,
            close=close,
            resume_s=resume_s,
            ended_ns=ended_ns,
        )

    async def tell(self, websocket: WebSocket, asked: ComeBack, stall_s: float) -> None:
        """Send the frames that the client has not heard, and close with 1000: it is over.

        Raises an `ExceptionGroup` of what `frames_of` raises, with the connection broken.
        """
        connection = Connection(
            websocket,
            on_frames=lambda *_: anyio.sleep_forever(),
            on_gone=lambda _: None,
            on_send_failed=lambda: None,
            stall_s=stall_s,
        )
        after = asked.last_seq
        greeting = Resumable(
            recording_id=self.recording_id,
            token=asked.token,  # it stays right: there is nothing to take over any more
            expires_in_s=self.resume_s,
            next_seq=after + 1,
            ack=self.frames_received,
        )
        connection.send(RESUMABLE.encode(greeting), ready_now)
        if after + 1 < self.frames_sent:
            frames = frames_of(self.path, from_seq=0, first=after + 1, until=self.frames_sent)
            connection.send_again(frames)
        # Its own code may be one to come back from, and there is nothing more to hear.
        connection.close(CLOSE_NORMAL, self.close[1], ready_now)
        await connection.run()


class EndedSessions:
    """The sessions that ended in the last `keep_s` seconds, the newest `ENDED_MAX` of them."""

    def __init__(self, keep_s: int) -> None:
        self._keep_ns = keep_s * NS_PER_S
        self._ended = OrderedDict[str, Ended]()

    def add(self, ended: Ended) -> None:
        """Keep a session that has ended now."""
        self._ended[ended.recording_id] = ended
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def discard(self, recording_id: str) -> None:
        """Keep a session no longer: its frames cannot be read."""
        self._ended.pop(recording_id, None)

    def get(self, recording_id: str, now_ns: int) -> Ended | None:
        """The session of this name; None if it ended too long ago, or is not known."""
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now_ns - oldest.ended_ns < self._keep_ns:
                break
            del self._ended[oldest.recording_id]
        return self._ended.get(recording_id)
