"""A sound file dictated to a server: sent in one task, and its text shown in another.

A file that is longer than an utterance may be is several: a model's context holds some ten minutes.
Of these the next is sent while the one before is being heard, and no more, so that the server keeps
two at most, however long the file is. In real time a second is sent each second.

A server that keeps less says so of each piece that it did not keep. A transcript of the rest would
have holes, so the first such piece ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

import anyio

from protocol.errors import ErrorCode
from protocol.messages import ErrorReport, TranscriptDelta, TranscriptDone
from protocol.model import UNIT_BYTES

from ..client.errors import ClientError, SessionClosedError
from ..client.sdk import transcribe
from ..client.transcription import TranscriptionSession

UTTERANCE_S_MAX: Final = 300
"""Half of what a context of 8192 holds, and of two in flight a third of what a server keeps."""
SLOWER: Final = "--realtime sends no faster than speech"
UTTERANCES_IN_FLIGHT: Final = 2
"""One that is heard, and one that waits behind it."""


class Shown(Protocol):
    """Shows a transcript."""

    def hears(self, delta: TranscriptDelta) -> None:
        """Show a piece of text."""

    def ends(self, done: TranscriptDone) -> None:
        """Show the end of an utterance."""

    def fails(self, report: ErrorReport) -> None:
        """Show an error; the session goes on."""


def cut_utterances(pcm: bytes, seconds: int = UTTERANCE_S_MAX) -> tuple[bytes, ...]:
    """Cut sound into utterances; joined, they are the sound.

    Args:
        pcm: float32 LE, 16 kHz mono.
        seconds: the length of each but the last.
    """
    size = seconds * UNIT_BYTES
    return tuple(pcm[start : start + size] for start in range(0, len(pcm), size))


async def dictate(
    url: str,
    utterances: Sequence[bytes],
    shown: Shown,
    *,
    model: str,
    key: str | None = None,
    realtime: bool = False,
) -> bool:
    """Have a server transcribe sound.

    Args:
        url: its address.
        utterances: float32 LE, 16 kHz mono, each within the model's context.
        shown: is told what comes.
        model: by a name that the server knows it by.
        key: the API key, where it asks for one.
        realtime: send a second each second; else as fast as it goes.

    Returns:
        Whether all of it was transcribed: no utterance had an error.

    Raises:
        ClientError: the server could not be reached, refused, has no such model, or ended it; or it
            did not keep all of the sound.
    """
    async with transcribe(url, model=model, key=key) as session:
        places = anyio.Semaphore(UTTERANCES_IN_FLIGHT)
        failure: ClientError | None = None
        whole = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(_send, session, utterances, places, realtime=realtime))
            try:
                whole = await _show(session, len(utterances), shown, places)
            except ClientError as error:
                failure = error  # raised as it is, and not within a group
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return whole


async def _send(
    session: TranscriptionSession,
    utterances: Sequence[bytes],
    places: anyio.Semaphore,
    *,
    realtime: bool,
) -> None:
    with suppress(SessionClosedError):  # what is read says why
        await _send_all(session, utterances, places, realtime=realtime)


async def _send_all(
    session: TranscriptionSession,
    utterances: Sequence[bytes],
    places: anyio.Semaphore,
    *,
    realtime: bool,
) -> None:
    due_s = anyio.current_time()
    for utterance in utterances:
        await places.acquire()
        for start in range(0, len(utterance), UNIT_BYTES):
            await session.append(utterance[start : start + UNIT_BYTES])
            if realtime:
                due_s += 1
                await anyio.sleep_until(due_s)
        await session.finish()


async def _show(
    session: TranscriptionSession, count: int, shown: Shown, places: anyio.Semaphore
) -> bool:
    left, whole = count, True
    while left:
        match await anext(session):
            case TranscriptDelta() as delta:
                shown.hears(delta)
            case TranscriptDone() as done:
                shown.ends(done)
                left -= 1
                places.release()
            case ErrorReport() as report:
                if report.code == ErrorCode.BUFFER_FULL:
                    raise ClientError(f"{report.message}; {SLOWER}")
                shown.fails(report)
                whole = False
    return whole
