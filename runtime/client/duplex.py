"""A duplex session as the SDK gives it: sound in, typed events out, until it is closed.

Rules: one task sends and one receives. Sound is cut into units (`units`); what does not fill
one waits for more, for `flush`, or for `interrupt`. Events are the canonical messages
(`protocol.messages`) after `session.created`: `Listen`, `Speech`, `GoingAway`, `ErrorReport`,
`Closed`, and in `legacy-duplex` `Paused`, `Resumed` and `Interrupted`. Neither `GoingAway` nor an
`ErrorReport` ends a session; the events of one that ended in order run out after `Closed`, any
other end raises.

It does not pace and plays nothing: whoever sends a file sends a second each second.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from protocol.errors import CLOSE_NORMAL
from protocol.messages import (
    Closed,
    Created,
    ErrorReport,
    GoingAway,
    Interrupted,
    Listen,
    Mode,
    Paused,
    Resumed,
    Speech,
)
from protocol.requests import Append
from protocol.state import Gate

from .errors import ClientError, LocalProtocolError, SessionClosedError
from .session import ClientSession
from .units import Samples, UnitCutter
from .websocket import CLOSE_WAIT_S

Event = Listen | Speech | Paused | Resumed | Interrupted | GoingAway | ErrorReport | Closed
"""What a session tells once it was created."""


class DuplexSession:
    """A session that is set up; made by `antiphon.connect`, which closes it.

    Args:
        raw: the session below, of which `created` was received last.
        mode: what the session carries.
        created: what the server said of it.

    Attributes:
        raw: for what this class has no word for; its messages are those that this one gives.
        created: its id, whether it is recorded, and how long its prompt is.
    """

    def __init__(self, raw: ClientSession, *, mode: Mode, created: Created) -> None:
        self.raw = raw
        self.created = created
        self._mode = mode
        self._cutter = UnitCutter()
        self._ended: Closed | None = None

    @property
    def held_samples(self) -> int:
        """Samples that wait for more: less than a second of them."""
        return self._cutter.held_samples

    async def append(self, pcm: Samples, frames: tuple[bytes, ...] | list[bytes] = ()) -> None:
        """Send sound, and what was seen with it; a rest of less than a second is held.

        Args:
            pcm: any amount; float32, shape (samples,), 16 kHz mono, in [-1, 1], or its bytes (LE).
            frames: JPEG files, in mode=video; of those that come to one second the newest four
                are sent.

        Raises:
            LocalProtocolError: it is no such sound, there are frames in mode=audio, or the session
                takes none now.
            SessionClosedError: the session is over.
        """
        if frames and self._mode == "audio":
            raise LocalProtocolError(f"{len(frames)} video frames in mode=audio")
        self._check()
        await self._send(self._cutter.add(pcm, tuple(frames)))

    async def flush(self) -> None:
        """Send what is held, with silence up to a whole second; raises as `append` does."""
        self._check()
        await self._send(self._cutter.rest())

    async def interrupt(self) -> None:
        """Make the model stop speaking, at once; raises as `append` does.

        Where the dialect has no request for it, what is held is sent with the mark that does it
        (`force_listen`), and with silence up to 250 ms.
        """
        if self.raw.dialect == "legacy-duplex":
            self._check_open()
            await self.raw.interrupt()
        else:
            self._check()
            await self.raw.append(self._cutter.at_once())

    async def pause(self, timeout_s: float | None = None) -> None:
        """Pause the session; `Paused` is its answer. `legacy-duplex` alone can.

        Args:
            timeout_s: after which the server ends the session; None takes the server's.

        Raises:
            LocalProtocolError: the dialect cannot, or the session is paused.
            SessionClosedError: the session is over.
        """
        self._check_open()
        await self.raw.pause(timeout_s)

    async def resume(self) -> None:
        """Go on after a pause; `Resumed` is its answer. Raises as `pause` does."""
        self._check_open()
        await self.raw.resume()

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; its last events are still to be read, `Closed` among them.

        What is held is not sent: `flush` before it where it matters.

        Args:
            reason: in the caller's own words, 64 characters at most; not in every dialect.

        Raises:
            LocalProtocolError: it was asked for before, or the dialect carries no reason.
            SessionClosedError: the session is over.
        """
        self._check_open()
        await self.raw.close(reason)

    def __aiter__(self) -> DuplexSession:
        return self

    async def __anext__(self) -> Event:
        message = await self.raw.receive()
        if message is None:
            raise StopAsyncIteration
        assert isinstance(message, Event), "state.TRANSITIONS has no other in ACTIVE"
        if isinstance(message, Closed):
            self._ended = message
        return message

    async def leave(self) -> None:
        """Say that the session is over, where nobody has; `antiphon.connect` does it."""
        await say_goodbye(self.raw)

    async def _send(self, appends: list[Append]) -> None:
        for append in appends:
            await self.raw.append(append)

    def _check_open(self) -> None:
        """Tell a session that the server has ended from one that was never to take this."""
        if self._ended is not None:
            raise SessionClosedError(CLOSE_NORMAL, self._ended.client_reason or self._ended.reason)

    def _check(self) -> None:
        self._check_open()
        if not self.raw.can_append:  # before the cutter takes what would be lost
            raise LocalProtocolError(f"sound in state {self.raw.connection.gate}")


async def say_goodbye(raw: ClientSession) -> None:
    """Ask for a session's end in a bounded time, where it is still to be ended and can be."""
    if raw.connection.gate is Gate.CLOSED:
        return
    with anyio.move_on_after(CLOSE_WAIT_S), suppress(ClientError):
        await raw.close()
