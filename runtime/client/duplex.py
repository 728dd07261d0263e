"""Sessions of sound in the SDK: duplex ones, and transcriptions.

A duplex session: sound in, typed events out, until it is closed.

One task sends and one receives. Events are the canonical messages (`protocol.values.messages`)
after `session.created`: `Listen`, `Speech`, `ToolCalled`, `GoingAway`, `ErrorReport`, `Closed`, and
in `legacy-duplex` `Paused`, `Resumed` and `Interrupted`; in `live` a second's text and sound are
two `Speech`, and there are `LiveAnswer`s. Only `Closed` ends a session; any other end raises. No
pacing: send a second of a file each second.

`UnitCutter` cuts sound of any length into appends that end where the server's units end; a rest
waits for more, for `flush`, or for `interrupt`:

- The server takes 250 ms to 10 s an append and joins them to units of one second. `UnitCutter`
  sends whole seconds and keeps the rest. Joined appends equal the added sound, except for the
  silence of `rest`.
- Frames belong to the unit of their sound's last sample, as on the server; the newest `FRAMES_MAX`
  of a unit are sent.
- After a rest that was sent early, the next append ends that unit.

A transcription: sound in, its text out while it comes.

    async with antiphon.transcribe(url) as session:
        await session.append(pcm)              # any amount of float32, 16 kHz mono
        await session.finish()                 # that was the utterance
        async for event in session:
            match event:
                case TranscriptDelta(text=text): print(text, end="", flush=True)
                case TranscriptDone(): break

One task sends and one receives. An utterance begins with its first sound and ends with `finish`.
Its `TranscriptDone` follows the deltas whose joined texts are its text. An `ErrorReport` does not
end the session: after `context_full` or `inference_error` the utterance ends with its text so far;
sound refused with `buffer_full` is lost. An unknown model is raised. 003 has no close: leaving the
block closes the connection. No pacing: a server keeps some 17 minutes of sound, and an utterance
must fit the model's context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, Final

import anyio
import numpy as np
import orjson
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from protocol.values import messages as ms
from protocol.values.errors import CLOSE_NORMAL, ErrorCode
from protocol.values.limits import APPEND_SAMPLES_MIN, FRAMES_MAX, INPUT_CHARS_MAX, Mode
from protocol.values.messages import Created, ErrorReport, TranscriptDelta, TranscriptDone
from protocol.values.model import SAMPLE_BYTES, UNIT_SAMPLES, ToolCall, ToolResult
from protocol.values.openai import LiveAnswer
from protocol.values.requests import Append, AppendSound, TellModel
from protocol.values.state import Gate
from protocol.wire.audio import to_pcm16

from .errors import ClientError, LocalProtocolError, ReportedError, SessionClosedError
from .session import ClientSession
from .websocket import CLOSE_WAIT_S

# -- cutting sound ---------------------------------------------------------------------------------


Samples = bytes | bytearray | memoryview | NDArray[np.floating[Any]]
"""float32 LE as bytes, or an array of shape (samples,); 16 kHz mono, in [-1, 1]."""


class UnitCutter:
    """Cuts one session's sound."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._frames: list[bytes] = []
        self._sent_samples = 0

    @property
    def held_samples(self) -> int:
        """Samples that wait for more."""
        return len(self._rest) // SAMPLE_BYTES

    def add(self, pcm: Samples, frames: tuple[bytes, ...] = ()) -> list[Append]:
        """Add sound and its JPEG frames; return the appends that they complete.

        `LocalProtocolError`: the sound is invalid, and nothing was added.
        """
        self._rest += to_pcm(pcm)
        appends = []
        while len(self._rest) >= (size := self._next_bytes()):
            if len(self._rest) == size:
                self._see(frames)
                frames = ()
            appends.append(self._cut(size))
        self._see(frames)
        return appends

    def rest(self) -> list[Append]:
        """The rest, with silence up to the end of its unit; empty for no rest."""
        if not self._rest and not self._frames:
            return []
        self._rest += bytes(self._next_bytes() - len(self._rest))
        return [self._cut(len(self._rest))]

    def at_once(self) -> Append:
        """The rest, with silence up to 250 ms, to make the model listen."""
        short = APPEND_SAMPLES_MIN * SAMPLE_BYTES - len(self._rest)
        self._rest += bytes(max(short, 0))
        return self._cut(len(self._rest), force_listen=True)

    def _see(self, frames: tuple[bytes, ...]) -> None:
        self._frames = [*self._frames, *frames][-FRAMES_MAX:]

    def _next_bytes(self) -> int:
        """Bytes to the end of a unit, and no fewer than an append may have."""
        samples = UNIT_SAMPLES - self._sent_samples % UNIT_SAMPLES
        return SAMPLE_BYTES * (samples + (UNIT_SAMPLES if samples < APPEND_SAMPLES_MIN else 0))

    def _cut(self, size: int, *, force_listen: bool = False) -> Append:
        pcm = bytes(self._rest[:size])
        del self._rest[:size]
        frames, self._frames = tuple(self._frames), []
        self._sent_samples += size // SAMPLE_BYTES
        return Append(pcm=pcm, frames=frames, force_listen=force_listen)


