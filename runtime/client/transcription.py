"""A transcription in the SDK: sound in, its text out while it comes.

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

from typing import Final

import numpy as np

from protocol.values.errors import ErrorCode
from protocol.values.messages import Created, ErrorReport, TranscriptDelta, TranscriptDone

from .duplex import Samples, to_pcm
from .errors import ReportedError
from .session import ClientSession

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
        pcm16 = to_pcm16(pcm)
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


def to_pcm16(pcm: Samples) -> bytes:
    """Samples as signed 16-bit LE, clipped at full scale; raises `LocalProtocolError`."""
    samples = np.frombuffer(to_pcm(pcm), "<f4")
    pcm16: bytes = np.rint(samples.clip(-1, 1) * PCM16_MAX).astype("<i2").tobytes()
    return pcm16
