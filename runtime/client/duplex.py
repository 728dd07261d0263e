"""A duplex session in the SDK: sound in, typed events out, until it is closed.

One task sends and one receives. Sound is cut into units (`units`); a rest waits for more, for
`flush`, or for `interrupt`. Events are the canonical messages (`protocol.values.messages`) after
`session.created`: `Listen`, `Speech`, `GoingAway`, `ErrorReport`, `Closed`, and in `legacy-duplex`
`Paused`, `Resumed` and `Interrupted`; in `live` a second's text and sound are two `Speech`, and
there are `LiveAnswer`s. Only `Closed` ends a session; any other end raises. No pacing: send a
second of a file each second.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from protocol.values.errors import CLOSE_NORMAL
from protocol.values.live import LiveAnswer
from protocol.values.messages import (
    Closed,
    Created,
    ErrorReport,
    GoingAway,
    Interrupted,
    Listen,
    Paused,
    Resumed,
    Speech,
)
from protocol.values.modes import Mode
from protocol.values.requests import Append, AppendSound
from protocol.values.state import Gate
from protocol.wire.rates import to_pcm16

from .errors import ClientError, LocalProtocolError, SessionClosedError
from .session import ClientSession
from .units import Samples, UnitCutter
from .websocket import CLOSE_WAIT_S

Event = (
    Listen | Speech | Paused | Resumed | Interrupted | GoingAway | ErrorReport | Closed | LiveAnswer
)
"""The events of a session after its creation."""


class DuplexSession:
    """A session that is set up; `antiphon.connect` makes and closes it.

    `created` has its id, whether it is recorded, and its prompt's length; `raw` is the session
    below.
    """

    def __init__(self, raw: ClientSession, *, mode: Mode, created: Created) -> None:
        self.raw = raw
        self.created = created
        self._mode = mode
        self._cutter = UnitCutter()

    @property
    def held_samples(self) -> int:
        """Samples that wait for more: less than a second."""
        return self._cutter.held_samples

    async def append(self, pcm: Samples, frames: tuple[bytes, ...] | list[bytes] = ()) -> None:
        """Send sound and frames; a rest of less than a second is held.

        Args:
            pcm: any amount; float32, shape (samples,), 16 kHz mono, in [-1, 1], or its bytes (LE).
            frames: JPEG files, in mode=video; the newest four of a second are sent.

        Raises:
            LocalProtocolError: the sound is invalid, there are frames in mode=audio, or the session
                takes none now.
            SessionClosedError: the session is over.
        """
        if frames and self._mode == "audio":
            raise LocalProtocolError(f"{len(frames)} video frames in mode=audio")
        self._check()
        await self._send(self._cutter.add(pcm, tuple(frames)))

    async def flush(self) -> None:
        """Send held sound, with silence up to a whole second; raises as `append` does."""
        self._check()
        await self._send(self._cutter.rest())

    async def interrupt(self) -> None:
        """Make the model stop speaking at once; raises as `append` does.

        Without a request for it in the dialect, held sound is sent with `force_listen`, and with
        silence up to 250 ms.
        """
        if self.raw.dialect in ("legacy-duplex", "live"):  # the latter has no message for it
            self._check_open()
            await self.raw.interrupt()
        else:
            self._check()
            await self.raw.append(self._cutter.at_once())

    async def pause(self, timeout_s: float | None = None) -> None:
        """Pause the session; `Paused` is the answer. Only in `legacy-duplex`.

        The server ends a pause longer than `timeout_s`; None takes the server's own.

        Raises:
            LocalProtocolError: the dialect has no pause, or the session is paused.
            SessionClosedError: the session is over.
        """
        self._check_open()
        await self.raw.pause(timeout_s)

    async def resume(self) -> None:
        """Go on after a pause; `Resumed` is the answer. Raises as `pause` does."""
        self._check_open()
        await self.raw.resume()

    async def close(self, reason: str | None = None) -> None:
        """Ask for the session's end; its last events, and `Closed`, are still to be read.

        Held sound is lost without `flush`. The reason has at most 64 characters, in some dialects.

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
        return message

    async def leave(self) -> None:
        """Ask for the session's end, if it is open; `antiphon.connect` calls it."""
        await say_goodbye(self.raw)

    async def _send(self, appends: list[Append]) -> None:
        for append in appends:
            is_live = self.raw.dialect == "live"
            await self.raw.say(AppendSound(pcm16=to_pcm16(append.pcm)) if is_live else append)

    def _check_open(self) -> None:
        if self.raw.ended is not None:
            raise SessionClosedError(CLOSE_NORMAL, self.raw.end_reason)

    def _check(self) -> None:
        self._check_open()
        if not self.raw.can_append:  # before the cutter takes sound that would be lost
            raise LocalProtocolError(f"sound in state {self.raw.connection.gate}")


async def say_goodbye(raw: ClientSession) -> None:
    """Ask for a session's end in a bounded time, if it is open and can be closed."""
    if raw.connection.gate is Gate.CLOSED:
        return
    with anyio.move_on_after(CLOSE_WAIT_S), suppress(ClientError):
        await raw.close()