def to_pcm(samples: Samples) -> bytes:
    """Sound as a message carries it, float32 LE; `LocalProtocolError` if invalid or not finite."""
    if isinstance(samples, np.ndarray):
        if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
            kind = f"{samples.dtype} of shape {samples.shape}"
            raise LocalProtocolError(f"samples are {kind}, expected float32 of shape (samples,)")
        array = samples.astype("<f4", copy=False)
    elif len(data := _bytes_of(samples)) % SAMPLE_BYTES:
        raise LocalProtocolError(f"{len(data)} bytes of audio, expected whole float32 samples")
    else:
        array = np.frombuffer(data, "<f4")
    if not np.isfinite(array).all():
        raise LocalProtocolError("samples hold NaN or infinity")
    return array.tobytes()


def _bytes_of(samples: bytes | bytearray | memoryview) -> bytes:
    """The bytes of a buffer; a number is refused, though `bytes` accepts one."""
    try:
        return memoryview(samples).tobytes()
    except TypeError:
        kind = type(samples).__name__
        raise LocalProtocolError(f"samples are a {kind}, expected an array or bytes") from None


# -- the session -----------------------------------------------------------------------------------


Event = (
    ms.Listen
    | ms.Speech
    | ms.ToolCalled
    | ms.Paused
    | ms.Resumed
    | ms.Interrupted
    | ms.GoingAway
    | ms.ErrorReport
    | ms.Closed
    | LiveAnswer
)
"""The events of a session after its creation."""


Function = Callable[..., object]
"""What a tool runs: its arguments come by name. It returns text, or what JSON can hold; or an
awaitable of that."""


async def answer_call(session: ClientSession, call: ToolCall, function: Function) -> None:
    """Run the function of a call, and return what it came to; its exception is the result too."""
    try:
        made = function(**orjson.loads(call.arguments))
        made = await made if isawaitable(made) else made
        output = made if isinstance(made, str) else json.dumps(made, ensure_ascii=False)
    except Exception as error:
        output = f"error: {error}"
    with suppress(ClientError):  # the session is over, or its log
        await session.send(ToolResult(call_id=call.id, output=output[:INPUT_CHARS_MAX]))


class DuplexSession:
    """A session that is set up; `antiphon.connect` makes and closes it.

    `created` has its id, whether it is recorded, and its prompt's length; `raw` is the session
    below. `tools` are run in `tasks` while the events are read.
    """

    def __init__(
        self,
        raw: ClientSession,
        *,
        mode: Mode,
        created: ms.Created,
        tools: Mapping[str, Function] = MappingProxyType({}),
        tasks: TaskGroup | None = None,
    ) -> None:
        self.raw = raw
        self.created = created
        self._tools, self._tasks = tools, tasks
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

    async def give_result(self, call: ToolCall, output: str) -> None:
        """Return what a tool of no function came to; raises as `pause` does."""
        self._check_open()
        await self.raw.send(ToolResult(call_id=call.id, output=output))

    async def tell(self, text: str) -> None:
        """Tell the model of an event, with the next second of sound; raises as `pause` does."""
        self._check_open()
        await self.raw.send(TellModel(text=text))

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
        if isinstance(message, ms.ToolCalled) and self._tasks is not None:
            function = self._tools.get(message.call.name)
            if function is not None:
                self._tasks.start_soon(answer_call, self.raw, message.call, function)
        return message

    async def leave(self) -> None:
        """Ask for the session's end, if it is open; `antiphon.connect` calls it."""
        await close_politely(self.raw)

    async def _send(self, appends: list[Append]) -> None:
        for append in appends:
            is_live = self.raw.dialect == "live"
            await self.raw.send(AppendSound(pcm16=to_pcm16(append.pcm)) if is_live else append)

    def _check_open(self) -> None:
        if self.raw.ended is not None:
            raise SessionClosedError(CLOSE_NORMAL, self.raw.end_reason)

    def _check(self) -> None:
        self._check_open()
        if not self.raw.can_append:  # before the cutter takes sound that would be lost
            raise LocalProtocolError(f"sound in state {self.raw.connection.gate}")


async def close_politely(raw: ClientSession) -> None:
    """Ask for a session's end in a bounded time, if it is open and can be closed."""
    if raw.connection.gate is Gate.CLOSED:
        return
    with anyio.move_on_after(CLOSE_WAIT_S), suppress(ClientError):
        await raw.close()


# -- transcriptions --------------------------------------------------------------------------------

PCM16_MAX: Final = 32_767
APPEND_BYTES_MAX: Final = 320_000
"""Ten seconds a message: far below the server's limit, and large enough to cost little."""
MODEL_ERRORS: Final = frozenset({ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_NOT_VALIDATED})

TranscriptEvent = TranscriptDelta | TranscriptDone | ErrorReport
"""The events of a transcription."""


class TranscriptionSession:
    """A transcription whose model is chosen; `antiphon.transcribe` makes and closes it."""

    def __init__(self, raw: ClientSession, *, created: Created) -> None:
        self.raw = raw
        self.created = created
        self._is_begun = False

    async def append(self, pcm: Samples) -> None:
        """Send sound of the utterance; the first begins it.

        Args:
            pcm: any amount; float32, shape (samples,), 16 kHz mono, in [-1, 1], or its bytes (LE).

        Raises:
            LocalProtocolError: the sound is invalid.
            SessionClosedError: the session is over.
        """
        pcm16 = pcm16_of(pcm)
        if not self._is_begun:
            self._is_begun = True
            await self.raw.commit()
        for start in range(0, len(pcm16), APPEND_BYTES_MAX):
            await self.raw.append_sound(pcm16[start : start + APPEND_BYTES_MAX])

    async def finish(self) -> None:
        """End the utterance; its `TranscriptDone` follows. Raises `SessionClosedError`."""
        self._is_begun = False
        await self.raw.commit(final=True)

    def __aiter__(self) -> TranscriptionSession:
        return self

    async def __anext__(self) -> TranscriptEvent:
        """Wait for the next event.

        Raises:
            ReportedError: the server does not have the model.
            SessionRefusedError: it has no place for the session.
            SessionClosedError: the session is over.
            RemoteProtocolError: the server broke the protocol.
        """
        while True:
            message = await self.raw.receive_more()
            match message:
                case ErrorReport(code=code) if code in MODEL_ERRORS:
                    raise ReportedError(message)
                case TranscriptDelta() | TranscriptDone() | ErrorReport():
                    return message


def pcm16_of(pcm: Samples) -> bytes:
    """Samples as signed 16-bit LE, clipped at full scale; raises `LocalProtocolError`."""
    samples = np.frombuffer(to_pcm(pcm), "<f4")
    pcm16: bytes = np.rint(samples.clip(-1, 1) * PCM16_MAX).astype("<i2").tobytes()
    return pcm16
